//! The adaptive scheduler: predicts what a checkpoint costs the VM now, and how long held packets
//! would wait without it.
//!
//! ```text
//!  release of the oldest packet = time until the checkpoint + pause + transfer(dirty pages then)
//!  transfer(pages)              = fixed + pages x bytes per page / bandwidth    (link_model.rs)
//!  dirty pages then             = as in the last epochs                         (dirty_growth.rs)
//!  cost of a checkpoint         = pause + pages x first write
//! ```
//!
//! - **Overhead.** The VM's time is an account: a share of the time is paid in, and each checkpoint
//!   and suspend is taken out. For packets a checkpoint is taken while the account has no debt.
//! - **Idle VMs.** Without an overhead target, a pause costs only the share of the time in which
//!   some virtual CPU computed lately.
//! - **Latency.** With a latency target the checkpoint waits as long as the oldest packet is still
//!   released in time: the fewest checkpoints that keep the target. The account still bounds it.
//! - **Bursts.** Without a latency target, the first packet on an idle link waits for those right
//!   after it, at most half a pause; not if transfers are shorter than a pause.
//! - **No packets.** A checkpoint waits for the dirty page set, and then until its cost is a small
//!   share of its epoch.
//! - **Packets expected** (some in the last second): a checkpoint is taken ahead of packets if the
//!   transfer of the dirty pages would delay the next one, and if a checkpoint makes them fewer.
//! - **Early suspend**, if pages become dirty more than twice as fast as the link sends them.
//!
//! The limits of the paper on the epoch and on disks hold first.
//! `docs/design/replication-scheduling.md` gives the reasons.

use super::dirty_growth::DirtyGrowth;
use super::link_model::LinkModel;
use super::{
    AcknowledgedEpoch, EpochReason, ExponentialMean, LOOK_NS_MIN, ReplicationDecision,
    ReplicationScheduler, VmObservation, WorkingSetDetector,
};
use std::time::Duration;

/// The longest time for which a packet should be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatencyTarget {
    /// The time in nanoseconds; it can be kept if it exceeds the pause and a round trip.
    pub ns: u64,
}

/// The largest share of the VM's time for checkpoints and suspends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverheadTarget {
    /// The share in percent, 0 to 100.
    pub percent: f64,
}

/// The targets and the constants of the adaptive scheduler.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveParameters {
    /// The latency to keep, at the least overhead; `None` for no such target.
    pub latency: Option<LatencyTarget>,
    /// The overhead to keep, at the least latency; `None` for 33 %.
    pub overhead: Option<OverheadTarget>,
    /// The cost of the guest's first write to a page after a checkpoint, in nanoseconds.
    pub first_write_ns: u64,
    /// The largest share of its epoch that a checkpoint may cost while no packets are held, in
    /// percent.
    pub quiet_percent: f64,
    /// The dirty page set counts as reached when it grows by less than this between two counts, in
    /// percent.
    pub growth_percent: u64,
    /// The largest number of bytes of disk writes that may be held back.
    pub disk_buffer_bytes: u64,
    /// The longest epoch while no checkpoint is in flight, in nanoseconds.
    pub wait_max_ns: u64,
    /// The time in nanoseconds between counts of dirty pages that are compared, and between looks
    /// without events.
    pub look_every_ns: u64,
}

impl Default for AdaptiveParameters {
    fn default() -> Self {
        let paper = super::PaperParameters::default();
        Self {
            latency: None,
            overhead: None,
            first_write_ns: 1000,
            quiet_percent: 0.5,
            growth_percent: paper.growth_percent,
            disk_buffer_bytes: paper.disk_buffer_bytes,
            wait_max_ns: paper.wait_max_ns,
            look_every_ns: paper.look_every_ns,
        }
    }
}

/// The overhead without a target: a VM that always sends runs for two thirds of the time.
const OVERHEAD_PERCENT: f64 = 33.0;
/// The share of the latency target to plan for, since predictions err and looks are late.
const PLANNED: f64 = 0.9;
/// The number of checkpoints that the account can save up.
const SAVED_CHECKPOINTS: f64 = 8.0;
/// A VM that sent a packet within this time is expected to send more.
const TALKATIVE_NS: u64 = 1_000_000_000;
/// The time between looks while packets are held.
const WATCH_NS: u64 = 1_000_000;
/// An early suspend must save held packets this many times the time that it costs the VM.
const SUSPEND_WORTH: f64 = 2.0;
/// The time over which the VM's load is averaged.
const BUSY_NS: f64 = 100e6;
/// The least load to assume: also in an idle VM, requests right after a pause wait.
const BUSY_MIN: f64 = 0.2;
/// The pause to assume before the first checkpoint.
const PAUSE_NS: f64 = 2e6;

