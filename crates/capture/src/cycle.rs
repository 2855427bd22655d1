//! The checkpoint cycle of one machine: captures checkpoints one after the other, and keeps track
//! of those that the encoder has not sealed yet.
//!
//! ```text
//!            ┌─────────┐                 ┌────────── VM paused ───────────┐
//!   Idle ──▶ │ Precopy │ ──▶ Stopping ──▶│ Paused ─▶ DeviceState ─▶ Copied │─▶ Resumed
//!    ▲       └─────────┘                 └────────────────────────────────┘      │ collect
//!    │ any failure: the VM runs again,                                           ▼
//!    ├────── the pages stay owed ──────────────────────────────────────────── captured
//!    │                                      encoder: Encoding ─▶ Sealing ─▶ Sealed  │
//!    └── a failure there: the pages of all captured checkpoints are owed again ◀────┘
//! ```
//!
//! A [`CopyStrategy`] copies the pages before, in and after the pause. The device state is saved
//! before the last scan, because saving a device may write guest memory.
//!
//! Invariants:
//!
//! - The VM leaves every cycle as it entered it, running or paused.
//! - A page is struck out of the [`DirtyLog`] only when the report says that a checkpoint that
//!   holds it is sealed.
//! - Nothing is handed to the encoder between Stopping and Resumed.
//! - A checkpoint is handed over for sealing only after the VMM has confirmed, after the pause,
//!   that its RAM blocks are the ones that were copied. The request takes QEMU some milliseconds
//!   while the guest computes. So the answer after one pause also serves as the list before the
//!   next one, and the encoder has the pages meanwhile. If the blocks have changed, the capture is
//!   tried again.
//!
//! Not here: the time at which a checkpoint is taken, and threads. The caller runs the encoder on a
//! thread of its own and hands its reports to [`CaptureCycle::settle`].

use crate::checkpoint::{CapturePhase, CaptureTimeline, CapturedCheckpoint};
use crate::context::CaptureContext;
use crate::dirty::DirtyLog;
use crate::encoder::{EncodeError, EncodeReport, EncoderMessage, EncoderQueue};
use crate::error::{CaptureError, machine_error};
use crate::machine::{Machine, PauseRecord, PauseWork};
use crate::ports::{BoxError, CaptureObserver, DirtyTracker, PageReader};
use crate::staged_pages::{StagedPages, StagingError};
use crate::staging_pool::StagingPool;
use crate::strategy::{CopyStrategy, PrecopyStrategy};
use keyframe_units::{PageSet, RamLayout, duration_ns, elapsed_ns};
use keyframe_vmm::StopOutcome;
use std::cell::OnceCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Takes checkpoints of one machine, one after the other.
pub struct CaptureCycle {
    log: DirtyLog,
    pool: StagingPool,
    reader: Arc<dyn PageReader>,
    space: RamLayout,
    /// The RAM blocks after the newest pause.
    ram: Option<RamLayout>,
    /// The pages for which a pause had no memory: the next one gets at least as much.
    lacked_pages: u64,
    wants_another_try: bool,
    generation: u64,
    next_seq: u64,
    /// When the pause of the newest sealed checkpoint began.
    sealed_pause: Option<Instant>,
    in_flight: VecDeque<CheckpointInFlight>,
}

/// A captured checkpoint that the encoder has not sealed yet.
struct CheckpointInFlight {
    seq: u64,
    paused_at: Instant,
}

/// The effect of a report of the encoder on the cycle.
#[derive(Debug)]
pub enum SettledReport<T> {
    /// A checkpoint is sealed.
    Sealed {
        /// The number of its capture.
        seq: u64,
        /// The sink's result.
        sealed: T,
    },
    /// A checkpoint failed, and with it all later ones. Their pages are owed again.
    Failed {
        /// The numbers of the lost captures; empty if the checkpoint failed while it was captured.
        lost: Vec<u64>,
        /// The reason.
        error: EncodeError,
    },
    /// The report is about a checkpoint that has been given up before.
    Stale,
}

