//! Errors of the QEMU driver.

use crate::rollback::RollbackObstacle;
use keyframe_qemu_cmdline::CommandLineError;
use keyframe_qemu_stream::StreamError;
use keyframe_vmm::VmmError;
use std::path::PathBuf;
use std::process::ExitStatus;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the QEMU driver. Its text names the object and the operation; [`Error::fix`] tells
/// what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The reason why it failed.
        source: std::io::Error,
    },
    /// QEMU closed the monitor's connection: it has ended, or is about to.
    #[error("QEMU closed its monitor {monitor} ({operation}): the VM has ended")]
    Gone {
        /// The monitor.
        monitor: String,
        /// The request.
        operation: String,
    },
    /// QEMU did not answer in time.
    #[error("QEMU's monitor {monitor} did not answer within {waited_ms} ms ({operation})")]
    Timeout {
        /// The monitor.
        monitor: String,
        /// The request.
        operation: String,
        /// The time for which Keyframe waited, in ms.
        waited_ms: u64,
    },
    /// QEMU's answer is malformed.
    #[error("QEMU's monitor {monitor} ({operation}): {problem}")]
    Protocol {
        /// The monitor.
        monitor: String,
        /// The request.
        operation: String,
        /// What is wrong with the answer.
        problem: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {operation}: {reason}")]
    Refused {
        /// The command.
        operation: String,
        /// QEMU's message.
        reason: String,
    },
    /// A wrapper script adds options that Keyframe must see.
    #[error("{script} adds {} to QEMU's command line, where Keyframe does not see it", dashed(.options))]
    Hidden {
        /// The script.
        script: String,
        /// Names of the options.
        options: Vec<String>,
    },
    /// A command line cannot be run or rewritten.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// The QEMU binary is missing, or is not QEMU's system emulator.
    #[error("{}: {reason}", path.display())]
    Binary {
        /// The binary.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What the user can do.
        fix: String,
    },
    /// The QEMU binary lacks a feature.
    #[error("{} offers no {feature} that Keyframe can use: {problem}", path.display())]
    Probe {
        /// The binary.
        path: PathBuf,
        /// The feature.
        feature: &'static str,
        /// What was seen.
        problem: String,
    },
    /// The QEMU binary has another version than the checkpoint's.
    #[error("{} is QEMU {found}, but the checkpoint was taken from QEMU {expected}: {problem}", path.display())]
    DifferentVersion {
        /// The binary.
        path: PathBuf,
        /// The checkpoint's version.
        expected: String,
        /// The binary's version.
        found: String,
        /// Why it cannot load the checkpoint.
        problem: Box<VersionProblem>,
    },
    /// QEMU ended unexpectedly.
    #[error("QEMU ended with {status} {when}; its own message is above")]
    Exited {
        /// The exit status.
        status: ExitStatus,
        /// The step.
        when: &'static str,
    },
    /// QEMU's list of RAM blocks is malformed.
    #[error("QEMU's list of RAM blocks: {problem}")]
    RamBlocks {
        /// What is wrong.
        problem: String,
    },
    /// QEMU's map of the guest-physical address space is malformed.
    #[error("QEMU's map of the guest's memory: {problem}")]
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
        /// The reason why not.
        problem: String,
    },
    /// A device state or migration stream is malformed, or cannot be converted.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The checkpoint cannot go on under the other accelerator.
    #[error("the checkpoint cannot change its accelerator: {reason}")]
    Conversion {
        /// The reason why not.
        reason: String,
        /// What the user can do.
        fix: String,
    },
    /// The restored machine differs from the checkpoint's.
    #[error(
        "the restored VM is a different machine: {what} is {found}, in the checkpoint it is {expected}"
    )]
    DifferentMachine {
        /// The property that differs.
        what: String,
        /// Its value in the checkpoint.
        expected: String,
        /// Its value in the VM that was started.
        found: String,
    },
    /// The checkpoint's description of its machine cannot be restored.
    #[error("the checkpoint's {what}: {problem}")]
    Source {
        /// The invalid part.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// Another client uses the monitor, which serves one at a time.
    #[error("QEMU's monitor {monitor} does not answer: another client uses it")]
    MonitorBusy {
        /// The monitor.
        monitor: String,
    },
    /// A running process cannot be attached to.
    #[error("attach to process {pid}: {problem}")]
    Attach {
        /// The process.
        pid: u32,
        /// The reason why not.
        problem: String,
        /// What the user can do.
        fix: String,
    },
    /// libvirt refused a request.
    #[error("libvirt's domain {domain}: {problem}")]
    Libvirt {
        /// The domain.
        domain: String,
        /// What is wrong.
        problem: String,
        /// What the user can do.
        fix: String,
    },
    /// The kernel interfaces of a lazy restore failed.
    #[error("serve the restored VM's memory: {source}")]
    Memory {
        /// The error of the kernel crate.
        #[from]
        source: keyframe_kernel::Error,
    },
    /// The device state that QEMU is about to write cannot be read.
    #[error("read the device state from QEMU's memory: {source}")]
    DeviceState {
        /// What the kernel crate says.
        source: keyframe_kernel::Error,
    },
    /// The VM touched a page that could not be read, and was ended.
    #[error(
        "the VM needed page {} of its RAM (block {block}, offset {offset:#x}), which could not be read, and was ended", page.0
    )]
    PageLost {
        /// The page.
        page: keyframe_units::PageIndex,
        /// Its RAM block.
        block: String,
        /// Offset in the block in bytes.
        offset: u64,
        /// The reason.
        source: std::io::Error,
    },
    /// QEMU did not load a checkpoint into the running VM.
    #[error("QEMU did not load the checkpoint: {problem}")]
    Rollback {
        /// QEMU's message.
        problem: String,
    },
    /// A device was plugged in with which QEMU ends when it saves its state.
    #[error(
        "device {name} ({kind}) was plugged in, and QEMU ends when it saves the state of such a \
         device ({how}); no checkpoint is taken until it is unplugged"
    )]
    Unsavable {
        /// The device's name in its container.
        name: String,
        /// Its type.
        kind: String,
        /// How QEMU ends.
        how: String,
    },
    /// An operation of the VM's user is in the way of a rollback.
    #[error("the VM cannot be rolled back now: {obstacle}")]
    RollbackObstacle {
        /// The operation.
        obstacle: RollbackObstacle,
    },
    /// A checkpoint lacks the SSE exception flags of a virtual CPU.
    #[error(
        "QEMU does not save the SSE exception flags of its CPUs (MXCSR bits 0 to 5): {problem}"
    )]
    SseFlags {
        /// Why Keyframe could not add them.
        problem: String,
    },
    /// The watchdog process has ended or does not answer.
    #[error("the watchdog: {problem}")]
    Watchdog {
        /// What is wrong.
        problem: String,
    },
    /// The watchdog cannot end the rollback of a dead engine: disks or RAM cannot be made those of
    /// the checkpoint.
    #[error(transparent)]
    Rescue(#[from] VmmError),
    /// The engine died during a rollback, and the watchdog ended the VM.
    #[error(
        "the engine died during a rollback, which the watchdog could not end in its place \
         ({problem}); so the watchdog ended the VM, whose state was incomplete"
    )]
    PutDown {
        /// Why it could not.
        problem: String,
    },
}

