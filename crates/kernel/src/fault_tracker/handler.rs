//! The thread that answers the process's first writes.
//!
//! ```text
//!   waiting ─ messages ─▶ take the lock, read up to 64:   remove ─▶ note, tell the hook
//!      ▲                                                  fault  ─▶ tell the hook, remove the protection (wakes), note
//!      └──── lock given back ◀──────────────────────────────────────┘
//!   failed: end the tracking of everything (wakes all), then only read on, so that no discard waits
//! ```
//!
//! Messages are read under the lock, so that a drain that holds it knows: no page loses its
//! protection now, and no discard can have got past that was not noted.
//!
//! A fault can come late, for a page that was opened meanwhile, by another thread's fault: what was
//! opened since the last drain is noted (one bit a page), and told to no hook again.

use super::{BUSY_MAX, BUSY_SLEEP, MemoryEvent, MemoryEventHook};
use crate::abi::{self, MESSAGE_BYTES, Message};
use crate::mapped_range::MappedRange;
use crate::ranges::{between, intersection, union};
use crate::{Process, priority};
use keyframe_locks::IgnorePoison;
use keyframe_units::{HostRange, HostVirt};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const MESSAGES_MAX: usize = 64;

/// The state that the tracker and its handler share.
pub(super) struct Shared {
    pub process: Process,
    pub uffd: OwnedFd,
    pub state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// The tracked ranges, in rising order, without overlap.
    pub segments: Vec<Segment>,
    /// The ranges that are registered and were never drained.
    pub unscanned: Vec<HostRange>,
    /// The ranges of the segments that were discarded at any time.
    pub discarded: Vec<HostRange>,
    /// True from the first discard on, wherever it was.
    pub has_discarded: bool,
    pub hook: Option<MemoryEventHook>,
    /// The reason why nothing is tracked any more.
    failure: Option<(io::ErrorKind, String)>,
}

/// A registered stretch of one mapping.
#[derive(Debug)]
pub(super) struct Segment {
    pub stretch: MappedRange,
    /// One bit for each page: the handler removed its protection since it was last drained.
    opened: Vec<u64>,
}

impl Segment {
    /// Makes the segment of a stretch of which the handler has not removed any protection yet.
    pub fn new(stretch: MappedRange) -> Self {
        let pages = stretch.range.len_bytes / stretch.page_bytes;
        Self { stretch, opened: vec![0; pages.div_ceil(64) as usize] }
    }

    /// Returns the part of this segment in `range`, which lies in the segment. Forgets the opened
    /// pages, so that their first writes are reported again.
    pub fn part(&self, range: HostRange) -> Self {
        Self::new(MappedRange { range, ..self.stretch })
    }

    /// The page at `address`, which lies in this segment, and its number.
    fn page(&self, address: u64) -> (HostRange, u64) {
        let number = (address - self.stretch.range.start.0) / self.stretch.page_bytes;
        let start = self.stretch.range.start.0 + number * self.stretch.page_bytes;
        (between(start, start + self.stretch.page_bytes), number)
    }

    fn is_opened(&self, number: u64) -> bool {
        self.opened.get((number / 64) as usize).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    fn set_opened(&mut self, number: u64, opened: bool) {
        if let Some(word) = self.opened.get_mut((number / 64) as usize) {
            let bit = 1 << (number % 64);
            *word = if opened { *word | bit } else { *word & !bit };
        }
    }
}

impl State {
    /// Returns the error that ended the tracking. Returns `None` while it works.
    pub fn broken(&self) -> Option<io::Error> {
        self.failure.as_ref().map(|(kind, text)| io::Error::new(*kind, text.clone()))
    }

    /// Records that `range` is write-protected: the next write to a page of it is a first write.
    pub fn note_protected(&mut self, range: HostRange) {
        for segment in &mut self.segments {
            if let Some(part) = intersection(segment.stretch.range, range) {
                let (_, first) = segment.page(part.start.0);
                (first..first + part.len_bytes / segment.stretch.page_bytes)
                    .for_each(|page| segment.set_opened(page, false));
            }
        }
    }

