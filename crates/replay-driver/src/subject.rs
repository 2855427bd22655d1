//! What is analysed: a recording, whose intervals are replayed, or a run that was not recorded,
//! whose intervals are simulated.

use super::{Captured, Followed, Reached, Replay, Source, With};
use crate::error::{AnalysisError, Error, Result};
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_store::Store;
use std::sync::atomic::AtomicBool;

/// It.
#[derive(Clone, Copy)]
pub enum Subject<'a> {
    /// A recording: what its replays see is what was.
    Recorded(&'a Source),
    /// A recording that is still made.
    Followed(&'a Followed),
    /// A run: what its simulations see is what might have been.
    Captured(&'a Captured),
}

impl<'a> Subject<'a> {
    /// The recording's id, or the run's.
    pub fn id(self) -> &'a str {
        match self {
            Self::Recorded(source) => &source.recording.meta.id,
            Self::Followed(followed) => &followed.recording.meta.id,
            Self::Captured(captured) => &captured.run,
        }
    }

    /// Where its checkpoints are.
    pub fn store(self) -> &'a Store {
        match self {
            Self::Recorded(source) => &source.store,
            Self::Followed(followed) => &followed.store,
            Self::Captured(captured) => &captured.store,
        }
    }

    /// The QEMU that ran.
    pub fn qemu_version(self) -> &'a str {
        match self {
            Self::Recorded(source) => &source.recording.meta.qemu_version,
            Self::Followed(followed) => &followed.recording.meta.qemu_version,
            Self::Captured(captured) => &captured.qemu_version,
        }
    }

    /// Whether nobody can say that it was so.
    pub fn is_approximate(self) -> bool {
        matches!(self, Self::Captured(_))
    }

    /// Its intervals, with ends where a replay can stand and go on if that is wanted; and whether
    /// these are all that it will ever have.
    pub fn intervals(self, with_standing: bool) -> Result<(Vec<Interval>, bool)> {
        match self {
            Self::Recorded(source) => Ok((source.intervals_for_tool(with_standing)?, true)),
            Self::Followed(followed) => followed.intervals(with_standing),
            Self::Captured(captured) => Ok((captured.intervals.clone(), true)),
        }
    }

    /// What each of `intervals` takes, in instructions.
    pub fn efforts(self, intervals: &[Interval]) -> Result<Vec<u64>> {
        match self {
            Self::Recorded(source) => source.efforts(intervals),
            Self::Followed(followed) => followed.efforts(intervals),
            Self::Captured(_) => Ok(intervals.iter().map(Interval::len).collect()),
        }
    }

    /// Brings one QEMU from `begin` on through `warm_up` instructions, where there are any, and
    /// then through `intervals`, which follow each other. `cut` is called at the end of each of
    /// these.
    pub fn go_through(
        self,
        begin: RecordedCheckpoint,
        intervals: &[Interval],
        with: With,
        (interrupted, tell): (&AtomicBool, &mut dyn FnMut(u64)),
        cut: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Recorded(source) => {
                replay(source, begin, intervals, &with, (interrupted, tell), cut)
            }
            Self::Followed(followed) => {
                replay(&*followed.now()?, begin, intervals, &with, (interrupted, tell), cut)
            }
            Self::Captured(captured) => {
                let [interval] = intervals else {
                    return Err(AnalysisError::SimulatedByInterval.into());
                };
                let mut simulation = captured.start(interval.begin.checkpoint, with)?;
                if !simulation.run(interval, interrupted, tell)? {
                    return Err(Error::Interrupted);
                }
                cut()?;
                simulation.end()
            }
        }
    }
}

fn replay(
    source: &Source,
    begin: RecordedCheckpoint,
    intervals: &[Interval],
    with: &With,
    (interrupted, tell): (&AtomicBool, &mut dyn FnMut(u64)),
    cut: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let from = intervals.first().map_or(begin.icount, |first| first.from_icount);
    let of_warm_up = (begin.icount < from).then_some(Until::Instruction(from));
    let each: Vec<Until> = intervals
        .iter()
        .map(|interval| source.until(interval.end_icount))
        .collect::<Result<_, _>>()?;
    let mut ends = of_warm_up.into_iter().chain(each);
    let Some(end) = ends.next() else { return Ok(()) };
    let mut replay = Replay::start(source, begin, end, with)?;
    let mut reached = replay.arrive(interrupted, tell)?;
    loop {
        if reached == Reached::Interrupted {
            return Err(Error::Interrupted);
        }
        cut()?;
        let Some(end) = ends.next() else { break };
        reached = replay.go_on(end, interrupted, tell)?;
    }
    replay.end()
}
