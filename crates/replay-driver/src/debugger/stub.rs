//! QEMU's gdbstub of one VM, with the state that a debugger has given to the gdbstub before it.

use super::StubState;
use crate::PausedReplay;
use crate::error::{ReplayError, Result};
use crate::idle_watch::{IdleWatch, Idleness};
use keyframe_gdb::{GdbConnection, GdbMessage, StopReply, wait_for_either};
use keyframe_kernel::open_file::OpenFile;
use keyframe_qemu::Processor;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long QEMU may take to answer. A QEMU whose RAM is being loaded answers when its pages are
/// there.
const ANSWER_WAIT: Duration = Duration::from_secs(60);

/// The digits of a register of 64 bits.
const REGISTER_DIGITS: usize = 16;

/// The registers of a processor in 64-bit form, as the gdbstub tells them: first the general
/// registers, then the instruction pointer, 16 digits each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Registers {
    digits: Vec<u8>,
    /// The number of digits of the general registers.
    general: usize,
}

impl Registers {
    /// Returns the general registers, with the stack pointer, but without the instruction pointer.
    pub fn general(&self) -> &[u8] {
        self.digits.get(..self.general).unwrap_or(&self.digits)
    }

    /// Returns the instruction pointer; `None` if the gdbstub did not tell it.
    pub fn instruction_pointer(&self) -> Option<u64> {
        let digits = self.digits.get(self.general..self.general + REGISTER_DIGITS)?;
        u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(u64::swap_bytes)
    }
}

/// A paused VM, and a connection to its gdbstub.
pub(super) struct Stub {
    paused: PausedReplay,
    link: GdbConnection<UnixStream>,
    /// The guest's processor.
    pub processor: Processor,
    /// `thread:ID;`, as its replies name the processor.
    pub thread: String,
}

impl Stub {
    /// Connects to the gdbstub of `paused`, and repeats to it what the debugger has told the one
    /// before.
    pub fn new(mut paused: PausedReplay, state: &StubState) -> Result<Self> {
        let link = paused.connect()?;
        let processor = paused.replay.restored().vm().processor()?;
        let mut stub = Self { paused, link, processor, thread: String::new() };
        if !state.supported.is_empty() {
            stub.ask(&state.supported)?;
        }
        // This comes first, because it removes all breakpoints.
        let why = stub.ask(b"?")?;
        stub.thread = StopReply::parse(&why).map(|reply| reply.thread).unwrap_or_default();
        if !state.thread.is_empty() {
            stub.ask(&state.thread)?;
        }
        for point in &state.points {
            stub.ask(&point.packet())?;
        }
        Ok(stub)
    }

    /// Sends a packet and returns its answer.
    pub fn ask(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        self.link.send(payload)?;
        self.answer()
    }

    /// Returns the answer to a packet that was sent.
    pub fn answer(&mut self) -> Result<Vec<u8>> {
        match self.link.receive(ANSWER_WAIT)? {
            Some(GdbMessage::Packet(answer)) => Ok(answer),
            Some(GdbMessage::Interrupt | GdbMessage::Closed) => {
                Err(ReplayError::EndedInStub.into())
            }
            None => Err(ReplayError::StubSilent { seconds: ANSWER_WAIT.as_secs() }.into()),
        }
    }

    /// Sends a packet that is answered when the VM stops.
    pub fn send(&mut self, payload: &[u8]) -> Result<()> {
        Ok(self.link.send(payload)?)
    }

    /// Returns what has come within `wait`.
    pub fn receive(&mut self, wait: Duration) -> Result<Option<GdbMessage>> {
        Ok(self.link.receive(wait)?)
    }

    /// Waits a moment for a packet from either side. An idle VM is woken first.
    pub fn wait(
        &mut self,
        gdb: &GdbConnection<TcpStream>,
        idle_watch: &mut IdleWatch,
    ) -> Result<()> {
        let Idleness { is_idle, wait } = idle_watch.look();
        if is_idle {
            // The gdbstub tells if QEMU has ended.
            let _ = self.icount();
        }
        Ok(wait_for_either(gdb, &self.link, wait)?)
    }

    /// Returns the watch for a VM that is about to run.
    pub fn idle_watch(&mut self) -> IdleWatch {
        IdleWatch::new(self.paused.replay.restored().vm().pid())
    }

    /// Returns the file of the log at `log` that QEMU reads, if the kernel tells it.
    pub fn open_log(&mut self, log: &Path) -> Option<OpenFile> {
        OpenFile::of(self.paused.replay.restored().vm().pid(), log)
    }

    /// Stops a running VM.
    pub fn interrupt(&mut self) -> Result<()> {
        Ok(self.link.interrupt()?)
    }

    /// Returns the processor's registers.
    pub fn registers(&mut self) -> Result<Registers> {
        let general = self.processor.gdb_general_registers() * REGISTER_DIGITS;
        Ok(Registers { digits: self.ask(b"g")?, general })
    }

    /// Removes the watchpoints of `state` from QEMU.
    pub fn disarm(&mut self, state: &StubState) -> Result<()> {
        for point in state.points.iter().filter(|point| point.is_watch()) {
            self.ask(&point.removal_packet())?;
        }
        Ok(())
    }

    /// Sets the watchpoints of `state` again.
    pub fn arm(&mut self, state: &StubState) -> Result<()> {
        for point in state.points.iter().filter(|point| point.is_watch()) {
            self.ask(&point.packet())?;
        }
        Ok(())
    }

    /// Returns what the gdbstub tells of `bytes` bytes of memory: hexadecimal digits, or an error.
    pub fn memory(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>> {
        self.ask(format!("m{address:x},{bytes:x}").as_bytes())
    }

    /// Makes QEMU stop before an instruction, once.
    pub fn break_at(&mut self, icount: u64) -> Result<()> {
        Ok(self.paused.replay.restored().vm().qmp().replay_break(icount)?)
    }

    /// Returns the instruction before which it has stopped.
    pub fn icount(&mut self) -> Result<u64> {
        self.paused.icount()
    }

    /// Returns true if the guest has shut down, at which the log ends.
    pub fn is_shut_down(&mut self) -> Result<bool> {
        let status = self.paused.replay.restored().vm().qmp().status()?;
        Ok(status == keyframe_qemu::RunStatus::Shutdown)
    }

    /// Returns the VM, without breakpoints.
    pub fn release(mut self) -> Result<PausedReplay> {
        self.ask(b"?")?;
        Ok(self.paused)
    }
}
