//! The events and actions of a primary, its start, its state and the permit of its guard.

use crate::{Epoch, Notice, PeerMessage, SessionId, Term, WitnessReply, WitnessRequest};

/// The way in which a node becomes primary. In each case its VM exists, and runs or is about to
/// run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrimaryStart {
    /// The VM is protected for the first time: no other node knows its group.
    First,
    /// The engine has died under [`RunPermit::Free`], and a new one has found the VM again.
    Attached {
        /// The VM's term.
        term: Term,
    },
    /// The node was a standby and has activated.
    TakenOver {
        /// The term of the activation.
        term: Term,
        /// True if a user forced the takeover, of which the witness does not know yet.
        forced: bool,
    },
}

/// The permit to run the VM. The guard, a process outside the engine, enforces it: if the engine
/// dies or stalls, the guard stops the VM when the permit ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPermit {
    /// The node has the right to run the VM alone: the VM may outlive the engine.
    Free,
    /// The VM may run until this time of the node's clock, in nanoseconds. It dies with the engine.
    Until(u64),
    /// The VM may not run.
    Stopped,
}

/// An event that a primary handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryEvent {
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
    /// The VM was captured. Its later output belongs to the next epoch; the data is on its way.
    Captured {
        /// The epoch, higher than all before it.
        epoch: Epoch,
    },
    /// The capture failed.
    CaptureFailed,
    /// No capture can succeed before [`PrimaryEvent::CaptureUnblocked`]; the text is the reason.
    /// The VM goes on alone.
    CaptureBlocked(String),
    /// Captures can succeed again: a standby may join.
    CaptureUnblocked,
    /// The VM is paused, by [`PrimaryAction::StopVm`] or by the guard.
    VmStopped,
    /// [`PrimaryAction::StopVm`] has failed: the VM may run, or be paused.
    VmStopFailed,
    /// The VM runs.
    VmResumed,
    /// The fence hook ended: true if the other host is certainly off.
    Fenced(bool),
    /// A user asks for a switch-over to the standby.
    SwitchOver,
    /// A user guarantees that the other node is off: this one goes on alone.
    GoSolo,
    /// The VM has ended, and no other node is to continue it.
    VmEnded,
}

/// An action that a primary asks of its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryAction {
    /// Send a message if the path is still connected.
    Send {
        /// The path.
        path: u8,
        /// The message.
        message: PeerMessage,
    },
    /// Ask the witness. Only one request is open at a time.
    AskWitness(WitnessRequest),
    /// Give the guard this permit, before the actions that follow.
    SetRunPermit(RunPermit),
    /// Pause the VM, then report [`PrimaryEvent::VmStopped`] or [`PrimaryEvent::VmStopFailed`].
    StopVm,
    /// Let the VM run, unless the permit has ended by now.
    ResumeVm,
    /// End the VM and drop its held output: another node runs it.
    KillVm,
    /// Hold all output from now on.
    HoldOutput,
    /// Release the output up to the end of this epoch.
    Release {
        /// The newest epoch that the standby holds.
        epoch: Epoch,
    },
    /// Release all held output, and hold no more.
    ReleaseAll,
    /// Take an epoch with all of the VM for this session. An earlier one that is not complete is
    /// void.
    BeginSync {
        /// The session of the data.
        session: SessionId,
    },
    /// Take an epoch now.
    Capture {
        /// True if the VM is paused and stays so on this node.
        last: bool,
    },
    /// Let the next epoch hold the pages of the epochs after `after`, which did not arrive.
    Owe {
        /// The newest epoch that arrived whole; `None` if none of this session did.
        after: Option<Epoch>,
    },
    /// Allow the scheduler to take epochs (true), or forbid it (false).
    MayCapture(bool),
    /// Switch the standby's host off, then report [`PrimaryEvent::Fenced`].
    Fence,
    /// Tell users.
    Notify(Notice),
    /// End this primary.
    Ended {
        /// The term in which another node runs the VM, if one does: join it as a standby.
        deposed_by: Option<Term>,
    },
}

/// The state of a primary, as users see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrimaryState {
    /// The primary runs the VM alone.
    Solo,
    /// The primary runs the VM alone, and a standby receives the whole VM.
    Syncing,
    /// Output is held, and one more epoch is on its way.
    Closing,
    /// The standby is being given the right to take over.
    Pairing,
    /// A failure of this host loses nothing.
    Protected,
    /// The VM is paused until the standby, the witness or the fence hook answers.
    Stopped,
    /// The VM is paused for a switch-over, and its last epoch is on its way.
    SwitchingOver,
    /// The standby was told to run the VM.
    HandedOver,
    /// The primary has ended.
    Ended,
}
