//! A checkpoint of a VMM other than QEMU comes to life, by the traits of its driver alone.

use super::{Accel, Place, Restore, RestoredRam};
use crate::commands::shown_vm::{self, ShownVm};
use crate::commands::vmms;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::{output, rights};
use keyframe_inspect::source_of;
use keyframe_machine::Lineage;
use keyframe_store::{Meta, Store};
use keyframe_units::CheckpointId;
use keyframe_vm_disks::drive_files::DriveFiles;
use keyframe_vmm::{
    Ability, PlanOptions, RestoreRam, RestoredVm, Restorer, SharedRamSource, VmmErrorKind,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time between two looks at the VM: has it ended, and does it still wait for this process?
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A checkpoint, and where its VM is found.
pub struct Kept<'a> {
    /// Its number.
    pub id: CheckpointId,
    /// What it tells about itself.
    pub meta: &'a Meta,
    /// The state of its devices.
    pub device_state: &'a [u8],
    /// Its RAM.
    pub ram: &'a RestoredRam,
    /// How the restored VM names it.
    pub lineage: Lineage,
    /// Where the VM is found.
    pub place: &'a Place,
    /// When the command began.
    pub began: Instant,
}

/// Restores `kept` of `store` by `restorer`, and waits for the VM's end.
pub fn restore(
    command: &Restore,
    store: &Store,
    restorer: &dyn Restorer,
    kept: Kept<'_>,
    interrupted: &AtomicBool,
) -> Outcome {
    let vmm = restorer.capabilities().vmm();
    refuse_options(command, restorer)?;
    let work_dir = command.work_dir.as_deref();
    let drives = DriveFiles::make(store, (kept.id, kept.meta), &kept.meta.vm, work_dir)?;
    let options = PlanOptions {
        binary: command.qemu.clone(),
        arguments: command.extra.clone(),
        paused: command.paused,
        lineage: Some(kept.lineage),
        log: None,
        taps: command.taps.tap.clone(),
        is_rehearsal: false,
        drives: drives.as_ref().map_or_else(Vec::new, |drives| drives.files().to_vec()),
    };
    let plan = restorer.plan(source_of(&kept.meta.machine, &kept.meta.ram), options)?;
    for note in plan.notes() {
        eprintln!("keyframe: note: {note}");
    }
    let before_ns = keyframe_units::elapsed_ns(kept.began);
    let source = &kept.ram.source;
    let ram = if command.lazy {
        RestoreRam::Lazy(Arc::clone(source) as SharedRamSource)
    } else {
        RestoreRam::Eager(&**source)
    };
    let mut restored =
        plan.start(ram, kept.device_state).map_err(|error| match source.failed() {
            Some(store) => command.store.failure(&store),
            None => error.into(),
        })?;
    rights::trace_only();
    kept.ram.bar.finish_and_clear();
    let pid = restored.vm.pid();
    let shown = ShownVm {
        monitor: restored.vm.monitor_socket().as_deref().map(shown_vm::text),
        disks: drives.as_ref().map(|drives| shown_vm::text(drives.directory())),
        ..kept.place.shown(kept.id, pid)
    };
    if let Err(failure) = kept.place.tell(command, kept.id, vmm, &shown.paused(command.paused)) {
        // The user gets the first error.
        let _ = restored.vm.end();
        return Err(failure);
    }
    command.say(|| {
        let state = if command.paused { "paused" } else { "running" };
        let after = output::duration(before_ns + restored.ready_ns);
        let filled = restored.filled_ns.map(output::duration);
        let filled =
            filled.map(|filled| format!(", its RAM filled in {filled}")).unwrap_or_default();
        let monitor = restored.vm.monitor_socket();
        let monitor = monitor.map(|path| format!(", API {}", path.display())).unwrap_or_default();
        let (id, name) = (kept.id, &kept.meta.vm);
        format!(
            "checkpoint {id} of VM {name} is {state} after {after}{filled} ({vmm} {pid}{monitor})"
        )
    });
    let ended = wait(command, &mut restored, interrupted);
    if ended.is_err() {
        let _ = restored.vm.end();
    }
    if let Some(place) = drives.as_ref().and_then(DriveFiles::with_checkpoints) {
        command.say(|| {
            format!("the VM's drives stay in {}: checkpoints were taken of it", place.display())
        });
    } else if let Some(place) = drives.filter(|_| command.keep_disks).map(DriveFiles::leave) {
        command.say(|| format!("the VM's drives are in {}", place.display()));
    }
    ended
}

/// Refuses options that only QEMU's restore has.
fn refuse_options(command: &Restore, restorer: &dyn Restorer) -> Result<(), Failure> {
    let capabilities = restorer.capabilities();
    let needs = [
        (
            command.accel.is_some_and(|accel| matches!(accel, Accel::Tcg)),
            Ability::AcceleratorChange,
        ),
        (command.lazy, Ability::LazyRestore),
        (!command.lan.is_empty(), Ability::Groups),
        (command.left_out_as_now, Ability::LeftOutDisks),
    ];
    for (_, ability) in needs.into_iter().filter(|(is_needed, _)| *is_needed) {
        vmms::require(capabilities.vmm(), ability)?;
    }
    Ok(())
}

/// Waits until the VM has ended, or until interrupted, which ends it.
fn wait(command: &Restore, restored: &mut RestoredVm, interrupted: &AtomicBool) -> Outcome {
    let mut is_told = false;
    loop {
        if let Some(loading) = &mut restored.loading {
            loading.settle()?;
            let residency = loading.residency();
            if let Some(resident_ns) =
                residency.resident_ns.filter(|_| residency.settled && !is_told)
            {
                is_told = true;
                let (after, waited) = (output::duration(resident_ns), residency.served_pages);
                command.say(|| {
                    format!("all of its RAM is there after {after}; it waited for {waited} pages")
                });
            }
        }
        let exit = match restored.vm.wait_exit(LOOK_EVERY) {
            // A VM that has ended cannot be asked.
            Err(error) if error.kind() == VmmErrorKind::MonitorLost => None,
            exit => exit?,
        };
        if let Some(exit) = exit {
            if !exit.success() {
                eprintln!("keyframe: {} ended with {exit}", restored.vm.kind());
                return Ok(FAILED);
            }
            return Ok(DONE);
        }
        if interrupted.load(Ordering::Relaxed) {
            restored.vm.end()?;
            return Ok(DONE);
        }
    }
}
