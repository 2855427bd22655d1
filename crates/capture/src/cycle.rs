//! One checkpoint, from the first scan until it is handed to the encoder; and what is known of
//! those under way.
//!
//! ```text
//!            ┌─────────┐                          ┌─────────────── VM paused ────────────────────┐
//!   Idle ──▶ │ Precopy │ ────────▶ Stopping ─────▶│ Paused ─▶ DeviceState ─▶ Copied               │─▶ Resumed
//!    ▲       └─────────┘                          └──────────────────────────────────────────────┘      │ collect
//!    │ any failure: the VM runs again,                                                                  ▼
//!    ├────── the pages stay owed ──────────────────────────────────────────────────────────────────  captured
//!    │                                                       encoder: Encoding ─▶ Sealing ─▶ Sealed     │
//!    └── a failure there: the pages of all captured checkpoints are owed again ◀────────────────────────┘
//! ```
//!
//! How pages are copied before, in and after the pause is the [`Strategy`]'s. The device state
//! comes before the last scan, because saving a device may write guest memory. (Scanning meanwhile
//! and once more behind it was measured and was slower: a clean scan costs as much as what it
//! hides, and slows QEMU down.)
//!
//! Invariants: the VM leaves every cycle as it was found, running or paused; a page is struck out
//! of the [`DirtyLog`] only when the seal of a checkpoint that holds it is reported; between
//! Stopping and Resumed nothing is handed over; a seal is handed over only once QEMU has said,
//! behind the pause, that its RAM blocks are those that were copied. (Asking takes QEMU some ms
//! where the guest computes. So what was answered behind one pause stands for what is before the
//! next, and the encoder has the pages meanwhile. Where they have changed, the capture is tried
//! again.)
//!
//! Left out on purpose: when to take a checkpoint (the caller's), and threads: the caller runs the
//! encoder where it likes and brings its reports back by [`Cycle::settle`].

use crate::dirty::DirtyLog;
use crate::encoder::{EncodeError, Message, Outlet, Report};
use crate::parcel::{Parcel, StagingError};
use crate::pool::Pool;
use crate::ports::{BoxError, Machine, Observer, PageReader, Resumed, Stopped, Tracker};
use crate::strategy::{Hands, Precopy, Strategy, ns};
use keyframe_scheduling::Round;
use keyframe_units::{PageSet, RamLayout};
use std::cell::OnceCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

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
    /// The last dirty pages are known, and copied or frozen.
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
    pub const ALL: [Self; 9] = [
        Self::Precopy,
        Self::Stopping,
        Self::Paused,
        Self::DeviceState,
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
            Self::Copied => "copied",
            Self::DeviceState => "device-state",
            Self::Resumed => "resumed",
            Self::Encoding => "encoding",
            Self::Sealing => "sealing",
            Self::Sealed => "sealed",
        }
    }
}

/// Where the time of a checkpoint went. The five phases of the pause are consecutive parts of it
/// and add up to `pause_ns` but for the time between two readings of the clock. The pause is
/// counted from just before QEMU is asked to stop until it has confirmed that the VM runs.
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
    /// Handing the pages to the sink.
    pub encode_ns: u64,
    /// Pages copied in the pause.
    pub pause_pages: u64,
    /// Copying what the pause only froze, while the guest ran again.
    pub collect_ns: u64,
    /// The strategy that copied the pages.
    pub strategy: &'static str,
    /// Since the pause of the checkpoint before; 0 for the first.
    pub interval_ns: u64,
}

/// A checkpoint that is in memory, or partly in the sink, and not sealed yet.
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
    /// Pages of a frozen set were changed without notice.
    #[error(
        "{pages} pages were discarded or merged while the checkpoint was copied (balloon, free page reporting, KSM)"
    )]
    Unannounced {
        /// How many.
        pages: u64,
    },
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
pub struct Cycle {
    log: DirtyLog,
    pool: Pool,
    reader: Arc<dyn PageReader>,
    space: RamLayout,
    /// The blocks as they were behind the newest pause.
    ram: Option<RamLayout>,
    first: Precopy,
    /// Pages that a pause had no memory for; what the next one has at least.
    lacked_pages: u64,
    generation: u64,
    next_seq: u64,
    /// When the newest sealed checkpoint's pause began, and those of the checkpoints in flight.
    sealed_at: Option<Instant>,
    in_flight: VecDeque<(u64, Instant)>,
}

/// What a report came to.
#[derive(Debug)]
pub enum Settled<T> {
    /// The checkpoint is sealed.
    Sealed {
        /// The number of its capture.
        seq: u64,
        /// What the sink told.
        sealed: T,
    },
    /// It failed, and with it all that were captured behind it; their pages are owed again.
    Failed {
        /// The numbers of the captures that are lost; none where it failed while it was being
        /// captured.
        lost: Vec<u64>,
        /// Why.
        error: EncodeError,
    },
    /// Known already.
    Stale,
}

