//! A model of a VM under replication, with which regression tests compare policies. Its results are
//! not measurements.
//!
//! Time advances in steps of 0.1 ms. The number of dirty pages is a function of the work since the
//! checkpoint, `set (1 - exp(-work/bend)) + rate x work`; each page costs a first write. The vCPUs
//! serve requests in order; an answer is a few packets, a step apart. Left out: loss, jitter, the
//! processor time of transfers, full disks, guests that react to being slow.

use super::{AcknowledgedEpoch, ReplicationDecision, ReplicationScheduler, VmObservation};
use std::collections::{BTreeMap, VecDeque};

pub(super) const MS: u64 = 1_000_000;
const STEP_NS: u64 = 100_000;
/// An answer within this time is good. Without replication nearly all answers are.
const GOOD_NS: u64 = 20 * MS;
const TOLERABLE_NS: u64 = 50 * MS;

/// The parameters of a link and its hosts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    pub bytes_per_ns: f64,
    pub fixed_ns: u64,
    pub pause_ns: u64,
    pub first_write_ns: f64,
    /// The bytes of a page of 4,096 bytes after compression.
    pub wire_bytes_per_page: f64,
}

impl Host {
    /// Hosts with a link of `gigabits` Gbit/s.
    pub(super) fn gigabits(gigabits: f64) -> Self {
        Self {
            bytes_per_ns: gigabits / 8.0,
            fixed_ns: 300_000,
            pause_ns: 2 * MS,
            first_write_ns: 1000.0,
            wire_bytes_per_page: 2048.0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Traffic {
    /// No requests: the VM computes all the time.
    None,
    /// Requests arrive independently of the answers.
    Open { per_s: f64 },
    /// Each peer thinks, sends a request, and waits for the answer.
    Closed { peers: u32, think_ns: f64 },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    pub name: &'static str,
    pub vcpus: usize,
    /// The dirty page set, and the work [ns] after which two thirds of it are written.
    pub set_pages: f64,
    pub bend_ns: f64,
    /// The number of pages outside of the set that each millisecond of work writes.
    pub pages_per_ms: f64,
    pub disk_bytes_per_ms: f64,
    pub traffic: Traffic,
    /// True if the VM computes in addition to serving requests.
    pub computes: bool,
    /// The average work of a request.
    pub service_ns: f64,
    pub packets: u32,
}

const COMPUTES: Workload = Workload {
    name: "",
    vcpus: 1,
    set_pages: 0.0,
    bend_ns: 1e6,
    pages_per_ms: 0.0,
    disk_bytes_per_ms: 0.0,
    traffic: Traffic::None,
    computes: true,
    service_ns: 0.0,
    packets: 0,
};

/// Workloads like those of the paper (section II). The parameters are not the paper's.
pub(super) const COMPILE: Workload = Workload {
    name: "compile",
    set_pages: 15_000.0,
    bend_ns: 300e6,
    pages_per_ms: 5.0,
    disk_bytes_per_ms: 40_000.0,
    ..COMPUTES
};
pub(super) const EP: Workload =
    Workload { name: "ep", set_pages: 300.0, bend_ns: 20e6, ..COMPUTES };
pub(super) const SP: Workload =
    Workload { name: "sp", set_pages: 60_000.0, bend_ns: 150e6, ..COMPUTES };
pub(super) const WEB: Workload = Workload {
    name: "web",
    vcpus: 4,
    set_pages: 500.0,
    bend_ns: 30e6,
    pages_per_ms: 8.0,
    disk_bytes_per_ms: 200.0,
    traffic: Traffic::Open { per_s: 300.0 },
    computes: false,
    service_ns: 3e6,
    packets: 4,
};
/// [`WEB`] with more sessions: half of the VM's capacity without replication.
pub(super) const WEB_BUSY: Workload =
    Workload { name: "web, busy", traffic: Traffic::Open { per_s: 650.0 }, ..WEB };
/// [`WEB`] with few sessions.
pub(super) const WEB_CALM: Workload =
    Workload { name: "web, calm", traffic: Traffic::Open { per_s: 40.0 }, ..WEB };
pub(super) const COORDINATOR: Workload = Workload {
    name: "coordinator",
    vcpus: 2,
    set_pages: 200.0,
    bend_ns: 10e6,
    pages_per_ms: 20.0,
    traffic: Traffic::Closed { peers: 16, think_ns: 100e6 },
    computes: false,
    service_ns: 0.5e6,
    packets: 2,
    ..COMPUTES
};
/// A computation that writes results, and is sometimes asked for them.
pub(super) const WATCHED: Workload = Workload {
    name: "watched",
    vcpus: 2,
    set_pages: 2_000.0,
    bend_ns: 100e6,
    pages_per_ms: 10.0,
    traffic: Traffic::Open { per_s: 5.0 },
    service_ns: 1e6,
    packets: 1,
    ..COMPUTES
};

/// The result of a policy.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// The lost time: for waiting peers, how much longer thinking and waiting take than without
    /// replication; else the share that pauses, suspends and first writes add to the running time.
    pub slowdown: f64,
    /// The times from a request to the last packet of its answer, sorted.
    pub latencies_ns: Vec<u64>,
    /// The times from the sending of an answer's last packet to its release, sorted: the delay that
    /// replication adds outside of the VM.
    pub held_ns: Vec<u64>,
    pub good: f64,
    pub tolerable: f64,
    pub epoch_ns: f64,
    pub suspended_ns: u64,
    pub reasons: BTreeMap<&'static str, u64>,
}

impl Outcome {
    pub(super) fn percentile_ns(sorted_ns: &[u64], percent: usize) -> u64 {
        sorted_ns.get(sorted_ns.len().saturating_sub(1) * percent / 100).copied().unwrap_or(0)
    }

    pub(super) fn mean_ns(&self) -> f64 {
        self.latencies_ns.iter().sum::<u64>() as f64 / self.latencies_ns.len().max(1) as f64
    }
}

/// The arrival time of a request, and its work.
type Asked = (u64, f64);

struct Request {
    asked: Asked,
    left_ns: f64,
}

/// A held packet. The last packet of an answer carries its request.
#[derive(Clone, Copy)]
struct Packet {
    sent_ns: u64,
    answers: Option<Asked>,
}

struct Flight {
    acked: AcknowledgedEpoch,
    runs_from_ns: u64,
    done_ns: u64,
    packets: Vec<Packet>,
}

struct Random(u64);

impl Random {
    /// Steele, Lea & Flood 2014 (splitmix64), in (0, 1].
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -self.unit().ln() * mean
    }
}

struct Vm<'a> {
    host: Host,
    load: &'a Workload,
    random: Random,
    now_ns: u64,
    /// The arrival times of future requests.
    coming: Vec<u64>,
    queue: VecDeque<Request>,
    /// Answers, each with the number of packets left to send.
    sending: Vec<(Asked, u32)>,
    held: Vec<Packet>,
    work_ns: f64,
    work_before_ns: f64,
    /// The busy time of all virtual CPUs.
    busy_ns: u64,
    since_ns: u64,
    faults_ns: f64,
    answered: Vec<Asked>,
    held_ns: Vec<u64>,
}

