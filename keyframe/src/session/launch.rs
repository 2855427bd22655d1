//! Everything before the guest's first instruction: launch, audit, attach, watchdog, run directory.

use super::Options;
use super::machine::QemuMachine;
use super::sink::StoreSink;
use crate::failure::{Failure, chain};
use crate::rundir::{self, RunDir};
use keyframe_capture::ram::{GuestRam, ProcessPages, WriteProtectTracker};
use keyframe_capture::{Cycle, Limits};
use keyframe_kernel::Process;
use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::track::WriteTracker;
use keyframe_qemu::watchdog::Watchdog;
use keyframe_qemu::{Invocation, LaunchOptions, QemuIdentity, Severity, Vm};
use keyframe_store::{MachineMeta, Store};
use keyframe_units::{PAGE_BYTES, RamLayout};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// A VM that is ready to run, tracked, with a run in the store.
pub struct Parts {
    /// The VM's name.
    pub name: String,
    /// The run directory.
    pub run_dir: RunDir,
    /// The VM and its watchdog.
    pub machine: QemuMachine,
    /// The capture.
    pub cycle: Cycle<WriteProtectTracker>,
    /// The store's end.
    pub sink: StoreSink,
    /// True where the user's own line says `-S`.
    pub starts_paused: bool,
}

/// Brings a VM up to just before its first instruction.
pub fn launch(store: &Store, command: Vec<OsString>, options: &Options) -> Result<Parts, Failure> {
    require_kernel()?;
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
    let prepared = prepare(&mut vm, options);
    let Prepared { cycle, layout, watches_discards } = match prepared {
        Ok(prepared) => prepared,
        Err(failure) => {
            // The guest has not run: nothing is lost by ending it.
            let _ = vm.kill();
            return Err(failure);
        }
    };
    let mut finish = |vm: &mut Vm| -> Result<(StoreSink, Watchdog), Failure> {
        let machine = machine_meta(vm, &identity)?;
        let run = writer.begin_run(&name, &layout).map_err(|e| Failure::store(&e, store.path()))?;
        Ok((StoreSink::new(run, machine), spawn_watchdog(run_dir.path())?))
    };
    match finish(&mut vm) {
        Ok((sink, watchdog)) => Ok(Parts {
            name,
            machine: QemuMachine::new(vm, watchdog, options.pause_limit, watches_discards),
            cycle,
            sink,
            starts_paused,
            run_dir,
        }),
        Err(failure) => {
            let _ = vm.kill();
            Err(failure)
        }
    }
}

/// Refuses a kernel or a user that cannot do it, before anything is started.
fn require_kernel() -> Result<(), Failure> {
    let features = keyframe_kernel::features::probe();
    let missing: Vec<_> = features.items.iter().filter(|f| f.required && !f.available).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let names: Vec<_> = missing.iter().map(|f| format!("{} ({})", f.name, f.detail)).collect();
    let fix = first.fix.clone().unwrap_or_else(|| "see keyframe doctor".into());
    Err(Failure::new(format!("this machine lacks what Keyframe needs: {}", names.join("; "))).fix(fix))
}

/// A VM that is tracked.
struct Prepared {
    cycle: Cycle<WriteProtectTracker>,
    layout: RamLayout,
    watches_discards: bool,
}

fn prepare(vm: &mut Vm, options: &Options) -> Result<Prepared, Failure> {
    refuse(vm)?;
    let watches_discards = vm.discards_ram().map_err(|e| Failure::qemu(&e))?;
    let blocks = vm.ram_blocks().map_err(|e| Failure::qemu(&e))?;
    let hosts = blocks.iter().map(|b| b.host).collect();
    let layout = RamLayout::new(blocks.into_iter().map(|b| b.block).collect())
        .map_err(|e| Failure::new(format!("QEMU's list of RAM blocks: {e}")))?;
    let ram = Arc::new(GuestRam::new(layout.clone(), hosts));
    let process = Process::open(vm.pid()).map_err(|e| Failure::kernel(&e))?;
    let reader = Arc::new(GuestReader::new(&process, &ram.ranges()).map_err(|e| Failure::kernel(&e))?);
    let attached = inject_userfaultfd(&process).map_err(|e| Failure::kernel(&e))?;
    let mut tracker = WriteTracker::new(&process, attached.uffd).map_err(|e| Failure::kernel(&e))?;
    tracker.set_watch_discards(watches_discards);
    let tracker = WriteProtectTracker::new(Arc::clone(&ram), Arc::clone(&reader), tracker)
        .map_err(|e| Failure::kernel(&e))?;
    let pages = Arc::new(ProcessPages::new(ram, reader));
    let limits = Limits { staging_pages: staging_pages(options, &layout) };
    let cycle = Cycle::new(layout.clone(), tracker, pages, limits).map_err(|e| Failure::new(chain(&e)))?;
    Ok(Prepared { cycle, layout, watches_discards })
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

/// Staging memory: as large as RAM where that is at most a quarter of what is free.
fn staging_pages(options: &Options, layout: &RamLayout) -> u64 {
    const MIB_PAGES: u64 = (1 << 20) / PAGE_BYTES as u64;
    match options.staging_mib {
        Some(mib) => mib.saturating_mul(MIB_PAGES),
        None => layout.len_pages().min(available_memory_bytes() / 4 / PAGE_BYTES as u64).max(64 * MIB_PAGES),
    }
}

fn available_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|l| l.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(1 << 30, |kib| kib.saturating_mul(1024))
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
fn spawn_watchdog(run_dir: &Path) -> Result<Watchdog, Failure> {
    let fail = |e: std::io::Error| Failure::new(format!("start the watchdog: {e}"));
    let mut child = Command::new("/proc/self/exe")
        .arg0("keyframe")
        .arg("__watchdog")
        .arg(run_dir.join("watchdog.sock"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(fail)?;
    match (child.stdin.take(), child.stdout.take()) {
        (Some(stdin), Some(stdout)) => Watchdog::new(child, stdin, stdout).map_err(|e| Failure::qemu(&e)),
        _ => Err(Failure::new("start the watchdog: no pipes to it")),
    }
}
