//! Adaptive pre-copy: copy dirty pages while the guest runs, round after round, until so few are
//! left that the pause is cheap, or another round would not leave fewer.
//!
//! A round costs the guest one write fault for each page that it protects again (about 1 us), so
//! rounds that save nothing are not free. Pre-scan (Schötterl-Glausch 2018) is the case of a round
//! whose pages are not copied.

/// What one round found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Pages that its scan reported.
    pub pages: u64,
    /// How long scanning and copying them took: the time in which the guest wrote the next round's
    /// pages.
    pub duration_ns: u64,
}

/// What to do after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Another round while the guest runs.
    Again,
    /// Pause the VM and take the rest.
    Pause,
}

/// When pre-copying ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrecopyPolicy {
    /// Pages that the pause may copy without being noticed; a round that found no more than this
    /// was the last.
    pub target_pages: u64,
    /// Rounds at most. 0 is stop-and-copy: everything is copied in the pause.
    pub rounds_max: u32,
    /// A round must find at most this part of the pages of the round before, in percent; else the
    /// guest writes as fast as we copy and further rounds only cost it faults.
    pub converging_percent: u64,
}

impl Default for PrecopyPolicy {
    fn default() -> Self {
        Self { target_pages: 256, rounds_max: 8, converging_percent: 80 }
    }
}

impl PrecopyPolicy {
    /// Everything is copied in the pause.
    pub fn stop_copy() -> Self {
        Self { rounds_max: 0, ..Self::default() }
    }

    /// What to do after the rounds so far, oldest first.
    pub fn decide(&self, rounds: &[Round]) -> Decision {
        if rounds.len() >= self.rounds_max as usize {
            return Decision::Pause;
        }
        let Some(last) = rounds.last() else { return Decision::Again };
        if last.pages <= self.target_pages
            || expected_pages(rounds).saturating_mul(4) <= self.target_pages
        {
            return Decision::Pause;
        }
        match rounds {
            // Two rounds that do not shrink: once may be a burst.
            [.., a, b, c] if !self.shrinks(*a, *b) && !self.shrinks(*b, *c) => Decision::Pause,
            _ => Decision::Again,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(list: &[(u64, u64)]) -> Vec<Round> {
        list.iter().map(|(pages, us)| Round { pages: *pages, duration_ns: us * 1000 }).collect()
    }

    #[test]
    fn rounds_go_on_until_few_pages_are_left() {
        let policy = PrecopyPolicy::default();
        assert_eq!(policy.decide(&[]), Decision::Again);
        assert_eq!(policy.decide(&rounds(&[(20_000, 25_000)])), Decision::Again);
        assert_eq!(
            policy.decide(&rounds(&[(200, 400)])),
            Decision::Pause,
            "a first round that is small enough"
        );
        // 1,000 pages came up in 25 ms; copying them took 1 ms, in which about 40 come up.
        assert_eq!(policy.decide(&rounds(&[(20_000, 25_000), (1_000, 1_000)])), Decision::Pause);
        assert_eq!(policy.decide(&rounds(&[(60_000, 80_000), (5_000, 6_000)])), Decision::Again);
    }

    #[test]
    fn a_guest_that_writes_as_fast_as_we_copy_is_not_chased() {
        let policy = PrecopyPolicy::default();
        let steady = [(50_000, 60_000), (49_000, 60_000)];
        assert_eq!(
            policy.decide(&rounds(&steady)),
            Decision::Again,
            "one flat round may be a burst"
        );
        let steady = [(50_000, 60_000), (49_000, 60_000), (48_000, 60_000)];
        assert_eq!(policy.decide(&rounds(&steady)), Decision::Pause);
        let shrinking: Vec<_> = (0..8).map(|k| (1_000_000 >> k, 1_000_000 >> k)).collect();
        assert_eq!(policy.decide(&rounds(&shrinking)), Decision::Pause, "rounds are bounded");
        assert_eq!(policy.decide(&rounds(&shrinking[..7])), Decision::Again);
    }

    #[test]
    fn stop_copy_never_precopies() {
        assert_eq!(PrecopyPolicy::stop_copy().decide(&[]), Decision::Pause);
    }
}
