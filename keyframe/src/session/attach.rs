//! Takes hold of a VM that somebody else started: everything up to its first checkpoint. The VM runs on meanwhile.

use super::Options;
use super::launch::{Lease, Parts, prepare, require_kernel};
use super::machine::QemuMachine;
use crate::failure::Failure;
use crate::rundir::{self, RunDir};
use keyframe_qemu::{AttachOptions, Monitor, Vm};
use keyframe_store::Store;

/// Attaches to the QEMU with process id `pid`.
pub fn attach(store: &Store, pid: u32, monitor: &AttachOptions, options: &Options) -> Result<Parts, Failure> {
    require_kernel(options)?;
    let mut vm = Vm::attach(pid, monitor).map_err(|e| Failure::qemu(&e))?;
    let name = options
        .name
        .clone()
        .unwrap_or_else(|| rundir::name_from(&vm.vm_name().unwrap_or_else(|| format!("vm-{pid}"))));
    let run_dir = RunDir::claim(&name)?;
    let mut writer = store
        .lock_writer(&format!("keyframe attach, VM {name}"))
        .map_err(|e| Failure::store(&e, store.path()))?;
    let identity = vm.identity().map_err(|e| Failure::qemu(&e))?;
    let directory = vm.working_directory().map_err(|e| Failure::qemu(&e))?;
    let lease = Lease { store, name: &name, writer: &mut writer };
    // Where it is refused, the VM is dropped, which is to detach.
    let (copying, sink, meta, watchdog) = prepare(&mut vm, lease, &identity, &directory, options)?;
    let runs = vm.qmp().status().map_err(|e| Failure::qemu(&e))?.is_running();
    let mut machine = QemuMachine::new(vm, watchdog, options.pause_limit, copying.watches_discards);
    if let Monitor::Socket(path) = &monitor.monitor {
        machine.monitor = Some(path.clone());
    }
    Ok(Parts { name, run_dir, machine, copying, sink, writer, meta, runs })
}
