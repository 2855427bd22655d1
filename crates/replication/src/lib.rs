//! The replication protocol without I/O: which node may run a protected VM, when the VM's output
//! may leave, and which node takes over.
//!
//! ```text
//!            epochs, heartbeats ─▶                       each role is a state machine:
//!   Primary ───────────────────────── Standby              handle(now_ns, event) ─▶ actions
//!      │     ◀─ acknowledgements        │                  deadline_ns() ─▶ when a Tick is due
//!      └───────────▶ Witness ◀──────────┘
//! ```
//!
//! A protected VM is a *group*. The node that runs it has the group's *term*; each takeover begins
//! the next term. A *session* begins when a primary accepts a standby. It ends when one of the two
//! gives the other up. `docs/design/replication.md` argues why at most one VM runs.
//!
//! Invariants: no two nodes have the right to run the VM at the same instant; the output of an
//! epoch leaves after the standby holds the epoch, or if its primary has the right to run alone; a
//! standby activates at most once per term, and a whole epoch.
//!
//! Not here: a clock (`now_ns` is the time of the node's own monotonic clock, in nanoseconds),
//! sockets, the epochs' bytes, QEMU and persistence. The *driver* is the program that calls the
//! state machines. It carries out the actions in their order before it handles the next event.

mod message;
mod notice;
mod primary;
#[cfg(test)]
mod simulation;
mod standby;
mod wire;
mod witness;

pub use keyframe_units::Epoch;
pub use message::{
    Hello, MESSAGE_BYTES_MAX, NodeRole, PROTOCOL_VERSION, PeerMessage, PeerRefusal,
    REASON_BYTES_MAX,
};
pub use notice::{Notice, StandbyLossReason};
pub use primary::{Primary, PrimaryAction, PrimaryEvent, PrimaryStart, PrimaryState, RunPermit};
pub use standby::{Standby, StandbyAction, StandbyEvent, StandbyState};
pub use wire::DecodeError;
pub use witness::{GROUPS_MAX, GroupState, OwnerMode, Witness, WitnessReply, WitnessRequest};

use std::fmt;

/// The largest number of paths between two nodes. Path 0 carries the data of epochs and messages,
/// path 1 messages alone.
pub const PATHS_MAX: usize = 2;

/// The number of a node in a group. The driver chooses it at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// The number of a protected VM. The driver chooses it at random when the VM is first protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u128);

/// The number of takeovers of a VM, plus 1: the first primary has term 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(pub u64);

/// The number of a session between a primary and a standby. It is never 0, and no other session
/// gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

impl Term {
    /// The term of the first primary.
    pub const FIRST: Self = Self(1);

    /// Returns the term of the node that takes over from this term's primary.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

macro_rules! display_number {
    ($($name:ident $format:literal),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $format, self.0)
            }
        }
    )*};
}
display_number!(NodeId "{:016x}", GroupId "{:032x}", Term "{}", SessionId "{:016x}");

/// The rule that decides which node goes on if both may be alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arbitration {
    /// A third host decides; both nodes ask it.
    Witness,
    /// A hook switches the other host off.
    Fencing,
    /// A user decides: the primary goes on alone, and the standby waits for a command.
    Manual,
}

/// The settings of one node. All but `node` and `instance` must be the same on both nodes. Times
/// are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicationConfig {
    /// The number of this node.
    pub node: NodeId,
    /// The number of this process: a random number, chosen at each start.
    pub instance: u64,
    /// The protected VM.
    pub group: GroupId,
    /// A peer counts as lost after this time without a message on any path.
    pub detection_ns: u64,
    /// The time between two heartbeats.
    pub heartbeat_ns: u64,
    /// An exposed primary may run its VM for this long after it sent a heartbeat that was answered.
    /// The difference to `detection_ns` covers the drift of the clocks and the time to stop the VM.
    pub lease_ns: u64,
    /// The time from a question to the witness, a greeting or a fencing that failed to the next
    /// attempt.
    pub retry_ns: u64,
    /// A standby counts as lost after this time without path 0, or without an epoch that succeeds,
    /// even if it answers heartbeats.
    pub data_ns: u64,
    /// The rule that decides which node survives.
    pub arbitration: Arbitration,
    /// The number of paths, 1 or 2.
    pub paths: u8,
    /// A hash of all further settings that must be the same on both nodes.
    pub digest: u64,
}

impl ReplicationConfig {
    /// Creates the settings for two paths. `instance` is a random number of this process. Derives
    /// all times from `detection_ns`: a heartbeat is due after a sixth of it, a lease lasts for 7
    /// tenths, a retry waits for all of it, and the data path may be down for 4 times as long.
    /// `digest` is 0.
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

    /// A hash of all settings that must be the same on both nodes.
    fn shared_digest(&self) -> u64 {
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

/// Which paths are connected.
#[derive(Clone, Copy, Debug, Default)]
struct ConnectedPaths([bool; PATHS_MAX]);

impl ConnectedPaths {
    fn set(&mut self, path: u8, is_connected: bool) {
        if let Some(at) = self.0.get_mut(usize::from(path)) {
            *at = is_connected;
        }
    }

    fn iter(self) -> impl Iterator<Item = u8> {
        (0..PATHS_MAX as u8).filter(move |path| self.0[usize::from(*path)])
    }

    fn any(self) -> bool {
        self.0.contains(&true)
    }
}
