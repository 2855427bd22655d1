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
the VM continues as it was. If Keyframe is killed meanwhile, its watchdog ends the rollback: the VM continues as it was, or as the
checkpoint.

--fast takes neither checkpoint: the present state is given up, and the VM stands for a shorter time. It is meant for tests and
fuzzers, which go back to one checkpoint many times. If a fast rollback fails half way, the VM stays paused.

The VM's peers are not rolled back: a program that talked to the VM since the checkpoint finds it in the past.

Examples:
  keyframe rollback before-upgrade
  keyframe rollback 12 --name web --json
  keyframe rollback base --fast"
)]
pub struct Rollback {
    /// A number, a tag or `latest`, in the store of the run
    checkpoint: String,
    /// Which VM, if several run
    #[arg(long, alias = "vm", value_name = "NAME")]
    name: Option<String>,
    /// Do not keep the present state
    #[arg(long)]
    fast: bool,
    /// Print JSON: times in ns
    #[arg(long)]
    json: bool,
}

impl Rollback {
    /// Asks the engine for it.
    pub fn run(&self) -> Outcome {
        let engine = run_dir::find(self.name.as_deref())?;
        let request =
            EngineRequest::Rollback { checkpoint: self.checkpoint.clone(), fast: self.fast };
        let done = match client::ask(&engine, &request, PATIENCE)? {
            EngineResponse::RolledBack(done) => done,
            other => return Err(Failure::new(format!("unexpected answer: {other:?}"))),
        };
        if self.json {
            output::json(&done)?;
        } else {
            let (vm, checkpoint, pages) = (&done.vm, done.checkpoint, done.pages);
            let paused = if done.runs { "" } else { " (paused)" };
            let stood = output::duration(done.stood_ns);
            let kept = done.before.map_or("not kept".into(), |id| format!("checkpoint {id}"));
            output::print_line(&format!(
                "VM {vm} is back at checkpoint {checkpoint}{paused}: {pages} pages written back, it stood for {stood}; what it was is {kept}"
            ))?;
        }
        Ok(if done.now.is_some() || self.fast { DONE } else { WARNED })
    }
}
