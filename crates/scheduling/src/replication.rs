//! When a protected VM is checkpointed: looks at the VM in, decisions out.
//!
//! ```text
//!            checkpoint                acknowledged   checkpoint
//!  VM    ──────┤pause├───── runs on ───────┼── waits ──────┤pause├── ...     (or stands: an early suspend)
//!  link               └── dirty pages ─────┘                      └── ...
//!  packets  held until the checkpoint that covers them is acknowledged (output commit)
//! ```
//!
//! Only one checkpoint is in flight at a time. A policy is asked at a [`Look`], and answers with a
//! [`Decision`]; the caller may look earlier than it was told to, and should where a first packet
//! comes and where an acknowledgement does.
//!
//! Invariants of every policy: [`Decision::Checkpoint`] only while nothing is in flight,
//! [`Decision::Suspend`] only while something is and the VM runs; a wait is longer than nothing and
//! at most [`LOOK_NS_MAX`]; with nothing in flight no wait reaches past the policy's longest epoch.
//!
//! - [`fixed`]: every so often, as Remus does.
//! - [`paper`]: Gerofi & Ishikawa 2011, figure 6.
//! - [`latency`]: ours, which predicts when held packets would be released and what a checkpoint costs.
//!
//! Left out: clocks, threads and the network. What a policy chose is compared in a model
//! (`model.rs`, for tests only).

pub mod choice;
#[cfg(test)]
mod compared;
pub mod fixed;
mod growth;
pub mod latency;
mod link;
#[cfg(test)]
mod model;
pub mod paper;
#[cfg(test)]
mod tests;

use std::fmt;

pub use choice::{ReplicationPolicy, UnknownPolicy};
pub use fixed::Fixed;
pub use latency::{Latency, LatencyParameters, LatencyTarget, OverheadTarget};
pub use paper::{Paper, PaperParameters};

/// No policy asks for a look sooner than this, but for the end of its longest epoch: a look counts
/// dirty pages, which is not free.
pub const LOOK_NS_MIN: u64 = 100_000;
/// Nor later than this.
pub const LOOK_NS_MAX: u64 = 100_000_000;

/// What is known of the protected VM at a look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// The time now, on one monotonic clock that the caller chooses.
    pub now_ns: u64,
    /// When the newest checkpoint's pause began; before the first one, when protection began.
    pub since_ns: u64,
    /// A checkpoint is captured and not acknowledged yet.
    pub in_flight: bool,
    /// Pages written since the newest checkpoint, as counted at this look.
    pub dirty_pages: u64,
    /// Packets held back that no captured checkpoint covers: sent since the newest one.
    pub packets_held: u64,
    /// When the oldest of these came.
    pub oldest_packet_ns: Option<u64>,
    /// Bytes written to disks since the newest checkpoint.
    pub disk_bytes_held: u64,
    /// The VM stands because of an early suspend.
    pub stopped: bool,
    /// For how long its virtual CPUs have computed, or wanted to, all together and since whenever;
    /// where that is known.
    pub busy_ns: Option<u64>,
}

impl Look {
    /// How old the epoch is: the paper's `wait_time`, which runs on while a checkpoint is in
    /// flight.
    pub fn age_ns(&self) -> u64 {
        self.now_ns.saturating_sub(self.since_ns)
    }

    /// How long the oldest held packet has waited; 0 where none is held.
    pub fn waited_ns(&self) -> u64 {
        self.oldest_packet_ns.map_or(0, |oldest_ns| self.now_ns.saturating_sub(oldest_ns))
    }
}

/// What a checkpoint that has been acknowledged came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acknowledged {
    /// Pages in it.
    pub pages: u64,
    /// Bytes that it took on the wire, after compression, with what belongs to disks.
    pub wire_bytes: u64,
    /// How long the VM stood for it.
    pub pause_ns: u64,
    /// From the end of the pause to the acknowledgement.
    pub transfer_ns: u64,
    /// From the begin of the pause before to the begin of its own.
    pub epoch_ns: u64,
}

/// What to do at a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing yet.
    Wait {
        /// Look again after at most this long.
        look_in_ns: u64,
    },
    /// Take a checkpoint now. Only answered while none is in flight.
    Checkpoint(Reason),
    /// Suspend the VM early: it stands until the checkpoint in flight is acknowledged. Only
    /// answered while one is in flight.
    Suspend,
}

impl Decision {
    /// Waits at most `ns`, within the bounds of a look.
    fn wait(ns: u64) -> Self {
        Self::Wait { look_in_ns: ns.clamp(LOOK_NS_MIN, LOOK_NS_MAX) }
    }

    /// Waits at most `ns`, and never past `limit_ns` from now, however short that is.
    fn wait_within(ns: u64, limit_ns: u64) -> Self {
        Self::Wait { look_in_ns: ns.clamp(LOOK_NS_MIN, LOOK_NS_MAX).min(limit_ns).max(1) }
    }
}

/// Why a checkpoint is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The interval is over.
    Due,
    /// The dirty page set is reached: waiting longer would not save transferring pages twice.
    WorkingSet,
    /// Packets are held back.
    Packets,
    /// What disks hold back has reached its limit.
    DiskBuffer,
    /// The epoch has become as long as it may.
    LongestWait,
    /// A packet that came now would have to wait too long for all that is dirty.
    Transfer,
    /// Somebody asked for it. No policy answers this; it is the caller's, so that all reasons are
    /// counted in one place.
    Asked,
}

impl Reason {
    /// For users.
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

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Decides when a protected VM is checkpointed.
pub trait Policy: Send {
    /// For users: the policy and what it was given.
    fn name(&self) -> String;
    /// What to do now. Looks come in the order of time.
    fn look(&mut self, look: &Look) -> Decision;
    /// Takes in a checkpoint that has just been acknowledged; the next look comes at once.
    fn acknowledged(&mut self, acked: &Acknowledged);
    /// Current estimates, shown to users: names with their units, and values.
    fn describe(&self) -> Vec<(&'static str, f64)>;
}

/// An exponential average, weight 1/4 for the newest, so that one odd epoch does not turn the
/// wheel.
#[derive(Clone, Copy, Debug, Default)]
struct Mean(Option<f64>);

impl Mean {
    fn take(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |mean| f64::mul_add(mean, 3.0, value) / 4.0));
    }

    fn or(self, before_any: f64) -> f64 {
        self.0.unwrap_or(before_any)
    }
}

/// Whether the dirty page set is reached (Gerofi & Ishikawa 2011, section IV.A): the number of
/// dirty pages grew by less than `growth_percent` between two counts that are at least `every_ns`
/// apart.
///
/// The distance is ours: looks that events bring forward may be microseconds apart, and nothing
/// grows in that time.
#[derive(Clone, Copy, Debug, Default)]
struct WorkingSet {
    since_ns: u64,
    counted_ns: u64,
    pages: Option<u64>,
    reached: bool,
}

impl WorkingSet {
    fn look(&mut self, look: &Look, every_ns: u64, growth_percent: u64) -> bool {
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
