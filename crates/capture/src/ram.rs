//! The ports of a VM whose RAM lies in another process: page readers, trackers, first writes and
//! forked children, over the kernel crate.
//!
//! ```text
//!   PageIndex   0 ......... 65535 | 65536 ... 69631 | ...         RamLayout
//!                     │                    │
//!   HostVirt    0x7fce57e00000      0x7fce6e400000                one address per block
//! ```

use crate::ports::{
    BoxError, DirtyTracker, FirstWriteHook, FirstWriteMonitor, PageReader, PausedFind, RamFreezer,
};
use keyframe_kernel::Process;
use keyframe_kernel::fault_tracker::{self, FaultTracker, MemoryEvent};
use keyframe_kernel::fault_window::{FaultWindow, WindowGap};
use keyframe_kernel::frozen_copy::{ForkPlan, FrozenCopy};
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::{WriteTracker, WrittenPages};
use keyframe_locks::IgnorePoison;
use keyframe_units::{
    HostRange, HostVirt, PAGE_BYTES, Page, PageIndex, PageRange, PageSet, RamLayout,
};
use std::sync::{Arc, Mutex, OnceLock};

/// The reason for a scan in the pause if the kernel refused to open a window.
const NOT_OPENED: &str = "not-opened";

/// The RAM blocks of a VM and their addresses in the VMM process.
#[derive(Clone, Debug)]
pub struct GuestRam {
    layout: RamLayout,
    hosts: Vec<HostVirt>,
}

impl GuestRam {
    /// Makes the RAM from its layout and the addresses of its blocks: `hosts[i]` is the address of
    /// block `i`.
    ///
    /// # Panics
    ///
    /// If the numbers of blocks and addresses differ.
    pub fn new(layout: RamLayout, hosts: Vec<HostVirt>) -> Self {
        assert_eq!(layout.blocks().len(), hosts.len(), "one address per RAM block");
        Self { layout, hosts }
    }

    /// Returns the layout of the page space: the RAM blocks in page order.
    pub fn layout(&self) -> &RamLayout {
        &self.layout
    }

    /// Returns the addresses of block number `block` in the VMM process.
    pub fn block_range(&self, block: usize) -> HostRange {
        HostRange { start: self.hosts[block], len_bytes: self.layout.pages_of(block).len_bytes() }
    }

    /// Returns the addresses of every block, in page order.
    pub fn ranges(&self) -> Vec<HostRange> {
        (0..self.hosts.len()).map(|block| self.block_range(block)).collect()
    }

    /// Writes `content` to `page` through the page tables of `process`, which is the VMM. So every
    /// tracker of its writes reports the page. Error: the process has ended, or its memory cannot
    /// be written.
    pub fn write_page(
        &self,
        process: &Process,
        page: PageIndex,
        content: &Page,
    ) -> Result<(), BoxError> {
        let mut at = Vec::with_capacity(1);
        self.host_ranges(PageRange::new(page, 1), &mut at)?;
        for range in at {
            keyframe_kernel::write_memory(process, range.start, content)?;
        }
        Ok(())
    }

    /// Adds the addresses of the pages of `range` to `out`: one range per block.
    fn host_ranges(&self, mut range: PageRange, out: &mut Vec<HostRange>) -> Result<(), BoxError> {
        while range.len_pages > 0 {
            let (block, offset) = self
                .layout
                .locate(range.first)
                .ok_or_else(|| format!("page {} lies outside the VM's RAM", range.first.0))?;
            let in_block = (self.layout.pages_of(block).len_pages - offset).min(range.len_pages);
            let start = HostVirt(self.hosts[block].0 + offset * PAGE_BYTES as u64);
            out.push(HostRange { start, len_bytes: in_block * PAGE_BYTES as u64 });
            range = PageRange::new(PageIndex(range.first.0 + in_block), range.len_pages - in_block);
        }
        Ok(())
    }

    /// The blocks that overlap `range`.
    fn blocks_of(&self, range: HostRange) -> impl Iterator<Item = usize> {
        (0..self.hosts.len()).filter(move |block| {
            let block = self.block_range(*block);
            block.start < range.end() && range.start < block.end()
        })
    }

