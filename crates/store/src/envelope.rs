//! The frame that map files and checkpoint files share.
//!
//! ```text
//!   0  8 magic     8  4 version     12 .. content     end-32 32 BLAKE3 of everything before
//! ```
//!
//! Invariant: this much is the same in all versions, so that a file of a later version is told from
//! a damaged one.

use crate::config::FORMAT_VERSION;
use crate::{Error, Result};

/// The first bytes of a kind of file.
pub type Magic = [u8; 8];

const CHECK_BYTES: usize = 32;

/// The version of maps and checkpoints that know of disks; those without are written as before.
pub const WITH_DISKS: u32 = 2;

/// The beginning of a file; the content is appended to it.
pub fn begin(magic: Magic) -> Vec<u8> {
    begin_version(magic, FORMAT_VERSION)
}

/// The same for a map or a checkpoint, which may know of disks.
pub fn begin_with(magic: Magic, disks: bool) -> Vec<u8> {
    begin_version(magic, if disks { WITH_DISKS } else { FORMAT_VERSION })
}

fn begin_version(magic: Magic, version: u32) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes
}

/// Appends the checksum.
pub fn finish(mut bytes: Vec<u8>) -> Vec<u8> {
    let hash = blake3::hash(&bytes);
    bytes.extend_from_slice(hash.as_bytes());
    bytes
}

/// Checks the frame and returns the content; `object` is how errors call the file.
pub fn open<'a>(bytes: &'a [u8], magic: Magic, object: &str) -> Result<&'a [u8]> {
    let damaged = |problem: &str| Error::damaged(object, problem);
    let split = bytes.len().checked_sub(CHECK_BYTES).ok_or_else(|| damaged("too short"))?;
    let (covered, hash) = bytes.split_at(split);
    if !covered.starts_with(&magic) {
        return Err(damaged("does not begin as such a file does"));
    }
    if blake3::hash(covered).as_bytes() != hash {
        return Err(damaged("its checksum does not match"));
    }
    let (version, content) = covered
        .get(magic.len()..)
        .and_then(|rest| rest.split_first_chunk::<4>())
        .ok_or_else(|| damaged("too short"))?;
    match u32::from_le_bytes(*version) {
        FORMAT_VERSION | WITH_DISKS => Ok(content),
        found if found > WITH_DISKS => {
            Err(Error::LaterVersion { object: object.into(), found, known: WITH_DISKS })
        }
        other => Err(damaged(&format!("format version {other} never existed"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_version_is_told_from_a_damaged_file() {
        let mut bytes = begin(*b"KFTEST\r\n");
        bytes.extend_from_slice(b"content");
        assert_eq!(open(&finish(bytes.clone()), *b"KFTEST\r\n", "x").unwrap(), b"content");
        bytes[8] = 3;
        let error = open(&finish(bytes.clone()), *b"KFTEST\r\n", "x").unwrap_err();
        assert!(matches!(error, Error::LaterVersion { found: 3, known: WITH_DISKS, .. }));
        let mut flipped = finish(bytes);
        flipped[8] = 1;
        assert!(matches!(open(&flipped, *b"KFTEST\r\n", "x"), Err(Error::Damaged { .. })));
    }
}
