//! `keyframe __disks`: the process that serves a VM's disks, so that they outlive the engine. Not
//! for people.

use crate::failure::{DONE, Outcome};
use keyframe_session::helper_process;

/// Serve the disks that the engine on standard input orders, until it orders the end, or until the
/// VM is gone
#[derive(clap::Args, Debug)]
pub struct Disks {}

impl Disks {
    /// Serves until the end.
    #[expect(clippy::unused_self, reason = "commands are run by their arguments, and it has none")]
    pub fn run(&self) -> Outcome {
        helper_process::serve_disks()?;
        Ok(DONE)
    }
}
