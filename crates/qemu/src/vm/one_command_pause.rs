//! A pause by one command, `xen-save-devices-state` into a pipe.
//!
//! ```text
//!   QEMU      stop ─▶ save the devices ─▶ write ·························▶ resume ─▶ next command
//!                                          │ waits, with its main lock held ▲
//!   engine                                 └▶ device state is complete: look ┘ empties the pipe
//! ```
//!
//! While QEMU waits, it serves no other client, and no device of the VM works. A `stop`, `migrate`
//! or `dump-guest-memory` of another client is carried out after the pause, so that the pause
//! cannot undo it. If the engine dies, the pipe has no reader any more, and QEMU resumes the VM.
//!
//! Invariant: the device state is complete before RAM is read, because saving a device may write to
//! RAM. So QEMU must wait in the `write` of the last piece, which ends with the end mark.

use super::Vm;
use crate::qmp::one_command::PauseCommand;
use crate::{Error, Result};
use keyframe_kernel::Process;
use keyframe_vmm::{SavedPause, StopOutcome};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// How often the command is tried, if QEMU resumes the VM before it can be held: the length of the
/// state changes at most once between two tries.
const ATTEMPTS: u32 = 4;
/// How long QEMU may take for the command: it waits for requests of slow disks.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The time between two looks at QEMU's main thread while the VM is being paused.
const LOOK_EVERY: Duration = Duration::from_micros(20);
/// The same if the pause takes long.
const LOOK_LATER_EVERY: Duration = Duration::from_micros(500);
/// When it takes long.
const LATER: Duration = Duration::from_millis(20);

/// A VM that QEMU holds.
pub(super) struct HeldByPipe {
    command: PauseCommand,
    stop: StopOutcome,
    /// The device state, which QEMU has not written completely.
    state: Vec<u8>,
    /// The bytes at its head that have been read from the pipe.
    read_bytes: usize,
}

/// The one-command pauses of a VM.
#[derive(Default)]
pub(super) struct OneCommandPause {
    /// True once this QEMU has been found unable to pause so.
    is_impossible: bool,
    /// Present during a pause.
    held: Option<HeldByPipe>,
}

/// What an attempt has led to.
enum Attempt {
    Held(HeldByPipe),
    /// QEMU has resumed the VM already.
    Missed,
}

/// The process whose main thread is watched.
struct Observed {
    process: Process,
    /// The system call of its main thread.
    call: File,
}

