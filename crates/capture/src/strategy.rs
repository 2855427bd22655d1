//! How a checkpoint's pages are copied: each strategy is a file.
//!
//! ```text
//!               guest runs            paused, devices saved        guest runs again
//!   stop-copy                         drain, copy all
//!   precopy     rounds: drain, copy   drain, copy the rest
//!   pre-scan    drain                 drain, copy all
//!   cow                               drain                        copy all; a first write copies its page before
//!   fork                              drain, fork                  copy all from the child
//! ```
//!
//! Invariants: when [`Strategy::collect`] returns, the parcel and what was handed over hold every
//! page of `held` as it was at the pause; whatever fails, [`Strategy::release`] leaves nothing
//! behind in the VM.

mod auto;
mod cow;
mod fork;
mod precopy;
mod stop_copy;

pub use auto::Auto;
pub use cow::CopyOnWrite;
pub use fork::Fork;
pub use precopy::{Precopy, Prescan};
pub use stop_copy::StopCopy;

use crate::cycle::{CycleError, Timeline};
use crate::dirty::DirtyLog;
use crate::parcel::{Parcel, StagingError};
use crate::pool::Pool;
use crate::ports::{BoxError, PageReader};
use keyframe_scheduling::Round;
use keyframe_units::PageSet;
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest that a capture waits for the encoder to give memory back.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 60 });

/// A way to copy pages.
pub trait Strategy: Send {
    /// Its name, as on the command line; of the last checkpoint, where it chooses among others.
    fn name(&self) -> &'static str;

    /// While the guest runs, before the pause.
    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError>;

    /// In the pause, behind the device state: from here on what remains must not change under the
    /// copy.
    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError>;

    /// While the guest runs again: copies what was frozen and not copied.
    fn collect(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        let _ = hands;
        Ok(())
    }

    /// After each checkpoint, sealed or aborted.
    fn release(&mut self) {}

    /// A checkpoint was captured.
    fn learn(&mut self, timeline: &Timeline, dirty_pages: u64) {
        let _ = (timeline, dirty_pages);
    }
}

/// What a strategy works with.
pub struct Hands<'a> {
    /// The pages that are owed.
    pub log: &'a mut DirtyLog,
    /// Copies pages of the VM as it is.
    pub reader: &'a Arc<dyn PageReader>,
    /// Memory.
    pub pool: &'a Pool,
    /// The pages copied so far that were not handed over.
    pub parcel: Parcel,
    /// Distinct pages of the checkpoint.
    pub held: PageSet,
    /// Where the time goes.
    pub timeline: Timeline,
    /// True for the first checkpoint, which is complete: its pages are handed over as they are
    /// copied.
    pub complete: bool,
    /// Pages that the pause before had no memory for; 0 where it had.
    pub(crate) lacked_pages: u64,
    /// What [`Hands::expected_pages`] has found.
    pub(crate) expected: OnceCell<Option<u64>>,
    pub(crate) outlet: &'a mut dyn FnMut(Parcel) -> Result<(), BoxError>,
}

