//! The events and actions of a standby, and its state.

use crate::{Epoch, Notice, PeerMessage, SessionId, Term, WitnessReply, WitnessRequest};

/// An event that a standby handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StandbyEvent {
    /// Time has passed.
    Tick,
    /// The path with this number is connected, for the first time or again.
    PathUp(u8),
    /// The path with this number is no longer connected.
    PathDown(u8),
    /// The peer sent a message.
    Peer {
        /// The path on which it arrived.
        path: u8,
        /// The message.
        message: PeerMessage,
    },
    /// The witness answered the open request.
    Witness(WitnessReply),
    /// The open request gets no answer.
    WitnessLost {
        /// False if the request has certainly not left this host.
        sent: bool,
    },
    /// An epoch is in the buffer, whole and verified.
    EpochComplete {
        /// The session in which it came.
        session: SessionId,
        /// The epoch, higher than all before it.
        epoch: Epoch,
        /// The epoch on which it builds; `None` if it holds all of the VM.
        after: Option<Epoch>,
    },
    /// An epoch is applied: this node holds it now.
    Applied {
        /// The epoch.
        epoch: Epoch,
    },
    /// An epoch was not applied, and none of those that were to be applied after it will be. The
    /// node still holds the epoch that it held before.
    ApplyFailed {
        /// The reason, for users.
        reason: String,
    },
    /// Received data cannot be used, so no later epoch of this session arrives whole. Epochs that
    /// are being applied go on, and each is reported.
    DataFailed {
        /// The reason, for users.
        reason: String,
    },
    /// The fence hook ended: true if the other host is certainly off.
    Fenced(bool),
    /// A user asks this node to take over although no failure was seen.
    FailOver {
        /// True if the user guarantees that the primary is off.
        force: bool,
    },
    /// A user asks for a switch-over to this node.
    SwitchOver,
}

/// An action that a standby asks of its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StandbyAction {
    /// Send a message if the path is still connected.
    Send {
        /// The path.
        path: u8,
        /// The message.
        message: PeerMessage,
    },
    /// Ask the witness. Only one request is open at a time.
    AskWitness(WitnessRequest),
    /// Take data of this session, and of no other, from now on.
    Receive {
        /// The session.
        session: SessionId,
    },
    /// Make this epoch the one that the node holds, as a whole or not at all.
    Apply {
        /// The epoch.
        epoch: Epoch,
    },
    /// Drop this whole epoch: an epoch on which it builds is missing, or its session has ended.
    Reject {
        /// The epoch.
        epoch: Epoch,
    },
    /// Drop the data of incomplete epochs, and the complete epochs that are not to be applied.
    DiscardPartial,
    /// Switch the primary's host off, then report [`StandbyEvent::Fenced`].
    Fence,
    /// Start the VM as it was at the end of this epoch, and become its primary.
    Activate {
        /// The epoch that this node holds.
        epoch: Epoch,
        /// The new term.
        term: Term,
        /// True if a user forced the takeover, without a right to it.
        forced: bool,
    },
    /// Tell users.
    Notify(Notice),
}

/// The state of a standby, as users see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyState {
    /// No primary has accepted the standby.
    Alone,
    /// The session's first epoch is on its way.
    Joining,
    /// The standby holds an epoch of the session.
    Following,
    /// The standby may ask to take over when the primary is silent.
    Armed,
    /// The standby asks for the right to take over.
    Asking,
    /// The standby has taken over and runs the VM.
    Active,
}
