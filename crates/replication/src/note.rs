//! What users are told.

use crate::{Epoch, NodeId, Refusal, Term};

/// Why a primary has no standby any more, or does not trust it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// Nothing was heard for the detection time.
    Silence,
    /// Signs of life come, data does not get through.
    NoData,
    /// It said so.
    Sick(String),
    /// It is another process than before, or has given the session up.
    Restarted,
    /// It was handed the VM, and nothing was heard of it since.
    HandOver,
    /// The user said so.
    Command,
}

/// Something that a user should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A standby has joined and gets the whole VM.
    Joined(NodeId),
    /// From now on a failure of this host loses nothing.
    Protected,
    /// The VM runs, or will, without a standby.
    Unprotected(Why),
    /// The right to run without the standby is asked for.
    StandbyLost(Why),
    /// The VM stands still until the standby, the witness or the fence hook answers.
    Stopped,
    /// It runs again, protected as before.
    Resumed,
    /// The witness does not answer.
    WitnessUnreachable,
    /// The witness has no room for this group, or knows nothing of it.
    WitnessRefused,
    /// The hook failed, so many times by now; it is tried again.
    FenceFailed(u32),
    /// Another node runs the VM in this term.
    Deposed(Term),
    /// A switch-over was asked for that is not possible now.
    CannotSwitchOver,
    /// The switch-over has failed; the VM goes on here, if by right.
    SwitchOverFailed,
    /// The peer refuses this node.
    Refused(Refusal),
    /// The primary is silent; what this standby holds; whether all that clients saw is in it.
    PrimaryLost {
        /// The newest whole epoch.
        held: Option<Epoch>,
        /// False where the primary may have run on unprotected.
        complete: bool,
    },
    /// The standby stays one: the other side has the right.
    TakeOverRefused,
    /// A command is needed that insists.
    NeedsForce,
    /// Nothing to take over with.
    NothingHeld,
    /// An epoch could not be applied.
    ApplyFailed(String),
    /// The VM has ended in good order.
    VmEnded,
}
