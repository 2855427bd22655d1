//! Which pages of a process were written since the last look: asynchronous write protection.
//!
//! ```text
//!              register                    scan_and_protect
//!   untracked ─────────▶ unscanned ───────────────────────────▶ protected ◀──────────────┐
//!                        (counts as written)                    │                        │ scan_and_protect
//!                                       the process writes, or  │                        │ (reported)
//!                                       discards the page       └──────▶ written ────────┘
//! ```
//!
//! The kernel resolves the first write to a protected page by itself and marks it written. No
//! thread has to answer, so a stalled or dead tracker does not stop the guest. One scan is:
//!
//! ```text
//!   A  WRITTEN      found and protected in one step
//!   B  not PRESENT  what is not in memory: of what A found, where the kernel did not say and it matters (a first scan,
//!                   or pages can be discarded); and holes, that is no page table, no entry, no protection
//!   C  holes        protected (markers), then looked at again; private memory only
//! ```
//!
//! B and C are there because discarding private memory (`MADV_DONTNEED`: balloon, free page
//! reporting) changes it, and A does not always see that:
//!
//! - Anonymous memory: the page's entry is cleared, which A reports. But page tables and huge pages
//!   are freed whole, and over the hole that is left A passes, except on the newest kernels (see
//!   `quirks.rs`), which need no B. C reports it, and puts markers there, so that it is reported
//!   once.
//! - Private memory of a file: a protected page leaves a marker, as if it had never been there; and
//!   reading puts the file's page there, as if it had never been written. So the pages are
//!   remembered that hold nothing of their own, but a marker or the file's page; one that joins
//!   them was discarded.
//!
//! In shared memory neither says anything: its content lives in the file. Private huge pages of
//! hugetlbfs, discarded and read, hold zeros as if these had always been there: refused where they
//! can be discarded ([`Error::DiscardsUnseen`]).
//!
//! Invariants: a page is protected only in a scan that reports it, and whether it is there is
//! looked up after that; where a call fails half-way, the error is [`Error::ScanBroken`] and every
//! page of that scan counts as written.
//!
//! Not seen: `fallocate(PUNCH_HOLE)` on the file of shared memory; writes through another mapping
//! of the same file (vhost-user); DMA into pages that were pinned before the scan and filled after
//! it (`O_DIRECT` reads in flight, VFIO). 1 GiB pages cannot be protected by the kernel's scan and
//! are refused.

use crate::abi::{self, PageRegion};
use crate::mapped_range::{self, MappedRange};
use crate::pagemap::{Pagemap, PagemapQuery};
use crate::pagemap_quirks::PagemapQuirks;
use crate::ranges::{
    self, clip, intersection, push_joined, select, split, union, windows, without,
};
use crate::{Error, Process, Result};
use keyframe_locks::IgnorePoison;
use keyframe_units::{HostRange, PAGE_BYTES};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

/// The size of memory, in bytes, from which on a scan uses a second thread. Starting it takes 0.1
/// ms.
const SHARED_BYTES: u64 = 2 << 30;
/// Written pages closer than this are looked up by one walk: a call costs about what 2 MiB of page
/// table do.
const WINDOW_GAP_BYTES: u64 = 2 << 20;

/// A run of pages that count as written since the last scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenPages {
    /// Whole pages of the mapping.
    pub range: HostRange,
    /// False if the process's page table holds nothing for these pages: in private anonymous memory
    /// they read as zeros, in shared or file memory as the file has them. True if a page is in
    /// memory or on swap, or if this is unknown (after the first scan, for memory that is not
    /// discarded).
    pub present: bool,
}

/// Statistics of one scan for written pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanStats {
    /// The number of pages reported, in 4 KiB.
    pub written_pages: u64,
    /// The number of reported pages that are not present, in 4 KiB.
    pub absent_pages: u64,
    /// The number of runs added to the output.
    pub runs: u64,
    /// The number of calls of `PAGEMAP_SCAN`.
    pub calls: u64,
}

