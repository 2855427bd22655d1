//! Reads a log that QEMU is still writing, up to the last instruction that can be replayed.
//!
//! ```text
//!   ... instructions │ events │ instructions │ ev          what QEMU has written to the file
//!                                          ▲ last_stop: one before the end of the last whole run of instructions
//! ```
//!
//! A replaying QEMU reads on when it has run all instructions of an event, and ends itself if
//! nothing follows. A replay may therefore run up to the last instruction but one.
//!
//! QEMU reads whole blocks. A reading of the warp clock may still have to be corrected
//! ([`WarpCorrector`]), so the block that contains it is withheld until that is decided.
//!
//! If the log is cut by time, it is read only as far as its times reach. This gives the same cut
//! points as the complete log.

use crate::cut_points::{ClockReading, CutFinder, CutSpacing};
use crate::icount_warp::WarpCorrector;
use crate::log::{self, HEADER_BYTES, LogEvent, LogIndex, LogReader, LogVersion, WARP_CLOCK};
use crate::{Error, LogTimes, Recording, Result};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Take};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The smallest block size that is assumed for QEMU's reads and writes, in bytes.
const BLOCK_BYTES_MIN: u64 = 4096;

/// A log that QEMU is still writing.
#[derive(Debug)]
pub struct GrowingLog {
    file: File,
    path: PathBuf,
    version: LogVersion,
    block_bytes: u64,
    warp_corrector: WarpCorrector,
    /// Byte offset up to which the log has been searched for readings to correct.
    searched: u64,
    /// Byte offset up to which nothing remains to be corrected.
    corrected: u64,
    /// Byte offset up to which events have been read.
    offset: u64,
    /// Instructions up to `offset`.
    icount: u64,
    index: LogIndex,
    cut_finder: CutFinder,
    /// Needed to cut by time only.
    times: Option<LogTimes>,
    has_ended: bool,
    is_complete: bool,
}

impl GrowingLog {
    /// Opens the log of `recording` and writes the header that a replay requires. Returns `None`
    /// while QEMU has not written any event.
    ///
    /// Errors: [`Error::Io`]; [`Error::Damaged`] for a file that is not a log of the recording's
    /// version.
    pub fn of(recording: &Recording, spacing: CutSpacing) -> Result<Option<Self>> {
        let (log, times) = (recording.log_path(), recording.times_path());
        Self::open(&log, recording.meta.log_version, &times, spacing)
    }

