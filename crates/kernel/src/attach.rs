//! Makes a running process, which knows nothing of it, open a userfaultfd over its own memory, and
//! takes that over.
//!
//! A userfaultfd watches the memory of the process that made it, so the process has to make the
//! call itself:
//!
//! ```text
//!   seize ─ interrupt ─▶ stopped in a system call, or between two instructions
//!                          save registers and signal mask, also in a signal frame on its stack
//!                          block all signals
//!                          userfaultfd()  ─▶ fd ── pidfd_getfd ──▶ ours
//!                          close(fd)
//!                          interrupt, resume ─▶ stopped on the way out of the kernel
//!                          restore signal mask and registers
//!   detach ◀─────────────┘  an interrupted system call is restarted by the kernel, as after any stop
//! ```
//!
//! The calls are made through a `syscall` instruction of the process's own code. All that is
//! written into its memory is a signal frame below the thread's stack (see
//! [`crate::signal_frame`]), from which the thread returns by itself. The bytes that were there
//! are written back at the end.
//!
//! Invariants:
//! 1. No signal is lost: all that can be blocked wait, blocked, until the mask is restored; SIGSTOP
//!    is sent again.
//! 2. Whatever fails, registers and mask are restored and the process runs on (`Hijack`'s `Drop`);
//!    every wait is bounded.
//! 3. The whole session runs on a thread of its own. Where even restoring fails, that thread's end
//!    makes the kernel detach.
//! 4. Wherever the kernel detaches, because we are killed (SIGKILL, out of memory) or for any other
//!    reason, the thread gives itself back. What can stay behind is one descriptor, on which
//!    nothing was asked, and a SIGSTOP that came meanwhile and had no effect. Not so in a process
//!    without the code for it ([`InjectedUserfaultfd::guarded`]).
//!
//! 5. A session that ends as planned leaves the memory below the stack as it found it. No correct
//!    program reads that memory, but QEMU 7.2 does: a microvm's firmware reads the head of an ELF
//!    kernel from a buffer that was on QEMU's stack, through a pointer that outlived the call.
//!
//! Left out: attaching to another thread than the main one; code in a restartable sequence (rseq)
//! at the moment of the stop, which QEMU's main thread does not use; a seccomp filter that kills
//! for a `userfaultfd` call, if we are killed in the microseconds between setting the registers for
//! it and the call.

use crate::gadgets::Gadgets;
use crate::ptrace::{SignalMask, Stop, Tracee};
use crate::signal_frame::{self, RED_ZONE_BYTES, SignalFrame, XsaveLayout};
use crate::{Error, Process, Result, abi, read_memory, write_memory};
use keyframe_units::HostVirt;
use keyframe_units::elapsed_ns;
use rustix::process::{PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_send_signal};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The longest that a session may take, and the longest that undoing it may take.
pub(crate) const SESSION_MAX: Duration = Duration::from_secs(2);
/// How long a thread is waited for that is where only we could give it back; and the pauses between
/// two looks, which double.
const PATIENCE: Duration = Duration::from_millis(500);
const PAUSE_MIN: Duration = Duration::from_micros(100);
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// Room below the signal frame for the word of [`Hijack::free_word`], with its alignment.
const FREE_WORD_BYTES: u64 = 16;
/// The stack of a child that is not to run: no memory is ever there.
const NO_STACK: u64 = 8;

/// A userfaultfd over the memory of another process.
#[derive(Debug)]
pub struct InjectedUserfaultfd {
    /// The descriptor, not used yet, non-blocking, closed on exec.
    pub uffd: OwnedFd,
    /// The time for which the process's main thread was stopped, in nanoseconds.
    pub stopped_ns: u64,
    /// True if the process may only have a userfaultfd for user-mode faults. Asynchronous write
    /// protection also tracks writes by the kernel then.
    pub user_mode_only: bool,
    /// True if the process would have run on unchanged if this process had been killed at any
    /// instant of the injection. False if its code has no `syscall; ret` and no signal return, or
    /// if it uses a shadow stack.
    pub guarded: bool,
}

