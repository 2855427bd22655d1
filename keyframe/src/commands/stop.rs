//! `keyframe stop`: ends a running engine.

use super::running_vm::RunningVm;
use crate::failure::{DONE, Failure, FailureKind, Outcome};
use crate::output;
use keyframe_machine::VmmKind;
use keyframe_qemu::Qmp;
use keyframe_session::control::{EngineRequest, EngineResponse, OnExit, client};
use keyframe_session::run_dir;
use keyframe_session::run_dir::{About, Orphan, RunKind};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A monitor answers within this.
const ANSWER: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// End a running VM's engine, after what is in progress is sealed; or a VM that was restored,
/// branched or replayed
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command returns when the engine has stored the checkpoints in progress and has ended. With --no-wait it returns at once.

Without --name it ends the one VM that has an engine. If no VM has one, it ends the one that was restored, branched or replayed
(goto). --store leaves only the VMs of that store to choose from.

A clone or a restored VM that is under keyframe attach may have the name of its engine. The command then ends the engine, and says
that the VM runs on. With --on-exit kill it ends both.

Examples:
  keyframe stop
  keyframe stop --name web --on-exit keep
  keyframe stop --name web-2
  keyframe stop --name web-2 --on-exit kill   # a clone, and the engine that has attached to it
  keyframe stop --store S"
)]
pub struct Stop {
    #[command(flatten)]
    vm: RunningVm,
    /// What to do with the VM, in place of the choice made at `run`. For a clone or restored VM that is
    /// attached: `kill` ends the VM and its engine
    #[arg(long, value_enum)]
    on_exit: Option<OnExit>,
    /// Do not wait for the end
    #[arg(long)]
    no_wait: bool,
}

impl Stop {
    /// Asks the engine to end.
    pub fn run(&self) -> Outcome {
        let mut others = run_dir::without_engine()?;
        others.retain(|(_, about)| self.vm.is_of_store(&about.store));
        let engine = match &self.vm.name {
            Some(name) => {
                let other = others.iter().find(|(_, about)| about.vm == *name);
                match (self.vm.engine(), other) {
                    (Err(_), Some((place, about))) => return self.end(place, about),
                    (Err(none), None) => {
                        // The store of a VM whose engine died is unknown.
                        let orphans = run_dir::orphans()?;
                        let orphan = orphans
                            .iter()
                            .find(|orphan| self.vm.store.is_none() && orphan.vm == *name);
                        return orphan.map_or(Err(none), |orphan| self.end_orphan(orphan));
                    }
                    (Ok(engine), Some((place, about))) => {
                        return self.stop_both(&engine, place, about);
                    }
                    (found, None) => found?,
                }
            }
            None if self.vm.store.is_some() => match (self.vm.engine(), others.as_slice()) {
                (Err(_), [(place, about)]) => return self.end(place, about),
                (Err(_), [_, _, ..]) => return Err(several(&others)),
                (found, _) => found?,
            },
            None => match (run_dir::all()?.len(), others.as_slice()) {
                (0, [(place, about)]) => return self.end(place, about),
                (0, [_, _, ..]) => return Err(several(&others)),
                (0, []) => match run_dir::orphans()?.as_slice() {
                    [orphan] => return self.end_orphan(orphan),
                    _ => self.vm.engine()?,
                },
                // Without a name, one that has an engine is meant.
                _ => self.vm.engine()?,
            },
        };
        ask_to_stop(&engine, self.on_exit)?;
        self.wait(|| run_dir::lives(&engine))
    }

