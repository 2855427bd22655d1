//! Memory of a child process whose pages we place when the process first touches them.
//!
//! ```text
//!                  register              place, place_zeros
//!   empty memfd ───────────▶ missing ──────────────────────────▶ present
//!                              │  ▲                                │
//!            touched: the      │  └──────── punched out ───────────┘
//!            thread waits, and ▼
//!            `wait` lists the page         complete: missing pages read as zeros from then on
//! ```
//!
//! The purpose: the process never reads zeros in place of a page that has not arrived.
//!
//! Invariants:
//! 1. A present page is never overwritten. The kernel refuses to place another page there, and that
//!    is not an error here.
//! 2. If we die, the process never reads a page that was not placed. The kernel turns missing pages
//!    into zeros only when the last descriptor of the userfaultfd closes, and the process keeps a
//!    descriptor until [`MissingPages::release`]. The kernel also kills the process when the thread
//!    that started it ends (`PR_SET_PDEATHSIG`), so that its threads do not wait for ever.
//! 3. Dropping a [`MissingPages`] without [`MissingPages::release`] acts as our death.
//!
//! The thread that started the child must live until the release. Absent: the source of the pages;
//! private memory and huge pages (the memory is a memfd of ours).

use crate::abi::{self, MESSAGE_BYTES, Message};
use crate::attach::{Filter, Hijack, in_session, in_session_with};
use crate::mapped_range;
use crate::{Error, Process, Result, read_memory};
use keyframe_units::{HostRange, HostVirt, PAGE_BYTES};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_send_signal};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const MESSAGES_MAX: usize = 64;
/// The most memory that is discarded by one call.
const DISCARD_BYTES_MAX: u64 = 1 << 30;
/// How often in a row the kernel may ask to try again before that is an error.
const AGAIN_MAX: u32 = 10_000;

/// Memory of a process that is filled as the process touches it. Several threads may use it.
#[derive(Debug)]
pub struct MissingPages {
    process: Process,
    uffd: OwnedFd,
    /// The number of the process's own descriptor, which is closed at the release. `None` if the
    /// process opened it itself: it keeps it then.
    theirs: Option<u64>,
    registered: Vec<HostRange>,
    /// The death signal that the process had before, for [`end_with_parent`].
    death_signal: i32,
}

