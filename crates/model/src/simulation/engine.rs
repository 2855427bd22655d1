//! The events of a simulated run, one after the other.
//!
//! ```text
//!   slot:  Free ─ given ─▶ Asking ─ latency ─▶ Fetching ─ link ─▶ Simulating ─▶ Free
//!   node:  Away ─ demanded ─▶ Starting ─▶ Up ─ fails ─▶ Away
//! ```

use super::dispatch::{Free, choose};
use super::failing::Failing;
use super::holdings::{Holdings, Sizes};
use super::link::Link;
use super::{Cluster, Dispatch, Error, Failure, Interval, Outcome, Ran, Used};
use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap};

/// Where nodes fail more often, nothing will ever be done.
const FAILURES_MAX: usize = 1_000_000;

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Away,
    Starting,
    Up,
}

/// What a slot does for an interval, and since when.
#[derive(Clone, Copy, Debug)]
struct Task {
    interval: usize,
    begin_s: f64,
    there_s: Option<f64>,
    bytes: f64,
}

struct Machine {
    phase: Phase,
    since_s: f64,
    /// Counts its lives: what was to happen in an earlier one does not.
    life: u32,
    comes_back: bool,
    slots: Vec<Option<Task>>,
    holdings: Holdings,
    used: Used,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Ready(usize),
    Fails(Failure),
    Back(usize),
    Started { node: usize, life: u32 },
    Asked { node: usize, slot: usize, life: u32 },
    Done { node: usize, slot: usize, life: u32 },
}

/// Something that will happen. Of two at one time the one that was known first comes first.
struct Event {
    at_s: f64,
    number: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> Ordering {
        // A heap gives the greatest.
        other.at_s.total_cmp(&self.at_s).then(other.number.cmp(&self.number))
    }
}

struct Run<'a> {
    cluster: &'a Cluster,
    intervals: &'a [Interval],
    sizes: Sizes,
    link: Link,
    failing: Failing,
    events: BinaryHeap<Event>,
    numbers: u64,
    machines: Vec<Machine>,
    waiting: BTreeSet<usize>,
    tries: Vec<u32>,
    ran: Vec<Option<Ran>>,
    done: usize,
    failures: usize,
    sent_bytes: f64,
    now_s: f64,
    /// When nodes are demanded: there is something to do for the first time.
    demanded_s: f64,
}

/// Simulates `intervals` on `cluster`.
pub fn simulate(intervals: &[Interval], cluster: &Cluster) -> Result<Outcome, Error> {
    cluster.check(intervals)?;
    Run::new(intervals, cluster).run()
}

impl<'a> Run<'a> {
    fn new(intervals: &'a [Interval], cluster: &'a Cluster) -> Self {
        let ready = intervals.iter().map(|interval| interval.ready_s);
        let demanded_s = match cluster.dispatch {
            Dispatch::Immediate => ready.fold(f64::INFINITY, f64::min),
            Dispatch::Deferred => ready.fold(0.0, f64::max),
        };
        let machines = cluster.nodes.iter().map(|node| Machine {
            phase: Phase::Starting,
            since_s: demanded_s,
            life: 0,
            comes_back: false,
            slots: vec![None; node.slots],
            holdings: Holdings::default(),
            used: Used::default(),
        });
        Self {
            cluster,
            intervals,
            sizes: Sizes::of(intervals, cluster.transfer),
            link: Link::new(&cluster.network),
            failing: Failing::of(&cluster.failures, cluster.nodes.len()),
            events: BinaryHeap::new(),
            numbers: 0,
            machines: machines.collect(),
            waiting: BTreeSet::new(),
            tries: vec![0; intervals.len()],
            ran: vec![None; intervals.len()],
            done: 0,
            failures: 0,
            sent_bytes: 0.0,
            now_s: 0.0,
            demanded_s,
        }
    }

    fn at(&mut self, at_s: f64, what: What) {
        self.events.push(Event { at_s, number: self.numbers, what });
        self.numbers += 1;
    }

