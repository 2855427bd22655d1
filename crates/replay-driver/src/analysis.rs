//! Runs a tool over the intervals of a recording: its plugin in the QEMU of each range of
//! intervals, or in one QEMU for all.
//!
//! ```text
//!   OUT/analysis.json      what is analysed, and how: a second run goes on with what is missing
//!   OUT/lock               held by the process that wants the results
//!   OUT/queue/             the intervals that are left (crates/cluster/src/queue.rs)
//!   OUT/parts/000007/      interval 7: the tool's part, `done` or `failed`, `log` of all tries
//!   OUT/...                the results, when all parts are there
//!   OUT/intervals.json     how long each interval took, and how many tries
//! ```
//!
//! `files.rs` reads and writes these files, `range.rs` and `parts.rs` make the parts, `results.rs`
//! the results.
//!
//! Invariants: a part is made under another name and renamed when it is complete, so that two
//! workers that make the same part do not disturb each other; a part counts only with its `done`;
//! another recording, tool or argument is another analysis.

mod files;
mod guest_symbols;
mod job_trial;
mod live_ranges;
mod parts;
mod range;
mod results;

pub use files::{
    AnalysisHeader, FinishedPart, IntervalState, IntervalTiming, interval_states,
    median_dispatch_ns, previous_timings,
};
pub use parts::PartMaker;
pub use results::differing_files;

use crate::error::{AnalysisError, Error, Result};
use crate::event::{EventSink, ReplayEvent};
use crate::qemu_probe::{InstalledPlugin, install_plugin};
use crate::{AnalysisSubject, KnownIntervals, jobs};
use files::{claim, finished_part};
use keyframe_analysis::{SymbolTable, Tool};
use keyframe_cluster::{
    ItemSource, LocalRunner, NewItems, Placement, Queue, QueueItem, Slot, WorkerId, drive,
};
use keyframe_locks::IgnorePoison;
use keyframe_replay::interval::Interval;
use keyframe_scratch_directory::ScratchDirectory;
use keyframe_store::Sealed;
use keyframe_units::{duration_ns, error_chain};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

/// How often a live recording is looked at for new intervals.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The longest time until a network file system shows other nodes that a file has grown.
const SHOWN_WITHIN: Duration = Duration::from_secs(90);

/// What grows while a live recording is analysed.
struct Progress {
    /// All intervals of the subject.
    known: KnownIntervals,
    /// The header, with those intervals that are to be analysed.
    header: AnalysisHeader,
}

/// An analysis of a subject by a tool, with its directory.
pub struct Analysis<'a> {
    subject: AnalysisSubject<'a>,
    tool: &'a dyn Tool,
    progress: RwLock<Progress>,
    /// The instructions that are to be analysed.
    range: Range<u64>,
    out: PathBuf,
    plugin: InstalledPlugin,
    _plugins: ScratchDirectory,
    /// The intervals whose parts an earlier run has made.
    old: BTreeSet<u32>,
    /// The intervals whose parts a trial of this run has made.
    tried: BTreeSet<u32>,
    /// The symbols of the guest's kernel, once they are found.
    guest_symbols: OnceLock<Arc<SymbolTable>>,
    _lock: Option<std::fs::File>,
}

impl<'a> Analysis<'a> {
    /// Begins or continues an analysis of the intervals that lie in `range` at least in part.
    /// `header` names the tool and its arguments. `out` is created, or holds this analysis already;
    /// it is locked until this is dropped.
    ///
    /// # Errors
    ///
    /// The range is empty, `out` holds something else or is locked, QEMU's version has no plugin,
    /// or the tool needs the guest's symbols and a complete recording has none.
    pub fn new(
        subject: AnalysisSubject<'a>,
        tool: &'a dyn Tool,
        header: AnalysisHeader,
        range: Range<u64>,
        out: &Path,
    ) -> Result<Self> {
        let out = std::path::absolute(out).map_err(|e| Error::file("resolve", out, e))?;
        let known = subject.intervals(tool.can_cut())?;
        let mut this = Self { range, ..Self::of_intervals(subject, tool, (header, known), &out)? };
        let Progress { known, header } = this.progress.get_mut().ignore_poison();
        header.intervals = within(&known.intervals, &this.range);
        if known.is_complete && header.intervals.is_empty() {
            let Range { start: from, end: to } = this.range;
            let instructions = known.intervals.last().map_or(0, |last| last.end_icount);
            return Err(AnalysisError::EmptyRange { from, to, instructions }.into());
        }
        let is_complete = known.is_complete;
        if is_complete {
            // Fail before hours of replays, not after them.
            this.guest_symbols()?;
        }
        this.check_processor()?;
        let lock = claim(&out, &this.progress().header)?;
        Ok(Self { _lock: Some(lock), ..this })
    }

