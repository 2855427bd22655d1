//! Why a running VM was not put back to a checkpoint.

use super::{Error, NotCaptured, error_chain};
use crate::control::VmState;
use keyframe_capture::BoxError;
use keyframe_qemu::LineDifference;
use keyframe_store::CheckpointId;
use keyframe_units::human_bytes;

/// The reason why a VM was not put back to a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RollbackError {
    /// The VMs of a group cannot be put back while they run.
    #[error("a group cannot be rolled back")]
    Group,
    /// The run takes no more checkpoints, so the present state could not be kept.
    #[error("no more checkpoints are taken of this VM, so it is not rolled back")]
    GivenUp,
    /// The VM's VMM cannot do it, or not with this VM (one of libvirt's).
    #[error(transparent)]
    Unsupported(#[from] keyframe_vmm::Unsupported),
    /// QEMU opens the VM's disk images itself.
    #[error("the VM opens its disk images itself; they cannot go back while it runs")]
    OwnDisks,
    /// A disk is left out of checkpoints, and QEMU has written to it since.
    #[error("disk {0} is left out of checkpoints, so it cannot go back")]
    DiskLeftOut(String),
    /// The checkpoint is of another machine.
    #[error("checkpoint {checkpoint} is another machine's: {difference}")]
    OtherMachine {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The first difference.
        difference: MachineDifference,
    },
    /// A checkpoint was not sealed in time.
    #[error("the checkpoint was not sealed in time")]
    SealTimeout,
    /// The present state could not be kept in a checkpoint.
    #[error(transparent)]
    Before(#[from] NotCaptured),
    /// A rollback that keeps no checkpoint of the present state needs another one to start from.
    #[error("no checkpoint of this run is sealed yet, from which a fast rollback could start")]
    NoneSealed,
    /// The state before the rollback was not kept.
    #[error("a fast rollback keeps no checkpoint of it")]
    NotKept,
    /// A step of the rollback failed.
    #[error("{operation}")]
    Step {
        /// The step.
        operation: &'static str,
        /// The reason.
        source: BoxError,
    },
    /// Another client has resumed the VM, which must stand still until it is complete.
    #[error("another client has resumed the VM during the rollback")]
    Resumed,
    /// Pages of RAM differ from the checkpoint although they were loaded.
    #[error("{pages} pages of its RAM are not those of checkpoint {checkpoint}")]
    PagesDiffer {
        /// The number of pages that differ.
        pages: u64,
        /// The checkpoint.
        checkpoint: CheckpointId,
    },
    /// The firmware wrote to a disk while the VM was brought into the checkpoint's run state.
    #[error(
        "the VM's firmware wrote to a disk while the VM was brought into the checkpoint's run state"
    )]
    FirmwareWrote,
    /// The rollback failed, and the VM is as it was before.
    #[error("{}; the VM is as it was", error_chain(&**.0))]
    Unharmed(Box<Self>),
    /// The rollback failed, and the VM is as it was before, but QEMU would let it run: a reset has
    /// ended the run state that forbade it.
    #[error(
        "{}; the VM's memory, devices and disks are as they were; QEMU calls its state paused, not \
         {state}", error_chain(&**why)
    )]
    CanRun {
        /// The reason why the rollback failed.
        why: Box<Self>,
        /// The former run state.
        state: VmState,
    },
    /// The rollback failed, and the former state could not be restored either.
    #[error(
        "{}; nor could it be put back to what it was: {}; the VM is left paused and no more \
         checkpoints are taken", error_chain(&**why), error_chain(&**again)
    )]
    Lost {
        /// The reason why the rollback failed.
        why: Box<Self>,
        /// The reason why the former state could not be restored.
        again: Box<Self>,
        /// The checkpoint as the user named it.
        checkpoint: String,
    },
    /// The files of the VM's drives could not be put back.
    #[error("the drives are those of the checkpoint, and cannot be exchanged back")]
    DrivesExchanged,
    /// Another command has started the VM, and removes its files when the VM's process ends.
    #[error(
        "keyframe restore or branch has started VM {vm}, and removes its files when its process ends"
    )]
    Restored {
        /// The VM.
        vm: String,
        /// The checkpoint.
        checkpoint: CheckpointId,
    },
    /// The host has no memory for a second VMM beside the VM.
    #[error(
        "the checkpoint is loaded beside the VM first, which takes {}, and {} of memory are left",
        human_bytes(*needed_bytes), human_bytes(*left_bytes)
    )]
    NoMemory {
        /// The memory that the second VMM takes, in bytes.
        needed_bytes: u64,
        /// The memory that the host, or a memory cgroup, leaves, in bytes.
        left_bytes: u64,
        /// The checkpoint.
        checkpoint: CheckpointId,
    },
    /// The VM was ended for its successor, and neither that one nor the former VM could be started.
    #[error(
        "{}; nor could the VM be started again as it was: {}; the VM has ended",
        error_chain(&**why), error_chain(&**again)
    )]
    Ended {
        /// The reason why the successor was not started.
        why: Box<Self>,
        /// The reason why the former VM was not started again.
        again: Box<Self>,
        /// The checkpoint from which the VM can be restored.
        checkpoint: CheckpointId,
    },
    /// Another part of the session failed.
    #[error(transparent)]
    Session(Box<Error>),
}

