//! What is analysed: a recording, whose intervals are replayed, or a run that was not recorded,
//! whose intervals are simulated.

use crate::error::{AnalysisError, Error, Result};
use crate::{LiveRecording, Replay, ReplayOptions, ReplayableRecording, StopReason, UnrecordedRun};
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_store::Store;
use std::sync::atomic::AtomicBool;

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

    /// Returns the version of the QEMU that ran the VM.
    pub fn qemu_version(self) -> &'a str {
        match self {
            Self::Recorded(recording) => &recording.recording.meta.qemu_version,
            Self::Live(live) => &live.recording.meta.qemu_version,
            Self::Unrecorded(run) => &run.qemu_version,
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
            Self::Unrecorded(run) => {
                Ok(KnownIntervals { intervals: run.intervals.clone(), is_complete: true })
            }
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

    /// Runs one QEMU from the checkpoint `begin` through `intervals`, which are consecutive.
    /// `on_end` is called at the end of each of them, and, if `begin` lies before the first, at the
    /// end of this warm-up.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] if the user asked for an end; other errors if a replay or simulation
    /// fails.
    pub fn run_intervals(
        self,
        begin: RecordedCheckpoint,
        intervals: &[Interval],
        options: ReplayOptions,
        control: ReplayControl<'_>,
        on_end: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Recorded(recording) => {
                replay(recording, begin, intervals, &options, control, on_end)
            }
            Self::Live(live) => replay(&*live.now()?, begin, intervals, &options, control, on_end),
            Self::Unrecorded(run) => {
                let [interval] = intervals else {
                    return Err(AnalysisError::SimulatedByInterval.into());
                };
                let ReplayControl { interrupted, on_progress } = control;
                let mut simulated = run.start(interval.begin.checkpoint, options)?;
                if !simulated.run(interval, interrupted, on_progress)? {
                    return Err(Error::Interrupted);
                }
                on_end()?;
                simulated.end()
            }
        }
    }
}

fn replay(
    recording: &ReplayableRecording,
    begin: RecordedCheckpoint,
    intervals: &[Interval],
    options: &ReplayOptions,
    control: ReplayControl<'_>,
    on_end: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let ReplayControl { interrupted, on_progress } = control;
    let from = intervals.first().map_or(begin.icount, |first| first.from_icount);
    let of_warm_up = (begin.icount < from).then_some(Until::Instruction(from));
    let each: Vec<Until> = intervals
        .iter()
        .map(|interval| recording.until(interval.end_icount))
        .collect::<Result<_>>()?;
    let mut ends = of_warm_up.into_iter().chain(each);
    let Some(end) = ends.next() else { return Ok(()) };
    let mut replay = Replay::start(recording, begin, end, options)?;
    let mut reached = replay.arrive(interrupted, on_progress)?;
    loop {
        if reached == StopReason::Interrupted {
            return Err(Error::Interrupted);
        }
        on_end()?;
        let Some(end) = ends.next() else { break };
        reached = replay.go_on(end, interrupted, on_progress)?;
    }
    replay.end()
}
