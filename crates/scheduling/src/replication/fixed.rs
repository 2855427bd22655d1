//! A checkpoint every so often, whatever the VM does: what Remus does, and what the others are
//! compared with.
//!
//! A checkpoint that is due while the one before it is in flight is taken when that is
//! acknowledged. There is no early suspend and no limit on disks.

use super::{Acknowledged, Decision, Look, Policy, Reason};
use std::time::Duration;

/// A fixed interval.
#[derive(Clone, Debug)]
pub struct Fixed {
    interval_ns: u64,
    epoch_ns: u64,
}

impl Fixed {
    /// From the begin of one pause to the next, `interval_ns` (at least 1).
    pub fn every(interval_ns: u64) -> Self {
        Self { interval_ns: interval_ns.max(1), epoch_ns: 0 }
    }
}

impl Policy for Fixed {
    fn name(&self) -> String {
        format!("fixed {}", humantime::format_duration(Duration::from_nanos(self.interval_ns)))
    }

    fn look(&mut self, look: &Look) -> Decision {
        let left_ns = self.interval_ns.saturating_sub(look.age_ns());
        match (look.in_flight, left_ns) {
            (true, left_ns) => Decision::wait(left_ns),
            (false, 0) => Decision::Checkpoint(Reason::Due),
            (false, left_ns) => Decision::wait_within(left_ns, left_ns),
        }
    }

    fn acknowledged(&mut self, acked: &Acknowledged) {
        self.epoch_ns = acked.epoch_ns;
    }

    fn describe(&self) -> Vec<(&'static str, f64)> {
        vec![("interval_ns", self.interval_ns as f64), ("epoch_ns", self.epoch_ns as f64)]
    }
}
