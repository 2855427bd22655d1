//! The events of a running primary, standby or witness. They have typed fields; the program that
//! runs it turns them into text for its user.

use crate::error::Error;
use keyframe_capture::BoxError;
use keyframe_replication::{Epoch, Notice};
use keyframe_session::control::ReplicationRole;
use keyframe_units::{EventSink, NoEvents};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;

/// Receives the events of a protected VM and those of its session. Several threads call its methods
/// and wait until these return.
pub trait FailoverEventSink: EventSink<keyframe_session::Event> {
    /// Receives an event that has just happened.
    fn failover_event(&self, event: &FailoverEvent);
}

impl FailoverEventSink for NoEvents {
    fn failover_event(&self, _: &FailoverEvent) {}
}

/// The sink that the threads of a primary, a standby or a witness share.
pub type SharedFailoverEventSink = Arc<dyn FailoverEventSink>;

/// An event of a primary, a standby or a witness.
#[derive(Debug)]
#[non_exhaustive]
pub enum FailoverEvent {
    /// The protocol's core has a notice for the user; [`notice_text`](crate::notice_text) is its
    /// text.
    Notice {
        /// This host's role.
        role: ReplicationRole,
        /// The notice.
        notice: Notice,
    },
    /// The primary could not connect to a standby; it tries again. The event is not repeated while
    /// the error stays the same.
    ConnectFailed(Error),
    /// An epoch failed; its pages go with the next one. The event is not repeated while the error
    /// stays the same.
    EpochFailed(Error),
    /// The guard did not take the new permit of the VM.
    GuardFailed {
        /// The reason.
        error: Error,
        /// True if another guard is started now.
        restarts: bool,
    },
    /// The gate before the VM's network did not carry out a request. The packets that it holds stay
    /// held.
    GateFailed(BoxError),
    /// The VM is about to be protected, and its output is not held, as the user asked: a takeover
    /// may lose what clients have seen.
    OutputNotHeld,
    /// The VM could not be resumed.
    ResumeFailed(Error),
    /// It could not be found out whether QEMU has ended.
    LookFailed(Error),
    /// The fence hook could not be started.
    FenceHookFailed(std::io::Error),
    /// The VM has ended on this host, and the guest's writes to its disks are kept in this
    /// directory.
    WritesKept(PathBuf),
    /// The VM runs on the other host.
    RunsElsewhere {
        /// The term in which it runs there.
        term: u64,
    },
    /// A standby listens.
    StandbyListens(SocketAddr),
    /// The standby has no peer: after a takeover its VM will run without a standby.
    NoPeer,
    /// A note about the command line of a standby's QEMU.
    CommandLineNote(String),
    /// A standby's QEMU waits for epochs.
    QemuWaits {
        /// The VM that it would run.
        vm: String,
        /// QEMU's process.
        qemu_pid: u32,
    },
    /// The QEMU that waited has ended; the primary is asked to begin again.
    WaitingQemuEnded(ExitStatus),
    /// The standby refused a connection. The event is not repeated while the error stays the same.
    ConnectionRefused(Error),
    /// The standby refused a primary. The event is not repeated while the error stays the same.
    PrimaryRefused(Error),
    /// The standby runs the VM.
    TookOver {
        /// The VM.
        vm: String,
        /// The epoch from which it goes on.
        epoch: Epoch,
        /// The number of nanoseconds from the right to run it until it was ready.
        ready_ns: u64,
    },
    /// After a takeover, commands find the VM by the standby's name alone, because this error kept
    /// the VM's own name from being recorded.
    NameNotKept(Error),
    /// The witness could not write its state, so it does not answer the request.
    WitnessSilent(Error),
}
