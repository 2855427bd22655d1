//! Finds the pages of a process that were written since the last drain, and calls a hook before
//! each first write: synchronous write protection, on which copy-on-write is built.
//!
//! ```text
//!              register                     drain
//!   untracked ─────────▶ unscanned ─────────────────────────▶ protected ◀───────────────┐
//!                        (counts as written)                  │                         │ drain
//!                              the process writes: it waits,  │                         │ (reported)
//!                              the hook is called, then       └────────▶ written ───────┘
//! ```
//!
//! The first write to a protected page stops the writing thread. The kernel notifies the handler
//! (`handler.rs`, a thread of its own), which calls the hook and removes the protection, which
//! wakes the writer. The page tables are the only log: a page without protection counts as written.
//! One drain is:
//!
//! ```text
//!   A  written    not protected (PAGEMAP_SCAN), or never drained, or discarded
//!   B  protect    all of A (markers where there is nothing)
//!   C  absent     of A, what was never drained or discarded: looked up after it was protected
//! ```
//!
//! The kernel announces a discard of memory (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`;
//! `UFFD_FEATURE_EVENT_REMOVE`). The discarding thread waits only until the handler has received
//! the event, and discards some time later. So the hook learns of the discard, but cannot copy the
//! pages first. Private anonymous memory then loses its protection, which every later drain sees.
//! Other memory keeps its protection: every later drain reports the pages that were once discarded
//! there.
//!
//! Invariants:
//! 1. A drain protects a page only if it reports the page, or if the page is protected already. It
//!    protects a stretch with protected pages in one call only while no page can lose its
//!    protection unseen: it holds the lock that the handler needs to remove a protection, and
//!    nothing was ever discarded.
//! 2. The hook is called for a page before the first write since the page's last drain. It is not
//!    called for pages that were written already.
//! 3. A thread of the process waits for this process only as long as the hook takes. If the handler
//!    fails, it ends the tracking, which wakes all threads. So does a drop of the tracker, and the
//!    kernel does it if this process dies.
//!
//! A merge of equal pages (KSM) removes their protection. A range for which merging is on is
//! refused at its registration. [`FaultTracker::pages_with_lost_protection`] finds later merges.
//!
//! To freeze a copy: stop the process, set the hook, drain, and let the process continue. The hook
//! receives each page with its frozen content. (If the drain came before the stop, a fault from
//! before the stop could remove a protection without a report.) After the copy call
//! [`FaultTracker::pages_with_lost_protection`]: a copy of such a page is not of that instant.
//!
//! Not seen: holes punched into the file of shared memory by `fallocate`; writes through another
//! mapping of the same file; DMA into pages that were pinned before the drain. Refused: files on
//! disk (the kernel waits only for writes to anonymous memory, memfd, tmpfs and hugetlbfs); 1 GiB
//! pages; a userfaultfd for user-mode faults alone, with which a `read` of QEMU's into guest RAM
//! would fail.

mod handler;

use crate::abi::{self, PageRegion};
use crate::frozen_copy::mapping_flags;
use crate::mapped_range::{self, MappedRange};
use crate::pagemap::{Pagemap, PagemapQuery};
use crate::ranges::{clip, intersection, push_joined, select, split, union, windows, without};
use crate::write_tracker::{ScanStats, WrittenPages};
use crate::{Error, Process, Result};
use handler::{Handler, Segment, Shared, State};
use keyframe_locks::IgnorePoison;
use keyframe_units::{HostRange, PAGE_BYTES};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The largest gap between two pages that one call protects together: a further call costs as much
/// as walking over these entries.
const PROTECT_GAP_BYTES: u64 = 32 << 10;
/// Pages to look up that are closer than this are looked up by one walk.
const LOOK_GAP_BYTES: u64 = 2 << 20;
/// How long a discard may hold up the protecting of pages.
const BUSY_MAX: Duration = Duration::from_secs(2);
const BUSY_SLEEP: Duration = Duration::from_micros(50);
/// The file that reads `1` if the kernel merges equal pages of memory that permits it.
const KSM_RUN: &str = "/sys/kernel/mm/ksm/run";

/// An event that a hook receives. Its range is whole pages of the mapping (4 KiB, or 2 MiB of
/// hugetlbfs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryEvent {
    /// A thread is about to write this page, for the first time since the page was drained. The
    /// page is unchanged until the hook returns.
    Write(HostRange),
    /// The process is discarding these pages. Their content may be lost already.
    Discard(HostRange),
}

/// The function that the handler's thread calls for each event. The thread of the process that
/// writes waits until it returns. It may read the process's memory; it must not call the tracker. A
/// page can come more than once while it is unchanged.
pub type MemoryEventHook = Arc<dyn Fn(MemoryEvent) + Send + Sync>;