impl CaptureCycle {
    /// Creates a cycle over a machine with the RAM `space`, which `reader` reads and whose written
    /// pages `tracker` finds. Copies go into the memory of `pool`. `tracker` must not have been
    /// drained before.
    pub fn new(
        space: RamLayout,
        tracker: Box<dyn DirtyTracker>,
        reader: Arc<dyn PageReader>,
        pool: StagingPool,
    ) -> Self {
        Self {
            log: DirtyLog::new(tracker, space.len_pages()),
            pool,
            reader,
            space,
            ram: None,
            lacked_pages: 0,
            wants_another_try: false,
            generation: 0,
            next_seq: 0,
            sealed_pause: None,
            in_flight: VecDeque::new(),
        }
    }

    /// Returns the number of drained pages that neither a sealed checkpoint nor one in flight
    /// holds.
    pub fn owed_pages(&self) -> u64 {
        self.log.owed_pages()
    }

    /// Returns the number of captured checkpoints that are not sealed yet.
    pub fn in_flight(&self) -> u64 {
        self.log.in_flight()
    }

    /// Estimates how many pages a checkpoint taken now would copy. Returns `None` if the tracker
    /// cannot count cheaply.
    pub fn estimate_pages(&mut self) -> Option<u64> {
        self.log.estimate_pages()
    }

    /// Gives up the checkpoints in flight: their pages are owed again, and the encoder's later
    /// reports about them are stale.
    pub fn give_back(&mut self) {
        self.log.give_back();
        self.generation += 1;
        self.in_flight.clear();
    }

    /// Begins anew for a sink that holds no page: the next checkpoint is complete. Later reports
    /// about the checkpoints in flight are stale.
    pub fn restart(&mut self) {
        self.log.restart();
        self.generation += 1;
        self.in_flight.clear();
        self.sealed_pause = None;
    }

    /// Returns the pages that were written since the newest capture, while the machine is paused; all
    /// pages if the tracker fails. The next checkpoint owes them.
    pub fn written_in_pause(&mut self) -> PageSet {
        self.log.drain_paused(true).unwrap_or_else(|_| self.log.owed().clone())
    }

    /// Returns the pages that were written since the last look at the paused machine; all pages if
    /// the tracker fails. The next checkpoint owes them.
    pub fn written_since_look(&mut self) -> PageSet {
        self.log.drain_paused(false).unwrap_or_else(|_| self.log.owed().clone())
    }

    /// Remembers all pages that are found written from now on.
    pub fn watch(&mut self) {
        self.log.watch();
    }

    /// Returns the pages that were found written since [`Self::watch`]; `None` if it was not called.
    pub fn watched(&self) -> Option<&PageSet> {
        self.log.watched()
    }

    /// Returns the pages that the newest captured checkpoint has beyond the one before it; `None` if
    /// it is sealed already.
    pub fn captured_pages(&self) -> Option<&PageSet> {
        self.log.newest_in_flight()
    }

    /// Ends dirty tracking for good. Every later capture fails.
    pub fn untrack(&mut self) {
        self.log.untrack();
    }

    /// Returns the memory for copied pages, which the cycle and the encoder share.
    pub fn pool(&self) -> &StagingPool {
        &self.pool
    }

