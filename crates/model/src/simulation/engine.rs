//! The event loop of the simulation.
//!
//! ```text
//!   slot:  free ─ assigned ─▶ requesting ─ latency ─▶ fetching ─ link ─▶ simulating ─▶ free
//!   node:  Down ─ demanded ─▶ Starting ─▶ Up ─ fails ─▶ Down
//! ```

use super::assignment::{Assignment, FreeNode, choose};
use super::failure_schedule::FailureSchedule;
use super::held_checkpoints::{HeldCheckpoints, TransferSizes};
use super::server_link::{ServerLink, SlotId};
use super::{
    Cluster, Dispatch, IntervalRun, NodeFailure, NodeUsage, SimulatedInterval, SimulationError,
    SimulationOutcome,
};
use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap};

/// The number of failures after which the simulation gives up.
const FAILURES_MAX: usize = 1_000_000;

/// The phase of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Down,
    Starting,
    Up,
}

/// The task of a slot: an interval to fetch and simulate.
#[derive(Clone, Copy, Debug)]
struct Task {
    interval: usize,
    begin_s: f64,
    there_s: Option<f64>,
    bytes: f64,
}

/// The state of a node.
struct NodeState {
    phase: Phase,
    since_s: f64,
    /// The number of failures so far. An event with another number belongs to a task that a failure
    /// has ended.
    life: u32,
    comes_back: bool,
    slots: Vec<Option<Task>>,
    held: HeldCheckpoints,
    used: NodeUsage,
}

/// The kinds of events.
#[derive(Clone, Copy, Debug)]
enum EventKind {
    Ready(usize),
    Fails(NodeFailure),
    Back(usize),
    Started { node: usize, life: u32 },
    Requested { node: usize, slot: usize, life: u32 },
    Done { node: usize, slot: usize, life: u32 },
}

/// A planned event. Of two events at the same time, the one that was planned first is first.
struct PlannedEvent {
    at_s: f64,
    number: u64,
    kind: EventKind,
}

impl PartialEq for PlannedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for PlannedEvent {}

impl PartialOrd for PlannedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for PlannedEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap returns the greatest event, which must be the earliest.
        other.at_s.total_cmp(&self.at_s).then(other.number.cmp(&self.number))
    }
}

struct Simulation<'a> {
    cluster: &'a Cluster,
    intervals: &'a [SimulatedInterval],
    sizes: TransferSizes,
    link: ServerLink,
    failure_schedule: FailureSchedule,
    events: BinaryHeap<PlannedEvent>,
    events_planned: u64,
    machines: Vec<NodeState>,
    waiting: BTreeSet<usize>,
    tries: Vec<u32>,
    completed: Vec<Option<IntervalRun>>,
    done: usize,
    failures: usize,
    sent_bytes: f64,
    now_s: f64,
    /// The time at which the run requests its nodes: the first interval can be assigned.
    demanded_s: f64,
}

/// Simulates `intervals` on `cluster` and returns the times and the use of the nodes.
///
/// Error: the reason why there is no outcome ([`SimulationError`]).
pub fn simulate(
    intervals: &[SimulatedInterval],
    cluster: &Cluster,
) -> Result<SimulationOutcome, SimulationError> {
    cluster.check(intervals)?;
    Simulation::new(intervals, cluster).run()
}

impl<'a> Simulation<'a> {
    fn new(intervals: &'a [SimulatedInterval], cluster: &'a Cluster) -> Self {
        let ready = intervals.iter().map(|interval| interval.ready_s);
        let demanded_s = match cluster.dispatch {
            Dispatch::Immediate => ready.fold(f64::INFINITY, f64::min),
            Dispatch::Deferred => ready.fold(0.0, f64::max),
        };
        let machines = cluster.nodes.iter().map(|node| NodeState {
            phase: Phase::Starting,
            since_s: demanded_s,
            life: 0,
            comes_back: false,
            slots: vec![None; node.slots],
            held: HeldCheckpoints::default(),
            used: NodeUsage::default(),
        });
        Self {
            cluster,
            intervals,
            sizes: TransferSizes::new(intervals, cluster.transfer),
            link: ServerLink::new(&cluster.network),
            failure_schedule: FailureSchedule::new(&cluster.failures, cluster.nodes.len()),
            events: BinaryHeap::new(),
            events_planned: 0,
            machines: machines.collect(),
            waiting: BTreeSet::new(),
            tries: vec![0; intervals.len()],
            completed: vec![None; intervals.len()],
            done: 0,
            failures: 0,
            sent_bytes: 0.0,
            now_s: 0.0,
            demanded_s,
        }
    }

