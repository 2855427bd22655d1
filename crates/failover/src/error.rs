//! The errors of this crate: each names the object and the operation, and knows what the user can
//! do about it.

use crate::frames::{Arbiter, VERSION};
use keyframe_capture::{BoxError, CaptureError};
use keyframe_link::Error as LinkError;
use keyframe_qemu::MachineChange;
use keyframe_scheduling::replication::ReplicationPolicy;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a VM with a standby. The sources tell the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the VM's session: of its launch, its run directory, or its disks' capture.
    #[error(transparent)]
    Session(#[from] keyframe_session::Error),
    /// An error of QEMU, or of the command line for it.
    #[error(transparent)]
    Qemu(#[from] keyframe_qemu::Error),
    /// An error of an interface of the kernel.
    #[error(transparent)]
    Kernel(#[from] keyframe_kernel::Error),
    /// An error of the gate before the VM's network.
    #[error(transparent)]
    Network(#[from] keyframe_net::Error),
    /// An error of the process that serves the disks, or of the image of a disk.
    #[error(transparent)]
    VmDisks(#[from] keyframe_vm_disks::Error),
    /// An error of the key, or of a connection to another host.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The VM could not be captured.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The machine was changed in a way that the standby's machine cannot follow.
    #[error("{}", joined(changes))]
    MachineChanged {
        /// The changes.
        changes: Vec<MachineChange>,
    },
    /// The capture of the VM has not begun.
    #[error("the VM's capture has not begun")]
    NotCaptured,
    /// A captured epoch could not be sent; the text is the reason.
    #[error("{0}")]
    NotSent(String),
    /// The standby describes impossible pages.
    #[error("the standby's list of the pages that it holds")]
    PageHashes(#[from] PageHashesError),
    /// The operating system refused an operation.
    #[error("{operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// The VM, or what stands beside it, could not be controlled.
    #[error("{operation}")]
    Vm {
        /// The operation and its object.
        operation: &'static str,
        /// The error of the VMM, of the disks or of the gate.
        source: BoxError,
    },
    /// No key is given.
    #[error("no shared key is given")]
    NoKey,
    /// The detection time is outside its limits.
    #[error("--detection: from 100ms to 5m are possible")]
    Detection,
    /// An option of the adaptive policy is given with another policy.
    #[error("--latency and --overhead are for --policy adaptive, not {0}")]
    NotAdaptive(ReplicationPolicy),
    /// An address cannot be understood.
    #[error("{text}")]
    Address {
        /// The address as the user gave it.
        text: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// A name resolves to no address.
    #[error("{0}: the name stands for no address")]
    NoAddress(String),
    /// The kernel gives no random numbers.
    #[error("read the kernel's random number generator: {0}")]
    Random(getrandom::Error),
    /// This host cannot listen at an address.
    #[error("listen at {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The standby did not answer the description of the machine.
    #[error("the standby at {0} does not answer")]
    StandbySilent(SocketAddr),
    /// The standby refuses the VM.
    #[error("the standby at {address}: {problem}")]
    StandbyRefuses {
        /// The standby's address.
        address: SocketAddr,
        /// The reason.
        problem: String,
        /// The fix on the standby's host.
        fix: Option<String>,
    },
    /// A peer did not tell the purpose of its connection.
    #[error("it does not tell the purpose of its connection")]
    NoPurpose,
    /// A peer uses another version of the protocol.
    #[error("it speaks version {0} of the protocol, and {VERSION} is known")]
    OtherVersion(u32),
    /// A message is longer than any valid one.
    #[error("a message of {0} bytes")]
    MessageTooLong(usize),
    /// A message is malformed.
    #[error("a malformed message")]
    MalformedMessage(#[source] serde_json::Error),
    /// A message could not be written as JSON.
    #[error("encode a message")]
    EncodeMessage(#[source] serde_json::Error),
    /// The two hosts were started with different arbiters.
    #[error("the primary is started {}, this standby {}", .primary.option(), .standby.option())]
    ArbitersDiffer {
        /// The primary's.
        primary: Arbiter,
        /// The standby's.
        standby: Arbiter,
    },
    /// The standby may have to take over another VM.
    #[error("this standby holds another VM, which it may have to take over")]
    HoldsAnotherVm,
    /// The group of the primary's VM is no hexadecimal number.
    #[error("the primary's group is no number")]
    Group,
    /// Another standby uses the directory.
    #[error("another standby uses {}", .0.display())]
    DirectoryInUse(PathBuf),
    /// Another witness uses the directory.
    #[error("another witness uses {}", .0.display())]
    WitnessRuns(PathBuf),
    /// The standby holds no whole epoch of a VM.
    #[error("this standby holds no whole epoch of a VM")]
    NothingHeld,
    /// The witness's memory cannot be used.
    #[error("{}: {problem}", path.display())]
    WitnessState {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The process that enforces the VM's right to run has ended.
    #[error("the guard of the VM's right to run has ended")]
    GuardEnded,
    /// No process has this pid.
    #[error("{0} is no process")]
    NoProcess(u32),
    /// The thread that captures the VM panicked.
    #[error("the VM's thread has failed")]
    VmThreadPanicked,
}

/// The reason why a standby's list of page hashes is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageHashesError {
    /// The list ended before its last page.
    #[error("hashes of {listed} pages of {pages}")]
    Incomplete {
        /// The number of pages in the list.
        listed: u64,
        /// The number of pages of the VM.
        pages: u64,
    },
    /// A frame does not continue the list.
    #[error("{hashes} hashes from page {first} on")]
    Misplaced {
        /// Hashes in the frame.
        hashes: usize,
        /// The page of the first hash.
        first: u64,
    },
}

impl Error {
    /// An error of the operating system in `operation`.
    pub(crate) fn io(operation: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { operation: operation.into(), source: source.into() }
    }

    /// Makes the error of a file operation: `verb` names the operation on `path`.
    pub(crate) fn file(verb: &str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::io(format!("{verb} {}", path.display()), source)
    }

    /// An error of the VM in `operation`.
    pub(crate) fn vm(operation: &'static str, source: impl Into<BoxError>) -> Self {
        Self::Vm { operation, source: source.into() }
    }

    /// Returns true if the error is in the command line, and not on this host or the other one.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::NoKey)
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        let text = match self {
            Self::Session(error) => return error.fix(),
            Self::Qemu(error) => return error.fix(),
            Self::Kernel(error) => return error.fix(),
            Self::Network(error) => return error.fix(),
            Self::VmDisks(error) => return error.fix(),
            Self::Link(error) => return error.fix(),
            Self::StandbyRefuses { fix, .. } => return fix.clone(),
            Self::MachineChanged { changes } => return changes.first().map(|c| c.fix().into()),
            Self::NoKey => {
                "make one, copy it to each host, and name it with --key KEY or KEYFRAME_KEY: \
                 (umask 077; head -c 32 /dev/urandom | base64 > KEY)"
            }
            Self::Address { .. } | Self::NoAddress(_) => {
                "name a host and a port, as in 192.0.2.7:7430"
            }
            Self::Listen { .. } => "name another port: --listen",
            Self::OtherVersion(_) => "run the same Keyframe on both hosts",
            Self::ArbitersDiffer { .. } => "start both alike",
            Self::DirectoryInUse(_) => "give each a directory of its own: --dir DIR",
            Self::WitnessRuns(_) => {
                "let the hosts ask that one, or end it first: it answers for all VMs that it knows"
            }
            Self::WitnessState { .. } => {
                "a witness without its memory could let two hosts run one VM: bring the file \
                 back, or remove it while no VM is protected"
            }
            Self::Capture(_)
            | Self::NotCaptured
            | Self::NotSent(_)
            | Self::PageHashes(_)
            | Self::Io { .. }
            | Self::Vm { .. }
            | Self::Detection
            | Self::NotAdaptive(_)
            | Self::Random(_)
            | Self::StandbySilent(_)
            | Self::NoPurpose
            | Self::MessageTooLong(_)
            | Self::MalformedMessage(_)
            | Self::EncodeMessage(_)
            | Self::HoldsAnotherVm
            | Self::Group
            | Self::NothingHeld
            | Self::GuardEnded
            | Self::NoProcess(_)
            | Self::VmThreadPanicked => return None,
        };
        Some(text.into())
    }
}

impl From<keyframe_session::error::RunDirError> for Error {
    fn from(error: keyframe_session::error::RunDirError) -> Self {
        Self::Session(error.into())
    }
}

fn joined(changes: &[MachineChange]) -> String {
    changes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// An error and its sources in one line, with what the user can do about it on a second line.
pub(crate) fn with_fix(error: &Error) -> String {
    keyframe_units::error_with_fix(error, error.fix())
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        let address: SocketAddr = "192.0.2.7:7430".parse().unwrap();
        let malformed = || serde_json::from_str::<u8>("x").unwrap_err();
        let errors = [
            PageHashesError::Incomplete { listed: 2, pages: 3 }.into(),
            PageHashesError::Misplaced { hashes: 4, first: 1 }.into(),
            Error::file("lock", Path::new("D/lock"), denied()),
            Error::vm("pause the VM", denied()),
            Error::NotSent("no standby is connected".into()),
            Error::NotCaptured,
            Error::MachineChanged {
                changes: vec![
                    MachineChange::Plugged { device: "b1".into(), kind: "nvme".into() },
                    MachineChange::Unplugged { device: "r0".into(), kind: "usb-kbd".into() },
                ],
            },
            Error::NoKey,
            Error::Detection,
            Error::NotAdaptive(ReplicationPolicy::Paper),
            Error::Address { text: "b".into(), source: denied() },
            Error::NoAddress("b:1".into()),
            Error::Listen { address, source: denied() },
            Error::StandbySilent(address),
            Error::StandbyRefuses {
                address,
                problem: "this standby holds another VM".into(),
                fix: Some("name another".into()),
            },
            Error::NoPurpose,
            Error::OtherVersion(7),
            Error::MessageTooLong(9),
            Error::MalformedMessage(malformed()),
            Error::EncodeMessage(malformed()),
            Error::ArbitersDiffer { primary: Arbiter::Witness, standby: Arbiter::Manual },
            Error::HoldsAnotherVm,
            Error::Group,
            Error::DirectoryInUse("D".into()),
            Error::WitnessRuns("W".into()),
            Error::NothingHeld,
            Error::WitnessState { path: "W/witness.state".into(), problem: "too long".into() },
            Error::GuardEnded,
            Error::NoProcess(0),
            Error::VmThreadPanicked,
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
