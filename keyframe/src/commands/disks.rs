//! `keyframe __disks`: the process that serves a VM's disks, so that they outlive the engine. Not for people.

use crate::failure::{DONE, Failure, Outcome};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// Serve the disks that the engine on standard input orders, until it orders the end, or until the VM is gone
#[derive(clap::Args, Debug)]
pub struct Disks {}

impl Disks {
    /// Serves until the end.
    #[expect(clippy::unused_self, reason = "commands are run by their arguments, and it has none")]
    pub fn run(&self) -> Outcome {
        let control = std::io::stdin().as_fd().try_clone_to_owned();
        let control = control.map_err(|e| Failure::new(format!("standard input: {e}")))?;
        // Restored VMs, whose disks have a checkpoint beneath them, are not served yet.
        let no_layer = |name: &str| {
            Err(keyframe_disk::Error::Server {
                problem: format!("no layer {name:?}: this keyframe opens none"),
            })
        };
        keyframe_disk::serve(&UnixStream::from(control), no_layer)
            .map_err(|e| Failure::new(e.to_string()))?;
        Ok(DONE)
    }
}
