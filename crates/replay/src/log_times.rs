//! When each part of a log was written, by the host's clock.
//!
//! ```text
//!   REC/times   a line for each observation at which the log had grown:   NANOSECONDS BYTES
//!               the first line, when QEMU creates the log:                0 12
//!
//!   the log     ... event │ event │ event │ ev      all whole events before BYTES had happened
//!                                             ▲ BYTES
//! ```
//!
//! QEMU writes its log in blocks of 4 KiB, so a time is exact to one observation interval. The
//! recorder only looks at the file's length, which disturbs neither QEMU nor the guest.

use crate::log::HEADER_BYTES;
use crate::{Error, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two observations of the log.
const OBSERVE_EVERY: Duration = Duration::from_millis(20);
/// QEMU writes its log in blocks of this size.
const WRITE_BYTES: u64 = 4096;
/// The longest line: two numbers of 20 digits, a space and a newline.
const LINE_BYTES_MAX: u64 = 42;

/// Records the times of a log while QEMU writes it, on a thread of its own.
#[derive(Debug)]
pub struct LogTimeRecorder {
    stop: Sender<()>,
    thread: Option<JoinHandle<LogObservations>>,
    is_full: Arc<AtomicBool>,
}

/// The observations of a [`LogTimeRecorder`].
#[derive(Debug)]
pub struct LogObservations {
    /// The length of the log when its file system was full for the first time, in bytes: QEMU loses
    /// what it cannot write, and goes on. `None` if the file system was never full.
    pub full_at: Option<u64>,
    /// [`Error::Io`] if some of the times could not be written.
    pub times: Result<()>,
}

impl LogTimeRecorder {
    /// Starts to record the times of the log at `log`, which need not exist yet, in a new file at
    /// `path`.
    ///
    /// Error: [`Error::Io`] if the file exists or cannot be created.
    pub fn start(log: PathBuf, path: &Path) -> Result<Self> {
        let file = File::create_new(path).map_err(Error::io("create", path))?;
        let path = path.to_owned();
        let (stop, stopped) = channel();
        let is_full = Arc::new(AtomicBool::new(false));
        let seen_full = Arc::clone(&is_full);
        let thread =
            std::thread::spawn(move || record_times(&log, (file, &path), &stopped, &seen_full));
        Ok(Self { stop, thread: Some(thread), is_full })
    }

    /// Returns a flag that becomes true when the log's file system is full for the first time: from
    /// there on QEMU loses parts of the log.
    pub fn is_full(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_full)
    }

    /// Observes the log a last time and ends the thread. Returns what the thread has seen.
    pub fn end(mut self) -> LogObservations {
        let _ = self.stop.send(());
        let seen = self.thread.take().and_then(|thread| thread.join().ok());
        seen.unwrap_or(LogObservations { full_at: None, times: Ok(()) })
    }
}

fn record_times(
    log: &Path,
    (mut file, path): (File, &Path),
    stopped: &Receiver<()>,
    seen_full: &AtomicBool,
) -> LogObservations {
    let (mut began, mut written_bytes) = (None, 0);
    let mut seen = LogObservations { full_at: None, times: Ok(()) };
    loop {
        let is_last =
            !matches!(stopped.recv_timeout(OBSERVE_EVERY), Err(RecvTimeoutError::Timeout));
        if let Ok(metadata) = std::fs::metadata(log) {
            let bytes = metadata.len().max(HEADER_BYTES);
            let began: Instant = *began.get_or_insert_with(Instant::now);
            if bytes > written_bytes && seen.times.is_ok() {
                let line = format!("{} {bytes}\n", began.elapsed().as_nanos());
                seen.times = file.write_all(line.as_bytes()).map_err(Error::io("write", path));
            }
            written_bytes = bytes;
            if seen.full_at.is_none() && is_full(log) {
                seen.full_at = Some(metadata.len());
                seen_full.store(true, Ordering::Relaxed);
            }
        }
        if is_last {
            return seen;
        }
    }
}

/// True if the file system of the log has no room for QEMU's next write.
fn is_full(log: &Path) -> bool {
    // The reserve of the file system is for root's processes, and QEMU runs as this one does.
    let is_root = rustix::process::geteuid().is_root();
    rustix::fs::statvfs(log).is_ok_and(|place| {
        let blocks = if is_root { place.f_bfree } else { place.f_bavail };
        blocks.saturating_mul(place.f_frsize) < WRITE_BYTES
    })
}

/// A line of the file of a log's times, `REC/times`: how long the log was at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogTime {
    /// The number of nanoseconds since QEMU created the log.
    pub ns: i64,
    /// The number of bytes of the log that QEMU had written by then.
    pub bytes: u64,
}

/// Reads the times of a log in order; the file may still be growing.
#[derive(Debug)]
pub struct LogTimes {
    path: PathBuf,
    file: BufReader<File>,
    offset: u64,
    /// The part of the next line that has been read.
    line: Vec<u8>,
    next: Option<LogTime>,
}