    /// The pages of `range` that lie in block `block`: a large page may exceed a small block.
    fn pages(&self, block: usize, range: HostRange) -> PageRange {
        let (start, block_pages) = (self.hosts[block].0, self.layout.pages_of(block));
        let page = PAGE_BYTES as u64;
        let from = (range.start.0.saturating_sub(start) / page).min(block_pages.len_pages);
        let to = range.end().0.saturating_sub(start).div_ceil(page).min(block_pages.len_pages);
        PageRange::new(PageIndex(block_pages.first.0 + from), to.saturating_sub(from))
    }
}

/// Reads pages from the memory of the VMM process, each RAM block in the fastest way that its
/// memory allows.
pub struct ProcessPageReader {
    ram: Arc<GuestRam>,
    reader: Arc<GuestReader>,
}

impl ProcessPageReader {
    /// Creates a reader of `ram`. `reader` must have been made over `ram.ranges()`.
    pub fn new(ram: Arc<GuestRam>, reader: Arc<GuestReader>) -> Self {
        Self { ram, reader }
    }
}

impl PageReader for ProcessPageReader {
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
        let mut host = Vec::with_capacity(ranges.len() + 4);
        for range in ranges {
            self.ram.host_ranges(*range, &mut host)?;
        }
        Ok(self.reader.read(&host, dst)?)
    }
}

