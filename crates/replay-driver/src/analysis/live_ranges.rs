//! The length of ranges while a recording goes on, from what the intervals have taken so far.

use super::Analysis;
use super::files::finished_part;
use crate::error::Result;
use keyframe_cluster::Queue;
use keyframe_model::{RangeTimes, range_length};
use keyframe_replay::interval::Interval;
use std::collections::BTreeSet;

/// A sum of times, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    seconds: f64,
    count: u32,
}

impl Sum {
    fn add(&mut self, seconds: f64) {
        self.seconds += seconds;
        self.count += 1;
    }

    /// NaN if nothing was added.
    fn mean(self) -> f64 {
        self.seconds / f64::from(self.count)
    }
}

/// Measures intervals as their parts appear.
#[derive(Debug, Default)]
pub(super) struct LiveRanges {
    /// The intervals whose parts were seen.
    seen: BTreeSet<u32>,
    recorded: Sum,
    /// Intervals that are first in their range.
    first: Sum,
    /// The other intervals.
    following: Sum,
    /// The names of the workers that have made parts.
    workers: BTreeSet<String>,
    length: u32,
}

impl LiveRanges {
    /// Looks for new parts of `intervals`, and sets the length of ranges in `queue`. Errors: the
    /// recording cannot be read; the queue cannot be written.
    pub fn update(
        &mut self,
        analysis: &Analysis<'_>,
        intervals: &[Interval],
        queue: &Queue,
    ) -> Result<()> {
        for interval in intervals {
            if self.seen.contains(&interval.index) {
                continue;
            }
            let Some(done) = finished_part(&analysis.out, interval) else { continue };
            self.seen.insert(interval.index);
            self.workers.insert(done.worker);
            self.recorded.add(analysis.subject.recorded_time(interval)?.as_secs_f64());
            let took_s = done.wall_ns as f64 / 1e9;
            if done.start.is_some() { self.first.add(took_s) } else { self.following.add(took_s) }
        }
        // Before a range had a second interval, its start is a guess: all of the first one.
        let first_s = self.first.mean();
        let run_s = if self.following.count > 0 { self.following.mean() } else { first_s / 2.0 };
        let times = RangeTimes {
            interval_s: self.recorded.mean(),
            run_s,
            start_s: (first_s - run_s).max(0.0),
        };
        let length = range_length(times, self.workers.len() as u64);
        if length != self.length {
            queue.set_range_length(length)?;
            self.length = length;
        }
        Ok(())
    }
}