/// Injects one `userfaultfd` system call into `process` and takes the descriptor over.
///
/// If the process is a child of this one, no thread here may be in `waitpid` for it meanwhile
/// without `__WNOTHREAD`: that call would return the stops. Waiting by pidfd or `waitid(WEXITED)`
/// is safe. Returns the descriptor and how the process was stopped.
///
/// Errors: no permission to trace it; another tracer ([`Error::Traced`]); the call failed in it
/// ([`Error::Injected`]); it does not stop within 2 s, or exits. After an error the process runs
/// on.
pub fn inject_userfaultfd(process: &Process) -> Result<InjectedUserfaultfd> {
    on_a_thread(process, || run_session(process, Gadgets::find(process)?, Filter::MaySuspend))
}

/// Injects as [`inject_userfaultfd`] does into a process whose seccomp filter would end it for the
/// call. Errors: those of [`inject_userfaultfd`]; [`Error::SeccompStays`] if the filter cannot be
/// suspended. The process has made no call then.
pub fn inject_userfaultfd_unfiltered(process: &Process) -> Result<InjectedUserfaultfd> {
    on_a_thread(process, || run_session(process, Gadgets::find(process)?, Filter::MustSuspend))
}

/// What is done about the seccomp filter of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    /// It is suspended if the kernel permits that.
    MaySuspend,
    /// It is suspended, or the session fails.
    MustSuspend,
}

/// Runs a session in a new thread. When that thread ends, the kernel releases the process, also
/// after an error.
fn on_a_thread<T: Send>(
    process: &Process,
    session: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let spawn = |source| Error::Attach { pid: process.pid(), operation: "start a thread", source };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("attach".into());
        let thread = thread.spawn_scoped(scope, session).map_err(spawn)?;
        thread.join().unwrap_or_else(|_| Err(spawn(io::Error::other("it panicked"))))
    })
}