/// Runs `load` under `policy` on `host` for `length_ns`. Equal seeds give equal outcomes.
pub(super) fn run(
    policy: &mut dyn ReplicationScheduler,
    load: &Workload,
    host: Host,
    length_ns: u64,
    seed: u64,
) -> Outcome {
    let mut vm = Vm::new(load, host, seed);
    let mut flight: Option<Flight> = None;
    let (mut look_ns, mut stopped, mut suspended_ns, mut stood_ns) = (0, false, 0, 0);
    let mut reasons = BTreeMap::new();
    while vm.now_ns < length_ns {
        vm.now_ns += STEP_NS;
        let held_before = vm.held.len();
        let mut look_now = false;
        if let Some(done) = flight.take_if(|flight| vm.now_ns >= flight.done_ns) {
            policy.acknowledged(&done.acked);
            vm.release(&done.packets);
            look_now = true;
        }
        vm.requests_come();
        let paused = flight.as_ref().is_some_and(|flight| vm.now_ns <= flight.runs_from_ns);
        if stopped {
            suspended_ns += STEP_NS;
        }
        if paused || stopped {
            stood_ns += STEP_NS;
        } else {
            vm.runs();
        }
        look_now |= held_before == 0 && !vm.held.is_empty();
        if paused || !(look_now || vm.now_ns >= look_ns) {
            continue;
        }
        match policy.look(&vm.look(flight.is_some(), stopped)) {
            ReplicationDecision::Wait { look_in_ns } => look_ns = vm.now_ns + look_in_ns,
            ReplicationDecision::Suspend => {
                assert!(flight.is_some(), "a suspend with nothing in flight");
                stopped = true;
                look_ns = u64::MAX;
            }
            ReplicationDecision::Checkpoint(reason) => {
                assert!(flight.is_none(), "two checkpoints in flight");
                *reasons.entry(reason.name()).or_insert(0) += 1;
                flight = Some(vm.checkpoint());
                (stopped, look_ns) = (false, 0);
            }
        }
        stopped &= flight.is_some();
    }
    let checkpoints: u64 = reasons.values().sum();
    let epoch_ns = length_ns as f64 / checkpoints.max(1) as f64;
    vm.held_ns.sort_unstable();
    let outcome = Outcome {
        slowdown: 0.0,
        latencies_ns: Vec::new(),
        held_ns: std::mem::take(&mut vm.held_ns),
        good: 1.0,
        tolerable: 1.0,
        epoch_ns,
        suspended_ns,
        reasons,
    };
    vm.outcome(length_ns, stood_ns as f64, outcome)
}

