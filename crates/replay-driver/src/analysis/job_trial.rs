//! Finds the best number of jobs on this machine by a trial.
//!
//! ```text
//!   one job     ├── interval a ──┤                       effort of a / time
//!   two jobs    ├── interval b ──┤                       effort of b and c / time: worth it if it
//!               ├── interval c ────┤                     is a tenth more
//!   four jobs   ...
//! ```
//!
//! A tool may use a second core itself: one that reads a plugin's records does. The intervals of the
//! trial keep their parts, so the trial costs only their starts.

use super::Analysis;
use super::files::finished_part;
use super::parts::{PartMaker, Tries};
use crate::error::Result;
use crate::event::{EventSink, ReplayEvent};
use crate::jobs::core_count;
use keyframe_replay::interval::Interval;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The factor by which more jobs must be faster.
const GAIN_MIN: f64 = 1.1;
/// The trial takes at most one of so many intervals.
const SHARE_MAX: usize = 3;

impl Analysis<'_> {
    /// Makes the parts of some intervals with 1, 2, 4 and more jobs, up to one for each core, and
    /// returns the number that was fastest. Stops at the first number that does not gain a tenth.
    /// If there are too few intervals for a trial, returns the number of cores. `tries` is the
    /// number of times that an interval is tried.
    ///
    /// Errors: those of [`Analysis::make`].
    pub fn best_job_count(
        &mut self,
        tries: u32,
        interrupted: &AtomicBool,
        events: &dyn EventSink<ReplayEvent>,
    ) -> Result<u64> {
        let cores = core_count();
        let mut open = self.intervals();
        open.retain(|one| finished_part(&self.out, one).is_none());
        let steps = |jobs: &usize| Some(jobs * 2).filter(|jobs| *jobs <= cores);
        let mut counts: Vec<usize> = std::iter::successors(Some(1), steps).collect();
        if counts.last() != Some(&cores) {
            counts.push(cores);
        }
        if counts.len() < 2 || counts.iter().sum::<usize>() * SHARE_MAX > open.len() {
            return Ok(cores as u64);
        }
        let (mut best, mut best_rate) = (1, 0.0);
        for jobs in counts {
            let rest = open.split_off(jobs);
            let tried = std::mem::replace(&mut open, rest);
            let effort: u64 = self.subject.efforts(&tried)?.iter().sum();
            let began = Instant::now();
            self.make_at_once(&tried, tries, interrupted, events)?;
            self.tried.extend(tried.iter().map(|one| one.index));
            let is_made = |one: &Interval| finished_part(&self.out, one).is_some();
            if interrupted.load(Ordering::Relaxed) || !tried.iter().all(is_made) {
                break;
            }
            let rate = effort as f64 / began.elapsed().as_secs_f64();
            if rate < best_rate * GAIN_MIN {
                break;
            }
            (best, best_rate) = (jobs as u64, rate);
        }
        Ok(best)
    }

    /// Makes the parts of `intervals`, all at the same time.
    fn make_at_once(
        &self,
        intervals: &[Interval],
        tries: u32,
        interrupted: &AtomicBool,
        events: &dyn EventSink<ReplayEvent>,
    ) -> Result<()> {
        let make = |interval: &Interval| {
            let name = format!("trial-{:?}", std::thread::current().id());
            let maker = PartMaker { name: &name, tries_max: tries, interrupted };
            let made = self.make_alone(interval, maker, Tries::default(), &mut |_| ());
            events.event(&ReplayEvent::Replayed { instructions: interval.len() });
            made
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                intervals.iter().map(|one| scope.spawn(move || make(one))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).fold(Ok(()), Result::and)
        })
    }
}
