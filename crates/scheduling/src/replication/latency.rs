//! Our scheduler: what a checkpoint would cost the VM now, and what waiting would cost held
//! packets, both predicted.
//!
//! ```text
//!  release of the oldest packet = time until the checkpoint + pause + transfer(dirty pages by then)
//!  transfer(pages)              = fixed + pages x bytes per page / bandwidth                          (link.rs)
//!  dirty pages by then          = as the last epochs grew                                             (growth.rs)
//!  cost of a checkpoint         = pause + pages x first write
//! ```
//!
//! - **Overhead.** The VM's time is an account: a given part of the time is paid in, each checkpoint and each suspend is taken out.
//! A checkpoint for packets is taken while the account is not in debt. So a packet that comes alone
//! is sent on at once, and where packets never end epochs become as long as the target asks. Figure
//! 6 has no such limit: with packets always held it checkpoints without a break, and on a fast link
//! the VM then stands for most of its time.
//! - **Idle VMs.** A pause takes from a VM what it would have done in it. Without an overhead target the account is charged the part
//! of the time in which some virtual CPU computed lately: a VM that waits most of the time, for
//! requests or for its own packets, is checkpointed more often for the same work lost. A target is
//! one for all of the VM's time, as it says.
//! - **Latency.** With a latency target the checkpoint waits as long as the oldest packet is still released in time: the fewest
//! checkpoints that keep it. What it may cost is bounded all the same: a target that cannot be kept
//! must not stop the VM.
//! - **Bursts.** Without a latency target, a packet that comes to an idle link waits for those right behind it, at most half a pause:
//! a checkpoint that misses them lets them wait for two transfers. Where these are shorter than a
//! pause, it does not wait.
//! - **No packets.** As the paper, wait for the dirty page set; but then on until the checkpoint is cheap for its epoch. A set
//!   that is reached grows no more, so waiting costs no latency and saves pauses.
//! - **Talkative VMs** (packets in the last second) are also checkpointed ahead of packets, where the dirty pages' transfer would make
//!   the next one late and checkpointing them lastingly makes them fewer.
//! - **Early suspend**, where the VM dirties pages more than twice as fast as the link sends them: running on for a millisecond then
//! costs held packets more than two. Between one and two it costs them about what it costs the VM's
//! other work to stand.
//!
//! Limits on the epoch and on disks hold as in the paper, before all of this.

use super::growth::Growth;
use super::link::Link;
use super::{Acknowledged, Decision, LOOK_NS_MIN, Look, Mean, Policy, Reason, WorkingSet};
use std::time::Duration;

/// Held packets are to be released within this, from when they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatencyTarget {
    /// The time, at least the pause and a round trip if it is to be kept.
    pub ns: u64,
}

/// Checkpoints and suspends may take this part of the VM's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverheadTarget {
    /// 0 to 100.
    pub percent: f64,
}

/// What is asked for, and the constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyParameters {
    /// Keep this latency, at the least overhead.
    pub latency: Option<LatencyTarget>,
    /// Keep this overhead, at the least latency. Without: 33 %.
    pub overhead: Option<OverheadTarget>,
    /// What the guest's first write to a page costs after a checkpoint, on this host.
    pub first_write_ns: u64,
    /// Without packets, a checkpoint may take this part of its epoch, in percent.
    pub quiet_percent: f64,
    /// The dirty page set is reached when it grows by less than this between two counts, in
    /// percent.
    pub growth_percent: u64,
    /// Disks may hold back this much.
    pub disk_buffer_bytes: u64,
    /// The longest epoch, as long as nothing is in flight.
    pub wait_max_ns: u64,
    /// How far apart counts of dirty pages are that are compared, and looks while nothing happens.
    pub look_every_ns: u64,
}

