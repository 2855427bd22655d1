//! Names the pages that a process writes within some milliseconds, from page faults, so that no scan
//! has to look for them.
//!
//! ```text
//!   arm                      scan_and_protect     the process runs         read            disarm
//!   events on, all CPUs      protects all pages   each first write is a    pages, or the
//!   ─▶ barrier ─▶ threads                         fault, which is recorded reason to scan
//! ```
//!
//! A page that the scan has protected becomes writable in the kernel's page fault handler alone. The
//! kernel runs the handler for a fault of any thread on any CPU, or for an access by address that
//! takes the lock of the process's mappings. The window records on every CPU of the host: the start
//! and the end of each page fault, with its address, and each time that this lock is taken. So it
//! needs no list of the threads that write: those that come and go, workers of `io_uring` and vhost
//! are on some CPU, too.
//!
//! What could escape, and why it does not:
//!
//! | access | seen by |
//! |---|---|
//! | a fault that starts in the window | its start |
//! | a fault that started before, and ends in the window | its end |
//! | a fault of the kernel (`read(2)`) that started before | the barrier: it holds the lock |
//! | a fault of user mode that lasts for the whole window | a record of another fault of the thread, or the thread's state ([`WindowGap::BusyThread`]) |
//! | `process_vm_writev`, ptrace, `/proc/PID/mem`, direct I/O, KVM, KSM | the lock without a fault ([`WindowGap::UnnamedAccess`]) |
//! | Keyframe's own writes | a counter of them ([`WindowGap::OwnWrite`]) |
//! | a record that the kernel dropped | the fill level of the ring ([`WindowGap::Overflow`]) |
//!
//! Not seen: discarded memory (balloon), which the caller excludes; what a scan does not see either,
//! such as writes to pages that were pinned before.
//!
//! Invariants:
//! 1. [`FaultWindow::read`] returns each page that was written since the scan, or a [`WindowGap`].
//!    The pages may be too many: a fault on another process's memory at the same address counts.
//! 2. The read protects nothing. A returned page stays writable, and the next scan reports it again.
//! 3. Outside of a window no event is recorded.

mod records;
mod tracepoint;

pub use records::WindowGap;

use crate::abi::{self, PageRegion};
use crate::pagemap::{Pagemap, PagemapQuery};
use crate::pagemap_quirks::PagemapQuirks;
use crate::process_memory::writes_begun;
use crate::ranges::{between, union};
use crate::write_tracker::WriteTracker;
use crate::{Error, Process, Result};
use keyframe_units::{HostRange, PAGE_BYTES};
use perf_event::events::{Software, Tracepoint};
use perf_event::{Builder, Counter, SampleFlag, Sampler};
use records::{Judge, Record, RecordKind};
use rustix::fs::{CWD, Dir, Mode, OFlags, openat, readlinkat};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const LOCK_EVENT: &str = "mmap_lock/mmap_lock_acquire_returned";
/// The memory for the records of one CPU, at most. The kernel grants it to every user
/// (`perf_event_mlock_kb`).
const RING_BYTES_MAX: usize = 512 << 10;
const RING_BYTES_MIN: usize = 32 << 10;
/// The memory for the records of all CPUs.
const RINGS_BYTES_MAX: usize = 16 << 20;
/// No record is as long. A ring with less room than this may have dropped one.
const RECORD_BYTES_MAX: usize = 1 << 10;
const HEADER_BYTES: usize = 8;
const PERF_RECORD_SAMPLE: u32 = 9;
/// No host has more CPUs.
const CPUS_MAX: usize = 8192;
/// No process has more threads.
const THREADS_MAX: usize = 100_000;
/// How often the lock is taken to find its name.
const TRIES: usize = 4;

/// The events of one CPU of the host, and the ring buffer that they share.
struct CpuEvents {
    /// Its counter is the first of the group: the starts of page faults.
    ring: Sampler,
    lock: Counter,
    /// The ends of page faults: the other events of the group.
    _ends: [Counter; 2],
}

/// Records the page faults of one process, from [`FaultWindow::arm`] on.
pub struct FaultWindow {
    cpus: Vec<CpuEvents>,
    /// The kernel's list of the CPUs that are switched on, and what it said.
    online: OwnedFd,
    online_then: Vec<u8>,
    ring_bytes: usize,
    armed: Option<Armed>,
    is_recording: bool,
    records: Vec<Record>,
}