/// Why a binary of another version cannot load a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VersionProblem {
    /// An older QEMU does not know the state of a newer one.
    #[error("an earlier QEMU cannot load it")]
    Earlier,
    /// This use needs the checkpoint's series: a standby's VM could not come back from a later one.
    #[error("this needs a QEMU of the same series")]
    Series,
    /// Only the same release executes a recorded VM in the same way.
    #[error("a recording is replayed by the same release only")]
    Replay,
    /// QEMU keeps no promise for this machine type from one series to the next.
    #[error(
        "machine type {machine_type} has no version, so its state fits one series of QEMU only"
    )]
    MachineWithoutVersion {
        /// The machine type.
        machine_type: String,
    },
    /// QEMU has dropped the machine type, or the distributor has.
    #[error("it has no machine type {machine_type}")]
    UnknownMachine {
        /// The machine type.
        machine_type: String,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::CommandLine(error) => error.fix(),
            Self::Stream(error) => error.fix(),
            Self::Binary { fix, .. }
            | Self::Attach { fix, .. }
            | Self::Conversion { fix, .. }
            | Self::Libvirt { fix, .. } => Some(fix.clone()),
            Self::Memory { source } | Self::DeviceState { source } => source.fix(),
            Self::RollbackObstacle { obstacle } => Some(obstacle.fix()),
            Self::Hidden { .. } => Some(
                "give the QEMU command line of the script itself after `--`; while the script runs, this \
                 prints it: tr '\\0' ' ' < /proc/PID/cmdline"
                    .into(),
            ),
            Self::PageLost { .. } => Some(
                "restore another checkpoint; after an error of the storage, try again once it works"
                    .into(),
            ),
            Self::MonitorBusy { .. } => Some(
                "end the other client (another keyframe, a management tool), or name another monitor, which a \
                 QEMU started with a second `-qmp unix:PATH,server=on,wait=off` has; for a libvirt VM, \
                 use --libvirt DOMAIN"
                    .into(),
            ),
            Self::Probe { feature, .. } => Some(format!(
                "name a QEMU that has {feature}, as those of distributions have"
            )),
            Self::DifferentVersion { expected, problem, .. } => Some(match **problem {
                VersionProblem::Earlier => {
                    format!("name a binary of version {expected} or later with --qemu PATH")
                }
                _ => format!("name a binary of version {expected} with --qemu PATH"),
            }),
            Self::Exited { when, .. } if *when == AT_START => {
                Some("try the same command line without keyframe".into())
            }
            Self::Unsavable { .. } => Some("unplug it (device_del); the VM runs on meanwhile".into()),
            Self::PutDown { .. } => Some(
                "restore the newest checkpoint, which is the state before the rollback, unless that \
                 was a fast one: keyframe restore latest"
                    .into(),
            ),
            Self::DifferentMachine { .. } => Some(
                "restore with the binary, the firmware files and the arguments of the checkpointed VM"
                    .into(),
            ),
            _ => None,
        }
    }

    /// Makes an I/O error of `operation`, for `map_err`.
    pub(crate) fn io<E: Into<std::io::Error>>(
        operation: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source: source.into() }
    }

    /// Returns true for an error of a restore that lies in the checkpoint: QEMU makes another
    /// machine of its command line, or refuses the device state. Returns false for errors that this
    /// host may have caused.
    pub fn is_of_checkpoint(&self) -> bool {
        match self {
            Self::DifferentMachine { .. }
            | Self::Stream(_)
            | Self::Source { .. }
            | Self::CommandLine(CommandLineError::RamLayout { .. }) => true,
            // A QEMU that was killed ends otherwise.
            Self::Exited { when, status } => {
                *when == crate::restore::WHILE_LOADING && status.code() == Some(1)
            }
            _ => false,
        }
    }
}

