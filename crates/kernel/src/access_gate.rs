//! Holds each access to some files until it is let through (fanotify's pre-content events, Linux
//! 6.14).
//!
//! ```text
//!   any process: write(file) ──▶ waits ··············································▶ goes on
//!                                  └▶ AccessGate::next ─▶ Access: file, bytes, thread ─▶ dropped
//! ```
//!
//! The purpose: the holder of the gate reads old content before it is overwritten, and learns of each
//! write.
//!
//! Invariants:
//! 1. Each read, write, truncation and punched hole of a file is reported before it happens, if the
//!    process has opened the file while a gate was over it. The kernel decides that as a file is
//!    opened. Writes through a shared mapping are not reported.
//! 2. An [`Access`] goes on when it is dropped. If the gate is dropped or this process dies, the
//!    kernel lets all go on.
//! 3. [`AccessGate::reader`] is not held itself.
//!
//! Absent: the meaning of the files.

use crate::{Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, fstat};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Before a read or a write of a file, with the range.
const PRE_ACCESS: u64 = 0x0010_0000;
/// The record of an event that holds the range.
const RANGE_RECORD: u8 = 6;
/// Event, and record of its range.
const METADATA_BYTES: usize = 24;
const RANGE_BYTES: usize = 24;
/// The version of events that this code reads.
const EVENT_VERSION: u8 = 3;
/// How long the kernel may take to report an access of our own.
const FIRST_ACCESS_MAX: Duration = Duration::from_secs(10);

/// The system calls that only read.
const READS: [libc::c_long; 5] =
    [libc::SYS_read, libc::SYS_pread64, libc::SYS_readv, libc::SYS_preadv, libc::SYS_preadv2];

/// The accesses to some files, each of which waits until it is let through.
#[derive(Debug)]
pub struct AccessGate {
    group: OwnedFd,
    files: Vec<Gated>,
    stop: OwnedFd,
}

#[derive(Debug)]
struct Gated {
    identity: (u64, u64),
    /// From an event: the kernel reports no access through it.
    reader: File,
}

/// An access that waits. It goes on when this is dropped.
#[derive(Debug)]
pub struct Access<'a> {
    group: &'a OwnedFd,
    /// The kernel knows the access by the number of this descriptor.
    file: OwnedFd,
    /// The bytes of the file, in whole pages; all, if the kernel does not tell which.
    pub bytes: Range<u64>,
    thread: u32,
}