    fn run(mut self) -> Result<Outcome, Error> {
        for (number, interval) in self.intervals.iter().enumerate() {
            // Deferred, nothing is given out before nodes are demanded, and all is ready then.
            self.at(interval.ready_s.max(self.demanded_s), What::Ready(number));
        }
        for (node, one) in self.cluster.nodes.iter().enumerate() {
            self.at(self.demanded_s + one.start_s, What::Started { node, life: 0 });
        }
        for failure in self.failing.begin(self.demanded_s) {
            self.at(failure.at_s, What::Fails(failure));
        }
        while self.done < self.intervals.len() {
            self.step()?;
        }
        Ok(self.outcome())
    }

    /// The next event, and all of that instant: only then is something given out.
    fn step(&mut self) -> Result<(), Error> {
        let planned = self.events.peek().map(|event| event.at_s);
        match (self.link.next(), planned) {
            // What arrives comes before what else happens then.
            (Some((at_s, place)), planned) if planned.is_none_or(|planned| at_s <= planned) => {
                self.pass(at_s);
                self.arrived(place);
            }
            (_, Some(at_s)) => {
                self.pass(at_s);
                if let Some(event) = self.events.pop() {
                    self.happens(event.what)?;
                }
                if self.events.peek().is_some_and(|next| next.at_s <= at_s) {
                    return Ok(());
                }
            }
            (_, None) => {
                let (done, intervals) = (self.done, self.intervals.len());
                return Err(Error::Lost { at_s: self.now_s, done, intervals });
            }
        }
        self.give_out()
    }

    fn pass(&mut self, to_s: f64) {
        self.link.advance(to_s);
        self.now_s = self.now_s.max(to_s);
    }

    fn happens(&mut self, what: What) -> Result<(), Error> {
        match what {
            What::Ready(interval) => {
                self.waiting.insert(interval);
            }
            What::Fails(failure) => return self.fails(failure),
            What::Back(node) => {
                self.enter(node, Phase::Starting);
                // What it does until it is demanded is nothing.
                self.machines[node].since_s = self.now_s.max(self.demanded_s);
                let life = self.machines[node].life;
                let from_s = self.now_s.max(self.demanded_s);
                self.at(from_s + self.cluster.nodes[node].start_s, What::Started { node, life });
                if let Some(failure) = self.failing.after(node, self.now_s) {
                    self.at(failure.at_s, What::Fails(failure));
                }
            }
            What::Started { node, life } => {
                if self.machines[node].life == life {
                    self.enter(node, Phase::Up);
                }
            }
            What::Asked { node, slot, life } => {
                if self.machines[node].life == life
                    && let Some(task) = self.machines[node].slots[slot]
                {
                    self.link.begin((node, slot), task.bytes);
                }
            }
            What::Done { node, slot, life } => {
                if self.machines[node].life == life {
                    self.finished(node, slot);
                }
            }
        }
        Ok(())
    }

    /// The node goes over to another phase; the time in the one before is told.
    fn enter(&mut self, node: usize, phase: Phase) {
        let now_s = self.now_s;
        let machine = &mut self.machines[node];
        // Before it is demanded it is idle.
        let passed_s = (now_s - machine.since_s).max(0.0) * machine.slots.len() as f64;
        match machine.phase {
            Phase::Starting => machine.used.start_s += passed_s,
            Phase::Away => machine.used.down_s += passed_s,
            // What its slots did is told as it ends; the rest is idle.
            Phase::Up => {}
        }
        machine.phase = phase;
        machine.since_s = now_s;
    }

