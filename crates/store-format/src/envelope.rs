//! The frame around maps, checkpoints and other small files.
//!
//! ```text
//!   0  8 magic     8  4 version     12 .. content     end-32 32 BLAKE3 of everything before
//! ```
//!
//! Invariant: every version of the format has this frame, so a reader distinguishes another version
//! from damage.

use crate::error::{FormatError, Result};
use crate::identity::FORMAT_VERSION;

/// The first bytes of one kind of file.
pub type Magic = [u8; 8];

const CHECK_BYTES: usize = 32;

/// Returns the head of a file. The caller appends the content.
pub fn begin(magic: Magic) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    bytes
}

/// Appends the checksum to `bytes`, the head and the content of a file, and returns the whole file.
pub fn finish(mut bytes: Vec<u8>) -> Vec<u8> {
    let hash = blake3::hash(&bytes);
    bytes.extend_from_slice(hash.as_bytes());
    bytes
}

/// Checks magic, version and checksum of a file, and returns the content between them; `object`
/// names the file in errors.
///
/// Errors: [`FormatError::Damaged`](crate::FormatError::Damaged) if the magic or the checksum is
/// wrong, [`FormatError::OtherVersion`](crate::FormatError::OtherVersion) for another version of
/// the format.
pub fn open<'a>(bytes: &'a [u8], magic: Magic, object: &str) -> Result<&'a [u8]> {
    let damaged = |problem: &str| FormatError::damaged(object, problem);
    let split = bytes.len().checked_sub(CHECK_BYTES).ok_or_else(|| damaged("too short"))?;
    let (covered, hash) = bytes.split_at(split);
    if !covered.starts_with(&magic) {
        return Err(damaged("its first bytes are not those of such a file"));
    }
    if blake3::hash(covered).as_bytes() != hash {
        return Err(damaged("its checksum does not match"));
    }
    let (version, content) = covered
        .get(magic.len()..)
        .and_then(|rest| rest.split_first_chunk::<4>())
        .ok_or_else(|| damaged("too short"))?;
    match u32::from_le_bytes(*version) {
        FORMAT_VERSION => Ok(content),
        found => Err(FormatError::OtherVersion { object: object.into(), found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_distinguished_from_damage() {
        let mut bytes = begin(*b"KFTEST\r\n");
        bytes.extend_from_slice(b"content");
        assert_eq!(open(&finish(bytes.clone()), *b"KFTEST\r\n", "x").unwrap(), b"content");
        bytes[8] = 3;
        let error = open(&finish(bytes.clone()), *b"KFTEST\r\n", "x").unwrap_err();
        assert!(matches!(error, FormatError::OtherVersion { found: 3, .. }));
        let mut flipped = finish(bytes);
        flipped[8] = 1;
        assert!(matches!(open(&flipped, *b"KFTEST\r\n", "x"), Err(FormatError::Damaged { .. })));
    }
}
