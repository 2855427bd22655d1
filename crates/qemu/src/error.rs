//! What can go wrong between us and QEMU.

use keyframe_qemu_cmdline::CommandLineError;
use keyframe_qemu_stream::StreamError;
use std::path::PathBuf;
use std::process::ExitStatus;

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: it names the object and the operation. What to do about it is [`Error::fix`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{operation}")]
    Io {
        /// What was done to what.
        operation: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The monitor's connection ended: QEMU has exited, or it closes.
    #[error("QEMU closed its monitor {monitor} ({operation}): the VM has ended")]
    Gone {
        /// The monitor's socket.
        monitor: String,
        /// What was asked of it.
        operation: String,
    },
    /// QEMU did not answer in time.
    #[error("QEMU's monitor {monitor} did not answer within {waited_ms} ms ({operation})")]
    Timeout {
        /// The monitor's socket.
        monitor: String,
        /// What was asked of it.
        operation: String,
        /// How long we waited.
        waited_ms: u64,
    },
    /// What QEMU answered cannot be understood.
    #[error("QEMU's monitor {monitor} ({operation}): {problem}")]
    Protocol {
        /// The monitor's socket.
        monitor: String,
        /// What was asked of it.
        operation: String,
        /// What is wrong with the answer.
        problem: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {operation}: {reason}")]
    Refused {
        /// The command.
        operation: String,
        /// QEMU's own words.
        reason: String,
    },
    /// A script stands between Keyframe and QEMU, and adds what Keyframe has to know of.
    #[error("{script} adds {} to QEMU's line, which Keyframe does not see there", dashed(.options))]
    Hidden {
        /// The script.
        script: String,
        /// Names of options.
        options: Vec<String>,
    },
    /// A command line cannot be run or rewritten.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// The QEMU binary is missing, or is none.
    #[error("{}: {reason}", path.display())]
    Binary {
        /// The binary.
        path: PathBuf,
        /// Why.
        reason: String,
        /// What to do.
        fix: String,
    },
    /// The QEMU binary is of another version than the checkpoint's.
    #[error("{} is QEMU {found}, the checkpoint was taken of QEMU {expected}", path.display())]
    DifferentVersion {
        /// The binary.
        path: PathBuf,
        /// The checkpoint's version.
        expected: String,
        /// The binary's version.
        found: String,
    },
    /// QEMU ended although it should not have.
    #[error("QEMU ended with {status} {when}; what it says about it stands above")]
    Exited {
        /// How it ended.
        status: ExitStatus,
        /// During what.
        when: &'static str,
    },
    /// QEMU's list of RAM blocks makes no sense.
    #[error("QEMU's list of RAM blocks: {problem}")]
    RamBlocks {
        /// What is wrong.
        problem: String,
    },
    /// QEMU's list of what lies where in guest-physical space makes no sense.
    #[error("QEMU's list of the guest's memory: {problem}")]
    GuestMap {
        /// What is wrong.
        problem: String,
    },
    /// A RAM block could not be found in QEMU's memory.
    #[error("find RAM block {block} in the memory of QEMU (pid {pid}): {problem}")]
    RamAddress {
        /// The block.
        block: String,
        /// QEMU's pid.
        pid: u32,
        /// Why not.
        problem: String,
    },
    /// A device state or migration stream is malformed, or cannot be converted.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The checkpoint cannot go on under the other accelerator.
    #[error("the checkpoint cannot change its accelerator: {reason}")]
    Conversion {
        /// Why not.
        reason: String,
        /// What to do.
        fix: String,
    },
    /// The restored machine would not be the one that the checkpoint was taken of.
    #[error(
        "the restored VM is a different machine: {what} is {found}, in the checkpoint it is {expected}"
    )]
    DifferentMachine {
        /// What differs.
        what: String,
        /// In the checkpoint.
        expected: String,
        /// In the VM just started.
        found: String,
    },
    /// The checkpoint's own description cannot be restored.
    #[error("the checkpoint's {what}: {problem}")]
    Source {
        /// Which part of it.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// A monitor serves one client at a time, and has one.
    #[error("QEMU's monitor {monitor} does not greet: another client holds it")]
    MonitorBusy {
        /// The monitor's socket.
        monitor: String,
    },
    /// A running process cannot be attached to.
    #[error("attach to process {pid}: {problem}")]
    Attach {
        /// The process.
        pid: u32,
        /// Why not.
        problem: String,
        /// What to do.
        fix: String,
    },
    /// libvirt does not do what was asked of it.
    #[error("libvirt's domain {domain}: {problem}")]
    Libvirt {
        /// The domain.
        domain: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        fix: String,
    },
    /// The kernel's part of a lazy restore failed.
    #[error("serve the restored VM's memory: {source}")]
    Memory {
        /// What the kernel crate says.
        #[from]
        source: keyframe_kernel::Error,
    },
    /// The VM needed a page that could not be read, and was ended.
    #[error(
        "the VM needed page {} of its RAM (block {block}, offset {offset:#x}), which could not be read, and was ended", page.0
    )]
    PageLost {
        /// The page.
        page: keyframe_units::PageIndex,
        /// The block that it lies in.
        block: String,
        /// Where in the block, in bytes.
        offset: u64,
        /// Why.
        source: std::io::Error,
    },
    /// A running VM was not put back to a checkpoint.
    #[error("QEMU did not go back to the checkpoint: {problem}")]
    Rollback {
        /// What QEMU says.
        problem: String,
    },
    /// The watchdog process has ended or does not answer.
    #[error("the watchdog: {problem}")]
    Watchdog {
        /// What is wrong.
        problem: String,
    },
    /// The engine died in the middle of a rollback, and the watchdog has ended the VM.
    #[error(
        "the engine died in the middle of a rollback: its VM, which was neither what it was nor what it was to be, has been ended"
    )]
    PutDown,
}

