//! The messages between a primary and a standby, and their encoding.
//!
//! ```text
//!   version u8 │ kind u8 │ fields, little-endian, in the order of their declaration
//! ```
//!
//! The transport frames messages. The data of epochs travels outside messages: the driver sends it
//! with its session and its epoch.

mod encoding;

use crate::{Epoch, GroupId, NodeId, SessionId, Term};

/// The version of the protocol. Both nodes must have the same.
pub const PROTOCOL_VERSION: u8 = 1;
/// The largest number of bytes of a reason; a longer text is cut.
pub const REASON_BYTES_MAX: usize = 512;
/// The largest number of bytes of an encoded message.
pub const MESSAGE_BYTES_MAX: usize = REASON_BYTES_MAX + 64;

/// The role of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeRole {
    /// The node runs the VM, or is about to.
    Primary,
    /// The node holds a copy of the VM, or asks for one.
    Standby,
}

/// The first message of both nodes on a path. A standby without a session repeats it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The sender's role.
    pub role: NodeRole,
    /// The VM that the sender protects.
    pub group: GroupId,
    /// The sender's node.
    pub node: NodeId,
    /// The sender's process: another number after each start.
    pub instance: u64,
    /// The newest term that the sender knows; 0 if it knows none.
    pub term: Term,
    /// A hash of the settings that must be the same on both nodes.
    pub digest: u64,
    /// The session to go on with. `None` if the sender has none.
    pub session: Option<SessionId>,
    /// The session that the standby gave up last, for good. `None` if there is none, and from a
    /// primary.
    pub left: Option<SessionId>,
    /// The newest epoch of `session` that arrived whole at the standby. `None` if none did, and
    /// from a primary.
    pub complete: Option<Epoch>,
}

/// The reason why a node refuses its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRefusal {
    /// The peer protects another VM.
    WrongGroup,
    /// The settings differ.
    WrongConfig,
    /// The primary has a standby, or does not know yet whether its last one took over. Ask again.
    Busy,
    /// The peer's term is over: the VM runs in this later term already.
    StaleTerm(Term),
    /// Both nodes have the same role in the same term.
    SameRole,
}

/// A message between a primary and a standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// The first message on a path.
    Hello(Hello),
    /// The primary accepts the standby, or goes on with it.
    HelloAck {
        /// The primary's term.
        term: Term,
        /// The session.
        session: SessionId,
        /// The number of the newest heartbeat so far. Heartbeats up to it belong to the time before
        /// the session.
        sequence: u64,
    },
    /// The sender refuses its peer.
    Refused(PeerRefusal),
    /// The primary is alive.
    Heartbeat {
        /// The number of the heartbeat, counted over all paths.
        sequence: u64,
        /// The time at which it was sent, by the primary's clock, in nanoseconds.
        sent_ns: u64,
        /// The primary's term.
        term: Term,
        /// The session; `None` if the primary runs alone.
        session: Option<SessionId>,
        /// The number of the standby's right to take over, or 0 if it has none because output is
        /// not held. With a witness it is the generation of the pairing.
        pairing: u64,
    },
    /// The standby is alive, and leaves the VM to the primary for the detection time.
    HeartbeatAck {
        /// The heartbeat's number.
        sequence: u64,
        /// The time at which the heartbeat was sent, by the primary's clock, in nanoseconds.
        sent_ns: u64,
        /// The heartbeat's session.
        session: SessionId,
        /// The pairing of the newest heartbeat that the standby knows.
        pairing: u64,
        /// The newest epoch of this session that the standby has applied. `None` if it has applied
        /// none.
        held: Option<Epoch>,
    },
    /// The standby has applied this epoch and all before it.
    EpochAck {
        /// The session of the epochs.
        session: SessionId,
        /// The newest epoch.
        epoch: Epoch,
    },
    /// The standby asks for a switch-over.
    RequestSwitchOver {
        /// The session.
        session: SessionId,
    },
    /// The primary has stopped its VM for a switch-over. It runs the VM again only with the right
    /// to run alone.
    HandOver {
        /// The session.
        session: SessionId,
        /// The last epoch.
        epoch: Epoch,
    },
    /// The sender has taken the VM over.
    TookOver {
        /// Its term.
        term: Term,
    },
    /// The standby can take no more epochs. The epoch that it holds stays whole.
    Sick {
        /// The session.
        session: SessionId,
        /// The reason, for users.
        reason: String,
    },
    /// The VM has shut down. As the standby's answer: it will not take over.
    Bye {
        /// The session.
        session: SessionId,
    },
}

#[cfg(test)]
mod tests;
