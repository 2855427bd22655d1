//! One traced thread of another process: the ptrace calls, and nothing of what they are used for.
//!
//! ```text
//!   seize ─▶ running ─ interrupt ─▶ Stop::Event ─ resume_to_syscall ─▶ Stop::Entry ─▶ Stop::Exit ─ ... ─ detach
//!                                        └─ a signal may put a Stop::Signal before any of these;
//!                                           a clone() a Stop::Born between entry and exit, where asked for
//! ```
//!
//! A child that is born to a traced thread which was asked to stop at births is traced from its
//! first instant, and stands still before its first instruction.
//!
//! Stops are found by asking for their siginfo, not by `waitpid`: so the exit status of a target
//! that is our own child stays for the thread that waits for the child, and a wait elsewhere in
//! this process cannot take a stop away from the tracer.
//!
//! Invariant: a traced thread belongs to the thread that seized it; nothing here is `Send`. When
//! that thread ends, the kernel detaches.

use crate::{Error, Process, Result};
use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, size_of};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// The type of a ptrace request in the C library.
#[cfg(target_env = "musl")]
type Request = libc::c_int;
#[cfg(not(target_env = "musl"))]
type Request = libc::c_uint;

const OPTION_SYSCALL_GOOD: usize = libc::PTRACE_O_TRACESYSGOOD as usize;
const OPTION_SUSPEND_SECCOMP: usize = libc::PTRACE_O_SUSPEND_SECCOMP as usize;
/// Siginfo code of a system call stop (with TRACESYSGOOD), and of an event stop above a signal
/// number.
const CODE_SYSCALL: i32 = libc::SIGTRAP | 0x80;
const EVENT_STOP: i32 = libc::PTRACE_EVENT_STOP;
/// Siginfo code of the stop of a thread that has made another process, not asking for SIGCHLD.
const CODE_BORN: i32 = libc::SIGTRAP | libc::PTRACE_EVENT_CLONE << 8;
/// The value of `PTRACE_GETEVENTMSG` at the entry of a system call.
const MESSAGE_ENTRY: u64 = 1;
/// The code segment of 64-bit user code.
const CS_USER_64: u64 = 0x33;
/// The kernel's `NT_X86_XSTATE`: the registers that its xsave instruction saves.
const REGISTERS_XSAVE: usize = 0x202;
/// The most bytes of the extended registers. The largest processors need 11 KiB.
const XSAVE_BYTES_MAX: usize = 16 << 10;

/// The first polls only yield, so that a stop costs microseconds; then we sleep between them.
const POLLS_YIELDING: u32 = 200;
const POLL_SLEEP: Duration = Duration::from_micros(100);

/// The reason why the thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Stopped by an interrupt of the tracer, or because the whole process is stopped.
    Event,
    /// About to make a system call.
    Entry,
    /// Back from a system call.
    Exit,
    /// Stopped in a `clone()` that has created a process with this number, as the tracer sees it.
    Born(u32),
    /// About to take this signal.
    Signal(i32),
}

/// A signal mask as the kernel has it: bit n-1 for signal n.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SignalMask(pub u64);

/// A type that a ptrace request may fill.
///
/// # Safety
///
/// Any bytes must be a value of the type.
unsafe trait Plain: Copy {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}
// SAFETY: a C structure of integers.
unsafe impl Plain for libc::user_regs_struct {}
// SAFETY: a C structure of integers, the rest of it bytes.
unsafe impl Plain for libc::siginfo_t {}

/// A thread that this thread traces.
pub(crate) struct Tracee<'p> {
    process: &'p Process,
    thread_bound: PhantomData<*mut ()>,
}

impl<'p> Tracee<'p> {
    /// Begins to trace the first thread of `process`, which runs on. If permitted, its seccomp
    /// filter is suspended while it is traced, because a filter may answer an unknown system call
    /// by killing the process. Errors: [`Error::Traced`] if another program traces it; the process
    /// has ended; tracing is not permitted.
    pub fn seize(process: &'p Process) -> Result<Self> {
        let tracee = Self { process, thread_bound: PhantomData };
        let seized = tracee
            .seize_with(OPTION_SYSCALL_GOOD | OPTION_SUSPEND_SECCOMP)
            .or_else(|_| tracee.seize_with(OPTION_SYSCALL_GOOD));
        tracee.seized(seized)
    }

    /// Begins to trace as [`Self::seize`] does, but only if the kernel suspends the seccomp filter.
    /// Errors: those of [`Self::seize`]; [`Error::SeccompStays`] if the filter cannot be suspended.
    pub fn seize_unfiltered(process: &'p Process) -> Result<Self> {
        let tracee = Self { process, thread_bound: PhantomData };
        let Err(source) = tracee.seize_with(OPTION_SYSCALL_GOOD | OPTION_SUSPEND_SECCOMP) else {
            return Ok(tracee);
        };
        // If it traces without the option, it is the option that the kernel refuses. The end of this
        // thread ends the tracing.
        if tracee.seize_with(OPTION_SYSCALL_GOOD).is_err() {
            return tracee.seized(Err(source));
        }
        Err(Error::SeccompStays { pid: process.pid() })
    }

