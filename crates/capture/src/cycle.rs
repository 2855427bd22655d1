//! One checkpoint, from the first scan to the seal.
//!
//! ```text
//!            ┌─────────┐ few pages left, or no
//!   Idle ──▶ │ Precopy │ fewer by another round    ┌─────────────── VM paused ────────────────┐
//!    ▲       │ scan,   │ ─────────────▶ Stopping ─▶│ Paused ─▶ DeviceState ─▶ Scanned ─▶ Copied│─▶ Resumed
//!    │       │ copy    │◀┐                         └──────────────────────────────────────────┘      │
//!    │       └─────────┘─┘ another round                                                             ▼
//!    │                                                                              Encoding ─▶ Sealing ─▶ Sealed
//!    │        any failure: the VM runs again, the sink abandons, the pages stay owed                     │
//!    └───────────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The device state comes before the last scan, because saving a device may write guest memory. (Scanning meanwhile and
//! once more behind it was measured and was slower: a clean scan costs as much as what it hides, and slows QEMU down.)
//!
//! Invariants: the VM leaves every cycle as it was found, running or paused; a page is struck out of the
//! [`DirtyLog`] only when the seal has returned; between Stopping and Resumed nothing touches the sink.
//!
//! Left out on purpose: when to take a checkpoint (the caller's), and more than one checkpoint in flight: the next
//! cycle starts when this one has been sealed, so staging memory is that of one checkpoint.

use crate::dirty::DirtyLog;
use crate::ports::{BoxError, Machine, Observer, PageReader, Resumed, Sink, Stopped, Tracker};
use crate::staging::{Staging, StagingError};
use keyframe_scheduling::{Decision, PrecopyPolicy, Round};
use keyframe_units::{PageSet, RamLayout};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Where a cycle is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Copying while the guest runs.
    Precopy,
    /// About to pause the VM.
    Stopping,
    /// The VM is paused.
    Paused,
    /// The device state is here.
    DeviceState,
    /// The last dirty pages are known.
    Scanned,
    /// The last dirty pages are copied.
    Copied,
    /// The VM runs again.
    Resumed,
    /// Pages go to the sink.
    Encoding,
    /// The sink makes the checkpoint durable.
    Sealing,
    /// The checkpoint is sealed.
    Sealed,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 10] = [
        Self::Precopy,
        Self::Stopping,
        Self::Paused,
        Self::DeviceState,
        Self::Scanned,
        Self::Copied,
        Self::Resumed,
        Self::Encoding,
        Self::Sealing,
        Self::Sealed,
    ];

    /// The name, as users and fault switches spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Stopping => "stopping",
            Self::Paused => "paused",
            Self::Scanned => "scanned",
            Self::Copied => "copied",
            Self::DeviceState => "device-state",
            Self::Resumed => "resumed",
            Self::Encoding => "encoding",
            Self::Sealing => "sealing",
            Self::Sealed => "sealed",
        }
    }
}

/// What a cycle may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Staging memory, in pages.
    pub staging_pages: u64,
}

/// Where the time of a checkpoint went. The five phases of the pause are consecutive parts of it and add up to
/// `pause_ns` but for the time between two readings of the clock. The pause is counted from just before QEMU is asked to
/// stop until it has confirmed that the VM runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// The pre-copy rounds.
    pub rounds: Vec<Round>,
    /// The whole pause.
    pub pause_ns: u64,
    /// Until QEMU confirmed the stop.
    pub stop_ns: u64,
    /// Scanning for the last dirty pages.
    pub scan_ns: u64,
    /// Copying them.
    pub copy_ns: u64,
    /// Saving the device state.
    pub device_state_ns: u64,
    /// Until QEMU confirmed that the VM runs.
    pub resume_ns: u64,
    /// From the end of the pause until the last page was handed to the sink.
    pub encode_ns: u64,
    /// Pages copied in the pause.
    pub pause_pages: u64,
    /// Since the pause of the checkpoint before; 0 for the first.
    pub interval_ns: u64,
}

/// A checkpoint that is in memory and in the sink, not sealed yet.
#[derive(Clone, Debug)]
pub struct Captured {
    /// The RAM blocks at the instant of the pause.
    pub ram: RamLayout,
    /// QEMU's device state.
    pub device_state: Vec<u8>,
    /// The wall clock when the VM was paused.
    pub taken_at: SystemTime,
    /// The same instant on the monotonic clock.
    pub paused_at: Instant,
    /// Distinct pages that this checkpoint holds.
    pub dirty_pages: u64,
    /// Where the time went.
    pub timeline: Timeline,
}