/// Pages that the kernel found written, and has protected.
#[derive(Debug, Default)]
struct Drained {
    all: Vec<HostRange>,
    /// Ranges that held nothing when they were protected.
    absent: Vec<HostRange>,
}

/// Pages that are not in memory.
#[derive(Debug, Default)]
struct Missing {
    /// Without an entry.
    holes: Vec<HostRange>,
    /// Ranges with an entry: on swap, in migration, or a bare marker.
    entries: Vec<HostRange>,
    /// Ranges that belong to the file behind private memory, even if they are in memory; only if
    /// requested.
    of_file: Vec<HostRange>,
}

/// Pages of memory in which a discard leaves a marker.
#[derive(Debug, Default)]
struct NotOwn {
    /// Ranges that were discarded since the last scan.
    discarded: Vec<HostRange>,
    /// Ranges that hold nothing now.
    bare: Vec<HostRange>,
    /// The same, and what holds the file's page.
    all: Vec<HostRange>,
}

/// Buffers that scans share. Only one scan runs at a time.
#[derive(Debug)]
struct Scratch {
    buffer: Vec<PageRegion>,
    /// The buffer of the second thread.
    second: Vec<PageRegion>,
    by_two: bool,
    /// Registered, never scanned.
    unscanned: Vec<HostRange>,
    /// Pages that held nothing of their own at the last scan, in memory in which a discard leaves a
    /// marker.
    not_own: Vec<HostRange>,
}

/// Tracks writes to registered ranges of one process. Dropping it ends the tracking and leaves the
/// memory unchanged.
#[derive(Debug)]
pub struct WriteTracker {
    process: Process,
    uffd: OwnedFd,
    pagemap: Pagemap,
    segments: Vec<MappedRange>,
    watch_discards: bool,
    quirks: PagemapQuirks,
    scratch: Mutex<Scratch>,
}

impl WriteTracker {
    /// Takes over `uffd`, a new userfaultfd made by `process` itself (see [`crate::attach`]).
    ///
    /// Errors: the kernel lacks a feature ([`Error::MissingFeature`]); pagemap may not be read.
    pub fn new(process: &Process, uffd: OwnedFd) -> Result<Self> {
        let failed = |source| Error::Tracker {
            pid: process.pid(),
            operation: "ask userfaultfd for its features",
            source,
        };
        if let Err(source) = abi::uffd_api(uffd.as_fd(), abi::features_needed()) {
            // A refusal leaves the descriptor as new; asked for nothing, it tells what there is.
            let has = abi::uffd_api(uffd.as_fd(), 0).map_err(failed)?;
            let missing = abi::FEATURES_NEEDED.iter().rev().find(|(bit, ..)| has & bit == 0);
            return Err(missing.map_or(failed(source), |(_, feature, since)| {
                Error::MissingFeature { feature, since }
            }));
        }
        let scratch = Scratch {
            buffer: Pagemap::buffer(),
            second: Pagemap::buffer(),
            by_two: false,
            unscanned: Vec::new(),
            not_own: Vec::new(),
        };
        Ok(Self {
            process: process.try_clone()?,
            uffd,
            pagemap: Pagemap::open(process)?,
            segments: Vec::new(),
            watch_discards: true,
            quirks: PagemapQuirks::of_this_kernel(),
            scratch: Mutex::new(scratch),
        })
    }

    /// States with `watch` whether private memory can be discarded while it is tracked. The default
    /// is true.
    ///
    /// A VM without balloon, free page reporting and virtio-mem discards nothing; false then saves
    /// about half of the time of such scans. If false is wrong, discarded pages are missed. Set it
    /// before private huge pages of hugetlbfs are registered: they cannot be tracked if they can be
    /// discarded.
    pub fn set_watch_discards(&mut self, watch: bool) {
        self.watch_discards = watch;
        // What was not kept up to date is not to be relied on; without it a scan reports too much.
        self.scratch.get_mut().ignore_poison().not_own.clear();
    }

