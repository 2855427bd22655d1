//! The errors of this crate: each names the object and the operation, and knows what the user can
//! do about it.

mod checkpoint;
mod control;
mod rollback;
mod run_dir;

pub use checkpoint::{CheckpointError, CheckpointFailure, NotCaptured};
pub use control::ControlError;
pub use rollback::{MachineDifference, RollbackError};
pub use run_dir::RunDirError;

use crate::instruction_count::CountObstacle;
use keyframe_capture::BoxError;
use keyframe_disk_capture::DiskError;
use keyframe_qemu::AuditFinding;
use keyframe_units::CheckpointId;
use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a session. The sources tell the cause: [`error_chain`] prints both in one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of QEMU, or of the command line for it.
    #[error(transparent)]
    Qemu(#[from] keyframe_qemu::Error),
    /// An error of the VMM of a running VM.
    #[error(transparent)]
    Vmm(#[from] keyframe_vmm::VmmError),
    /// The VMM lacks an ability that the options ask for.
    #[error(transparent)]
    Unsupported(#[from] keyframe_vmm::Unsupported),
    /// The VM's driver wants to pass descriptors to its watchdog, which is started without any.
    #[error("the watchdog of this VMM needs descriptors, and Keyframe passes it none")]
    WatchdogDescriptors,
    /// The VM cannot do what was asked.
    #[error(transparent)]
    Vm(#[from] crate::session_vm::SessionVmError),
    /// An error of an interface of the kernel.
    #[error(transparent)]
    Kernel(#[from] keyframe_kernel::Error),
    /// An error of the networks between the VMs of a group.
    #[error(transparent)]
    Network(#[from] keyframe_net::Error),
    /// An error of the store.
    #[error("{source}")]
    Store {
        /// The store's directory or address.
        store: PathBuf,
        /// What failed.
        source: keyframe_store::Error,
    },
    /// An error of the process that serves disks, or of the image of a disk.
    #[error(transparent)]
    VmDisks(#[from] keyframe_vm_disks::Error),
    /// The contents of a checkpoint cannot be used.
    #[error(transparent)]
    Inspect(#[from] keyframe_inspect::Error),
    /// An error of a run directory.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// An engine could not be asked, or refused.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A VM could not be put back to a checkpoint.
    #[error(transparent)]
    Rollback(#[from] RollbackError),
    /// Disks that QEMU opens itself cannot be captured.
    #[error(transparent)]
    Disk(DiskError),
    /// A checkpoint without which the session cannot go on could not be captured.
    #[error(transparent)]
    Checkpoint(#[from] NotCaptured),
    /// The operating system refused an operation.
    #[error("{operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// An error of one VM of a group.
    #[error("VM {vm}: {source}")]
    OfMember {
        /// The VM's name.
        vm: String,
        /// What failed.
        source: Box<Self>,
    },
    /// Several steps of a teardown failed, in this order.
    #[error("{}", .0.iter().map(|e| error_chain(e)).collect::<Vec<_>>().join("; "))]
    Several(Vec<Self>),
    /// There is no VM to take checkpoints of.
    #[error("the session has no VM")]
    NoVm,
    /// The RAM blocks do not make up a page space.
    #[error("the list of RAM blocks")]
    RamLayout(#[from] keyframe_units::LayoutError),
    /// The threads that copy pages could not be started.
    #[error("start the threads that copy pages")]
    CopyThreads(#[source] BoxError),
    /// Copy-on-write needs a tracker that answers first writes; another was asked for.
    #[error("--strategy cow needs a tracker that answers the guest's first writes itself")]
    CopyOnWriteTracker,
    /// Copy-on-write was asked for in a run whose tracker does not answer first writes.
    #[error("copy-on-write answers the guest's first writes itself; this run's tracker does not")]
    NoCopyOnWrite,
    /// A disk has direct I/O, and the tracker or strategy cannot see what the kernel writes.
    #[error(
        "a disk has direct I/O: the kernel writes into pinned guest pages, which this {option} does \
         not see"
    )]
    ScansInPauses {
        /// The option.
        option: &'static str,
    },
    /// A budget was given, but no interval that could be changed to keep it.
    #[error("a budget is kept by changing the interval; --interval none has none")]
    BudgetWithoutInterval,
    /// The name of each feature, and the reason why it is missing.
    #[error("this machine lacks what Keyframe needs: {}", listed(.missing))]
    MissingFeatures {
        /// The name of each feature, and why it is missing.
        missing: Vec<(String, String)>,
        /// The fix of the first error, if it is known.
        fix: Option<String>,
    },
    /// The VM has parts that cannot be checkpointed exactly.
    #[error("{}", refusal(.0))]
    NotCheckpointable(Vec<AuditFinding>),
    /// Two VMs of a group have one name.
    #[error("two VMs of the group are named {0}")]
    MemberNamedTwice(String),
    /// QEMU records one VM only.
    #[error("QEMU records one VM, not a group")]
    GroupRecorded,
    /// The guest's instructions are to be counted and cannot be.
    #[error("the guest's instructions cannot be counted: {0}")]
    NotCounted(CountObstacle),
    /// A migration stream is another machine's than the one that the command line makes.
    #[error(
        "the stream is another machine's: {what} is {stream} there, {here} by the command line"
    )]
    OtherStream {
        /// The part that differs.
        what: String,
        /// How it is in the stream.
        stream: String,
        /// How the command line makes it.
        here: String,
    },
    /// A restored VM did not connect to its network.
    #[error("the restored VM did not connect: no {port}")]
    NotConnected {
        /// The port that stayed free.
        port: String,
    },
    /// A group's checkpoint has members that do not fit its RAM blocks or device states.
    #[error("checkpoint {0}: what it says of its members contradicts itself")]
    MembersContradict(CheckpointId),
    /// The packets between the members of a group's checkpoint cannot be read.
    #[error("checkpoint {checkpoint}: {source}")]
    InFlightPackets {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The reason why they cannot be read.
        source: keyframe_net::Error,
    },
    /// The encoder's thread panicked.
    #[error("the encoder's thread has failed")]
    EncoderPanicked,
    /// The encoder has ended already.
    #[error("the encoder has ended")]
    EncoderEnded,
    /// The process that served the disks has ended.
    #[error("the disks are not served any more")]
    DisksNotServed,
    /// The server of the VM's disks or media did not accept the processor core on which it should
    /// answer.
    #[error("answer the recorded VM's disk requests on its core")]
    AnswerOnCore(#[source] BoxError),
    /// The user asked for an end.
    #[error("interrupted")]
    Interrupted,
    /// The descriptor that was to be told that the session is ready is not open.
    #[error("--ready-fd {number}: this descriptor is not open")]
    ReadyDescriptor {
        /// The descriptor's number.
        number: u32,
        /// The system's error.
        source: io::Error,
    },
    /// The VM could not be controlled.
    #[error("{operation}")]
    Machine {
        /// The operation.
        operation: &'static str,
        /// The error of the VMM or its watchdog.
        source: BoxError,
    },
}

impl From<DiskError> for Error {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::Qemu(error) => Self::Qemu(error),
            DiskError::Vmm(error) => Self::Vmm(error),
            DiskError::VmDisks(error) => Self::VmDisks(error),
            DiskError::Store { store, source } => Self::Store { store, source },
            DiskError::NotServed => Self::DisksNotServed,
            DiskError::OwnDisks => Self::Rollback(RollbackError::OwnDisks),
            error => Self::Disk(error),
        }
    }
}

impl Error {
    /// Creates an error of `store`.
    pub fn store(store: &Path, source: keyframe_store::Error) -> Self {
        Self::Store { store: store.to_owned(), source }
    }

    /// An error of the operating system in `operation`.
    pub(crate) fn io(operation: impl Into<String>, source: io::Error) -> Self {
        Self::Io { operation: operation.into(), source }
    }

    /// Makes the error of a file operation: `verb` names the operation on `path`.
    pub(crate) fn file(verb: &str, path: &Path, source: io::Error) -> Self {
        Self::io(format!("{verb} {}", path.display()), source)
    }

    /// The error of VM `vm` of a group.
    #[must_use]
    pub(crate) fn of_member(self, vm: &str) -> Self {
        Self::OfMember { vm: vm.to_owned(), source: Box::new(self) }
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        let text = match self {
            Self::Qemu(error) => return error.fix(),
            Self::Vmm(error) => return error.fix().map(str::to_owned),
            Self::Unsupported(missing) => return Some(missing.fix.clone()),
            Self::Kernel(error) => return error.fix(),
            Self::Network(error) => return error.fix(),
            Self::Store { source, .. } => return source.fix(),
            Self::VmDisks(error) => return error.fix(),
            Self::Inspect(error) => return error.fix(),
            Self::RunDir(error) => return error.fix(),
            Self::Control(error) => return error.fix(),
            Self::Rollback(error) => return error.fix(),
            Self::Disk(error) => return error.fix(),
            Self::Checkpoint(error) => return error.fix(),
            Self::OfMember { source, .. } => return source.fix(),
            Self::Several(errors) => return errors.iter().find_map(Self::fix),
            Self::MissingFeatures { fix, .. } => {
                return fix.clone().or_else(|| Some("see keyframe doctor".into()));
            }
            Self::NotCheckpointable(findings) => {
                let mut fixes: Vec<&str> = findings.iter().map(|f| f.fix.as_str()).collect();
                fixes.dedup();
                return Some(fixes.join("\n       "));
            }
            Self::CopyOnWriteTracker => "use --tracker sync, or leave --tracker out",
            Self::NoCopyOnWrite => "start the run with --strategy cow, or --tracker sync",
            Self::ScansInPauses { .. } => {
                "leave the option out, or use --tracker compare; or give the disk the page cache: \
                 cache=writeback, or cache.direct=off"
            }
            Self::BudgetWithoutInterval => "give an interval: the shortest that you want",
            Self::MemberNamedTwice(_) => "give each a name of its own with QEMU's -name",
            Self::GroupRecorded => "record each VM by itself",
            Self::NotCounted(obstacle) => obstacle.fix(),
            Self::OtherStream { .. } => {
                "give the command line of the QEMU that wrote the stream, and that QEMU binary"
            }
            Self::ReadyDescriptor { .. } => {
                "open it when you start the command, as a shell does with: --ready-fd 3 ... 3>FILE"
            }
            Self::Interrupted => "call it again: it continues with the missing checkpoints",
            Self::WatchdogDescriptors
            | Self::Vm(_)
            | Self::Io { .. }
            | Self::NoVm
            | Self::RamLayout(_)
            | Self::CopyThreads(_)
            | Self::NotConnected { .. }
            | Self::MembersContradict(_)
            | Self::InFlightPackets { .. }
            | Self::EncoderPanicked
            | Self::EncoderEnded
            | Self::DisksNotServed
            | Self::AnswerOnCore(_)
            | Self::Machine { .. } => return None,
        };
        Some(text.into())
    }
}

/// Returns an error and its sources in one line. A source whose text the line has already is left
/// out.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    keyframe_units::error_chain(error)
}

/// An error as an engine answers it to a client: its line, and the fix on a second line.
pub(crate) fn with_fix(error: &Error) -> String {
    keyframe_units::error_with_fix(error, error.fix())
}

fn listed(missing: &[(String, String)]) -> String {
    let all: Vec<_> = missing.iter().map(|(name, detail)| format!("{name} ({detail})")).collect();
    all.join("; ")
}

fn refusal(findings: &[AuditFinding]) -> String {
    let texts: Vec<_> = findings.iter().map(|f| format!("{}: {}", f.subject, f.reason)).collect();
    let lead = if findings.len() > 1 { "\n  " } else { " " };
    format!("this VM cannot be checkpointed:{lead}{}", texts.join("\n  "))
}

#[cfg(test)]
mod tests;