/// Why there is no checkpoint. Nothing is lost: its pages go into the next one.
#[derive(Debug, thiserror::Error)]
pub enum CycleError {
    /// QEMU did not do what it was asked to.
    #[error("{operation}: {source}")]
    Machine {
        /// What it was asked to do.
        operation: &'static str,
        /// Why not.
        source: BoxError,
    },
    /// Dirty pages could not be found; all pages are taken as dirty from now on.
    #[error("scan for dirty pages: {0}")]
    Scan(BoxError),
    /// Dirty pages could not be copied.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// The sink failed.
    #[error("{operation}: {source}")]
    Sink {
        /// What it was to do.
        operation: &'static str,
        /// Why it did not.
        source: BoxError,
    },
    /// The VM ran during the pause.
    #[error("the VM was resumed by somebody else during the pause, so what was copied is torn")]
    Torn,
    /// QEMU resized a RAM block meanwhile.
    #[error("a RAM block was resized while the checkpoint was taken")]
    Resized,
    /// QEMU's RAM blocks are not the ones that are tracked.
    #[error("the VM's RAM blocks have changed: memory was plugged or unplugged")]
    OtherRam,
    /// An observer's objection.
    #[error("audit: {0}")]
    Audit(BoxError),
}

/// Takes checkpoints of one VM, one after the other.
pub struct Cycle<T> {
    log: DirtyLog<T>,
    staging: Staging,
    reader: Arc<dyn PageReader>,
    space: RamLayout,
    paused_at: Option<Instant>,
    complete: bool,
}

/// What one attempt has gathered.
struct Attempt {
    held: PageSet,
    timeline: Timeline,
}

impl<T: Tracker> Cycle<T> {
    /// A cycle over the VM whose RAM is `space`. `tracker` must not have been drained before.
    pub fn new(
        space: RamLayout,
        tracker: T,
        reader: Arc<dyn PageReader>,
        limits: Limits,
    ) -> Result<Self, CycleError> {
        let pages = space.len_pages();
        let staging = Staging::new(pages, limits.staging_pages)?;
        Ok(Self {
            log: DirtyLog::new(tracker, pages),
            staging,
            reader,
            space,
            paused_at: None,
            complete: false,
        })
    }

    /// Pages that were drained and are in no sealed checkpoint.
    pub fn owed_pages(&self) -> u64 {
        self.log.owed_pages()
    }

    /// Takes one checkpoint. On an error the VM goes on as it was and the pages are owed to the next checkpoint.
    pub fn take<M: Machine, S: Sink, O: Observer>(
        &mut self,
        machine: &mut M,
        sink: &mut S,
        observer: &mut O,
        policy: &PrecopyPolicy,
    ) -> Result<(Captured, S::Sealed), CycleError> {
        // Without a sealed checkpoint all of RAM is dirty: no policy may copy that in the pause.
        let first = PrecopyPolicy::default();
        let policy = if self.complete { policy } else { &first };
        let result = self.attempt(machine, sink, observer, policy);
        self.staging.clear();
        match &result {
            Ok((captured, _)) => {
                self.log.settle();
                self.paused_at = Some(captured.paused_at);
                self.complete = true;
                observer.reached(Phase::Sealed);
            }
            Err(_) => sink.abandon(),
        }
        result
    }

    fn attempt<M: Machine, S: Sink, O: Observer>(
        &mut self,
        machine: &mut M,
        sink: &mut S,
        observer: &mut O,
        policy: &PrecopyPolicy,
    ) -> Result<(Captured, S::Sealed), CycleError> {
        observer.reached(Phase::Precopy);
        let ram = machine.ram().map_err(machine_error("list RAM blocks"))?;
        if !ram.same_space(&self.space) {
            return Err(CycleError::OtherRam);
        }
        let mut attempt =
            Attempt { held: PageSet::new(self.space.len_pages()), timeline: Timeline::default() };
        self.precopy(&mut attempt, sink, policy)?;
        let mut captured = self.pause(attempt, machine, observer, &ram)?;
        if machine.ram().map_err(machine_error("list RAM blocks"))? != ram {
            return Err(CycleError::Resized);
        }
        observer.reached(Phase::Encoding);
        let started = Instant::now();
        self.spill(sink)?;
        captured.timeline.encode_ns = ns(started.elapsed());
        observer.reached(Phase::Sealing);
        let sealed = sink.seal(&captured).map_err(sink_error("seal the checkpoint"))?;
        Ok((captured, sealed))
    }

    /// Rounds while the guest runs. The first one takes what earlier checkpoints left owing.
    fn precopy<S: Sink>(
        &mut self,
        attempt: &mut Attempt,
        sink: &mut S,
        policy: &PrecopyPolicy,
    ) -> Result<(), CycleError> {
        while policy.decide(&attempt.timeline.rounds) == Decision::Again {
            let started = Instant::now();
            let first = attempt.timeline.rounds.is_empty();
            let set =
                if first { self.log.drain_owed() } else { self.log.drain() }.map_err(CycleError::Scan)?;
            // The complete first checkpoint goes to the sink as it is copied: staging it would take memory of the size of RAM.
            self.stage_or_spill(&set, sink, first && !self.complete)?;
            attempt.held.union_with(&set);
            attempt.timeline.rounds.push(Round { pages: set.len(), duration_ns: ns(started.elapsed()) });
        }
        let expected = match attempt.timeline.rounds.last() {
            Some(last) => last.pages.saturating_mul(2).saturating_add(4096),
            None => self.staging.capacity_pages(),
        };
        if self.staging.free_pages() < expected {
            self.spill(sink)?;
        }
        Ok(self.staging.reserve(expected)?)
    }

