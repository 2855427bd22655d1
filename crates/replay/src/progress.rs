//! Whether a replay still gets on. One that has come off its log stands still and says nothing.
//!
//! ```text
//!   looked at: 100  250  900  900  900  900 ...  ─▶ stands still for longer than it may ─▶ diverged at 900
//! ```

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
    since: Duration,
    patience: Duration,
}

impl Progress {
    /// A replay that began at instruction `icount` and may stand still for `patience`.
    pub fn new(icount: u64, patience: Duration) -> Self {
        Self { icount, since: Duration::ZERO, patience }
    }

    /// At `elapsed` since its beginning it stands at `icount`.
    pub fn look(&mut self, elapsed: Duration, icount: u64) -> Verdict {
        if icount != self.icount {
            (self.icount, self.since) = (icount, elapsed);
        }
        if elapsed.saturating_sub(self.since) > self.patience {
            return Verdict::Frozen { icount };
        }
        Verdict::Runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_stands_still_is_frozen_and_one_that_is_slow_is_not() {
        let second = Duration::from_secs(1);
        let mut progress = Progress::new(5, second * 3);
        for n in 1..10 {
            assert_eq!(progress.look(second * 2 * n, 5 + u64::from(n)), Verdict::Runs);
        }
        assert_eq!(progress.look(second * 21, 14), Verdict::Runs);
        assert_eq!(progress.look(second * 22, 14), Verdict::Frozen { icount: 14 });
    }
}
