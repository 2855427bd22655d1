//! The replication protocol without I/O: who may run a protected VM, when its output may leave, who
//! takes over.
//!
//! ```text
//!            epochs, heartbeats ─▶                       each role is a state machine:
//!   Primary ───────────────────────── Standby              handle(now_ns, input) ─▶ outputs
//!      │     ◀─ acknowledgements        │                  deadline_ns() ─▶ when a Tick is due
//!      └───────────▶ Witness ◀──────────┘
//! ```
//!
//! A protected VM is a *group*. Who runs it has the group's *term*; each takeover is a term. What a
//! primary and a standby have from a Hello to the end of their trust is a *session*.
//! docs/design/replication.md argues why at most one VM runs.
//!
//! Invariants: no two nodes have the right to run the VM at one instant; output of an epoch leaves
//! when the standby holds the epoch, or its primary runs alone by right; a standby activates once
//! per term, and a whole epoch.
//!
//! Not here: a clock (`now_ns` is the node's own, monotonic), sockets, the epochs' bytes, QEMU,
//! persistence. The driver does what the outputs say, in their order, before it hands in the next
//! input.

mod message;
mod note;
mod primary;
#[cfg(test)]
mod simulation;
mod standby;
mod wire;
mod witness;

pub use keyframe_units::Epoch;
pub use message::{
    Hello, MESSAGE_BYTES_MAX, Message, PROTOCOL_VERSION, REASON_BYTES_MAX, Refusal, Role,
};
pub use note::{Note, Why};
pub use primary::{Guard, Primary, PrimaryAction, PrimaryEvent, PrimaryState, Start};
pub use standby::{Standby, StandbyAction, StandbyEvent, StandbyState};
pub use wire::DecodeError;
pub use witness::{GROUPS_MAX, GroupState, Mode, Witness, WitnessReply, WitnessRequest};

use std::fmt;

/// Paths between two nodes at most: 0 carries the data, 1 is another way for signs of life.
pub const PATHS_MAX: usize = 2;

/// A host's number in a group; random, chosen by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// A protected VM; random, chosen when it is protected first. No two groups have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u128);

/// Counts takeovers: the first primary has term 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(pub u64);

/// What one primary and one standby have in common from a Hello on; never used again, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Session(pub u64);

impl Term {
    /// Of the first primary.
    pub const FIRST: Self = Self(1);

    /// That of whoever takes over from this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

macro_rules! show {
    ($($name:ident $format:literal),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $format, self.0)
            }
        }
    )*};
}
show!(NodeId "{:016x}", GroupId "{:032x}", Term "{}", Session "{:016x}");

/// Who decides which node goes on when both may be alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arbitration {
    /// A third host, that both ask.
    Witness,
    /// A hook that switches the other host off.
    Fencing,
    /// Nobody: the primary goes on alone, the standby waits for a command.
    Manual,
}

/// One node's settings. All but `node` and `instance` are the same on both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// This process: random, another at each start.
    pub instance: u64,
    /// The VM.
    pub group: GroupId,
    /// A peer that was silent for so long on all paths is lost.
    pub detection_ns: u64,
    /// From one heartbeat to the next.
    pub heartbeat_ns: u64,
    /// The primary may run its VM so long after it sent a heartbeat that was answered. Well below
    /// `detection_ns`: the difference is for the drift of clocks, and for stopping the VM.
    pub lease_ns: u64,
    /// From one question, greeting or fencing that failed to the next.
    pub retry_ns: u64,
    /// Without data for so long, though other paths work, a standby is lost.
    pub data_ns: u64,
    /// Who decides.
    pub arbitration: Arbitration,
    /// 1 or 2.
    pub paths: u8,
    /// Of whatever both nodes must have alike, beyond this.
    pub digest: u64,
}

impl Config {
    /// With everything that follows from the detection time, and two paths.
    pub fn new(
        node: NodeId,
        instance: u64,
        group: GroupId,
        arbitration: Arbitration,
        detection_ns: u64,
    ) -> Self {
        Self {
            node,
            instance,
            group,
            detection_ns,
            heartbeat_ns: (detection_ns / 6).max(1),
            lease_ns: detection_ns / 10 * 7,
            retry_ns: detection_ns,
            data_ns: detection_ns.saturating_mul(4),
            arbitration,
            paths: 2,
            digest: 0,
        }
    }

    /// A number for what both sides must have alike.
    fn agreed(&self) -> u64 {
        let arbitration = match self.arbitration {
            Arbitration::Witness => 1,
            Arbitration::Fencing => 2,
            Arbitration::Manual => 3,
        };
        [self.detection_ns, self.lease_ns, self.heartbeat_ns, arbitration]
            .iter()
            .fold(self.digest, |sum, part| {
                (sum ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
            })
    }
}

/// The paths that are connected.
#[derive(Clone, Copy, Debug, Default)]
struct Paths([bool; PATHS_MAX]);

impl Paths {
    fn set(&mut self, path: u8, up: bool) {
        if let Some(at) = self.0.get_mut(usize::from(path)) {
            *at = up;
        }
    }

    fn up(self) -> impl Iterator<Item = u8> {
        (0..PATHS_MAX as u8).filter(move |path| self.0[usize::from(*path)])
    }

    fn any(self) -> bool {
        self.0.contains(&true)
    }
}
