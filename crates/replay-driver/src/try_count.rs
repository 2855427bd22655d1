//! Counts the tries of an interval.

use crate::error::{Error, ReplayError};

/// The number of missed holds after which an interval is given up. A miss is a matter of chance, so
/// another try is likely to succeed.
const MISSED_HOLDS_MAX: u32 = 12;

/// The failed tries of an interval.
#[derive(Clone, Copy, Debug, Default)]
pub struct TryCount {
    failures: u32,
    missed_holds: u32,
}

impl TryCount {
    /// Adds a try that failed.
    pub fn add(&mut self, error: &Error) {
        match error {
            Error::Replay(ReplayError::MissedHold { .. }) => self.missed_holds += 1,
            _ => self.failures += 1,
        }
    }

    /// Returns true after `tries_max` failures, or after 12 missed holds, which are no failures.
    pub fn is_over(self, tries_max: u32) -> bool {
        self.failures >= tries_max || self.missed_holds >= MISSED_HOLDS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_hold_is_no_failure_but_there_is_an_end() {
        let missed = Error::from(ReplayError::MissedHold { icount: 7 });
        let mut count = TryCount::default();
        (0..11).for_each(|_| count.add(&missed));
        count.add(&Error::from(ReplayError::MonitorClosed));
        assert!(!count.is_over(2) && count.is_over(1));
        count.add(&missed);
        assert!(count.is_over(2));
    }
}
