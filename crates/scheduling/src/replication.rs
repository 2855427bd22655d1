//! Decides when a protected VM is checkpointed: observations of the VM go in, decisions come out.
//!
//! ```text
//!            checkpoint                acknowledged   checkpoint
//!  VM    ──────┤pause├───── runs on ───────┼── waits ──────┤pause├── ...
//!                           (or is paused: an early suspend)
//!  link               └── dirty pages ─────┘                      └── ...
//!  packets  held until the checkpoint that covers them is acknowledged (output commit)
//! ```
//!
//! Only one checkpoint is in flight at a time. The caller shows a policy a [`VmObservation`], and
//! the policy answers with a [`ReplicationDecision`]. The caller may look earlier than the policy
//! asked, and should do so when the first packet arrives and when an acknowledgement arrives.
//!
//! Invariants of every policy: it answers [`ReplicationDecision::Checkpoint`] only while no
//! checkpoint is in flight, and [`ReplicationDecision::Suspend`] only while one is and the VM runs;
//! a wait is longer than 0 and at most [`LOOK_NS_MAX`]; with none in flight, no wait exceeds the
//! longest epoch.
//!
//! - [`fixed`]: a fixed interval, as in Remus.
//! - [`paper`]: Gerofi & Ishikawa 2011, figure 6.
//! - [`adaptive`]: predicts when held packets are released and the cost of a checkpoint.
//!
//! Not here: clocks, threads and the network. Tests compare the policies in a model (`model.rs`).

pub mod adaptive;
#[cfg(test)]
mod comparison;
mod dirty_growth;
pub mod fixed;
mod link_model;
#[cfg(test)]
mod model;
pub mod paper;
pub mod policy_name;
#[cfg(test)]
mod tests;

use std::fmt;

pub use adaptive::{AdaptiveParameters, AdaptivePolicy, LatencyTarget, OverheadTarget};
pub use fixed::FixedInterval;
pub use paper::{PaperParameters, PaperPolicy};
pub use policy_name::{ReplicationPolicy, UnknownPolicy};

/// The shortest time to the next look that a policy asks for, in nanoseconds; the end of its
/// longest epoch can come sooner. A look counts dirty pages, which takes time.
pub const LOOK_NS_MIN: u64 = 100_000;
/// The longest time to the next look that a policy asks for, in nanoseconds.
pub const LOOK_NS_MAX: u64 = 100_000_000;

/// The state of the protected VM at a look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VmObservation {
    /// The time of the look in nanoseconds, on one monotonic clock that the caller chooses.
    pub now_ns: u64,
    /// The time at which the capture of the newest checkpoint began, with the look that decided it;
    /// before the first one, the time at which protection began. A capture that failed does not
    /// count.
    pub since_ns: u64,
    /// True if a checkpoint is captured and not acknowledged yet.
    pub in_flight: bool,
    /// The number of pages written since the newest checkpoint, as counted at this look.
    pub dirty_pages: u64,
    /// The number of held packets that no captured checkpoint covers: sent since the newest one.
    pub packets_held: u64,
    /// The time at which the oldest of these packets arrived; `None` if there are none.
    pub oldest_packet_ns: Option<u64>,
    /// The number of bytes written to disks since the newest checkpoint.
    pub disk_bytes_held: u64,
    /// True if the VM is paused by an early suspend.
    pub stopped: bool,
    /// The total time in which the VM's virtual CPUs ran or waited for a core, in nanoseconds since
    /// any fixed time; `None` if unknown.
    pub busy_ns: Option<u64>,
}

impl VmObservation {
    /// Returns the age of the epoch in nanoseconds, which also grows while a checkpoint is in
    /// flight. Gerofi & Ishikawa 2011 call it `wait_time`.
    pub fn age_ns(&self) -> u64 {
        self.now_ns.saturating_sub(self.since_ns)
    }

    /// Returns the time for which the oldest held packet has waited, in nanoseconds; 0 if none is
    /// held.
    pub fn waited_ns(&self) -> u64 {
        self.oldest_packet_ns.map_or(0, |oldest_ns| self.now_ns.saturating_sub(oldest_ns))
    }
}

/// The measurements of an epoch that the standby has acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcknowledgedEpoch {
    /// The number of pages that it holds.
    pub pages: u64,
    /// The number of its bytes on the wire, after compression, with those of disks.
    pub wire_bytes: u64,
    /// The time for which the VM was paused for it, in nanoseconds.
    pub pause_ns: u64,
    /// The time from the end of the pause to the acknowledgement, in nanoseconds.
    pub transfer_ns: u64,
    /// The time from the beginning of the previous pause to the beginning of its own, in
    /// nanoseconds.
    pub epoch_ns: u64,
}

