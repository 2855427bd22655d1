//! A QEMU that is started before the state of its VM is known, so that a failover only has to load
//! the devices.
//!
//! ```text
//!   prepare(plan) ─▶ QEMU -S -incoming, RAM in memfds that both map ─▶ write pages, epoch after epoch ─▶ activate(devices) ─▶ runs
//! ```
//!
//! A machine with a device that discards RAM (balloon, virtio-mem) gets private RAM
//! ([`private_ram`](super::private_ram)).
//!
//! Invariant: dropping it ends QEMU; nothing but [`Prepared::activate`] lets the guest run.

use super::{Plan, Ram, RamSource, Restored, Starting, WHILE_LOADING, send, wait_until_loaded};
use crate::lifetime::Lifetime;
use crate::spawn;
use crate::statefile::StateFile;
use crate::vm::machine_type;
use crate::vm::{Origin, Vm};
use crate::{Error, Qmp, Result, audit, stream};
use keyframe_ram_loading::Memory;
use keyframe_units::elapsed_ns;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange};
use keyframe_vmm::{AuditFinding, Severity};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::time::Instant;

/// A restored QEMU that has its machine and waits for its device state.
pub struct Prepared {
    /// `None` once it is given back.
    plan: Option<Plan>,
    starting: Starting,
    state: Option<StateFile>,
    /// `None` once the VM owns it.
    child: Option<Child>,
    qmp: Option<Qmp>,
    full_command: Vec<String>,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = spawn::kill(child);
        }
    }
}

/// Starts QEMU as planned, and checks that it has the planned machine. Its RAM is all zeros.
///
/// Errors: those of [`super::start`]. After an error no process is left.
pub fn prepare(plan: Plan) -> Result<Prepared> {
    // A second start would find the gate before the network taken: it serves one QEMU.
    if keyframe_qemu_audit::line_discards(&plan.arguments) {
        return start_waiting(plan, &Ram::Private(&Nothing));
    }
    let mut prepared = start_waiting(plan, &Ram::Eager(&Nothing))?;
    let discards = match &mut prepared.qmp {
        Some(qmp) => audit::discards(qmp)?,
        None => false,
    };
    if !discards {
        return Ok(prepared);
    }
    start_waiting(prepared.into_plan()?, &Ram::Private(&Nothing))
}

fn start_waiting(plan: Plan, ram: &Ram<'_>) -> Result<Prepared> {
    let mut starting = Starting::new(&plan, ram, Instant::now())?;
    let state = StateFile::new(&plan.arguments)?;
    let (child, full_command) = starting.spawn(&plan, &state, None)?;
    let mut prepared = Prepared {
        plan: Some(plan),
        starting,
        state: Some(state),
        child: Some(child),
        qmp: None,
        full_command,
    };
    if let (Some(child), Some(plan)) = (&mut prepared.child, &prepared.plan) {
        prepared.qmp = Some(prepared.starting.meet(plan, child, None)?);
        if plan.source.machine.processor.is_loaded_at_start() {
            prepared.starting.memories.iter().try_for_each(Memory::clear)?;
        }
    }
    Ok(prepared)
}

/// The main RAM of a QEMU that waits for its device state.
pub struct PreparedRam {
    parts: Vec<Memory>,
}

impl PreparedRam {
    /// The location of `page` of the layout; `None` if it is in a small block, which comes with the
    /// devices.
    fn place(&self, page: PageIndex) -> Option<(&File, u64)> {
        let is_within = |part: &&Memory| (part.pages.first..part.pages.end()).contains(&page);
        let part = self.parts.iter().find(is_within)?;
        Some((&part.file, part.offset + (page.0 - part.pages.first.0) * PAGE_BYTES as u64))
    }

    /// Writes a page of main RAM. Returns false, and writes nothing, if `page` is not in main RAM.
    /// Error: its file cannot be written.
    pub fn write_page(&self, page: PageIndex, content: &Page) -> io::Result<bool> {
        let Some((file, offset)) = self.place(page) else { return Ok(false) };
        file.write_all_at(content, offset).map(|()| true)
    }

