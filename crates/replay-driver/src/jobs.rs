//! Several replays at a time.

use crate::ReplayableRecording;
use crate::error::{AnalysisError, Result};
use keyframe_replay::interval::Interval;
pub use keyframe_session::interrupt::interruption;
use std::cmp::Reverse;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A number of concurrent replays, as `--jobs` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobCount {
    /// `auto`: the best number, which a trial finds.
    Auto,
    /// This number, from 1 to 1024.
    Number(u64),
}

/// A text is not a [`JobCount`].
#[derive(Debug, thiserror::Error)]
#[error("write a number from 1 to 1024, or auto")]
pub struct InvalidJobCount;

impl FromStr for JobCount {
    type Err = InvalidJobCount;

    fn from_str(text: &str) -> std::result::Result<Self, InvalidJobCount> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(number @ 1..=1024) => Ok(Self::Number(number)),
            _ => Err(InvalidJobCount),
        }
    }
}

/// Returns an error if the user has asked for an end of an analysis, which can be continued later:
/// [`AnalysisError::Interrupted`].
pub fn check_interrupted(interrupted: &AtomicBool) -> Result<()> {
    if interrupted.load(Ordering::Relaxed) {
        return Err(AnalysisError::Interrupted.into());
    }
    Ok(())
}

/// Returns the default number of concurrent replays: one for each core.
pub fn core_count() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Calls `job` for each of `intervals` of `recording`, `jobs` at a time, or as many as there are
/// cores. Returns the results in any order, without the intervals that had not begun when
/// `interrupted` became true. Intervals with the most work begin first, so that all jobs end at
/// about the same time (longest processing time first: Graham, Bounds on multiprocessing timing
/// anomalies, 1969).
///
/// Error: the recording's log cannot be read.
pub fn for_each_interval<T: Send>(
    recording: &ReplayableRecording,
    intervals: &[Interval],
    jobs: Option<u64>,
    interrupted: &AtomicBool,
    job: impl Fn(&Interval) -> T + Sync,
) -> Result<Vec<T>> {
    let jobs = jobs.map_or_else(core_count, |n| n as usize).min(intervals.len().max(1));
    let efforts = recording.efforts(intervals)?;
    let mut longest_first: Vec<_> = efforts.into_iter().zip(intervals).collect();
    longest_first.sort_by_key(|(effort, _)| Reverse(*effort));
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(intervals.len())));
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((_, interval)) =
                    longest_first.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    if interrupted.load(Ordering::Relaxed) {
                        return;
                    }
                    let one = job(interval);
                    if let Ok(mut done) = done.lock() {
                        done.push(one);
                    }
                }
            });
        }
    });
    Ok(done.into_inner().unwrap_or_default())
}
