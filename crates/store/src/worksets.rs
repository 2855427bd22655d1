//! Working sets: the pages that a VM touched first after it was restored from a checkpoint, in that
//! order. A lazy restore loads them first.
//!
//! A working set is advice only. A missing, damaged or foreign one is ignored, and no checkpoint
//! depends on it. The process that restores a VM writes it, without the writer's lock.
//!
//! If no working set was recorded, the pages written until the next checkpoint of the run take its
//! place.

use crate::open_store::OpenStore;
use crate::{LoadedCheckpoint, Result};
use keyframe_store_backend::layout;
use keyframe_store_format::working_set::{
    WORKING_SET_BYTES_MAX, WORKING_SET_PAGES_MAX, decode, encode,
};
use keyframe_units::PageIndex;

/// The next checkpoint of a run is looked for among this many checkpoints.
const NEXT_MAX: usize = 16;

impl LoadedCheckpoint {
    /// Returns the pages that a VM restored from this checkpoint will probably touch first, in that
    /// order: the recorded working set, or else the pages that the VM wrote until the next
    /// checkpoint. Empty if neither is known.
    pub fn expected_first(&self) -> Vec<PageIndex> {
        self.working_set().or_else(|| self.inner.written_next(self)).unwrap_or_default()
    }

    /// Returns the recorded working set; `None` if there is none.
    pub fn working_set(&self) -> Option<Vec<PageIndex>> {
        let bytes =
            self.inner.backend.read(&layout::workset(self.id), WORKING_SET_BYTES_MAX).ok()?;
        decode(&bytes, self.inner.config.id, self.id, self.meta.ram.len_pages())
    }

    /// Appends the pages `touched` to the checkpoint's working set, for the next restore. Error:
    /// the file cannot be written.
    pub fn keep_working_set(&self, touched: &[PageIndex]) -> Result<()> {
        let space_pages = self.meta.ram.len_pages();
        let mut pages = self.working_set().unwrap_or_default();
        let known = pages.len();
        let mut seen: rustc_hash::FxHashSet<PageIndex> = pages.iter().copied().collect();
        pages.extend(touched.iter().filter(|page| page.0 < space_pages && seen.insert(**page)));
        pages.truncate(WORKING_SET_PAGES_MAX);
        if pages.len() == known {
            return Ok(());
        }
        let file = encode(self.inner.config.id, self.id, space_pages, &pages);
        self.inner.backend.put(&layout::workset(self.id), &file)
    }
}

impl OpenStore {
    /// The pages that changed between a checkpoint and the next one of its run, rising. A few more
    /// if the map of the next one reaches further back. `None` if there is no next one, or its map
    /// is complete.
    fn written_next(&self, of: &LoadedCheckpoint) -> Option<Vec<PageIndex>> {
        let ids = self.checkpoint_ids().ok()?;
        let next = ids.iter().filter(|id| **id > of.id).take(NEXT_MAX).find_map(|id| {
            let meta = self.read_checkpoint(*id).ok()?.meta;
            (meta.run == of.meta.run && meta.ram.same_space(&of.meta.ram)).then_some(*id)
        })?;
        let map = self.read_map(next.0).ok()?;
        map.header.parent?;
        let ram_pages = of.meta.ram.len_pages();
        Some(
            map.pages().take_while(|page| page.0 < ram_pages).take(WORKING_SET_PAGES_MAX).collect(),
        )
    }
}