impl MissingPages {
    /// Makes `process`, a child of this process, open a userfaultfd, and takes a copy of the
    /// descriptor. From now on the kernel kills the process when the thread that started it ends.
    ///
    /// Errors: those of [`crate::attach::inject_userfaultfd`]; [`Error::MissingUserModeOnly`]; the
    /// kernel lacks a feature. After an error the process runs on, and no page is missing.
    pub fn inject(process: &Process) -> Result<Self> {
        let (uffd, theirs, death_signal) = in_session(process, |hijack| open(process, hijack))?;
        let failed = |source| Error::Tracker {
            pid: process.pid(),
            operation: "ask userfaultfd for its features",
            source,
        };
        match abi::uffd_api(uffd.as_fd(), abi::FEATURE_MISSING_SHMEM) {
            Ok(_) => Ok(Self {
                process: process.try_clone()?,
                uffd,
                theirs: Some(theirs),
                registered: Vec::new(),
                death_signal,
            }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Err(Error::MissingFeature { feature: "MISSING_SHMEM", since: "4.11" })
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Takes `uffd`, a userfaultfd that `process` opened over its own memory and passed to this
    /// process. It has registered `ranges` for missing pages itself. The process was started with
    /// [`crate::child_setup::kill_with_parent`].
    pub fn passed(process: &Process, uffd: OwnedFd, ranges: Vec<HostRange>) -> Result<Self> {
        let process = process.try_clone()?;
        Ok(Self { process, uffd, theirs: None, registered: ranges, death_signal: 0 })
    }

    /// Makes threads of the process wait when they touch a page of `range` that is not present.
    /// Errors: part of `range` is not mapped, or registered already.
    pub fn register(&mut self, range: HostRange) -> Result<()> {
        let (pid, operation) = (self.process.pid(), "register");
        for part in mapped_range::mapped(&self.process, range)? {
            if part.page_bytes != PAGE_BYTES as u64 {
                return Err(Error::PageSize {
                    pid,
                    range: part.range,
                    page_bytes: part.page_bytes,
                });
            }
        }
        abi::uffd_register_missing(self.uffd.as_fd(), range.start.0, range.len_bytes)
            .map_err(|source| Error::TrackRange { pid, operation, range, source })?;
        self.registered.push(range);
        Ok(())
    }

    /// Makes all registered pages missing, also those that the process has touched before. Only for
    /// private memory without a file: elsewhere the pages come back from the file. Error: the
    /// process cannot be made to discard them.
    pub fn discard(&self) -> Result<()> {
        for range in &self.registered {
            let mut at = range.start.0;
            while at < range.end().0 {
                // In pieces: a process that has locked its memory has all pages.
                let len_bytes = (range.end().0 - at).min(DISCARD_BYTES_MAX);
                self.discard_piece(at, len_bytes)?;
                at += len_bytes;
            }
        }
        Ok(())
    }

    fn discard_piece(&self, at: u64, len_bytes: u64) -> Result<()> {
        let advise = |advice: i32| {
            in_session(&self.process, |hijack| {
                let arguments = [at, len_bytes, advice as u64, 0, 0];
                hijack.call_with("madvise", libc::SYS_madvise, arguments).map(drop)
            })
        };
        match advise(libc::MADV_DONTNEED) {
            // The memory is locked; Linux 5.18 can discard it.
            Err(Error::Injected { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                advise(libc::MADV_DONTNEED_LOCKED)
            }
            other => other,
        }
    }

    /// Waits until threads of the process wait for pages, and appends the addresses of these pages
    /// to `touched`. A page may come twice, and may be present by now. Returns false if `stop`
    /// became readable.
    ///
    /// Error: the kernel cannot be asked, or the process has exited.
    pub fn wait(&self, stop: BorrowedFd<'_>, touched: &mut Vec<HostVirt>) -> Result<bool> {
        let failed = |source| Error::Tracker {
            pid: self.process.pid(),
            operation: "wait for missing pages",
            source,
        };
        let mut fds =
            [PollFd::from_borrowed_fd(stop, PollFlags::IN), PollFd::new(&self.uffd, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(error) => return Err(failed(error.into())),
        }
        if !fds[0].revents().is_empty() {
            return Ok(false);
        }
        if fds[1].revents().intersects(PollFlags::ERR | PollFlags::NVAL) {
            return Err(failed(io::Error::other("userfaultfd is in error")));
        }
        let mut bytes = [0; MESSAGE_BYTES * MESSAGES_MAX];
        let got = match rustix::io::read(&self.uffd, &mut bytes) {
            Ok(got) => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(failed(error.into())),
        };
        let (messages, _) = bytes.get(..got).unwrap_or_default().as_chunks::<MESSAGE_BYTES>();
        touched.extend(messages.iter().filter_map(|message| match Message::parse(message) {
            Message::Fault { address } => Some(HostVirt(address & !(PAGE_BYTES as u64 - 1))),
            Message::Remove { .. } | Message::Other(_) => None,
        }));
        Ok(true)
    }

    /// Places `content`, whole pages, at address `start`, and wakes the threads that wait for them.
    /// Keeps pages that are present. Returns the number of pages placed.
    ///
    /// Errors: the process is gone; the memory is not registered; no memory.
    pub fn place(&self, start: HostVirt, content: &[u8]) -> Result<u64> {
        self.place_by(start, content.len() as u64, &mut |at, from| {
            abi::uffd_copy(self.uffd.as_fd(), at, content.get(from as usize..).unwrap_or_default())
        })
    }

    /// Places pages of zeros in `range`, as [`Self::place`] places content. Returns the number of
    /// pages placed. Errors: those of [`Self::place`].
    pub fn place_zeros(&self, range: HostRange) -> Result<u64> {
        self.place_by(range.start, range.len_bytes, &mut |at, from| {
            abi::uffd_zero(self.uffd.as_fd(), at, range.len_bytes - from)
        })
    }

    fn place_by(
        &self,
        start: HostVirt,
        len_bytes: u64,
        place: &mut dyn FnMut(u64, u64) -> io::Result<u64>,
    ) -> Result<u64> {
        let page = PAGE_BYTES as u64;
        let (pid, operation) = (self.process.pid(), "place pages at");
        let failed = |source| match source {
            error if io::Error::raw_os_error(&error) == Some(libc::ESRCH) => {
                Error::Gone { pid, operation }
            }
            source => {
                Error::TrackRange { pid, operation, range: HostRange { start, len_bytes }, source }
            }
        };
        let (mut from, mut placed, mut again) = (0, 0, 0);
        while from < len_bytes {
            match place(start.0 + from, from) {
                Ok(0) => {}
                Ok(done) => {
                    placed += done / page;
                    from += done;
                    again = 0;
                    continue;
                }
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    // The page is there: another program placed it. Threads that wait for it have
                    // not been woken yet.
                    self.wake(HostRange { start: HostVirt(start.0 + from), len_bytes: page })?;
                    from += page;
                    continue;
                }
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => return Err(failed(error)),
            }
            again += 1;
            if again > AGAIN_MAX {
                return Err(failed(io::ErrorKind::TimedOut.into()));
            }
            std::thread::yield_now();
        }
        Ok(placed)
    }

    fn wake(&self, range: HostRange) -> Result<()> {
        let (pid, operation) = (self.process.pid(), "wake the threads that wait at");
        match abi::uffd_wake(self.uffd.as_fd(), range.start.0, range.len_bytes) {
            Err(source) => Err(Error::TrackRange { pid, operation, range, source }),
            Ok(()) => Ok(()),
        }
    }

    /// Returns true until the process exits.
    pub fn is_alive(&self) -> bool {
        self.process.is_alive()
    }

    /// Kills the process, because a page that it needs cannot be provided. Error: the kernel
    /// refuses.
    pub fn end_process(&self) -> Result<()> {
        match pidfd_send_signal(self.process.pidfd(), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(source) => Err(Error::Tracker {
                pid: self.process.pid(),
                operation: "end it",
                source: source.into(),
            }),
        }
    }

    /// Ends the handling of missing pages: a page that is still missing reads as zeros from now on.
    /// The caller has placed all other pages. Error: the kernel refuses.
    pub fn complete(&self) -> Result<()> {
        let pid = self.process.pid();
        for range in &self.registered {
            abi::uffd_unregister(self.uffd.as_fd(), range.start.0, range.len_bytes)
                .and_then(|()| abi::uffd_wake(self.uffd.as_fd(), range.start.0, range.len_bytes))
                .map_err(|source| Error::TrackRange {
                    pid,
                    operation: "unregister",
                    range: *range,
                    source,
                })?;
        }
        Ok(())
    }

    /// Ends the link between the process and this one, after [`Self::complete`]: closes the
    /// process's descriptor and removes its death signal.
    ///
    /// As with [`crate::attach::inject_userfaultfd`], no thread here may be in `waitpid` for the
    /// process meanwhile. Errors: those of [`crate::attach::inject_userfaultfd`]; the memory of the
    /// process is complete all the same.
    pub fn release(&self) -> Result<()> {
        // A process that opened the descriptor itself may have a filter that knows no other calls.
        let filter = if self.theirs.is_some() { Filter::MaySuspend } else { Filter::MustSuspend };
        in_session_with(&self.process, filter, |hijack| {
            if let Some(theirs) = self.theirs {
                hijack.call_with("close", libc::SYS_close, [theirs, 0, 0, 0, 0])?;
            }
            end_with_parent(hijack, self.death_signal)
        })
    }
}

/// Opens the descriptor in the target and takes a copy of it. The third is the signal that it got
/// before when the thread that started it ended.
fn open(process: &Process, hijack: &mut Hijack<'_>) -> Result<(OwnedFd, u64, i32)> {
    let before = death_signal(process, hijack)?;
    end_with_parent(hijack, libc::SIGKILL)?;
    let made = descriptor(process, hijack);
    if made.is_err() {
        end_with_parent(hijack, before)?;
    }
    made.map(|(ours, theirs)| (ours, theirs, before))
}

fn descriptor(process: &Process, hijack: &mut Hijack<'_>) -> Result<(OwnedFd, u64)> {
    let pid = process.pid();
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let theirs = match hijack.call_with("userfaultfd", libc::SYS_userfaultfd, [flags, 0, 0, 0, 0]) {
        Err(Error::Injected { source, .. }) if source.raw_os_error() == Some(libc::EPERM) => {
            return Err(Error::MissingUserModeOnly { pid });
        }
        other => other?,
    };
    let ours = i32::try_from(theirs)
        .map_err(io::Error::other)
        .and_then(|fd| Ok(pidfd_getfd(process.pidfd(), fd, PidfdGetfdFlags::empty())?));
    match ours {
        Ok(ours) => Ok((ours, theirs)),
        Err(source) => {
            hijack.call_with("close", libc::SYS_close, [theirs, 0, 0, 0, 0])?;
            Err(Error::Attach { pid, operation: "pidfd_getfd", source })
        }
    }
}

/// The signal that the target gets when the thread that started it ends; 0 for none.
fn end_with_parent(hijack: &mut Hijack<'_>, signal: i32) -> Result<()> {
    let (option, signal) = (libc::PR_SET_PDEATHSIG as u64, signal as u64);
    hijack.call_with("prctl", libc::SYS_prctl, [option, signal, 0, 0, 0]).map(drop)
}

/// The signal that the target receives when its parent ends: the last one that Keyframe or the
/// target set.
fn death_signal(process: &Process, hijack: &mut Hijack<'_>) -> Result<i32> {
    let (option, at) = (libc::PR_GET_PDEATHSIG as u64, hijack.free_word());
    hijack.call_with("prctl", libc::SYS_prctl, [option, at.0, 0, 0, 0])?;
    let mut signal = [0; size_of::<i32>()];
    read_memory(process, at, &mut signal)?;
    Ok(i32::from_ne_bytes(signal))
}
