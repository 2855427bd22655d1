//! `keyframe __watchdog`: the process that resumes a VM whose engine died or stalled in a pause.
//! Not for people.

use keyframe_failure::{DONE, Failure, Outcome};
use keyframe_qemu::watchdog::{self, Watched};
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
    /// Watches until the engine ends.
    pub fn run(&self) -> Outcome {
        let watched = match self.watched.as_slice() {
            [path] => Watched::Monitor(path.into()),
            words => Watched::parse(words).map_err(|e| Failure::qemu(&e))?,
        };
        watchdog::run(watched, std::io::stdin(), std::io::stdout())
            .map_err(|e| Failure::qemu(&e))?;
        Ok(DONE)
    }
}