/// The decision at a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicationDecision {
    /// Do nothing now.
    Wait {
        /// The longest time until the next look, in nanoseconds.
        look_in_ns: u64,
    },
    /// Take a checkpoint now. Only while none is in flight.
    Checkpoint(EpochReason),
    /// Suspend the VM early: it stays paused until the checkpoint in flight is acknowledged. Only
    /// while one is in flight.
    Suspend,
}

impl ReplicationDecision {
    /// Waits at most `ns`, within the bounds of a look.
    fn wait(ns: u64) -> Self {
        Self::Wait { look_in_ns: ns.clamp(LOOK_NS_MIN, LOOK_NS_MAX) }
    }

    /// Waits at most `ns`, and never past `limit_ns` from now, however short that is.
    fn wait_within(ns: u64, limit_ns: u64) -> Self {
        Self::Wait { look_in_ns: ns.clamp(LOOK_NS_MIN, LOOK_NS_MAX).min(limit_ns).max(1) }
    }
}

/// The reason why a checkpoint is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpochReason {
    /// The interval is over.
    Due,
    /// The dirty page set is reached: waiting longer would save no second transfer of a page.
    WorkingSet,
    /// Packets are held back.
    Packets,
    /// The held disk writes have reached their limit.
    DiskBuffer,
    /// The epoch has reached its longest age.
    LongestWait,
    /// A packet that arrived now would wait too long for the transfer of the dirty pages.
    Transfer,
    /// The protocol or a user asked for it. Only the caller uses this reason.
    Asked,
}

impl EpochReason {
    /// Returns the reason's name for users, such as `packets`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Due => "due",
            Self::WorkingSet => "working set reached",
            Self::Packets => "packets held",
            Self::DiskBuffer => "disk buffer full",
            Self::LongestWait => "longest wait",
            Self::Transfer => "transfer would grow too long",
            Self::Asked => "asked for",
        }
    }
}

impl fmt::Display for EpochReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A policy that decides when a protected VM is checkpointed.
pub trait ReplicationScheduler: Send {
    /// Returns the policy's name with its parameters, for users.
    fn name(&self) -> String;
    /// Returns what to do in the state `look`. The caller passes states in the order of time.
    fn look(&mut self, look: &VmObservation) -> ReplicationDecision;
    /// Learns from a checkpoint that was just acknowledged. The caller looks again at once.
    fn acknowledged(&mut self, acked: &AcknowledgedEpoch);
    /// Returns the current estimates for users: names with units, and values.
    fn describe(&self) -> Vec<(&'static str, f64)>;
}

/// An exponential average with weight 1/4 for the newest value, so that one odd epoch changes
/// little.
#[derive(Clone, Copy, Debug, Default)]
struct ExponentialMean(Option<f64>);

impl ExponentialMean {
    fn take(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |mean| f64::mul_add(mean, 3.0, value) / 4.0));
    }

    fn or(self, before_any: f64) -> f64 {
        self.0.unwrap_or(before_any)
    }
}

/// Detects that the dirty page set is reached (Gerofi & Ishikawa 2011, section IV.A): the number of
/// dirty pages grew by less than `growth_percent` between two counts at least `every_ns` apart.
///
/// The paper has no such distance. Looks that events cause may be microseconds apart, in which no
/// set grows.
#[derive(Clone, Copy, Debug, Default)]
struct WorkingSetDetector {
    since_ns: u64,
    counted_ns: u64,
    pages: Option<u64>,
    reached: bool,
}

impl WorkingSetDetector {
    fn look(&mut self, look: &VmObservation, every_ns: u64, growth_percent: u64) -> bool {
        if look.since_ns != self.since_ns {
            *self = Self {
                since_ns: look.since_ns,
                counted_ns: look.since_ns,
                pages: None,
                reached: false,
            };
        }
        if look.now_ns.saturating_sub(self.counted_ns) >= every_ns {
            let grown = |before: u64| look.dirty_pages.saturating_sub(before);
            self.reached = self.pages.is_some_and(|before| {
                u128::from(grown(before)) * 100 < u128::from(before) * u128::from(growth_percent)
                    || look.dirty_pages == before
            });
            (self.pages, self.counted_ns) = (Some(look.dirty_pages), look.now_ns);
        }
        self.reached
    }
}