    /// Makes the tracker rely only on the behaviour of the first `PAGEMAP_SCAN`, so that tests
    /// cover both ways on one kernel.
    pub fn trust_no_kernel(&mut self) {
        self.quirks = PagemapQuirks::default();
    }

    /// Starts to track `range`, whole pages of one or more adjacent mappings. Until its first scan
    /// every page of it counts as written.
    ///
    /// Errors: it is not mapped, is registered already, is not whole pages, or has pages of 1 GiB
    /// or private huge pages that can be discarded; the kernel refuses. Nothing of the range is
    /// tracked after an error.
    pub fn register(&mut self, range: HostRange) -> Result<()> {
        if self.segments.iter().any(|s| intersection(s.range, range).is_some()) {
            return Err(Error::Registered { pid: self.process.pid(), range });
        }
        let segments = mapped_range::mapped(&self.process, range)?;
        self.ensure_discards_seen(&segments, "register")?;
        abi::uffd_register(self.uffd.as_fd(), range.start.0, range.len_bytes)
            .map_err(|source| self.range_error("register", range, source))?;
        self.segments.extend(segments);
        self.segments.sort_unstable_by_key(|segment| segment.range.start);
        let scratch = self.scratch.get_mut().ignore_poison();
        scratch.unscanned = union(&[&scratch.unscanned, &[range]]);
        Ok(())
    }

    fn ensure_discards_seen(
        &self,
        segments: &[MappedRange],
        operation: &'static str,
    ) -> Result<()> {
        let unseen =
            |s: &&MappedRange| self.watch_discards && !s.shared && s.page_bytes > PAGE_BYTES as u64;
        let pid = self.process.pid();
        let error = |s: &MappedRange| Err(Error::DiscardsUnseen { pid, operation, range: s.range });
        segments.iter().find(unseen).map_or(Ok(()), error)
    }

    /// Ends the tracking of `range`.
    ///
    /// Errors: the range is not registered, or the kernel refuses.
    pub fn unregister(&mut self, range: HostRange) -> Result<()> {
        self.parts(range, "unregister")?;
        abi::uffd_unregister(self.uffd.as_fd(), range.start.0, range.len_bytes)
            .map_err(|source| self.range_error("unregister", range, source))?;
        self.segments = std::mem::take(&mut self.segments)
            .into_iter()
            .flat_map(|segment| {
                without(&[segment.range], range)
                    .into_iter()
                    .map(move |range| MappedRange { range, ..segment })
            })
            .collect();
        let scratch = self.scratch.get_mut().ignore_poison();
        scratch.unscanned = without(&scratch.unscanned, range);
        scratch.not_own = without(&scratch.not_own, range);
        Ok(())
    }