impl Hands<'_> {
    /// One round while the guest runs: finds dirty pages (the first round also what aborted
    /// checkpoints left) and copies.
    pub fn round(&mut self) -> Result<(), CycleError> {
        let started = Instant::now();
        let first = self.timeline.rounds.is_empty();
        let set = if first { self.log.drain_owed() } else { self.log.drain() }
            .map_err(CycleError::Scan)?;
        let eager = first && self.complete;
        let reader = Arc::clone(self.reader);
        self.log.copied_unfrozen(&set);
        self.stage_waiting(&set, &*reader, eager)?;
        self.timeline.rounds.push(Round { pages: set.len(), duration_ns: ns(started.elapsed()) });
        Ok(())
    }

    /// About how many pages the checkpoint will hold, counted once before the pause; none where
    /// that cannot be told cheaply.
    pub fn expected_pages(&mut self) -> Option<u64> {
        *self.expected.get_or_init(|| self.log.estimate_pages())
    }

    /// A round before the pause where so many pages are owed, or dirty, that memory might not hold
    /// them in it: for strategies that would copy all of them there. Without it, a checkpoint that
    /// memory was too small for would fail for ever.
    pub fn relieve(&mut self, expected_pages: Option<u64>) -> Result<(), CycleError> {
        let pages = expected_pages.unwrap_or(0).max(self.log.owed_pages());
        if pages > self.pool.capacity_pages() / 2 { self.round() } else { Ok(()) }
    }

    /// Copies `set` while the guest runs: where memory is short (or `eager`), in portions through
    /// the encoder.
    pub fn stage_waiting(
        &mut self,
        set: &PageSet,
        reader: &dyn PageReader,
        eager: bool,
    ) -> Result<(), CycleError> {
        if !eager && set.len() <= self.parcel.room_pages() {
            self.parcel.stage(set, reader)?;
            self.held.union_with(set);
            return Ok(());
        }
        self.hand_over()?;
        let portion_pages = (self.pool.capacity_pages() / 4).min(16_384);
        let mut portion = PageSet::new(set.space_pages());
        for page in set.iter() {
            portion.insert(page);
            if portion.len() >= portion_pages {
                self.stage_portion(&portion, reader)?;
                self.hand_over()?;
                portion.clear();
            }
        }
        self.stage_portion(&portion, reader)
    }

    fn stage_portion(
        &mut self,
        portion: &PageSet,
        reader: &dyn PageReader,
    ) -> Result<(), CycleError> {
        if !self.pool.wait_free(portion.len(), MEMORY_TIMEOUT) {
            return Err(CycleError::Staging(StagingError::Full {
                needed_pages: portion.len(),
                free_pages: self.pool.free_pages(),
                capacity_pages: self.pool.capacity_pages(),
            }));
        }
        self.parcel.stage(portion, reader)?;
        self.held.union_with(portion);
        Ok(())
    }

    /// Copies `set` in the pause: nothing waits.
    fn stage_in_pause(&mut self, set: &PageSet) -> Result<(), CycleError> {
        let copy = Instant::now();
        self.parcel.stage(set, &**self.reader)?;
        self.held.union_with(set);
        self.timeline.pause_pages = set.len();
        self.timeline.copy_ns = ns(copy.elapsed());
        Ok(())
    }

    /// The last scan and the last copies, in the pause.
    pub fn take_the_rest(&mut self) -> Result<(), CycleError> {
        let set = self.last_scan()?;
        self.stage_in_pause(&set)
    }

    /// The last scan, in the pause: with what aborted checkpoints left, where no round took that.
    pub fn last_scan(&mut self) -> Result<PageSet, CycleError> {
        let owed = self.timeline.rounds.is_empty();
        let scan = Instant::now();
        let set = self.log.drain_still(owed).map_err(CycleError::Scan)?;
        self.timeline.scan_ns = ns(scan.elapsed());
        Ok(set)
    }

    /// Makes memory ready for a pause that copies `pages` more; where it is short, waits for the
    /// encoder. Where that does not come around the pause is tried all the same: it may need less
    /// than was expected.
    pub fn prepare_memory(&mut self, pages: u64) -> Result<(), CycleError> {
        // A pause may find as much as a round did: large pages, and guests that work in bursts.
        let skipped = usize::from(self.complete);
        let bursts =
            self.timeline.rounds.iter().skip(skipped).map(|round| round.pages).max().unwrap_or(0);
        let least = bursts.max(self.lacked_pages);
        let wanted = pages.max(least + least / 4).min(self.pool.capacity_pages());
        if self.parcel.room_pages() < wanted {
            self.hand_over()?;
            self.pool.wait_free(wanted, MEMORY_TIMEOUT);
        }
        Ok(self.pool.reserve(pages.min(wanted)).map_err(StagingError::Memory)?)
    }

    /// Hands the parcel over and begins another.
    pub fn hand_over(&mut self) -> Result<(), CycleError> {
        if self.parcel.is_empty() {
            return Ok(());
        }
        let full = std::mem::replace(&mut self.parcel, Parcel::new(self.pool));
        (self.outlet)(full)
            .map_err(|source| CycleError::Sink { operation: "hand pages over", source })
    }
}

pub(crate) fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
