//! A copy of a process's private memory at one instant: a child of the process that never runs.
//!
//! ```text
//!   target     running ─ seize ─▶ stopped ─ madvise, clone, madvise ─▶ running ············ stopped ─▶ running
//!                                             │                        (drop: seize, wait4(child)) ▲
//!   child                                     └─▶ born stopped ─ close_range ─▶ frozen ─ killed ─▶ zombie ─▶ gone
//!                                                                                 └─ read: the memory at the clone
//! ```
//!
//! The kernel copies the page tables and shares each page until the target writes it. The child
//! does not write. QEMU keeps guest RAM out of its children (`MADV_DONTFORK`). The session removes
//! this flag for the time of the clone, and sets it again where it was set.
//!
//! Invariants:
//! 1. The child executes no code of the target: it is traced from its birth and stopped before its
//!    first instruction. It makes one system call, through the vdso. A child that was released
//!    would die at once, because it has no stack (see `Hijack::call_clone`).
//! 2. The child holds only memory: it shares the table of open files at its birth and then leaves
//!    it (`CLOSE_RANGE_UNSHARE`), so it keeps no socket, lock or disk of the target open.
//! 3. The child ends with the snapshot. It also ends with the thread that traces it
//!    (`PTRACE_O_EXITKILL`).
//! 4. The target does not notice the child: its end sends no signal, and a plain `wait` does not
//!    return it. When the snapshot is dropped, it has the target reap the child. If Keyframe dies
//!    first, a zombie stays until the next snapshot or the target's end. If Keyframe dies during
//!    the fork, the target continues as after any attachment (see `attach`). Its memory may then
//!    lack `MADV_DONTFORK`, so that a later fork of QEMU itself costs more.
//!
//! The copy is of one instant only if the target does not run. This module stops only the main
//! thread, so the caller pauses the VM first. As long as the snapshot exists, each first write of
//! the target copies a page.
//!
//! Refused: shared memory (both sides would see each other's writes), pages of hugetlbfs (when
//! their pool is empty, the kernel takes them away from the child), memory that is wiped or not
//! copied in a child, and seccomp (a filter that denies clone kills the process, and the filter
//! cannot be queried). Of private file memory the pages that the target has written are frozen; the
//! others are read from the file.

use crate::attach::{Filter, Hijack, SESSION_MAX, call_registers};
use crate::gadgets::Gadgets;
use crate::maps::covering;
use crate::ptrace::{Stop, Tracee};
use crate::ranges::{between, intersection};
use crate::{Error, Process, Result};
use keyframe_units::{HostRange, PAGE_BYTES};
use rustix::process::{Signal, pidfd_send_signal};
use std::io;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest that the target's main thread is stopped for the fork: the page tables of some TiB.
const FORK_MAX: Duration = Duration::from_secs(10);
/// How long the child may take to die: the kernel frees the pages that the target has rewritten.
const END_MS_MAX: u32 = 10_000;
/// How often a clone is tried that a stop of the whole process interrupts.
const TRIES_MAX: u32 = 100;
/// The number of zombies of earlier snapshots that one session reaps.
const SWEPT_MAX: u32 = 16;
/// How often, and how far apart, the target is asked to reap the child.
const REAPS_MAX: u32 = 50;
const REAP_SLEEP: Duration = Duration::from_millis(1);
/// The kernel's internal error number for a call that it restarts.
const ERESTARTNOINTR: i32 = 513;
/// Shares the table of open files, which saves copying it. The low byte, the signal at the child's
/// end, is 0.
const CLONE_FLAGS: u64 = libc::CLONE_FILES as u64;

/// The frozen memory of a process at one instant. [`Self::end`] or a drop releases it.
#[derive(Debug)]
pub struct FrozenCopy {
    child: Process,
    stopped_ns: u64,
    /// Dropping it ends the tracing thread.
    hold: Option<Sender<()>>,
    keeper: Option<JoinHandle<Result<()>>>,
}