    /// As [`GrowingLog::of`], for the log at `path`. `times` is the path of the log's times, which
    /// only [`CutSpacing::Time`] needs.
    fn open(
        path: &Path,
        version: LogVersion,
        times: &Path,
        spacing: CutSpacing,
    ) -> Result<Option<Self>> {
        let file = match File::options().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("open", path)(e)),
        };
        let metadata = file.metadata().map_err(Error::io("look at", path))?;
        if metadata.len() <= HEADER_BYTES {
            return Ok(None);
        }
        log::write_missing_header(&file, path, version)?;
        let cut_finder = CutFinder::new(spacing);
        let times = cut_finder.is_by_time().then(|| LogTimes::open(times)).transpose()?;
        Ok(Some(Self {
            file,
            path: path.to_owned(),
            version,
            block_bytes: metadata.blksize().max(BLOCK_BYTES_MIN),
            warp_corrector: WarpCorrector::default(),
            searched: HEADER_BYTES,
            corrected: 0,
            offset: HEADER_BYTES,
            icount: 0,
            index: LogIndex::default(),
            cut_finder,
            times,
            has_ended: false,
            is_complete: false,
        }))
    }

    /// Declares that nothing more will be written, so that the whole file can be read.
    pub fn end(&mut self) {
        self.has_ended = true;
    }

    /// Reads the events that QEMU has written since the last call. Returns true if there were any.
    ///
    /// Errors: [`Error::Io`]; [`Error::Damaged`]; [`Error::TooManyCuts`].
    pub fn refresh(&mut self) -> Result<bool> {
        let before = self.offset;
        self.correct_warps()?;
        while let Some(time) = self.times.as_mut().map(LogTimes::peek).transpose()?.flatten() {
            if !self.read_until(time.bytes)? {
                break;
            }
            let reading = ClockReading { icount: self.icount, ns: time.ns };
            self.cut_finder.add_clock_reading(reading)?;
            self.times.as_mut().map(|times| times.next_before(u64::MAX)).transpose()?;
        }
        if self.times.is_none() || self.has_ended {
            self.read_until(u64::MAX)?;
        }
        Ok(self.offset > before)
    }

    /// Corrects the readings of the warp clock in the new part of the file, and finds the offset up
    /// to which nothing remains to be corrected.
    fn correct_warps(&mut self) -> Result<()> {
        let len = self.file.metadata().map_err(Error::io("look at", &self.path))?.len();
        let mut reader = read_range(&self.file, &self.path, self.version, self.searched..len, 0)?;
        while let Some(event) = reader.next_event()? {
            if let Some(correction) = self.warp_corrector.add(event) {
                correction.write(&self.file, &self.path)?;
            }
        }
        self.searched = reader.offset();
        self.corrected = if self.has_ended {
            len
        } else {
            let is_partial_reading = self.searched < len && {
                let mut kind = [0];
                self.file
                    .read_exact_at(&mut kind, self.searched)
                    .map_err(Error::io("read", &self.path))?;
                kind == [WARP_CLOCK]
            };
            let undecided = self.warp_corrector.undecided_from();
            let until = undecided.or(is_partial_reading.then_some(self.searched)).unwrap_or(len);
            until - until % self.block_bytes
        };
        Ok(())
    }

    /// Reads the events that end at byte `until` or before. Returns whether the corrected part of
    /// the file reaches that far.
    fn read_until(&mut self, until: u64) -> Result<bool> {
        let len = self.corrected;
        let range = self.offset..until.min(len);
        let mut reader = read_range(&self.file, &self.path, self.version, range, self.icount)?;
        while let Some(event) = reader.next_event()? {
            self.index.add(event);
            self.cut_finder.add_event(event)?;
            self.is_complete |= event.event == LogEvent::End;
        }
        (self.offset, self.icount) = (reader.offset(), reader.icount());
        Ok(len >= until || self.has_ended)
    }

    /// Returns the number of instructions in the events that have been read so far.
    pub fn icount(&self) -> u64 {
        self.icount
    }

    /// Returns the last instruction at which a replay of the events so far may stop.
    pub fn last_stop(&self) -> u64 {
        self.index.end().saturating_sub(1)
    }

    /// Returns the index of the events so far. Instructions that are unambiguous in it remain so.
    pub fn index(&self) -> &LogIndex {
        &self.index
    }

    /// Returns the next cut point; `None` if it is not known yet.
    pub fn next_cut(&mut self) -> Option<u64> {
        self.cut_finder.next_cut(&self.index)
    }

    /// Returns whether QEMU has written its end event.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }
}

