//! Several replays side by side.

use super::Source;
use crate::error::{AnalysisError, Result};
use keyframe_replay::interval::Interval;
pub use keyframe_session::interrupt::interruption;
use std::cmp::Reverse;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// An error where the user has asked for an end of what can be gone on with.
pub fn unless(interrupted: &AtomicBool) -> Result<()> {
    if interrupted.load(Ordering::Relaxed) {
        return Err(AnalysisError::Interrupted.into());
    }
    Ok(())
}

/// How many at a time, where nobody says.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Has `job` done for each of `intervals` of `source`, `jobs` at a time, or as many as there are
/// cores. Those that were begun before `interrupted`; in any order. Those with the most effort
/// begin first, so that all jobs end at about the same time (longest processing time first: Graham,
/// Bounds on multiprocessing timing anomalies, 1969).
pub fn side_by_side<T: Send>(
    source: &Source,
    intervals: &[Interval],
    jobs: Option<u64>,
    interrupted: &AtomicBool,
    job: impl Fn(&Interval) -> T + Sync,
) -> Result<Vec<T>> {
    let jobs = jobs.map_or_else(cores, |n| n as usize).min(intervals.len().max(1));
    let mut longest_first: Vec<_> = source.efforts(intervals)?.into_iter().zip(intervals).collect();
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
