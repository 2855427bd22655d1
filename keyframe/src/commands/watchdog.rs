//! `keyframe __watchdog`: the process that resumes a VM whose engine died or stalled in a pause. Not for people.

use crate::failure::{DONE, Failure, Outcome};
use std::path::PathBuf;

/// Resume the VM behind SOCKET if the engine that writes to standard input dies or stalls while it is paused
#[derive(clap::Args, Debug)]
pub struct Watchdog {
    /// QEMU's monitor socket for the watchdog
    socket: PathBuf,
}

impl Watchdog {
    /// Watches until the engine ends.
    pub fn run(&self) -> Outcome {
        keyframe_qemu::watchdog::run(&self.socket, std::io::stdin(), std::io::stdout())
            .map_err(|e| Failure::qemu(&e))?;
        Ok(DONE)
    }
}
