//! A checkpoint at a fixed interval, as in Remus: the baseline of the other policies.
//!
//! ```text
//!  in time   ├─capture─┼─flight─┤     ├─capture─┼─flight─┤     ├─capture─ ...
//!            ├───────interval─────────┼───────interval─────────┤
//!
//!  overdue   ├─capture─┼───────────flight──────────┤─capture─┼─flight─┤    ├─capture─ ...
//!            ├───────interval─────────┤            ├───────interval────────┤
//! ```
//!
//! The interval counts from the start of one capture to the start of the next. A checkpoint that is
//! due while another is in flight is taken at once after the acknowledgement, and the next interval
//! begins with it: missed checkpoints are not made up for. The policy neither suspends early nor
//! limits disks.

use super::{
    AcknowledgedEpoch, EpochReason, ReplicationDecision, ReplicationScheduler, VmObservation,
};
use std::time::Duration;

/// A policy that takes checkpoints at a fixed interval.
#[derive(Clone, Debug)]
pub struct FixedInterval {
    interval_ns: u64,
    epoch_ns: u64,
}

impl FixedInterval {
    /// Creates the policy with `interval_ns` nanoseconds (at least 1) from the start of one capture
    /// to the start of the next.
    pub fn every(interval_ns: u64) -> Self {
        Self { interval_ns: interval_ns.max(1), epoch_ns: 0 }
    }
}

impl ReplicationScheduler for FixedInterval {
    fn name(&self) -> String {
        format!("fixed {}", humantime::format_duration(Duration::from_nanos(self.interval_ns)))
    }

    fn look(&mut self, look: &VmObservation) -> ReplicationDecision {
        let left_ns = self.interval_ns.saturating_sub(look.age_ns());
        match (look.in_flight, left_ns) {
            (true, left_ns) => ReplicationDecision::wait(left_ns),
            (false, 0) => ReplicationDecision::Checkpoint(EpochReason::Due),
            (false, left_ns) => ReplicationDecision::wait_within(left_ns, left_ns),
        }
    }

    fn acknowledged(&mut self, acked: &AcknowledgedEpoch) {
        self.epoch_ns = acked.epoch_ns;
    }

    fn describe(&self) -> Vec<(&'static str, f64)> {
        vec![("interval_ns", self.interval_ns as f64), ("epoch_ns", self.epoch_ns as f64)]
    }
}
