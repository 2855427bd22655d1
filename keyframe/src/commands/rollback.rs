//! `keyframe rollback`: a running VM back to a checkpoint.

use super::running_vm::RunningVm;
use crate::failure::{DONE, Failure, Outcome, WARNED};
use crate::output;
use keyframe_session::control::{EngineRequest, EngineResponse, RolledBack, client};
use keyframe_session::run_dir;
use std::time::{Duration, Instant};

/// The longest time of a rollback. The engine reports a failure sooner.
const PATIENCE: Duration = Duration::from_hours(1);

/// The longest time until checkpoints go on with the process that has taken a VM's place.
const SESSION_WAIT: Duration = Duration::from_secs(15);
/// The time between two questions whether they do, and the longest one for an answer.
const ASK_EVERY: Duration = Duration::from_millis(20);
const ANSWER_WAIT: Duration = Duration::from_secs(2);

/// Put a running VM back to a checkpoint
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command puts RAM, processors, devices and disks of a VM under `keyframe run` or `attach` back to the checkpoint, in the
same QEMU, with the same consoles, monitors and networks. It first takes a checkpoint of the present state, so that nothing is
lost, and afterwards one of the state that it has put back. `keyframe list --tree` shows both branches. If the rollback fails,
the VM continues as it was. If Keyframe is killed meanwhile, its watchdog ends the rollback: the VM continues as it was, or as the
checkpoint.

--fast takes neither checkpoint: the present state is given up, and the VM stands for a shorter time. It is meant for tests and
fuzzers, which go back to one checkpoint many times. If a fast rollback fails half way, the VM stays paused.

Firecracker cannot go back in the same process. Another Firecracker takes its place, with the same API socket, standard streams,
network namespace, control group, taps and paths of drives. Its process id is new, and an open connection to the API ends. What
was set through the API for logs and metrics is gone. If the other Firecracker does not start, the VM is started again as it was.
With --fast that is not possible. The message then names the checkpoint to restore.

The VM's peers are not rolled back: a program that talked to the VM since the checkpoint finds it in the past.

Examples:
  keyframe rollback before-upgrade
  keyframe rollback 12 --name web --json
  keyframe rollback base --fast"
)]
pub struct Rollback {
    /// A number, a tag or `latest`, in the store of the run
    checkpoint: String,
    #[command(flatten)]
    vm: RunningVm,
    /// Do not keep the present state
    #[arg(long)]
    fast: bool,
    /// Print JSON: times in ns
    #[arg(long)]
    json: bool,
}

impl Rollback {
    /// Asks the engine for it, and waits until checkpoints go on.
    pub fn run(&self) -> Outcome {
        let engine = self.vm.engine()?;
        let request =
            EngineRequest::Rollback { checkpoint: self.checkpoint.clone(), fast: self.fast };
        let done = match client::ask(&engine, &request, PATIENCE)? {
            EngineResponse::RolledBack(done) => done,
            other => return Err(Failure::new(format!("unexpected answer: {other:?}"))),
        };
        let goes_on = done.successor_pid.is_none_or(|pid| goes_on(&done.vm, pid));
        if self.json {
            output::json(&done)?;
        } else {
            let (vm, checkpoint, pages) = (&done.vm, done.checkpoint, done.pages);
            let paused = if done.runs { "" } else { " (paused)" };
            let stood = output::duration(done.stood_ns);
            let kept = done.before.map_or("not kept".into(), |id| format!("checkpoint {id}"));
            let how = match done.successor_pid {
                None => format!("{pages} pages written back"),
                Some(pid) => format!("process {pid} has taken its place"),
            };
            output::print_line(&format!(
                "VM {vm} is back at checkpoint {checkpoint}{paused}: {how}, it stood for {stood}; what it was is {kept}"
            ))?;
        }
        if !goes_on {
            let vm = &done.vm;
            eprintln!(
                "keyframe: warning: no checkpoints are taken of VM {vm} after its rollback; the command that took them says why"
            );
        }
        Ok(if goes_on && has_what_it_should(&done, self.fast) { DONE } else { WARNED })
    }
}

/// Whether checkpoints are there as the user asked for. The session of a successor takes the one after
/// the rollback when it is due.
fn has_what_it_should(done: &RolledBack, fast: bool) -> bool {
    fast || done.now.is_some() || done.successor_pid.is_some()
}

/// Waits until the engine of VM `name` takes checkpoints of process `pid`. Returns false if it does not.
fn goes_on(name: &str, pid: u32) -> bool {
    let until = Instant::now() + SESSION_WAIT;
    while Instant::now() < until {
        let status = run_dir::find(Some(name))
            .map_err(Failure::from)
            .and_then(|engine| Ok(client::ask(&engine, &EngineRequest::Status, ANSWER_WAIT)?));
        if matches!(status, Ok(EngineResponse::Status(status)) if status.qemu_pid == pid) {
            return true;
        }
        std::thread::sleep(ASK_EVERY);
    }
    false
}
