//! When what is in a log was written, by the host's clock.
//!
//! ```text
//!   REC/times   a line for each look at which QEMU had written more of its log:   NANOSECONDS BYTES
//!               the first, as the log is made:                                    0 12
//!
//!   the log     ... event │ event │ event │ ev          up to BYTES: all events before that are whole have been by then
//! ```
//!
//! QEMU writes its log in pieces of 4 KiB, when they are full: a time is right to within one look.
//! Looking is done at the file, so that neither QEMU nor its guest is disturbed. A log whose guest
//! reads the host's clock has times of its own; most have none (`-rtc clock=vm`).

use crate::log::HEADER_BYTES;
use crate::{Error, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Two numbers of 20 digits, and what stands between and behind.
const LINE_BYTES_MAX: u64 = 42;

/// Looks at a log that is being written, and keeps the times.
#[derive(Debug)]
pub struct Keeper {
    ends: Sender<()>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Keeper {
    /// Keeps the times of the log at `log`, which may not be there yet, in a new file at `path`.
    pub fn begin(log: PathBuf, path: &Path) -> Result<Self> {
        let mut file = File::create_new(path).map_err(Error::io("make", path))?;
        let path = path.to_owned();
        let (ends, ended) = channel();
        let keep = move || {
            let (mut began, mut bytes) = (None, 0);
            loop {
                let is_last =
                    !matches!(ended.recv_timeout(LOOK_EVERY), Err(RecvTimeoutError::Timeout));
                if let Ok(found) = std::fs::metadata(&log) {
                    let now = found.len().max(HEADER_BYTES);
                    let since: Instant = *began.get_or_insert_with(Instant::now);
                    if now > bytes {
                        let line = format!("{} {now}\n", since.elapsed().as_nanos());
                        file.write_all(line.as_bytes()).map_err(Error::io("write", &path))?;
                        bytes = now;
                    }
                }
                if is_last {
                    return Ok(());
                }
            }
        };
        Ok(Self { ends, thread: Some(std::thread::spawn(keep)) })
    }

    /// The log has ended: looks once more.
    ///
    /// Error: the times could not be written, all or some of them.
    pub fn end(mut self) -> Result<()> {
        let _ = self.ends.send(());
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or(Ok(()))
    }
}

/// The times of a log, read one after the other; they may still be growing.
#[derive(Debug, Default)]
pub struct Times {
    path: PathBuf,
    file: Option<BufReader<File>>,
    offset: u64,
    /// What has come of the next line.
    line: Vec<u8>,
    next: Option<(i64, u64)>,
}

impl Times {
    /// Of a log that has none beside it.
    pub fn none() -> Self {
        Self::default()
    }

    /// Those at `path`; none where there is no such file.
    pub fn open(path: &Path) -> Result<Self> {
        match File::open(path) {
            Ok(file) => {
                Ok(Self { path: path.into(), file: Some(BufReader::new(file)), ..Self::default() })
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::none()),
            Err(e) => Err(Error::io("open", path)(e)),
        }
    }

    /// Whether there are any, or may be.
    pub fn are_kept(&self) -> bool {
        self.file.is_some()
    }

    /// The next one: nanoseconds, and the bytes that had been written by then. None where it has
    /// not come.
    ///
    /// Error: [`Error::Damaged`].
    pub fn peek(&mut self) -> Result<Option<(i64, u64)>> {
        let (None, Some(file)) = (self.next, &mut self.file) else { return Ok(self.next) };
        let room = LINE_BYTES_MAX.saturating_sub(self.line.len() as u64);
        file.take(room).read_until(b'\n', &mut self.line).map_err(Error::io("read", &self.path))?;
        if self.line.last() != Some(&b'\n') {
            return if self.line.len() as u64 >= LINE_BYTES_MAX {
                Err(self.damaged())
            } else {
                Ok(None)
            };
        }
        let text = std::str::from_utf8(&self.line).ok();
        let numbers = text.and_then(|text| text.trim_end().split_once(' '));
        let both = numbers.and_then(|(ns, bytes)| Some((ns.parse().ok()?, bytes.parse().ok()?)));
        self.next = Some(both.ok_or_else(|| self.damaged())?);
        self.offset += self.line.len() as u64;
        self.line.clear();
        Ok(self.next)
    }

    /// The same, if what had been written by then ends before `bytes`; it is not given again.
    pub fn next_before(&mut self, bytes: u64) -> Result<Option<i64>> {
        let next = self.peek()?.filter(|(_, written)| *written < bytes);
        Ok(next.map(|(ns, _)| {
            self.next = None;
            ns
        }))
    }

    fn damaged(&self) -> Error {
        let problem = "a line is to be two numbers: nanoseconds and bytes".into();
        Error::Damaged { path: self.path.clone(), offset: self.offset, problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_grows_has_its_times() {
        let dir = tempfile::tempdir().unwrap();
        let [log, path] = ["log", "times"].map(|name| dir.path().join(name));
        let keeper = Keeper::begin(log.clone(), &path).unwrap();
        assert!(Keeper::begin(log.clone(), &path).is_err(), "the times of another log");
        let mut times = Times::open(&path).unwrap();
        assert!(times.are_kept() && times.peek().unwrap().is_none());
        let mut next = || {
            let began = Instant::now();
            while times.peek().unwrap().is_none() {
                assert!(began.elapsed() < Duration::from_mins(1), "nobody looks");
                std::thread::sleep(Duration::from_millis(1));
            }
            let (ns, bytes) = times.peek().unwrap().unwrap();
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
        keeper.end().unwrap();
        assert_eq!(next().1, 5000, "it was looked at once more");
    }

    #[test]
    fn lines_come_in_pieces_and_what_is_none_is_told() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut times = Times::open(file.path()).unwrap();
        for (piece, found) in
            [("0 1", None), ("2", None), ("\n5", Some((0, 12))), (" 40\n", Some((5, 40)))]
        {
            file.write_all(piece.as_bytes()).unwrap();
            assert_eq!(times.peek().unwrap(), found);
            times.next_before(u64::MAX).unwrap();
        }
        for wrong in ["\n", "1\n", "a b\n", "1 -1\n", "1 2 3\n", &"9".repeat(60)] {
            std::fs::write(file.path(), format!("0 12\n{wrong}")).unwrap();
            let mut times = Times::open(file.path()).unwrap();
            assert_eq!(times.next_before(u64::MAX).unwrap(), Some(0));
            assert!(matches!(times.peek(), Err(Error::Damaged { offset: 5, .. })), "{wrong:?}");
        }
        let mut none = Times::open(Path::new("/no/times")).unwrap();
        assert!(!none.are_kept() && none.next_before(u64::MAX).unwrap().is_none());
    }
}
