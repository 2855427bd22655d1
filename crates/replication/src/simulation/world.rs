//! Two nodes, a witness and a client, event by event, in true time.

use super::driver;
use super::net::{HostLink, LINKS, MS, Packet, WITNESS, end_of};
use super::node::{NodeEngine, NodeInput, PacketGate, Role, SimulatedNode, WriteLogVm};
use super::{Mutant, Tally};
use crate::{
    Arbitration, Epoch, GroupId, GroupState, NodeId, OwnerMode, Primary, PrimaryEvent,
    PrimaryStart, ReplicationConfig, RunPermit, Standby, Term, Witness, WitnessReply,
    WitnessRequest,
};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

pub const DETECTION_NS: u64 = 500 * MS;
const GROUP: GroupId = GroupId(77);

/// An event in true time.
#[derive(Clone)]
pub enum WorldEvent {
    Request,
    Operator,
    Reconnect(usize),
    Deliver {
        link: usize,
        to: usize,
        connection: u64,
        packet: Packet,
    },
    /// To the engine with this number, if it lives.
    Input {
        node: usize,
        engine: u64,
        input: NodeInput,
    },
    Tick {
        node: usize,
        engine: u64,
        local_ns: u64,
    },
    Operation {
        node: usize,
        engine: u64,
        operation: Operation,
    },
    Guard {
        node: usize,
    },
    Boot {
        node: usize,
    },
    StartEngine {
        node: usize,
        attached: bool,
    },
    Wake {
        node: usize,
    },
    Heal {
        link: usize,
        direction: usize,
    },
    Drain {
        link: usize,
        direction: usize,
    },
    Fast {
        link: usize,
    },
    Room {
        node: usize,
    },
    WitnessBack,
    FenceRepaired,
}

/// An operation that an engine began and that is done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Stop,
    Resume,
    Kill,
    Launch,
    Capture { last: bool },
    Scheduled,
    Apply { epoch: u64 },
    Fence,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct World {
    pub now_ns: u64,
    events: BTreeMap<(u64, u64), WorldEvent>,
    order: u64,
    pub rng: fastrand::Rng,
    pub arbitration: Arbitration,
    pub mutant: Option<Mutant>,
    pub nodes: [SimulatedNode; 2],
    pub links: [HostLink; 4],
    pub witness: Witness,
    pub persisted: Vec<u8>,
    pub witness_up: bool,
    pub fence_broken: bool,
    numbers: u64,
    requests: u32,
    /// The writes whose answers clients have seen.
    pub seen: BTreeSet<u32>,
    /// The writes that were part of a takeover.
    pub taken: BTreeSet<u32>,
    /// The log of each epoch of each term.
    pub snapshots: BTreeMap<(Term, u64), Rc<Vec<u32>>>,
    pub activated: BTreeSet<Term>,
    /// A VM died while it ran alone: output that clients saw may be lost.
    pub solo_death: bool,
    /// No node has the VM or a copy any more.
    pub gone: bool,
    pub idle_since_ns: u64,
    pub story: Vec<String>,
    pub tally: Tally,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() && self.mutant.is_none() {
            let from = self.story.len().saturating_sub(400);
            eprintln!(
                "what happened ({from} lines before):\n  {}",
                self.story[from..].join("\n  ")
            );
        }
    }
}