/// A fork prepared while the VM runs, to be used in its pauses.
#[derive(Debug)]
pub struct ForkPlan {
    target: Process,
    gadgets: Gadgets,
    /// The ranges with `MADV_DONTFORK`.
    hidden: Vec<HostRange>,
}

impl ForkPlan {
    /// Creates the plan, after a check that a fork freezes `ranges` of the memory of `process`:
    /// whole pages of private memory. The plan is valid until the process maps memory anew there.
    /// Takes some milliseconds for each GiB.
    ///
    /// Errors: memory that a fork does not freeze ([`Error::NotForkable`]); a process under seccomp
    /// ([`Error::Seccomp`]).
    pub fn new(process: &Process, ranges: &[HostRange]) -> Result<Self> {
        let hidden = check(process, ranges)?;
        Ok(Self { target: process.try_clone()?, gadgets: Gadgets::find(process)?, hidden })
    }

    /// Freezes a copy of the ranges, and of all other memory that a child inherits, and returns it.
    /// The caller makes sure that no thread of the process writes there meanwhile; otherwise the
    /// copy is not of one instant. As with [`crate::attach::inject_userfaultfd`], no thread here
    /// may be in `waitpid` for the process.
    ///
    /// Errors: a process under seccomp by now ([`Error::Seccomp`]); the fork fails in the process
    /// ([`Error::Injected`], mostly for lack of memory); all errors of attaching. The process runs
    /// on unchanged after an error.
    pub fn fork(&self) -> Result<FrozenCopy> {
        let pid = self.target.pid();
        let spawn = |source| Error::Attach { pid, operation: "start a thread", source };
        ensure_no_seccomp(&self.target)?;
        let plan = Self {
            target: self.target.try_clone()?,
            gadgets: self.gadgets,
            hidden: self.hidden.clone(),
        };
        let (hold, until_dropped) = channel();
        let (ready, answer) = sync_channel(1);
        let keeper = std::thread::Builder::new().name("snapshot".into());
        let keeper = keeper.spawn(move || keep(&plan, &ready, &until_dropped)).map_err(spawn)?;
        match answer.recv() {
            Ok(Ok((child, stopped_ns))) => {
                Ok(FrozenCopy { child, stopped_ns, hold: Some(hold), keeper: Some(keeper) })
            }
            Ok(Err(error)) => {
                let _ = keeper.join();
                Err(error)
            }
            // It ended without an answer: it panicked.
            Err(_) => Err(spawn(io::Error::other("it panicked"))),
        }
    }
}

impl FrozenCopy {
    /// Makes a [`ForkPlan`] and forks. Errors: those of [`ForkPlan::new`] and [`ForkPlan::fork`].
    pub fn fork(process: &Process, ranges: &[HostRange]) -> Result<Self> {
        ForkPlan::new(process, ranges)?.fork()
    }

    /// Returns the frozen process, for [`crate::read_memory`] and [`crate::memory::GuestReader`].
    /// If it is killed, reading it fails.
    pub fn process(&self) -> &Process {
        &self.child
    }

    /// Returns how long the main thread of the process was stopped, in nanoseconds.
    pub fn stopped_ns(&self) -> u64 {
        self.stopped_ns
    }

    /// Releases the copy. Stops the main thread of the process for a tenth of a millisecond.
    ///
    /// Errors: the process could not be attached to, so that a zombie child of it remains.
    pub fn end(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        drop(self.hold.take());
        let Some(keeper) = self.keeper.take() else { return Ok(()) };
        let panicked = |_| {
            let source = io::Error::other("it panicked");
            Err(Error::Attach {
                pid: self.child.pid(),
                operation: "end the thread of a snapshot",
                source,
            })
        };
        keeper.join().unwrap_or_else(panicked)
    }
}

impl Drop for FrozenCopy {
    fn drop(&mut self) {
        // A drop cannot report an error. What can be left is a zombie, which the next snapshot
        // reaps.
        let _ = self.finish();
    }
}

