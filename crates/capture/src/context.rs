//! The state of the checkpoint in progress that the cycle hands to its strategy, and the copying
//! operations that strategies have in common.

use crate::checkpoint::CaptureTimeline;
use crate::dirty::DirtyLog;
use crate::error::CaptureError;
use crate::ports::{BoxError, PageReader};
use crate::staged_pages::{StagedPages, StagingError};
use crate::staging_pool::StagingPool;
use keyframe_scheduling::{Round, burst_pages};
use keyframe_units::{PageSet, elapsed_ns};
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time that a capture waits for the encoder to free memory.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 60 });
/// The most pages of a complete checkpoint that wait for the encoder: 256 MiB. More would not make it
/// faster, because copying is faster than encoding.
const WAITING_PAGES_MAX: u64 = 1 << 16;
/// The most pages that are copied before they are handed to the encoder, if memory is short.
const PORTION_PAGES_MAX: u64 = 16_384;

/// What a strategy needs to capture the checkpoint in progress.
pub struct CaptureContext<'a> {
    /// The dirty log: the tracker, and the pages that are owed.
    pub log: &'a mut DirtyLog,
    /// Reads the VM's current RAM.
    pub reader: &'a Arc<dyn PageReader>,
    /// The staging memory.
    pub pool: &'a StagingPool,
    /// The pages that are copied and not handed to the encoder yet.
    pub staged: StagedPages,
    /// The distinct pages that the checkpoint holds so far.
    pub held: PageSet,
    /// The durations of the steps so far.
    pub timeline: CaptureTimeline,
    /// True if the checkpoint is complete: it is the first one and holds all of RAM. Its pages are
    /// handed to the encoder while they are copied.
    pub is_complete: bool,
    /// The pages for which the previous pause had no memory; 0 if it had enough.
    pub(crate) lacked_pages: u64,
    /// The number of rounds before the last wait for memory; 0 if there was none.
    pub(crate) rounds_before_wait: usize,
    /// The result of [`CaptureContext::expected_pages`].
    pub(crate) expected: OnceCell<Option<u64>>,
    pub(crate) outlet: &'a mut dyn FnMut(StagedPages) -> Result<(), BoxError>,
}