    /// Plans an event.
    fn plan(&mut self, at_s: f64, kind: EventKind) {
        self.events.push(PlannedEvent { at_s, number: self.events_planned, kind });
        self.events_planned += 1;
    }

    fn run(mut self) -> Result<SimulationOutcome, SimulationError> {
        for (number, interval) in self.intervals.iter().enumerate() {
            // With deferred dispatch, all intervals are ready when the nodes are demanded.
            self.plan(interval.ready_s.max(self.demanded_s), EventKind::Ready(number));
        }
        for (node, one) in self.cluster.nodes.iter().enumerate() {
            self.plan(self.demanded_s + one.start_s, EventKind::Started { node, life: 0 });
        }
        for failure in self.failure_schedule.begin(self.demanded_s) {
            self.plan(failure.at_s, EventKind::Fails(failure));
        }
        while self.done < self.intervals.len() {
            self.step()?;
        }
        Ok(self.outcome())
    }

    /// Handles the next event. Assigns intervals after the last event of an instant.
    fn step(&mut self) -> Result<(), SimulationError> {
        let planned = self.events.peek().map(|event| event.at_s);
        match (self.link.next(), planned) {
            // A transfer that completes comes before other events of the same time.
            (Some((at_s, slot)), planned) if planned.is_none_or(|planned| at_s <= planned) => {
                self.advance(at_s);
                self.transfer_completed(slot);
            }
            (_, Some(at_s)) => {
                self.advance(at_s);
                if let Some(event) = self.events.pop() {
                    self.handle(event.kind)?;
                }
                if self.events.peek().is_some_and(|next| next.at_s <= at_s) {
                    return Ok(());
                }
            }
            (_, None) => {
                let (done, intervals) = (self.done, self.intervals.len());
                return Err(SimulationError::Lost { at_s: self.now_s, done, intervals });
            }
        }
        self.assign()
    }

    fn advance(&mut self, to_s: f64) {
        self.link.advance(to_s);
        self.now_s = self.now_s.max(to_s);
    }

    fn handle(&mut self, kind: EventKind) -> Result<(), SimulationError> {
        match kind {
            EventKind::Ready(interval) => {
                self.waiting.insert(interval);
            }
            EventKind::Fails(failure) => return self.node_failed(failure),
            EventKind::Back(node) => {
                self.enter(node, Phase::Starting);
                // Before it is demanded, the node is idle.
                self.machines[node].since_s = self.now_s.max(self.demanded_s);
                let life = self.machines[node].life;
                let from_s = self.now_s.max(self.demanded_s);
                self.plan(
                    from_s + self.cluster.nodes[node].start_s,
                    EventKind::Started { node, life },
                );
                if let Some(failure) = self.failure_schedule.after(node, self.now_s) {
                    self.plan(failure.at_s, EventKind::Fails(failure));
                }
            }
            EventKind::Started { node, life } => {
                if self.machines[node].life == life {
                    self.enter(node, Phase::Up);
                }
            }
            EventKind::Requested { node, slot, life } => {
                if self.machines[node].life == life
                    && let Some(task) = self.machines[node].slots[slot]
                {
                    self.link.begin(SlotId { node, slot }, task.bytes);
                }
            }
            EventKind::Done { node, slot, life } => {
                if self.machines[node].life == life {
                    self.task_completed(node, slot);
                }
            }
        }
        Ok(())
    }

    /// Puts a node into `phase` and accounts for the time in the phase before.
    fn enter(&mut self, node: usize, phase: Phase) {
        let now_s = self.now_s;
        let machine = &mut self.machines[node];
        // The time before the demand counts as idle.
        let passed_s = (now_s - machine.since_s).max(0.0) * machine.slots.len() as f64;
        match machine.phase {
            Phase::Starting => machine.used.start_s += passed_s,
            Phase::Down => machine.used.down_s += passed_s,
            // The time of tasks is accounted for when they end; the rest is idle.
            Phase::Up => {}
        }
        machine.phase = phase;
        machine.since_s = now_s;
    }

