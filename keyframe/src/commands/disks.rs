//! `keyframe __disks`: the process that serves a VM's disks, so that they outlive the engine. Not
//! for people.

use keyframe_failure::{DONE, Failure, Outcome};
use keyframe_vm_disks::layer::Layers;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// Serve the disks that the engine on standard input orders, until it orders the end, or until the
/// VM is gone
#[derive(clap::Args, Debug)]
pub struct Disks {}

impl Disks {
    /// Serves until the end.
    #[expect(clippy::unused_self, reason = "commands are run by their arguments, and it has none")]
    pub fn run(&self) -> Outcome {
        let control = std::io::stdin().as_fd().try_clone_to_owned();
        let control = control.map_err(|e| Failure::new(format!("standard input: {e}")))?;
        let layers = Layers::default();
        keyframe_disk::serve(&UnixStream::from(control), |source| layers.open(source))
            .map_err(|e| Failure::new(e.to_string()))?;
        Ok(DONE)
    }
}