    fn fails(&mut self, failure: Failure) -> Result<(), Error> {
        let Failure { node, back_s, .. } = failure;
        if self.machines[node].phase == Phase::Away {
            return Ok(());
        }
        self.enter(node, Phase::Away);
        let machine = &mut self.machines[node];
        machine.life += 1;
        machine.used.failures += 1;
        machine.holdings.clear();
        machine.comes_back = back_s.is_some();
        for slot in 0..machine.slots.len() {
            self.link.end((node, slot));
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
            return Err(Error::Hopeless { failures: self.failures, done, intervals });
        }
        match back_s {
            Some(back_s) => self.at(back_s, What::Back(node)),
            None if self.machines.iter().all(|one| one.phase == Phase::Away && !one.comes_back) => {
                return Err(Error::Lost { at_s: self.now_s, done, intervals });
            }
            None => {}
        }
        Ok(())
    }

    fn arrived(&mut self, (node, slot): (usize, usize)) {
        self.link.end((node, slot));
        let (now_s, speed) = (self.now_s, self.cluster.nodes[node].speed);
        let machine = &mut self.machines[node];
        let Some(task) = &mut machine.slots[slot] else { return };
        task.there_s = Some(now_s);
        machine.holdings.add(task.interval);
        let (work_s, life) = (self.intervals[task.interval].work_s, machine.life);
        self.at(now_s + work_s / speed, What::Done { node, slot, life });
    }

    fn finished(&mut self, node: usize, slot: usize) {
        let end_s = self.now_s;
        let machine = &mut self.machines[node];
        let Some(task) = machine.slots[slot].take() else { return };
        let there_s = task.there_s.unwrap_or(end_s);
        machine.used.transfer_s += there_s - task.begin_s;
        machine.used.busy_s += end_s - there_s;
        machine.used.intervals += 1;
        self.ran[task.interval] = Some(Ran {
            node,
            begin_s: task.begin_s,
            there_s,
            end_s,
            sent_bytes: task.bytes,
            tries: self.tries[task.interval],
        });
        self.done += 1;
    }

    /// Gives intervals to free slots while there are both.
    fn give_out(&mut self) -> Result<(), Error> {
        loop {
            let is_free = |machine: &Machine| {
                machine.phase == Phase::Up && machine.slots.iter().any(Option::is_none)
            };
            let free: Vec<Free<'_>> = self
                .machines
                .iter()
                .enumerate()
                .filter(|(_, machine)| is_free(machine))
                .map(|(node, machine)| Free {
                    node,
                    speed: self.cluster.nodes[node].speed,
                    holdings: &machine.holdings,
                })
                .collect();
            let all = (self.intervals, &self.sizes);
            let Some((interval, node)) = choose(self.cluster.policy, all, &self.waiting, &free)
            else {
                return Ok(());
            };
            let bytes = self.sizes.missing(interval, &self.machines[node].holdings);
            let Some(slot) = self.machines[node].slots.iter().position(Option::is_none) else {
                return Ok(());
            };
            self.waiting.remove(&interval);
            self.tries[interval] += 1;
            self.sent_bytes += bytes;
            let task = Task { interval, begin_s: self.now_s, there_s: None, bytes };
            self.machines[node].slots[slot] = Some(task);
            let life = self.machines[node].life;
            self.at(self.now_s + self.cluster.network.latency_s, What::Asked { node, slot, life });
        }
    }

    fn outcome(mut self) -> Outcome {
        let intervals: Vec<Ran> = self.ran.iter().flatten().copied().collect();
        let makespan_s = intervals.iter().map(|ran| ran.end_s).fold(0.0, f64::max);
        for node in 0..self.machines.len() {
            let phase = self.machines[node].phase;
            self.enter(node, phase);
            let machine = &mut self.machines[node];
            let Used { busy_s, transfer_s, start_s, down_s, .. } = machine.used;
            let all_s = makespan_s * machine.slots.len() as f64;
            // Rounding must not make it less than nothing.
            machine.used.idle_s = (all_s - busy_s - transfer_s - start_s - down_s).max(0.0);
        }
        let nodes = self.machines.into_iter().map(|machine| machine.used).collect();
        Outcome { makespan_s, intervals, nodes, sent_bytes: self.sent_bytes }
    }
}