impl Default for LatencyParameters {
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

/// Without an overhead target: with packets without end the VM runs for two thirds of its time.
const OVERHEAD_PERCENT: f64 = 33.0;
/// Of the latency target, what is planned for: predictions are off, and looks are late.
const PLANNED: f64 = 0.9;
/// Checkpoints that may be paid at once after a quiet time.
const SAVED_CHECKPOINTS: f64 = 8.0;
/// A VM that sent a packet so recently is expected to send more.
const TALKATIVE_NS: u64 = 1_000_000_000;
/// While packets are held, looks are this close.
const WATCH_NS: u64 = 1_000_000;
/// An early suspend saves held packets this many times what it takes of the VM.
const SUSPEND_WORTH: f64 = 2.0;
/// How much a VM computes is a mean over about this long.
const BUSY_NS: f64 = 100e6;
/// Of an idle VM, too, checkpoints take something: the first requests behind a pause wait.
const BUSY_MIN: f64 = 0.2;
/// Before a checkpoint was measured.
const PAUSE_NS: f64 = 2e6;

/// Ours.
#[derive(Clone, Debug)]
pub struct Latency {
    parameters: LatencyParameters,
    link: Link,
    growth: Growth,
    working_set: WorkingSet,
    pause_ns: Mean,
    cost_ns: Mean,
    /// The account: nanoseconds of the VM's time that may be taken; negative is a debt.
    account_ns: f64,
    before: Option<Look>,
    /// Pages that the newest checkpoint holds, as far as looks know.
    flight_pages: u64,
    newest_packet_ns: Option<u64>,
    /// The part of the time in which a virtual CPU computes.
    busy: Option<f64>,
}

impl Latency {
    /// With these targets.
    pub fn new(parameters: LatencyParameters) -> Self {
        Self {
            parameters,
            link: Link::default(),
            growth: Growth::default(),
            working_set: WorkingSet::default(),
            pause_ns: Mean::default(),
            cost_ns: Mean::default(),
            account_ns: 0.0,
            before: None,
            flight_pages: 0,
            newest_packet_ns: None,
            busy: None,
        }
    }

    /// The part of the VM's time that may be taken.
    fn allowed(&self) -> f64 {
        let percent = self.parameters.overhead.map_or(OVERHEAD_PERCENT, |target| target.percent);
        (percent / 100.0).clamp(0.001, 1.0)
    }

    /// What it costs the VM to stand for so long.
    fn standing_costs(&self, ns: f64) -> f64 {
        match (self.parameters.overhead, self.busy) {
            (None, Some(busy)) => ns * busy.max(BUSY_MIN),
            _ => ns,
        }
    }

    fn observe_busy(&mut self, look: &Look, before: &Look) {
        let (Some(busy_ns), Some(busy_before_ns)) = (look.busy_ns, before.busy_ns) else {
            if look.busy_ns.is_none() {
                self.busy = None;
            }
            return;
        };
        let elapsed_ns = look.now_ns.saturating_sub(before.now_ns) as f64;
        // Where it stood in between it could not compute.
        let stood = look.since_ns != before.since_ns || look.stopped || before.stopped;
        if stood || elapsed_ns == 0.0 {
            return;
        }
        let busy = (busy_ns.saturating_sub(busy_before_ns) as f64 / elapsed_ns).min(1.0);
        let weight = elapsed_ns / (elapsed_ns + BUSY_NS);
        self.busy = Some(self.busy.map_or(busy, |mean| mean + (busy - mean) * weight));
    }

    fn observe(&mut self, look: &Look) {
        let before = self.before.replace(*look).unwrap_or(*look);
        self.observe_busy(look, &before);
        let elapsed_ns = look.now_ns.saturating_sub(before.now_ns) as f64;
        self.account_ns += elapsed_ns * self.allowed();
        if look.stopped {
            self.account_ns -= self.standing_costs(elapsed_ns);
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
            // Those that came between two looks are as old as the newer look at least, and the
            // first one's time is known.
            let first = look.oldest_packet_ns.filter(|_| look.packets_held == 1);
            self.newest_packet_ns = Some(first.unwrap_or(look.now_ns));
        }
    }

    /// From the checkpoint's begin to its acknowledgement, `ahead_ns` from this look.
    fn release_ns(&self, look: &Look, ahead_ns: f64) -> f64 {
        let pages = self.growth.predict(look.age_ns() as f64, look.dirty_pages as f64, ahead_ns);
        self.pause_ns.or(PAUSE_NS) + self.link.transfer_ns(pages)
    }

