//! The quarantine: damaged files under another name, which only the user reads and removes.
//!
//! ```text
//!   packs/00000005.pack ─▶ quarantine/packs-00000005.pack (.1, .2 if that exists) ─▶ the first is removed
//!   quarantine/README      explains the folder
//! ```
//!
//! Invariants: the copy is durable before the file is removed. A crash in between leaves both, and
//! the next repair copies the file again. The bytes are copied as they are, those of an encrypted
//! store encrypted: damaged ones cannot be decrypted, and a file that is put back under its old
//! name is what it was. Only bytes in bad sectors become zero. If bytes cannot be read for another
//! reason, the file stays.

use crate::files::{NewFile, StoreFile};
use crate::open_store::OpenStore;
use crate::{Error, Result};

/// The name of the folder of quarantined files in the store.
pub const FOLDER: &str = "quarantine";
const README: &str = "quarantine/README";
const TEXT: &str = "Files that `keyframe check --repair` has taken out of the store, because they are damaged or need what is.\n\
                    Keyframe does not read them. Remove them when you do not need them any more.\n";
/// The bytes that are copied at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// The bytes that are read at once near a bad sector: a page of the page cache, which the kernel
/// reads as a whole.
const PIECE_BYTES: usize = 4096;
/// The names that are tried for one file.
const NAMES_MAX: u32 = 1000;

impl OpenStore {
    /// Moves the file `name` to the quarantine and returns its new name. Returns `None` if the file
    /// does not exist. Error: the backend fails.
    pub fn set_aside(&self, name: &str) -> Result<Option<String>> {
        let place = self.backend.ciphertext().unwrap_or_else(|| self.backend.clone());
        let file = match place.open(name) {
            Err(e) if e.is_not_found() => return Ok(None),
            other => other?,
        };
        if self.backend.open(README).is_err() {
            // This also makes the folder.
            self.backend.put(README, TEXT.as_bytes())?;
        }
        let first = format!("{FOLDER}/{}", name.replace('/', "-"));
        let names = (1..NAMES_MAX).map(|n| format!("{first}.{n}"));
        let (mut found, mut taken) = (None, None);
        for to in std::iter::once(first.clone()).chain(names) {
            match place.create(&to) {
                Err(e) if e.is_already_exists() => taken = Some(e),
                other => {
                    found = Some((other?, to));
                    break;
                }
            }
        }
        let Some((mut copy, to)) = found else {
            return Err(taken.unwrap_or_else(|| Error::damaged(first, "no name is free")));
        };
        if let Err(error) = copy_whole(&file, &mut copy) {
            // The original stays.
            let _ = place.remove(&to);
            return Err(error);
        }
        place.remove(name)?;
        Ok(Some(to))
    }
}

/// Copies all bytes of `file`, and makes the copy durable.
fn copy_whole(file: &StoreFile, copy: &mut NewFile) -> Result<()> {
    let len_bytes = file.len_bytes()?;
    let (mut at, mut buffer) = (0, Vec::new());
    while at < len_bytes {
        buffer.resize((len_bytes - at).min(CHUNK_BYTES) as usize, 0);
        read_beside_bad_sectors(file, at, &mut buffer)?;
        copy.append(&buffer)?;
        at += buffer.len() as u64;
    }
    copy.sync()
}

/// Fills `buffer` from byte `at` of the file on. Bytes in bad sectors become zero.
fn read_beside_bad_sectors(file: &StoreFile, at: u64, buffer: &mut [u8]) -> Result<()> {
    if file.read_at(at, buffer).is_ok() {
        return Ok(());
    }
    for (at, piece) in (at..).step_by(PIECE_BYTES).zip(buffer.chunks_mut(PIECE_BYTES)) {
        match file.read_at(at, piece) {
            Err(error) if error.is_bad_sector() => piece.fill(0),
            other => other?,
        }
    }
    Ok(())
}