    /// Checks that the tool knows the guest's processor, which the first checkpoint tells.
    fn check_processor(&self) -> Result<()> {
        let (Some(known), Some(first)) = (self.tool.processors(), self.first_checkpoint()?) else {
            return Ok(());
        };
        let processor = first.meta.machine.processor.name();
        if known.contains(&processor) {
            return Ok(());
        }
        let (tool, known) = (self.tool_name(), known.join(", "));
        Err(AnalysisError::Processor { tool, processor: processor.into(), known }.into())
    }

    /// Returns the first checkpoint to analyse; `None` if there is none yet.
    fn first_checkpoint(&self) -> Result<Option<Sealed>> {
        let store = self.subject.store();
        let first = self.intervals().first().map(|one| one.begin.checkpoint);
        let sealed = first.map(|id| store.sealed(id)).transpose();
        sealed.map_err(|e| Error::store(store.path(), e))
    }

    /// Joins the analysis that another process has begun in `out`, which is absolute. Errors: the
    /// directory is of another analysis, or cannot be read.
    pub fn join(
        subject: AnalysisSubject<'a>,
        tool: &'a dyn Tool,
        header: AnalysisHeader,
        out: &Path,
    ) -> Result<Self> {
        // The header of a complete recording's analysis has every interval that this worker can be
        // asked for. To list them anew, it would fetch the descriptions of all checkpoints.
        let has_all = matches!(subject, AnalysisSubject::Recorded(_))
            && tool.warm_up_intervals() == 0
            && !tool.needs_guest_symbols();
        let known = if has_all {
            KnownIntervals { intervals: header.intervals.clone(), is_complete: false }
        } else {
            subject.intervals(tool.can_cut())?
        };
        Self::of_intervals(subject, tool, (header, known), out)
    }

    /// An analysis whose header and known intervals are given.
    fn of_intervals(
        subject: AnalysisSubject<'a>,
        tool: &'a dyn Tool,
        (header, known): (AnalysisHeader, KnownIntervals),
        out: &Path,
    ) -> Result<Self> {
        let folder = ScratchDirectory::new("plugin");
        let folder = folder.map_err(|e| Error::io("make a directory for the plugin", e))?;
        let plugin = install_plugin(&subject.qemu(), folder.path())?;
        Ok(Self {
            subject,
            tool,
            progress: RwLock::new(Progress { known, header }),
            range: 0..u64::MAX,
            out: out.to_owned(),
            plugin,
            _plugins: folder,
            old: BTreeSet::new(),
            tried: BTreeSet::new(),
            guest_symbols: OnceLock::new(),
            _lock: None,
        })
    }

