//! Clones of a checkpoint of a VMM other than QEMU, by the traits of its driver alone.

use super::{Branch, LOOK_EVERY};
use crate::commands::shown_vm::{self, ShownVm};
use crate::commands::{changed_files, vmms};
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::{output, rights};
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_inspect::source_of;
use keyframe_machine::{Lineage, VmmKind};
use keyframe_session::control::OnExit;
use keyframe_session::readiness::ReadyNotifier;
use keyframe_session::run_dir::{Origin, RunDir, RunKind, VmmProcess};
use keyframe_store::{LoadedCheckpoint, Store};
use keyframe_vm_disks::drive_files::DriveFiles;
use keyframe_vmm::{Ability, CloneRequest, PlanOptions, Restorer, VmExit, Vmm};
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A clone that is there.
struct Alive {
    number: u32,
    name: String,
    directory: RunDir,
    vm: Box<dyn Vmm>,
    /// The files of its drives; `None` if it can write to none.
    drives: Option<DriveFiles>,
    ended: bool,
}

/// Starts the clones of `loaded` by `restorer`, and waits for their ends.
pub fn branch(
    command: &Branch,
    store: &Store,
    loaded: &LoadedCheckpoint,
    restorer: &dyn Restorer,
    (began, ready): (Instant, ReadyNotifier),
) -> Outcome {
    let vmm = restorer.capabilities().vmm();
    refuse_options(command, vmm)?;
    changed_files::check(&loaded.meta, command.changed_as_now)?;
    let interrupted = keyframe_session::interrupt::interruption()?;
    let places = command.claim(&loaded.meta.vm)?;
    let numbers: Vec<u32> = places.iter().map(|(number, _)| *number).collect();
    let directories: Vec<PathBuf> =
        places.iter().map(|(_, directory)| directory.path().to_owned()).collect();
    let drives = |(_, directory): &(u32, RunDir)| {
        let what = (loaded.id, &loaded.meta);
        DriveFiles::make(store, what, &directory.name(), command.work_dir.as_deref())
    };
    let drives: Vec<Option<DriveFiles>> = places.iter().map(drives).collect::<Result<_, _>>()?;
    let files =
        |own: &Option<DriveFiles>| own.as_ref().map_or_else(Vec::new, |own| own.files().to_vec());
    let files: Vec<_> = drives.iter().map(files).collect();
    let lineage = Lineage { store: store.id().into(), checkpoint: loaded.id };
    let options = PlanOptions {
        binary: command.qemu.clone(),
        arguments: command.extra.clone(),
        paused: true,
        lineage: Some(lineage),
        log: None,
        taps: command.taps.tap.clone(),
        is_rehearsal: false,
        drives: Vec::new(),
    };
    let guest = Guest::choose(loaded, None)?;
    let pages = StoredPages::new(loaded, &guest);
    let started = restorer.start_clones(CloneRequest {
        source: source_of(&loaded.meta.machine, &loaded.meta.ram),
        options,
        drives: &files,
        numbers: &numbers,
        directories: &directories,
        ram: &pages,
        device_state: &loaded.device_state,
        interrupted: &interrupted,
    });
    let started = started.map_err(|error| match pages.failed() {
        Some(store) => command.store.failure(&store),
        None => error.into(),
    })?;
    rights::trace_only();
    let alive =
        |(((number, directory), drives), restored): (((u32, RunDir), Option<DriveFiles>), _)| {
            let keyframe_vmm::RestoredVm { vm, .. } = restored;
            let name = directory.name();
            Alive { number, name, directory, vm, drives, ended: false }
        };
    let mut clones: Vec<Alive> = places.into_iter().zip(drives).zip(started).map(alive).collect();
    let ran = run(command, &mut clones, store, loaded);
    if let Err(error) = ran.and_then(|()| tell(command, &clones, (vmm, ready), (began, loaded))) {
        // The user gets the first error alone.
        for clone in &mut clones {
            drop(clone.vm.end());
        }
        return Err(error);
    }
    let ended = wait(&mut clones, &interrupted);
    end(command, clones, vmm, ended)
}