/// The adaptive scheduler: keeps a latency or an overhead, from measurements of past checkpoints.
#[derive(Clone, Debug)]
pub struct AdaptivePolicy {
    parameters: AdaptiveParameters,
    link: LinkModel,
    growth: DirtyGrowth,
    working_set: WorkingSetDetector,
    pause_ns: ExponentialMean,
    cost_ns: ExponentialMean,
    /// The account: nanoseconds of the VM's time that may be taken; negative is a debt.
    account_ns: f64,
    before: Option<VmObservation>,
    /// Pages that the newest checkpoint holds, as far as looks know.
    flight_pages: u64,
    newest_packet_ns: Option<u64>,
    /// The part of the time in which a virtual CPU computes.
    busy: Option<f64>,
}

impl AdaptivePolicy {
    /// Creates the scheduler with these targets.
    pub fn new(parameters: AdaptiveParameters) -> Self {
        Self {
            parameters,
            link: LinkModel::default(),
            growth: DirtyGrowth::default(),
            working_set: WorkingSetDetector::default(),
            pause_ns: ExponentialMean::default(),
            cost_ns: ExponentialMean::default(),
            account_ns: 0.0,
            before: None,
            flight_pages: 0,
            newest_packet_ns: None,
            busy: None,
        }
    }

    /// The share of the VM's time that checkpoints and suspends may take.
    fn allowed(&self) -> f64 {
        let percent = self.parameters.overhead.map_or(OVERHEAD_PERCENT, |target| target.percent);
        (percent / 100.0).clamp(0.001, 1.0)
    }

    /// The cost to the VM of a pause of `ns` nanoseconds.
    fn pause_cost(&self, ns: f64) -> f64 {
        match (self.parameters.overhead, self.busy) {
            (None, Some(busy)) => ns * busy.max(BUSY_MIN),
            _ => ns,
        }
    }

    fn observe_busy(&mut self, look: &VmObservation, before: &VmObservation) {
        let (Some(busy_ns), Some(busy_before_ns)) = (look.busy_ns, before.busy_ns) else {
            if look.busy_ns.is_none() {
                self.busy = None;
            }
            return;
        };
        let elapsed_ns = look.now_ns.saturating_sub(before.now_ns) as f64;
        // While it was paused it could not compute.
        let was_paused = look.since_ns != before.since_ns || look.stopped || before.stopped;
        if was_paused || elapsed_ns == 0.0 {
            return;
        }
        let busy = (busy_ns.saturating_sub(busy_before_ns) as f64 / elapsed_ns).min(1.0);
        let weight = elapsed_ns / (elapsed_ns + BUSY_NS);
        self.busy = Some(self.busy.map_or(busy, |mean| mean + (busy - mean) * weight));
    }

    fn observe(&mut self, look: &VmObservation) {
        let before = self.before.replace(*look).unwrap_or(*look);
        self.observe_busy(look, &before);
        let elapsed_ns = look.now_ns.saturating_sub(before.now_ns) as f64;
        self.account_ns += elapsed_ns * self.allowed();
        if look.stopped {
            self.account_ns -= self.pause_cost(elapsed_ns);
        }
        let pause_ns = self.pause_ns.or(PAUSE_NS);
        self.account_ns = self.account_ns.min(SAVED_CHECKPOINTS * self.cost_ns.or(pause_ns));
        let mut held_before = before.packets_held;
        if look.since_ns != before.since_ns {
            self.growth.close();
            (self.flight_pages, held_before) = (before.dirty_pages, 0);
        }
        if !look.stopped {
            self.growth.look(look.age_ns() as f64, look.dirty_pages as f64);
        }
        if look.packets_held > held_before {
            // Packets that came between two looks are at least as old as the newer look, and the
            // arrival of the first one is known.
            let first = look.oldest_packet_ns.filter(|_| look.packets_held == 1);
            self.newest_packet_ns = Some(first.unwrap_or(look.now_ns));
        }
    }

    /// The time from the begin of a checkpoint, `ahead_ns` after this look, to its acknowledgement.
    fn release_ns(&self, look: &VmObservation, ahead_ns: f64) -> f64 {
        let pages = self.growth.predict(look.age_ns() as f64, look.dirty_pages as f64, ahead_ns);
        self.pause_ns.or(PAUSE_NS) + self.link.transfer_ns(pages)
    }

