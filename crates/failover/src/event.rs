//! What a primary, a standby and a witness tell the program that runs them, while they run.
//!
//! Events have typed fields and no text. The program decides which of them its user reads, and in
//! which words.

use crate::error::Error;
use keyframe_capture::BoxError;
use keyframe_replication::{Epoch, Notice};
use keyframe_session::control::ReplicationRole;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;

/// Takes in the events of a protected VM and those of its session. Its methods are called from
/// several threads, which wait for them.
pub trait EventSink: keyframe_session::EventSink {
    /// `event` has happened.
    fn failover_event(&self, event: &Event);
}

impl EventSink for keyframe_session::NoEvents {
    fn failover_event(&self, _: &Event) {}
}

/// The sink that the threads of a host share.
pub type SharedEventSink = Arc<dyn EventSink>;

/// One thing that has happened on a host of a protected VM.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The protocol's core has a notice for the user; [`notice_text`](crate::notice_text) is its
    /// text.
    Notice {
        /// This host's role.
        role: ReplicationRole,
        /// The notice.
        notice: Notice,
    },
    /// The primary could not connect to a standby; it tries again. Repetitions are not told.
    ConnectFailed(Error),
    /// An epoch failed; its pages go with the next one. Repetitions are not told.
    EpochFailed(Error),
    /// The guard could not be told what the VM may do.
    GuardFailed {
        /// Why.
        error: Error,
        /// True if another guard is started now.
        restarts: bool,
    },
    /// The gate before the VM's network did not do what it was asked: what it holds stays held.
    GateFailed(BoxError),
    /// The VM could not be resumed.
    ResumeFailed(Error),
    /// QEMU's state could not be looked at.
    LookFailed(Error),
    /// The fence hook could not be run.
    FenceHookFailed(std::io::Error),
    /// What the guest has written to its disks is kept in this directory.
    WritesKept(PathBuf),
    /// The VM runs on the other host.
    RunsElsewhere {
        /// The term in which it runs there.
        term: u64,
    },
    /// A standby listens.
    StandbyListens(SocketAddr),
    /// The standby has no standby of its own, should it take over.
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
    /// A connection to the standby is refused. Repetitions are not told.
    ConnectionRefused(Error),
    /// A primary is refused. Repetitions are not told.
    PrimaryRefused(Error),
    /// The standby runs the VM.
    TookOver {
        /// The VM.
        vm: String,
        /// The epoch from which it goes on.
        epoch: Epoch,
        /// Nanoseconds from the right to run it until it was ready.
        ready_ns: u64,
    },
    /// After a takeover the VM is found by the standby's name alone.
    NameNotKept(Error),
    /// The witness could not write its memory, so it does not answer the question.
    WitnessSilent(Error),
}
