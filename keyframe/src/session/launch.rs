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
use std::process::Command;

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
    /// Whether the guest is to run, or runs already.
    pub runs: bool,
}

/// Brings a VM up to just before its first instruction.
pub fn launch(store: &Store, command: Vec<OsString>, options: &Options) -> Result<Parts, Failure> {
    require_kernel(options)?;
    let directory =
        std::env::current_dir().map_err(|e| Failure::new(format!("find the working directory: {e}")))?;
    let invocation = Invocation::parse(command).map_err(|e| Failure::qemu(&e))?;
    let identity = invocation.identity().map_err(|e| Failure::qemu(&e))?;
    let name =
        options.name.clone().unwrap_or_else(|| rundir::name_from(invocation.vm_name().unwrap_or("vm")));
    let run_dir = RunDir::claim(&name)?;
    let mut writer = store
        .lock_writer(&format!("keyframe run, VM {name}"))
        .map_err(|e| Failure::store(&e, store.path()))?;
    let runs = !invocation.starts_paused();
    let mut vm = Vm::launch(invocation, &LaunchOptions { run_dir: run_dir.path().into() })
        .map_err(|e| Failure::qemu(&e))?;
    let mut lease = Lease { store, name: &name, writer: &mut writer };
    match prepare(&mut vm, &mut lease, &identity, &directory, options) {
        Ok((copying, sink, meta, watchdog)) => Ok(Parts {
            name,
            machine: QemuMachine::new(vm, watchdog, options.pause_limit, copying.watches_discards),
            copying,
            sink,
            writer,
            meta,
            runs,
            run_dir,
        }),
        Err(failure) => {
            // The guest has not run: nothing is lost by ending it.
            let _ = vm.kill();
            Err(failure)
        }
    }
}

/// A place for the checkpoints of a VM.
pub struct Lease<'a> {
    /// The store.
    pub store: &'a Store,
    /// The VM's name.
    pub name: &'a str,
    /// The right to write.
    pub writer: &'a mut Writer,
}

/// Everything that can be refused of a VM that is there: audit, attach, the run in the store, the watchdog.
pub fn prepare(
    vm: &mut Vm,
    lease: &mut Lease<'_>,
    identity: &QemuIdentity,
    directory: &Path,
    options: &Options,
) -> Result<(Copying, StoreSink, MachineMeta, Watchdog), Failure> {
    refuse(vm)?;
    let watches_discards = vm.discards_ram().map_err(|e| Failure::qemu(&e))?;
    let copying = Copying::start(vm, options, watches_discards)?;
    let meta = machine_meta(vm, identity, directory)?;
    let run = lease.writer.begin_run(lease.name, &copying.layout);
    let run = run.map_err(|e| Failure::store(&e, lease.store.path()))?;
    let sink = StoreSink::new(run, meta.clone(), options.fault.clone());
    if let Some(fault) = &options.fault {
        let monitor = vm.qmp().as_fd().try_clone_to_owned();
        fault.bind(vm.pid(), monitor.map_err(|e| Failure::new(format!("copy a descriptor: {e}")))?);
    }
    Ok((copying, sink, meta, spawn_watchdog(vm)?))
}

/// Refuses a kernel or a user that cannot do it, before anything is started.
pub fn require_kernel(options: &Options) -> Result<(), Failure> {
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
pub fn refuse(vm: &mut Vm) -> Result<(), Failure> {
    let found = vm.audit().map_err(|e| Failure::qemu(&e))?;
    for warning in found.iter().filter(|r| r.severity == Severity::Warning) {
        eprintln!("keyframe: warning: {}: {}", warning.what, warning.reason);
    }
    let refusals: Vec<_> = found.iter().filter(|r| r.severity == Severity::Refused).collect();
    if refusals.is_empty() {
        return Ok(());
    }
    let texts: Vec<_> = refusals.iter().map(|r| format!("{}: {}", r.what, r.reason)).collect();
    let mut fixes: Vec<&str> = refusals.iter().map(|r| r.fix.as_str()).collect();
    fixes.dedup();
    let lead = if refusals.len() > 1 {
        "this VM cannot be checkpointed:\n  "
    } else {
        "this VM cannot be checkpointed: "
    };
    Err(Failure::new(format!("{lead}{}", texts.join("\n  "))).fix(fixes.join("\n       ")))
}

/// The machine as it is now, with what was plugged in since its line was written.
pub fn machine_meta(vm: &mut Vm, identity: &QemuIdentity, directory: &Path) -> Result<MachineMeta, Failure> {
    let (user_command, full_command) = lines_now(vm)?;
    Ok(MachineMeta {
        qemu_path: identity.path.to_string_lossy().into_owned(),
        qemu_version: identity.version.clone(),
        qemu_blake3: identity.blake3.clone(),
        machine_type: vm.machine_type().map_err(|e| Failure::qemu(&e))?,
        cpus: vm.cpus().map_err(|e| Failure::qemu(&e))?,
        working_directory: directory.to_string_lossy().into_owned(),
        user_command,
        full_command,
        guest_map: Some(vm.guest_map().map_err(|e| Failure::qemu(&e))?),
    })
}

/// The user's line and the whole one, as they would have to read to make the machine as it is now.
pub fn lines_now(vm: &mut Vm) -> Result<(Vec<String>, Vec<String>), Failure> {
    let plugged = vm.plugged_memory().map_err(|e| Failure::qemu(&e))?;
    let with_plugged = |line: &[String]| line.iter().chain(&plugged).cloned().collect();
    Ok((with_plugged(vm.user_command()), with_plugged(vm.full_command())))
}

/// Starts the watchdog: a process of its own, so that it survives whatever ends this one.
pub fn spawn_watchdog(vm: &Vm) -> Result<Watchdog, Failure> {
    let watched = vm.watched().map_err(|e| Failure::qemu(&e))?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").arg("__watchdog");
    Watchdog::spawn(&mut command, &watched).map_err(|e| Failure::qemu(&e))
}
