//! The VMMs other than QEMU: the one place in the program that tells them apart.
//!
//! QEMU has options that no other VMM has, so its commands use its driver directly.

use crate::failure::Failure;
use keyframe_firecracker::launch::{self, CommandLine};
use keyframe_firecracker::{FirecrackerRestorer, FirecrackerVm};
use keyframe_machine::VmmKind;
use keyframe_session::{Error, RunReport, SessionOptions, VmSource, run_vm};
use keyframe_store::Store;
use keyframe_vmm::{Ability, Capabilities, Restorer, Unsupported, Vmm, VmmError};
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Returns the restorer of the checkpoints of VMs of `kind`; `None` for QEMU.
pub fn restorer(kind: VmmKind) -> Option<Box<dyn Restorer + Send>> {
    match kind {
        VmmKind::Qemu => None,
        VmmKind::Firecracker => Some(Box::new(FirecrackerRestorer)),
    }
}

/// Returns the VMM that `program`, the first word of a command line, is by its name.
pub fn of_program(program: &OsStr) -> VmmKind {
    if launch::is_firecracker(program) { VmmKind::Firecracker } else { VmmKind::Qemu }
}

/// Refuses what a VMM of `kind` is not able to do. QEMU's own commands check what it can.
pub fn require(kind: VmmKind, ability: Ability) -> Result<(), Failure> {
    let capabilities = restorer(kind).map(|restorer| restorer.capabilities());
    let missing = capabilities.and_then(|capabilities| capabilities.require(ability).err());
    missing.map_or(Ok(()), |missing| Err(missing.into()))
}

/// Refuses the command line `words` if its program is of a VMM that lacks `ability`.
pub fn require_of(words: &[OsString], ability: Ability) -> Result<(), Failure> {
    let kind = words.first().map_or(VmmKind::Qemu, |program| of_program(program));
    require(kind, ability)
}

/// Runs Firecracker by the command line `words` and takes checkpoints of its VM into `store`.
pub fn run_firecracker(
    store: &Store,
    words: Vec<OsString>,
    options: SessionOptions,
) -> Result<RunReport, Failure> {
    let line = CommandLine::parse(words).map_err(VmmError::from)?;
    let refusals = line.refusals().map_err(VmmError::from)?;
    if !refusals.is_empty() {
        return Err(Error::NotCheckpointable(refusals).into());
    }
    let start = || Ok(Box::new(FirecrackerVm::launch(&line)?) as Box<dyn Vmm>);
    let source = VmSource {
        capabilities: capabilities(),
        pid: None,
        ram_bytes: line.ram_bytes(),
        drives: line.writable_drives().map_err(VmmError::from)?,
        start: Box::new(start),
        restorer: restorer(VmmKind::Firecracker),
    };
    Ok(run_vm(store, source, options)?)
}

/// Takes control of the VM of the Firecracker `pid`, whose API is at `socket`. It runs on.
pub fn attach(pid: u32, socket: &Path) -> Result<Box<dyn Vmm>, Failure> {
    Ok(Box::new(FirecrackerVm::attach(pid, socket).map_err(VmmError::from)?))
}

/// Takes checkpoints into `store` of the VM of the Firecracker `pid`, whose API is at `socket`.
pub fn attach_firecracker(
    store: &Store,
    pid: u32,
    socket: &Path,
    options: SessionOptions,
) -> Result<RunReport, Failure> {
    let vm = FirecrackerVm::attach(pid, socket).map_err(VmmError::from)?;
    let source = VmSource {
        capabilities: capabilities(),
        pid: Some(pid),
        ram_bytes: vm.config().machine.mem_size_mib << 20,
        drives: Vec::new(),
        start: Box::new(move || Ok(Box::new(vm) as Box<dyn Vmm>)),
        restorer: restorer(VmmKind::Firecracker),
    };
    Ok(run_vm(store, source, options)?)
}

fn capabilities() -> Capabilities {
    keyframe_firecracker::capabilities()
}

impl From<VmmError> for Failure {
    fn from(error: VmmError) -> Self {
        Error::from(error).into()
    }
}

impl From<Unsupported> for Failure {
    fn from(missing: Unsupported) -> Self {
        Error::from(missing).into()
    }
}