/// What was so when the window was opened.
struct Armed {
    writes_begun: u64,
    /// The threads that may have been in the page fault handler.
    busy: Vec<u32>,
}

impl FaultWindow {
    /// Prepares windows over the memory that `tracker` has registered. Records nothing yet.
    ///
    /// Errors: [`Error::FaultWindow`] if the kernel has no such events or does not let this process
    /// use them, if faults do not name all pages that they make writable, or if the process is a VM
    /// under KVM.
    pub fn new(tracker: &WriteTracker) -> Result<Self> {
        Self::with_ring_bytes(tracker, RING_BYTES_MAX)
    }

    /// Prepares windows as [`Self::new`] does, with at most `ring_bytes` of memory for the records
    /// of one CPU, so that tests can overflow it. Errors: those of [`Self::new`].
    pub fn with_ring_bytes(tracker: &WriteTracker, ring_bytes: usize) -> Result<Self> {
        let failed = |operation| move |source| Error::FaultWindow { operation, source };
        if !tracker.faults_name_pages() {
            let source = io::Error::other(
                "not every page is written by a fault of its own: RAM is shared or can be discarded, \
                 or the kernel is too old",
            );
            return Err(Error::FaultWindow { operation: "name written pages by faults", source });
        }
        if runs_kvm(tracker.process())? {
            let source = io::Error::other("under KVM the guest's writes are no page faults");
            return Err(Error::FaultWindow { operation: "name written pages by faults", source });
        }
        let lock = tracepoint::find(LOCK_EVENT, "mm").map_err(failed("find a tracepoint"))?;
        let mappings =
            name_of_mappings(lock, tracker).map_err(failed("find the lock of a process"))?;
        let online = open_online().map_err(failed("list the host's CPUs"))?;
        let online_then = read_online(online.as_fd()).map_err(failed("list the host's CPUs"))?;
        let cpus = parse_online(&online_then).ok_or_else(|| {
            let source = io::Error::other("the kernel's list is malformed");
            Error::FaultWindow { operation: "list the host's CPUs", source }
        })?;
        let ring_bytes = (RINGS_BYTES_MAX / cpus.len().max(1)).min(ring_bytes);
        let ring_bytes = (1 << ring_bytes.max(1).ilog2()).max(4096);
        let ring_bytes =
            if ring_bytes < RING_BYTES_MIN && cpus.len() > 1 { RING_BYTES_MIN } else { ring_bytes };
        let filter = CString::new(format!("mm == {mappings:#x} && write == 0 && success == 1"))
            .map_err(|error| failed("filter a tracepoint")(error.into()))?;
        let cpus = cpus
            .into_iter()
            .map(|cpu| CpuEvents::open(cpu, lock.id, &filter, ring_bytes))
            .collect::<io::Result<Vec<_>>>()
            .map_err(failed("record page faults"))?;
        Ok(Self {
            cpus,
            online,
            online_then,
            ring_bytes,
            armed: None,
            is_recording: false,
            records: Vec::new(),
        })
    }

    /// Finds out whether this host lets this process record page faults on one of its CPUs. Error:
    /// [`Error::FaultWindow`] says what is missing.
    pub fn probe() -> Result<()> {
        let failed = |operation| move |source| Error::FaultWindow { operation, source };
        if !PagemapQuirks::of_this_kernel().hole_is_written {
            let source =
                io::Error::other("this kernel leaves memory without page tables unprotected");
            return Err(Error::FaultWindow { operation: "name written pages by faults", source });
        }
        let lock = tracepoint::find(LOCK_EVENT, "mm").map_err(failed("find a tracepoint"))?;
        let online = open_online().map_err(failed("list the host's CPUs"))?;
        let text = read_online(online.as_fd()).map_err(failed("list the host's CPUs"))?;
        let first = parse_online(&text).and_then(|cpus| cpus.first().copied()).unwrap_or(0);
        CpuEvents::open(first, lock.id, c"mm == 0", RING_BYTES_MIN)
            .map(drop)
            .map_err(failed("record page faults"))
    }

