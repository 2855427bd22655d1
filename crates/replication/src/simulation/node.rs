//! A host: the engine with its role, the VM, the packet gate, the guard, and what the host holds as
//! a standby.
//!
//! The VM is a log of the writes that clients sent. An epoch is the log's length, its transfer what
//! was appended since the last.

use super::net::Data;
use super::world::Local;
use crate::{
    Epoch, Primary, PrimaryEvent, PrimaryState, RunPermit, SessionId, Standby, StandbyEvent,
    StandbyState, Term,
};
use std::collections::VecDeque;
use std::rc::Rc;

pub struct Vm {
    pub log: Vec<u32>,
    pub running: bool,
}

#[derive(Default)]
pub struct Gate {
    pub holding: bool,
    pub held: Vec<(u64, u32)>,
}

/// What a standby has applied.
#[derive(Clone)]
pub struct Replica {
    pub term: Term,
    pub epoch: u64,
    pub log: Rc<Vec<u32>>,
}

pub enum Role {
    Primary(Primary),
    Standby(Standby),
}

#[derive(Clone)]
pub enum Input {
    Primary(PrimaryEvent),
    Standby(StandbyEvent),
    /// For whichever role.
    Tick,
    Up(u8),
    Down(u8),
    Message(u8, Vec<u8>),
    Answer(u64, Vec<u8>),
    WitnessLost(u64, bool),
    /// A piece of an epoch.
    Data(Data),
    /// What the engine has begun is done.
    Done(Local),
}

pub struct Engine {
    pub id: u64,
    pub role: Role,
    pub ask: Option<u64>,
    pub may_capture: bool,
    /// What the next transfer builds upon; `None`: all of the VM.
    pub sent: Option<(usize, u64)>,
    /// Standby: of which session data is taken, its epoch and pieces so far, whole epochs.
    pub receives: Option<SessionId>,
    pub partial: Option<(u64, u8)>,
    pub whole: VecDeque<Data>,
    /// When what was told to the VM, and what is applied, is done.
    pub vm_at_ns: u64,
    pub apply_at_ns: u64,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Node {
    pub up: bool,
    pub offset_ns: u64,
    pub drift_ppm: i64,
    pub engine: Option<Engine>,
    pub stalled: bool,
    pub backlog: VecDeque<Input>,
    pub vm: Option<Vm>,
    pub gate: Gate,
    pub permit: RunPermit,
    pub epoch: u64,
    pub term: Term,
    pub replica: Option<Replica>,
    pub disk_full: bool,
    /// A user has vouched for it.
    pub insisted: bool,
}

impl Engine {
    pub fn new(id: u64, role: Role) -> Self {
        Self {
            id,
            role,
            ask: None,
            may_capture: false,
            sent: None,
            receives: None,
            partial: None,
            whole: VecDeque::new(),
            vm_at_ns: 0,
            apply_at_ns: 0,
        }
    }

    /// A piece of an epoch has come; the epoch, if it is whole now.
    pub fn receive(&mut self, data: Data) -> Option<StandbyEvent> {
        if self.receives != Some(data.session) {
            return None;
        }
        let expected = match self.partial {
            Some((epoch, pieces)) if epoch == data.epoch => pieces,
            _ => 0,
        };
        if data.piece != expected {
            self.partial = None;
            return None;
        }
        if !data.last {
            self.partial = Some((data.epoch, expected + 1));
            return None;
        }
        self.partial = None;
        let (session, epoch, after) = (data.session, Epoch(data.epoch), data.after.map(Epoch));
        self.whole.push_back(data);
        Some(StandbyEvent::EpochComplete { session, epoch, after })
    }
}

impl Node {
    pub fn local_ns(&self, now_ns: u64) -> u64 {
        self.offset_ns
            + (i128::from(now_ns) * i128::from(1_000_000 + self.drift_ppm) / 1_000_000) as u64
    }

    /// The first true time at which this node's clock shows `local_ns`.
    pub fn true_ns(&self, local_ns: u64) -> u64 {
        let since = i128::from(local_ns.saturating_sub(self.offset_ns));
        (since * 1_000_000 / i128::from(1_000_000 + self.drift_ppm)) as u64 + 1
    }

    pub fn primary(&self) -> Option<&Primary> {
        match &self.engine.as_ref()?.role {
            Role::Primary(primary) => Some(primary),
            Role::Standby(_) => None,
        }
    }

    pub fn primary_state(&self) -> Option<PrimaryState> {
        self.primary().map(Primary::state)
    }

    pub fn standby_state(&self) -> Option<StandbyState> {
        match &self.engine.as_ref()?.role {
            Role::Standby(standby) => Some(standby.state()),
            Role::Primary(_) => None,
        }
    }

    pub fn runs(&self) -> bool {
        self.vm.as_ref().is_some_and(|vm| vm.running)
    }
}