/// The step of [`Error::Exited`] if QEMU ended before its monitor answered.
pub(crate) const AT_START: &str = "before its monitor answered";

fn dashed(options: &[String]) -> String {
    options.iter().map(|name| format!("-{name}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};
    use std::io;
    use std::os::unix::process::ExitStatusExt;

    fn monitor_errors() -> Vec<Error> {
        let (monitor, operation) = (|| "/run/vm/qmp.sock".to_owned(), || "stop".to_owned());
        vec![
            Error::Gone { monitor: monitor(), operation: operation() },
            Error::Timeout { monitor: monitor(), operation: operation(), waited_ms: 10_000 },
            Error::Protocol {
                monitor: monitor(),
                operation: operation(),
                problem: "it answered []".into(),
            },
            Error::Refused { operation: operation(), reason: "the VM migrates".into() },
            Error::MonitorBusy { monitor: monitor() },
            Error::RamBlocks { problem: "it is empty".into() },
            Error::GuestMap { problem: "main RAM is missing".into() },
            Error::Rollback { problem: "Device 'vga' lacks its state".into() },
            Error::Watchdog { problem: "it has ended".into() },
            Error::Rescue(VmmError::new(keyframe_vmm::VmmErrorKind::Other, "no space", None)),
            Error::PutDown { problem: "QEMU does not end the load".into() },
        ]
    }

    fn process_errors() -> Vec<Error> {
        let failed = || io::Error::from(io::ErrorKind::NotFound);
        let status = ExitStatus::from_raw(1 << 8);
        vec![
            Error::Io { operation: "read /proc/7/cmdline".into(), source: failed() },
            Error::Hidden { script: "./run.sh".into(), options: vec!["drive".into()] },
            Error::Binary {
                path: "qemu".into(),
                reason: "there is no such program in PATH".into(),
                fix: "install QEMU".into(),
            },
            Error::Probe {
                path: "/usr/bin/qemu".into(),
                feature: "plugins",
                problem: "-plugin: invalid option".into(),
            },
            Error::DifferentVersion {
                path: "/usr/bin/qemu".into(),
                expected: "7.2.22".into(),
                found: "6.2.0".into(),
                problem: Box::new(VersionProblem::Earlier),
            },
            Error::DifferentVersion {
                path: "/usr/bin/qemu".into(),
                expected: "7.2.22".into(),
                found: "10.0.2".into(),
                problem: Box::new(VersionProblem::MachineWithoutVersion {
                    machine_type: "microvm".into(),
                }),
            },
            Error::Exited { status, when: AT_START },
            Error::Exited { status, when: "while it read the checkpoint's devices" },
            Error::RamAddress { block: "pc.ram".into(), pid: 7, problem: "no mapping".into() },
            Error::DifferentMachine {
                what: "machine type".into(),
                expected: "pc-i440fx-7.2".into(),
                found: "pc-q35-7.2".into(),
            },
            Error::Source { what: "RAM layout".into(), problem: "it is empty".into() },
            Error::Attach {
                pid: 7,
                problem: "this is a thread".into(),
                fix: "name its process".into(),
            },
            Error::Libvirt {
                domain: "web".into(),
                problem: "it does not run".into(),
                fix: "start it".into(),
            },
            Error::Unsavable {
                name: "ser0".into(),
                kind: "pci-serial-2x".into(),
                how: "segmentation fault".into(),
            },
            Error::PageLost {
                page: keyframe_units::PageIndex(12),
                block: "pc.ram".into(),
                offset: 0xc000,
                source: failed(),
            },
        ]
    }

    fn obstacles() -> Vec<Error> {
        let all = [
            RollbackObstacle::Migration,
            RollbackObstacle::NotHere { state: "postmigrate".into() },
            RollbackObstacle::TargetStands { state: "io-error".into() },
            RollbackObstacle::Dump,
            RollbackObstacle::Job { id: "backup-1".into(), kind: "mirror".into() },
            RollbackObstacle::Flash,
            RollbackObstacle::PageSize { machine_type: "raspi3b".into() },
        ];
        all.into_iter().map(|obstacle| Error::RollbackObstacle { obstacle }).collect()
    }

    #[test]
    fn error_texts_are_golden() {
        let errors = monitor_errors().into_iter().chain(process_errors()).chain(obstacles());
        let texts: Vec<_> = errors.map(|error| error_text(&error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
