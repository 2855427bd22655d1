//! The folders of a store: which checkpoints, maps and working sets there are, and their sizes.

use crate::open_store::OpenStore;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;

/// The most attempts to list a folder that changes meanwhile.
const LISTINGS_MAX: u32 = 16;

impl OpenStore {
    /// Returns the numbers of the sealed checkpoints, in rising order. Error: the folder cannot be
    /// listed.
    pub fn checkpoint_ids(&self) -> Result<Vec<CheckpointId>> {
        let files = self.backend.list(layout::CHECKPOINTS)?;
        let mut ids: Vec<CheckpointId> =
            files.iter().filter_map(|f| layout::parse_checkpoint(f)).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// Returns the numbers of the checkpoints that were sealed at one instant, in rising order.
    /// Lists the folder until two listings are equal, because a single listing of a changing folder
    /// may miss files. Error: the folder cannot be listed.
    pub fn settled_checkpoint_ids(&self) -> Result<Vec<CheckpointId>> {
        let mut before = self.checkpoint_ids()?;
        for _ in 0..LISTINGS_MAX {
            let now = self.checkpoint_ids()?;
            if now == before {
                break;
            }
            before = now;
        }
        Ok(before)
    }

    /// Returns the numbers of all maps, in rising order. Error: the folder cannot be listed.
    pub fn map_ids(&self) -> Result<Vec<u64>> {
        let listed = self.backend.list(layout::MAPS)?;
        let mut ids: Vec<u64> = listed.iter().filter_map(|file| layout::parse_map(file)).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// Returns the numbers of the checkpoints that have working sets. Error: the folder cannot be
    /// listed.
    pub fn workset_ids(&self) -> Result<Vec<CheckpointId>> {
        let listed = self.backend.list(layout::WORKSETS)?;
        Ok(listed.iter().filter_map(|file| layout::parse_workset(file)).collect())
    }

    /// Returns the length of a file, in bytes; 0 if the file does not exist.
    pub fn len_of(&self, name: &str) -> u64 {
        self.backend.open(name).and_then(|file| file.len_bytes()).unwrap_or(0)
    }

    /// Returns the size of all files of the folder `folder`, in bytes. Errors: the folder cannot be
    /// listed; a file cannot be read.
    pub fn folder_bytes(&self, folder: &str) -> Result<u64> {
        let backend = &self.backend;
        let mut sum = 0;
        for file in backend.list(folder)? {
            match backend.open(&format!("{folder}/{file}")) {
                // Removed since the listing.
                Err(e) if e.is_not_found() => {}
                other => match other?.len_bytes() {
                    // An encrypted file that is damaged has no known length.
                    Err(Error::Damaged { .. }) => {}
                    len => sum += len?,
                },
            }
        }
        Ok(sum)
    }
}
