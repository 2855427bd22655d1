//! The adaptive scheduler of Gerofi & Ishikawa 2011, section IV, figure 6.
//!
//! ```text
//!  in flight:      if packets are held and dirty pages > vm_stop_threshold,
//!                  suspend the VM until the acknowledgement
//!  acknowledged:   update the bandwidth, and vm_stop_threshold from it
//!  then wait while the epoch is younger than wait_max, and no packet is held,
//!                  and disks hold no more than their buffer, and the dirty page set is not
//!                  reached; else checkpoint
//! ```
//!
//! The paper defines `vm_stop_threshold` as the smallest number of pages with which the link is
//! fully used, but does not say how it follows from the bandwidth. An epoch has a fixed part, the
//! pause, in which nothing is sent. With fewer pages than the link transfers in that time, the link
//! is idle for longer than it works, and shorter epochs only add pauses. With more pages, longer
//! epochs only add latency. So:
//!
//! ```text
//!  vm_stop_threshold = ceil(bandwidth x pause / bytes on the wire for a page)
//! ```
//!
//! Each of the three is an exponential average over acknowledged checkpoints. The bandwidth of one
//! checkpoint is `wire_bytes / transfer_ns`, which is less than the link's if the round trip takes
//! longer than the bytes. An estimate that followed such transfers down would make the threshold
//! smaller, and so the next epoch, and so the estimate. Therefore a transfer that is shorter than
//! the pause only raises the estimate.
//!
//! The paper does not print how often pages are counted, on which "5 % between updates" depends.
//! With 50 ms the epochs are as long as the paper reports (1.2 s for a kernel compile, limited by
//! the disk buffer).

use super::{
    AcknowledgedEpoch, EpochReason, ExponentialMean, ReplicationDecision, ReplicationScheduler,
    VmObservation, WorkingSetDetector,
};

/// The time between looks while packets are held and a checkpoint is in flight.
const WATCH_NS: u64 = 1_000_000;

/// The constants of the adaptive scheduler of Gerofi & Ishikawa 2011. The defaults are those that
/// the paper prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaperParameters {
    /// The dirty page set counts as reached when it grows by less than this between two counts, in
    /// percent.
    pub growth_percent: u64,
    /// The largest number of bytes of disk writes that may be held back.
    pub disk_buffer_bytes: u64,
    /// The longest epoch while no checkpoint is in flight, in nanoseconds.
    pub wait_max_ns: u64,
    /// The time in nanoseconds between two counts of dirty pages that are compared. The paper does
    /// not print it.
    pub look_every_ns: u64,
}

impl Default for PaperParameters {
    fn default() -> Self {
        Self {
            growth_percent: 5,
            disk_buffer_bytes: 50_000_000,
            wait_max_ns: 2_000_000_000,
            look_every_ns: 50_000_000,
        }
    }
}

/// The adaptive scheduler of Gerofi & Ishikawa 2011, section IV, figure 6.
#[derive(Clone, Debug)]
pub struct PaperPolicy {
    parameters: PaperParameters,
    working_set: WorkingSetDetector,
    bandwidth_bytes_per_ns: ExponentialMean,
    bytes_per_page: ExponentialMean,
    pause_ns: ExponentialMean,
}

impl PaperPolicy {
    /// Creates the scheduler with these constants.
    pub fn new(parameters: PaperParameters) -> Self {
        Self {
            parameters,
            working_set: WorkingSetDetector::default(),
            bandwidth_bytes_per_ns: ExponentialMean::default(),
            bytes_per_page: ExponentialMean::default(),
            pause_ns: ExponentialMean::default(),
        }
    }

    /// Returns the number of dirty pages above which a VM with held packets is suspended while a
    /// checkpoint is in flight: `vm_stop_threshold` of Gerofi & Ishikawa 2011. `None` until a
    /// checkpoint that moved bytes has been acknowledged; until then the VM is not suspended.
    pub fn vm_stop_threshold_pages(&self) -> Option<u64> {
        let pages =
            self.bandwidth_bytes_per_ns.0? * self.pause_ns.0? / self.bytes_per_page.0?.max(1.0);
        Some((pages.ceil() as u64).max(1))
    }
}

impl Default for PaperPolicy {
    fn default() -> Self {
        Self::new(PaperParameters::default())
    }
}

impl ReplicationScheduler for PaperPolicy {
    fn name(&self) -> String {
        "paper".to_owned()
    }

    fn look(&mut self, look: &VmObservation) -> ReplicationDecision {
        let PaperParameters { growth_percent, disk_buffer_bytes, wait_max_ns, look_every_ns } =
            self.parameters;
        let set_reached = self.working_set.look(look, look_every_ns, growth_percent);
        if look.in_flight {
            let over = self
                .vm_stop_threshold_pages()
                .is_some_and(|threshold| look.dirty_pages > threshold);
            return match (look.packets_held > 0, look.stopped) {
                (true, false) if over => ReplicationDecision::Suspend,
                (true, false) => ReplicationDecision::wait(look_every_ns.min(WATCH_NS)),
                _ => ReplicationDecision::wait(look_every_ns),
            };
        }
        let reason = if look.packets_held > 0 || look.stopped {
            EpochReason::Packets
        } else if look.disk_bytes_held > disk_buffer_bytes {
            EpochReason::DiskBuffer
        } else if look.age_ns() >= wait_max_ns {
            EpochReason::LongestWait
        } else if set_reached {
            EpochReason::WorkingSet
        } else {
            return ReplicationDecision::wait_within(look_every_ns, wait_max_ns - look.age_ns());
        };
        ReplicationDecision::Checkpoint(reason)
    }

    fn acknowledged(&mut self, acked: &AcknowledgedEpoch) {
        self.pause_ns.take(acked.pause_ns as f64);
        if acked.pages > 0 {
            self.bytes_per_page.take(acked.wire_bytes as f64 / acked.pages as f64);
        }
        if acked.wire_bytes > 0 && acked.transfer_ns > 0 {
            let seen = acked.wire_bytes as f64 / acked.transfer_ns as f64;
            if acked.transfer_ns >= acked.pause_ns || seen > self.bandwidth_bytes_per_ns.or(0.0) {
                self.bandwidth_bytes_per_ns.take(seen);
            }
        }
    }

    fn describe(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_ns.or(0.0) * 1e9),
            ("vm_stop_threshold_pages", self.vm_stop_threshold_pages().unwrap_or(0) as f64),
            ("bytes_per_page", self.bytes_per_page.or(0.0)),
            ("pause_ns", self.pause_ns.or(0.0)),
        ]
    }
}
