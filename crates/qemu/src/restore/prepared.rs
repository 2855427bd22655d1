//! A QEMU that is started before the state of its VM is known, so that a failover only has to load
//! the devices.
//!
//! ```text
//!   prepare(plan) ─▶ QEMU -S -incoming, RAM in memfds that both map ─▶ write pages, epoch after epoch ─▶ activate(devices) ─▶ runs
//! ```
//!
//! Invariant: dropping it ends QEMU; nothing but [`Prepared::activate`] lets the guest run.

use super::{
    Memory, Plan, Ram, RamSource, Restored, Starting, WHILE_LOADING, send, wait_until_loaded,
};
use crate::lifetime::Lifetime;
use crate::spawn;
use crate::statefile::StateFile;
use crate::vm::{Origin, Vm};
use crate::{Error, Qmp, Result, stream};
use keyframe_units::elapsed_ns;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::Instant;

/// A QEMU that waits for its device state.
pub struct Prepared {
    plan: Plan,
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
    let no_ram = Nothing;
    let mut starting = Starting::new(&plan, &Ram::Eager(&no_ram), Instant::now())?;
    let state = StateFile::new(&plan.arguments)?;
    let (child, full_command) = starting.spawn(&plan, &state, None)?;
    let mut prepared = Prepared {
        plan,
        starting,
        state: Some(state),
        child: Some(child),
        qmp: None,
        full_command,
    };
    if let Some(child) = &mut prepared.child {
        prepared.qmp = Some(prepared.starting.meet(&prepared.plan, child, None)?);
    }
    Ok(prepared)
}

/// The main RAM of a QEMU that waits.
pub struct PreparedRam {
    parts: Vec<(PageRange, File)>,
}

impl PreparedRam {
    /// The location of `page` of the layout; `None` if it is in a small block, which comes with the
    /// devices.
    fn place(&self, page: PageIndex) -> Option<(&File, u64)> {
        let (pages, file) =
            self.parts.iter().find(|(pages, _)| (pages.first..pages.end()).contains(&page))?;
        Some((file, (page.0 - pages.first.0) * PAGE_BYTES as u64))
    }

    /// Writes a page of main RAM; false if `page` is not in main RAM.
    pub fn write_page(&self, page: PageIndex, content: &Page) -> io::Result<bool> {
        let Some((file, offset)) = self.place(page) else { return Ok(false) };
        file.write_all_at(content, offset).map(|()| true)
    }

    /// Reads a page of main RAM; false if `page` is not in main RAM.
    pub fn read_page(&self, page: PageIndex, into: &mut Page) -> io::Result<bool> {
        let Some((file, offset)) = self.place(page) else { return Ok(false) };
        file.read_exact_at(into, offset).map(|()| true)
    }
}

/// A source without pages.
struct Nothing;

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

    /// The exit status of QEMU; `None` if it runs.
    pub fn try_wait(&mut self) -> Result<Option<std::process::ExitStatus>> {
        let Some(child) = &mut self.child else { return Ok(None) };
        child.try_wait().map_err(Error::io("wait for QEMU"))
    }

    /// The main RAM, which any thread can read and write.
    pub fn memory(&self) -> Result<PreparedRam> {
        let copy = |memory: &Memory| Ok((memory.pages, memory.file.try_clone()?));
        let parts = self.starting.memories.iter().map(copy).collect::<io::Result<_>>();
        parts
            .map(|parts| PreparedRam { parts })
            .map_err(Error::io("duplicate a descriptor of the VM's memory"))
    }

    /// Loads the device state, and from `small` the blocks outside main RAM. Then resumes the VM,
    /// unless the plan has it paused.
    ///
    /// Errors: those of [`super::start`]. After an error no process is left.
    pub fn activate(mut self, small: &dyn RamSource, device_state: &[u8]) -> Result<Restored> {
        stream::check(device_state)?;
        let started = Instant::now();
        let (Some(mut child), Some(mut qmp), Some(state)) =
            (self.child.take(), self.qmp.take(), self.state.take())
        else {
            return Err(Error::io("activate a VM")(io::Error::other("it was activated already")));
        };
        match self.load(&mut qmp, &mut child, small, device_state) {
            Ok(()) => {
                let ready_ns = elapsed_ns(started);
                let lines = (
                    self.plan.source.machine.user_command.clone(),
                    std::mem::take(&mut self.full_command),
                );
                let vm =
                    Vm::from_parts(Lifetime::Child(child), qmp, state, lines, Origin::Restored);
                Ok(Restored { vm, lazy: None, ready_ns, filled_ns: None })
            }
            Err(error) => {
                let _ = spawn::kill(&mut child);
                Err(error)
            }
        }
    }

    fn load(
        &self,
        qmp: &mut Qmp,
        child: &mut Child,
        small: &dyn RamSource,
        device_state: &[u8],
    ) -> Result<()> {
        let incoming = self
            .starting
            .incoming
            .ours
            .try_clone()
            .map_err(Error::io("duplicate a socket to QEMU"))?;
        send(&UnixStream::from(incoming), &self.plan, small, device_state)
            .map_err(|e| spawn::exited_instead(e, child, WHILE_LOADING))?;
        wait_until_loaded(qmp, child)?;
        qmp.note_load();
        if self.plan.paused { Ok(()) } else { qmp.start_loaded() }
    }
}