    fn node_failed(&mut self, failure: NodeFailure) -> Result<(), SimulationError> {
        let NodeFailure { node, back_s, .. } = failure;
        if self.machines[node].phase == Phase::Down {
            return Ok(());
        }
        self.enter(node, Phase::Down);
        let machine = &mut self.machines[node];
        machine.life += 1;
        machine.used.failures += 1;
        machine.held.clear();
        machine.comes_back = back_s.is_some();
        for slot in 0..machine.slots.len() {
            self.link.end(SlotId { node, slot });
            let Some(task) = self.machines[node].slots[slot].take() else { continue };
            let machine = &mut self.machines[node];
            let there_s = task.there_s.unwrap_or(self.now_s);
            machine.used.transfer_s += there_s - task.begin_s;
            machine.used.busy_s += self.now_s - there_s;
            machine.used.lost_s += self.now_s - task.begin_s;
            self.waiting.insert(task.interval);
        }
        let (done, intervals) = (self.done, self.intervals.len());
        self.failures += 1;
        if self.failures > FAILURES_MAX {
            return Err(SimulationError::Hopeless { failures: self.failures, done, intervals });
        }
        match back_s {
            Some(back_s) => self.plan(back_s, EventKind::Back(node)),
            None if self.machines.iter().all(|one| one.phase == Phase::Down && !one.comes_back) => {
                return Err(SimulationError::Lost { at_s: self.now_s, done, intervals });
            }
            None => {}
        }
        Ok(())
    }

    fn transfer_completed(&mut self, to: SlotId) {
        let SlotId { node, slot } = to;
        self.link.end(to);
        let (now_s, speed) = (self.now_s, self.cluster.nodes[node].speed);
        let machine = &mut self.machines[node];
        let Some(task) = &mut machine.slots[slot] else { return };
        task.there_s = Some(now_s);
        machine.held.add(task.interval);
        let (work_s, life) = (self.intervals[task.interval].work_s, machine.life);
        self.plan(now_s + work_s / speed, EventKind::Done { node, slot, life });
    }

    fn task_completed(&mut self, node: usize, slot: usize) {
        let end_s = self.now_s;
        let machine = &mut self.machines[node];
        let Some(task) = machine.slots[slot].take() else { return };
        let there_s = task.there_s.unwrap_or(end_s);
        machine.used.transfer_s += there_s - task.begin_s;
        machine.used.busy_s += end_s - there_s;
        machine.used.intervals += 1;
        self.completed[task.interval] = Some(IntervalRun {
            node,
            begin_s: task.begin_s,
            there_s,
            end_s,
            sent_bytes: task.bytes,
            tries: self.tries[task.interval],
        });
        self.done += 1;
    }

    /// Assigns waiting intervals to free slots.
    fn assign(&mut self) -> Result<(), SimulationError> {
        loop {
            let is_free = |machine: &NodeState| {
                machine.phase == Phase::Up && machine.slots.iter().any(Option::is_none)
            };
            let free: Vec<FreeNode<'_>> = self
                .machines
                .iter()
                .enumerate()
                .filter(|(_, machine)| is_free(machine))
                .map(|(node, machine)| FreeNode {
                    node,
                    speed: self.cluster.nodes[node].speed,
                    held: &machine.held,
                })
                .collect();
            let (policy, intervals) = (self.cluster.policy, self.intervals);
            let chosen = choose(policy, intervals, &self.sizes, &self.waiting, &free);
            let Some(Assignment { interval, node }) = chosen else { return Ok(()) };
            let bytes = self.sizes.missing(interval, &self.machines[node].held);
            let Some(slot) = self.machines[node].slots.iter().position(Option::is_none) else {
                return Ok(());
            };
            self.waiting.remove(&interval);
            self.tries[interval] += 1;
            self.sent_bytes += bytes;
            let task = Task { interval, begin_s: self.now_s, there_s: None, bytes };
            self.machines[node].slots[slot] = Some(task);
            let life = self.machines[node].life;
            self.plan(
                self.now_s + self.cluster.network.latency_s,
                EventKind::Requested { node, slot, life },
            );
        }
    }

    fn outcome(mut self) -> SimulationOutcome {
        let intervals: Vec<IntervalRun> = self.completed.iter().flatten().copied().collect();
        let makespan_s = intervals.iter().map(|ran| ran.end_s).fold(0.0, f64::max);
        for node in 0..self.machines.len() {
            let phase = self.machines[node].phase;
            self.enter(node, phase);
            let machine = &mut self.machines[node];
            let NodeUsage { busy_s, transfer_s, start_s, down_s, .. } = machine.used;
            let all_s = makespan_s * machine.slots.len() as f64;
            // Rounding must not make it negative.
            machine.used.idle_s = (all_s - busy_s - transfer_s - start_s - down_s).max(0.0);
        }
        let nodes = self.machines.into_iter().map(|machine| machine.used).collect();
        SimulationOutcome { makespan_s, intervals, nodes, sent_bytes: self.sent_bytes }
    }
}