/// Stops the main thread, has `calls` make system calls in it, and gives it back.
pub(crate) fn in_session<T: Send>(
    process: &Process,
    calls: impl FnOnce(&mut Hijack<'_>) -> Result<T> + Send,
) -> Result<T> {
    in_session_with(process, Filter::MaySuspend, calls)
}

/// Does as [`in_session`], with `filter` for the seccomp filter of the process.
pub(crate) fn in_session_with<T: Send>(
    process: &Process,
    filter: Filter,
    calls: impl FnOnce(&mut Hijack<'_>) -> Result<T> + Send,
) -> Result<T> {
    on_a_thread(process, || {
        let gadgets = Gadgets::find(process)?;
        let mut hijack = Hijack::stop(process, gadgets, SESSION_MAX, filter)?;
        let made = calls(&mut hijack);
        let undone = hijack.restore();
        let made = made?;
        undone.map(|()| made)
    })
}

fn run_session(process: &Process, gadgets: Gadgets, filter: Filter) -> Result<InjectedUserfaultfd> {
    let mut hijack = Hijack::stop(process, gadgets, SESSION_MAX, filter)?;
    let made = open_userfaultfd(&mut hijack);
    let undone = hijack.restore();
    let stopped_ns = hijack.stopped_ns();
    let (uffd, user_mode_only) = made?;
    undone?;
    Ok(InjectedUserfaultfd { uffd, stopped_ns, user_mode_only, guarded: hijack.guarded() })
}

/// Makes the userfaultfd in the target, takes it over, and closes the target's own copy.
fn open_userfaultfd(hijack: &mut Hijack<'_>) -> Result<(OwnedFd, bool)> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let call =
        |hijack: &mut Hijack<'_>, flags| hijack.call("userfaultfd", libc::SYS_userfaultfd, flags);
    let (theirs, user_mode_only) = match call(hijack, flags) {
        Err(Error::Injected { source, .. }) if source.raw_os_error() == Some(libc::EPERM) => {
            (call(hijack, flags | abi::UFFD_USER_MODE_ONLY)?, true)
        }
        other => (other?, false),
    };
    let failed = |source: io::Error| Error::Attach {
        pid: hijack.process.pid(),
        operation: "pidfd_getfd",
        source,
    };
    let ours = i32::try_from(theirs)
        .map_err(io::Error::other)
        .and_then(|fd| Ok(pidfd_getfd(hijack.process.pidfd(), fd, PidfdGetfdFlags::empty())?))
        .map_err(failed);
    hijack.call("close", libc::SYS_close, theirs)?;
    Ok((ours?, user_mode_only))
}

/// `base`, about to do a system call through the `syscall` instruction at `instruction`.
pub(crate) fn call_registers(
    base: libc::user_regs_struct,
    instruction: u64,
    number: i64,
    [rdi, rsi, rdx, r10, r8]: [u64; 5],
) -> libc::user_regs_struct {
    libc::user_regs_struct {
        rip: instruction,
        rax: number.cast_unsigned(),
        // Not in a system call: the kernel must not restart one on these registers.
        orig_rax: u64::MAX,
        rdi,
        rsi,
        rdx,
        r10,
        r8,
        ..base
    }
}

/// Registers of user code, as in `like`, that point to nothing: no stack, no thread, no data.
fn blank_registers(like: &libc::user_regs_struct) -> libc::user_regs_struct {
    // The flags without those that a debugger or the code may have set (trap, direction).
    let eflags = 0x202;
    libc::user_regs_struct {
        rsp: 0,
        rbp: 0,
        rbx: 0,
        rcx: 0,
        r9: 0,
        r11: 0,
        r12: 0,
        r13: 0,
        r14: 0,
        r15: 0,
        eflags,
        ..*like
    }
}

/// The signal frame that gives the stopped thread back. `None` if there is no room for it, or if
/// its registers are of a kind not known here: then only the session can give the thread back.
fn signal_frame(
    tracee: &Tracee<'_>,
    saved: &libc::user_regs_struct,
    mask: SignalMask,
    sigreturn: u64,
) -> Option<SignalFrame> {
    let layout = XsaveLayout::of_this_processor();
    SignalFrame::new(saved, mask, &tracee.xsave().ok()?, layout, sigreturn)
}

/// The bytes below a thread's stack before a session wrote there.
struct BelowStack {
    at: HostVirt,
    bytes: Vec<u8>,
}

impl BelowStack {
    /// Reads all that a session may write: `frame`, and one word below it. `None` if a part of that
    /// is not mapped.
    fn read(
        process: &Process,
        saved: &libc::user_regs_struct,
        frame: Option<&SignalFrame>,
    ) -> Option<Self> {
        let top = saved.rsp.checked_sub(RED_ZONE_BYTES)?;
        let at = frame.map_or(top, |frame| frame.at).checked_sub(FREE_WORD_BYTES)?;
        let mut bytes = vec![0; usize::try_from(top.checked_sub(at)?).ok()?];
        read_memory(process, HostVirt(at), &mut bytes).ok()?;
        Some(Self { at: HostVirt(at), bytes })
    }
}

/// A stopped thread that runs our system calls; given back as it was by [`Self::restore`], or else
/// on drop.
pub(crate) struct Hijack<'p> {
    process: &'p Process,
    tracee: Tracee<'p>,
    gadgets: Gadgets,
    begun: Instant,
    deadline: Instant,
    saved: libc::user_regs_struct,
    /// The address of the signal frame from which the thread is restored, if there is one.
    frame_at: Option<u64>,
    below_stack: Option<BelowStack>,
    mask: SignalMask,
    /// True if a SIGSTOP arrived meanwhile. It cannot be blocked, and is sent again.
    stop_came: bool,
    /// The process that the injected system call created, if that was requested.
    born: Option<u32>,
    restored: bool,
}

impl<'p> Hijack<'p> {
    /// Stops the thread and saves the state that a session changes. The thread may stay stopped for
    /// `longest`.
    ///
    /// A thread may be in a wait that only Keyframe could restore (see
    /// [`signal_frame::is_beyond_return`]). Such a thread is released and stopped again, until it
    /// has left the wait, for at most [`PATIENCE`].
    pub(crate) fn stop(
        process: &'p Process,
        gadgets: Gadgets,
        longest: Duration,
        filter: Filter,
    ) -> Result<Self> {
        let patient_until = Instant::now() + PATIENCE;
        let mut pause = PAUSE_MIN;
        loop {
            let tracee = match filter {
                Filter::MaySuspend => Tracee::seize(process)?,
                Filter::MustSuspend => Tracee::seize_unfiltered(process)?,
            };
            let begun = Instant::now();
            let deadline = begun + longest;
            tracee.interrupt()?;
            // A signal that was on its way is taken first, as it would have been; the stop follows
            // before any instruction.
            while let Stop::Signal(signal) =
                tracee.wait_for_stop("stop the main thread", deadline)?
            {
                tracee.resume(signal)?;
            }
            // From here on the thread is stopped but unchanged: failing, it only has to be detached
            // from.
            let state = tracee.registers().and_then(|saved| Ok((saved, tracee.signal_mask()?)));
            let (saved, mask) = state.inspect_err(|_| drop(tracee.detach()))?;
            if !signal_frame::is_beyond_return(&saved) || begun >= patient_until {
                return Self::take(process, tracee, gadgets, [begun, deadline], saved, mask);
            }
            tracee.detach()?;
            std::thread::sleep(pause);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }

    /// Prepares the stopped thread for calls.
    fn take(
        process: &'p Process,
        tracee: Tracee<'p>,
        gadgets: Gadgets,
        [begun, deadline]: [Instant; 2],
        saved: libc::user_regs_struct,
        mask: SignalMask,
    ) -> Result<Self> {
        let frame = gadgets.sigreturn.and_then(|at| signal_frame(&tracee, &saved, mask, at));
        let below_stack = BelowStack::read(process, &saved, frame.as_ref());
        let frame_at = frame.and_then(|frame| {
            write_memory(process, HostVirt(frame.at), &frame.bytes).ok().map(|()| frame.at)
        });
        let hijack = Self {
            process,
            tracee,
            gadgets,
            begun,
            deadline,
            saved,
            frame_at,
            below_stack,
            mask,
            stop_came: false,
            born: None,
            restored: false,
        };
        // In this order: a thread that is let go with its signals blocked has the frame to unblock
        // them.
        if let Some((rip, frame_at)) = gadgets.sigreturn.zip(frame_at) {
            // As the `ret` of a signal handler would leave it.
            let rsp = frame_at.wrapping_add(8);
            hijack.tracee.set_registers(call_registers(
                libc::user_regs_struct { rsp, ..saved },
                rip,
                libc::SYS_rt_sigreturn,
                [0; 5],
            ))?;
        }
        hijack.tracee.set_signal_mask(SignalMask(u64::MAX))?;
        Ok(hijack)
    }

    /// How long ago the thread was stopped, in nanoseconds.
    pub(crate) fn stopped_ns(&self) -> u64 {
        elapsed_ns(self.begun)
    }

    /// True if the thread gives itself back if we do not.
    fn guarded(&self) -> bool {
        self.frame_at.is_some()
    }

    /// Returns the registers for a system call, without those of the call itself.
    fn base(&self) -> libc::user_regs_struct {
        libc::user_regs_struct { rsp: self.frame_at.unwrap_or(self.saved.rsp), ..self.saved }
    }

    /// Makes the thread do one system call with one argument.
    fn call(&mut self, name: &'static str, number: i64, argument: u64) -> Result<u64> {
        self.call_with(name, number, [argument, 0, 0, 0, 0])
    }

    /// Makes the thread do one system call.
    pub(crate) fn call_with(
        &mut self,
        name: &'static str,
        number: i64,
        arguments: [u64; 5],
    ) -> Result<u64> {
        let registers = call_registers(self.base(), self.gadgets.call, number, arguments);
        self.call_as(name, registers)
    }

    /// Makes the thread call `clone()` with these flags. Returns the number of the new process in
    /// this process's namespace and in that of its parent.
    ///
    /// The child has no stack. If it ever runs, it dies at its first instruction, a `ret`; if no
    /// such instruction is known, at its first access to memory, because all other registers are
    /// zero, too.
    pub(crate) fn call_clone(&mut self, flags: u64) -> Result<(u32, u64)> {
        self.tracee.stop_at_births(true)?;
        let base = if self.guarded() { self.base() } else { blank_registers(&self.saved) };
        let arguments = [flags, NO_STACK, 0, 0, 0];
        let made = self
            .call_as("clone", call_registers(base, self.gadgets.call, libc::SYS_clone, arguments));
        // Where this fails the thread cannot be given back either, which reports it; but no other
        // child is made.
        let undone = self.tracee.stop_at_births(false);
        let theirs = made?;
        undone?;
        let source = || io::Error::other("the kernel did not say what it made");
        let ours = self.born().ok_or_else(|| self.injected("clone", source()))?;
        Ok((ours, theirs))
    }

    /// Returns the process that [`Self::call_clone`] created, even if that failed.
    pub(crate) fn born(&self) -> Option<u32> {
        self.born.filter(|pid| *pid != 0)
    }

    /// Eight bytes on the stopped thread's stack that the thread does not use: below what
    /// gives it back, or else below the red zone.
    pub(crate) fn free_word(&self) -> HostVirt {
        self.free_bytes(8)
    }

    /// As many bytes there, which may lie below the mapped part of the stack.
    pub(crate) fn free_bytes(&self, count: usize) -> HostVirt {
        let used = self.frame_at.unwrap_or(self.saved.rsp.wrapping_sub(RED_ZONE_BYTES));
        HostVirt(used.wrapping_sub(count as u64) & !7)
    }

    fn injected(&self, call: &'static str, source: io::Error) -> Error {
        Error::Injected { pid: self.process.pid(), call, source }
    }

    fn call_as(&mut self, name: &'static str, registers: libc::user_regs_struct) -> Result<u64> {
        self.tracee.set_registers(registers)?;
        self.run_to(Stop::Entry)?;
        self.run_to(Stop::Exit)?;
        let answer = self.tracee.registers()?.rax.cast_signed();
        match i32::try_from(answer) {
            Ok(code) if code < 0 => Err(self.injected(name, io::Error::from_raw_os_error(-code))),
            _ => Ok(answer.cast_unsigned()),
        }
    }

    /// Runs the thread until it stops for `wanted`.
    fn run_to(&mut self, wanted: Stop) -> Result<()> {
        loop {
            self.tracee.resume_to_syscall()?;
            match self
                .tracee
                .wait_for_stop("run a system call in the main thread", self.deadline)?
            {
                stop if stop == wanted => return Ok(()),
                // The process was stopped or continued as a whole: our call goes on.
                Stop::Event => {}
                Stop::Born(pid) => self.born = Some(pid),
                Stop::Signal(libc::SIGSTOP) => self.stop_came = true,
                // All others are blocked, so this one was forced by what we made the thread do.
                Stop::Signal(signal) => {
                    let source = io::Error::other(format!("it caused signal {signal}"));
                    return Err(self.injected("system call", source));
                }
                Stop::Entry | Stop::Exit => {
                    let source = io::Error::other("it stopped at another system call");
                    return Err(self.injected("system call", source));
                }
            }
        }
    }

    /// Gives the thread back as it was found, from whatever state it is in.
    ///
    /// Registers are restored in an event stop and nowhere else: only there the kernel, on its way
    /// out, still looks whether an interrupted system call is to be restarted.
    pub(crate) fn restore(&mut self) -> Result<()> {
        let deadline = Instant::now() + SESSION_MAX;
        self.tracee.interrupt()?;
        loop {
            match self.tracee.wait_for_stop("give the main thread back", deadline)? {
                Stop::Event => break,
                Stop::Signal(libc::SIGSTOP) => self.stop_came = true,
                Stop::Entry => {
                    // The call is not made.
                    let mut registers = self.tracee.registers()?;
                    registers.orig_rax = u64::MAX;
                    self.tracee.set_registers(registers)?;
                }
                Stop::Born(pid) => self.born = Some(pid),
                Stop::Exit | Stop::Signal(_) => {}
            }
            self.tracee.resume(0)?;
        }
        // In this order: as long as the registers are ours, the frame restores the mask as well.
        self.tracee.set_signal_mask(self.mask)?;
        self.tracee.set_registers(self.saved)?;
        self.restored = true;
        // Only now: as long as the registers are ours, the frame has to stay. A failure leaves
        // bytes there that no correct program reads.
        if let Some(below) = &self.below_stack {
            let _ = write_memory(self.process, below.at, &below.bytes);
        }
        self.tracee.detach()?;
        if self.stop_came {
            pidfd_send_signal(self.process.pidfd(), Signal::STOP).map_err(|source| {
                Error::Attach {
                    pid: self.process.pid(),
                    operation: "send SIGSTOP again",
                    source: source.into(),
                }
            })?;
        }
        Ok(())
    }
}

impl Drop for Hijack<'_> {
    fn drop(&mut self) {
        if !self.restored {
            // The error that led here is the one to report; failing again, the end of this thread
            // detaches.
            let _ = self.restore();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::HostRange;
    use std::process::{Command, Stdio};

    /// Without a way back of its own the process is attached to all the same, and goes on.
    #[test]
    fn a_process_without_a_way_back_is_attached_to() {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat");
        let process = Process::open(child.id()).unwrap();
        let gadgets = Gadgets::without_way_back(&process).unwrap();
        let attached: Vec<_> =
            (0..20).map(|_| run_session(&process, gadgets, Filter::MaySuspend).unwrap()).collect();
        assert!(attached.iter().all(|attached| !attached.guarded));
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success(), "it ends of itself");
    }

    /// QEMU 7.2 reads memory below its main thread's stack (invariant 5).
    #[test]
    fn the_memory_below_the_stack_is_left_as_it_was() {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat");
        let process = Process::open(child.id()).unwrap();
        let stack_pointer = stack_pointer_in_a_read(child.id());
        let below = HostRange { start: HostVirt(stack_pointer - 12_000), len_bytes: 12_000 };
        // A pattern, as zeros could be there before and after.
        let pattern: Vec<u8> = (0..below.len_bytes).map(|i| (i % 251) as u8 + 1).collect();
        write_memory(&process, below.start, &pattern[..pattern.len() - 128]).unwrap();
        let read = || {
            let mut bytes = vec![0; pattern.len()];
            read_memory(&process, below.start, &mut bytes).unwrap();
            bytes
        };
        let before = read();
        let gadgets = Gadgets::find(&process).unwrap();
        assert!(run_session(&process, gadgets, Filter::MaySuspend).unwrap().guarded);
        assert!(read() == before, "after a guarded session");
        in_session(&process, |hijack| write_memory(&process, hijack.free_word(), &[0xee; 8]))
            .unwrap();
        assert!(read() == before, "after a session that used the free word");
        let gadgets = Gadgets::without_way_back(&process).unwrap();
        let mut hijack = Hijack::stop(&process, gadgets, SESSION_MAX, Filter::MaySuspend).unwrap();
        write_memory(&process, hijack.free_word(), &[0xee; 8]).unwrap();
        assert!(read() != before, "the word is among the bytes compared");
        hijack.restore().unwrap();
        assert!(read() == before, "after a session without a frame");
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success(), "it ends of itself");
    }

    /// The stack pointer of a process once it waits for its standard input.
    fn stack_pointer_in_a_read(pid: u32) -> u64 {
        for _ in 0..1000 {
            let text = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
            let words: Vec<&str> = text.split_whitespace().collect();
            if let ["0", "0x0", .., stack_pointer, _] = words[..] {
                return u64::from_str_radix(stack_pointer.trim_start_matches("0x"), 16).unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("cat does not read");
    }
}