    /// Calls `each` with the parts of `range` whose protection the handler did not remove.
    pub fn each_closed(&self, range: HostRange, mut each: impl FnMut(HostRange)) {
        for segment in &self.segments {
            let Some(part) = intersection(segment.stretch.range, range) else { continue };
            let (_, first) = segment.page(part.start.0);
            let (_, last) = segment.page(part.end().0 - 1);
            for number in (first..=last).filter(|number| !segment.is_opened(*number)) {
                let (page, _) = segment
                    .page(segment.stretch.range.start.0 + number * segment.stretch.page_bytes);
                each(page);
            }
        }
    }

    fn segment_at(&mut self, address: u64) -> Option<&mut Segment> {
        let index =
            self.segments.partition_point(|segment| segment.stretch.range.end().0 <= address);
        self.segments.get_mut(index).filter(|segment| segment.stretch.range.start.0 <= address)
    }

    fn note_discard(&mut self, start: u64, end: u64) {
        // Also of memory that is registered no more: what is under way says nothing of when it
        // ends.
        self.has_discarded = true;
        let parts = self.segments.iter().filter_map(|segment| {
            let part = intersection(segment.stretch.range, between(start, end))?;
            let (first, _) = segment.page(part.start.0);
            let (last, _) = segment.page(part.end().0 - 1);
            Some(between(first.start.0, last.end().0))
        });
        let parts: Vec<HostRange> = parts.collect();
        self.discarded = union(&[&self.discarded, &parts]);
        if let Some(hook) = &self.hook {
            for part in parts {
                hook(MemoryEvent::Discard(part));
            }
        }
    }
}

/// The result of handling a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Done,
    /// The fault must wait for a discard in progress.
    Later,
}

impl Shared {
    /// Locks the state and returns the guard.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    /// Reads the messages that have arrived. Returns their number.
    fn read(&self, mut each: impl FnMut(Message)) -> io::Result<usize> {
        let mut bytes = [0; MESSAGE_BYTES * MESSAGES_MAX];
        let got = match rustix::io::read(&self.uffd, &mut bytes) {
            Ok(got) => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let (messages, _) = bytes.get(..got).unwrap_or_default().as_chunks::<MESSAGE_BYTES>();
        for message in messages {
            each(Message::parse(message));
        }
        Ok(messages.len())
    }

    /// Lets the writes to the page at `address` go on.
    fn open(&self, state: &mut State, address: HostVirt) -> io::Result<Answer> {
        let hook = state.hook.clone();
        let Some(segment) = state.segment_at(address.0) else {
            // Registered no more, which has woken the writer.
            return Ok(Answer::Done);
        };
        let (page, number) = segment.page(address.0);
        if let Some(hook) = hook.filter(|_| !segment.is_opened(number)) {
            hook(MemoryEvent::Write(page));
        }
        let Err(error) =
            abi::uffd_remove_protection(self.uffd.as_fd(), page.start.0, page.len_bytes)
        else {
            segment.set_opened(number, true);
            return Ok(Answer::Done);
        };
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(Answer::Later),
            // No memory is registered there any more: unmapped, or unregistered by a tracker that
            // is being dropped. The waiting threads touch the page again.
            Some(libc::ENOENT | libc::EINVAL) => {
                let _ = abi::uffd_wake(self.uffd.as_fd(), page.start.0, page.len_bytes);
                Ok(Answer::Done)
            }
            // The process has exited: no thread waits.
            Some(libc::ESRCH) => Ok(Answer::Done),
            _ => Err(error),
        }
    }

    /// Reads what there is, and answers it; true if faults are left for later in `faults`.
    fn answer(&self, faults: &mut VecDeque<HostVirt>) -> io::Result<bool> {
        let mut state = self.lock();
        self.read(|message| match message {
            Message::Fault { address } => faults.push_back(HostVirt(address)),
            Message::Remove { start, end } => state.note_discard(start, end),
            Message::Other(_) => {}
        })?;
        while let Some(address) = faults.front().copied() {
            if self.open(&mut state, address)? == Answer::Later {
                return Ok(true);
            }
            faults.pop_front();
        }
        Ok(false)
    }

