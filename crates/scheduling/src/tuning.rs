//! Keeps what a user asks for (a longest pause, a largest part of the guest's time) by what
//! checkpoints measure, in place of knobs that the papers set by hand.
//!
//! ```text
//!   cost of a checkpoint [ns] = pause + pages written x first write
//!   overhead                  = cost / interval          => interval >= cost / asked overhead
//!   pause                     = fixed + pages left x copy => pages left <= (asked pause - fixed) / copy
//! ```
//!
//! *Fixed* is what a pause takes without copying: stop, device state, scan, resume. A first write
//! is the guest's write to a page that the tracker has protected again; what it costs is measured
//! on this host. Averages are exponential with a weight of 1/4 for the newest, so that one odd
//! checkpoint does not turn the wheel.

use std::fmt;

/// The shortest interval that is ever chosen.
const INTERVAL_NS_MIN: u64 = 10_000_000;
/// The longest one, however much a checkpoint costs: what a guest writes in a minute it would
/// mostly write in two.
const INTERVAL_NS_MAX: u64 = 60_000_000_000;
/// Fewer pages than this are not worth another round.
const TARGET_PAGES_MIN: u64 = 32;
/// More pages than this make a pause that is no pre-copy's.
const TARGET_PAGES_MAX: u64 = 65_536;

/// What the user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    /// The longest pause, in nanoseconds.
    pub pause_ns: Option<u64>,
    /// The largest part of the guest's time, 0.03 for 3 %.
    pub overhead: Option<f64>,
}

/// What one checkpoint measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// Since the checkpoint before.
    pub interval_ns: u64,
    /// The whole pause.
    pub pause_ns: u64,
    /// Of it, copying.
    pub copy_ns: u64,
    /// Pages copied in it.
    pub pause_pages: u64,
    /// Pages that scans found since the last checkpoint: each was a first write of the guest.
    pub written_pages: u64,
    /// Pre-copied, so that the pause can be made shorter by more rounds; else only by a shorter
    /// interval.
    pub precopied: bool,
}

/// What was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// Between checkpoints.
    pub interval_ns: u64,
    /// Pages that pre-copy may leave to the pause.
    pub target_pages: u64,
    /// Why.
    pub why: Why,
}

/// Why it was chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// Nothing has been measured yet, or nothing stands in the way: as asked.
    AsAsked,
    /// The interval is longer, because a checkpoint costs the guest so much.
    Overhead {
        /// The cost of a checkpoint.
        cost_ns: u64,
    },
    /// The interval is shorter, because the pause has to copy less.
    Pause {
        /// What copying takes in the pause now.
        copy_ns: u64,
    },
    /// The pause cannot be kept: it is longer without copying anything.
    Impossible {
        /// What it takes at least.
        fixed_ns: u64,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        match self {
            Self::AsAsked => f.write_str("as asked"),
            Self::Overhead { cost_ns } => {
                write!(
                    f,
                    "a checkpoint costs the guest {:.1} ms, so they are taken less often",
                    ms(*cost_ns)
                )
            }
            Self::Pause { copy_ns } => write!(
                f,
                "copying took {:.1} ms of the pause, so checkpoints are taken more often, with less to copy",
                ms(*copy_ns)
            ),
            Self::Impossible { fixed_ns } => write!(
                f,
                "a pause takes {:.1} ms without copying a page, which is more than was asked for",
                ms(*fixed_ns)
            ),
        }
    }
}

/// Chooses interval and pre-copy target.
#[derive(Clone, Debug)]
pub struct Tuner {
    budget: Budget,
    interval_ns: u64,
    first_write_ns: u64,
    fixed_ns: Option<f64>,
    copy_ns_per_page: Option<f64>,
    /// Of the pause: copying, and that for each nanosecond of the interval.
    copy_ns: Option<f64>,
    copy_rate: Option<f64>,
    cost_ns: Option<f64>,
    precopied: bool,
}

impl Tuner {
    /// Within `budget`, at `interval_ns` where it allows that. `first_write_ns`: what a first write
    /// costs on this host.
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

    /// Takes in a checkpoint. The complete first one of a run says nothing of those that follow:
    /// leave it out.
    pub fn learn(&mut self, measured: &Measured) {
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

    /// What to do now.
    pub fn tuned(&self) -> Tuned {
        let (mut interval_ns, mut why) = (self.interval_ns, Why::AsAsked);
        if let (Some(pause_ns), Some(fixed_ns)) = (self.budget.pause_ns, self.fixed_ns) {
            let left_ns = pause_ns as f64 - fixed_ns;
            let copy_ns = self.copy_ns.unwrap_or(0.0);
            // What is copied grows with the interval, at most in proportion.
            let longest_ns = (left_ns / self.copy_rate.unwrap_or(0.0).max(1e-9)) as u64;
            if left_ns <= 0.0 {
                why = Why::Impossible { fixed_ns: fixed_ns as u64 };
            } else if !self.precopied && longest_ns < interval_ns {
                interval_ns = longest_ns;
                why = Why::Pause { copy_ns: copy_ns as u64 };
            }
        }
        if let (Some(overhead), Some(cost_ns)) =
            (self.budget.overhead.filter(|o| *o > 0.0), self.cost_ns)
        {
            let needed_ns = (cost_ns / overhead) as u64;
            if needed_ns > interval_ns {
                interval_ns = needed_ns.min(INTERVAL_NS_MAX.max(interval_ns));
                why = Why::Overhead { cost_ns: cost_ns as u64 };
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
        // Half of what is left: the guest writes on between the last round and the pause.
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

    fn measured(pause_ms: u64, copy_ms: u64, pause_pages: u64, written_pages: u64) -> Measured {
        let precopied = true;
        let interval_ns = 1000 * MS;
        Measured {
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
        assert_eq!(tuner.tuned().why, Why::AsAsked);
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
        assert_eq!(tuner.tuned().why, Why::Overhead { cost_ns: 60 * MS });
        for _ in 0..40 {
            tuner.learn(&measured(2, 0, 10, 1_000));
        }
        assert_eq!((tuner.tuned().interval_ns, tuner.tuned().why), (1000 * MS, Why::AsAsked));
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
            (32, Why::Impossible { fixed_ns: 2 * MS })
        );
    }

    #[test]
    fn without_precopy_a_pause_is_kept_by_a_shorter_interval_unless_that_costs_too_much() {
        let stop_copy = Measured { precopied: false, ..measured(22, 20, 20_000, 20_000) };
        let mut tuner = tuner(Some(12), None);
        tuner.learn(&stop_copy);
        assert_eq!(tuner.tuned().interval_ns, 500 * MS);
        for _ in 0..20 {
            let copied = Measured {
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