    /// Opens a window. The caller protects all memory of `tracker` with a scan after this, and then
    /// calls [`Self::read`]. Takes some 10 us for each CPU of the host and each thread of the process.
    ///
    /// Error: [`Error::FaultWindow`]; no window is open then.
    pub fn arm(&mut self, tracker: &WriteTracker) -> Result<()> {
        let armed = self.try_arm(tracker);
        if armed.is_err() {
            self.disarm();
        }
        self.armed = Some(armed.map_err(|source| Error::FaultWindow {
            operation: "begin to record page faults",
            source,
        })?);
        Ok(())
    }

    fn try_arm(&mut self, tracker: &WriteTracker) -> io::Result<Armed> {
        self.disarm();
        self.is_recording = true;
        let writes_begun = writes_begun(tracker.process());
        for cpu in &mut self.cpus {
            // What the rings hold is from before.
            while cpu.ring.next_record().is_some() {}
            cpu.ring.as_counter_mut().enable_group()?;
            cpu.lock.enable()?;
        }
        tracker.wait_for_accesses()?;
        let busy = threads(tracker.process())?
            .into_iter()
            .filter(|thread| !sleeps(tracker.process(), *thread))
            .collect();
        Ok(Armed { writes_begun, busy })
    }

    /// Returns the pages of `tracker` that were written since the scan after [`Self::arm`], rising
    /// and without overlap, while the process's writers stand still; `None` if no window is open.
    ///
    /// # Errors
    ///
    /// The reason why the pages are unknown: the caller scans all memory.
    pub fn read(
        &mut self,
        tracker: &WriteTracker,
    ) -> Option<std::result::Result<Vec<HostRange>, WindowGap>> {
        let armed = self.armed.take()?;
        Some(self.pages(&armed, tracker))
    }

    fn pages(
        &mut self,
        armed: &Armed,
        tracker: &WriteTracker,
    ) -> std::result::Result<Vec<HostRange>, WindowGap> {
        let ranges = tracker.registered();
        let mut judge = Judge::new(std::process::id(), &ranges);
        for cpu in &mut self.cpus {
            self.records.clear();
            cpu.take(self.ring_bytes, &mut self.records)?;
            judge.add(&mut self.records)?;
        }
        let faults = judge.faults()?;
        let process = tracker.process();
        let is_known = |thread| faults.has_thread(process.pid(), thread) || sleeps(process, thread);
        if !armed.busy.iter().all(|thread| is_known(*thread)) {
            return Err(WindowGap::BusyThread);
        }
        if writes_begun(process) != armed.writes_begun {
            return Err(WindowGap::OwnWrite);
        }
        tracker.ensure_mapped().map_err(|_| WindowGap::Unreadable)?;
        let online = read_online(self.online.as_fd()).map_err(|_| WindowGap::Unreadable)?;
        if online != self.online_then {
            return Err(WindowGap::Processors);
        }
        let mut pages: Vec<_> =
            faults.addresses.iter().filter_map(|at| tracker.page_at(*at)).collect();
        pages.sort_unstable_by_key(|page| page.start);
        Ok(union(&[&pages]))
    }

    /// Ends the recording, also if no window is open.
    pub fn disarm(&mut self) {
        self.armed = None;
        if !std::mem::take(&mut self.is_recording) {
            return;
        }
        for cpu in &mut self.cpus {
            // It fails for a CPU that is gone, which records nothing either.
            let _ = cpu.lock.disable();
            let _ = cpu.ring.as_counter_mut().disable_group();
        }
    }
}

impl CpuEvents {
    fn open(cpu: usize, lock_id: u64, filter: &CStr, ring_bytes: usize) -> io::Result<Self> {
        let mut builder = Builder::new(Software::PAGE_FAULTS);
        on_cpu(&mut builder, cpu, RecordKind::Start);
        let mut ring = builder.build()?.sampled(ring_bytes)?;
        let mut join = |mut builder: Builder<'_>| -> io::Result<Counter> {
            on_cpu(&mut builder, cpu, RecordKind::Done).enabled(true);
            let counter = builder.build_with_group(&mut ring)?;
            abi::perf_set_output(&counter, &ring)?;
            Ok(counter)
        };
        let minor = join(Builder::new(Software::PAGE_FAULTS_MIN))?;
        let major = join(Builder::new(Software::PAGE_FAULTS_MAJ))?;
        // A tracepoint in a group of software events records nothing.
        let mut builder = Builder::new(Tracepoint::with_id(lock_id));
        let lock = on_cpu(&mut builder, cpu, RecordKind::Lock).build()?;
        abi::perf_set_output(&lock, &ring)?;
        abi::perf_set_filter(&lock, filter)?;
        Ok(Self { ring, lock, _ends: [minor, major] })
    }

    /// Appends all records of the ring to `out`. Nothing was taken from it since it was empty.
    /// Errors: records may be missing.
    fn take(
        &mut self,
        ring_bytes: usize,
        out: &mut Vec<Record>,
    ) -> std::result::Result<(), WindowGap> {
        let mut taken_bytes = 0;
        while let Some(record) = self.ring.next_record() {
            taken_bytes += HEADER_BYTES + record.len();
            // The kernel drops a record for which the ring has no room, and says so only in the next
            // one that fits. While nothing is taken, the ring can only fill.
            if taken_bytes + RECORD_BYTES_MAX > ring_bytes {
                return Err(WindowGap::Overflow);
            }
            if record.ty() != PERF_RECORD_SAMPLE {
                return Err(WindowGap::Lost);
            }
            out.push(parse(&record.to_contiguous()).ok_or(WindowGap::Unreadable)?);
        }
        Ok(())
    }
}

