//! Decides after each pre-copy round whether another one follows. Rounds end when so few dirty
//! pages are left that the pause is short, or when another round would not leave fewer.
//!
//! A round costs the guest a write fault of about 1 us for each page that it protects again.
//! Pre-scan (Schötterl-Glausch 2018) is the case of a round whose pages are not copied.

/// One pre-copy round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// The number of dirty pages that its scan reported.
    pub pages: u64,
    /// The time of its scan and copy in nanoseconds, in which the guest wrote the next round's
    /// pages.
    pub duration_ns: u64,
}

/// The decision after a round of pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundDecision {
    /// Run another round while the guest runs.
    Again,
    /// Pause the VM and copy the remaining pages.
    Pause,
}

/// The limits at which pre-copy ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrecopyPolicy {
    /// The number of pages that the pause may copy: a round that finds no more is the last.
    pub target_pages: u64,
    /// The largest number of rounds. With 0 the pause copies everything.
    pub rounds_max: u32,
    /// A round must find at most this percentage of the previous round's pages. Otherwise the guest
    /// writes as fast as the rounds copy, and further rounds only cost it faults.
    pub converging_percent: u64,
}

impl Default for PrecopyPolicy {
    fn default() -> Self {
        Self { target_pages: 256, rounds_max: 8, converging_percent: 80 }
    }
}

impl PrecopyPolicy {
    /// Returns the policy with no rounds, under which the pause copies everything.
    pub fn stop_copy() -> Self {
        Self { rounds_max: 0, ..Self::default() }
    }

    /// Returns whether another round follows after `rounds`, the rounds so far, oldest first.
    pub fn decide(&self, rounds: &[Round]) -> RoundDecision {
        if rounds.len() >= self.rounds_max as usize {
            return RoundDecision::Pause;
        }
        let Some(last) = rounds.last() else { return RoundDecision::Again };
        if last.pages <= self.target_pages
            || expected_pages(rounds).saturating_mul(4) <= self.target_pages
        {
            return RoundDecision::Pause;
        }
        match rounds {
            // Two rounds that do not shrink: once may be a burst.
            [.., a, b, c] if !self.shrinks(*a, *b) && !self.shrinks(*b, *c) => RoundDecision::Pause,
            _ => RoundDecision::Again,
        }
    }

    fn shrinks(&self, before: Round, after: Round) -> bool {
        after.pages.saturating_mul(100) <= before.pages.saturating_mul(self.converging_percent)
    }
}

/// Pages that the guest has written since the last round's scan, if it goes on as fast as it did
/// during the round before: the last round's pages came up in the duration of the one before it.
/// Unknown after a single round: very many.
fn expected_pages(rounds: &[Round]) -> u64 {
    match rounds {
        [.., before, last] => {
            let page_ns = u128::from(last.pages) * u128::from(last.duration_ns);
            u64::try_from(page_ns / u128::from(before.duration_ns.max(1))).unwrap_or(u64::MAX)
        }
        _ => u64::MAX,
    }
}

/// Pages that came up in a longer time than this are no burst.
const BURST_NS_MAX: u64 = 1_000_000_000;

/// Returns the most pages that the guest wrote in a burst, as the rounds from number `first` on show:
/// a pause may find as many, with large pages and with guests that write in bursts. The pages of a
/// round came up while the round before it was copied.
pub fn burst_pages(rounds: &[Round], first: usize) -> u64 {
    let is_short =
        |at: &usize| at.checked_sub(1).is_none_or(|b| rounds[b].duration_ns <= BURST_NS_MAX);
    (first..rounds.len()).filter(is_short).map(|at| rounds[at].pages).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(list: &[(u64, u64)]) -> Vec<Round> {
        list.iter().map(|(pages, us)| Round { pages: *pages, duration_ns: us * 1000 }).collect()
    }

    #[test]
    fn rounds_go_on_until_few_pages_are_left() {
        let policy = PrecopyPolicy::default();
        assert_eq!(policy.decide(&[]), RoundDecision::Again);
        assert_eq!(policy.decide(&rounds(&[(20_000, 25_000)])), RoundDecision::Again);
        assert_eq!(
            policy.decide(&rounds(&[(200, 400)])),
            RoundDecision::Pause,
            "a first round that is small enough"
        );
        // 1,000 pages came up in 25 ms; copying them took 1 ms, in which about 40 come up.
        assert_eq!(
            policy.decide(&rounds(&[(20_000, 25_000), (1_000, 1_000)])),
            RoundDecision::Pause
        );
        assert_eq!(
            policy.decide(&rounds(&[(60_000, 80_000), (5_000, 6_000)])),
            RoundDecision::Again
        );
    }

    #[test]
    fn a_guest_that_writes_as_fast_as_we_copy_is_not_chased() {
        let policy = PrecopyPolicy::default();
        let steady = [(50_000, 60_000), (49_000, 60_000)];
        assert_eq!(
            policy.decide(&rounds(&steady)),
            RoundDecision::Again,
            "one flat round may be a burst"
        );
        let steady = [(50_000, 60_000), (49_000, 60_000), (48_000, 60_000)];
        assert_eq!(policy.decide(&rounds(&steady)), RoundDecision::Pause);
        let shrinking: Vec<_> = (0..8).map(|k| (1_000_000 >> k, 1_000_000 >> k)).collect();
        assert_eq!(policy.decide(&rounds(&shrinking)), RoundDecision::Pause, "rounds are bounded");
        assert_eq!(policy.decide(&rounds(&shrinking[..7])), RoundDecision::Again);
    }

    #[test]
    fn stop_copy_never_precopies() {
        assert_eq!(PrecopyPolicy::stop_copy().decide(&[]), RoundDecision::Pause);
    }

    #[test]
    fn pages_of_a_long_round_are_no_burst() {
        // A first image of 15 s, and what was written in its time.
        let list = rounds(&[
            (3_000_000, 15_000_000),
            (280_000, 1_400_000),
            (28_000, 140_000),
            (2_800, 14_000),
        ]);
        assert_eq!(burst_pages(&list, 1), 2_800);
        assert_eq!(burst_pages(&list, 0), 3_000_000, "the first round's pages may be a burst");
        assert_eq!(burst_pages(&list, 4), 0);
        assert_eq!(burst_pages(&[], 1), 0);
        let bursts = rounds(&[(40_000, 50_000), (100, 200), (30_000, 40_000)]);
        assert_eq!(burst_pages(&bursts, 1), 30_000);
    }
}
