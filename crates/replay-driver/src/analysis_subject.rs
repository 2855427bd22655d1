//! What is analysed: a recording, whose intervals are replayed, or a run that was not recorded,
//! whose intervals are simulated.

use crate::error::{AnalysisError, Error, Result};
use crate::replay::StartTimes;
use crate::replayable_recording::was_taken_live;
use crate::{LiveRecording, Replay, ReplayOptions, ReplayableRecording, StopReason, UnrecordedRun};
use keyframe_qemu::QemuIdentity;
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_store::Store;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The object of an analysis.
#[derive(Clone, Copy)]
pub enum AnalysisSubject<'a> {
    /// A complete recording. Its replays show what has happened.
    Recorded(&'a ReplayableRecording),
    /// A recording that is still being made.
    Live(&'a LiveRecording),
    /// A run that was not recorded. Its simulations show what may have happened.
    Unrecorded(&'a UnrecordedRun),
}

/// The intervals of a subject that exist at present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownIntervals {
    /// The intervals, by instruction.
    pub intervals: Vec<Interval>,
    /// True if there will be no others.
    pub is_complete: bool,
}

/// The means by which a caller follows and ends replays.
pub struct ReplayControl<'a> {
    /// A flag that becomes true when the user asks for an end.
    pub interrupted: &'a AtomicBool,
    /// A function that is called now and then with the number of the instruction that QEMU has
    /// reached.
    pub on_progress: &'a mut dyn FnMut(u64),
    /// A function that is called once, when QEMU runs, with the times of its start.
    pub on_start: &'a mut dyn FnMut(StartTimes),
}