impl LogTimes {
    /// Opens the times at `path`.
    ///
    /// Error: [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let file = BufReader::new(file);
        Ok(Self { path: path.into(), file, offset: 0, line: Vec::new(), next: None })
    }

    /// Returns the next time without consuming it; `None` if its line is not yet complete.
    ///
    /// Errors: [`Error::Io`]; [`Error::Damaged`] for a line that is not two numbers.
    pub fn peek(&mut self) -> Result<Option<LogTime>> {
        if self.next.is_some() {
            return Ok(self.next);
        }
        let room = LINE_BYTES_MAX.saturating_sub(self.line.len() as u64);
        Read::take(&mut self.file, room)
            .read_until(b'\n', &mut self.line)
            .map_err(Error::io("read", &self.path))?;
        if self.line.last() != Some(&b'\n') {
            let is_too_long = self.line.len() as u64 >= LINE_BYTES_MAX;
            return if is_too_long { Err(self.damaged()) } else { Ok(None) };
        }
        self.next = Some(parse_line(&self.line).ok_or_else(|| self.damaged())?);
        self.offset += self.line.len() as u64;
        self.line.clear();
        Ok(self.next)
    }

    /// Consumes the next time if QEMU had written fewer than `bytes` bytes by then, and returns its
    /// nanoseconds; `None` otherwise.
    ///
    /// Errors: those of [`LogTimes::peek`].
    pub fn next_before(&mut self, bytes: u64) -> Result<Option<i64>> {
        let next = self.peek()?.filter(|next| next.bytes < bytes);
        Ok(next.map(|next| {
            self.next = None;
            next.ns
        }))
    }

    fn damaged(&self) -> Error {
        let problem = "a line must be two numbers: nanoseconds and bytes".into();
        Error::Damaged { path: self.path.clone(), offset: self.offset, problem }
    }
}

fn parse_line(line: &[u8]) -> Option<LogTime> {
    let (ns, bytes) = std::str::from_utf8(line).ok()?.trim_end().split_once(' ')?;
    Some(LogTime { ns: ns.parse().ok()?, bytes: bytes.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_recorded_while_a_log_grows() {
        let dir = tempfile::tempdir().unwrap();
        let [log, path] = ["log", "times"].map(|name| dir.path().join(name));
        let recorder = LogTimeRecorder::start(log.clone(), &path).unwrap();
        assert!(LogTimeRecorder::start(log.clone(), &path).is_err(), "the file exists");
        let mut times = LogTimes::open(&path).unwrap();
        assert!(times.peek().unwrap().is_none());
        let mut next = || {
            let began = Instant::now();
            while times.peek().unwrap().is_none() {
                assert!(began.elapsed() < Duration::from_mins(1), "no time was recorded");
                std::thread::sleep(Duration::from_millis(1));
            }
            let LogTime { ns, bytes } = times.peek().unwrap().unwrap();
            assert_eq!(
                (times.next_before(bytes).unwrap(), times.next_before(bytes + 1).unwrap()),
                (None, Some(ns))
            );
            (ns, bytes)
        };
        std::fs::write(&log, b"").unwrap();
        let (began, header) = next();
        assert_eq!(header, 12);
        std::fs::write(&log, [0; 4096]).unwrap();
        let (then, bytes) = next();
        assert!(then > began && bytes == 4096);
        std::fs::write(&log, [0; 5000]).unwrap();
        let is_full = recorder.is_full();
        let seen = recorder.end();
        assert!(seen.times.is_ok());
        assert_eq!((seen.full_at, is_full.load(Ordering::Relaxed)), (None, false));
        assert_eq!(next().1, 5000, "the recorder looks once more at the end");
    }

    #[test]
    fn lines_may_come_in_pieces_and_other_text_is_refused() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut times = LogTimes::open(file.path()).unwrap();
        let time = |ns, bytes| Some(LogTime { ns, bytes });
        for (piece, expected) in
            [("0 1", None), ("2", None), ("\n5", time(0, 12)), (" 40\n", time(5, 40))]
        {
            file.write_all(piece.as_bytes()).unwrap();
            assert_eq!(times.peek().unwrap(), expected);
            times.next_before(u64::MAX).unwrap();
        }
        for wrong in ["\n", "1\n", "a b\n", "1 -1\n", "1 2 3\n", &"9".repeat(60)] {
            std::fs::write(file.path(), format!("0 12\n{wrong}")).unwrap();
            let mut times = LogTimes::open(file.path()).unwrap();
            assert_eq!(times.next_before(u64::MAX).unwrap(), Some(0));
            assert!(matches!(times.peek(), Err(Error::Damaged { offset: 5, .. })), "{wrong:?}");
        }
        assert!(matches!(LogTimes::open(Path::new("/no/times")), Err(Error::Io { .. })));
    }
}