/// Tracks first writes to registered ranges of one process. Dropping it ends the tracking and
/// leaves the memory unchanged.
pub struct FaultTracker {
    shared: Arc<Shared>,
    pagemap: Pagemap,
    scratch: Mutex<Vec<PageRegion>>,
    /// All registered ranges, for [`Drop`], which must wake the process before it waits for a hook.
    registered: Vec<HostRange>,
    /// Joined after `drop` has woken the process.
    _handler: Handler,
}

impl FaultTracker {
    /// Takes over `uffd`, a new userfaultfd made by `process` itself (see [`crate::attach`]), and
    /// starts the handler thread. `user_mode_only` tells that the descriptor reports faults of user
    /// mode alone.
    ///
    /// Errors: [`Error::UserModeOnly`] if it does so; [`Error::MissingFeature`] if the kernel lacks
    /// a feature; pagemap may not be read; no thread can be started.
    pub fn new(process: &Process, uffd: OwnedFd, user_mode_only: bool) -> Result<Self> {
        let pid = process.pid();
        if user_mode_only {
            return Err(Error::UserModeOnly { pid });
        }
        let failed = |operation| move |source| Error::Tracker { pid, operation, source };
        let asked = failed("ask userfaultfd for its features");
        if let Err(source) = abi::uffd_api(uffd.as_fd(), abi::fault_features_needed()) {
            // A refusal leaves the descriptor as new; asked for nothing, it tells what there is.
            let has = abi::uffd_api(uffd.as_fd(), 0).map_err(asked)?;
            let missing = abi::FAULT_FEATURES_NEEDED.iter().rev().find(|(bit, ..)| has & bit == 0);
            return Err(missing.map_or(asked(source), |(_, feature, since)| {
                Error::MissingFeature { feature, since }
            }));
        }
        let pagemap = Pagemap::open(process)?;
        let shared =
            Arc::new(Shared { process: process.try_clone()?, uffd, state: Mutex::default() });
        let handler =
            Handler::start(&shared).map_err(failed("start the handler of first writes"))?;
        let scratch = Mutex::new(Pagemap::buffer());
        Ok(Self { shared, pagemap, scratch, registered: Vec::new(), _handler: handler })
    }

    /// Sets the hook, which is called before the first write to a page since the page's last drain,
    /// and when the process discards pages. `None` removes it. When this returns, the former hook
    /// is not running.
    pub fn set_hook(&self, hook: Option<MemoryEventHook>) {
        self.shared.lock().hook = hook;
    }

    /// Starts to track `range`, whole pages of one or more adjacent mappings. Until its first drain
    /// every page of it counts as written, and no write waits.
    ///
    /// Errors: a part of `range` is not mapped, is registered already, or is not whole pages; it
    /// has pages of 1 GiB, or pages that the kernel merges; [`Error::NotWatchable`] if it is a file
    /// on disk; the kernel refuses. Nothing of the range is tracked after an error.
    pub fn register(&mut self, range: HostRange) -> Result<()> {
        let pid = self.shared.process.pid();
        if self.registered.iter().any(|other| intersection(*other, range).is_some()) {
            return Err(Error::Registered { pid, range });
        }
        let stretches = mapped_range::mapped(&self.shared.process, range)?;
        let on_file = stretches.iter().any(|stretch| stretch.has_file);
        self.ensure_not_merged(range)?;
        let mut state = self.shared.lock();
        abi::uffd_register(self.shared.uffd.as_fd(), range.start.0, range.len_bytes).map_err(
            |source| match source.raw_os_error() {
                Some(libc::EINVAL) if on_file => Error::NotWatchable { pid, range },
                _ => self.range_error("register", range, source),
            },
        )?;
        state.segments.extend(stretches.into_iter().map(Segment::new));
        state.segments.sort_unstable_by_key(|segment| segment.stretch.range.start);
        state.unscanned = union(&[&state.unscanned, &[range]]);
        self.registered = union(&[&self.registered, &[range]]);
        Ok(())
    }

    /// Fails if the kernel merges pages of `range`: they would lose their protection without a call
    /// of the hook.
    fn ensure_not_merged(&self, range: HostRange) -> Result<()> {
        // A kernel without KSM has no such file.
        if !std::fs::read_to_string(KSM_RUN).is_ok_and(|text| text.trim() == "1") {
            return Ok(());
        }
        let process = &self.shared.process;
        let mut mergeable =
            mapping_flags(&process.read_file("smaps")?).into_iter().filter(|flags| flags.mergeable);
        match mergeable.find_map(|flags| intersection(flags.range, range)) {
            Some(range) => Err(Error::Merged { pid: process.pid(), range }),
            None => Ok(()),
        }
    }

