//! Chooses the interval and the pre-copy target that keep a user's budget (a longest pause, a
//! largest share of the guest's time), by what checkpoints measure.
//!
//! ```text
//!   cost of a checkpoint = pause + pages written x first write
//!   overhead             = cost / interval           => interval >= cost / asked overhead
//!   pause                = fixed + pages left x copy => pages left <= (asked pause - fixed) / copy
//! ```
//!
//! *Fixed* is the time of a pause without copying: stop, device state, scan, resume. A first write
//! is the guest's write to a page that the tracker has protected again; its cost is measured on
//! this host. Averages are exponential with a weight of 1/4 for the newest value, so one odd
//! checkpoint changes little.

use std::fmt;

/// The shortest interval that is ever chosen.
const INTERVAL_NS_MIN: u64 = 10_000_000;
/// The longest interval that is ever chosen: a guest writes mostly the same pages in one minute and
/// in two.
const INTERVAL_NS_MAX: u64 = 60_000_000_000;
/// The smallest pre-copy target: fewer pages are not worth another round.
const TARGET_PAGES_MIN: u64 = 32;
/// The largest pre-copy target.
const TARGET_PAGES_MAX: u64 = 65_536;

/// The budget: the limits that a user sets for pauses and overhead.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    /// The longest pause, in nanoseconds; `None` for no limit.
    pub pause_ns: Option<u64>,
    /// The largest share of the guest's time, for example 0.03 for 3 %; `None` for no limit.
    pub overhead: Option<f64>,
}

/// The measured costs of one checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointCost {
    /// The time from the previous checkpoint to this one, in nanoseconds.
    pub interval_ns: u64,
    /// The duration of the whole pause, in nanoseconds.
    pub pause_ns: u64,
    /// The part of the pause that copied pages, in nanoseconds.
    pub copy_ns: u64,
    /// The number of pages copied in the pause.
    pub pause_pages: u64,
    /// The number of pages that scans found since the last checkpoint: each was a first write.
    pub written_pages: u64,
    /// True if pages were pre-copied: then more rounds can shorten the pause. Otherwise only a
    /// shorter interval can.
    pub precopied: bool,
}

/// The interval and the copying target that the tuner has chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The interval between checkpoints, in nanoseconds.
    pub interval_ns: u64,
    /// The number of pages that pre-copy may leave to the pause.
    pub target_pages: u64,
    /// The reason.
    pub why: TuningReason,
}

/// The reason why an interval was chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum TuningReason {
    /// The user asked for this interval.
    AsAsked,
    /// The interval is longer than asked, because a checkpoint costs the guest too much time.
    Overhead {
        /// The cost of a checkpoint to the guest, in nanoseconds.
        cost_ns: u64,
    },
    /// The interval is shorter than asked, so that the pause has less to copy.
    Pause {
        /// The time of copying in the pause, in nanoseconds.
        copy_ns: u64,
    },
    /// No interval keeps the longest pause: a pause without copying exceeds it.
    Impossible {
        /// The time of a pause without copying, in nanoseconds.
        fixed_ns: u64,
    },
}

impl fmt::Display for TuningReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        match self {
            Self::AsAsked => f.write_str("as asked"),
            Self::Overhead { cost_ns } => {
                write!(
                    f,
                    "a checkpoint costs the guest {:.1} ms, so checkpoints are taken less often",
                    ms(*cost_ns)
                )
            }
            Self::Pause { copy_ns } => write!(
                f,
                "copying took {:.1} ms of the pause, so checkpoints are taken more often and copy \
                 less",
                ms(*copy_ns)
            ),
            Self::Impossible { fixed_ns } => write!(
                f,
                "a pause without copying takes {:.1} ms, which exceeds the longest pause asked for",
                ms(*fixed_ns)
            ),
        }
    }
}