    /// Captures one checkpoint and hands it to the encoder. Returns the capture's number, which the
    /// encoder's report repeats.
    ///
    /// # Errors
    ///
    /// After an error the VM is as it was before, and the next checkpoint owes the pages. Another
    /// call may succeed at once ([`Self::wants_another_try`]).
    pub fn capture<M: Machine, O: CaptureObserver, L>(
        &mut self,
        machine: &mut M,
        observer: &mut O,
        strategy: &mut dyn CopyStrategy,
        queue: &mut dyn EncoderQueue<L>,
        label: L,
    ) -> Result<u64, CaptureError> {
        // All of RAM is dirty before the first checkpoint: too much for a pause, so pre-copy is
        // used whatever the strategy, unless scans have to be in pauses.
        let is_complete = self.sealed_pause.is_none() && self.in_flight.is_empty();
        let mut precopy = PrecopyStrategy::default();
        let by_precopy = is_complete && !strategy.scans_in_pauses();
        let strategy = if by_precopy { &mut precopy } else { strategy };
        let generation = self.generation;
        let (mut handed_over, lacked_pages) = (false, self.lacked_pages);
        let knows_ram = self.ram.is_some();
        self.wants_another_try = false;
        let result = self.attempt(machine, observer, strategy, is_complete, &mut |pages| {
            handed_over = true;
            queue.send(EncoderMessage::Pages { generation, pages })
        });
        strategy.release();
        // It is still open if the capture failed before the pause.
        self.log.close_window();
        let captured = result.inspect_err(|error| {
            if handed_over {
                // If the encoder has ended, it cannot put the pages either.
                let _ = queue.send(EncoderMessage::Abandon { generation });
            }
            let has_changed = knows_ram && matches!(error, CaptureError::Resized);
            let was_burst = lacked_pages == 0 && self.lacked_pages > 0;
            self.wants_another_try = has_changed || was_burst;
        })?;
        self.lacked_pages = 0;
        let seq = self.next_seq;
        let paused_at = captured.paused_at;
        queue
            .send(EncoderMessage::Seal { generation, seq, captured: Box::new(captured), label })
            .map_err(|source| CaptureError::Sink {
                operation: "hand the checkpoint over",
                source,
            })?;
        self.next_seq += 1;
        self.log.record_captured();
        self.in_flight.push_back(CheckpointInFlight { seq, paused_at });
        Ok(seq)
    }

    /// Returns whether the last capture failed for a reason that another call removes. If the pause
    /// found more pages than there was memory for, the next call frees that much first, or copies
    /// pages in portions before its pause. If RAM blocks have changed since the previous
    /// checkpoint, it takes the new ones.
    ///
    /// The caller begins everything anew that belongs to one pause, such as the cut of the disks:
    /// the VM ran after the failed pause.
    pub fn wants_another_try(&self) -> bool {
        self.wants_another_try
    }

    /// Takes in a report of the encoder: after a failure the pages of the lost checkpoints are owed
    /// again. Returns what the report means for the caller.
    pub fn settle<T>(&mut self, report: EncodeReport<T>) -> SettledReport<T> {
        if report.generation < self.generation {
            return SettledReport::Stale;
        }
        match (report.outcome, report.seq) {
            (Ok(sealed), Some(seq)) => {
                self.log.record_sealed();
                if let Some(checkpoint) = self.in_flight.pop_front() {
                    self.sealed_pause = Some(checkpoint.paused_at);
                }
                SettledReport::Sealed { seq, sealed }
            }
            (Ok(_), None) => SettledReport::Stale,
            (Err(error), _) => {
                self.log.give_back();
                self.generation += 1;
                let lost = self.in_flight.drain(..).map(|checkpoint| checkpoint.seq).collect();
                SettledReport::Failed { lost, error }
            }
        }
    }