    /// Ends the tracking of `range` and wakes the threads that wait there.
    ///
    /// Errors: the range is not registered, or the kernel refuses.
    pub fn unregister(&mut self, range: HostRange) -> Result<()> {
        let mut state = self.shared.lock();
        self.parts(&state, range, "unregister")?;
        self.shared
            .end_tracking(range)
            .map_err(|source| self.range_error("unregister", range, source))?;
        let cut = |segment: Segment| {
            without(&[segment.stretch.range], range)
                .into_iter()
                .map(move |left| segment.part(left))
                .collect::<Vec<_>>()
        };
        state.segments = std::mem::take(&mut state.segments).into_iter().flat_map(cut).collect();
        state.unscanned = without(&state.unscanned, range);
        state.discarded = without(&state.discarded, range);
        self.registered = without(&self.registered, range);
        Ok(())
    }

    /// Appends to `out` the pages of `range` that were written or discarded since its last drain,
    /// rising and without overlap, and protects them again. The first drain of a range reports all
    /// of it. Read the pages afterwards: a page that is written meanwhile is reported again.
    /// Returns the statistics of the scan.
    ///
    /// Errors: after [`Error::ScanBroken`], also if the handler has failed, all of `range` counts
    /// as written. After [`Error::Gone`] or any other error nothing was done. Errors leave `out`
    /// unchanged.
    pub fn drain(&self, range: HostRange, out: &mut Vec<WrittenPages>) -> Result<ScanStats> {
        let pid = self.shared.process.pid();
        let mut buffer = self.scratch.lock().ignore_poison();
        let guard = self.shared.lock();
        let parts = self.parts(&guard, range, "drain")?;
        let before = out.len();
        let mut stats = ScanStats::default();
        let drained = self.drain_parts(guard, &parts, &mut buffer, out, &mut stats);
        let gone = !self.shared.process.is_alive();
        if gone || drained.is_err() {
            out.truncate(before);
        }
        match drained {
            _ if gone => Err(Error::Gone { pid, operation: "drain" }),
            Err(source) => Err(Error::ScanBroken { pid, range, source }),
            Ok(()) => {
                stats.runs = (out.len() - before) as u64;
                Ok(stats)
            }
        }
    }

    /// Returns the pages of `range` that lost their protection since their last drain without a
    /// hook call: they were discarded, or merged by the kernel (KSM begun after their
    /// registration). A copy of such a page is valid only if it was made before. Only private
    /// anonymous memory can lose protection so. Pages never drained do not count.
    ///
    /// Errors: `range` is not registered, or not whole pages; the handler has failed; the kernel
    /// refuses.
    pub fn pages_with_lost_protection(&self, range: HostRange) -> Result<Vec<HostRange>> {
        let operation = "look for lost protection";
        let failed = |source| self.range_error(operation, range, source);
        let mut buffer = self.scratch.lock().ignore_poison();
        let guard = self.shared.lock();
        if let Some(source) = guard.broken() {
            return Err(failed(source));
        }
        let mut lost = Vec::new();
        for part in self.parts(&guard, range, operation)? {
            let (fresh, discarded) =
                (clip(&guard.unscanned, part.range), clip(&guard.discarded, part.range));
            let stats = &mut ScanStats::default();
            let written =
                self.written(part, &[], &discarded, &mut buffer, stats).map_err(failed)?;
            for run in select(&written, &fresh, false) {
                guard.each_closed(run, |page| push_joined(&mut lost, page));
            }
        }
        Ok(lost)
    }