impl Vm {
    /// Pauses the VM and saves its devices by one command. `None` if this QEMU cannot do so, or if
    /// another client has paused the VM: the VM is as it was, and has to be paused by `stop`.
    pub(crate) fn pause_by_one_command(&mut self) -> Result<Option<SavedPause>> {
        if self.one_command.is_impossible {
            return Ok(None);
        }
        for _ in 0..ATTEMPTS {
            match self.attempt_pause() {
                Ok(Attempt::Held(held)) if held.stop == StopOutcome::AlreadyPaused => {
                    // Its run state belongs into the device state, and can be asked for only
                    // between separate commands.
                    self.one_command.held = Some(held);
                    self.end_one_command_pause()?;
                    return Ok(None);
                }
                Ok(Attempt::Held(held)) => {
                    self.note_sse_flags();
                    let saved = SavedPause { stop: held.stop, device_state: held.state.clone() };
                    self.one_command.held = Some(held);
                    return Ok(Some(saved));
                }
                Ok(Attempt::Missed) => {}
                // QEMU may not open the pipe (AppArmor, chroot), or has another order of its files.
                Err(Error::Refused { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        self.one_command.is_impossible = true;
        Ok(None)
    }

    fn attempt_pause(&mut self) -> Result<Attempt> {
        let refused = |reason: &str| Error::Refused {
            operation: "open the pipe for device state".into(),
            reason: reason.into(),
        };
        let pid = self.pid();
        let Some(observed) = Observed::open(pid) else {
            return Err(refused("its main thread cannot be watched"));
        };
        if self.state.pipe.target(pid).is_none() {
            self.state.pass_pipe(&mut self.qmp)?;
        }
        self.state.pipe.prepare()?;
        let target = self.state.pipe.target(pid).ok_or_else(|| refused("QEMU does not have it"))?;
        let command = self.qmp.begin_pause(&target)?;
        let held = self.await_last_piece(&observed, command);
        if held.is_err() {
            // Whatever failed, QEMU must not wait for the engine.
            let _ = self.state.pipe.drain(&mut Vec::new());
        }
        held
    }

    /// Waits until QEMU waits with the last piece.
    fn await_last_piece(&mut self, observed: &Observed, command: PauseCommand) -> Result<Attempt> {
        let began = Instant::now();
        let mut state = Vec::new();
        loop {
            if let Some(write) = self.state.pipe.blocked_write(&observed.process, &observed.call)? {
                let piece = write.content(&observed.process)?;
                let read_bytes = state.len();
                self.state.pipe.peek(&mut state)?;
                state.extend_from_slice(&piece);
                if crate::stream::check(&state).is_ok() {
                    self.state.pipe.expect(state.len(), piece.len());
                    // The STOP event has been sent before the state.
                    let early = self.qmp.pause_answer(command)?;
                    if early.is_some() {
                        return Ok(Attempt::Missed);
                    }
                    let stop = if self.qmp.has_stopped(command) {
                        StopOutcome::Stopped
                    } else {
                        StopOutcome::AlreadyPaused
                    };
                    return Ok(Attempt::Held(HeldByPipe { command, stop, state, read_bytes }));
                }
                state.truncate(read_bytes);
                self.state.pipe.admit(&piece, &mut state)?;
                continue;
            }
            if self.qmp.pause_answer(command)?.is_some() {
                self.state.pipe.drain(&mut state)?;
                self.state.pipe.expect_length(state.len());
                return Ok(Attempt::Missed);
            }
            let waited = began.elapsed();
            if waited > TIMEOUT {
                return Err(Error::Timeout {
                    monitor: format!("of process {}", observed.process.pid()),
                    operation: "save the device state".into(),
                    waited_ms: TIMEOUT.as_millis() as u64,
                });
            }
            std::thread::sleep(if waited > LATER { LOOK_LATER_EVERY } else { LOOK_EVERY });
        }
    }

    /// Lets QEMU write the rest of the state and resume the VM, and waits for its answer.
    pub(crate) fn end_one_command_pause(&mut self) -> Result<()> {
        let Some(held) = self.one_command.held.take() else { return Ok(()) };
        if held.stop == StopOutcome::Stopped {
            self.qmp.note_release();
        }
        let mut written = Vec::new();
        let deadline = Instant::now() + TIMEOUT;
        let answer = loop {
            self.state.pipe.drain(&mut written)?;
            match self.qmp.pause_answer(held.command) {
                Ok(None) => {}
                Ok(Some(_)) => break Ok(()),
                // QEMU could not write: the watchdog or a second engine has emptied the pipe.
                Err(Error::Refused { .. }) => {
                    self.qmp.note_torn_pause();
                    break Ok(());
                }
                Err(error) => break Err(error),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(Error::Timeout {
                    monitor: format!("of process {}", self.pid()),
                    operation: "resume the VM".into(),
                    waited_ms: TIMEOUT.as_millis() as u64,
                });
            }
            self.await_progress(left.min(Duration::from_millis(1)))?;
        };
        answer?;
        self.state.pipe.drain(&mut written)?;
        if held.state.get(held.read_bytes..) != Some(&*written) {
            self.qmp.note_torn_pause();
        }
        self.qmp.resume_suspended(held.command)
    }

    /// Waits until QEMU has written or answered, for at most `limit`.
    fn await_progress(&self, limit: Duration) -> Result<()> {
        let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
        let mut files = [
            PollFd::new(self.state.pipe.read_end(), PollFlags::IN),
            PollFd::new(&self.qmp, PollFlags::IN),
        ];
        match poll(&mut files, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::io("wait for QEMU to resume the VM")(error)),
        }
    }
}

impl Observed {
    /// `None` if the kernel does not let this process watch the other one.
    fn open(pid: u32) -> Option<Self> {
        let process = Process::open(pid).ok()?;
        let call = File::open(format!("/proc/{pid}/task/{pid}/syscall")).ok()?;
        call.read_at(&mut [0; 8], 0).ok()?;
        Some(Self { process, call })
    }
}