impl<'a> Vm<'a> {
    fn new(load: &'a Workload, host: Host, seed: u64) -> Self {
        let mut random = Random(seed);
        let coming = match load.traffic {
            Traffic::None => Vec::new(),
            Traffic::Open { per_s } => vec![random.exponential(1e9 / per_s) as u64],
            Traffic::Closed { peers, think_ns } => {
                (0..peers).map(|_| random.exponential(think_ns) as u64).collect()
            }
        };
        Self {
            host,
            load,
            random,
            now_ns: 0,
            coming,
            queue: VecDeque::new(),
            sending: Vec::new(),
            held: Vec::new(),
            work_ns: 0.0,
            work_before_ns: 0.0,
            busy_ns: 0,
            since_ns: 0,
            faults_ns: 0.0,
            answered: Vec::new(),
            held_ns: Vec::new(),
        }
    }

    fn requests_come(&mut self) {
        let mut k = 0;
        while k < self.coming.len() {
            let came_ns = self.coming[k];
            if came_ns > self.now_ns {
                k += 1;
                continue;
            }
            let work_ns = self.random.exponential(self.load.service_ns);
            self.queue.push_back(Request { asked: (came_ns, work_ns), left_ns: work_ns });
            if let Traffic::Open { per_s } = self.load.traffic {
                self.coming[k] = came_ns + self.random.exponential(1e9 / per_s) as u64;
            } else {
                self.coming.swap_remove(k);
            }
        }
    }

    /// One step of the VM, less the time of first writes.
    fn runs(&mut self) {
        let rate = self.load.set_pages / self.load.bend_ns
            * (-self.work_ns / self.load.bend_ns).exp()
            + self.load.pages_per_ms / 1e6;
        let part = 1.0 / (1.0 + rate * self.host.first_write_ns);
        let done_ns = STEP_NS as f64 * part;
        for answer in &mut self.sending {
            answer.1 -= 1;
            let answers = (answer.1 == 0).then_some(answer.0);
            self.held.push(Packet { sent_ns: self.now_ns, answers });
        }
        self.sending.retain(|answer| answer.1 > 0);
        let mut busy = 0;
        for request in self.queue.iter_mut().take(self.load.vcpus) {
            request.left_ns -= done_ns;
            busy += 1;
            if request.left_ns <= 0.0 {
                self.sending.push((request.asked, self.load.packets));
            }
        }
        self.queue.retain(|request| request.left_ns > 0.0);
        busy += i32::from(self.load.computes);
        self.busy_ns += u64::from(busy.unsigned_abs()) * STEP_NS;
        self.work_ns += f64::from(busy) * done_ns;
        self.faults_ns += f64::from(busy) * (STEP_NS as f64 - done_ns) / self.load.vcpus as f64;
    }

