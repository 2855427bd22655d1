//! Takes hold of VMs that somebody else started: everything up to their first checkpoint. They run
//! on meanwhile.

use super::Options;
use super::launch::{Found, Parts, Refused, lock, names, open_lans, prepare, require_kernel};
use super::machines::Beside;
use super::storage;
use crate::error::Result;
use crate::rundir::RunDir;
use keyframe_qemu::{AttachOptions, Monitor, Vm};
use keyframe_store::Store;

/// Attaches to the QEMUs with those process ids, each with the way to its monitor; several are a
/// group.
pub fn attach(store: &Store, vms: &[(u32, AttachOptions)], options: &Options) -> Result<Parts> {
    require_kernel(options)?;
    let mut attached = Vec::with_capacity(vms.len());
    for (pid, monitor) in vms {
        let vm = Vm::attach(*pid, monitor)?;
        let monitor = match &monitor.monitor {
            Monitor::Socket(path) => Some(path.clone()),
            Monitor::Libvirt { .. } => None,
        };
        attached.push((vm, monitor));
    }
    let is_group = attached.len() > 1;
    let own = |vm: &mut Vm| vm.vm_name().unwrap_or_else(|| format!("vm-{}", vm.pid()));
    let wanted: Vec<_> = attached.iter_mut().map(|(vm, _)| Some(own(vm))).collect();
    let (name, members) = names(&wanted, is_group, options)?;
    let run_dir = RunDir::claim(&name)?;
    let writer = lock(store, "attach", &name, options)?;
    let lans = open_lans(options)?;
    let mut found = Vec::with_capacity(vms.len());
    for ((mut vm, monitor), name) in attached.into_iter().zip(members) {
        let identity = vm.identity()?;
        let directory = vm.working_directory()?;
        let runs = vm.qmp().status()?.is_running();
        found.push(Found { name, vm, identity, directory, monitor, runs });
    }
    let place = (store, &*name, run_dir.path());
    let disks = storage::choose::own(
        place,
        (&mut found, is_group),
        options.disk,
        &options.leave_out,
        &options.events,
    )?;
    let beside = Beside { lans, disks };
    // Where it is refused, the VMs are dropped, which is to detach.
    prepare(store, writer, run_dir, (name, is_group), (found, beside), options).map_err(|refused| {
        let Refused { error, mut found, beside } = *refused;
        if let Some(disks) = beside.disks {
            disks.undo(&mut found.iter_mut().map(|one| &mut one.vm).collect::<Vec<_>>());
        }
        error
    })
}