    fn seized(self, seized: io::Result<()>) -> Result<Self> {
        let process = self.process;
        let tracee = self;
        let Err(source) = seized else { return Ok(tracee) };
        process.ensure_alive("attach")?;
        let other =
            process.status_field("TracerPid")?.and_then(|pid| pid.parse().ok()).unwrap_or(0);
        if other != 0 {
            return Err(Error::Traced { pid: process.pid(), tracer: other });
        }
        Err(tracee.error("trace it (ptrace)", source))
    }

    /// Returns the first thread of `process`, which this thread traces from its birth.
    pub fn born(process: &'p Process) -> Self {
        Self { process, thread_bound: PhantomData }
    }

    /// Sets whether the threads and processes that the stopped thread creates are traced too, from
    /// their first instruction. Also ends a suspension of the seccomp filter. Error: the kernel
    /// refuses.
    pub fn stop_at_births(&self, stop: bool) -> Result<()> {
        let births = if stop { libc::PTRACE_O_TRACECLONE as usize } else { 0 };
        self.set_options(OPTION_SYSCALL_GOOD | births)
    }

    /// Has the kernel kill the stopped thread's process when the thread that traces it ends. Error:
    /// the kernel refuses.
    pub fn die_with_tracer(&self) -> Result<()> {
        self.set_options(OPTION_SYSCALL_GOOD | libc::PTRACE_O_EXITKILL as usize)
    }

    fn set_options(&self, options: usize) -> Result<()> {
        self.request(libc::PTRACE_SETOPTIONS, 0, options as *mut c_void)
            .map(drop)
            .map_err(|source| self.error("set options (ptrace)", source))
    }

