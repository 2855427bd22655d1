//! Everything before the guest's first instruction: launch, audit, attach, watchdog, run directory.

use super::Options;
use super::copying::Copying;
use super::machine::QemuMachine;
use super::sink::StoreSink;
use crate::control::TrackerKind;
use crate::failure::Failure;
use crate::rundir::{self, RunDir};
use keyframe_qemu::watchdog::Watchdog;
use keyframe_qemu::{Invocation, LaunchOptions, QemuIdentity, Severity, Vm};
use keyframe_store::{MachineMeta, Store, Writer};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// A VM that is ready to run, tracked, with a run in the store.
pub struct Parts {
    /// The VM's name.
    pub name: String,
    /// The run directory.
    pub run_dir: RunDir,
    /// The VM and its watchdog.
    pub machine: QemuMachine,
    /// The capture.
    pub copying: Copying,
    /// The store's end.
    pub sink: StoreSink,
    /// Begins further runs.
    pub writer: Writer,
    /// The machine, for those.
    pub meta: MachineMeta,
    /// True where the user's own line says `-S`.
    pub starts_paused: bool,
}

/// Brings a VM up to just before its first instruction.
pub fn launch(store: &Store, command: Vec<OsString>, options: &Options) -> Result<Parts, Failure> {
    require_kernel(options)?;
    let invocation = Invocation::parse(command).map_err(|e| Failure::qemu(&e))?;
    let identity = invocation.identity().map_err(|e| Failure::qemu(&e))?;
    let name =
        options.name.clone().unwrap_or_else(|| rundir::name_from(invocation.vm_name().unwrap_or("vm")));
    let run_dir = RunDir::claim(&name)?;
    let mut writer = store
        .lock_writer(&format!("keyframe run, VM {name}"))
        .map_err(|e| Failure::store(&e, store.path()))?;
    let starts_paused = invocation.starts_paused();
    let mut vm = Vm::launch(invocation, &LaunchOptions { run_dir: run_dir.path().into() })
        .map_err(|e| Failure::qemu(&e))?;
    let prepared = prepare(&mut vm, store, &name, &mut writer, &identity, options, run_dir.path());
    match prepared {
        Ok((copying, sink, meta, watchdog)) => Ok(Parts {
            name,
            machine: QemuMachine::new(vm, watchdog, options.pause_limit, copying.watches_discards),
            copying,
            sink,
            writer,
            meta,
            starts_paused,
            run_dir,
        }),
        Err(failure) => {
            // The guest has not run: nothing is lost by ending it.
            let _ = vm.kill();
            Err(failure)
        }
    }
}

/// Everything that can be refused.
fn prepare(
    vm: &mut Vm,
    store: &Store,
    name: &str,
    writer: &mut Writer,
    identity: &QemuIdentity,
    options: &Options,
    run_dir: &Path,
) -> Result<(Copying, StoreSink, MachineMeta, Watchdog), Failure> {
    refuse(vm)?;
    let watches_discards = vm.discards_ram().map_err(|e| Failure::qemu(&e))?;
    let copying = Copying::start(vm, options, watches_discards)?;
    let meta = machine_meta(vm, identity)?;
    let run = writer.begin_run(name, &copying.layout).map_err(|e| Failure::store(&e, store.path()))?;
    let sink = StoreSink::new(run, meta.clone(), options.fault.clone());
    if let Some(fault) = &options.fault {
        let monitor = vm.qmp().as_fd().try_clone_to_owned();
        fault.bind(vm.pid(), monitor.map_err(|e| Failure::new(format!("copy a descriptor: {e}")))?);
    }
    Ok((copying, sink, meta, spawn_watchdog(vm)?))
}

/// Refuses a kernel or a user that cannot do it, before anything is started.
fn require_kernel(options: &Options) -> Result<(), Failure> {
    if options.tracker_kind()? == TrackerKind::Compare {
        // That one needs nothing but the right to read.
        return Ok(());
    }
    let features = keyframe_kernel::features::probe();
    let missing: Vec<_> = features.items.iter().filter(|f| f.required && !f.available).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let names: Vec<_> = missing.iter().map(|f| format!("{} ({})", f.name, f.detail)).collect();
    let fix = first.fix.clone().unwrap_or_else(|| "see keyframe doctor".into());
    Err(Failure::new(format!("this machine lacks what Keyframe needs: {}", names.join("; "))).fix(fix))
}

/// Refuses a VM that cannot be checkpointed exactly, with all the reasons at once.
fn refuse(vm: &mut Vm) -> Result<(), Failure> {
    let found = vm.audit().map_err(|e| Failure::qemu(&e))?;
    for warning in found.iter().filter(|r| r.severity == Severity::Warning) {
        eprintln!("keyframe: warning: {}: {}", warning.what, warning.reason);
    }
    let refusals: Vec<_> = found.iter().filter(|r| r.severity == Severity::Refused).collect();
    let Some(first) = refusals.first() else { return Ok(()) };
    let texts: Vec<_> = refusals.iter().map(|r| format!("{}: {}", r.what, r.reason)).collect();
    let mut fixes: Vec<&str> = refusals.iter().map(|r| r.fix.as_str()).collect();
    fixes.dedup();
    let lead = if refusals.len() > 1 {
        "this VM cannot be checkpointed:\n  "
    } else {
        "this VM cannot be checkpointed: "
    };
    let _ = first;
    Err(Failure::new(format!("{lead}{}", texts.join("\n  "))).fix(fixes.join("\n       ")))
}

fn machine_meta(vm: &mut Vm, identity: &QemuIdentity) -> Result<MachineMeta, Failure> {
    let directory =
        std::env::current_dir().map_err(|e| Failure::new(format!("find the working directory: {e}")))?;
    Ok(MachineMeta {
        qemu_path: identity.path.to_string_lossy().into_owned(),
        qemu_version: identity.version.clone(),
        qemu_blake3: identity.blake3.clone(),
        machine_type: vm.machine_type().map_err(|e| Failure::qemu(&e))?,
        cpus: vm.cpus().map_err(|e| Failure::qemu(&e))?,
        working_directory: directory.to_string_lossy().into_owned(),
        user_command: vm.user_command().to_vec(),
        full_command: vm.full_command().to_vec(),
    })
}

/// Starts the watchdog: a process of its own, so that it survives whatever ends this one.
pub fn spawn_watchdog(vm: &Vm) -> Result<Watchdog, Failure> {
    let watched = vm.watched().map_err(|e| Failure::qemu(&e))?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").arg("__watchdog");
    Watchdog::spawn(&mut command, &watched).map_err(|e| Failure::qemu(&e))
}