    /// Reads a page of main RAM into `into`. Returns false, and reads nothing, if `page` is not in
    /// main RAM. Error: its file cannot be read.
    pub fn read_page(&self, page: PageIndex, into: &mut Page) -> io::Result<bool> {
        let Some((file, offset)) = self.place(page) else { return Ok(false) };
        file.read_exact_at(into, offset).map(|()| true)
    }
}

/// A source without pages.
pub(super) struct Nothing;

impl RamSource for Nothing {
    fn read(
        &self,
        _: PageRange,
        _: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        Ok(())
    }
}

impl Prepared {
    /// Returns QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Returns the exit status of QEMU; `None` if it runs. Error: the kernel does not tell.
    pub fn try_wait(&mut self) -> Result<Option<std::process::ExitStatus>> {
        let Some(child) = &mut self.child else { return Ok(None) };
        child.try_wait().map_err(Error::io("wait for QEMU"))
    }

    /// Ends QEMU and returns its plan.
    fn into_plan(mut self) -> Result<Plan> {
        self.plan.take().ok_or_else(activated_twice)
    }

    /// Returns the properties of the waiting machine for which it could not be checkpointed once it
    /// runs here. `disks` is the socket of the server of its disks; `None` if no server serves
    /// them. Error: QEMU does not answer.
    pub fn refusals(&mut self, disks: Option<&Path>) -> Result<Vec<AuditFinding>> {
        let qmp = self.qmp.as_mut().ok_or_else(activated_twice)?;
        let machine_type = machine_type(qmp)?;
        let processor = self.plan.as_ref().map(|plan| plan.source.machine.processor);
        let machine = (processor.unwrap_or_default(), &*machine_type);
        let disks = keyframe_qemu_audit::Disks::of_server(disks);
        let mut found = audit::audit(qmp, machine, (disks, &[]))?;
        found.retain(|finding| finding.severity != Severity::Warning);
        Ok(found)
    }

    /// Returns the main RAM, which any thread can read and write. Error: a file of the RAM cannot
    /// be opened.
    pub fn memory(&mut self) -> Result<PreparedRam> {
        let pid = self.pid();
        let (Some(qmp), Some(plan)) = (&mut self.qmp, &self.plan) else {
            return Err(activated_twice());
        };
        Ok(PreparedRam { parts: self.starting.main_ram(plan, qmp, pid)? })
    }

    /// Loads the device state, and from `small` the blocks outside main RAM. Then resumes the VM,
    /// unless the plan has it paused, and returns its handle.
    ///
    /// Errors: those of [`super::start`]. After an error no process is left.
    pub fn activate(mut self, small: &dyn RamSource, device_state: &[u8]) -> Result<Restored> {
        stream::check(device_state)?;
        let started = Instant::now();
        let (Some(mut child), Some(mut qmp), Some(state), Some(plan)) =
            (self.child.take(), self.qmp.take(), self.state.take(), self.plan.take())
        else {
            return Err(activated_twice());
        };
        match self.load(&plan, (&mut qmp, &mut child), small, device_state) {
            Ok(()) => {
                let ready_ns = elapsed_ns(started);
                let lines =
                    (plan.source.machine.user_command, std::mem::take(&mut self.full_command));
                let vm =
                    Vm::from_parts(Lifetime::Child(child), qmp, state, lines, Origin::Restored);
                // The process was there before.
                Ok(Restored { vm, lazy: None, process_ns: 0, ready_ns, filled_ns: None })
            }
            Err(error) => {
                let _ = spawn::kill(&mut child);
                Err(error)
            }
        }
    }

    fn load(
        &self,
        plan: &Plan,
        (qmp, child): (&mut Qmp, &mut Child),
        small: &dyn RamSource,
        device_state: &[u8],
    ) -> Result<()> {
        let incoming = self
            .starting
            .incoming
            .ours
            .try_clone()
            .map_err(Error::io("duplicate a socket to QEMU"))?;
        send(&UnixStream::from(incoming), plan, small, device_state)
            .map_err(|e| spawn::exited_instead(e, child, WHILE_LOADING))?;
        wait_until_loaded(qmp, child)?;
        qmp.note_load();
        if plan.paused { Ok(()) } else { qmp.start_loaded() }
    }
}

fn activated_twice() -> Error {
    Error::io("activate a VM")(io::Error::other("it was activated already"))
}