/// The first difference between a VM and a checkpoint's machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineDifference {
    /// A property differs.
    Property {
        /// The property.
        property: &'static str,
        /// The property's value in the VM.
        here: String,
        /// The property's value in the checkpoint.
        there: String,
    },
    /// The RAM blocks differ.
    RamBlocks,
    /// The disks, or the images below them, differ.
    Disks,
    /// A device or a medium of one of them is not the other's. The first is the VM.
    Hardware(LineDifference),
}

impl std::fmt::Display for MachineDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Property { property, here, there } => {
                write!(f, "its {property} is {there}, not {here}")
            }
            Self::RamBlocks => f.write_str("its RAM blocks differ"),
            Self::Disks => f.write_str("its disks, or the images beneath them, differ"),
            Self::Hardware(LineDifference::OnlyFirst(part)) => {
                write!(f, "it does not have {part}, which the VM has now")
            }
            Self::Hardware(LineDifference::OnlySecond(part)) => {
                write!(f, "it has {part}, which the VM does not have now")
            }
        }
    }
}

impl From<Error> for RollbackError {
    fn from(error: Error) -> Self {
        Self::Session(Box::new(error))
    }
}

impl RollbackError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::Group => "end it (keyframe stop), and restore the checkpoint: all members come \
                            back together"
                .into(),
            Self::GivenUp => "see why with: keyframe status".into(),
            Self::Unsupported(missing) => missing.fix.clone(),
            Self::OwnDisks => "end it (keyframe stop) and restore the checkpoint; or start it \
                               with: keyframe run --disk served"
                .into(),
            Self::DiskLeftOut(_) => "end it (keyframe stop) and restore the checkpoint with \
                                     --left-out-as-now; or start it without --leave-out-disk"
                .into(),
            Self::NoMemory { checkpoint, .. } => format!(
                "free memory; or end the VM (keyframe stop), and restore the checkpoint: keyframe \
                 restore {checkpoint}"
            ),
            Self::Restored { checkpoint, .. } => {
                format!("end it, and restore the checkpoint: keyframe restore {checkpoint}")
            }
            Self::OtherMachine { checkpoint, .. } => {
                format!("bring it to life beside this VM: keyframe restore {checkpoint}")
            }
            Self::CanRun { .. } => {
                "reset it in QEMU's monitor (system_reset), or end it; do not let it go on (cont)"
                    .into()
            }
            Self::Lost { checkpoint, .. } => {
                format!("end it (keyframe stop) and restore: keyframe restore {checkpoint}")
            }
            Self::Ended { checkpoint, .. } => {
                format!("restore it: keyframe restore {checkpoint}")
            }
            Self::Resumed => {
                "roll back again, and let no other client resume the VM meanwhile".into()
            }
            Self::NoneSealed => "take one (keyframe take), or roll back without --fast".into(),
            Self::FirmwareWrote => "restore the checkpoint as a new VM: keyframe restore".into(),
            Self::Unharmed(why) => return why.fix(),
            Self::Session(error) => return error.fix(),
            Self::SealTimeout
            | Self::NotKept
            | Self::DrivesExchanged
            | Self::Before(_)
            | Self::Step { .. }
            | Self::PagesDiffer { .. } => return None,
        })
    }
}
