//! The watchdog of QEMU's pauses: how it reaches QEMU. Crate `pause-watchdog` has what it does.

mod watched;

pub use keyframe_pause_watchdog::{Fired, Watchdog};
pub use watched::{Watched, WatchedMonitor};

#[cfg(test)]
use crate::EndHold;
use crate::{Error, Result};
#[cfg(test)]
use keyframe_pause_watchdog::{LOOK_EVERY, plan_line, step_line};
use keyframe_vmm::RollbackRescuer;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use watched::QemuRescuer;

impl From<keyframe_pause_watchdog::Error> for Error {
    fn from(error: keyframe_pause_watchdog::Error) -> Self {
        match error {
            keyframe_pause_watchdog::Error::Io { operation, source } => Self::io(operation)(source),
            keyframe_pause_watchdog::Error::Problem { problem } => Self::Watchdog { problem },
            keyframe_pause_watchdog::Error::PutDown { problem } => Self::PutDown { problem },
        }
    }
}

/// Runs the watchdog process: watches the VM until `commands`, the orders of the engine, or QEMU
/// end. Writes answers to `reports`. `rescuer` ends the rollback of an engine that has died.
///
/// Errors: the monitor cannot be reached; an order cannot be parsed. An armed watchdog fires before
/// it returns an error.
pub fn run(
    watched: Watched,
    commands: impl Read + AsFd,
    reports: impl Write,
    rescuer: &mut dyn RollbackRescuer,
) -> Result<()> {
    keyframe_pause_watchdog::run(QemuRescuer::reach(watched, rescuer)?, commands, reports)
}

/// Starts the watchdog as `command`, followed by the arguments that [`Watched::parse`] reads, and
/// waits until it is ready. Error: the process cannot be started, or does not answer.
pub fn spawn(command: &mut Command, watched: &Watched) -> Result<Watchdog> {
    use std::os::unix::process::CommandExt;
    command.args(watched.words()).stdin(Stdio::piped()).stdout(Stdio::piped());
    // Ctrl-C must not end it together with the engine.
    command.process_group(0);
    // To end a rollback, it reads the store.
    let mut child = crate::spawn::start_with_secrets(command, &watched.inherited())?;
    match (child.stdin.take(), child.stdout.take()) {
        (Some(stdin), Some(stdout)) => Ok(Watchdog::new(child, stdin, stdout)?),
        _ => Err(Error::Watchdog { problem: "it was started without pipes".into() }),
    }
}

#[cfg(test)]
mod tests;