fn ensure_no_seccomp(process: &Process) -> Result<()> {
    match process.status_field("Seccomp")?.as_deref() {
        None | Some("0") => Ok(()),
        Some(_) => Err(Error::Seccomp { pid: process.pid() }),
    }
}

/// Checks that a fork freezes `ranges`. Returns the parts that have `MADV_DONTFORK` now.
fn check(process: &Process, ranges: &[HostRange]) -> Result<Vec<HostRange>> {
    let pid = process.pid();
    ensure_no_seccomp(process)?;
    let maps = process.maps()?;
    let flags = mapping_flags(&process.read_file("smaps")?);
    let mut hidden = Vec::new();
    for &range in ranges {
        let page_bytes = PAGE_BYTES as u64;
        let whole =
            range.start.0.is_multiple_of(page_bytes) && range.len_bytes.is_multiple_of(page_bytes);
        if !whole || range.len_bytes == 0 || range.start.checked_add(range.len_bytes).is_none() {
            return Err(Error::Unaligned { pid, operation: "fork", range, page_bytes });
        }
        let unmapped = |hole| Error::Unmapped { pid, operation: "fork", range, hole };
        for mapping in covering(&maps, range).map_err(unmapped)? {
            let Some(range) = intersection(mapping.range, range) else { continue };
            let refuse = |why| Err(Error::NotForkable { pid, range, why });
            if mapping.shared {
                return refuse("it is shared memory, which a fork does not freeze");
            }
            if mapping.page_bytes != page_bytes {
                return refuse("it is made of huge pages of hugetlbfs, which a fork may lose");
            }
        }
        for mapping in &flags {
            let Some(part) = intersection(mapping.range, range) else { continue };
            if mapping.special {
                let why = "it is memory of a device, or wiped in a child";
                return Err(Error::NotForkable { pid, range: part, why });
            }
            if mapping.hidden {
                hidden.push(part);
            }
        }
    }
    Ok(hidden)
}

/// The flags of a mapping in `smaps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappingFlags {
    pub range: HostRange,
    /// `MADV_DONTFORK`.
    hidden: bool,
    /// `MADV_WIPEONFORK`, or not ordinary memory at all.
    special: bool,
    /// `MADV_MERGEABLE`: the kernel may merge pages that are alike (KSM).
    pub mergeable: bool,
}

/// The flags of all mappings, from the text of `smaps`.
pub(crate) fn mapping_flags(smaps: &[u8]) -> Vec<MappingFlags> {
    let address = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut out = Vec::new();
    let mut current = None;
    for line in String::from_utf8_lossy(smaps).lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
            let special = has("wf") || has("io") || has("pf");
            let (hidden, mergeable) = (has("dc"), has("mg"));
            out.extend(current.take().map(|range| MappingFlags {
                range,
                hidden,
                special,
                mergeable,
            }));
        } else if let Some((start, end)) =
            line.split(' ').next().and_then(|word| word.split_once('-'))
            && let (Some(start), Some(end)) = (address(start), address(end))
        {
            current = Some(between(start, end));
        }
    }
    out
}

/// The pid of the child, in Keyframe's and in the target's pid namespace.
#[derive(Clone, Copy, Debug)]
struct Born {
    ours: u32,
    theirs: u64,
}

