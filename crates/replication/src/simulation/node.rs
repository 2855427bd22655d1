//! A simulated host: the engine with its role, the VM, the packet gate, the run permit that the
//! guard watches, and the replica that the host holds as a standby.
//!
//! The VM is a log of the writes that clients sent. An epoch is the length of the log; its transfer
//! holds the writes that were appended since the epoch before it.

use super::net::Data;
use super::world::Operation;
use crate::{
    Epoch, Primary, PrimaryEvent, PrimaryState, RunPermit, SessionId, Standby, StandbyEvent,
    StandbyState, Term,
};
use std::collections::VecDeque;
use std::rc::Rc;

/// A VM, as the log of the writes that it has handled.
pub struct WriteLogVm {
    pub log: Vec<u32>,
    pub running: bool,
}

/// The gate for a VM's output.
#[derive(Default)]
pub struct PacketGate {
    pub holding: bool,
    /// Each held write with the epoch that includes it.
    pub held: Vec<(u64, u32)>,
}

/// The copy of the VM that a standby has applied.
#[derive(Clone)]
pub struct Replica {
    pub term: Term,
    pub epoch: u64,
    pub log: Rc<Vec<u32>>,
}

/// The role of an engine.
pub enum Role {
    Primary(Primary),
    Standby(Standby),
}

/// An input of a node's engine.
#[derive(Clone)]
pub enum NodeInput {
    /// An event for a primary; a standby ignores it.
    Primary(PrimaryEvent),
    /// An event for a standby; a primary ignores it.
    Standby(StandbyEvent),
    /// Time has passed.
    Tick,
    /// A path is connected.
    Up(u8),
    /// A path is no longer connected.
    Down(u8),
    /// The peer's message, encoded, and its path.
    Message(u8, Vec<u8>),
    /// The number of a request to the witness, and its answer, encoded.
    Answer(u64, Vec<u8>),
    /// The number of a request that gets no answer, and whether it may have left the host.
    WitnessLost(u64, bool),
    /// A piece of an epoch.
    Data(Data),
    /// An operation that the engine began ends now.
    Done(Operation),
}

/// A running engine.
pub struct NodeEngine {
    /// The number of this start.
    pub id: u64,
    pub role: Role,
    /// The number of the open request to the witness.
    pub ask: Option<u64>,
    /// Primary: it captures epochs on its own schedule.
    pub may_capture: bool,
    /// Primary: the length of the log and the epoch on which the next transfer builds; `None` if
    /// that holds all of the VM.
    pub sent: Option<(usize, u64)>,
    /// Standby: the session whose data it takes.
    pub receives: Option<SessionId>,
    /// Standby: the incomplete epoch and the number of its pieces so far.
    pub partial: Option<(u64, u8)>,
    /// Standby: the last pieces of complete epochs, which stand for the whole epochs.
    pub whole: VecDeque<Data>,
    /// The time at which the last operation on the VM ends.
    pub vm_at_ns: u64,
    /// Standby: when the last epoch to apply is applied.
    pub apply_at_ns: u64,
}

/// A host and what it holds.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct SimulatedNode {
    pub up: bool,
    pub offset_ns: u64,
    pub drift_ppm: i64,
    pub engine: Option<NodeEngine>,
    pub stalled: bool,
    pub backlog: VecDeque<NodeInput>,
    pub vm: Option<WriteLogVm>,
    pub gate: PacketGate,
    pub permit: RunPermit,
    pub epoch: u64,
    pub term: Term,
    pub replica: Option<Replica>,
    pub disk_full: bool,
    /// A user has vouched that the peer does not run the VM.
    pub insisted: bool,
}

impl NodeEngine {
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

    /// Takes a piece of an epoch. Returns the event of a complete epoch if it was the last piece.
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

impl SimulatedNode {
    pub fn local_ns(&self, now_ns: u64) -> u64 {
        self.offset_ns
            + (i128::from(now_ns) * i128::from(1_000_000 + self.drift_ppm) / 1_000_000) as u64
    }

    /// Returns the first true time at which this node's clock shows `local_ns`.
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
