//! Detects a replay that has diverged from its log: it stands still without an error.
//!
//! ```text
//!   observed instruction: 100  250  900  900  900  900 ...  ─▶ stalled at 900
//! ```
//!
//! Only observed time counts. If the host was suspended or overloaded, there were no
//! observations, and the replay did not run either.

use std::time::Duration;

/// The longest time between two observations that counts as standing still.
const OBSERVED_MAX: Duration = Duration::from_secs(1);

/// Whether a replay advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayProgress {
    /// The replay advances, or has stood still for less than its limit.
    Advancing,
    /// The replay has stood still for longer than its limit.
    Stalled {
        /// The instruction at which it stands.
        icount: u64,
    },
}

/// Detects that a replay stands still for longer than a limit.
#[derive(Clone, Copy, Debug)]
pub struct StallDetector {
    icount: u64,
    log_offset: Option<u64>,
    /// Time of the last observation, since the replay began.
    observed_at: Duration,
    /// How long the replay has stood still, as far as it was observed.
    standing: Duration,
}

impl StallDetector {
    /// Creates a detector for a replay that begins at instruction `icount`.
    pub fn new(icount: u64) -> Self {
        let (observed_at, standing) = (Duration::ZERO, Duration::ZERO);
        Self { icount, log_offset: None, observed_at, standing }
    }

    /// Adds an observation, and returns whether the replay advances, which may stand still for
    /// `limit`. At `elapsed` since its beginning, it stands at instruction `icount` and has read
    /// `log_offset` bytes of its log (`None` if that is not known). A halted guest runs no instruction
    /// but reads on in its log, so an increase of either counts as an advance.
    pub fn observe(
        &mut self,
        elapsed: Duration,
        icount: u64,
        log_offset: Option<u64>,
        limit: Duration,
    ) -> ReplayProgress {
        let since = elapsed.saturating_sub(self.observed_at).min(OBSERVED_MAX);
        self.observed_at = elapsed;
        if icount == self.icount && log_offset == self.log_offset {
            self.standing += since;
        } else {
            (self.icount, self.log_offset, self.standing) = (icount, log_offset, Duration::ZERO);
        }
        if self.standing > limit {
            ReplayProgress::Stalled { icount }
        } else {
            ReplayProgress::Advancing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(500);

    /// The number of the first observation that finds the replay stalled. Each observation is the
    /// time since the last one, the instruction, and the log's offset.
    fn first_stall(observations: impl Iterator<Item = (Duration, u64, u64)>) -> Option<usize> {
        let mut detector = StallDetector::new(5);
        let mut elapsed = Duration::ZERO;
        let mut is_stalled = |(since, icount, offset): (Duration, u64, u64)| {
            elapsed += since;
            let limit = Duration::from_secs(3);
            detector.observe(elapsed, icount, Some(offset), limit) != ReplayProgress::Advancing
        };
        observations.enumerate().find(|(_, one)| is_stalled(*one)).map(|(number, _)| number)
    }

    #[test]
    fn a_replay_that_stands_still_is_stalled_and_a_slow_one_is_not() {
        assert_eq!(first_stall((0..20).map(|n| (INTERVAL, 5 + n / 4, 4096))), None);
        assert_eq!(first_stall((0..20).map(|_| (INTERVAL, 14, 4096))), Some(7));
    }

    #[test]
    fn a_halted_guest_that_reads_its_log_is_not_stalled() {
        assert_eq!(first_stall((0..40).map(|n| (INTERVAL, 14, 4096 * (n / 4)))), None);
    }

    #[test]
    fn time_without_observations_counts_as_one_second() {
        let hour = Duration::from_hours(1);
        let one = |n| if n == 3 { (hour, 14, 4096) } else { (INTERVAL, 14, 4096) };
        assert_eq!(first_stall((0..20).map(one)), Some(6));
        assert_eq!(first_stall((0..3).map(|_| (hour, 14, 4096))), None);
    }
}