    /// Ends an engine that has the name of a VM without one. With `--on-exit kill` it ends that VM,
    /// too, if it is the engine's.
    fn stop_both(&self, engine: &Path, place: &Path, about: &About) -> Outcome {
        let status = client::ask(engine, &EngineRequest::Status, ANSWER)?;
        let is_its_own =
            matches!(status, EngineResponse::Status(s) if s.qemu_pid == about.qemu_pid);
        if self.on_exit == Some(OnExit::Kill) {
            let About { vm, vmm, qemu_pid, .. } = about;
            if !is_its_own {
                return Err(Failure::new(format!(
                    "two VMs are named {vm}: that of an engine, and {vmm} {qemu_pid}"
                ))
                .of_kind(FailureKind::SeveralVms)
                .fix("end the engine alone, without --on-exit; then the name is that of one VM"));
            }
            if self.no_wait {
                return Err(Failure::usage(
                    "a VM ends after its engine, so --no-wait cannot end both",
                )
                .fix("leave --no-wait out"));
            }
            ask_to_stop(engine, None)?;
            // The engine seals what is in progress, for which it needs the VM.
            await_end(|| run_dir::lives(engine));
            return self.end(place, about);
        }
        ask_to_stop(engine, self.on_exit)?;
        let code = self.wait(|| run_dir::lives(engine))?;
        let About { vm, vmm, qemu_pid, .. } = about;
        let what = if about.kind == RunKind::Clone { "a clone" } else { "a VM" };
        let both = if is_its_own { ", or both at once with --on-exit kill" } else { "" };
        eprintln!(
            "keyframe: that was the engine named {vm}; {what} of that name ({vmm} {qemu_pid}) runs on: \
             end it with the same command{both}"
        );
        Ok(code)
    }

    /// Ends a VM without an engine: a clone by its monitor, because its command may run other
    /// clones; a restored or replayed VM by its command.
    fn end(&self, place: &Path, about: &About) -> Outcome {
        if self.on_exit == Some(OnExit::Keep) {
            return Err(Failure::new(format!(
                "VM {} has no engine: it ends, or it runs on",
                about.vm
            ))
            .fix("leave --on-exit out"));
        }
        match about.kind {
            RunKind::Clone => end_clone(place, about)?,
            RunKind::Restored | RunKind::Goto => run_dir::end_with(place, about)?,
        }
        self.wait(|| place.join(run_dir::ABOUT).exists() && run_dir::lives(place))
    }

    /// A VM whose engine has died, or has left it.
    fn end_orphan(&self, orphan: &Orphan) -> Outcome {
        if orphan.vmm == VmmKind::Qemu {
            let quit = Qmp::connect_running(&orphan.qmp, ANSWER).and_then(|mut qmp| qmp.quit());
            quit.map_err(|e| Failure::qemu(&e))?;
        } else {
            run_dir::end_vmm(&orphan.qmp, &orphan.vm, orphan.qemu_pid)?;
        }
        self.wait(|| UnixStream::connect(&orphan.qmp).is_ok())
    }

    /// Waits until the engine has ended, and says so: all checkpoints in progress are sealed then, and
    /// the name is free.
    fn wait(&self, lives: impl Fn() -> bool) -> Outcome {
        if self.no_wait {
            output::print_line("stopping")?;
            return Ok(DONE);
        }
        await_end(lives);
        output::print_line("stopped")?;
        Ok(DONE)
    }
}

/// Waits as long as `lives` says so.
fn await_end(lives: impl Fn() -> bool) {
    while lives() {
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Asks the engine of the directory `engine` to end.
fn ask_to_stop(engine: &Path, on_exit: Option<OnExit>) -> Result<(), Failure> {
    client::ask(engine, &EngineRequest::Stop { on_exit }, Duration::from_secs(600))?;
    Ok(())
}

/// Ends a clone by the socket in `place`, its directory.
fn end_clone(place: &Path, about: &About) -> Result<(), Failure> {
    let monitor = run_dir::monitor_in(place, about.vmm);
    if about.vmm == VmmKind::Qemu {
        let quit =
            Qmp::connect_running(&monitor, ANSWER).and_then(|mut qmp| qmp.execute("quit", None));
        return quit.map(drop).map_err(|e| Failure::qemu(&e));
    }
    Ok(run_dir::end_vmm(&monitor, &about.vm, about.qemu_pid)?)
}

/// Makes the failure of a command without a name while several VMs run.
fn several(others: &[(PathBuf, About)]) -> Failure {
    let names = others.iter().map(|(_, about)| about.vm.as_str()).collect::<Vec<_>>().join(", ");
    Failure::new("several VMs run")
        .of_kind(FailureKind::SeveralVms)
        .fix(format!("choose one with --name: {names}"))
}
