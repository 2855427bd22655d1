//! The RAM of a rollback: what differs from the target is written, and nothing else is read.
//!
//! ```text
//!   pages in which a known state and the target differ ─┐
//!   pages written since that state ─────────────────────┤
//!   pages that a reset of the machine overwrites ───────┴─▶ loaded before the devices; compared with the
//!                                                           target; those that differ are written
//! ```
//!
//! The known state is the newest sealed checkpoint, or the target of the last rollback. RAM equals
//! it except in pages that the tracker has reported since. So RAM can differ from the target in
//! those pages, and in the pages in which the known state and the target differ. The engine finds
//! the latter while the VM runs. If the tracker fails, it reports every page.
//!
//! The VMM resets the machine before it loads the devices, and devices may read RAM as they are
//! loaded. So the pages that the reset overwrites are loaded with the others. They may be many: all of
//! a kernel. The engine reads those of the target while the VM still runs ([`ResetPages`]).

use super::{Engine, Error, Instant, RollbackError, joined, step};
use crate::memory_limits;
use crate::target_ram::{COMPARISONS, HeldPages, TargetRam, used, write_wrong_pages};
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, PageSet, RamLayout, elapsed_ns};
use keyframe_vmm::RollbackTarget;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;

/// The most changed pages that QEMU loads from memory: 64 MiB. It loads more from a file on disk.
const PAGES_IN_MEMORY_MAX: usize = 16 << 10;
/// The most pages of a reset that are held in memory: 256 MiB, as of an Arm guest with a large initial
/// RAM disk. Of more, a rollback reads each from the store while the VM stands.
const RESET_PAGES_MAX: usize = 64 << 10;

/// The copies of a reset's pages that a rollback makes at most: one of the target, one of the state
/// before, one in the file that QEMU loads.
const RESET_COPIES: u64 = 3;

/// The pages that a reset of the machine overwrites.
pub(super) struct ResetPages {
    /// In ascending order, and in use.
    pages: Vec<PageIndex>,
    /// Their content in the target; `None` if memory does not hold it.
    of_target: Option<HeldPages>,
}

/// A checkpoint that the paused VM becomes.
pub(super) struct Becoming<'a> {
    pub checkpoint: &'a LoadedCheckpoint,
    /// What a reset of the machine overwrites.
    pub reset: &'a ResetPages,
    /// True if the checkpoint is the target of the rollback.
    pub is_target: bool,
}

impl Engine<'_> {
    /// Finds the pages that a reset of the machine overwrites, and reads them from `target`. Errors: the
    /// VMM does not tell them; the store cannot be read.
    pub(super) fn reset_pages(
        &mut self,
        target: &LoadedCheckpoint,
    ) -> Result<ResetPages, RollbackError> {
        let layout = &target.meta.ram;
        let told = self.vm()?.vm_mut().reset_pages(layout).map_err(Error::from)?;
        let pages = in_use(layout, &told);
        let needed_bytes = (pages.len() * PAGE_BYTES) as u64 * RESET_COPIES;
        let fit_in_memory = pages.len() <= RESET_PAGES_MAX
            && needed_bytes <= memory_limits::remaining(&[]).bytes / 2;
        let read = fit_in_memory.then(|| HeldPages::read(target, pages.clone())).transpose();
        let of_target = read.map_err(|e| Error::store(self.store.path(), e))?;
        Ok(ResetPages { pages, of_target })
    }

    /// Loads the devices and `pages` of a checkpoint, and writes all further pages that then differ.
    /// Adds these to `pages`.
    pub(super) fn become_checkpoint(
        &mut self,
        Becoming { checkpoint: to, reset, is_target }: &Becoming<'_>,
        pages: &mut Vec<PageIndex>,
    ) -> Result<(), RollbackError> {
        let began = Instant::now();
        let layout = &to.meta.ram;
        let loaded = joined(&in_use(layout, pages), reset.pages.iter().copied());
        let in_memory = pages.len() <= PAGES_IN_MEMORY_MAX && reset.of_target.is_some();
        let none = HeldPages::default();
        let ahead = reset.of_target.as_ref().filter(|_| *is_target);
        let mut ram = TargetRam::new(to, ahead.unwrap_or(&none));
        if in_memory {
            ram.hold(&loaded).map_err(|e| Error::store(self.store.path(), e))?;
        }
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
        let mut doubtful = self.doubtful_pages(layout, &loaded);
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
