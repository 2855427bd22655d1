//! When a flight recorder looks at its store, and when what it has forgotten is worth a prune.
//!
//! ```text
//!   forgotten    ▁▂▃▄▅│▁▂▃▄▅│▁▂▃       a prune when a fifth of what is there could go, and never more than half of the time
//!                     prune prune
//! ```
//!
//! A prune reads the map of every checkpoint that is kept. As it waits until a fifth of all is
//! forgotten, each checkpoint is read some five times in its life, however long that is: the cost
//! of recording does not grow with the time that is kept (docs/design/flight-recorder.md).
//!
//! Not here: a clock, the store, what is forgotten.

/// Looks are at least so far apart.
const LOOK_NS_MIN: u64 = 500_000_000;
/// And at most so far.
const LOOK_NS_MAX: u64 = 60_000_000_000;
/// So many looks fall into the time that is kept.
const LOOKS: u64 = 20;
/// A prune when one of so many checkpoints was forgotten.
const PRUNE_PART: u64 = 5;
/// Fewer are never worth one.
const FORGOTTEN_MIN: u64 = 4;

/// What a recorder has forgotten since its last prune.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recording {
    look_ns: u64,
    /// `None`: no prune yet, and what an earlier run left is not known.
    forgotten: Option<u64>,
    rest_until_ns: u64,
}

impl Recording {
    /// Of a recorder that keeps `within_ns`.
    pub fn new(within_ns: u64) -> Self {
        let look_ns = (within_ns / LOOKS).clamp(LOOK_NS_MIN, LOOK_NS_MAX);
        Self { look_ns, forgotten: None, rest_until_ns: 0 }
    }

    /// From one look to the next.
    pub fn look_ns(&self) -> u64 {
        self.look_ns
    }

    /// At a look, `forgotten` checkpoints went and `kept` are left. True where a prune should
    /// follow.
    pub fn forgot(&mut self, now_ns: u64, forgotten: u64, kept: u64) -> bool {
        let is_first = self.forgotten.is_none() && forgotten > 0;
        if let Some(sum) = &mut self.forgotten {
            *sum = sum.saturating_add(forgotten);
        }
        let enough = self.forgotten.is_some_and(|sum| {
            sum >= FORGOTTEN_MIN && sum >= kept.saturating_add(sum).div_ceil(PRUNE_PART)
        });
        (is_first || enough) && now_ns >= self.rest_until_ns
    }

    /// Whether what waits for a prune is twice what should, beside the `kept` that are left: the
    /// one before was too slow.
    pub fn is_behind(&self, kept: u64) -> bool {
        self.forgotten.is_some_and(|sum| {
            sum >= FORGOTTEN_MIN * 2
                && sum >= kept.saturating_add(sum).div_ceil(PRUNE_PART).saturating_mul(2)
        })
    }

    /// A prune has ended, which began at `began_ns`; `all`: it left nothing for later.
    pub fn pruned(&mut self, began_ns: u64, now_ns: u64, all: bool) {
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
    fn what_an_earlier_run_left_goes_with_the_first_that_is_forgotten() {
        let mut recording = Recording::new(5_000_000_000);
        assert!(!recording.forgot(1, 0, 10));
        assert!(recording.forgot(2, 1, 10));
        // It could not be done: again at the next look, but not at once.
        recording.pruned(2, 10, false);
        assert!(!recording.forgot(17, 1, 10));
        assert!(recording.forgot(18, 1, 10));
        recording.pruned(18, 20, true);
        assert!(!recording.forgot(100, 3, 10));
        assert!(recording.forgot(101, 1, 10));
        assert!(!recording.is_behind(10));
        assert!(recording.forgot(102, 8, 10) && recording.is_behind(10));
    }

    proptest! {
        /// What is forgotten and not pruned yet stays below a part of what is kept, and each prune
        /// has had its due.
        #[test]
        fn what_waits_is_bounded_and_prunes_are_few(
            looks in prop::collection::vec((0u64..50, 1u64..500), 1..200), within_ns: u64,
        ) {
            let mut recording = Recording::new(within_ns);
            prop_assert!((LOOK_NS_MIN..=LOOK_NS_MAX).contains(&recording.look_ns()));
            let (mut waiting, mut first) = (0, true);
            for (now_ns, (forgotten, kept)) in (0..).zip(looks) {
                waiting += forgotten;
                if recording.forgot(now_ns, forgotten, kept) {
                    prop_assert!(first || waiting >= FORGOTTEN_MIN && waiting * PRUNE_PART >= waiting + kept);
                    recording.pruned(now_ns, now_ns, true);
                    (waiting, first) = (0, false);
                } else {
                    let bound = ((kept + waiting).div_ceil(PRUNE_PART)).max(FORGOTTEN_MIN);
                    prop_assert!(waiting < bound || first && waiting == 0, "{} of {}", waiting, kept);
                }
            }
        }
    }
}