    /// Stages a round, through the sink where it is `eager` or does not fit.
    fn stage_or_spill<S: Sink>(
        &mut self,
        set: &PageSet,
        sink: &mut S,
        eager: bool,
    ) -> Result<(), CycleError> {
        if !eager && set.len() <= self.staging.free_pages() {
            return Ok(self.staging.stage(set, &*self.reader)?);
        }
        self.spill(sink)?;
        let portion_pages = if eager { 4096 } else { self.staging.capacity_pages() };
        let mut portion = PageSet::new(set.space_pages());
        for page in set.iter() {
            portion.insert(page);
            if portion.len() >= portion_pages {
                self.staging.stage(&portion, &*self.reader)?;
                self.spill(sink)?;
                portion.clear();
            }
        }
        Ok(self.staging.stage(&portion, &*self.reader)?)
    }

    /// Hands what is staged to the sink.
    fn spill<S: Sink>(&mut self, sink: &mut S) -> Result<(), CycleError> {
        for (page, content) in self.staging.pages() {
            sink.put(page, content).map_err(sink_error("store a page"))?;
        }
        self.staging.clear();
        Ok(())
    }

    fn pause<M: Machine, O: Observer>(
        &mut self,
        mut attempt: Attempt,
        machine: &mut M,
        observer: &mut O,
        ram: &RamLayout,
    ) -> Result<Captured, CycleError> {
        observer.reached(Phase::Stopping);
        let (taken_at, start) = (SystemTime::now(), Instant::now());
        // Without a pre-copy, the pause has to take what aborted checkpoints left owing too.
        let owed = attempt.timeline.rounds.is_empty();
        let stopped = machine.stop().map_err(machine_error("pause the VM"))?;
        attempt.timeline.stop_ns = ns(start.elapsed());
        let inside = self.inside_pause(&mut attempt, machine, observer, ram, owed);
        let resume = Instant::now();
        let resumed = machine.resume(stopped);
        attempt.timeline.resume_ns = ns(resume.elapsed());
        attempt.timeline.pause_ns = ns(start.elapsed());
        observer.reached(Phase::Resumed);
        // Both, whatever came before: the watchdog must be disarmed even where the checkpoint is lost already.
        let by = machine.resumed(stopped);
        let device_state = inside?;
        resumed.map_err(machine_error("resume the VM"))?;
        if by.map_err(machine_error("find out who resumed the VM"))? == Resumed::ByOther {
            return Err(CycleError::Torn);
        }
        if let Some(before) = self.paused_at {
            attempt.timeline.interval_ns = ns(start.duration_since(before));
        }
        if stopped == Stopped::Already {
            // Nobody waited for us: the time that it took was no pause of the guest's.
            attempt.timeline.pause_ns = 0;
        }
        Ok(Captured {
            ram: ram.clone(),
            device_state,
            taken_at,
            paused_at: start,
            dirty_pages: attempt.held.len(),
            timeline: attempt.timeline,
        })
    }

    /// Everything between the stop and the resume.
    fn inside_pause<M: Machine, O: Observer>(
        &mut self,
        attempt: &mut Attempt,
        machine: &mut M,
        observer: &mut O,
        ram: &RamLayout,
        owed: bool,
    ) -> Result<Vec<u8>, CycleError> {
        observer.reached(Phase::Paused);
        let saving = Instant::now();
        let device_state = machine.save_devices().map_err(machine_error("save the device state"))?;
        attempt.timeline.device_state_ns = ns(saving.elapsed());
        observer.reached(Phase::DeviceState);
        self.last_pages(attempt, observer, owed)?;
        observer.reached(Phase::Copied);
        observer.paused(&*self.reader, ram).map_err(CycleError::Audit)?;
        Ok(device_state)
    }

    fn last_pages<O: Observer>(
        &mut self,
        attempt: &mut Attempt,
        observer: &mut O,
        owed: bool,
    ) -> Result<(), CycleError> {
        let scan = Instant::now();
        let set = if owed { self.log.drain_owed() } else { self.log.drain() }.map_err(CycleError::Scan)?;
        attempt.timeline.scan_ns = ns(scan.elapsed());
        observer.reached(Phase::Scanned);
        let copy = Instant::now();
        self.staging.stage(&set, &*self.reader)?;
        attempt.held.union_with(&set);
        attempt.timeline.pause_pages = set.len();
        attempt.timeline.copy_ns = ns(copy.elapsed());
        Ok(())
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn machine_error(operation: &'static str) -> impl Fn(BoxError) -> CycleError {
    move |source| CycleError::Machine { operation, source }
}

fn sink_error(operation: &'static str) -> impl Fn(BoxError) -> CycleError {
    move |source| CycleError::Sink { operation, source }
}

#[cfg(test)]
mod tests;