impl<'a> AnalysisSubject<'a> {
    /// Returns the recording's id, or the run's.
    pub fn id(self) -> &'a str {
        match self {
            Self::Recorded(recording) => &recording.recording.meta.id,
            Self::Live(live) => &live.recording.meta.id,
            Self::Unrecorded(run) => &run.run,
        }
    }

    /// Returns the store of the subject's checkpoints.
    pub fn store(self) -> &'a Store {
        match self {
            Self::Recorded(recording) => &recording.store,
            Self::Live(live) => &live.store,
            Self::Unrecorded(run) => &run.store,
        }
    }

    /// Returns the QEMU that ran the VM.
    pub fn qemu(self) -> QemuIdentity {
        let meta = match self {
            Self::Recorded(recording) => return recording.qemu_identity(),
            Self::Live(live) => &live.recording.meta,
            Self::Unrecorded(run) => return run.qemu.clone(),
        };
        QemuIdentity {
            path: meta.qemu_path.clone().into(),
            version: meta.qemu_version.clone(),
            blake3: meta.qemu_blake3.clone(),
        }
    }

    /// Returns true if an analysis of the subject shows only what may have happened.
    pub fn is_approximate(self) -> bool {
        matches!(self, Self::Unrecorded(_))
    }

    /// Returns the subject's intervals. If `needs_exact_ends`, each ends where a replay can stop
    /// and go on. Error: the recording or its log cannot be read.
    pub fn intervals(self, needs_exact_ends: bool) -> Result<KnownIntervals> {
        match self {
            Self::Recorded(recording) => {
                let intervals = recording.intervals_for_tool(needs_exact_ends)?;
                Ok(KnownIntervals { intervals, is_complete: true })
            }
            Self::Live(live) => live.intervals(needs_exact_ends),
            Self::Unrecorded(run) => run.intervals(),
        }
    }

    /// Returns the work of the replay of each of `intervals`, in instructions
    /// ([`Interval::effort`]). Error: the recording or its log cannot be read.
    pub fn efforts(self, intervals: &[Interval]) -> Result<Vec<u64>> {
        match self {
            Self::Recorded(recording) => recording.efforts(intervals),
            Self::Live(live) => live.efforts(intervals),
            Self::Unrecorded(_) => Ok(intervals.iter().map(Interval::len).collect()),
        }
    }

    /// Returns the time for which the VM ran in `interval` while it was recorded. It is the time
    /// between the interval's checkpoints, or if these were taken later, from a replay, the
    /// interval's part of the whole time by its instructions; `None` while that is not known.
    /// Error: the store or the recording cannot be read.
    pub fn recorded_time(self, interval: &Interval) -> Result<Option<Duration>> {
        let store = self.store();
        let sealed = |id| store.sealed(id).map_err(|e| Error::store(store.path(), e));
        let ends = (sealed(interval.begin.checkpoint)?, interval.end.map(sealed).transpose()?);
        if let (begin, Some(end)) = ends
            && [&begin, &end].into_iter().all(was_taken_live)
        {
            let ns = end.meta.taken_at.duration_since(begin.meta.taken_at).as_nanos();
            return Ok(Some(Duration::from_nanos(u64::try_from(ns).unwrap_or_default())));
        }
        let whole = match self {
            Self::Unrecorded(_) => return Ok(None),
            Self::Recorded(recording) => recording.recording.meta.clone(),
            Self::Live(live) => live.now()?.recording.meta.clone(),
        };
        let share = interval.len() as f64 / whole.instructions.max(1) as f64;
        let time = Duration::from_nanos(whole.duration_ns).mul_f64(share.min(1.0));
        Ok((whole.duration_ns > 0).then_some(time))
    }

    /// Runs one QEMU from the checkpoint `begin` through the interval `first` and the intervals
    /// that `on_end` returns. Each of them must begin where the one before ends. `on_end` is called
    /// at the end of each interval, with the VM stopped; the run ends when it returns `None`. If
    /// `begin` lies before `first`, `on_end` is also called where `first` begins, and returns
    /// `first` then.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] if the user asked for an end; other errors if a replay or simulation
    /// fails; those of `on_end`.
    pub fn run_range(
        self,
        begin: RecordedCheckpoint,
        first: &Interval,
        options: ReplayOptions,
        control: ReplayControl<'_>,
        on_end: &mut dyn FnMut() -> Result<Option<Interval>>,
    ) -> Result<()> {
        let ReplayControl { interrupted, on_progress, on_start } = control;
        if let Self::Unrecorded(run) = self {
            let mut simulated = run.start(first, options)?;
            if !simulated.run(first, interrupted, on_progress)? {
                return Err(Error::Interrupted);
            }
            if on_end()?.is_some() {
                return Err(AnalysisError::SimulatedByInterval.into());
            }
            return simulated.end();
        }
        let recording = self.replayable()?;
        let end = if begin.icount < first.from_icount {
            Until::Instruction(first.from_icount)
        } else {
            recording.get().until(first.end_icount)?
        };
        let mut replay = Replay::start(recording.get(), begin, end, &options)?;
        on_start(replay.start_times);
        let mut reached = replay.arrive(interrupted, on_progress)?;
        loop {
            if reached == StopReason::Interrupted {
                return Err(Error::Interrupted);
            }
            let Some(next) = on_end()? else { break };
            // A live recording has grown since.
            let recording = self.replayable()?;
            replay.set_holds(recording.get().holds()?);
            let end = recording.get().until(next.end_icount)?;
            reached = replay.go_on(end, interrupted, on_progress)?;
        }
        replay.end()
    }

    /// Returns the part of the recording that can be replayed now.
    fn replayable(self) -> Result<Replayable<'a>> {
        match self {
            Self::Recorded(recording) => Ok(Replayable::Whole(recording)),
            Self::Live(live) => live.now().map(Replayable::SoFar),
            Self::Unrecorded(_) => Err(AnalysisError::SimulatedByInterval.into()),
        }
    }
}

/// A recording that can be replayed.
enum Replayable<'a> {
    Whole(&'a ReplayableRecording),
    SoFar(Arc<ReplayableRecording>),
}

impl Replayable<'_> {
    fn get(&self) -> &ReplayableRecording {
        match self {
            Self::Whole(recording) => recording,
            Self::SoFar(recording) => recording,
        }
    }
}