    /// Appends to `out` the pages of `range` that were written or discarded since its last scan,
    /// rising and without overlap, and protects them again. The first scan of a range reports all
    /// of it. No later scan reports these pages again unless they are written. Returns the
    /// statistics of the scan.
    ///
    /// Errors: after [`Error::ScanBroken`], all of `range` counts as written. After [`Error::Gone`]
    /// or any other error nothing was done. Errors leave `out` unchanged.
    pub fn scan_and_protect(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<ScanStats> {
        self.scan_by(1, range, out)
    }

    /// Scans as [`Self::scan_and_protect`] does, with a second thread if the range is large. That
    /// pays if the process is stopped and has written little. Returns the statistics of the scan.
    /// Errors: those of [`Self::scan_and_protect`].
    pub fn scan_and_protect_by_two(
        &self,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<ScanStats> {
        self.scan_by(2, range, out)
    }

    fn scan_by(
        &self,
        threads: u32,
        range: HostRange,
        out: &mut Vec<WrittenPages>,
    ) -> Result<ScanStats> {
        let parts = self.parts(range, "scan")?;
        self.ensure_discards_seen(&parts, "scan")?;
        let mut guard = self.scratch.lock().ignore_poison();
        let scratch = &mut *guard;
        scratch.by_two = threads > 1;
        let before = out.len();
        let mut stats = ScanStats::default();
        for part in &parts {
            if let Err(source) = self.scan_part(*part, scratch, out, &mut stats) {
                out.truncate(before);
                // What was discarded from here on must not pass for never touched.
                scratch.not_own = without(&scratch.not_own, range);
                return Err(Error::ScanBroken { pid: self.process.pid(), range, source });
            }
        }
        if !self.process.is_alive() {
            out.truncate(before);
            return Err(Error::Gone {
                pid: self.process.pid(),
                operation: "scan for written pages",
            });
        }
        scratch.unscanned = without(&scratch.unscanned, range);
        stats.runs = (out.len() - before) as u64;
        Ok(stats)
    }

    /// One scan of a stretch of one mapping.
    fn scan_part(
        &self,
        part: MappedRange,
        scratch: &mut Scratch,
        out: &mut Vec<WrittenPages>,
        stats: &mut ScanStats,
    ) -> io::Result<()> {
        let fresh = clip(&scratch.unscanned, part.range);
        // Asked for nothing but WRITTEN the kernel takes a path that is two to three times as fast.
        // What else there is to know matters once, for memory never touched, and where pages can be
        // discarded.
        let ask_kind = !fresh.is_empty() || (self.watch_discards && !part.shared);
        let drained = self.drain(part.range, ask_kind, scratch, stats)?;
        let mut written = union(&[&drained.all, &fresh]);

        let holes_hide = part.leaves_markers() || !self.quirks.hole_is_written;
        let look_at_all = !part.shared && self.watch_discards && holes_hide;
        let windows = if look_at_all {
            vec![part.range]
        } else if !ask_kind {
            Vec::new()
        } else if self.quirks.none_is_written {
            select(&fresh, &drained.all, false)
        } else {
            windows(&written, WINDOW_GAP_BYTES)
        };
        let query = if part.leaves_markers() && look_at_all {
            PagemapQuery::NOT_OWN
        } else {
            PagemapQuery::NOT_PRESENT
        };
        let mut missing = self.missing(query, &windows, &mut scratch.buffer, stats)?;
        if look_at_all && !missing.holes.is_empty() {
            written = union(&[&written, &missing.holes]);
            self.protect_holes(query, &mut missing, &mut scratch.buffer, stats)?;
        }
        let bare = if part.leaves_markers() && look_at_all {
            let known = clip(&scratch.not_own, part.range);
            let now = self.not_own(&known, &written, &missing)?;
            written = union(&[&written, &now.discarded]);
            scratch.not_own = union(&[&without(&scratch.not_own, part.range), &now.all]);
            now.bare
        } else {
            let entries = self.pagemap.entries(&select(&missing.entries, &written, true))?;
            union(&[&missing.holes, &entries.bare])
        };
        split(&written, &union(&[&drained.absent, &bare]), |range, is_absent| {
            let pages = range.len_bytes / PAGE_BYTES as u64;
            stats.written_pages += pages;
            stats.absent_pages += if is_absent { pages } else { 0 };
            out.push(WrittenPages { range, present: !is_absent });
        });
        // Memory that is not mapped any more has nothing written; that is no answer.
        self.pagemap.ensure_mapped(part.range)
    }

    /// A: finds written pages and protects them.
    fn drain(
        &self,
        range: HostRange,
        ask_kind: bool,
        scratch: &mut Scratch,
        stats: &mut ScanStats,
    ) -> io::Result<Drained> {
        let mut drained = Drained::default();
        let ask_kind = ask_kind && self.quirks.none_is_written;
        let query = if ask_kind { PagemapQuery::WRITTEN_AND_KIND } else { PagemapQuery::WRITTEN };
        let found = |range, categories| {
            push_joined(&mut drained.all, range);
            if ask_kind && categories & (abi::PAGE_PRESENT | abi::PAGE_SWAPPED) == 0 {
                push_joined(&mut drained.absent, range);
            }
        };
        let query = query.protecting();
        stats.calls += if scratch.by_two && range.len_bytes >= SHARED_BYTES {
            self.pagemap.scan_by_two(
                query,
                range,
                [&mut scratch.buffer, &mut scratch.second],
                found,
            )?
        } else {
            self.pagemap.scan(query, range, &mut scratch.buffer, found)?
        };
        Ok(drained)
    }

    /// Returns the parts of `windows` that are not in memory, or that `query` selects otherwise.
    fn missing(
        &self,
        query: PagemapQuery,
        windows: &[HostRange],
        buffer: &mut [PageRegion],
        stats: &mut ScanStats,
    ) -> io::Result<Missing> {
        let mut missing = Missing::default();
        for window in windows {
            let found = |range, categories| {
                let list = if categories & abi::PAGE_FILE != 0 {
                    &mut missing.of_file
                } else if categories & abi::PAGE_SWAPPED != 0 {
                    &mut missing.entries
                } else {
                    &mut missing.holes
                };
                push_joined(list, range);
            };
            stats.calls += self.pagemap.scan(query, *window, buffer, found)?;
        }
        Ok(missing)
    }

    /// Protects the holes of `missing`, all of which the caller reports, and looks at them again:
    /// what was touched before it was protected is there now.
    fn protect_holes(
        &self,
        query: PagemapQuery,
        missing: &mut Missing,
        buffer: &mut [PageRegion],
        stats: &mut ScanStats,
    ) -> io::Result<()> {
        let holes = std::mem::take(&mut missing.holes);
        for hole in &holes {
            abi::uffd_write_protect(self.uffd.as_fd(), hole.start.0, hole.len_bytes)?;
        }
        let now = self.missing(query, &holes, buffer, stats)?;
        missing.holes = now.holes;
        missing.entries = union(&[&missing.entries, &now.entries]);
        missing.of_file = union(&[&missing.of_file, &now.of_file]);
        Ok(())
    }

    /// In memory where a discard leaves a marker: what holds nothing of its own now, and what of
    /// that was discarded since `known` was all of it. A page of `known` that is not in `written`
    /// was not touched, so its entry needs no look.
    fn not_own(
        &self,
        known: &[HostRange],
        written: &[HostRange],
        missing: &Missing,
    ) -> io::Result<NotOwn> {
        let untouched = select(&select(&missing.entries, known, true), written, false);
        let entries = self.pagemap.entries(&select(&missing.entries, &untouched, false))?;
        let bare = union(&[&missing.holes, &untouched, &entries.bare]);
        let all = union(&[&bare, &missing.of_file]);
        // What we may not see counts as discarded each time: never as known.
        let discarded = union(&[&entries.hidden, &select(&all, known, false)]);
        Ok(NotOwn { discarded, bare, all })
    }

    /// Waits until each access to the process's memory that holds the lock of all its mappings, such
    /// as a write by another process, has released it. Faults of user mode hold another lock.
    ///
    /// The kernel takes that lock alone when a range is registered, even if it was registered before
    /// and nothing changes. Errors: nothing is registered; the kernel refuses.
    pub(crate) fn wait_for_accesses(&self) -> io::Result<()> {
        let first = self.segments.first().ok_or(io::ErrorKind::NotFound)?;
        abi::uffd_register(self.uffd.as_fd(), first.range.start.0, first.range.len_bytes)
    }

    /// Returns true if every page of 4 KiB that a scan has passed is protected until one fault
    /// removes the protection of it alone. Then a fault's address names all that it made writable,
    /// apart from the other pages of its huge page in hugetlbfs.
    ///
    /// It is false on kernels that leave memory without page tables unprotected, where one fault can
    /// place a huge page. It is false for shared memory, whose huge pages lose the protection of all
    /// when one is written, and for memory that can be discarded.
    pub(crate) fn faults_name_pages(&self) -> bool {
        let huge = |s: &MappedRange| s.page_bytes > PAGE_BYTES as u64;
        // A discard takes pages away without the lock that the window watches.
        if self.watch_discards {
            return false;
        }
        let shared_4k = self.segments.iter().any(|s| s.shared && !huge(s));
        self.quirks.hole_is_written && !shared_4k
    }

    /// The page that holds `address`, in the size of its mapping. `None` if it is not registered.
    pub(crate) fn page_at(&self, address: u64) -> Option<HostRange> {
        let at = self.segments.partition_point(|s| s.range.start.0 <= address).checked_sub(1)?;
        let segment = self.segments.get(at)?;
        let start = address / segment.page_bytes * segment.page_bytes;
        intersection(segment.range, ranges::between(start, start + segment.page_bytes))
    }

    /// Checks that all registered memory is still mapped. Error: a part is not.
    pub(crate) fn ensure_mapped(&self) -> io::Result<()> {
        self.segments.iter().try_for_each(|segment| self.pagemap.ensure_mapped(segment.range))
    }

    /// The registered memory by rising address.
    pub(crate) fn registered(&self) -> Vec<HostRange> {
        self.segments.iter().map(|segment| segment.range).collect()
    }

    /// The process whose memory is tracked.
    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// Takes the lock of all mappings for a moment, as each scan does. Error: that of the call.
    pub(crate) fn touch_lock(&self) -> io::Result<()> {
        let first = self.segments.first().ok_or(io::ErrorKind::NotFound)?;
        let page = HostRange { len_bytes: PAGE_BYTES as u64, ..first.range };
        self.pagemap.scan(PagemapQuery::WRITTEN, page, &mut [PageRegion::default()], |_, _| {})?;
        Ok(())
    }

    /// Returns about how many pages of 4 KiB of `range` the next scan would find written. Protects
    /// nothing, and leaves out memory without page tables.
    ///
    /// Errors: `range` is not registered or not whole pages; the kernel refuses.
    pub fn count_written(&self, range: HostRange) -> Result<u64> {
        let parts = self.parts(range, "count written pages")?;
        let mut guard = self.scratch.lock().ignore_poison();
        let scratch = &mut *guard;
        let mut pages = 0;
        for part in parts {
            let mut written = Vec::new();
            let found = |range, _| push_joined(&mut written, range);
            self.pagemap
                .scan(PagemapQuery::WRITTEN, part.range, &mut scratch.buffer, found)
                .map_err(|source| self.range_error("count written pages", part.range, source))?;
            pages += ranges::pages(&union(&[&written, &clip(&scratch.unscanned, part.range)]));
        }
        Ok(pages)
    }

    /// `range` by mapping. Errors: part of it is not registered, or cuts a page.
    fn parts(&self, range: HostRange, operation: &'static str) -> Result<Vec<MappedRange>> {
        mapped_range::registered(&self.process, self.segments.iter().copied(), range, operation)
    }

    fn range_error(&self, operation: &'static str, range: HostRange, source: io::Error) -> Error {
        if !self.process.is_alive() {
            return Error::Gone { pid: self.process.pid(), operation };
        }
        Error::TrackRange { pid: self.process.pid(), operation, range, source }
    }
}

impl Drop for WriteTracker {
    fn drop(&mut self) {
        for segment in &self.segments {
            // The mapping, or the whole process, may be gone: then there is nothing left to end.
            // Closing the descriptor, which follows, would end all tracking too, but not at once
            // where a copy of it is open.
            let _ = abi::uffd_unregister(
                self.uffd.as_fd(),
                segment.range.start.0,
                segment.range.len_bytes,
            );
        }
    }
}