/// Refuses options that only QEMU's clones have.
fn refuse_options(command: &Branch, vmm: VmmKind) -> Result<(), Failure> {
    if command.accel.is_some() {
        vmms::require(vmm, Ability::AcceleratorChange)?;
    }
    Ok(())
}

/// Lets the clones run, unless they are to stay paused.
fn run(
    command: &Branch,
    clones: &mut [Alive],
    store: &Store,
    loaded: &LoadedCheckpoint,
) -> Result<(), Failure> {
    for clone in clones {
        if !command.paused {
            clone.vm.resume()?;
        }
        let process = VmmProcess { vmm: clone.vm.kind(), pid: clone.vm.pid() };
        clone.directory.tell(Origin::new(RunKind::Clone, store, loaded.id), process)?;
    }
    Ok(())
}

fn tell(
    command: &Branch,
    clones: &[Alive],
    (vmm, ready): (VmmKind, ReadyNotifier),
    (began, loaded): (Instant, &LoadedCheckpoint),
) -> Result<(), Failure> {
    let shown = |clone: &Alive| {
        let Alive { name, directory, vm, drives, .. } = clone;
        ShownVm {
            number: Some(clone.number),
            monitor: vm.monitor_socket().map(|socket| shown_vm::text(&socket)),
            consoles: shown_vm::of_firecracker(directory.path()),
            disks: drives.as_ref().map(|own| shown_vm::text(own.directory())),
            ..ShownVm::new(name.clone(), Some(directory), loaded.id.0, vm.pid())
        }
    };
    command.show(clones.iter().map(shown).collect(), ready)?;
    if !command.quiet {
        let after = output::duration(keyframe_units::elapsed_ns(began));
        let (count, id) = (clones.len(), loaded.id);
        let state = if command.paused { "paused" } else { "running" };
        eprintln!("keyframe: {count} clones of checkpoint {id} are {state} after {after}");
        for Alive { name, directory, vm, .. } in clones {
            let (pid, directory) = (vm.pid(), directory.path().display());
            eprintln!("keyframe: clone {name}: {vmm} {pid}, API and console in {directory}");
        }
    }
    Ok(())
}

/// Waits until all have ended, or until interrupted.
fn wait(clones: &mut [Alive], interrupted: &AtomicBool) -> Outcome {
    let mut has_failed = false;
    while clones.iter().any(|clone| !clone.ended) && !interrupted.load(Ordering::Relaxed) {
        for clone in clones.iter_mut().filter(|clone| !clone.ended) {
            if let Some(exit) = clone.vm.wait_exit(Duration::ZERO)? {
                clone.ended = true;
                clone.directory.untell();
                has_failed |= !exit.success() && !is_ended_by_stop(exit);
                eprintln!("keyframe: clone {} ended with {exit}", clone.name);
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(if has_failed { FAILED } else { DONE })
}

/// True for a VM that `keyframe stop` has ended, or a user.
fn is_ended_by_stop(exit: VmExit) -> bool {
    exit.status().signal() == Some(Signal::TERM.as_raw())
}

/// Ends the clones that still run, or keeps them, as the options say.
fn end(command: &Branch, clones: Vec<Alive>, vmm: VmmKind, ended: Outcome) -> Outcome {
    let mut killed = Ok(());
    for mut clone in clones {
        let runs_on = !clone.ended && command.on_exit == OnExit::Keep;
        if runs_on {
            clone.directory.keep();
            let (name, pid) = (&clone.name, clone.vm.leave_running());
            if !command.quiet {
                eprintln!("keyframe: clone {name} runs on: {vmm} {pid}");
            }
        } else if !clone.ended {
            killed = killed.and(clone.vm.end());
        }
        let stays = |own: &DriveFiles| own.with_checkpoints().is_some();
        let kept = clone.drives.filter(|own| runs_on || command.keep_disks || stays(own));
        if let Some(place) = kept.map(DriveFiles::leave)
            && !command.quiet
        {
            eprintln!("keyframe: the drives of clone {} are in {}", clone.name, place.display());
        }
    }
    killed?;
    ended
}