/// Chooses, from measurements of past checkpoints, the interval between checkpoints and the number
/// of pages that pre-copy may leave to the pause.
#[derive(Clone, Debug)]
pub struct Tuner {
    budget: Budget,
    interval_ns: u64,
    first_write_ns: u64,
    fixed_ns: Option<f64>,
    copy_ns_per_page: Option<f64>,
    /// The time of copying in a pause, and that time per nanosecond of the interval.
    copy_ns: Option<f64>,
    copy_rate: Option<f64>,
    cost_ns: Option<f64>,
    precopied: bool,
}

impl Tuner {
    /// Creates a tuner that keeps `budget`, and uses an interval of `interval_ns` nanoseconds
    /// between checkpoints if the budget allows it. A first write to a protected page costs
    /// `first_write_ns` nanoseconds on this host.
    pub fn new(budget: Budget, interval_ns: u64, first_write_ns: u64) -> Self {
        Self {
            budget,
            interval_ns,
            first_write_ns,
            fixed_ns: None,
            copy_ns_per_page: None,
            copy_ns: None,
            copy_rate: None,
            cost_ns: None,
            precopied: true,
        }
    }

    /// Learns from a checkpoint, which must not be the complete first one of a run.
    pub fn learn(&mut self, measured: &CheckpointCost) {
        average(&mut self.fixed_ns, measured.pause_ns.saturating_sub(measured.copy_ns) as f64);
        average(&mut self.copy_ns, measured.copy_ns as f64);
        if measured.interval_ns > 0 {
            average(&mut self.copy_rate, measured.copy_ns as f64 / measured.interval_ns as f64);
        }
        if measured.pause_pages >= 16 {
            average(
                &mut self.copy_ns_per_page,
                measured.copy_ns as f64 / measured.pause_pages as f64,
            );
        }
        let writes_ns = measured.written_pages.saturating_mul(self.first_write_ns);
        average(&mut self.cost_ns, measured.pause_ns.saturating_add(writes_ns) as f64);
        self.precopied = measured.precopied;
    }

    /// Returns the interval and the number of pages left to the pause, for the next checkpoint.
    pub fn tuned(&self) -> Tuned {
        let (mut interval_ns, mut why) = (self.interval_ns, TuningReason::AsAsked);
        if let (Some(pause_ns), Some(fixed_ns)) = (self.budget.pause_ns, self.fixed_ns) {
            let left_ns = pause_ns as f64 - fixed_ns;
            let copy_ns = self.copy_ns.unwrap_or(0.0);
            // The pages to copy grow with the interval, at most in proportion.
            let longest_ns = (left_ns / self.copy_rate.unwrap_or(0.0).max(1e-9)) as u64;
            if left_ns <= 0.0 {
                why = TuningReason::Impossible { fixed_ns: fixed_ns as u64 };
            } else if !self.precopied && longest_ns < interval_ns {
                interval_ns = longest_ns;
                why = TuningReason::Pause { copy_ns: copy_ns as u64 };
            }
        }
        if let (Some(overhead), Some(cost_ns)) =
            (self.budget.overhead.filter(|o| *o > 0.0), self.cost_ns)
        {
            let needed_ns = (cost_ns / overhead) as u64;
            if needed_ns > interval_ns {
                interval_ns = needed_ns.min(INTERVAL_NS_MAX.max(interval_ns));
                why = TuningReason::Overhead { cost_ns: cost_ns as u64 };
            }
        }
        Tuned {
            interval_ns: interval_ns.max(INTERVAL_NS_MIN),
            target_pages: self.target_pages(),
            why,
        }
    }

    fn target_pages(&self) -> u64 {
        let default = crate::PrecopyPolicy::default().target_pages;
        let (Some(pause_ns), Some(fixed_ns), Some(copy)) =
            (self.budget.pause_ns, self.fixed_ns, self.copy_ns_per_page)
        else {
            return default;
        };
        // Half of the remaining time: the guest writes on between the last round and the pause.
        let left_ns = (pause_ns as f64 - fixed_ns).max(0.0) / 2.0;
        ((left_ns / copy.max(1.0)) as u64).clamp(TARGET_PAGES_MIN, TARGET_PAGES_MAX)
    }
}

