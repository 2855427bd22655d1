//! Why a checkpoint failed.

use super::{Error, error_chain};
use keyframe_capture::{BoxError, CaptureError};
use keyframe_qemu::AuditFinding;
use std::fmt;
use std::sync::Arc;

/// The reason why a checkpoint could not be captured or sealed. Its pages are part of the next one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The VM's disks could not be made ready.
    #[error("prepare the VM's disks")]
    Disks(#[source] BoxError),
    /// The strategy is not possible in this run.
    #[error(transparent)]
    Strategy(Box<Error>),
    /// The cycle failed.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The VM ended while the checkpoint was captured.
    #[error("the VM ended before the checkpoint was complete ({})", error_chain(.0))]
    VmEnded(CaptureError),
    /// RAM was plugged or unplugged, and no new run could begin.
    #[error("{}: {}", error_chain(capture), error_chain(restart))]
    NoNewRun {
        /// The error of the checkpoint cycle.
        capture: CaptureError,
        /// The reason why the new run did not begin.
        restart: Box<Error>,
    },
    /// The VM runs, but the connection to its VMM is closed.
    #[error(
        "the VM runs (pid {pid}), but its VMM has closed the monitor or API by which it is paused \
         and saved"
    )]
    MonitorLost {
        /// The VMM's process.
        pid: u32,
    },
    /// The watchdog has ended, and no other one could be started. Without one, a VM stays paused if
    /// the engine ends in a pause.
    #[error("{}; without a watchdog the VM would stay paused if this process ended in a pause", error_chain(.0))]
    NoWatchdog(CaptureError),
    /// The process that connects the members of a group has ended. QEMU does not connect again.
    #[error("{}; the network between the VMs is dead until they are started again", error_chain(.0))]
    NoNetwork(CaptureError),
    /// The run has lost its place in a served store, and has no other one yet.
    #[error("the run has lost its place among the writers of the store, and has no other one yet")]
    NoPlace(#[source] keyframe_store::Error),
    /// A recording has lost its place in a served store.
    #[error(
        "the recording has lost its place among the writers of the store: it ends with its last \
         checkpoint"
    )]
    PlaceLost,
    /// The encoder or the store failed.
    #[error(transparent)]
    Encode(keyframe_capture::EncodeError),
    /// The tag is not allowed.
    #[error(transparent)]
    Tag(keyframe_store::Error),
    /// The machine was changed in a way that no command line can make.
    #[error(
        "the machine was changed, and no restore could make it: {}",
        .0.iter().map(|f| format!("{}: {} ({})", f.subject, f.reason, f.fix)).collect::<Vec<_>>().join("; ")
    )]
    MachineChanged(Vec<AuditFinding>),
    /// The machine was changed during each try.
    #[error("the machine is being changed (devices or media come and go)")]
    KeepsChanging,
    /// The changed machine could not be looked at.
    #[error("look at the changed machine")]
    LookAtMachine(#[source] BoxError),
    /// An earlier failure was final.
    #[error("no more checkpoints are taken: see keyframe status")]
    GivenUp,
    /// QEMU has lost parts of the recording's log.
    #[error(
        "QEMU has lost parts of the recording's log, which had no space: the recording ends there, \
         and no more checkpoints are taken"
    )]
    LogLost,
    /// The run is ending, and takes no more checkpoints.
    #[error("the run is ending")]
    Ending,
}

impl CheckpointError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Strategy(error) => error.fix(),
            _ => None,
        }
    }
}

/// Checkpoints of a run that failed for one reason, and what follows from it.
#[derive(Clone, Debug)]
pub struct CheckpointFailure {
    /// The reason why the first of them failed.
    pub error: Arc<CheckpointError>,
    /// The number of checkpoints that failed; at least 1.
    pub lost: u64,
    /// True if the run takes no more checkpoints.
    pub is_final: bool,
}

impl fmt::Display for CheckpointFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("checkpoint failed")?;
        if self.lost > 1 {
            write!(f, " (and {} behind it)", self.lost - 1)?;
        }
        let consequence = if self.is_final {
            "no more checkpoints are taken; the VM runs on"
        } else {
            "nothing is lost: its pages go into the next one"
        };
        write!(f, ": {}; {consequence}", error_chain(&*self.error))
    }
}

impl std::error::Error for CheckpointFailure {}

/// The reason why a checkpoint was not captured.
#[derive(Debug, thiserror::Error)]
pub enum NotCaptured {
    /// A checkpoint was not possible. This does not count as a failed checkpoint.
    #[error(transparent)]
    Impossible(#[from] CheckpointError),
    /// A checkpoint failed.
    #[error(transparent)]
    Failed(#[from] CheckpointFailure),
}

impl NotCaptured {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Impossible(error) => error.fix(),
            Self::Failed(_) => None,
        }
    }
}