impl Error {
    /// What a person can do about it, where we know.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::CommandLine(error) => error.fix(),
            Self::Stream(error) => error.fix(),
            Self::Binary { fix, .. }
            | Self::Attach { fix, .. }
            | Self::Conversion { fix, .. }
            | Self::Libvirt { fix, .. } => Some(fix.clone()),
            Self::Memory { source } => source.fix(),
            Self::Hidden { .. } => Some(
                "give QEMU's own line behind `--`: the one in the script; or start the script by itself and see what runs with: \
                 tr '\\0' ' ' < /proc/PID/cmdline"
                    .into(),
            ),
            Self::PageLost { .. } => Some(
                "restore another checkpoint; where it was an error of the medium, try again when that is gone".into(),
            ),
            Self::MonitorBusy { .. } => Some(
                "end the other client (another keyframe, a management tool), or name another monitor: a QEMU that was \
                 started with a second `-qmp unix:PATH,server=on,wait=off` has one. For a VM of libvirt's, which holds \
                 the monitor, use --libvirt DOMAIN"
                    .into(),
            ),
            Self::DifferentVersion { expected, .. } => {
                Some(format!("name a binary of version {expected} with --qemu PATH"))
            }
            Self::Exited { when, .. } if *when == AT_START => Some(
                "try the same line without keyframe; a device that QEMU calls non-migratable cannot be \
                 checkpointed (keyframe adds -only-migratable so that QEMU itself refuses it)"
                    .into(),
            ),
            Self::PutDown => Some(
                "restore it as it was before the rollback, which is the newest checkpoint: keyframe restore latest".into(),
            ),
            Self::DifferentMachine { .. } => Some(
                "restore with the binary, the firmware files and the arguments that the checkpoint was taken with"
                    .into(),
            ),
            _ => None,
        }
    }

    /// For `map_err`: an I/O error of `operation`.
    pub(crate) fn io<E: Into<std::io::Error>>(
        operation: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source: source.into() }
    }
}

/// [`Error::Exited`]'s word for an end before the monitor answered.
pub(crate) const AT_START: &str = "before its monitor answered";

fn dashed(options: &[String]) -> String {
    options.iter().map(|name| format!("-{name}")).collect::<Vec<_>>().join(", ")
}
