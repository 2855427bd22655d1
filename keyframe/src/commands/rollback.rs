//! `keyframe rollback`: a running VM back to a checkpoint, in place.

use crate::failure::{DONE, Failure, Outcome, WARNED};
use crate::output;
use keyframe_session::control::{EngineRequest, EngineResponse, client};
use keyframe_session::run_dir;
use std::time::Duration;

/// The longest time of a rollback. The engine reports a failure sooner.
const PATIENCE: Duration = Duration::from_hours(1);

/// Put a running VM back to a checkpoint, in place
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command puts RAM, processors, devices and disks of a VM under `keyframe run` or `attach` back to the checkpoint, in the
same QEMU, with the same consoles, monitors and networks. It first takes a checkpoint of the present state, so that nothing is
lost, and afterwards one of the state that it has put back. `keyframe list --tree` shows both branches. If the rollback fails,
the VM continues as it was.

The VM's peers are not rolled back: a program that talked to the VM since the checkpoint finds it in the past.

Examples:
  keyframe rollback before-upgrade
  keyframe rollback 12 --name web --json"
)]
pub struct Rollback {
    /// A number, a tag or `latest`, in the store of the run
    checkpoint: String,
    /// Which VM, if several run
    #[arg(long, alias = "vm", value_name = "NAME")]
    name: Option<String>,
    /// Print JSON: times in ns
    #[arg(long)]
    json: bool,
}

impl Rollback {
    /// Asks the engine for it.
    pub fn run(&self) -> Outcome {
        let engine = run_dir::find(self.name.as_deref())?;
        let request = EngineRequest::Rollback { checkpoint: self.checkpoint.clone() };
        let done = match client::ask(&engine, &request, PATIENCE)? {
            EngineResponse::RolledBack(done) => done,
            other => return Err(Failure::new(format!("unexpected answer: {other:?}"))),
        };
        if self.json {
            output::json(&done)?;
        } else {
            output::print_line(&format!(
                "VM {} is back at checkpoint {}{}: {} pages written back, it stood for {}; what it was is checkpoint {}",
                done.vm,
                done.checkpoint,
                if done.runs { "" } else { " (paused)" },
                done.pages,
                output::duration(done.stood_ns),
                done.before
            ))?;
        }
        Ok(if done.now.is_some() { DONE } else { WARNED })
    }
}