impl Cycle {
    /// A cycle over the VM whose RAM is `space`. `tracker` must not have been drained before.
    pub fn new(
        space: RamLayout,
        tracker: Box<dyn Tracker>,
        reader: Arc<dyn PageReader>,
        pool: Pool,
    ) -> Self {
        Self {
            log: DirtyLog::new(tracker, space.len_pages()),
            pool,
            reader,
            space,
            ram: None,
            first: Precopy::default(),
            lacked_pages: 0,
            generation: 0,
            next_seq: 0,
            sealed_at: None,
            in_flight: VecDeque::new(),
        }
    }

    /// Pages that were drained and are neither in a sealed checkpoint nor in one under way.
    pub fn owed_pages(&self) -> u64 {
        self.log.owed_pages()
    }

    /// Checkpoints captured that are not sealed yet.
    pub fn in_flight(&self) -> u64 {
        self.log.in_flight()
    }

    /// About how many pages a checkpoint taken now would have to copy; none where that cannot be
    /// told cheaply.
    pub fn estimate_pages(&mut self) -> Option<u64> {
        self.log.estimate_pages()
    }

    /// What is in flight did not arrive: its pages are owed again, and what is reported of it is
    /// stale.
    pub fn give_back(&mut self) {
        self.log.give_back();
        self.generation += 1;
        self.in_flight.clear();
    }

    /// The sink has nothing any more: the next checkpoint is a complete one. What is in flight is
    /// reported as stale.
    pub fn restart(&mut self) {
        self.log.restart();
        self.generation += 1;
        self.in_flight.clear();
        self.sealed_at = None;
    }

    /// Ends the tracking, for good: nothing more can be captured.
    pub fn untrack(&mut self) {
        self.log.untrack();
    }

    /// Memory for copied pages.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Captures one checkpoint and hands it to the encoder; its number is in the report that
    /// follows. On an error the VM goes on as it was and the pages are owed to the next checkpoint.
    /// Where a pause found more pages than there was memory for at that moment, it is tried once
    /// more with that much made free; and where RAM blocks have changed since the one before, with
    /// the new ones.
    pub fn capture<M: Machine, O: Observer, L>(
        &mut self,
        machine: &mut M,
        observer: &mut O,
        strategy: &mut dyn Strategy,
        outlet: &mut dyn Outlet<L>,
        label: L,
    ) -> Result<u64, CycleError> {
        // Without a checkpoint before it all of RAM is dirty: no strategy may copy that in the
        // pause.
        let complete = self.sealed_at.is_none() && self.in_flight.is_empty();
        let mut first = std::mem::take(&mut self.first);
        let strategy = if complete { &mut first } else { strategy };
        let generation = self.generation;
        let captured = loop {
            let (mut handed_over, lacked_pages) = (false, self.lacked_pages);
            let remembered = self.ram.is_some();
            let result = self.attempt(machine, observer, strategy, complete, &mut |parcel| {
                handed_over = true;
                outlet.send(Message::Pages { generation, parcel })
            });
            strategy.release();
            match result {
                Ok(captured) => break captured,
                Err(error) => {
                    if handed_over {
                        // Where nobody takes it any more, nothing is put either.
                        let _ = outlet.send(Message::Abandon { generation });
                    }
                    let has_changed = remembered && matches!(error, CycleError::Resized);
                    // A burst just before the pause: the next attempt makes that much room for it.
                    let has_room = lacked_pages == 0
                        && (1..=self.pool.capacity_pages()).contains(&self.lacked_pages);
                    if !(has_changed || has_room) {
                        return Err(error);
                    }
                }
            }
        };
        self.lacked_pages = 0;
        let seq = self.next_seq;
        let paused_at = captured.paused_at;
        outlet
            .send(Message::Seal { generation, seq, captured: Box::new(captured), label })
            .map_err(|source| CycleError::Sink { operation: "hand the checkpoint over", source })?;
        self.next_seq += 1;
        self.log.captured();
        self.in_flight.push_back((seq, paused_at));
        Ok(seq)
    }

    /// Takes in what the encoder reports.
    pub fn settle<T>(&mut self, report: Report<T>) -> Settled<T> {
        if report.generation < self.generation {
            return Settled::Stale;
        }
        match (report.outcome, report.seq) {
            (Ok(sealed), Some(seq)) => {
                self.log.sealed();
                if let Some((_, paused_at)) = self.in_flight.pop_front() {
                    self.sealed_at = Some(paused_at);
                }
                Settled::Sealed { seq, sealed }
            }
            (Ok(_), None) => Settled::Stale,
            (Err(error), _) => {
                self.log.give_back();
                self.generation += 1;
                Settled::Failed {
                    lost: self.in_flight.drain(..).map(|(seq, _)| seq).collect(),
                    error,
                }
            }
        }
    }