/// Finds written pages of the VMM process: what the write trackers of the kernel crate have in
/// common.
pub trait WriteScanner: Send {
    /// Adds the parts of `range` that were written since its last scan to `out`, and protects them
    /// again. Error: the kernel refuses, or the process has ended; all of `range` then counts as
    /// written.
    fn scan(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<(), keyframe_kernel::Error>;

    /// Does the same as [`WriteScanner::scan`], while the VM is paused. Errors: those of
    /// [`WriteScanner::scan`].
    fn scan_paused(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<(), keyframe_kernel::Error> {
        self.scan(range, out)
    }

    /// Returns true if [`WriteScanner::begin_window`] may open a window.
    fn has_window(&self) -> bool {
        false
    }

    /// Begins to record which pages are written after the next scan of all RAM. Error: the kernel
    /// refuses; nothing is recorded then.
    fn begin_window(&self) -> Result<(), keyframe_kernel::Error> {
        Ok(())
    }

    /// Returns the pages that were written since the scan after [`WriteScanner::begin_window`], while
    /// the VM is paused, or the reason why they are unknown; `None` if no window is open.
    fn read_window(&self) -> Option<Result<Vec<HostRange>, WindowGap>> {
        None
    }

    /// Ends the recording.
    fn end_window(&self) {}

    /// Estimates how many pages the next scan of `range` would find. Returns `None` if the tracker
    /// cannot count cheaply.
    fn estimate_pages(&self, range: HostRange) -> Option<u64>;
}

/// Asynchronous write protection: `PAGEMAP_SCAN` finds written pages and protects them again in one
/// step.
impl WriteScanner for WriteTracker {
    fn scan(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<(), keyframe_kernel::Error> {
        self.scan_and_protect(range, out).map(drop)
    }

    fn scan_paused(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<(), keyframe_kernel::Error> {
        self.scan_and_protect_by_two(range, out).map(drop)
    }

    fn estimate_pages(&self, range: HostRange) -> Option<u64> {
        self.count_written(range).ok()
    }
}

/// Asynchronous write protection, with windows of page faults in place of the scans in pauses.
pub struct WindowScanner {
    tracker: WriteTracker,
    window: Mutex<FaultWindow>,
}

impl WindowScanner {
    /// Creates a scanner. `window` must be one over the memory that `tracker` has registered.
    pub fn new(tracker: WriteTracker, window: FaultWindow) -> Self {
        Self { tracker, window: Mutex::new(window) }
    }
}

impl WriteScanner for WindowScanner {
    fn scan(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<(), keyframe_kernel::Error> {
        self.tracker.scan(range, out)
    }

    fn scan_paused(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<(), keyframe_kernel::Error> {
        self.tracker.scan_paused(range, out)
    }

    fn has_window(&self) -> bool {
        true
    }

    fn begin_window(&self) -> Result<(), keyframe_kernel::Error> {
        self.window.lock().ignore_poison().arm(&self.tracker)
    }

    fn read_window(&self) -> Option<Result<Vec<HostRange>, WindowGap>> {
        self.window.lock().ignore_poison().read(&self.tracker)
    }

    fn end_window(&self) {
        self.window.lock().ignore_poison().disarm();
    }

    fn estimate_pages(&self, range: HostRange) -> Option<u64> {
        self.tracker.estimate_pages(range)
    }
}

/// Synchronous write protection: each first write waits for a handler in this process.
impl WriteScanner for Arc<FaultTracker> {
    fn scan(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<(), keyframe_kernel::Error> {
        self.drain(range, out).map(drop)
    }

    fn estimate_pages(&self, _: HostRange) -> Option<u64> {
        None
    }
}

/// Finds the written pages of a VM with a tracker of the kernel crate.
pub struct ProcessDirtyTracker<S> {
    ram: Arc<GuestRam>,
    reader: Arc<GuestReader>,
    scan: S,
    drained: bool,
    found: Vec<WrittenPages>,
    /// True if the window of the next pause could not be opened.
    unopened: bool,
    paused_find: PausedFind,
}

impl<S: WriteScanner> ProcessDirtyTracker<S> {
    /// Creates a tracker. All of `ram.ranges()` must be registered with `scan`.
    pub fn new(ram: Arc<GuestRam>, reader: Arc<GuestReader>, scan: S) -> Self {
        let (found, paused_find) = (Vec::with_capacity(4096), PausedFind::Scan);
        Self { ram, reader, scan, drained: false, found, unopened: false, paused_find }
    }
}

impl<S: WriteScanner> DirtyTracker for ProcessDirtyTracker<S> {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        self.drain_with(written, S::scan)
    }

    fn drain_paused(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        let unopened = std::mem::take(&mut self.unopened);
        self.paused_find = match self.scan.read_window() {
            Some(Ok(ranges)) => {
                for range in ranges {
                    for block in self.ram.blocks_of(range) {
                        written.insert_range(self.ram.pages(block, range));
                    }
                }
                self.paused_find = PausedFind::Window;
                return Ok(());
            }
            Some(Err(gap)) => PausedFind::FellBack(gap.name()),
            None if unopened => PausedFind::FellBack(NOT_OPENED),
            None => PausedFind::Scan,
        };
        self.drain_with(written, S::scan_paused)
    }

    fn has_window(&self) -> bool {
        self.scan.has_window()
    }

    fn open_window(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        // The window opens before the scan, so that it has each write after the protection.
        self.unopened = self.scan.begin_window().is_err();
        self.drain_with(written, S::scan)
    }

    fn close_window(&mut self) {
        self.unopened = false;
        self.scan.end_window();
    }

    fn paused_find(&self) -> PausedFind {
        self.paused_find
    }

    fn estimate_pages(&mut self) -> Option<u64> {
        let blocks = 0..self.ram.layout.blocks().len();
        blocks.map(|block| self.scan.estimate_pages(self.ram.block_range(block))).sum()
    }
}

impl<S: WriteScanner> ProcessDirtyTracker<S> {
    fn drain_with(
        &mut self,
        written: &mut PageSet,
        scan: impl Fn(&S, HostRange, &mut Vec<WrittenPages>) -> Result<(), keyframe_kernel::Error>,
    ) -> Result<(), BoxError> {
        for block in 0..self.ram.layout.blocks().len() {
            let range = self.ram.block_range(block);
            self.found.clear();
            scan(&self.scan, range, &mut self.found)?;
            for found in &self.found {
                // The first scan reports every page that was never protected, touched or not. An
                // unmapped page holds zeros, or its file's data, which the extents below tell.
                if self.drained || found.present {
                    written.insert_range(self.ram.pages(block, found.range));
                }
            }
            if !self.drained {
                for extent in self.reader.data_extents(range)? {
                    written.insert_range(self.ram.pages(block, extent));
                }
            }
        }
        self.drained = true;
        Ok(())
    }
}

/// Delays the first writes to the pages of a VM.
pub struct ProcessFirstWriteMonitor {
    ram: Arc<GuestRam>,
    tracker: Arc<FaultTracker>,
}

impl ProcessFirstWriteMonitor {
    /// Creates a monitor. All of `ram.ranges()` must be registered with `tracker`.
    pub fn new(ram: Arc<GuestRam>, tracker: Arc<FaultTracker>) -> Self {
        Self { ram, tracker }
    }
}

impl FirstWriteMonitor for ProcessFirstWriteMonitor {
    fn set_hook(&self, hook: Option<FirstWriteHook>) {
        let ram = Arc::clone(&self.ram);
        self.tracker.set_hook(hook.map(|hook| -> fault_tracker::MemoryEventHook {
            Arc::new(move |touch| {
                // A page that is being discarded may be lost already; `pages_with_lost_protection`
                // reports it.
                let (MemoryEvent::Write(range) | MemoryEvent::Discard(range)) = touch;
                for block in ram.blocks_of(range) {
                    hook(ram.pages(block, range));
                }
            })
        }));
    }

    fn unannounced(&self) -> Result<PageSet, BoxError> {
        let mut pages = PageSet::new(self.ram.layout.len_pages());
        for block in 0..self.ram.layout.blocks().len() {
            for lost in self.tracker.pages_with_lost_protection(self.ram.block_range(block))? {
                pages.insert_range(self.ram.pages(block, lost));
            }
        }
        Ok(pages)
    }
}

/// Freezes RAM by forking the VMM process.
pub struct ForkFreezer {
    ram: Arc<GuestRam>,
    plan: ForkPlan,
}

impl ForkFreezer {
    /// Prepares to fork `process`, which takes milliseconds. Error: its RAM cannot be frozen by a
    /// fork.
    pub fn new(ram: Arc<GuestRam>, process: &Process) -> Result<Self, keyframe_kernel::Error> {
        let plan = ForkPlan::new(process, &ram.ranges())?;
        Ok(Self { ram, plan })
    }
}

impl RamFreezer for ForkFreezer {
    fn freeze(&mut self) -> Result<Box<dyn PageReader>, BoxError> {
        let snapshot = self.plan.fork()?;
        Ok(Box::new(ForkedRamReader {
            ram: Arc::clone(&self.ram),
            pages: OnceLock::new(),
            snapshot,
        }))
    }
}

/// Reads the memory of a forked child. The first read, which comes after the pause, finds out how.
struct ForkedRamReader {
    ram: Arc<GuestRam>,
    pages: OnceLock<ProcessPageReader>,
    snapshot: FrozenCopy,
}

impl PageReader for ForkedRamReader {
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
        let pages = if let Some(pages) = self.pages.get() {
            pages
        } else {
            let reader = GuestReader::new(self.snapshot.process(), &self.ram.ranges())?;
            self.pages
                .get_or_init(|| ProcessPageReader::new(Arc::clone(&self.ram), Arc::new(reader)))
        };
        pages.read(ranges, dst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::{BlockKind, RamBlock};

    fn ram() -> GuestRam {
        let block = |name: &str, pages: u64| RamBlock {
            name: name.into(),
            kind: BlockKind::Stream,
            used_bytes: 0,
            total_bytes: pages * PAGE_BYTES as u64,
        };
        let layout = RamLayout::new(vec![block("a", 4), block("b", 1), block("c", 3)]).unwrap();
        GuestRam::new(layout, vec![HostVirt(0x10_0000), HostVirt(0x90_0000), HostVirt(0x20_0000)])
    }

    #[test]
    fn a_range_over_several_blocks_is_cut_at_their_borders() {
        let mut out = Vec::new();
        ram().host_ranges(PageRange::new(PageIndex(3), 4), &mut out).unwrap();
        let found: Vec<_> =
            out.iter().map(|r| (r.start.0, r.len_bytes / PAGE_BYTES as u64)).collect();
        assert_eq!(found, [(0x10_3000, 1), (0x90_0000, 1), (0x20_0000, 2)]);
        assert!(ram().host_ranges(PageRange::new(PageIndex(6), 3), &mut out).is_err());
    }

    #[test]
    fn a_large_page_that_sticks_out_of_its_block_stays_in_it() {
        let range = HostRange { start: HostVirt(0x8f_f000), len_bytes: 0x20_0000 };
        assert_eq!(ram().pages(1, range), PageRange::new(PageIndex(4), 1));
        let behind = HostRange { start: HostVirt(0x20_3000), len_bytes: 0x1000 };
        assert_eq!(ram().pages(2, behind).len_pages, 0);
    }
}
