//! The length of ranges while a recording goes on, from what the intervals have taken so far.

use super::Analysis;
use super::files::finished_part;
use keyframe_cluster::Queue;
use keyframe_model::{RangeTimes, range_length};
use keyframe_replay::interval::Interval;
use std::collections::{BTreeMap, BTreeSet};

/// A worker that has made no part for so long is at work no more.
const AT_WORK_NS: u64 = 60_000_000_000;

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
    /// The end of the newest part of each worker, in nanoseconds since 1970.
    workers: BTreeMap<String, u64>,
    length: u32,
}

impl LiveRanges {
    /// Looks for new parts of `intervals`, and sets the length of ranges in `queue`. If that cannot
    /// be written, workers keep the former length.
    pub fn update(&mut self, analysis: &Analysis<'_>, intervals: &[Interval], queue: &Queue) {
        for interval in intervals {
            if self.seen.contains(&interval.index) {
                continue;
            }
            let Some(done) = finished_part(&analysis.out, interval) else { continue };
            self.seen.insert(interval.index);
            let end_ns = done.began_at_ns.saturating_add(done.wall_ns);
            self.workers.insert(done.worker, end_ns);
            // An interval whose time is not known does not count.
            if let Ok(Some(time)) = analysis.subject.recorded_time(interval) {
                self.recorded.add(time.as_secs_f64());
            }
            let took_s = done.wall_ns as f64 / 1e9;
            if done.start.is_some() { self.first.add(took_s) } else { self.following.add(took_s) }
        }
        // Until a range has had a second interval, half of the first one's time counts as its start.
        let first_s = self.first.mean();
        let run_s = if self.following.count > 0 { self.following.mean() } else { first_s / 2.0 };
        let times = RangeTimes {
            interval_s: self.recorded.mean(),
            run_s,
            start_s: (first_s - run_s).max(0.0),
        };
        let newest_ns = self.workers.values().copied().max().unwrap_or_default();
        let is_at_work = |end_ns: &&u64| newest_ns - **end_ns < AT_WORK_NS;
        let workers = self.workers.values().filter(is_at_work).count();
        let length = range_length(times, workers as u64);
        if length != self.length {
            self.length = queue.set_range_length(length).map_or(self.length, |()| length);
        }
    }
}