    /// Handles messages until `stop` becomes readable.
    fn serve(&self, stop: &OwnedFd) -> io::Result<()> {
        let mut faults = VecDeque::new();
        let mut busy_since: Option<Instant> = None;
        // Looking for the next fault without sleeping in between was tried: it takes a CPU from the
        // guest, which costs more than it saves.
        while !self.wait(stop, faults.is_empty())? {
            if !self.answer(&mut faults)? {
                busy_since = None;
                continue;
            }
            // The thread that discards has to run before anything is opened.
            if busy_since.get_or_insert_with(Instant::now).elapsed() > BUSY_MAX {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "a discard of memory does not end",
                ));
            }
            std::thread::sleep(BUSY_SLEEP);
        }
        Ok(())
    }

    /// Waits for messages (or only looks); true if the thread is to end.
    fn wait(&self, stop: &OwnedFd, idle: bool) -> io::Result<bool> {
        let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(&self.uffd, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut fds, (!idle).then_some(&now)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if fds[1].revents().intersects(PollFlags::ERR | PollFlags::NVAL) {
            return Err(io::Error::other("userfaultfd is in error"));
        }
        Ok(!fds[0].revents().is_empty())
    }

    /// Ends the tracking of all memory because of `why`: no thread waits any more, and each later
    /// drain fails.
    fn release(&self, why: &io::Error) {
        let mut state = self.lock();
        state.failure =
            Some((why.kind(), format!("the handler of first writes has failed: {why}")));
        state.hook = None;
        for segment in &state.segments {
            // The mapping may be gone: then there is nothing to end.
            let _ = self.end_tracking(segment.stretch.range);
        }
    }

    /// Ends the tracking of `range`, and wakes the threads that wait to write there; these then
    /// write without a fault. Error: a call of userfaultfd failed.
    pub fn end_tracking(&self, range: HostRange) -> io::Result<()> {
        let ended = abi::uffd_unregister(self.uffd.as_fd(), range.start.0, range.len_bytes);
        let woken = abi::uffd_wake(self.uffd.as_fd(), range.start.0, range.len_bytes);
        ended.and(woken)
    }
}

/// The running thread; ended and joined on drop.
pub(super) struct Handler {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

/// How often a failed handler looks for discards that wait, should it not be told.
const FAILED_SLEEP: Duration = Duration::from_millis(1);

impl Handler {
    /// Starts the thread that handles the faults of `shared`. Error: the thread or its eventfd
    /// cannot be created.
    pub fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let (shared, told) = (Arc::clone(shared), stop.try_clone()?);
        let thread = std::thread::Builder::new().name("first-writes".into()).spawn(move || {
            // The guest's threads wait for this one. Where it is not permitted, they wait a little
            // longer.
            priority::raise_current_thread();
            let served = catch_unwind(AssertUnwindSafe(|| shared.serve(&told)));
            let why = match served {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error,
                Err(_) => io::Error::other("the hook panicked"),
            };
            shared.release(&why);
            // A discard that was on its way waits to be read, as before.
            while let Ok(false) = shared.wait(&told, true) {
                if shared.read(drop).is_err() {
                    break;
                }
                std::thread::sleep(FAILED_SLEEP);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // Adding to a counter that is far from full; and a thread that has ended needs no word.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_opened_is_known_until_it_is_protected() {
        let segment = |range, page_bytes| {
            Segment::new(MappedRange { range, page_bytes, shared: true, has_file: true })
        };
        let segments = vec![
            segment(between(0x10_0000, 0x18_0000), 0x1000),
            segment(between(0x20_0000, 0x80_0000), 0x20_0000),
        ];
        let mut state = State { segments, ..State::default() };
        for (address, page) in
            [(0x10_5123, 0x10_5000), (0x17_ffff, 0x17_f000), (0x3f_ffff, 0x20_0000)]
        {
            let segment = state.segment_at(address).unwrap();
            let (range, number) = segment.page(address);
            assert_eq!(range.start.0, page);
            assert!(!segment.is_opened(number));
            segment.set_opened(number, true);
            assert!(segment.is_opened(number));
        }
        assert!(state.segment_at(0x19_0000).is_none() && state.segment_at(0x80_0000).is_none());
        state.note_protected(between(0x10_0000, 0x10_6000));
        let opened = |state: &mut State, address| {
            let segment = state.segment_at(address).unwrap();
            let (_, number) = segment.page(address);
            segment.is_opened(number)
        };
        assert!(!opened(&mut state, 0x10_5000));
        assert!(opened(&mut state, 0x17_f000) && opened(&mut state, 0x20_0000));
        state.note_discard(0x3f_f000, 0x40_1000);
        assert_eq!(state.discarded, [between(0x20_0000, 0x60_0000)]);
    }
}
