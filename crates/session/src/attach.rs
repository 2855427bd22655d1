//! Attaches to VMs that another program started: everything up to their first checkpoint. The VMs
//! run on meanwhile.

use super::SessionOptions;
use super::launch::line_disks::disk_owners;
use super::launch::{
    PreparedSession, RefusedVms, StartedVm, lock, names, open_lans, prepare, require_kernel,
};
use super::machines::Peripherals;
use super::memory_guard::GuestMemory;
use crate::error::{Error, Result};
use crate::event::{Event, disk_events};
use crate::run_dir::{self, RunDir};
use crate::teardown::Teardown;
use keyframe_disk_capture as disk_capture;
use keyframe_qemu::{AttachOptions, Monitor, Vm};
use keyframe_store::Store;
use keyframe_units::PAGE_BYTES;

/// Attaches to the QEMUs of `vms`, each given by its process id and the way to its monitor; several
/// are a group. Returns VMs that are ready for checkpoints in `store`. Errors: [`Error::Qemu`] if a
/// process is no QEMU or its monitor cannot be reached; a VM cannot be checkpointed exactly; the
/// store is in use.
pub fn attach(
    store: &Store,
    vms: &[(u32, AttachOptions)],
    options: &SessionOptions,
) -> Result<PreparedSession> {
    require_kernel(options)?;
    let mut attached = Vec::with_capacity(vms.len());
    for (pid, monitor) in vms {
        let vm = Vm::attach(*pid, monitor)?;
        if vm.ended_a_left_pause() {
            options.events.event(&Event::LeftPauseEnded);
        }
        let monitor = match &monitor.monitor {
            Monitor::Socket(path) => Some(path.clone()),
            Monitor::Libvirt { .. } => None,
        };
        attached.push((vm, monitor));
    }
    let is_group = attached.len() > 1;
    // A clone's command line has the name of its origin.
    let own = |vm: &mut Vm| {
        let named = run_dir::name_of_process(vm.pid()).or_else(|| vm.vm_name());
        named.unwrap_or_else(|| format!("vm-{}", vm.pid()))
    };
    let wanted: Vec<_> = attached.iter_mut().map(|(vm, _)| Some(own(vm))).collect();
    let (name, members) = names(&wanted, is_group, options)?;
    let run_dir = RunDir::claim(&name)?;
    let mut guests = Vec::with_capacity(vms.len());
    for (vm, _) in &mut attached {
        let ram_bytes = vm.ram_layout()?.len_pages() * PAGE_BYTES as u64;
        guests.push(GuestMemory { pid: Some(vm.pid()), ram_bytes });
    }
    let writer = lock(store, "attach", (&name, &guests), options)?;
    let mut peripherals = Peripherals { lans: open_lans(options)?, disks: None };
    let mut found = Vec::with_capacity(vms.len());
    let look = || -> Result<()> {
        for ((mut vm, monitor), name) in attached.into_iter().zip(members) {
            let identity = vm.identity()?;
            let directory = vm.working_directory()?;
            let runs = vm.qmp().status()?.is_running();
            found.push(StartedVm { name, vm, identity, directory, monitor, runs });
        }
        let place = (store, &*name, run_dir.path());
        peripherals.disks = disk_capture::method::own(
            place,
            (&mut disk_owners(&mut found), is_group),
            options.disk,
            &options.leave_out,
            &disk_events(&options.events),
        )?;
        Ok(())
    };
    // The VMs are dropped, which detaches them; they run on.
    if let Err(error) = look() {
        return Err(release(peripherals, error));
    }
    prepare(store, writer, run_dir, (name, is_group), (found, peripherals), options).map_err(
        |refused| {
            let RefusedVms { error, mut found, mut peripherals } = *refused;
            if let Some(disks) = peripherals.disks.take() {
                disks.undo(&mut found.iter_mut().map(|one| &mut one.vm).collect::<Vec<_>>());
            }
            release(peripherals, error)
        },
    )
}

/// Releases the peripherals of VMs that run on. Returns `error`, together with the error of the
/// release if that fails.
fn release(peripherals: Peripherals, error: Error) -> Error {
    let mut teardown = Teardown::after(error);
    teardown.step(peripherals.release(true));
    teardown.into_error()
}