    /// Reads the exit status of this process, which has ended: until then it stays a zombie for its
    /// parent too. Errors: `WouldBlock` if it has not ended; that of `waitpid`.
    pub fn take_end(&self) -> io::Result<()> {
        // SAFETY: the status is not asked for (null is allowed); the process is traced by this
        // thread, so no other thread here waits for it.
        let code = unsafe {
            libc::waitpid(
                self.process.raw_pid(),
                null_mut(),
                libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG,
            )
        };
        match code {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            code if code < 0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    fn seize_with(&self, options: usize) -> io::Result<()> {
        self.request(libc::PTRACE_SEIZE, 0, options as *mut c_void).map(drop)
    }

    /// A ptrace request whose `data` is a number, or null, or points to what that request reads or
    /// writes.
    fn request(&self, request: Request, address: usize, data: *mut c_void) -> io::Result<i64> {
        // SAFETY: each caller passes for `data` what `request` takes: a number (SEIZE, SETOPTIONS,
        // SYSCALL, CONT, DETACH), nothing (INTERRUPT), a pointer to an iovec of live memory
        // (GETREGSET), or a pointer to a live local of the size the request transfers (the rest).
        // The kernel checks that the thread is ours to trace; memory of ours is touched through
        // `data` alone.
        let code =
            unsafe { libc::ptrace(request, self.process.raw_pid(), address as *mut c_void, data) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(code) }
    }

    /// A request that fills a `T`.
    fn fetch<T: Plain>(&self, request: Request, address: usize) -> io::Result<T> {
        let mut value = MaybeUninit::<T>::zeroed();
        self.request(request, address, value.as_mut_ptr().cast())?;
        // SAFETY: zeroed, then partly or wholly overwritten by the kernel; any bytes are a value of
        // a `Plain` type.
        Ok(unsafe { value.assume_init() })
    }

    fn error(&self, operation: &'static str, source: io::Error) -> Error {
        if !self.process.is_alive() {
            return Error::Gone { pid: self.process.pid(), operation: "attach" };
        }
        Error::Attach { pid: self.process.pid(), operation, source }
    }

    /// Requests that the thread stop. It stops later, with [`Stop::Event`]. Error: the kernel
    /// refuses.
    pub fn interrupt(&self) -> Result<()> {
        self.request(libc::PTRACE_INTERRUPT, 0, null_mut())
            .map(drop)
            .map_err(|source| self.error("interrupt the main thread", source))
    }

    /// Why the thread is stopped; `None` while it runs.
    fn stop(&self) -> Result<Option<Stop>> {
        let failed = |source| self.error("ask why the main thread stopped", source);
        let info: libc::siginfo_t = match self.fetch(libc::PTRACE_GETSIGINFO, 0) {
            Ok(info) => info,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                self.process.ensure_alive("attach")?;
                return Ok(None);
            }
            // A stop without a siginfo is one of the whole process.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                return Ok(Some(Stop::Event));
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(Some(match info.si_code {
            CODE_SYSCALL => {
                let message: u64 = self.fetch(libc::PTRACE_GETEVENTMSG, 0).map_err(failed)?;
                if message == MESSAGE_ENTRY { Stop::Entry } else { Stop::Exit }
            }
            CODE_BORN => {
                let message: u64 = self.fetch(libc::PTRACE_GETEVENTMSG, 0).map_err(failed)?;
                Stop::Born(u32::try_from(message).unwrap_or(0))
            }
            code if code >> 8 == EVENT_STOP => Stop::Event,
            _ => Stop::Signal(info.si_signo),
        }))
    }

    /// Waits until the thread stops, at most until `deadline`. Returns the kind of stop. Errors: it
    /// does not stop in time (the error names `operation`); it has ended.
    pub fn wait_for_stop(&self, operation: &'static str, deadline: Instant) -> Result<Stop> {
        let begun = Instant::now();
        let mut polls = 0;
        loop {
            if let Some(stop) = self.stop()? {
                return Ok(stop);
            }
            let now = Instant::now();
            if now >= deadline {
                let waited_ms = u64::try_from((now - begun).as_millis()).unwrap_or(u64::MAX);
                return Err(Error::AttachTimeout { pid: self.process.pid(), operation, waited_ms });
            }
            polls += 1;
            if polls < POLLS_YIELDING {
                std::thread::yield_now();
            } else {
                std::thread::sleep(POLL_SLEEP);
            }
        }
    }

    /// Returns the registers of the stopped thread. Errors: it runs 32-bit code, whose system calls
    /// have other numbers; the kernel refuses.
    pub fn registers(&self) -> Result<libc::user_regs_struct> {
        let registers: libc::user_regs_struct = self
            .fetch(libc::PTRACE_GETREGS, 0)
            .map_err(|source| self.error("read the main thread's registers", source))?;
        if registers.cs == CS_USER_64 {
            return Ok(registers);
        }
        let source = io::Error::new(io::ErrorKind::Unsupported, "it does not run 64-bit code");
        Err(self.error("read the main thread's registers", source))
    }

    /// Sets all registers of the stopped thread. Error: the kernel refuses.
    pub fn set_registers(&self, mut registers: libc::user_regs_struct) -> Result<()> {
        self.request(libc::PTRACE_SETREGS, 0, (&raw mut registers).cast())
            .map(drop)
            .map_err(|source| self.error("set the main thread's registers", source))
    }

    /// Returns the vector registers of the stopped thread and all other state that `xsave` saves,
    /// in the processor's standard format. Error: the kernel refuses.
    pub fn xsave(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; XSAVE_BYTES_MAX];
        let mut area = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        self.request(libc::PTRACE_GETREGSET, REGISTERS_XSAVE, (&raw mut area).cast())
            .map_err(|source| self.error("read the main thread's vector registers", source))?;
        bytes.truncate(area.iov_len);
        Ok(bytes)
    }

    /// Returns the signals that the stopped thread blocks. Error: the kernel refuses.
    pub fn signal_mask(&self) -> Result<SignalMask> {
        self.fetch(libc::PTRACE_GETSIGMASK as Request, size_of::<u64>())
            .map(SignalMask)
            .map_err(|source| self.error("read the main thread's signal mask", source))
    }

    /// Sets the signals that the stopped thread blocks. Error: the kernel refuses.
    pub fn set_signal_mask(&self, mask: SignalMask) -> Result<()> {
        let mut bits = mask.0;
        self.request(libc::PTRACE_SETSIGMASK as Request, size_of::<u64>(), (&raw mut bits).cast())
            .map(drop)
            .map_err(|source| self.error("set the main thread's signal mask", source))
    }

    /// Lets the stopped thread run to the next entry or exit of a system call. Drops a signal that
    /// the thread was about to receive. Error: the kernel refuses.
    pub fn resume_to_syscall(&self) -> Result<()> {
        self.request(libc::PTRACE_SYSCALL, 0, null_mut())
            .map(drop)
            .map_err(|source| self.error("resume the main thread", source))
    }

    /// Lets the stopped thread run on, and delivers `signal` to it (0: none). Error: the kernel
    /// refuses.
    pub fn resume(&self, signal: i32) -> Result<()> {
        self.request(libc::PTRACE_CONT, 0, signal as usize as *mut c_void)
            .map(drop)
            .map_err(|source| self.error("resume the main thread", source))
    }

    /// Ends the tracing of the stopped thread, which runs on, or stays stopped if its process is
    /// stopped. Error: the kernel refuses.
    pub fn detach(&self) -> Result<()> {
        self.request(libc::PTRACE_DETACH, 0, null_mut())
            .map(drop)
            .map_err(|source| self.error("detach", source))
    }
}
