//! Notices for users: what a primary or a standby has found out or decided.

use crate::{Epoch, NodeId, PeerRefusal, Term};

/// The reason why a primary has lost its standby, or does not trust it any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StandbyLossReason {
    /// No message arrived for the detection time.
    Silence,
    /// Heartbeats arrive, but the data path stays down.
    NoData,
    /// The standby reported that it cannot take epochs; the text is its reason.
    Sick(String),
    /// The standby's process has restarted, or has given the session up.
    Restarted,
    /// The VM was handed over to the standby, which has been silent since.
    HandOver,
    /// A user asked for it.
    Command,
    /// The VM cannot be captured for a standby as it is now; the text is the reason.
    NotCapturable(String),
    /// No epoch has succeeded for too long.
    FailedEpochs,
}

/// A notice for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A standby has joined and receives the whole VM.
    Joined(NodeId),
    /// From now on a failure of this host loses nothing.
    Protected,
    /// The VM runs, or will run, without a standby.
    Unprotected(StandbyLossReason),
    /// The primary has lost its standby, and asks for the right to run the VM without it.
    StandbyLost(StandbyLossReason),
    /// The VM is paused until the standby, the witness or the fence hook answers.
    Stopped,
    /// The VM runs again and is protected as before.
    Resumed,
    /// The witness does not answer.
    WitnessUnreachable,
    /// The witness does not know this group, or has no room for it.
    WitnessRefused,
    /// The fence hook has failed this many times in a row; it is tried again.
    FenceFailed(u32),
    /// Another node runs the VM in this term.
    Deposed(Term),
    /// A user asked for a switch-over, which is not possible now.
    CannotSwitchOver,
    /// The switch-over has failed. The VM goes on here if this node has the right to run it.
    SwitchOverFailed,
    /// The peer refuses this node.
    Refused(PeerRefusal),
    /// The primary is silent.
    PrimaryLost {
        /// The newest epoch that this standby has applied. `None` if it has applied none.
        held: Option<Epoch>,
        /// True if the epoch includes all output that clients saw; false if the primary may have
        /// run on unprotected.
        complete: bool,
    },
    /// The standby may not take over, since the other node has the right to run the VM.
    TakeOverRefused,
    /// The standby takes over only by a forced command.
    NeedsForce,
    /// The standby holds no whole epoch to take over with.
    NothingHeld,
    /// The standby could not apply an epoch; the text is the reason.
    ApplyFailed(String),
    /// The VM has shut down in good order.
    VmEnded,
}
