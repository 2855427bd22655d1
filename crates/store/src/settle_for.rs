//! Settling a store for a remote writer, by the checkpoint server that holds its place.
//!
//! A writer sets damaged checkpoints aside when it starts. A server does that itself, so that no
//! client needs the right to remove checkpoints of others.

use crate::config::{Config, STORE_JSON_BYTES_MAX, StoredKeys};
use crate::durability::TornCheckpoint;
use crate::files::StoreFiles;
use crate::open_store::OpenStore;
use crate::writers::OwnSlot;
use crate::{Error, Result};
use keyframe_store_backend::layout::{self, STORE_JSON, UNSYNCED, UNSYNCED_PACKS, WRITERS};
use keyframe_store_backend::{Backend, LockGuard, WriterSlot};
use std::path::Path;
use std::sync::Arc;

/// The slot of the remote writer. Only its number matters here.
#[derive(Debug)]
struct SlotNumber(u32);

impl LockGuard for SlotNumber {}

impl WriterSlot for SlotNumber {
    fn number(&self) -> Option<u32> {
        Some(self.0)
    }

    fn tell(&self, _state: &[u8]) -> keyframe_store_backend::Result<()> {
        Ok(())
    }
}

/// Prepares the store at `path`, whose files are `files`, for a writer in slot number `slot`, while
/// no other writer starts. Returns the checkpoints that power loss had damaged and that were set
/// aside.
///
/// Errors: [`Error::Unsettled`] if an encrypted store has something to settle, because its files
/// cannot be read without its key; files cannot be read, moved or synced.
pub fn settle_for(files: Arc<dyn Backend>, path: &Path, slot: u32) -> Result<Vec<TornCheckpoint>> {
    let files = StoreFiles::from(files);
    let object = files.describe(STORE_JSON);
    let stored = Config::decode(&files.read(STORE_JSON, STORE_JSON_BYTES_MAX)?, &object)?;
    if matches!(stored.keys, StoredKeys::Locked(_)) {
        if has_marks(&files, slot)? {
            return Err(Error::Unsettled { object: path.display().to_string() });
        }
        return Ok(Vec::new());
    }
    let config = stored.unlock(&|_| Ok(None), &object)?;
    let store = OpenStore::new(files, path.to_owned(), config);
    store.with_slot(OwnSlot::new(Box::new(SlotNumber(slot)))).settle()
}

/// True if writers have left marks that have ended, among them the one before in slot `slot`.
fn has_marks(files: &StoreFiles, slot: u32) -> Result<bool> {
    for name in [UNSYNCED, UNSYNCED_PACKS] {
        match files.open(name) {
            Err(error) if error.is_not_found() => {}
            other => return other.map(|_| true),
        }
    }
    let named = |file: &String| layout::parse_mark(&format!("{WRITERS}/{file}"));
    let marked: Vec<u32> = files.list(WRITERS)?.iter().filter_map(named).collect();
    if marked.is_empty() {
        return Ok(false);
    }
    let writers = files.writers()?;
    let is_living = |number: &u32| {
        *number != slot && writers.iter().any(|other| other.lives && other.slot == Some(*number))
    };
    Ok(!marked.iter().all(is_living))
}