    fn drain_parts<'s>(
        &'s self,
        mut guard: MutexGuard<'s, State>,
        parts: &[MappedRange],
        buffer: &mut [PageRegion],
        out: &mut Vec<WrittenPages>,
        stats: &mut ScanStats,
    ) -> io::Result<()> {
        for part in parts {
            let fresh = clip(&guard.unscanned, part.range);
            let discarded = clip(&guard.discarded, part.range);
            let written = self.written(*part, &fresh, &discarded, buffer, stats)?;
            guard = self.protect(guard, &written)?;
            let absent =
                self.absent(&select(&written, &union(&[&fresh, &discarded]), true), buffer, stats)?;
            split(&written, &absent, |range, is_absent| {
                let pages = range.len_bytes / PAGE_BYTES as u64;
                stats.written_pages += pages;
                stats.absent_pages += if is_absent { pages } else { 0 };
                out.push(WrittenPages { range, present: !is_absent });
            });
            // Memory that is not mapped any more has nothing written; that is no answer.
            self.pagemap.ensure_mapped(part.range)?;
        }
        for part in parts {
            guard.unscanned = without(&guard.unscanned, part.range);
        }
        Ok(())
    }

    /// A: what of a stretch of one mapping counts as written.
    fn written(
        &self,
        part: MappedRange,
        fresh: &[HostRange],
        discarded: &[HostRange],
        buffer: &mut [PageRegion],
        stats: &mut ScanStats,
    ) -> io::Result<Vec<HostRange>> {
        if fresh == [part.range] {
            return Ok(fresh.to_vec());
        }
        let mut found = Vec::new();
        let note = |range, _| push_joined(&mut found, range);
        stats.calls += self.pagemap.scan(PagemapQuery::WRITTEN, part.range, buffer, note)?;
        // Where whole page tables were freed there is nothing that the scan could find.
        let mut holes = Vec::new();
        for window in discarded.iter().filter(|_| part.is_anonymous()) {
            let note = |range, categories| {
                if categories & abi::PAGE_SWAPPED == 0 {
                    push_joined(&mut holes, range);
                }
            };
            stats.calls += self.pagemap.scan(PagemapQuery::NOT_PRESENT, *window, buffer, note)?;
        }
        let kept = if part.is_anonymous() { &holes } else { discarded };
        Ok(union(&[&found, fresh, kept]))
    }

    /// B: protects `runs`.
    fn protect<'s>(
        &'s self,
        mut state: MutexGuard<'s, State>,
        runs: &[HostRange],
    ) -> io::Result<MutexGuard<'s, State>> {
        let begun = Instant::now();
        let mut left =
            if state.has_discarded { runs.to_vec() } else { windows(runs, PROTECT_GAP_BYTES) };
        left.reverse();
        loop {
            // A thread that breaks the tracking ends it for every page. What this drain finds
            // afterwards is meaningless.
            if let Some(source) = state.broken() {
                return Err(source);
            }
            let Some(run) = left.last().copied() else { return Ok(state) };
            match abi::uffd_write_protect(self.shared.uffd.as_fd(), run.start.0, run.len_bytes) {
                Ok(()) => {
                    state.note_protected(run);
                    left.pop();
                }
                // A discard waits until the handler has heard of it, for which the handler needs
                // the lock.
                Err(error)
                    if error.raw_os_error() == Some(libc::EAGAIN) && begun.elapsed() < BUSY_MAX =>
                {
                    drop(state);
                    std::thread::sleep(BUSY_SLEEP);
                    state = self.shared.lock();
                    // Meanwhile pages between the runs may have lost their protection.
                    left = runs.iter().rev().copied().take_while(|r| r.end() > run.start).collect();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// C: the pages of `list`, which are protected, that hold nothing.
    fn absent(
        &self,
        list: &[HostRange],
        buffer: &mut [PageRegion],
        stats: &mut ScanStats,
    ) -> io::Result<Vec<HostRange>> {
        let (mut holes, mut entries) = (Vec::new(), Vec::new());
        for window in windows(list, LOOK_GAP_BYTES) {
            let note = |range, categories| {
                push_joined(
                    if categories & abi::PAGE_SWAPPED == 0 { &mut holes } else { &mut entries },
                    range,
                );
            };
            stats.calls += self.pagemap.scan(PagemapQuery::NOT_PRESENT, window, buffer, note)?;
        }
        let looked_at = self.pagemap.entries(&select(&entries, list, true))?;
        Ok(union(&[&select(&holes, list, true), &looked_at.bare]))
    }

    /// `range` by mapping. Errors: part of it is not registered, or cuts a page.
    fn parts(
        &self,
        state: &State,
        range: HostRange,
        operation: &'static str,
    ) -> Result<Vec<MappedRange>> {
        let registered = state.segments.iter().map(|segment| segment.stretch);
        mapped_range::registered(&self.shared.process, registered, range, operation)
    }

    fn range_error(&self, operation: &'static str, range: HostRange, source: io::Error) -> Error {
        let pid = self.shared.process.pid();
        if !self.shared.process.is_alive() {
            return Error::Gone { pid, operation };
        }
        Error::TrackRange { pid, operation, range, source }
    }
}

impl std::fmt::Debug for FaultTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pid = self.shared.process.pid();
        f.debug_struct("FaultTracker")
            .field("pid", &pid)
            .field("registered", &self.registered)
            .finish_non_exhaustive()
    }
}

impl Drop for FaultTracker {
    fn drop(&mut self) {
        for range in &self.registered {
            // The mapping, or the whole process, may be gone: then there is nothing left to end.
            // This wakes the threads that wait to write. Threads that wait to discard are woken
            // when the descriptor closes, which follows.
            let _ = self.shared.end_tracking(*range);
        }
    }
}
