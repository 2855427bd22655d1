//! The directory of the spills, on this host. Each slot of a writer has its own.
//!
//! ```text
//!   FOLDER/32 hexadecimal digits.index     a spill
//!          .new-...                        one that is being written; the next writer of the slot removes a leftover
//! ```
//!
//! Invariant: no content of the directory is an error. A file that cannot be read as a spill of
//! this store is removed.

use crate::spill::{Bond, Spill, SpillWriter, TEMPORARY, memory_bytes};
use keyframe_bytes::hex::to_hex;
use keyframe_store_format::pack::PackSeal;
use std::io;
use std::path::{Path, PathBuf};

const SUFFIX: &str = ".index";

/// The directory in which a store's spills lie.
#[derive(Clone, Debug)]
pub struct Folder {
    /// The path of the directory, which is created for the first spill.
    pub path: PathBuf,
    /// The store that the spills belong to, and the key of their masks.
    pub bond: Bond,
}

impl Folder {
    /// Opens all spills, those of the newest packs first. Their fences and filters take at most
    /// `bytes_max` bytes of memory: older files that do not fit are removed.
    pub fn spills(&self, mut bytes_max: usize) -> Vec<(PathBuf, Spill)> {
        let Ok(entries) = std::fs::read_dir(&self.path) else { return Vec::new() };
        let mut files: Vec<_> = entries
            .flatten()
            .map(|entry| (entry.metadata().and_then(|about| about.modified()).ok(), entry.path()))
            .collect();
        files.sort_unstable_by(|a, b| b.cmp(a));
        let mut spills = Vec::new();
        for (_, path) in files {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with(TEMPORARY) {
                remove(&path);
            } else if name.ends_with(SUFFIX) {
                match Spill::open(&path, &self.bond, bytes_max) {
                    Ok(spill) => {
                        bytes_max = bytes_max.saturating_sub(memory_bytes(spill.entries()));
                        spills.push((path, spill));
                    }
                    Err(_) => remove(&path),
                }
            }
        }
        let newest = |spill: &Spill| spill.packs().iter().map(|(pack, _)| *pack).max();
        spills.sort_by_key(|(_, spill)| std::cmp::Reverse((newest(spill), spill.entries())));
        spills
    }

    /// Begins a spill of at most `entries_max` entries. Error: the file cannot be written.
    pub fn begin(&self, entries_max: usize) -> io::Result<SpillWriter> {
        SpillWriter::new(&self.path, &self.bond, entries_max)
    }

    /// Completes a spill that covers `packs`, and gives it its name. Returns its path. Error: the
    /// file cannot be written.
    pub fn finish(
        &self,
        writer: SpillWriter,
        packs: Vec<(u32, PackSeal)>,
    ) -> io::Result<(PathBuf, Spill)> {
        let name: [u8; 16] = keyframe_store_backend::random_bytes().map_err(io::Error::other)?;
        let path = self.path.join(to_hex(&name) + SUFFIX);
        let spill = writer.finish(&path, packs)?;
        Ok((path, spill))
    }
}

/// Removes the spill at `path`. If that fails, the next writer removes it.
pub fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}
