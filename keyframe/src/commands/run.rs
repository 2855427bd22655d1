//! `keyframe run`: a VM under continuous checkpoints.

use super::StoreArg;
use super::checkpoints::Checkpoints;
use crate::control::OnExit;
use crate::failure::Outcome;
use crate::session;
use std::ffi::OsString;

/// Run a VM with continuous checkpoints
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The QEMU command line behind -- is yours, unchanged; Keyframe adds a monitor socket, a descriptor for the device
state and -only-migratable. QEMU's standard streams are passed through. The command ends when the VM ends, after
--count checkpoints, at Ctrl-C or by `keyframe stop`; what is in progress is sealed first.

The guest's disks must be read-only for now.

Examples:
  keyframe run --store S -- qemu-system-x86_64 -m 1G -nographic -kernel vmlinuz -append console=ttyS0
  keyframe run --store S --interval 500ms --count 20 --name web -- qemu-system-x86_64 ...
  keyframe run --store S --interval none -- qemu-system-x86_64 ...    # only when asked: keyframe take"
)]
pub struct Run {
    #[command(flatten)]
    store: StoreArg,
    #[command(flatten)]
    checkpoints: Checkpoints,
    /// What becomes of a VM that still runs when this command ends
    #[arg(long, value_enum, default_value = "kill")]
    on_exit: OnExit,
    /// QEMU's command line
    #[arg(last = true, required = true, value_name = "QEMU COMMAND")]
    command: Vec<OsString>,
}

impl Run {
    /// Runs the VM to its end.
    pub fn run(self) -> Outcome {
        let store = self.store.open()?;
        session::run(&store, self.command, self.checkpoints.options(self.on_exit))
    }
}