impl World {
    /// The first node runs a VM, the second is to be its standby.
    pub fn new(seed: u64, arbitration: Arbitration, mutant: Option<Mutant>) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut node = || SimulatedNode {
            up: true,
            offset_ns: rng.u64(0..1 << 40),
            drift_ppm: rng.i64(-10_000..=10_000),
            engine: None,
            stalled: false,
            backlog: std::collections::VecDeque::new(),
            vm: None,
            gate: PacketGate::default(),
            permit: RunPermit::Stopped,
            epoch: 0,
            term: Term(0),
            replica: None,
            disk_full: false,
            insisted: false,
        };
        let nodes = [node(), node()];
        let mut world = Self {
            now_ns: 0,
            events: BTreeMap::new(),
            order: 0,
            rng,
            arbitration,
            mutant,
            nodes,
            links: std::array::from_fn(|_| HostLink::default()),
            witness: Witness::default(),
            persisted: Vec::new(),
            witness_up: true,
            fence_broken: false,
            numbers: 0,
            requests: 0,
            seen: BTreeSet::new(),
            taken: BTreeSet::new(),
            snapshots: BTreeMap::new(),
            activated: BTreeSet::new(),
            solo_death: false,
            gone: false,
            idle_since_ns: 0,
            story: Vec::new(),
            tally: Tally::new(),
        };
        world.witness.encode(&mut world.persisted);
        world.nodes[0].vm = Some(WriteLogVm { log: Vec::new(), running: true });
        world.nodes[0].permit = RunPermit::Free;
        world.nodes[0].term = Term::FIRST;
        let config = world.config(0);
        world.start(0, Role::Primary(Primary::new(config, PrimaryStart::First)));
        let config = world.config(1);
        world.start(1, Role::Standby(Standby::new(config, Term(0), None)));
        for link in 0..LINKS.len() {
            world.at(1, WorldEvent::Reconnect(link));
        }
        world.at(1, WorldEvent::Request);
        world.at(MS, WorldEvent::Operator);
        world
    }

    pub fn config(&mut self, node: usize) -> ReplicationConfig {
        let instance = self.rng.u64(1..);
        let mut config = ReplicationConfig::new(
            NodeId(node as u64 + 1),
            instance,
            GROUP,
            self.arbitration,
            DETECTION_NS,
        );
        if self.mutant == Some(Mutant::LongLease) {
            config.lease_ns = DETECTION_NS * 3;
        }
        config
    }

    pub fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub fn chance(&mut self, of: u32) -> bool {
        self.rng.u32(..of) == 0
    }

    pub fn came(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    pub fn tell(&mut self, what: &str) {
        let ms = self.now_ns as f64 / MS as f64;
        self.story.push(format!("{ms:11.3} {what}"));
    }

    pub fn at(&mut self, in_ns: u64, event: WorldEvent) {
        self.order += 1;
        self.events.insert((self.now_ns + in_ns, self.order), event);
    }

    pub fn local(&mut self, node: usize, in_ns: u64, operation: Operation) {
        if let Some(engine) = &self.nodes[node].engine {
            let engine = engine.id;
            self.at(in_ns, WorldEvent::Operation { node, engine, operation });
        }
    }

    /// An engine begins, and finds the connections that there are.
    pub fn start(&mut self, node: usize, role: Role) {
        let id = self.number();
        self.nodes[node].backlog.clear();
        self.nodes[node].engine = Some(NodeEngine::new(id, role));
        for path in 0..2 {
            if self.links[path].is_whole() {
                self.input(node, NodeInput::Up(path as u8));
            }
        }
        self.input(node, NodeInput::Tick);
    }

    /// Plays until `until_ns` and checks the invariants after each event.
    pub fn play(&mut self, until_ns: u64) {
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= until_ns)
        {
            self.now_ns = entry.key().0;
            let event = entry.remove();
            self.happen(event);
            self.check_running();
        }
        self.now_ns = until_ns;
    }

    fn happen(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::Request => self.request(),
            WorldEvent::Operator => {
                self.operate();
                self.at(200 * MS, WorldEvent::Operator);
            }
            WorldEvent::Reconnect(link) => self.reconnect(link),
            WorldEvent::Deliver { link, to, connection, packet } => {
                self.deliver(link, to, connection, packet);
            }
            WorldEvent::Input { node, engine, input } => {
                if self.is_engine(node, engine) {
                    self.input(node, input);
                }
            }
            WorldEvent::Tick { node, engine, local_ns } => {
                let due = self.nodes[node].local_ns(self.now_ns) >= local_ns;
                if self.is_engine(node, engine) && due {
                    self.input(node, NodeInput::Tick);
                }
            }
            WorldEvent::Operation { node, engine, operation } => {
                if self.is_engine(node, engine) {
                    self.input(node, NodeInput::Done(operation));
                }
            }
            WorldEvent::Guard { node } => self.guard(node),
            WorldEvent::Boot { node } => {
                self.nodes[node].up = true;
                self.tell(&format!("host {node} is up again"));
                self.at(50 * MS, WorldEvent::StartEngine { node, attached: false });
            }
            WorldEvent::StartEngine { node, attached } => self.start_engine(node, attached),
            WorldEvent::Wake { node } => self.wake(node),
            WorldEvent::Heal { link, direction } => self.heal(link, direction),
            WorldEvent::Drain { link, direction } => {
                let cut = self.links[link].cut[direction];
                while let Some((connection, packet)) =
                    (!cut).then(|| self.links[link].waiting[direction].pop_front()).flatten()
                {
                    self.arrive(link, 1 - direction, connection, packet);
                }
            }
            WorldEvent::Fast { link } => self.links[link].slow_ns = 0,
            WorldEvent::Room { node } => self.nodes[node].disk_full = false,
            WorldEvent::WitnessBack => {
                self.witness = Witness::decode(&self.persisted).expect("what was persisted");
                self.witness_up = true;
                self.tell("the witness is back");
            }
            WorldEvent::FenceRepaired => self.fence_broken = false,
        }
    }

    pub fn is_engine(&self, node: usize, id: u64) -> bool {
        self.nodes[node].engine.as_ref().is_some_and(|engine| engine.id == id)
    }

    /// A client writes; the node that runs the VM answers.
    fn request(&mut self) {
        self.requests += 1;
        let write = self.requests;
        for node in 0..2 {
            let host = &mut self.nodes[node];
            let epoch = host.epoch + 1;
            let Some(vm) = host.vm.as_mut().filter(|vm| vm.running) else { continue };
            vm.log.push(write);
            if host.gate.holding {
                host.gate.held.push((epoch, write));
            } else {
                self.visible(node, write);
            }
        }
        let next_ns = self.rng.u64(5 * MS..15 * MS);
        self.at(next_ns, WorldEvent::Request);
    }

    /// Hands an input to the node's engine; a stalled engine gets it later.
    pub fn input(&mut self, node: usize, input: NodeInput) {
        if self.nodes[node].stalled {
            self.nodes[node].backlog.push_back(input);
        } else {
            driver::input(self, node, input);
        }
    }

    fn wake(&mut self, node: usize) {
        if !std::mem::take(&mut self.nodes[node].stalled) {
            return;
        }
        self.tell(&format!("engine {node} goes on"));
        if self.chance(2) {
            self.input(node, NodeInput::Tick);
        }
        while let Some(input) = self.nodes[node].backlog.pop_front() {
            self.input(node, input);
        }
        self.input(node, NodeInput::Tick);
    }

    /// The guard stops a VM whose permit has ended.
    fn guard(&mut self, node: usize) {
        let local_ns = self.nodes[node].local_ns(self.now_ns);
        let over = match self.nodes[node].permit {
            RunPermit::Free => false,
            RunPermit::Until(until_ns) => local_ns >= until_ns,
            RunPermit::Stopped => true,
        };
        if over && let Some(vm) = self.nodes[node].vm.as_mut().filter(|vm| vm.running) {
            vm.running = false;
            self.tell(&format!("guard {node} stops the VM"));
            self.came("stopped by the guard");
            self.input(node, NodeInput::Primary(PrimaryEvent::VmStopped));
        }
    }

    fn start_engine(&mut self, node: usize, attached: bool) {
        if self.nodes[node].engine.is_some() || !self.nodes[node].up {
            return;
        }
        self.nodes[node].stalled = false;
        let config = self.config(node);
        let host = &self.nodes[node];
        let role = if attached && host.vm.is_some() {
            Role::Primary(Primary::new(config, PrimaryStart::Attached { term: host.term }))
        } else {
            let held = host.replica.as_ref().map(|replica| Epoch(replica.epoch));
            Role::Standby(Standby::new(config, host.term, held))
        };
        self.tell(&format!(
            "engine {node} starts as {}",
            if attached { "primary" } else { "standby" }
        ));
        self.start(node, role);
    }

    // The network.

    pub fn send(&mut self, link: usize, from: usize, packet: Packet) {
        let end = end_of(link, from);
        let Some(connection) = self.links[link].connection[end] else { return };
        let at_ns = self.links[link].arrival_ns(end, self.now_ns, &mut self.rng);
        let to = 1 - end;
        self.at(at_ns - self.now_ns, WorldEvent::Deliver { link, to, connection, packet });
    }

    fn deliver(&mut self, link: usize, to: usize, connection: u64, packet: Packet) {
        let way = &mut self.links[link];
        if way.cut[1 - to] || !way.waiting[1 - to].is_empty() {
            way.waiting[1 - to].push_back((connection, packet));
            return;
        }
        self.arrive(link, to, connection, packet);
    }

    fn arrive(&mut self, link: usize, to: usize, connection: u64, packet: Packet) {
        let host = if to == 0 { LINKS[link].0 } else { LINKS[link].1 };
        if self.links[link].connection[to] != Some(connection) {
            // It had arrived, and the witness has not read it yet.
            if let (Packet::Ask(..), WITNESS) = (&packet, host)
                && self.chance(2)
            {
                let late_ns = self.rng.u64(..2000 * MS);
                self.came("late question");
                let connection = u64::MAX;
                self.at(late_ns, WorldEvent::Deliver { link, to, connection, packet });
            } else if connection == u64::MAX && host == WITNESS {
                self.witness(link, packet);
            }
            return;
        }
        match packet {
            packet @ Packet::Ask(..) => self.witness(link, packet),
            Packet::Message(bytes) => self.input(host, NodeInput::Message(link as u8, bytes)),
            Packet::Answer(id, bytes) => self.input(host, NodeInput::Answer(id, bytes)),
            Packet::Data(data) => self.input(host, NodeInput::Data(data)),
        }
    }

    fn witness(&mut self, link: usize, packet: Packet) {
        let Packet::Ask(id, bytes) = packet else { return };
        if !self.witness_up {
            return;
        }
        let request = WitnessRequest::decode(&bytes).expect("a request");
        let (reply, changed) = self.decide(request);
        if changed && self.mutant != Some(Mutant::WitnessForgets) {
            self.persisted.clear();
            self.witness.encode(&mut self.persisted);
            self.tell(&format!("witness: {request:?} makes {:?}", reply.state));
        }
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        self.send(link, WITNESS, Packet::Answer(id, bytes));
    }

    /// The witness' decision, or that of one with a defect.
    fn decide(&mut self, request: WitnessRequest) -> (WitnessReply, bool) {
        let state = self.witness.state(GROUP);
        if let (
            Some(Mutant::WitnessGrantsTwice),
            WitnessRequest::TakeOver { node, term, session, .. },
            Some(state),
        ) = (self.mutant, request, state)
            && state.term == term
        {
            let generation = state.generation;
            let owner = state.owner;
            self.witness.handle(WitnessRequest::Paired {
                group: GROUP,
                node: owner,
                term,
                generation,
                standby: node,
                session,
            });
            let generation = generation + 1;
            return self.witness.handle(WitnessRequest::TakeOver {
                group: GROUP,
                node,
                term,
                generation,
                session,
            });
        }
        self.witness.handle(if self.mutant == Some(Mutant::WitnessIgnoresGenerations) {
            renewed(request, state)
        } else {
            request
        })
    }

    /// What the witness truly has.
    pub fn register(&self) -> Option<(usize, Term, OwnerMode)> {
        self.witness.state(GROUP).map(|state| (state.owner.0 as usize - 1, state.term, state.mode))
    }

    pub fn close(&mut self, link: usize, end: usize) {
        if self.links[link].connection[end].take().is_none() {
            return;
        }
        let host = if end == 0 { LINKS[link].0 } else { LINKS[link].1 };
        if host != WITNESS && self.nodes[host].engine.is_some() {
            match link {
                0 | 1 => self.input(host, NodeInput::Down(link as u8)),
                _ => {
                    if let Some(id) = self.nodes[host].engine.as_ref().and_then(|engine| engine.ask)
                    {
                        self.input(host, NodeInput::WitnessLost(id, true));
                    }
                }
            }
        }
    }

    fn is_there(&self, host: usize) -> bool {
        if host == WITNESS {
            return self.witness_up;
        }
        let node = &self.nodes[host];
        node.up && node.engine.is_some() && !node.stalled
    }

    fn reconnect(&mut self, link: usize) {
        let wait_ns = self.rng.u64(20 * MS..100 * MS);
        self.at(wait_ns, WorldEvent::Reconnect(link));
        let (a, b) = LINKS[link];
        let way = &self.links[link];
        if way.is_whole() || way.is_cut() || !self.is_there(a) || !self.is_there(b) {
            return;
        }
        self.close(link, 0);
        self.close(link, 1);
        let connection = self.number();
        self.links[link].connection = [Some(connection); 2];
        for host in [a, b] {
            if link < 2 {
                self.input(host, NodeInput::Up(link as u8));
            }
        }
    }

    fn heal(&mut self, link: usize, direction: usize) {
        if !std::mem::take(&mut self.links[link].cut[direction]) {
            return;
        }
        self.tell(&format!("link {link} works again, direction {direction}"));
        let wait_ns = self.rng.u64(MS..200 * MS);
        self.at(wait_ns, WorldEvent::Drain { link, direction });
    }
}

/// The request, as if its sender had seen what holds now.
fn renewed(request: WitnessRequest, state: Option<GroupState>) -> WitnessRequest {
    let now = state.map_or(0, |state| state.generation);
    match request {
        WitnessRequest::Solo { group, node, term, .. } => {
            WitnessRequest::Solo { group, node, term, generation: now }
        }
        WitnessRequest::Paired { group, node, term, standby, session, .. } => {
            WitnessRequest::Paired { group, node, term, generation: now, standby, session }
        }
        WitnessRequest::TakeOver { group, node, term, session, .. } => {
            WitnessRequest::TakeOver { group, node, term, generation: now, session }
        }
        request => request,
    }
}