/// A reader of the bytes `range` of the log of `version`, before which `icount` instructions ran.
fn read_range<'a>(
    mut file: &'a File,
    path: &Path,
    version: LogVersion,
    range: Range<u64>,
    icount: u64,
) -> Result<LogReader<Take<&'a File>>> {
    file.seek(SeekFrom::Start(range.start)).map_err(Error::io("read", path))?;
    let bytes = file.take(range.end.saturating_sub(range.start));
    Ok(LogReader::resume(bytes, path, version, range.start, icount))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: LogVersion = LogVersion::QEMU_10;
    use crate::cut_points::find_cut_points;
    use crate::log::tests::bytes;
    use proptest::prelude::*;
    use std::io::Write;

    fn events(log: &[(u32, Option<i64>)]) -> Vec<u8> {
        let one = |(count, clock): &(u32, Option<i64>)| {
            let clock =
                clock.map(|now| [&[28][..], &now.to_be_bytes()].concat()).unwrap_or_default();
            [&[0][..], &count.to_be_bytes(), &clock].concat()
        };
        let all: Vec<Vec<u8>> = log.iter().map(one).collect();
        bytes(&all.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    #[test]
    fn a_log_with_events_gets_its_header() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let spacing = CutSpacing::Instructions(10);
        let times = Path::new("/nowhere/times");
        assert!(
            GrowingLog::open(Path::new("/nowhere/log"), VERSION, times, spacing).unwrap().is_none()
        );
        assert!(GrowingLog::open(file.path(), VERSION, times, spacing).unwrap().is_none());
        let mut log = events(&[(5, None), (100, None)]);
        log[..4].fill(0);
        std::fs::write(file.path(), &log).unwrap();
        let mut growing = GrowingLog::open(file.path(), VERSION, times, spacing).unwrap().unwrap();
        growing.block_bytes = 1;
        assert_eq!(std::fs::read(file.path()).unwrap()[..4], VERSION.0.to_be_bytes());
        assert!(growing.refresh().unwrap() && !growing.refresh().unwrap());
        assert_eq!(
            (growing.icount(), growing.last_stop(), growing.next_cut()),
            (105, 104, Some(11))
        );
        assert!(!growing.is_complete());
    }

    proptest! {
        /// However the log arrives, it is cut as the complete log is, and a replay never runs out
        /// of it.
        #[test]
        fn a_growing_log_has_the_cut_points_of_the_complete_log(
            log in prop::collection::vec((1u32..60, prop::option::of(0i64..2000)), 1..40),
            by_time in any::<bool>(),
            piece_bytes in 1usize..50,
        ) {
            let spacing = if by_time {
                CutSpacing::Time(std::time::Duration::from_nanos(100))
            } else {
                CutSpacing::Instructions(50)
            };
            let mut log = events(&log);
            log.extend([28, 0, 0, 0, 0, 0, 0, 0, 0]);
            let complete = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(complete.path(), &log).unwrap();
            let index = LogIndex::read(complete.path()).unwrap();
            // A piece each 30 ns, the first when the file is created. The last one is written
            // without an observation.
            let (head, rest) = log.split_at(HEADER_BYTES as usize + 1);
            let pieces: Vec<&[u8]> = rest.chunks(piece_bytes).collect();
            let lines: Vec<String> = (0..pieces.len())
                .map(|number| format!("{} {}\n", 30 * number, head.len() + number * piece_bytes))
                .collect();
            let dir = tempfile::tempdir().unwrap();
            let times_path = dir.path().join("times");
            std::fs::write(&times_path, lines.concat()).unwrap();
            let expected = find_cut_points(complete.path(), &times_path, spacing, &index).unwrap();

            let mut file = tempfile::NamedTempFile::new().unwrap();
            let mut times = File::create(&times_path).unwrap();
            file.write_all(head).unwrap();
            let mut growing = GrowingLog::open(file.path(), VERSION, &times_path, spacing).unwrap().unwrap();
            growing.block_bytes = 1;
            let mut found = Vec::new();
            for number in 0..=pieces.len() {
                match pieces.get(number) {
                    Some(piece) => file.write_all(piece).unwrap(),
                    None => growing.end(),
                }
                if let Some(line) = lines.get(number) {
                    times.write_all(line.as_bytes()).unwrap();
                }
                growing.refresh().unwrap();
                while let Some(cut) = growing.next_cut() {
                    prop_assert!(cut <= growing.last_stop());
                    found.push(cut);
                }
            }
            prop_assert_eq!(found, expected);
        }

        /// However the log arrives, what a replay may read is final, and equals the corrected
        /// complete log.
        #[test]
        fn a_replay_reads_no_bytes_that_may_still_be_corrected(
            letters in prop::collection::vec("[NWAhBI]|[1-9]|W 5 h 6 7|h 20 A|h 20 B A I N", 0..60),
            block_bytes in 1u64..40,
            piece_bytes in 1usize..50,
        ) {
            let log = crate::icount_warp::tests::log(&letters.join(" "));
            let complete = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(complete.path(), &log).unwrap();
            crate::icount_warp::correct_log(complete.path()).unwrap();
            let expected = std::fs::read(complete.path()).unwrap();

            let file = tempfile::NamedTempFile::new().unwrap();
            let (head, rest) = log.split_at((HEADER_BYTES as usize + 1).min(log.len()));
            let mut qemu = File::options().append(true).open(file.path()).unwrap();
            qemu.write_all(head).unwrap();
            let (times, spacing) = (Path::new("/nowhere/times"), CutSpacing::Instructions(50));
            let opened = GrowingLog::open(file.path(), VERSION, times, spacing).unwrap();
            let Some(mut growing) = opened else { return Ok(()) };
            growing.block_bytes = block_bytes;
            for piece in rest.chunks(piece_bytes).map(Some).chain([None]) {
                match piece {
                    Some(piece) => qemu.write_all(piece).unwrap(),
                    None => growing.end(),
                }
                growing.refresh().unwrap();
                let until = growing.offset.next_multiple_of(block_bytes);
                let until = until.min(expected.len() as u64) as usize;
                let present = std::fs::read(file.path()).unwrap();
                // QEMU reads the first block when it starts.
                if growing.offset > HEADER_BYTES {
                    prop_assert!(until <= present.len());
                    prop_assert_eq!(&present[..until], &expected[..until]);
                }
            }
        }
    }
}
