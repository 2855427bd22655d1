//! The errors of a measurement, and what the user can do about them.

use std::io;
use std::path::PathBuf;

/// The fix if the command line does not tell where the RAM is.
const ASK_MONITOR: &str = "name QEMU's monitor with --qmp SOCKET";

/// An error of the measurement of a VM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused to track or to look at the process.
    #[error(transparent)]
    Kernel(#[from] keyframe_kernel::Error),
    /// QEMU, or its command line, failed.
    #[error(transparent)]
    Qemu(#[from] keyframe_qemu::Error),
    /// The monitor that the user named does not answer.
    #[error(transparent)]
    Monitor(keyframe_qemu::Error),
    /// The monitor that the user named belongs to another process.
    #[error("{source}")]
    OtherMonitor {
        /// The process that was to be measured.
        pid: u32,
        /// The monitor's socket.
        socket: PathBuf,
        /// The error that shows it.
        source: keyframe_qemu::Error,
    },
    /// The system refused an operation.
    #[error("{operation}: {source}")]
    Io {
        /// The operation with its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// The process has ended.
    #[error("process {0} has ended")]
    Ended(u32),
    /// The process is not a QEMU.
    #[error("process {pid} is no QEMU: it runs {}", program.display())]
    NotQemu {
        /// The process.
        pid: u32,
        /// Its program.
        program: PathBuf,
    },
    /// The VM's VMM does not answer, or refuses.
    #[error(transparent)]
    Vmm(#[from] keyframe_vmm::VmmError),
    /// The command line does not tell the RAM's size.
    #[error("the RAM of process {pid} cannot be told from its command line: {part:?}")]
    UnclearCommandLine {
        /// The process.
        pid: u32,
        /// The part that is not understood.
        part: String,
    },
    /// The mappings do not fit the sizes on the command line.
    #[error(
        "guest RAM of process {pid}: its command line names {named} of {size}, and {mapped} \
         mappings have that size"
    )]
    UnclearMappings {
        /// The process.
        pid: u32,
        /// The number of RAM blocks of this size on the command line.
        named: usize,
        /// The size, with its unit.
        size: String,
        /// The number of mappings of this size.
        mapped: usize,
    },
    /// QEMU has another number of vCPUs than was asked for.
    #[error("QEMU started with {started} vCPUs where {asked} were asked for")]
    OtherVcpus {
        /// The number that QEMU has.
        started: u32,
        /// The number that was asked for.
        asked: u32,
    },
    /// The guest's console did not show the awaited text.
    #[error("the guest's console did not show {text:?} within {seconds} s")]
    TextNotShown {
        /// The text.
        text: String,
        /// The time for which it was awaited, in seconds.
        seconds: u64,
    },
    /// QEMU's answer about its disks cannot be read.
    #[error("ask QEMU about its disks: {0}")]
    Disks(String),
    /// No epoch was measured.
    #[error("the measuring was ended before its first epoch was over")]
    NoEpoch,
    /// The thread that measures has panicked.
    #[error("the thread that measures panicked")]
    Panicked,
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn io(operation: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { operation: operation.into(), source: source.into() }
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Kernel(error) => error.fix(),
            Self::Qemu(error) => error.fix(),
            Self::Vmm(error) => error.fix().map(str::to_owned),
            Self::Monitor(_) => Some(
                "name a QMP socket (-qmp unix:PATH,server=on,wait=off) that no other program uses"
                    .into(),
            ),
            Self::OtherMonitor { pid, socket, .. } => {
                Some(format!("is process {pid} the QEMU behind {}?", socket.display()))
            }
            Self::NotQemu { .. } => Some(
                "give the pid of the qemu-system process, or its monitor with --qmp SOCKET; for a \
                 Firecracker, its pid and its API with --api SOCKET"
                    .into(),
            ),
            Self::UnclearCommandLine { .. } | Self::UnclearMappings { .. } => {
                Some(ASK_MONITOR.into())
            }
            Self::OtherVcpus { .. } => {
                Some("leave the number of CPUs in the QEMU command line to -smp".into())
            }
            Self::TextNotShown { .. } => Some(
                "--when looks at QEMU's standard output: add -serial stdio, or use --settle".into(),
            ),
            Self::Io { .. } | Self::Ended(_) | Self::Disks(_) | Self::NoEpoch | Self::Panicked => {
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let errors = [
            Error::io("catch signals", io::ErrorKind::PermissionDenied),
            Error::Ended(7),
            Error::NotQemu { pid: 7, program: "/usr/bin/sleep".into() },
            Error::UnclearCommandLine { pid: 7, part: "-m lots".into() },
            Error::UnclearMappings { pid: 7, named: 1, size: "64 MiB".into(), mapped: 3 },
            Error::OtherVcpus { started: 1, asked: 4 },
            Error::TextNotShown { text: "login:".into(), seconds: 600 },
            Error::Disks("query-blockstats: no list".into()),
            Error::NoEpoch,
            Error::Panicked,
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