/// Sets what an event of a CPU records, whatever runs there. The records of each kind have a length
/// of their own.
///
/// The kernel computes the id and the time of a record once for all events of a page fault, those of
/// other programs included. So a record's id may be that of another event, and its time that of
/// another clock.
fn on_cpu<'a, 'b>(
    builder: &'a mut Builder<'b>,
    cpu: usize,
    kind: RecordKind,
) -> &'a mut Builder<'b> {
    builder.any_pid().one_cpu(cpu).include_kernel().include_hv().sample_period(1);
    builder.sample(SampleFlag::TID).sample(SampleFlag::ADDR);
    match kind {
        RecordKind::Start => builder,
        RecordKind::Done => builder.sample(SampleFlag::PERIOD),
        RecordKind::Lock => builder.sample(SampleFlag::PERIOD).sample(SampleFlag::CPU),
    }
}

/// Reads a record: process and thread (4 bytes each), address, and what tells its kind.
fn parse(bytes: &[u8]) -> Option<Record> {
    let (words, []) = bytes.as_chunks::<8>() else { return None };
    let (kind, who, address) = match words {
        [who, address] => (RecordKind::Start, who, address),
        [who, address, _] => (RecordKind::Done, who, address),
        [who, address, _, _] => (RecordKind::Lock, who, address),
        _ => return None,
    };
    let who = u64::from_ne_bytes(*who);
    let (process, thread) = (who as u32, (who >> 32) as u32);
    Some(Record { kind, process, thread, address: u64::from_ne_bytes(*address) })
}

/// Finds the kernel's name of the mappings of the process of `tracker`: the address by which the
/// tracepoint `lock` names whose lock is taken.
fn name_of_mappings(lock: tracepoint::Tracepoint, tracker: &WriteTracker) -> io::Result<u64> {
    let own = Process::open(std::process::id()).map_err(io::Error::other)?;
    let own_pagemap = Pagemap::open(&own).map_err(io::Error::other)?;
    let mut builder = Builder::new(Tracepoint::with_id(lock.id));
    builder.observe_self().any_cpu().include_kernel().sample_period(1).sample(SampleFlag::RAW);
    let mut ring = builder.build()?.sampled(RING_BYTES_MIN)?;
    let mut names = |touch: &dyn Fn() -> io::Result<()>| -> io::Result<Vec<u64>> {
        while ring.next_record().is_some() {}
        ring.as_counter_mut().enable()?;
        let touched = (0..TRIES).try_for_each(|_| touch());
        ring.as_counter_mut().disable()?;
        touched?;
        let mut names = Vec::new();
        while let Some(record) = ring.next_record() {
            // The length of the raw record comes first.
            let (bytes, at) = (record.to_contiguous(), 4 + lock.field_offset);
            let name = bytes.get(at..at + 8).and_then(|name| name.try_into().ok());
            names.extend(name.map(u64::from_ne_bytes));
        }
        names.sort_unstable();
        Ok(names.chunk_by(u64::eq).filter(|all| all.len() >= TRIES).map(|all| all[0]).collect())
    };
    let page = [0_u8; 1];
    let start = page.as_ptr() as u64 / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    let own_page = between(start, start + PAGE_BYTES as u64);
    let ours = names(&|| {
        let buffer = &mut [PageRegion::default()];
        own_pagemap.scan(PagemapQuery::ENTRY, own_page, buffer, |_, _| {}).map(drop)
    })?;
    let theirs = names(&|| tracker.touch_lock())?;
    let new: Vec<u64> = theirs.into_iter().filter(|name| !ours.contains(name)).collect();
    match (&new[..], ours.is_empty()) {
        ([name], false) => Ok(*name),
        _ => Err(io::Error::other("the records of the lock do not tell one process from another")),
    }
}

