//! The RAM of a rollback: what differs from the target is written, and nothing else is read.
//!
//! ```text
//!   pages in which a known state and the target differ ─┐
//!   pages written since that state ─────────────────────┴─▶ compared with the target;
//!                                                           those that differ are written
//! ```
//!
//! The known state is the newest sealed checkpoint, or the target of the last rollback. RAM equals
//! it except in pages that the tracker has reported since. So RAM can differ from the target in
//! those pages, and in the pages in which the known state and the target differ. The engine finds
//! the latter while the VM runs. If the tracker fails, it reports every page.

use super::{Engine, Error, Instant, RollbackError, step};
use crate::target_ram::{COMPARISONS, TargetRam, used, write_wrong_pages};
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{PageIndex, PageRange, PageSet, RamLayout, elapsed_ns};
use keyframe_vmm::RollbackTarget;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;

/// The most pages that QEMU loads from memory: 64 MiB. It loads more from a file on disk.
const PAGES_IN_MEMORY_MAX: usize = 16 << 10;

impl Engine<'_> {
    /// Loads the devices and `pages` of `to`, and writes all further pages that then differ. Adds
    /// these to `pages`.
    pub(super) fn become_checkpoint(
        &mut self,
        to: &LoadedCheckpoint,
        pages: &mut Vec<PageIndex>,
    ) -> Result<(), RollbackError> {
        let began = Instant::now();
        let layout = &to.meta.ram;
        let loaded = in_use(layout, pages);
        let in_memory = loaded.len() <= PAGES_IN_MEMORY_MAX;
        let held = if in_memory { &loaded[..] } else { &[] };
        let store_failed = |e| Error::store(self.store.path(), e);
        let ram = TargetRam::new(to, held).map_err(store_failed)?;
        let target = RollbackTarget {
            machine_type: &to.meta.machine.machine_type,
            layout,
            ram: &ram,
            pages: &loaded,
            device_state: &to.device_state,
        };
        let file = self.scratch_file(in_memory)?;
        let fault = self.options.fault.clone();
        let mut told = || {
            if let Some(fault) = &fault {
                fault.rolling_back();
            }
        };
        self.vm()?.roll_back(&target, file, &mut told)?;
        self.keep_still()?;
        self.note_phase(|phases| phases.load_ns += elapsed_ns(began));
        let began = Instant::now();
        let mut doubtful = self.doubtful_pages(layout, pages);
        let mut wrong = 0;
        for _ in 0..COMPARISONS {
            let others = self.write_wrong_pages(&ram, layout, &doubtful)?;
            self.keep_still()?;
            if others.is_empty() {
                pages.sort_unstable();
                pages.dedup();
                self.note_phase(|phases| phases.compare_ns += elapsed_ns(began));
                return Ok(());
            }
            // What was right stays so until it is written: the tracker tells.
            doubtful = self.copying.cycle.written_since_look();
            for page in &others {
                doubtful.insert(*page);
            }
            wrong = others.len() as u64;
            pages.extend(others);
        }
        Err(RollbackError::PagesDiffer { pages: wrong, checkpoint: to.id })
    }

    /// Returns an empty file for a state that QEMU loads.
    fn scratch_file(&self, in_memory: bool) -> Result<File, RollbackError> {
        if in_memory {
            let made = memfd_create("keyframe-rollback", MemfdFlags::CLOEXEC);
            return made.map(File::from).map_err(|e| step("make a file in memory")(Box::new(e)));
        }
        let directory =
            self.store.local_folder().map_err(|e| Error::store(self.store.path(), e))?;
        let made = tempfile::tempfile_in(&directory);
        Ok(made.map_err(|e| Error::file("make a temporary file in", &directory, e))?)
    }

    /// Returns the pages in which the paused VM can differ from a checkpoint with the RAM blocks
    /// `layout`: `pages`, those that were written since the newest checkpoint, and what the newest
    /// checkpoint lacks.
    fn doubtful_pages(&mut self, layout: &RamLayout, pages: &[PageIndex]) -> PageSet {
        let mut doubtful = self.copying.cycle.written_in_pause();
        for page in pages {
            doubtful.insert(*page);
        }
        // More of such a block may be in use than at the newest checkpoint, which lacks that part.
        for (number, block) in layout.blocks().iter().enumerate() {
            if block.used_bytes < block.total_bytes {
                doubtful.insert_range(used(layout, number));
            }
        }
        if self.options.audit.is_some() {
            doubtful.insert_range(PageRange::new(PageIndex(0), layout.len_pages()));
        }
        doubtful
    }

    /// Writes those of the pages `doubtful` in which the paused VM differs from `ram`, and returns
    /// them.
    fn write_wrong_pages(
        &mut self,
        ram: &TargetRam<'_>,
        layout: &RamLayout,
        doubtful: &PageSet,
    ) -> Result<Vec<PageIndex>, RollbackError> {
        let doubtful = in_use(layout, &doubtful.iter().collect::<Vec<_>>());
        let reader = self.copying.strategies.ram().ok_or(Error::NoVm)?;
        let strategies = &self.copying.strategies;
        let mut write = |page, right: &_| strategies.write_page(page, right);
        write_wrong_pages(ram, self.store.path(), &*reader, &mut write, &doubtful)
    }
}

/// Returns those of `pages` that lie in the used part of their RAM block.
fn in_use(layout: &RamLayout, pages: &[PageIndex]) -> Vec<PageIndex> {
    let ranges: Vec<_> = (0..layout.blocks().len()).map(|number| used(layout, number)).collect();
    let is_used = |page: &PageIndex| ranges.iter().any(|r| r.first <= *page && *page < r.end());
    pages.iter().copied().filter(is_used).collect()
}
