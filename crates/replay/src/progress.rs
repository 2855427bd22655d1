//! Whether a replay still gets on. One that has come off its log stands still and says nothing.
//!
//! ```text
//!   looked at: 100  250  900  900  900  900 ...  ─▶ stands still for longer than it may ─▶ diverged at 900
//! ```
//!
//! Only time that somebody looked at counts: where nobody was run for a while (the host was
//! suspended, or had too much to do), neither was the replay.

use std::time::Duration;

/// What is to be thought of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It gets on.
    Runs,
    /// It has stood at this instruction for longer than it may.
    Frozen {
        /// The instruction.
        icount: u64,
    },
}

/// The looks at one replay.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    icount: u64,
    /// In its log, as far as is known.
    log_offset: Option<u64>,
    looked: Duration,
    stood: Duration,
    patience: Duration,
}

/// As much of the time between two looks counts.
const BETWEEN_LOOKS_MAX: Duration = Duration::from_secs(1);

impl Progress {
    /// A replay that began at instruction `icount` and may stand still for `patience`.
    pub fn new(icount: u64, patience: Duration) -> Self {
        Self { icount, log_offset: None, looked: Duration::ZERO, stood: Duration::ZERO, patience }
    }

    /// At `elapsed` since its beginning it stands at `icount`, and has read its log up to
    /// `log_offset` bytes, where that is known. A guest that waits runs no instruction, and goes on
    /// in its log.
    pub fn look(&mut self, elapsed: Duration, icount: u64, log_offset: Option<u64>) -> Verdict {
        let since = elapsed.saturating_sub(self.looked).min(BETWEEN_LOOKS_MAX);
        self.looked = elapsed;
        if icount == self.icount && log_offset == self.log_offset {
            self.stood += since;
        } else {
            (self.icount, self.log_offset, self.stood) = (icount, log_offset, Duration::ZERO);
        }
        if self.stood > self.patience { Verdict::Frozen { icount } } else { Verdict::Runs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(500);

    /// After how many looks of those it is frozen.
    fn frozen_after(looks: impl Iterator<Item = (Duration, u64, u64)>) -> Option<usize> {
        let mut progress = Progress::new(5, Duration::from_secs(3));
        let mut elapsed = Duration::ZERO;
        let mut frozen = |(since, icount, offset): (Duration, u64, u64)| {
            elapsed += since;
            progress.look(elapsed, icount, Some(offset)) != Verdict::Runs
        };
        looks.enumerate().find(|(_, look)| frozen(*look)).map(|(number, _)| number)
    }

    #[test]
    fn one_that_stands_still_is_frozen_and_one_that_is_slow_is_not() {
        assert_eq!(frozen_after((0..20).map(|n| (LOOK, 5 + n / 4, 4096))), None);
        assert_eq!(frozen_after((0..20).map(|_| (LOOK, 14, 4096))), Some(7));
    }

    #[test]
    fn a_guest_that_waits_goes_on_in_its_log() {
        assert_eq!(frozen_after((0..40).map(|n| (LOOK, 14, 4096 * (n / 4)))), None);
    }

    #[test]
    fn a_host_that_slept_is_no_divergence() {
        let hour = Duration::from_hours(1);
        let looks = |n| if n == 3 { (hour, 14, 4096) } else { (LOOK, 14, 4096) };
        // The hour counts as one second.
        assert_eq!(frozen_after((0..20).map(looks)), Some(6));
        assert_eq!(frozen_after((0..3).map(|_| (hour, 14, 4096))), None);
    }
}