impl AccessGate {
    /// Holds each access to `files` through descriptors that are opened from now on. Errors ([`Error::AccessGate`]): the kernel is older
    /// than 6.14 or has no fanotify; the file system does not support it; this process lacks
    /// `CAP_SYS_ADMIN`.
    pub fn over(files: &[File]) -> Result<Self> {
        let flags = libc::FAN_CLASS_PRE_CONTENT
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_REPORT_TID;
        let open = OFlags::RDONLY | OFlags::LARGEFILE | OFlags::CLOEXEC;
        // SAFETY: fanotify_init takes no pointers; it returns a new descriptor or -1.
        let group = unsafe { libc::fanotify_init(flags, open.bits()) };
        if group < 0 {
            return Err(failed("ask the kernel to hold accesses to files"));
        }
        // SAFETY: the descriptor is open, and of this function alone.
        let group = unsafe { OwnedFd::from_raw_fd(group) };
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| error("make an eventfd", e))?;
        let mut gate = Self { group, files: Vec::new(), stop };
        for file in files {
            gate.add(file)?;
        }
        Ok(gate)
    }

    fn add(&mut self, file: &File) -> Result<()> {
        let mark = libc::FAN_MARK_ADD;
        let (group, number) = (self.group.as_raw_fd(), file.as_raw_fd());
        // SAFETY: no pointer is passed but null, which stands for the file of the descriptor itself.
        let code =
            unsafe { libc::fanotify_mark(group, mark, PRE_ACCESS, number, std::ptr::null()) };
        if code != 0 {
            return Err(failed("ask the kernel to hold accesses to a file"));
        }
        let identity = identity(file.as_fd())?;
        // Each event brings a descriptor whose accesses the kernel does not report.
        let opened = File::open(format!("/proc/self/fd/{number}"));
        let opened = opened.map_err(|e| error("open a file anew", e))?;
        let reader = std::thread::scope(|scope| {
            let asked = scope.spawn(|| opened.read_at(&mut [0], 0));
            let reader = self.first_descriptor(identity);
            // Without an answer the read would wait: the group ends with this function's caller.
            if reader.is_ok() {
                while !asked.is_finished() {
                    let _ = self.take(Some(Duration::from_millis(1)));
                }
            } else {
                self.let_go();
            }
            reader
        })?;
        self.files.push(Gated { identity, reader: File::from(reader) });
        Ok(())
    }

    /// Returns a descriptor of the file from the first event of an access to it.
    fn first_descriptor(&self, wanted: (u64, u64)) -> Result<OwnedFd> {
        let until = Instant::now() + FIRST_ACCESS_MAX;
        while Instant::now() < until {
            for access in self.take(Some(Duration::from_millis(100)))? {
                if identity(access.file.as_fd())? == wanted {
                    let copy = access.file.try_clone();
                    return copy.map_err(|e| error("duplicate a descriptor", e));
                }
            }
        }
        Err(error("hold accesses to a file", io::ErrorKind::TimedOut))
    }

    /// Holds no access any longer: what waits goes on.
    pub fn let_go(&self) {
        let group = self.group.as_raw_fd();
        // SAFETY: no pointer is passed but null, which a flush ignores.
        unsafe { libc::fanotify_mark(group, libc::FAN_MARK_FLUSH, 0, -1, std::ptr::null()) };
        while self.take(Some(Duration::ZERO)).is_ok_and(|taken| !taken.is_empty()) {}
    }

    /// Returns a file from which file number `file` can be read, and that is not held. `None` if
    /// there is no such file.
    pub fn reader(&self, file: usize) -> Option<&File> {
        Some(&self.files.get(file)?.reader)
    }

    /// Waits for accesses, and returns each with the number of its file. Returns none after
    /// [`AccessGate::stop`]. Error: the kernel refuses; then accesses have gone on, and are held no
    /// longer.
    pub fn next(&self) -> Result<Vec<(usize, Access<'_>)>> {
        let taken = self.take(None).and_then(|accesses| {
            let mut numbered = Vec::with_capacity(accesses.len());
            for access in accesses {
                let identity = identity(access.file.as_fd())?;
                if let Some(file) = self.files.iter().position(|file| file.identity == identity) {
                    numbered.push((file, access));
                }
            }
            Ok(numbered)
        });
        taken.inspect_err(|_| self.let_go())
    }

    /// Ends the waiting of [`AccessGate::next`], now and later. Accesses are held until the gate is
    /// dropped.
    pub fn stop(&self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// Returns true after [`AccessGate::stop`].
    pub fn is_stopped(&self) -> bool {
        let mut ready = [PollFd::new(&self.stop, PollFlags::IN)];
        poll(&mut ready, Some(&rustix::event::Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Takes the accesses that have come within `wait`, or waits for as long as it takes.
    fn take(&self, wait: Option<Duration>) -> Result<Vec<Access<'_>>> {
        let limit = wait.map(|wait| rustix::event::Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        });
        let mut ready =
            [PollFd::new(&self.group, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
        match poll(&mut ready, limit.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            other => other.map_err(|e| error("wait for accesses to a file", e))?,
        };
        if !ready[0].revents().contains(PollFlags::IN) {
            return Ok(Vec::new());
        }
        let mut bytes = [0; 4096];
        match rustix::io::read(&self.group, &mut bytes) {
            Ok(len) => Ok(accesses(bytes.get(..len).unwrap_or_default(), &self.group)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(e) => Err(error("take an access to a file", e)),
        }
    }
}

impl Access<'_> {
    /// Returns true if the access is certain to be a read: the thread waits in such a system call.
    pub fn is_read(&self) -> bool {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", self.thread));
        let number = call.ok().and_then(|text| text.split_whitespace().next()?.parse().ok());
        number.is_some_and(|number| READS.contains(&number))
    }
}

impl Drop for Access<'_> {
    fn drop(&mut self) {
        let mut response = [0; 8];
        response[..4].copy_from_slice(&self.file.as_raw_fd().to_ne_bytes());
        response[4..].copy_from_slice(&libc::FAN_ALLOW.to_ne_bytes());
        // It fails only if the kernel has let the access go on already.
        let _ = rustix::io::write(self.group, &response);
    }
}

/// Reads the events in `bytes`, which came from `group`.
fn accesses<'a>(mut bytes: &[u8], group: &'a OwnedFd) -> Vec<Access<'a>> {
    let mut found = Vec::new();
    while let Some(head) = bytes.get(..METADATA_BYTES) {
        let event_bytes = u32_at(head, 0) as usize;
        let Some(event) = bytes.get(..event_bytes).filter(|_| event_bytes >= METADATA_BYTES) else {
            break;
        };
        let (number, thread) = (u32_at(head, 16).cast_signed(), u32_at(head, 20));
        if number >= 0 {
            // SAFETY: the kernel has opened the descriptor for this event, which is read once.
            let file = unsafe { OwnedFd::from_raw_fd(number) };
            found.push(Access { group, file, bytes: range_of(event), thread });
        }
        bytes = bytes.get(event_bytes..).unwrap_or_default();
    }
    found
}