fn average(mean: &mut Option<f64>, value: f64) {
    *mean = Some(mean.map_or(value, |mean| (3.0 * mean + value) / 4.0));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn tuner(pause_ms: Option<u64>, overhead: Option<f64>) -> Tuner {
        Tuner::new(Budget { pause_ns: pause_ms.map(|ms| ms * MS), overhead }, 1000 * MS, 1000)
    }

    fn measured(
        pause_ms: u64,
        copy_ms: u64,
        pause_pages: u64,
        written_pages: u64,
    ) -> CheckpointCost {
        let precopied = true;
        let interval_ns = 1000 * MS;
        CheckpointCost {
            interval_ns,
            pause_ns: pause_ms * MS,
            copy_ns: copy_ms * MS,
            pause_pages,
            written_pages,
            precopied,
        }
    }

    #[test]
    fn nothing_asked_or_measured_is_as_asked() {
        let mut tuner = tuner(None, None);
        assert_eq!(tuner.tuned().why, TuningReason::AsAsked);
        tuner.learn(&measured(500, 400, 100_000, 1_000_000));
        assert_eq!(tuner.tuned().interval_ns, 1000 * MS);
        assert_eq!(tuner.tuned().target_pages, crate::PrecopyPolicy::default().target_pages);
    }

    #[test]
    fn an_overhead_is_kept_by_longer_intervals_and_given_back_when_the_guest_calms_down() {
        let mut tuner = tuner(None, Some(0.03));
        // 2 ms of pause and 58 ms of first writes: 60 ms, which are 3 % of 2 s.
        tuner.learn(&measured(2, 0, 10, 58_000));
        assert_eq!(tuner.tuned().interval_ns, 2000 * MS);
        assert_eq!(tuner.tuned().why, TuningReason::Overhead { cost_ns: 60 * MS });
        for _ in 0..40 {
            tuner.learn(&measured(2, 0, 10, 1_000));
        }
        assert_eq!(
            (tuner.tuned().interval_ns, tuner.tuned().why),
            (1000 * MS, TuningReason::AsAsked)
        );
    }

    #[test]
    fn a_pause_is_kept_by_fewer_pages_left_to_it() {
        let mut tuner = tuner(Some(5), None);
        // 2 ms fixed, 1 us a page: 3 ms are left, half of which is used.
        tuner.learn(&measured(3, 1, 1000, 20_000));
        assert_eq!((tuner.tuned().target_pages, tuner.tuned().interval_ns), (1500, 1000 * MS));
        let mut slow = Tuner::new(Budget { pause_ns: Some(MS), overhead: None }, 1000 * MS, 1000);
        slow.learn(&measured(3, 1, 1000, 20_000));
        assert_eq!(
            (slow.tuned().target_pages, slow.tuned().why),
            (32, TuningReason::Impossible { fixed_ns: 2 * MS })
        );
    }

    #[test]
    fn without_precopy_a_pause_is_kept_by_a_shorter_interval_unless_that_costs_too_much() {
        let stop_copy = CheckpointCost { precopied: false, ..measured(22, 20, 20_000, 20_000) };
        let mut tuner = tuner(Some(12), None);
        tuner.learn(&stop_copy);
        assert_eq!(tuner.tuned().interval_ns, 500 * MS);
        for _ in 0..20 {
            let copied = CheckpointCost {
                interval_ns: 500 * MS,
                copy_ns: 10 * MS,
                pause_ns: 12 * MS,
                ..stop_copy
            };
            tuner.learn(&copied);
            assert_eq!(tuner.tuned().interval_ns, 500 * MS, "what was reached is kept");
        }
        let mut both =
            Tuner::new(Budget { pause_ns: Some(12 * MS), overhead: Some(0.02) }, 1000 * MS, 1000);
        both.learn(&stop_copy);
        assert_eq!(both.tuned().interval_ns, 2100 * MS, "42 ms are 2 % of 2.1 s");
    }
}
