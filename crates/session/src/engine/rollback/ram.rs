//! The RAM of a rollback: what differs from the target is written, and nothing else is read.
//!
//! ```text
//!   pages in which two checkpoints differ ─┐
//!   pages written since the older one ─────┴─▶ compared with the target; those that differ are written
//! ```
//!
//! RAM equals the checkpoint before except in pages that the tracker has reported since. So it can
//! differ from the target in those pages, and in the pages in which the two checkpoints differ. If
//! the tracker fails, it reports every page.

use super::{Engine, Error, Instant, RollbackError, step};
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, RamLayout, ZERO_PAGE, elapsed_ns};
use keyframe_vmm::RollbackTarget;

/// How often RAM is compared at most. The last comparison finds no difference.
const COMPARISONS: u32 = 3;
/// Pages that are compared at once: 16 MiB.
const BATCH_PAGES: usize = 4096;

impl Engine<'_> {
    /// Loads the devices and `pages` of `to`, and writes all further pages that then differ. Adds
    /// these to `pages`.
    pub(super) fn become_checkpoint(
        &mut self,
        to: &LoadedCheckpoint,
        pages: &mut Vec<PageIndex>,
    ) -> Result<(), RollbackError> {
        let guest = Guest::choose(to, None).map_err(Error::from)?;
        let source = StoredPages::new(to, &guest);
        let target = RollbackTarget {
            machine_type: &to.meta.machine.machine_type,
            layout: &to.meta.ram,
            ram: &source,
            pages: &in_use(&to.meta.ram, pages),
            device_state: &to.device_state,
        };
        let directory =
            self.store.local_folder().map_err(|e| Error::store(self.store.path(), e))?;
        let file = tempfile::tempfile_in(&directory)
            .map_err(|e| Error::file("make a temporary file in", &directory, e))?;
        let began = Instant::now();
        self.vm()?.vm_mut().roll_back(&target, file).map_err(Error::from)?;
        self.keep_still()?;
        self.note_phase(|phases| phases.load_ns += elapsed_ns(began));
        let began = Instant::now();
        let mut wrong = 0;
        for _ in 0..COMPARISONS {
            let others = self.write_wrong_pages(to, pages)?;
            self.keep_still()?;
            if others.is_empty() {
                pages.sort_unstable();
                pages.dedup();
                self.note_phase(|phases| phases.compare_ns += elapsed_ns(began));
                return Ok(());
            }
            wrong = others.len() as u64;
            pages.extend(others);
        }
        Err(RollbackError::PagesDiffer { pages: wrong, checkpoint: to.id })
    }

    /// Writes the pages in which the paused VM differs from `to`, and returns them. `pages` are those
    /// in which the checkpoint before differs from `to`.
    fn write_wrong_pages(
        &mut self,
        to: &LoadedCheckpoint,
        pages: &[PageIndex],
    ) -> Result<Vec<PageIndex>, RollbackError> {
        let layout = &to.meta.ram;
        let mut doubtful = self.copying.cycle.written_in_pause();
        for page in pages {
            doubtful.insert(*page);
        }
        // More of such a block may be in use than at the checkpoint before, which lacks that part.
        for (number, block) in layout.blocks().iter().enumerate() {
            if block.used_bytes < block.total_bytes {
                doubtful.insert_range(used(layout, number));
            }
        }
        if self.options.audit.is_some() {
            doubtful.insert_range(PageRange::new(PageIndex(0), layout.len_pages()));
        }
        let doubtful = in_use(layout, &doubtful.iter().collect::<Vec<_>>());
        let reader = self.copying.strategies.ram().ok_or(Error::NoVm)?;
        let mut wrong = Vec::new();
        let mut here = Vec::new();
        for batch in doubtful.chunks(BATCH_PAGES) {
            let ranges = ranges(batch);
            here.clear();
            here.resize(batch.len() * PAGE_BYTES, 0);
            reader.read(&ranges, &mut here).map_err(step("read the VM's RAM"))?;
            let here = here.as_chunks::<PAGE_BYTES>().0;
            let mut is_right = vec![false; batch.len()];
            let mut compare = |page: PageIndex, right: &[u8; PAGE_BYTES]| {
                let Ok(at) = batch.binary_search(&page) else { return Ok(()) };
                if here[at] == *right {
                    is_right[at] = true;
                    return Ok(());
                }
                let written = self.copying.strategies.write_page(page, right);
                written.map_err(step("write the VM's RAM"))
            };
            let (zeros, stored): (Vec<_>, Vec<_>) =
                batch.iter().copied().partition(|page| to.is_zero(*page));
            for page in zeros {
                compare(page, &ZERO_PAGE)?;
            }
            to.read_some(&stored, &mut |page, right| {
                compare(page, right).map_err(ReadOrWrite::Write)
            })
            .map_err(|e| match e {
                ReadOrWrite::Read(e) => Error::store(self.store.path(), e).into(),
                ReadOrWrite::Write(e) => e,
            })?;
            let pairs = batch.iter().zip(is_right);
            wrong.extend(pairs.filter(|(_, is_right)| !is_right).map(|(page, _)| *page));
        }
        Ok(wrong)
    }
}

/// An error of a comparison with stored pages.
enum ReadOrWrite {
    Read(keyframe_store::Error),
    Write(RollbackError),
}

impl From<keyframe_store::Error> for ReadOrWrite {
    fn from(error: keyframe_store::Error) -> Self {
        Self::Read(error)
    }
}

/// Joins rising pages to ranges.
fn ranges(pages: &[PageIndex]) -> Vec<PageRange> {
    let mut ranges: Vec<PageRange> = Vec::new();
    for page in pages {
        match ranges.last_mut() {
            Some(range) if range.end() == *page => range.len_pages += 1,
            _ => ranges.push(PageRange::new(*page, 1)),
        }
    }
    ranges
}

/// The pages of a block that are in use.
fn used(layout: &RamLayout, number: usize) -> PageRange {
    let used_bytes = layout.blocks().get(number).map_or(0, |block| block.used_bytes);
    PageRange::new(layout.pages_of(number).first, used_bytes / PAGE_BYTES as u64)
}

/// Returns those of `pages` that lie in the used part of their RAM block.
fn in_use(layout: &RamLayout, pages: &[PageIndex]) -> Vec<PageIndex> {
    let ranges: Vec<_> = (0..layout.blocks().len()).map(|number| used(layout, number)).collect();
    let is_used = |page: &PageIndex| ranges.iter().any(|r| r.first <= *page && *page < r.end());
    pages.iter().copied().filter(is_used).collect()
}

/// The pages in which two checkpoints of one page space differ, in ascending order.
pub(super) fn differing(a: &LoadedCheckpoint, b: &LoadedCheckpoint) -> Vec<PageIndex> {
    let pages = (0..a.meta.ram.len_pages()).map(PageIndex);
    pages.filter(|page| a.page_ref(*page) != b.page_ref(*page)).collect()
}