    fn progress(&self) -> RwLockReadGuard<'_, Progress> {
        self.progress.read().ignore_poison()
    }

    /// Returns the intervals to analyse that exist so far.
    pub fn intervals(&self) -> Vec<Interval> {
        self.progress().header.intervals.clone()
    }

    /// Returns the analysis' directory.
    pub fn out(&self) -> &Path {
        &self.out
    }

    /// Returns the tool's name, or for the tool of a third party the name of its manifest's file.
    pub fn tool_name(&self) -> String {
        let stem = PathBuf::from(&self.progress().header.tool);
        stem.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns true if an earlier run has made the part of interval `index`.
    pub fn is_old(&self, index: u32) -> bool {
        self.old.contains(&index) && !self.tried.contains(&index)
    }

    /// Returns the number of instructions in the intervals whose parts an earlier run has made.
    pub fn old_instructions(&self) -> u64 {
        self.intervals().iter().filter(|one| self.is_old(one.index)).map(Interval::len).sum()
    }

    /// Returns the size of the VM's RAM in bytes. Error: the checkpoint cannot be read.
    pub fn ram_bytes(&self) -> Result<u64> {
        Ok(self.first_checkpoint()?.map_or(0, |first| first.meta.ram.len_bytes()))
    }

    /// Returns interval `index`. Looks for new intervals if it is not known yet. Errors: there is
    /// no such interval; the recording cannot be read.
    pub fn interval(&self, index: u32) -> Result<Interval> {
        let find = || {
            let progress = self.progress();
            progress.known.intervals.iter().find(|interval| interval.index == index).copied()
        };
        if let Some(interval) = find() {
            return Ok(interval);
        }
        let known = self.subject.intervals(self.tool.can_cut())?;
        {
            // Another thread may have found more meanwhile.
            let mut progress = self.progress.write().ignore_poison();
            if known.intervals.len() > progress.known.intervals.len() {
                progress.known.intervals = known.intervals;
            }
        }
        find().ok_or_else(|| AnalysisError::NoInterval(index).into())
    }

    /// Returns interval `index`, as [`Self::interval`] does. Waits for it, because a network
    /// file system shows other nodes' writes late. Errors: those of [`Self::interval`],
    /// after a minute and a half, or when `interrupted` becomes true.
    pub fn interval_on_network(&self, index: u32, interrupted: &AtomicBool) -> Result<Interval> {
        let began = Instant::now();
        loop {
            match self.interval(index) {
                Err(_)
                    if began.elapsed() < SHOWN_WITHIN && !interrupted.load(Ordering::Relaxed) =>
                {
                    std::thread::sleep(LOOK_EVERY);
                }
                found => return found,
            }
        }
    }

    /// Looks for new intervals, and writes the header if there are any. Returns all intervals to
    /// analyse, as items of the queue.
    fn refresh(&self) -> Result<NewItems> {
        let (before, is_complete) = {
            let progress = self.progress();
            (progress.header.intervals.len(), progress.known.is_complete)
        };
        if !is_complete {
            self.look()?;
        }
        let progress = self.progress();
        if progress.header.intervals.len() > before {
            // Workers read the header when an interval is in the queue.
            progress.header.save(&self.out)?;
        }
        let items = self.items(&progress.header.intervals)?;
        Ok(if progress.known.is_complete {
            NewItems::Complete(items)
        } else {
            NewItems::Open(items)
        })
    }

    /// Looks for new intervals.
    fn look(&self) -> Result<()> {
        let known = self.subject.intervals(self.tool.can_cut())?;
        let mut progress = self.progress.write().ignore_poison();
        let intervals = within(&known.intervals, &self.range);
        let header = AnalysisHeader { intervals, ..progress.header.clone() };
        if !header.continues(&progress.header) {
            return Err(AnalysisError::CheckpointsChanged.into());
        }
        *progress = Progress { known, header };
        Ok(())
    }

    /// Returns `intervals` as items of the queue.
    fn items(&self, intervals: &[Interval]) -> Result<Vec<QueueItem>> {
        let weights = self.weights(intervals)?;
        let items = intervals
            .iter()
            .zip(weights)
            .map(|(one, weight)| QueueItem { index: one.index, weight });
        Ok(items.collect())
    }

    /// Returns the expected time of each of `intervals`, in a unit of its own: the instructions, or
    /// the recorded time for a tool that waits for a multiple of it.
    fn weights(&self, intervals: &[Interval]) -> Result<Vec<u64>> {
        if self.tool.waits().is_some() {
            let times = intervals.iter().map(|one| self.subject.recorded_time(one));
            let times: Option<Vec<Duration>> = times.collect::<Result<_>>()?;
            if let Some(times) = times {
                return Ok(times.into_iter().map(duration_ns).collect());
            }
        }
        self.subject.efforts(intervals)
    }

    /// Makes the queue of the intervals that are left. It holds those that failed before, and those
    /// of workers on this host that have ended since.
    pub fn queue(&mut self) -> Result<Queue> {
        let queue = Queue::create(&self.out.join("queue"))?;
        let is_finished = |one: &&Interval| finished_part(&self.out, one).is_some();
        let intervals = self.intervals();
        self.old = intervals.iter().filter(is_finished).map(|one| one.index).collect();
        queue.return_items(WorkerId::is_local)?;
        queue.reopen(|index| !self.old.contains(&index))?;
        let settled: BTreeSet<u32> = queue.settled()?.into_iter().map(|item| item.index).collect();
        let is_new =
            |one: &&Interval| self.old.contains(&one.index) && !settled.contains(&one.index);
        let unsettled: Vec<Interval> = intervals.iter().filter(is_new).copied().collect();
        queue.settle_free(&self.items(&unsettled)?)?;
        Ok(queue)
    }

    /// Returns the rule by which workers choose intervals: neighbours for a run through several of
    /// them, otherwise the longest first.
    pub fn placement(&self) -> Placement {
        if self.can_continue() { Placement::Neighbours } else { Placement::LongestFirst }
    }

    /// Returns the source of the queue's items, which follows a live recording.
    pub fn feed(&self) -> impl ItemSource {
        IntervalFeed { analysis: self, looked: None, ranges: live_ranges::LiveRanges::default() }
    }

    /// Makes the parts of all intervals in this process, `jobs` at a time (as many as there are
    /// cores if `None`), and tries each up to `tries` times. `events` learns of progress and of
    /// parts that could not be written.
    ///
    /// # Errors
    ///
    /// The queue fails, or `interrupted` became true ([`AnalysisError::Interrupted`]). Intervals
    /// that failed are reported by [`Analysis::collect`].
    pub fn make_here(
        &mut self,
        jobs: Option<u64>,
        tries: u32,
        interrupted: &Arc<AtomicBool>,
        events: &dyn EventSink<ReplayEvent>,
    ) -> Result<()> {
        let queue = self.queue()?;
        let this = &*self;
        events.event(&ReplayEvent::Replayed { instructions: this.old_instructions() });
        let slots = jobs.map_or_else(jobs::core_count, |n| n as usize);
        let job = |item: QueueItem, slot: &Slot<'_>| {
            let interval = match this.interval(item.index) {
                Ok(interval) => interval,
                Err(error) => {
                    let index = item.index;
                    return events.event(&ReplayEvent::IntervalFailed { index, error });
                }
            };
            let name = format!("local-{:?}", std::thread::current().id());
            let maker = PartMaker { name: &name, tries_max: tries, interrupted };
            let mut reached = interval.from_icount;
            let mut on_progress = |icount: u64| {
                let instructions = icount.saturating_sub(reached);
                events.event(&ReplayEvent::Replayed { instructions });
                reached = icount.max(reached);
            };
            match this.make(&interval, slot, maker, &mut on_progress) {
                // The part is missed when the parts are collected.
                Err(error) if !interrupted.load(Ordering::Relaxed) => {
                    events.event(&ReplayEvent::IntervalFailed { index: item.index, error });
                }
                Ok(()) | Err(_) => {}
            }
        };
        std::thread::scope(|scope| {
            let mut local = LocalRunner::new(scope, slots, this.placement(), interrupted, &job);
            drive(&queue, &mut this.feed(), &mut local, interrupted, &mut |_| ())
        })?;
        jobs::check_interrupted(interrupted)
    }
}

/// Feeds the queue with the intervals of a live recording.
struct IntervalFeed<'a> {
    analysis: &'a Analysis<'a>,
    looked: Option<Instant>,
    ranges: live_ranges::LiveRanges,
}

impl IntervalFeed<'_> {
    fn look(&mut self) -> Result<NewItems> {
        let items = self.analysis.refresh()?;
        if matches!(items, NewItems::Open(_)) {
            let queue = Queue::open(&self.analysis.out.join("queue"))?;
            self.ranges.update(self.analysis, &self.analysis.intervals(), &queue);
        }
        Ok(items)
    }
}

impl ItemSource for IntervalFeed<'_> {
    fn new_items(&mut self) -> keyframe_cluster::Result<NewItems> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(NewItems::Open(Vec::new()));
        }
        let items = self.look();
        self.looked = Some(Instant::now());
        items.map_err(|error| keyframe_cluster::Error::Source(error_chain(&error)))
    }
}

/// Returns the intervals that lie in `range` at least in part.
fn within(all: &[Interval], range: &Range<u64>) -> Vec<Interval> {
    let lies_in = |i: &&Interval| i.end_icount > range.start && i.from_icount < range.end;
    all.iter().filter(lies_in).copied().collect()
}