/// Keeps a snapshot in a thread of its own: a traced process belongs to the thread that traces it.
fn keep(
    plan: &ForkPlan,
    ready: &SyncSender<Result<(Process, u64)>>,
    until_dropped: &Receiver<()>,
) -> Result<()> {
    let (target, gadgets) = (&plan.target, plan.gadgets);
    let (born, stopped_ns) = match fork_off(target, gadgets, &plan.hidden) {
        Ok(made) => made,
        Err(error) => {
            let _ = ready.send(Err(error));
            return Ok(());
        }
    };
    let child = match Process::open(born.ours) {
        Ok(child) => child,
        Err(error) => {
            let _ = ready.send(Err(error));
            return reap(target, gadgets, born);
        }
    };
    let tracee = Tracee::born(&child);
    match settle(&child, &tracee, gadgets).and_then(|()| child.try_clone()) {
        Ok(handle) => {
            if ready.send(Ok((handle, stopped_ns))).is_ok() {
                // Nothing is ever sent: this ends when the snapshot lets go of its side.
                let _ = until_dropped.recv();
            }
        }
        Err(error) => drop(ready.send(Err(error))),
    }
    bury(&child, &tracee)?;
    reap(target, gadgets, born)
}

/// Makes the target create the child. Returns the time for which the target was stopped, in
/// nanoseconds.
fn fork_off(target: &Process, gadgets: Gadgets, hidden: &[HostRange]) -> Result<(Born, u64)> {
    let mut hijack = Hijack::stop(target, gadgets, FORK_MAX, Filter::MaySuspend)?;
    sweep(&mut hijack);
    let made = make_child(&mut hijack, hidden);
    let undone = hijack.restore();
    let stopped_ns = hijack.stopped_ns();
    match made.and_then(|born| undone.map(|()| born)) {
        Ok(born) => Ok((born, stopped_ns)),
        Err(error) => {
            if let Some(ours) = hijack.born() {
                drop(hijack);
                abandon(target, gadgets, Born { ours, theirs: ours.into() });
            }
            Err(error)
        }
    }
}

fn make_child(hijack: &mut Hijack<'_>, hidden: &[HostRange]) -> Result<Born> {
    let advise = |hijack: &mut Hijack<'_>, range: &HostRange, advice: i32| {
        let arguments = [range.start.0, range.len_bytes, advice as u64, 0, 0];
        hijack.call_with("madvise", libc::SYS_madvise, arguments).map(drop)
    };
    let shown = hidden.iter().try_for_each(|range| advise(hijack, range, libc::MADV_DOFORK));
    let made = shown.and_then(|()| clone(hijack));
    // Whatever failed, all of them; the first failure is the one to tell.
    let again = hidden.iter().map(|range| advise(hijack, range, libc::MADV_DONTFORK));
    let again = again.fold(Ok(()), Result::and);
    made.and_then(|born| again.map(|()| born))
}