/// Returns true if `process` has a virtual machine of KVM. Error: its descriptors may not be listed.
fn runs_kvm(process: &Process) -> Result<bool> {
    let directory = process.open_file("fd", OFlags::RDONLY | OFlags::DIRECTORY)?;
    let failed = |error: rustix::io::Errno| process.file_error("fd", "list", error.into());
    for entry in Dir::read_from(&directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // A descriptor may have been closed meanwhile.
        let Ok(target) = readlinkat(&directory, entry.file_name(), Vec::new()) else { continue };
        if target.as_bytes().starts_with(b"anon_inode:kvm-vm") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The ids of the threads of `process`.
fn threads(process: &Process) -> io::Result<Vec<u32>> {
    let directory =
        process.open_file("task", OFlags::RDONLY | OFlags::DIRECTORY).map_err(io::Error::other)?;
    let mut threads = Vec::new();
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        threads.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()));
        if threads.len() > THREADS_MAX {
            return Err(io::Error::other("the process has too many threads"));
        }
    }
    Ok(threads)
}

/// Returns true if a thread of `process` sleeps until something wakes it, is stopped, or has ended.
/// In the page fault handler a thread runs, waits for a CPU, or sleeps uninterruptibly.
fn sleeps(process: &Process, thread: u32) -> bool {
    let Ok(file) = process.open_file(&format!("task/{thread}/stat"), OFlags::RDONLY) else {
        return true;
    };
    let mut text = [0; 512];
    match rustix::io::read(file, &mut text) {
        Ok(len) => state_of(&text[..len]).is_some_and(|state| b"SZXTt".contains(&state)),
        Err(error) => error == rustix::io::Errno::SRCH,
    }
}

/// The state in `/proc/PID/stat`: the letter after the name, which may contain anything.
fn state_of(stat: &[u8]) -> Option<u8> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}

fn open_online() -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(openat(CWD, "/sys/devices/system/cpu/online", flags, Mode::empty())?)
}

fn read_online(online: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut text = vec![0; 4096];
    let len = rustix::io::pread(online, &mut text, 0)?;
    text.truncate(len);
    Ok(text)
}

/// Reads a list such as `0-3,7`. `None` if it has another form, is empty or too long.
fn parse_online(text: &[u8]) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in std::str::from_utf8(text).ok()?.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if last >= CPUS_MAX || first > last {
            return None;
        }
        cpus.extend(first..=last);
    }
    (cpus.len() <= CPUS_MAX).then_some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_cpus_is_read_or_refused() {
        assert_eq!(parse_online(b"0-2,7\n"), Some(vec![0, 1, 2, 7]));
        for text in [&b""[..], b"x", b"3-1", b"0-99999999", b"1,", b"\xff"] {
            assert_eq!(parse_online(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_threads_state_is_found_after_any_name() {
        assert_eq!(state_of(b"7 (CPU 0/TCG) R 1 7"), Some(b'R'));
        assert_eq!(state_of(b"7 (a) S) D 1 7"), Some(b'D'));
        assert_eq!(state_of(b"7 (a"), None);
        assert_eq!(state_of(b"7 (a)"), None);
    }

    #[test]
    fn the_length_of_a_record_tells_its_kind() {
        let bytes: Vec<u8> =
            [3 | 4 << 32, 0x1234, 1, 0, 0_u64].into_iter().flat_map(u64::to_ne_bytes).collect();
        let kinds = [RecordKind::Start, RecordKind::Done, RecordKind::Lock];
        for len in 0..=bytes.len() {
            let expected = kinds.into_iter().zip([16, 24, 32]).find(|(_, bytes)| *bytes == len);
            let expected =
                expected.map(|(kind, _)| Record { kind, process: 3, thread: 4, address: 0x1234 });
            assert_eq!(parse(&bytes[..len]), expected, "{len} bytes");
        }
    }
}