    fn attempt<M: Machine, O: CaptureObserver>(
        &mut self,
        machine: &mut M,
        observer: &mut O,
        strategy: &mut dyn CopyStrategy,
        is_complete: bool,
        outlet: &mut dyn FnMut(StagedPages) -> Result<(), BoxError>,
    ) -> Result<CapturedCheckpoint, CaptureError> {
        observer.reached(CapturePhase::Precopy);
        let ram = match self.ram.take() {
            Some(ram) => ram,
            None => machine.ram_layout().map_err(machine_error("list RAM blocks"))?,
        };
        if !ram.same_space(&self.space) {
            return Err(CaptureError::OtherRam);
        }
        let previous_pause =
            self.in_flight.back().map(|checkpoint| checkpoint.paused_at).or(self.sealed_pause);
        let mut context = CaptureContext {
            log: &mut self.log,
            reader: &self.reader,
            pool: &self.pool,
            staged: StagedPages::new(&self.pool),
            held: PageSet::new(self.space.len_pages()),
            timeline: CaptureTimeline::default(),
            is_complete,
            lacked_pages: self.lacked_pages,
            rounds_before_wait: 0,
            expected: OnceCell::new(),
            outlet,
        };
        let scan_pause_ns = if strategy.wants_scan_pause(&mut context) {
            scan_in_pause(machine, &mut context)?
        } else {
            0
        };
        strategy.before(&mut context)?;
        let mut look = LastLook { context: &mut context, observer, strategy, ram: &ram };
        let paused = machine.pause(&mut look);
        context.log.close_window();
        if let Err(CaptureError::Staging(StagingError::Full { needed_pages, .. })) = &paused {
            self.lacked_pages = *needed_pages;
        }
        let paused = paused?;
        record_pause(&mut context.timeline, &paused, previous_pause);
        context.timeline.pause_ns += scan_pause_ns;
        let collecting = Instant::now();
        strategy.collect(&mut context)?;
        context.timeline.collect_ns = elapsed_ns(collecting);
        context.hand_over()?;
        if machine.ram_layout().map_err(machine_error("list RAM blocks"))? != ram {
            return Err(CaptureError::Resized);
        }
        let dirty_pages = context.held.len();
        let timeline = CaptureTimeline { strategy: strategy.name(), ..context.timeline };
        strategy.learn(&timeline, dirty_pages);
        self.ram = Some(ram.clone());
        Ok(CapturedCheckpoint {
            ram,
            device_state: paused.device_state,
            taken_at: paused.taken_at,
            paused_at: paused.paused_at,
            dirty_pages,
            timeline,
        })
    }
}

/// Pauses the VM for a scan, and copies the found pages once it runs again. Returns how long the
/// guest stood still, in nanoseconds.
fn scan_in_pause<M: Machine>(
    machine: &mut M,
    context: &mut CaptureContext<'_>,
) -> Result<u64, CaptureError> {
    let started = Instant::now();
    let mut found = None;
    machine.stand_still(&mut || {
        found = Some(context.scan_paused()?);
        Ok(())
    })?;
    let stood_ns = elapsed_ns(started);
    if let Some(found) = found {
        context.copy_scanned(&found, started)?;
    }
    Ok(stood_ns)
}

/// Enters the times of a pause into the timeline. `previous_pause`: when the previous one began.
fn record_pause(
    timeline: &mut CaptureTimeline,
    pause: &PauseRecord,
    previous_pause: Option<Instant>,
) {
    timeline.stop_ns = pause.stop_ns;
    timeline.device_state_ns = pause.device_state_ns;
    timeline.resume_ns = pause.resume_ns;
    // The guest of a VM that was paused before did not wait for the checkpoint.
    timeline.pause_ns = if pause.stop == StopOutcome::AlreadyPaused { 0 } else { pause.pause_ns };
    if let Some(previous) = previous_pause {
        timeline.interval_ns = duration_ns(pause.paused_at.duration_since(previous));
    }
}

/// The cycle's part in the pause: the strategy's last pages, then the observer's look at the VM.
struct LastLook<'a, 'b, O> {
    context: &'a mut CaptureContext<'b>,
    observer: &'a mut O,
    strategy: &'a mut dyn CopyStrategy,
    ram: &'a RamLayout,
}

impl<O: CaptureObserver> PauseWork for LastLook<'_, '_, O> {
    fn reached(&mut self, phase: CapturePhase) {
        self.observer.reached(phase);
    }

    fn look(&mut self) -> Result<(), CaptureError> {
        self.strategy.freeze(self.context)?;
        self.observer.reached(CapturePhase::Copied);
        self.observer.paused(&**self.context.reader, self.ram).map_err(CaptureError::Audit)
    }
}

#[cfg(test)]
mod tests;