impl CaptureContext<'_> {
    /// Runs one pre-copy round while the guest runs: finds dirty pages and copies them. The first
    /// round includes the pages that aborted checkpoints left owed.
    ///
    /// Errors: the scan failed, the pages could not be copied, or the encoder has ended.
    pub fn round(&mut self) -> Result<(), CaptureError> {
        self.round_by(|log, is_first| if is_first { log.drain_owed() } else { log.drain() })
    }

    /// Runs the last round before the pause, and opens a window with its scan, so that the pause
    /// needs none. Does nothing if the tracker has no window. Errors: those of [`Self::round`].
    pub fn window_round(&mut self) -> Result<(), CaptureError> {
        if !self.log.has_window() {
            return Ok(());
        }
        self.round_by(DirtyLog::open_window)
    }

    /// Opens a window if the tracker has one. The pages that its scan finds are owed. So a strategy
    /// without rounds calls this first, and copies all owed pages in the pause. Error:
    /// [`CaptureError::Scan`].
    pub fn open_window(&mut self) -> Result<(), CaptureError> {
        if self.log.has_window() {
            self.log.open_window(false).map_err(CaptureError::Scan)?;
        }
        Ok(())
    }

    fn round_by(
        &mut self,
        drain: impl FnOnce(&mut DirtyLog, bool) -> Result<PageSet, BoxError>,
    ) -> Result<(), CaptureError> {
        let started = Instant::now();
        let is_first = self.timeline.rounds.is_empty();
        let set = drain(self.log, is_first).map_err(CaptureError::Scan)?;
        let is_eager = self.is_complete && self.is_eager_round(set.len());
        let reader = Arc::clone(self.reader);
        self.log.mark_unfrozen_copies(&set);
        self.copy_running(&set, &*reader, is_eager)?;
        let duration_ns = elapsed_ns(started);
        self.timeline.rounds.push(Round { pages: set.len(), duration_ns });
        Ok(())
    }

    /// Returns whether a round of a complete checkpoint copies its `pages` pages at the speed of the
    /// encoder: the first, and later ones that are too large for memory and still shrink fast at that
    /// speed. A guest that writes faster is copied at the speed of memory.
    fn is_eager_round(&self, pages: u64) -> bool {
        self.timeline.rounds.last().is_none_or(|before| {
            pages > WAITING_PAGES_MAX && pages.saturating_mul(2) <= before.pages
        })
    }

    /// Scans for all pages that the checkpoint must hold, while the VM is paused and is to run on.
    /// [`Self::copy_scanned`] copies them. Error: [`CaptureError::Scan`].
    pub(crate) fn scan_paused(&mut self) -> Result<PageSet, CaptureError> {
        self.log.drain_paused(true).map_err(CaptureError::Scan)
    }

    /// Copies the pages of [`Self::scan_paused`] as a round, while the guest runs again.
    /// `started`: when the pause of the scan began. Errors: the pages could not be copied, or the
    /// encoder has ended.
    pub(crate) fn copy_scanned(
        &mut self,
        set: &PageSet,
        started: Instant,
    ) -> Result<(), CaptureError> {
        let reader = Arc::clone(self.reader);
        self.log.mark_unfrozen_copies(set);
        self.copy_running(set, &*reader, self.is_complete)?;
        let duration_ns = elapsed_ns(started);
        self.timeline.rounds.push(Round { pages: set.len(), duration_ns });
        Ok(())
    }

    /// Estimates how many pages the checkpoint will hold, once per checkpoint and before the pause.
    /// Returns `None` if the tracker cannot count cheaply.
    pub fn expected_pages(&mut self) -> Option<u64> {
        *self.expected.get_or_init(|| self.log.estimate_pages())
    }

    /// Runs one round before the pause if half of the memory might not hold the owed or expected
    /// pages. For strategies that copy everything in the pause: without the round, a checkpoint
    /// that exceeds the memory would fail again and again. Errors: those of [`Self::round`].
    pub fn relieve_memory(&mut self, expected_pages: Option<u64>) -> Result<(), CaptureError> {
        let pages = expected_pages.unwrap_or(0).max(self.log.owed_pages());
        if pages > self.pool.capacity_pages() / 2 { self.round() } else { Ok(()) }
    }

    /// Copies `set` while the guest runs. If memory is short, or if `is_eager` is true, it copies
    /// in portions, hands each to the encoder, and waits for free memory. Errors: the pages could
    /// not be read, or the encoder has ended.
    pub fn copy_running(
        &mut self,
        set: &PageSet,
        reader: &dyn PageReader,
        is_eager: bool,
    ) -> Result<(), CaptureError> {
        if !is_eager && set.len() <= self.staged.room_pages() {
            self.staged.stage(set, reader)?;
            self.held.union_with(set);
            return Ok(());
        }
        self.hand_over()?;
        let capacity_pages = self.pool.capacity_pages();
        let portion_pages = (capacity_pages / 4).min(PORTION_PAGES_MAX);
        let least_free =
            if is_eager { capacity_pages.saturating_sub(WAITING_PAGES_MAX) } else { 0 };
        let mut portion = PageSet::new(set.space_pages());
        for page in set.iter() {
            portion.insert(page);
            if portion.len() >= portion_pages {
                self.copy_portion(&portion, reader, least_free)?;
                self.hand_over()?;
                portion.clear();
            }
        }
        self.copy_portion(&portion, reader, least_free)
    }

    /// Copies `portion` once `least_free` pages of the pool are free. After a timeout, room for the
    /// portion is enough.
    fn copy_portion(
        &mut self,
        portion: &PageSet,
        reader: &dyn PageReader,
        least_free: u64,
    ) -> Result<(), CaptureError> {
        let is_free = self.pool.wait_free(portion.len().max(least_free), MEMORY_TIMEOUT);
        if !is_free && self.pool.free_pages() < portion.len() {
            return Err(CaptureError::Staging(StagingError::Full {
                needed_pages: portion.len(),
                free_pages: self.pool.free_pages(),
                capacity_pages: self.pool.capacity_pages(),
            }));
        }
        self.staged.stage(portion, reader)?;
        self.held.union_with(portion);
        Ok(())
    }

    /// Scans for the remaining dirty pages and copies them, in the pause.
    ///
    /// Errors: [`CaptureError::Scan`] if the scan failed; [`CaptureError::Staging`] if the pages
    /// could not be read, or the staging memory is full.
    pub fn copy_remaining(&mut self) -> Result<(), CaptureError> {
        let set = self.last_scan()?;
        let started = Instant::now();
        self.staged.stage(&set, &**self.reader)?;
        self.held.union_with(&set);
        self.timeline.pause_pages = set.len();
        self.timeline.copy_ns = elapsed_ns(started);
        Ok(())
    }

    /// Scans for the remaining dirty pages, in the pause, and returns them. If no round came
    /// before, the result includes the pages that aborted checkpoints left owed. Error:
    /// [`CaptureError::Scan`] if the scan failed; every page then counts as dirty.
    pub fn last_scan(&mut self) -> Result<PageSet, CaptureError> {
        let all_owed = self.timeline.rounds.is_empty();
        let started = Instant::now();
        let set = self.log.drain_paused(all_owed).map_err(CaptureError::Scan)?;
        self.timeline.scan_ns = elapsed_ns(started);
        self.timeline.found_by = self.log.paused_find();
        Ok(set)
    }

    /// Allocates memory for a pause that copies `pages` more pages. If memory is short, it hands
    /// the staged pages over and waits for the encoder. A timeout is no error: the pause may need
    /// less than expected. Returns true if it has waited: the guest wrote meanwhile.
    ///
    /// Errors: [`CaptureError::Sink`] if the encoder does not take the pages;
    /// [`CaptureError::Staging`] if the host has no memory.
    pub fn prepare_memory(&mut self, pages: u64) -> Result<bool, CaptureError> {
        // The first round of a complete checkpoint, and the first after a wait, found the pages of a
        // long time.
        let first = match self.rounds_before_wait {
            0 => usize::from(self.is_complete),
            rounds => rounds + 1,
        };
        let burst_pages = burst_pages(&self.timeline.rounds, first);
        let least = burst_pages.max(self.lacked_pages);
        let wanted = pages.max(least + least / 4).min(self.pool.capacity_pages());
        let mut has_waited = false;
        if self.staged.room_pages() < wanted {
            self.hand_over()?;
            has_waited = self.pool.free_pages() < wanted;
            self.pool.wait_free(wanted, MEMORY_TIMEOUT);
        }
        if has_waited {
            self.rounds_before_wait = self.timeline.rounds.len();
        }
        self.pool.reserve(pages.min(wanted)).map_err(StagingError::Memory)?;
        Ok(has_waited)
    }

    /// Hands the staged pages to the encoder and begins an empty set. Error: [`CaptureError::Sink`]
    /// if the encoder has ended.
    pub fn hand_over(&mut self) -> Result<(), CaptureError> {
        if self.staged.is_empty() {
            return Ok(());
        }
        let full = std::mem::replace(&mut self.staged, StagedPages::new(self.pool));
        (self.outlet)(full)
            .map_err(|source| CaptureError::Sink { operation: "hand pages over", source })
    }
}
