//! Setting files of a store aside: kept under another name, found by nobody, removed by nobody but
//! the user.
//!
//! ```text
//!   packs/00000005.pack ─▶ quarantine/packs-00000005.pack (.1, .2 where that is taken) ─▶ the first is removed
//!   quarantine/README      says what this is
//! ```
//!
//! Invariants: the copy is durable before the file goes. A crash in between leaves both, and the
//! next repair sets it aside once more. The bytes are copied as they lie there, those of an
//! encrypted store encrypted: what is damaged cannot be decrypted, and what is put back under its
//! old name is what it was.

use crate::store::Inner;
use crate::{Error, Result};

/// The folder.
pub const FOLDER: &str = "quarantine";
const README: &str = "quarantine/README";
const TEXT: &str = "Files that `keyframe check --repair` has taken out of the store, because they are damaged or need what is.\n\
                    Nothing reads them. Remove them when nobody is going to look into them any more.\n";
/// What is copied at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Names that are tried for one file.
const NAMES_MAX: u32 = 1000;

impl Inner {
    /// Sets the file `name` aside; returns where it is now, or `None` where there is none.
    pub fn set_aside(&self, name: &str) -> Result<Option<String>> {
        let place = self.backend.ciphertext().unwrap_or_else(|| self.backend.clone());
        let file = match place.open(name) {
            Err(e) if e.is_not_found() => return Ok(None),
            other => other?,
        };
        if self.backend.open(README).is_err() {
            // Makes the folder, too.
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
        let len_bytes = file.len_bytes()?;
        let (mut at, mut buffer) = (0, Vec::new());
        while at < len_bytes {
            buffer.resize((len_bytes - at).min(CHUNK_BYTES) as usize, 0);
            // What the medium does not give is zero in the copy.
            if file.read_at(at, &mut buffer).is_err() {
                buffer.fill(0);
            }
            copy.append(&buffer)?;
            at += buffer.len() as u64;
        }
        copy.sync()?;
        place.remove(name)?;
        Ok(Some(to))
    }
}