    fn attempt<M: Machine, O: Observer>(
        &mut self,
        machine: &mut M,
        observer: &mut O,
        strategy: &mut dyn Strategy,
        complete: bool,
        outlet: &mut dyn FnMut(Parcel) -> Result<(), BoxError>,
    ) -> Result<Captured, CycleError> {
        observer.reached(Phase::Precopy);
        let ram = match self.ram.take() {
            Some(ram) => ram,
            None => machine.ram().map_err(machine_error("list RAM blocks"))?,
        };
        if !ram.same_space(&self.space) {
            return Err(CycleError::OtherRam);
        }
        let mut hands = Hands {
            log: &mut self.log,
            reader: &self.reader,
            pool: &self.pool,
            parcel: Parcel::new(&self.pool),
            held: PageSet::new(self.space.len_pages()),
            timeline: Timeline::default(),
            complete,
            lacked_pages: self.lacked_pages,
            expected: OnceCell::new(),
            outlet,
        };
        strategy.before(&mut hands)?;
        let before = self.in_flight.back().map(|(_, at)| *at).or(self.sealed_at);
        let paused = pause(&mut hands, machine, observer, strategy, &ram, before);
        if let Err(CycleError::Staging(StagingError::Full { needed_pages, .. })) = &paused {
            self.lacked_pages = *needed_pages;
        }
        let mut captured = paused?;
        let collect = Instant::now();
        strategy.collect(&mut hands)?;
        hands.timeline.collect_ns = ns(collect.elapsed());
        hands.hand_over()?;
        if machine.ram().map_err(machine_error("list RAM blocks"))? != ram {
            return Err(CycleError::Resized);
        }
        captured.dirty_pages = hands.held.len();
        captured.timeline = hands.timeline;
        captured.timeline.strategy = strategy.name();
        strategy.learn(&captured.timeline, captured.dirty_pages);
        self.ram = Some(ram);
        Ok(captured)
    }
}

fn pause<M: Machine, O: Observer>(
    hands: &mut Hands<'_>,
    machine: &mut M,
    observer: &mut O,
    strategy: &mut dyn Strategy,
    ram: &RamLayout,
    before: Option<Instant>,
) -> Result<Captured, CycleError> {
    machine.before_stop().map_err(machine_error("prepare the pause"))?;
    observer.reached(Phase::Stopping);
    let (taken_at, start) = (SystemTime::now(), Instant::now());
    let stopped = machine.stop().map_err(machine_error("pause the VM"))?;
    hands.timeline.stop_ns = ns(start.elapsed());
    let inside = inside_pause(hands, machine, observer, strategy, ram);
    let resume = Instant::now();
    let resumed = machine.resume(stopped);
    hands.timeline.resume_ns = ns(resume.elapsed());
    hands.timeline.pause_ns = ns(start.elapsed());
    observer.reached(Phase::Resumed);
    // Both, whatever came before: the watchdog must be disarmed even where the checkpoint is lost
    // already.
    let by = machine.resumed(stopped);
    let device_state = inside?;
    resumed.map_err(machine_error("resume the VM"))?;
    if by.map_err(machine_error("find out who resumed the VM"))? == Resumed::ByOther {
        return Err(CycleError::Torn);
    }
    if let Some(before) = before {
        hands.timeline.interval_ns = ns(start.duration_since(before));
    }
    if stopped == Stopped::Already {
        // Nobody waited for us: the time that it took was no pause of the guest's.
        hands.timeline.pause_ns = 0;
    }
    Ok(Captured {
        ram: ram.clone(),
        device_state,
        taken_at,
        paused_at: start,
        dirty_pages: 0,
        timeline: Timeline::default(),
    })
}

/// Everything between the stop and the resume.
fn inside_pause<M: Machine, O: Observer>(
    hands: &mut Hands<'_>,
    machine: &mut M,
    observer: &mut O,
    strategy: &mut dyn Strategy,
    ram: &RamLayout,
) -> Result<Vec<u8>, CycleError> {
    observer.reached(Phase::Paused);
    let saving = Instant::now();
    let device_state = machine.save_devices().map_err(machine_error("save the device state"))?;
    hands.timeline.device_state_ns = ns(saving.elapsed());
    observer.reached(Phase::DeviceState);
    strategy.freeze(hands)?;
    observer.reached(Phase::Copied);
    observer.paused(&**hands.reader, ram).map_err(CycleError::Audit)?;
    Ok(device_state)
}

fn machine_error(operation: &'static str) -> impl Fn(BoxError) -> CycleError {
    move |source| CycleError::Machine { operation, source }
}

#[cfg(test)]
mod tests;