/// Returns the range of an access. One that is unknown is the whole file.
fn range_of(event: &[u8]) -> Range<u64> {
    let all = 0..u64::MAX;
    let head_bytes = usize::from(event[6]) | usize::from(event[7]) << 8;
    let Some(record) = event.get(head_bytes..head_bytes.saturating_add(RANGE_BYTES)) else {
        return all;
    };
    if event[4] != EVENT_VERSION || record[0] != RANGE_RECORD {
        return all;
    }
    let (offset, count) = (u64_at(record, 8), u64_at(record, 16));
    // A truncation has no length: it changes all that follows.
    offset..if count == 0 { u64::MAX } else { offset.saturating_add(count) }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

fn identity(file: BorrowedFd<'_>) -> Result<(u64, u64)> {
    let stat = fstat(file).map_err(|e| error("look at a file", e))?;
    Ok((stat.st_dev, stat.st_ino))
}

fn failed(operation: &'static str) -> Error {
    error(operation, io::Error::last_os_error())
}

fn error(operation: &'static str, source: impl Into<io::Error>) -> Error {
    Error::AccessGate { operation, source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};
    use std::os::unix::net::UnixStream;

    /// A file that was opened while the gate was over it, and the gate.
    fn gated() -> Result<(File, AccessGate)> {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().write_all_at(&[1; 16384], 0).unwrap();
        let gate = AccessGate::over(&[file.reopen().unwrap()])?;
        Ok((file.reopen().unwrap(), gate))
    }

    #[test]
    fn a_write_waits_until_its_old_content_was_read() {
        let (file, gate) = match gated() {
            Ok(gated) => gated,
            Err(error) => keyframe_testing::skip!("{error}"),
        };
        std::thread::scope(|scope| {
            scope.spawn(|| file.write_all_at(&[2; 512], 4096).unwrap());
            let mut accesses = Vec::new();
            while accesses.is_empty() {
                accesses = gate.next().unwrap();
            }
            let (number, access) = accesses.remove(0);
            assert_eq!((number, access.bytes.clone()), (0, 4096..8192));
            assert!(!access.is_read());
            std::thread::sleep(Duration::from_millis(50));
            let mut old = [0; 512];
            gate.reader(0).unwrap().read_exact_at(&mut old, 4096).unwrap();
            assert_eq!(old, [1; 512]);
        });
        let mut new = [0; 512];
        gate.reader(0).unwrap().read_exact_at(&mut new, 4096).unwrap();
        assert_eq!(new, [2; 512]);
    }

    #[test]
    fn each_kind_of_access_is_reported_with_its_range() {
        let (file, gate) = match gated() {
            Ok(gated) => gated,
            Err(error) => keyframe_testing::skip!("{error}"),
        };
        let seen = std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                file.read_at(&mut [0; 100], 8192).unwrap();
                let mut at = &file;
                at.seek(SeekFrom::Start(700)).unwrap();
                at.write_all(&[3; 10]).unwrap();
                let hole =
                    rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, hole, 4096, 4096).unwrap();
                file.set_len(12288).unwrap();
                gate.stop();
            });
            let mut seen = Vec::new();
            while !asks.is_finished() {
                for (_, access) in gate.next().unwrap() {
                    seen.push((access.bytes.clone(), access.is_read()));
                }
            }
            seen
        });
        let ranges: Vec<_> = seen.iter().map(|(range, _)| range.clone()).collect();
        assert_eq!(ranges, [8192..12288, 0..4096, 4096..8192, 12288..u64::MAX]);
        assert!(seen[1..].iter().all(|(_, is_read)| !is_read), "{seen:?}");
    }

    #[test]
    fn a_gate_that_is_dropped_lets_all_go_on() {
        let (file, gate) = match gated() {
            Ok(gated) => gated,
            Err(error) => keyframe_testing::skip!("{error}"),
        };
        let (mut told, mut tells) = UnixStream::pair().unwrap();
        let writes = std::thread::spawn(move || {
            tells.write_all(&[0]).unwrap();
            file.write_all_at(&[2; 512], 4096).unwrap();
        });
        io::Read::read_exact(&mut told, &mut [0]).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!writes.is_finished());
        drop(gate);
        writes.join().unwrap();
    }

    #[test]
    fn a_damaged_event_is_an_access_to_the_whole_file() {
        let group = rustix::fs::open("/dev/null", OFlags::RDONLY, rustix::fs::Mode::empty());
        let group = group.unwrap();
        assert!(accesses(&[0; 10], &group).is_empty());
        assert!(accesses(&[0; 100], &group).is_empty());
        let mut event = [0; METADATA_BYTES];
        (event[0], event[4], event[6]) = (24, EVENT_VERSION, 24);
        event[16..20].copy_from_slice(&(-1i32).to_ne_bytes());
        assert!(accesses(&event, &group).is_empty(), "no descriptor");
        assert_eq!(range_of(&event), 0..u64::MAX);
        (event[6], event[7]) = (255, 255);
        assert_eq!(range_of(&event), 0..u64::MAX);
    }
}