    fn dirty_pages(&self) -> f64 {
        let Workload { set_pages, bend_ns, pages_per_ms, .. } = *self.load;
        set_pages * (1.0 - (-self.work_ns / bend_ns).exp()) + pages_per_ms / 1e6 * self.work_ns
    }

    fn disk_bytes(&self) -> f64 {
        self.load.disk_bytes_per_ms / 1e6 * self.work_ns
    }

    fn look(&self, in_flight: bool, stopped: bool) -> VmObservation {
        VmObservation {
            now_ns: self.now_ns,
            since_ns: self.since_ns,
            in_flight,
            dirty_pages: self.dirty_pages() as u64,
            packets_held: self.held.len() as u64,
            oldest_packet_ns: self.held.first().map(|packet| packet.sent_ns),
            disk_bytes_held: self.disk_bytes() as u64,
            stopped,
            busy_ns: Some(self.busy_ns),
        }
    }

    fn checkpoint(&mut self) -> Flight {
        let pages = self.dirty_pages();
        // The bytes of disks go over the same link, and compress like pages.
        let wire_bytes = pages * self.host.wire_bytes_per_page
            + self.disk_bytes() * self.host.wire_bytes_per_page / 4096.0;
        let transfer_ns = self.host.fixed_ns + (wire_bytes / self.host.bytes_per_ns) as u64;
        let acked = AcknowledgedEpoch {
            pages: pages as u64,
            wire_bytes: wire_bytes as u64,
            pause_ns: self.host.pause_ns,
            transfer_ns,
            epoch_ns: self.now_ns - self.since_ns,
        };
        self.since_ns = self.now_ns;
        self.work_before_ns += self.work_ns;
        self.work_ns = 0.0;
        let runs_from_ns = self.now_ns + self.host.pause_ns;
        let packets = std::mem::take(&mut self.held);
        Flight { acked, runs_from_ns, done_ns: runs_from_ns + transfer_ns, packets }
    }

    fn release(&mut self, packets: &[Packet]) {
        for packet in packets {
            let Some((came_ns, work_ns)) = packet.answers else { continue };
            self.held_ns.push(self.now_ns - packet.sent_ns);
            self.answered.push((self.now_ns - came_ns, work_ns));
            if let Traffic::Closed { think_ns, .. } = self.load.traffic {
                self.coming.push(self.now_ns + self.random.exponential(think_ns) as u64);
            }
        }
    }

    fn outcome(self, length_ns: u64, stood_ns: f64, mut outcome: Outcome) -> Outcome {
        let answers = self.answered.len().max(1) as f64;
        outcome.slowdown = match self.load.traffic {
            Traffic::None => length_ns as f64 / (self.work_before_ns + self.work_ns) - 1.0,
            Traffic::Open { .. } => {
                (stood_ns + self.faults_ns) / (length_ns as f64 - stood_ns - self.faults_ns)
            }
            Traffic::Closed { think_ns, .. } => {
                let mean = |of: &dyn Fn(&Asked) -> f64| {
                    self.answered.iter().map(of).sum::<f64>() / answers
                };
                (think_ns + mean(&|a| a.0 as f64)) / (think_ns + mean(&|a| a.1)) - 1.0
            }
        };
        outcome.latencies_ns = self.answered.iter().map(|answer| answer.0).collect();
        outcome.latencies_ns.sort_unstable();
        // Requests without an answer count as bad; else a paused VM would look good.
        let asked = outcome.latencies_ns.len() + self.queue.len() + self.sending.len();
        let within = |ns: u64| {
            let count = outcome.latencies_ns.iter().take_while(|latency| **latency <= ns).count();
            if asked == 0 { 1.0 } else { count as f64 / asked as f64 }
        };
        (outcome.good, outcome.tolerable) = (within(GOOD_NS), within(TOLERABLE_NS));
        outcome
    }
}
