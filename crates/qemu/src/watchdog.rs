//! The watchdog of QEMU's pauses: how it reaches QEMU. Crate `pause-watchdog` has what it does.

mod watched;

pub use keyframe_pause_watchdog::{Fired, Watchdog};
pub use watched::{Watched, WatchedMonitor};

use crate::{Error, Result};
use keyframe_vmm::RollbackRescuer;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::Command;
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
    Watchdog::spawn_by(command.args(watched.words()), |command| {
        // To end a rollback, it reads the store.
        crate::spawn::start_with_secrets(command, &watched.inherited())
    })
}

#[cfg(test)]
mod tests;
