//! The events of a capture of disks.

use keyframe_capture::BoxError;
pub use keyframe_units::EventSink;
use keyframe_vmm::AuditFinding;
use std::sync::Arc;

/// An error in an event, which can be kept and sent to other threads.
pub type SharedError = Arc<dyn std::error::Error + Send + Sync>;

/// The sink of the events of a capture of disks, which several threads share.
pub type SharedDiskEventSink = keyframe_units::SharedEventSink<DiskEvent>;

/// An event of a capture of disks.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum DiskEvent {
    /// The process that serves the disks has ended without an order, and was started again.
    ServerRestarted {
        /// The process id of the new process.
        pid: u32,
    },
    /// The process that serves the disks has ended without an order, and could not be started
    /// again. It is tried again. The event is not repeated while the failure stays the same.
    ServerNotRestarted {
        /// The reason.
        error: SharedError,
    },
    /// A step failed without which the capture goes on.
    StepFailed {
        /// The step.
        step: DiskStep,
        /// The reason.
        error: SharedError,
    },
    /// The disks have a property that does not prevent checkpoints, and that the user should know.
    AuditWarning(AuditFinding),
}

/// A step without which a capture of disks goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskStep {
    /// Find the images beneath the VM's disks as they were when the run began.
    KeepImages,
    /// Return the blocks of a failed checkpoint to the next one.
    GiveBackBlocks,
    /// Release the blocks of a sealed checkpoint.
    ReleaseBlocks,
    /// Begin a new, complete capture of the VM's disks.
    RestartDisks,
    /// Drop the bitmap of a sealed checkpoint.
    DropBitmap,
    /// Remove the exports by which a disk was read.
    CloseExports,
    /// Remove all that captured the VM's disks from QEMU.
    DetachDisks,
    /// Remove a file.
    RemoveFile,
}

/// Tells `events` that `step` failed, if it did.
pub(crate) fn tell_failed<E: Into<BoxError>>(
    events: &dyn EventSink<DiskEvent>,
    step: DiskStep,
    result: Result<(), E>,
) {
    if let Err(error) = result {
        events.event(&DiskEvent::StepFailed { step, error: Arc::from(error.into()) });
    }
}
