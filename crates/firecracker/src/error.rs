//! The errors of this crate: each names the object and the operation, and knows what the user can
//! do about it.

use keyframe_vmm::{VmmError, VmmErrorKind};
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of Firecracker, or of its use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation.
    #[error("{operation}: {source}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// No process serves the API at this socket: Firecracker has ended, or the socket was removed.
    #[error("{operation}: Firecracker's API at {} is gone: {source}", socket.display())]
    Gone {
        /// The socket.
        socket: PathBuf,
        /// The request.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// Firecracker did not answer in time. The request may still take effect.
    #[error("{operation}: Firecracker's API at {} has not answered for {waited_ms} ms", socket.display())]
    Timeout {
        /// The socket.
        socket: PathBuf,
        /// The request.
        operation: String,
        /// How long it was waited for, in milliseconds.
        waited_ms: u64,
    },
    /// Firecracker refused a request.
    #[error("{operation}: Firecracker answers {status}: {message}")]
    Refused {
        /// The request.
        operation: String,
        /// The HTTP status.
        status: u16,
        /// What Firecracker says.
        message: String,
    },
    /// An answer of the API has another form than Firecracker's have.
    #[error("{operation}: the API's answer is none of Firecracker: {problem}")]
    Answer {
        /// The request.
        operation: String,
        /// What is wrong.
        problem: String,
    },
    /// A process cannot be attached to.
    #[error("process {pid}: {problem}")]
    Attach {
        /// The process id.
        pid: u32,
        /// Why not.
        problem: String,
        /// What the user can do.
        fix: String,
    },
    /// No other Firecracker can take the place of a process.
    #[error("no other Firecracker can take the place of process {pid}: {problem}")]
    Place {
        /// The process id.
        pid: u32,
        /// Why not.
        problem: String,
    },
    /// A command line or configuration that Keyframe cannot run.
    #[error("{subject}: {reason}")]
    CommandLine {
        /// The option or file.
        subject: String,
        /// Why not.
        reason: String,
        /// What the user can do.
        fix: String,
    },
    /// The file of a drive is not where its path leads.
    #[error("drive {name}, {}: {problem}", path.display())]
    Drive {
        /// The drive.
        name: String,
        /// Its path on this host.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What the user can do.
        fix: String,
    },
    /// The guest's RAM was not found in the process.
    #[error("the RAM of Firecracker (process {pid}): {problem}")]
    Ram {
        /// The process id.
        pid: u32,
        /// What is wrong.
        problem: String,
    },
    /// Firecracker wrote no device state that can be used.
    #[error("Firecracker's device state: {problem}")]
    DeviceState {
        /// What is wrong.
        problem: String,
    },
    /// The devices of a paused VM go on, so they may write to its RAM.
    #[error("the devices of Firecracker (process {pid}) do not stand still in a pause")]
    DevicesRun {
        /// The process id.
        pid: u32,
    },
    /// A pause ended before Keyframe had looked at the VM: the watchdog ended it, or another client
    /// pauses and resumes the VM all the time.
    #[error("the pause ended before Keyframe had looked at the VM")]
    PauseEnded,
    /// Firecracker does not load a device state.
    #[error("Firecracker does not load the device state: {message}")]
    NotLoaded {
        /// What Firecracker says.
        message: String,
    },
    /// Firecracker passed no userfaultfd with which its RAM can be loaded.
    #[error("Firecracker's userfaultfd: {problem}")]
    Uffd {
        /// What is wrong.
        problem: String,
    },
    /// The RAM of a restored VM cannot be loaded.
    #[error(transparent)]
    RamLoading(#[from] keyframe_ram_loading::Error),
    /// Firecracker has ended.
    #[error("Firecracker ended with {status} {when}")]
    Exited {
        /// How.
        status: ExitStatus,
        /// The step in which it should run.
        when: &'static str,
    },
    /// A checkpoint cannot be restored here.
    #[error("{problem}")]
    Restore {
        /// Why not.
        problem: String,
        /// What the user can do.
        fix: String,
    },
    /// The user asked for an end.
    #[error("interrupted: no VM was left running")]
    Interrupted,
    /// An interface of the kernel failed.
    #[error(transparent)]
    Kernel(#[from] keyframe_kernel::Error),
    /// The watchdog failed.
    #[error(transparent)]
    Watchdog(#[from] keyframe_pause_watchdog::Error),
}

impl Error {
    pub(crate) fn io<E: Into<io::Error>>(operation: impl Into<String>) -> impl FnOnce(E) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source: source.into() }
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::Attach { fix, .. }
            | Self::CommandLine { fix, .. }
            | Self::Drive { fix, .. }
            | Self::Restore { fix, .. } => fix.clone(),
            Self::Gone { .. } => {
                "start Firecracker with --api-sock, and name that socket; it must not be removed \
                 while Keyframe uses it"
                    .into()
            }
            Self::Ram { .. } => {
                "use a Firecracker that Keyframe is tested with (docs/design/vmm.md), without huge \
                 pages"
                    .into()
            }
            Self::DeviceState { .. } | Self::DevicesRun { .. } => {
                "use a Firecracker that Keyframe is tested with (docs/design/vmm.md)".into()
            }
            Self::Kernel(error) => return error.fix(),
            _ => return None,
        })
    }
}

impl From<Error> for VmmError {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Gone { .. } => VmmErrorKind::MonitorLost,
            Error::Timeout { .. } => VmmErrorKind::Timeout,
            Error::NotLoaded { .. } => VmmErrorKind::StateRefused,
            _ => VmmErrorKind::Other,
        };
        let fix = error.fix();
        Self::new(kind, error, fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn error_texts_are_golden() {
        let socket = || PathBuf::from("/run/fc.sock");
        let denied = || io::Error::new(io::ErrorKind::PermissionDenied, "permission denied");
        let errors = [
            Error::Io { operation: "read /proc/4711/maps".into(), source: denied() },
            Error::Gone { socket: socket(), operation: "pause the VM".into(), source: denied() },
            Error::Timeout { socket: socket(), operation: "resume the VM".into(), waited_ms: 5000 },
            Error::Refused {
                operation: "pause the VM".into(),
                status: 400,
                message: "not supported before the VM has started".into(),
            },
            Error::Answer { operation: "read the VM's state".into(), problem: "no JSON".into() },
            Error::Attach {
                pid: 4711,
                problem: "this process is no Firecracker".into(),
                fix: "give the process id of Firecracker".into(),
            },
            Error::Place { pid: 4711, problem: "it is in a jail".into() },
            Error::CommandLine {
                subject: "--config-file vm.json".into(),
                reason: "there is no such file".into(),
                fix: "name the file".into(),
            },
            Error::Drive {
                name: "rootfs".into(),
                path: "/srv/root.ext4".into(),
                problem: "another file is there now".into(),
                fix: "put the drive's file back to its path".into(),
            },
            Error::Ram { pid: 4711, problem: "no mapping of its size".into() },
            Error::DeviceState { problem: "it ends too soon".into() },
            Error::DevicesRun { pid: 4711 },
            Error::PauseEnded,
            Error::NotLoaded { message: "bad version".into() },
            Error::Uffd { problem: "none arrived".into() },
            Error::Exited { status: ExitStatus::from_raw(9), when: "before it served its API" },
            Error::Restore {
                problem: "a restore needs the host's /dev/kvm".into(),
                fix: "restore where KVM is".into(),
            },
            Error::Interrupted,
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/errors.txt");
        assert_golden(path, &texts.concat());
    }
}