    /// How long the checkpoint can wait if the oldest packet must be released within `target_ns`.
    fn slack_ns(&self, look: &VmObservation, target_ns: u64) -> f64 {
        let left_ns = target_ns as f64 * PLANNED - look.waited_ns() as f64;
        let late = |ahead_ns: f64| ahead_ns + self.release_ns(look, ahead_ns) > left_ns;
        if late(0.0) {
            return 0.0;
        }
        let (mut fits, mut misses) = (0.0, left_ns);
        while misses - fits > LOOK_NS_MIN as f64 / 2.0 {
            let middle = f64::midpoint(fits, misses);
            if late(middle) { misses = middle } else { fits = middle }
        }
        fits
    }

    /// How long a checkpoint for held packets should wait.
    fn packets_wait_ns(&self, look: &VmObservation) -> f64 {
        let patience_ns = if let Some(target) = self.parameters.latency {
            self.slack_ns(look, target.ns)
        } else {
            // A burst ends when no packet has come for an eighth of a pause. The wait is at most
            // half a pause.
            let pause_ns = self.pause_ns.or(PAUSE_NS);
            let newest_ns = self.newest_packet_ns.unwrap_or(look.now_ns);
            let quiet_ns = look.now_ns.saturating_sub(newest_ns) as f64;
            if self.link.transfer_ns(look.dirty_pages as f64) < pause_ns {
                0.0
            } else {
                (pause_ns / 8.0 - quiet_ns).min(pause_ns / 2.0 - look.waited_ns() as f64)
            }
        };
        patience_ns.max(-self.account_ns / self.allowed()).max(0.0)
    }

    /// True if a packet that came now would wait too long for the transfer of the dirty pages, and
    /// a checkpoint now would shorten that wait.
    fn transfer_is_due(&self, look: &VmObservation) -> bool {
        let Some(newest_ns) = self.newest_packet_ns else { return false };
        let transfer_ns = self.link.transfer_ns(look.dirty_pages as f64);
        let pause_ns = self.pause_ns.or(PAUSE_NS);
        let too_long = match self.parameters.latency {
            // Twice, because the packet may come just after that checkpoint and wait for the next.
            Some(target) => {
                transfer_ns > pause_ns
                    && 2.0 * (pause_ns + transfer_ns) > target.ns as f64 * PLANNED
            }
            None => transfer_ns > 4.0 * pause_ns,
        };
        let lasting = || {
            let again = self.growth.pages_at(pause_ns + transfer_ns);
            again.is_some_and(|pages| pages < look.dirty_pages as f64 / 2.0)
        };
        // Half of the savings stay for packets.
        let affordable = self.account_ns > SAVED_CHECKPOINTS / 2.0 * self.cost_ns.or(pause_ns);
        look.now_ns.saturating_sub(newest_ns) < TALKATIVE_NS && too_long && affordable && lasting()
    }

    /// The number of a checkpoint's pages that the guest wrote in its epoch. A complete checkpoint
    /// has all pages, of which only few cost the guest a first write.
    fn written_pages(&self, acked: &AcknowledgedEpoch) -> u64 {
        acked.pages.min(match self.before {
            Some(before) if before.in_flight => self.flight_pages,
            Some(before) => before.dirty_pages,
            None => 0,
        })
    }

    /// The predicted time until the checkpoint in flight is acknowledged.
    fn flight_left_ns(&self, look: &VmObservation) -> f64 {
        let took_ns = self.pause_ns.or(PAUSE_NS) + self.link.transfer_ns(self.flight_pages as f64);
        (took_ns - look.age_ns() as f64).max(0.0)
    }

    fn suspend_pays(&self, look: &VmObservation) -> bool {
        if self.link.is_unknown() || (look.dirty_pages as f64) < self.vm_stop_threshold_pages() {
            return false;
        }
        let left_ns = self.flight_left_ns(look);
        let release_ns = self.release_ns(look, left_ns);
        // The growth of the next transfer if the VM runs on until the acknowledgement.
        let grows_ns = release_ns - self.release_ns(look, 0.0);
        let in_time = self.parameters.latency.is_some_and(|target| {
            look.waited_ns() as f64 + left_ns + release_ns <= target.ns as f64
        });
        !in_time
            && grows_ns > SUSPEND_WORTH * left_ns
            && self.account_ns > (1.0 - self.allowed()) * left_ns
    }

    /// As in the paper's policy: the number of pages whose transfer takes as long as the fixed part
    /// of an epoch, here with the fixed part of a transfer. 0 while the link is unknown.
    fn vm_stop_threshold_pages(&self) -> f64 {
        if self.link.is_unknown() {
            return 0.0;
        }
        let page_ns = self.link.transfer_ns(1.0) - self.link.fixed_ns();
        (self.pause_ns.or(PAUSE_NS) + self.link.fixed_ns()) / page_ns.max(1.0)
    }

