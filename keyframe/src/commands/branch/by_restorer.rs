//! Clones of a checkpoint of a VMM other than QEMU, by the traits of its driver alone.

use super::{Branch, LOOK_EVERY, Shown};
use crate::commands::{changed_files, vmms};
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::{output, rights};
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_inspect::source_of;
use keyframe_machine::{Lineage, VmmKind};
use keyframe_session::control::OnExit;
use keyframe_session::run_dir::{Origin, RunDir, RunKind, VmmProcess, numbered_name};
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
    began: Instant,
) -> Outcome {
    let vmm = restorer.capabilities().vmm();
    refuse_options(command, vmm)?;
    changed_files::check(&loaded.meta, command.changed_as_now)?;
    let interrupted = keyframe_session::interrupt::interruption()?;
    let places = places(command, &loaded.meta.vm)?;
    let directories: Vec<PathBuf> =
        places.iter().map(|(_, _, directory)| directory.path().to_owned()).collect();
    let drives = |(_, name, _): &(u32, String, RunDir)| {
        let what = (loaded.id, &loaded.meta);
        DriveFiles::make(store, what, name, command.work_dir.as_deref())
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
        |(((number, name, directory), drives), restored): (((u32, String, RunDir), _), _)| {
            let keyframe_vmm::RestoredVm { vm, .. } = restored;
            Alive { number, name, directory, vm, drives, ended: false }
        };
    let mut clones: Vec<Alive> = places.into_iter().zip(drives).zip(started).map(alive).collect();
    let ran = run(command, &mut clones, store, loaded);
    if let Err(error) = ran.and_then(|()| tell(command, &clones, vmm, (began, loaded))) {
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

fn places(command: &Branch, vm: &str) -> Result<Vec<(u32, String, RunDir)>, Failure> {
    let place = |number| {
        let name = match &command.name {
            Some(prefix) => format!("{prefix}-{number}"),
            None => numbered_name(vm, number),
        };
        let directory = RunDir::claim_clone(&name)?;
        Ok((number, name, directory))
    };
    (1..=command.count).map(place).collect()
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
    vmm: VmmKind,
    (began, loaded): (Instant, &LoadedCheckpoint),
) -> Result<(), Failure> {
    let state = if command.paused { "paused" } else { "running" };
    let shown = |clone: &Alive| Shown {
        name: clone.name.clone(),
        number: clone.number,
        qemu_pid: clone.vm.pid(),
        monitor: clone.vm.monitor_socket().unwrap_or_default().display().to_string(),
        directory: clone.directory.path().display().to_string(),
        state,
    };
    if command.json {
        output::json(&clones.iter().map(shown).collect::<Vec<_>>())?;
    }
    if !command.quiet {
        let after = output::duration(keyframe_units::elapsed_ns(began));
        let (count, id) = (clones.len(), loaded.id);
        eprintln!("keyframe: {count} clones of checkpoint {id} are {state} after {after}");
        for Shown { name, qemu_pid, directory, .. } in clones.iter().map(shown) {
            eprintln!("keyframe: clone {name}: {vmm} {qemu_pid}, API and console in {directory}");
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
