//! Decides when a flight recorder looks at its store, and when it prunes.
//!
//! ```text
//!   forgotten    ▁▂▃▄▅│▁▂▃▄▅│▁▂▃     a prune follows when a fifth of the checkpoints is forgotten;
//!                     prune prune    prunes take at most half of the time
//! ```
//!
//! A prune reads the map of every checkpoint that is kept. It waits until a fifth of all
//! checkpoints is forgotten. So each checkpoint is read about five times in its life, and the cost
//! does not grow with the time that is kept (docs/design/flight-recorder.md).
//!
//! Not here: a clock, the store, and which checkpoints are forgotten.

/// The shortest time between two looks.
const LOOK_NS_MIN: u64 = 500_000_000;
/// The longest time between two looks.
const LOOK_NS_MAX: u64 = 60_000_000_000;
/// The number of looks in the time that is kept.
const LOOKS: u64 = 20;
/// A prune follows when one in this many checkpoints is forgotten.
const PRUNE_PART: u64 = 5;
/// The fewest forgotten checkpoints that are worth a prune.
const FORGOTTEN_MIN: u64 = 4;

/// Decides when a flight recorder prunes: knows the number of forgotten checkpoints since the last
/// prune, and the time of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneSchedule {
    look_ns: u64,
    /// `None` before the first prune: an earlier run may have left forgotten checkpoints.
    forgotten: Option<u64>,
    rest_until_ns: u64,
}

impl PruneSchedule {
    /// Creates the schedule of a recorder that keeps the checkpoints of the last `within_ns`
    /// nanoseconds.
    pub fn new(within_ns: u64) -> Self {
        let look_ns = (within_ns / LOOKS).clamp(LOOK_NS_MIN, LOOK_NS_MAX);
        Self { look_ns, forgotten: None, rest_until_ns: 0 }
    }

    /// Returns the time between two looks, in nanoseconds.
    pub fn look_ns(&self) -> u64 {
        self.look_ns
    }

    /// Records that a look at `now_ns` forgot `forgotten` checkpoints and kept `kept`. Returns true
    /// if a prune should follow.
    pub fn record_forgotten(&mut self, now_ns: u64, forgotten: u64, kept: u64) -> bool {
        let is_first = self.forgotten.is_none() && forgotten > 0;
        if let Some(sum) = &mut self.forgotten {
            *sum = sum.saturating_add(forgotten);
        }
        let enough = self.forgotten.is_some_and(|sum| {
            sum >= FORGOTTEN_MIN && sum >= kept.saturating_add(sum).div_ceil(PRUNE_PART)
        });
        (is_first || enough) && now_ns >= self.rest_until_ns
    }

    /// Returns true if prunes are too slow: twice as many checkpoints wait for a prune as should,
    /// next to `kept` others.
    pub fn is_behind(&self, kept: u64) -> bool {
        self.forgotten.is_some_and(|sum| {
            sum >= FORGOTTEN_MIN * 2
                && sum >= kept.saturating_add(sum).div_ceil(PRUNE_PART).saturating_mul(2)
        })
    }

    /// Records the end of a prune that began at `began_ns` and ended at `now_ns`. `all` is true if
    /// it removed everything that was forgotten.
    pub fn record_prune(&mut self, began_ns: u64, now_ns: u64, all: bool) {
        if all {
            self.forgotten = Some(0);
        }
        self.rest_until_ns = now_ns.saturating_add(now_ns.saturating_sub(began_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn checkpoints_forgotten_by_an_earlier_run_are_pruned_first() {
        let mut schedule = PruneSchedule::new(5_000_000_000);
        assert!(!schedule.record_forgotten(1, 0, 10));
        assert!(schedule.record_forgotten(2, 1, 10));
        // The prune failed, so it is repeated at the next look, not at once.
        schedule.record_prune(2, 10, false);
        assert!(!schedule.record_forgotten(17, 1, 10));
        assert!(schedule.record_forgotten(18, 1, 10));
        schedule.record_prune(18, 20, true);
        assert!(!schedule.record_forgotten(100, 3, 10));
        assert!(schedule.record_forgotten(101, 1, 10));
        assert!(!schedule.is_behind(10));
        assert!(schedule.record_forgotten(102, 8, 10) && schedule.is_behind(10));
    }

    proptest! {
        /// The checkpoints that wait for a prune stay below a share of those that are kept, and
        /// prunes are no more frequent than needed.
        #[test]
        fn what_waits_is_bounded_and_prunes_are_few(
            looks in prop::collection::vec((0u64..50, 1u64..500), 1..200), within_ns: u64,
        ) {
            let mut schedule = PruneSchedule::new(within_ns);
            prop_assert!((LOOK_NS_MIN..=LOOK_NS_MAX).contains(&schedule.look_ns()));
            let (mut waiting, mut first) = (0, true);
            for (now_ns, (forgotten, kept)) in (0..).zip(looks) {
                waiting += forgotten;
                if schedule.record_forgotten(now_ns, forgotten, kept) {
                    prop_assert!(first || waiting >= FORGOTTEN_MIN && waiting * PRUNE_PART >= waiting + kept);
                    schedule.record_prune(now_ns, now_ns, true);
                    (waiting, first) = (0, false);
                } else {
                    let bound = ((kept + waiting).div_ceil(PRUNE_PART)).max(FORGOTTEN_MIN);
                    prop_assert!(waiting < bound || first && waiting == 0, "{} of {}", waiting, kept);
                }
            }
        }
    }
}