    /// The age of the epoch from which a checkpoint is cheap, if no packet is held and no
    /// checkpoint is in flight.
    fn cheap_from_ns(&self, look: &VmObservation) -> f64 {
        let AdaptiveParameters { first_write_ns, quiet_percent, .. } = self.parameters;
        let cost_ns = self.pause_ns.or(PAUSE_NS) + look.dirty_pages as f64 * first_write_ns as f64;
        cost_ns / (quiet_percent / 100.0).min(self.allowed())
    }
}

impl Default for AdaptivePolicy {
    fn default() -> Self {
        Self::new(AdaptiveParameters::default())
    }
}

impl ReplicationScheduler for AdaptivePolicy {
    fn name(&self) -> String {
        let AdaptiveParameters { latency, overhead, .. } = self.parameters;
        let latency = latency
            .map(|t| format!("latency {}", humantime::format_duration(Duration::from_nanos(t.ns))));
        let overhead = match (overhead, &latency) {
            (Some(t), _) => Some(format!("overhead {}%", t.percent)),
            (None, None) => Some(format!("overhead {OVERHEAD_PERCENT}%")),
            _ => None,
        };
        let targets: Vec<String> = latency.into_iter().chain(overhead).collect();
        format!("adaptive ({})", targets.join(", "))
    }

    fn look(&mut self, look: &VmObservation) -> ReplicationDecision {
        self.observe(look);
        let AdaptiveParameters {
            growth_percent,
            disk_buffer_bytes,
            wait_max_ns,
            look_every_ns,
            ..
        } = self.parameters;
        let set_reached = self.working_set.look(look, look_every_ns, growth_percent);
        if look.in_flight {
            return match (look.packets_held > 0, look.stopped) {
                (true, false) if self.suspend_pays(look) => ReplicationDecision::Suspend,
                (true, false) => ReplicationDecision::wait(look_every_ns.min(WATCH_NS)),
                _ => ReplicationDecision::wait(look_every_ns),
            };
        }
        let left_ns = wait_max_ns.saturating_sub(look.age_ns());
        let reason = if left_ns == 0 {
            EpochReason::LongestWait
        } else if look.disk_bytes_held > disk_buffer_bytes {
            EpochReason::DiskBuffer
        } else if look.stopped {
            EpochReason::Packets
        } else if look.packets_held > 0 {
            let wait_ns = self.packets_wait_ns(look);
            if wait_ns > 0.0 {
                return ReplicationDecision::wait_within(
                    (wait_ns as u64).min(look_every_ns),
                    left_ns,
                );
            }
            EpochReason::Packets
        } else if self.transfer_is_due(look) {
            EpochReason::Transfer
        } else if set_reached && look.age_ns() as f64 >= self.cheap_from_ns(look) {
            EpochReason::WorkingSet
        } else {
            return ReplicationDecision::wait_within(look_every_ns, left_ns);
        };
        ReplicationDecision::Checkpoint(reason)
    }

    fn acknowledged(&mut self, acked: &AcknowledgedEpoch) {
        let writes_ns = self.written_pages(acked).saturating_mul(self.parameters.first_write_ns);
        let cost_ns = self.pause_cost(acked.pause_ns as f64) + writes_ns as f64;
        self.pause_ns.take(acked.pause_ns as f64);
        self.cost_ns.take(cost_ns);
        // A debt that would last longer than the longest epoch is forgotten.
        let debt_ns_max = self.allowed() * self.parameters.wait_max_ns as f64;
        self.account_ns = (self.account_ns - cost_ns).max(-debt_ns_max);
        self.link.take(acked);
    }

    fn describe(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("bandwidth_bytes_per_s", self.link.bandwidth_bytes_per_s()),
            ("transfer_fixed_ns", self.link.fixed_ns()),
            ("bytes_per_page", self.link.bytes_per_page()),
            ("vm_stop_threshold_pages", self.vm_stop_threshold_pages()),
            ("pause_ns", self.pause_ns.or(0.0)),
            ("checkpoint_cost_ns", self.cost_ns.or(0.0)),
            ("account_ns", self.account_ns),
            ("busy_percent", self.busy.map_or(100.0, |busy| busy * 100.0)),
            ("dirty_pages_at_100ms", self.growth.pages_at(1e8).unwrap_or(0.0)),
        ]
    }
}
