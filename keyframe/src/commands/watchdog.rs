//! `keyframe __watchdog`: the process that resumes a VM whose engine died or stalled in a pause.
//! Not for people.

use crate::failure::{DONE, Outcome};
use keyframe_session::helper_process;
use std::ffi::OsString;

/// Resume a VM if the engine that writes to standard input dies or stalls while it is paused
#[derive(clap::Args, Debug)]
pub struct Watchdog {
    /// What to watch, as the engine words it; a path alone is QEMU's monitor socket for the
    /// watchdog
    #[arg(required = true, allow_hyphen_values = true)]
    watched: Vec<OsString>,
}

impl Watchdog {
    /// Returns true if the VM is one of Firecracker.
    pub fn is_of_firecracker(&self) -> bool {
        let word = keyframe_firecracker::watchdog::WORD;
        self.watched.first().is_some_and(|first| first == word)
    }

    /// Watches until the engine ends.
    pub fn run(&self) -> Outcome {
        helper_process::watch(&self.watched)?;
        Ok(DONE)
    }
}