fn clone(hijack: &mut Hijack<'_>) -> Result<Born> {
    let mut tries = 0;
    loop {
        tries += 1;
        match hijack.call_clone(CLONE_FLAGS) {
            Ok((ours, theirs)) => return Ok(Born { ours, theirs }),
            Err(Error::Injected { source, .. })
                if source.raw_os_error() == Some(ERESTARTNOINTR) && tries < TRIES_MAX => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes the target reap the zombies of earlier snapshots. It waits only for children whose end
/// sends no signal (`__WCLONE`). QEMU has no such children of its own.
fn sweep(hijack: &mut Hijack<'_>) {
    let options = (libc::WNOHANG | libc::__WCLONE) as u64;
    for _ in 0..SWEPT_MAX {
        match hijack.call_with("wait4", libc::SYS_wait4, [u64::MAX, 0, options, 0, 0]) {
            Ok(pid) if pid > 0 => {}
            // None, or none that has ended. A failure of more than that shows in the next call.
            _ => break,
        }
    }
}

/// Waits for the child's first stop, has it end with this thread, and has it leave the target's
/// files.
fn settle(child: &Process, tracee: &Tracee<'_>, gadgets: Gadgets) -> Result<()> {
    let deadline = Instant::now() + SESSION_MAX;
    tracee.wait_for_stop("stop at birth", deadline)?;
    tracee.die_with_tracer()?;
    let arguments = [0, u64::from(u32::MAX), u64::from(libc::CLOSE_RANGE_UNSHARE), 0, 0];
    let before = tracee.registers()?;
    tracee.set_registers(call_registers(before, gadgets.call, libc::SYS_close_range, arguments))?;
    let mut entered = false;
    loop {
        tracee.resume_to_syscall()?;
        match tracee.wait_for_stop("close the files of the copy", deadline)? {
            Stop::Entry => entered = true,
            Stop::Exit if entered => break,
            // A stop of the whole process group, or a signal to it, which is not taken.
            Stop::Event | Stop::Signal(libc::SIGSTOP) => {}
            Stop::Exit | Stop::Born(_) | Stop::Signal(_) => {
                let source = io::Error::other("the copy did not make the call");
                return Err(Error::Injected { pid: child.pid(), call: "close_range", source });
            }
        }
    }
    match i32::try_from(tracee.registers()?.rax.cast_signed()) {
        Ok(0) => Ok(()),
        answer => {
            let source = io::Error::from_raw_os_error(answer.map_or(0, i32::wrapping_neg));
            Err(Error::Injected { pid: child.pid(), call: "close_range", source })
        }
    }
}

/// Kills the child and detaches from it. Its parent reaps it.
fn bury(child: &Process, tracee: &Tracee<'_>) -> Result<()> {
    // An error means that another process has killed it already.
    let _ = pidfd_send_signal(child.pidfd(), Signal::KILL);
    if !child.exits_within(END_MS_MAX) {
        let waited_ms = END_MS_MAX.into();
        return Err(Error::AttachTimeout {
            pid: child.pid(),
            operation: "end the copy",
            waited_ms,
        });
    }
    for _ in 0..REAPS_MAX {
        match tracee.take_end() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(REAP_SLEEP);
            }
            // Taken; or not ours to take (nothing is traced any more): the same to the parent.
            _ => break,
        }
    }
    Ok(())
}

/// Makes the target reap the child.
fn reap(target: &Process, gadgets: Gadgets, born: Born) -> Result<()> {
    let options = (libc::WNOHANG | libc::__WALL) as u64;
    for _ in 0..REAPS_MAX {
        if !target.is_alive() {
            return Ok(());
        }
        let mut hijack = Hijack::stop(target, gadgets, SESSION_MAX, Filter::MaySuspend)?;
        let answer = hijack.call_with("wait4", libc::SYS_wait4, [born.theirs, 0, options, 0, 0]);
        hijack.restore()?;
        match answer {
            Ok(0) => std::thread::sleep(REAP_SLEEP),
            Ok(_) => return Ok(()),
            Err(Error::Injected { source, .. }) if source.raw_os_error() == Some(libc::ECHILD) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    let source = io::Error::from(io::ErrorKind::TimedOut);
    Err(Error::Injected { pid: target.pid(), call: "wait4", source })
}

/// Ends a child after an error. A failure here is not reported: the first error is, and the end of
/// this thread ends the child in any case.
fn abandon(target: &Process, gadgets: Gadgets, born: Born) {
    if let Ok(child) = Process::open(born.ours) {
        let _ = bury(&child, &Tracee::born(&child));
    }
    let _ = reap(target, gadgets, born);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_by_mapping() {
        let smaps = "7f00-8f00 rw-p 00000000 00:00 0 \nSize: 4 kB\nVmFlags: rd wr mr mw me ac dc sd \n\
                     9000-a000 rw-s 0 00:01 5  /memfd:a-b (deleted)\nRss: 0 kB\nVmFlags: rd wr sh wf \n\
                     b000-c000 r--p 0 00:00 0 \nVmFlags: rd mg\n";
        let flags = |start, end, hidden, special| {
            let mergeable = start == 0xb000;
            MappingFlags { range: between(start, end), hidden, special, mergeable }
        };
        let expected = [
            flags(0x7f00, 0x8f00, true, false),
            flags(0x9000, 0xa000, false, true),
            flags(0xb000, 0xc000, false, false),
        ];
        assert_eq!(mapping_flags(smaps.as_bytes()), expected);
    }
}