    /// How long the checkpoint can still wait so that the oldest packet is released within
    /// `target_ns`.
    fn slack_ns(&self, look: &Look, target_ns: u64) -> f64 {
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

    /// How long a checkpoint for held packets still waits.
    fn packets_wait_ns(&self, look: &Look) -> f64 {
        let patience_ns = if let Some(target) = self.parameters.latency {
            self.slack_ns(look, target.ns)
        } else {
            // A burst: until nothing came for an eighth of a pause, at most half of one.
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

    /// A packet that came now would wait too long for what is dirty, and a checkpoint now would
    /// help it.
    fn transfer_is_due(&self, look: &Look) -> bool {
        let Some(newest_ns) = self.newest_packet_ns else { return false };
        let transfer_ns = self.link.transfer_ns(look.dirty_pages as f64);
        let pause_ns = self.pause_ns.or(PAUSE_NS);
        let too_long = match self.parameters.latency {
            // Twice, as it may come just after that checkpoint, and wait for the next one too.
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
        // Half of what can be saved stays for packets.
        let affordable = self.account_ns > SAVED_CHECKPOINTS / 2.0 * self.cost_ns.or(pause_ns);
        look.now_ns.saturating_sub(newest_ns) < TALKATIVE_NS && too_long && affordable && lasting()
    }

    /// Of a checkpoint's pages, those that the guest wrote in its epoch: a complete one has all, of
    /// which few cost it a first write.
    fn written_pages(&self, acked: &Acknowledged) -> u64 {
        acked.pages.min(match self.before {
            Some(before) if before.in_flight => self.flight_pages,
            Some(before) => before.dirty_pages,
            None => 0,
        })
    }

    /// Until the checkpoint in flight is acknowledged, as predicted.
    fn flight_left_ns(&self, look: &Look) -> f64 {
        let took_ns = self.pause_ns.or(PAUSE_NS) + self.link.transfer_ns(self.flight_pages as f64);
        (took_ns - look.age_ns() as f64).max(0.0)
    }

    fn suspend_pays(&self, look: &Look) -> bool {
        if self.link.unknown() || (look.dirty_pages as f64) < self.vm_stop_threshold_pages() {
            return false;
        }
        let left_ns = self.flight_left_ns(look);
        let release_ns = self.release_ns(look, left_ns);
        // What the next transfer grows by, should the VM run on until the acknowledgement.
        let grows_ns = release_ns - self.release_ns(look, 0.0);
        let in_time = self.parameters.latency.is_some_and(|target| {
            look.waited_ns() as f64 + left_ns + release_ns <= target.ns as f64
        });
        !in_time
            && grows_ns > SUSPEND_WORTH * left_ns
            && self.account_ns > (1.0 - self.allowed()) * left_ns
    }

    /// As in the paper's policy: pages whose transfer takes as long as the fixed part of an epoch,
    /// here with that of a transfer. 0 while the link is unknown.
    fn vm_stop_threshold_pages(&self) -> f64 {
        if self.link.unknown() {
            return 0.0;
        }
        let page_ns = self.link.transfer_ns(1.0) - self.link.fixed_ns();
        (self.pause_ns.or(PAUSE_NS) + self.link.fixed_ns()) / page_ns.max(1.0)
    }

    /// Nothing is held and nothing in flight: the epoch goes on for so long at least before a
    /// checkpoint is cheap.
    fn cheap_from_ns(&self, look: &Look) -> f64 {
        let LatencyParameters { first_write_ns, quiet_percent, .. } = self.parameters;
        let cost_ns = self.pause_ns.or(PAUSE_NS) + look.dirty_pages as f64 * first_write_ns as f64;
        cost_ns / (quiet_percent / 100.0).min(self.allowed())
    }
}

impl Default for Latency {
    fn default() -> Self {
        Self::new(LatencyParameters::default())
    }
}

impl Policy for Latency {
    fn name(&self) -> String {
        let LatencyParameters { latency, overhead, .. } = self.parameters;
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

    fn look(&mut self, look: &Look) -> Decision {
        self.observe(look);
        let LatencyParameters {
            growth_percent, disk_buffer_bytes, wait_max_ns, look_every_ns, ..
        } = self.parameters;
        let set_reached = self.working_set.look(look, look_every_ns, growth_percent);
        if look.in_flight {
            return match (look.packets_held > 0, look.stopped) {
                (true, false) if self.suspend_pays(look) => Decision::Suspend,
                (true, false) => Decision::wait(look_every_ns.min(WATCH_NS)),
                _ => Decision::wait(look_every_ns),
            };
        }
        let left_ns = wait_max_ns.saturating_sub(look.age_ns());
        let reason = if left_ns == 0 {
            Reason::LongestWait
        } else if look.disk_bytes_held > disk_buffer_bytes {
            Reason::DiskBuffer
        } else if look.stopped {
            Reason::Packets
        } else if look.packets_held > 0 {
            let wait_ns = self.packets_wait_ns(look);
            if wait_ns > 0.0 {
                return Decision::wait_within((wait_ns as u64).min(look_every_ns), left_ns);
            }
            Reason::Packets
        } else if self.transfer_is_due(look) {
            Reason::Transfer
        } else if set_reached && look.age_ns() as f64 >= self.cheap_from_ns(look) {
            Reason::WorkingSet
        } else {
            return Decision::wait_within(look_every_ns, left_ns);
        };
        Decision::Checkpoint(reason)
    }

    fn acknowledged(&mut self, acked: &Acknowledged) {
        let writes_ns = self.written_pages(acked).saturating_mul(self.parameters.first_write_ns);
        let cost_ns = self.standing_costs(acked.pause_ns as f64) + writes_ns as f64;
        self.pause_ns.take(acked.pause_ns as f64);
        self.cost_ns.take(cost_ns);
        // A debt is forgotten where it would outlast the longest epoch.
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
