//! A log that is still being written, as far as it can be replayed already.
//!
//! ```text
//!   ... instructions │ events │ instructions │ ev          what QEMU has written out of its buffer
//!                                          ▲ last_standing: one before the end of the last instructions that are whole
//! ```
//!
//! A QEMU that replays reads on when it has run all instructions of an event, and ends itself where
//! nothing follows. So it may run up to the last but one instruction of what there is, no further.
//!
//! QEMU reads whole blocks. What may still have to be corrected ([`Warps`]) is in none that a
//! replay reads, so the last block waits for the next now and then.
//!
//! A log that is cut by time is read as far as its times have come: so it is cut where it would be
//! once it is whole.

use crate::cutting::{Cutter, Every};
use crate::log::{self, Boundaries, Event, Events, HEADER_BYTES, WARP_CLOCK};
use crate::warps::Warps;
use crate::{Error, Result, Times};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Take};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The C library reads and writes a file by its blocks, or by smaller ones.
const BLOCK_BYTES: u64 = 4096;

/// It.
#[derive(Debug)]
pub struct Growing {
    file: File,
    path: PathBuf,
    block_bytes: u64,
    warps: Warps,
    /// How far it has been looked through for what to correct, and up to where nothing will be any
    /// more.
    looked: u64,
    corrected: u64,
    offset: u64,
    icount: u64,
    boundaries: Boundaries,
    cutter: Cutter,
    times: Times,
    /// Nobody writes it any more.
    has_ended: bool,
    is_complete: bool,
}

impl Growing {
    /// Opens the log at `path`, which gets the header that a replay asks for; `None` while QEMU has
    /// written nothing. Its times are at `times`, if they are kept.
    pub fn open(path: &Path, times: &Path, every: Every) -> Result<Option<Self>> {
        let file = match File::options().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("open", path)(e)),
        };
        let is = file.metadata().map_err(Error::io("look at", path))?;
        if is.len() <= HEADER_BYTES {
            return Ok(None);
        }
        log::give_header(&file, path)?;
        let (boundaries, cutter) = (Boundaries::default(), Cutter::new(every));
        Ok(Some(Self {
            file,
            path: path.to_owned(),
            block_bytes: is.blksize().max(BLOCK_BYTES),
            warps: Warps::default(),
            looked: HEADER_BYTES,
            corrected: 0,
            offset: HEADER_BYTES,
            icount: 0,
            boundaries,
            times: if cutter.is_by_time() { Times::open(times)? } else { Times::none() },
            cutter,
            has_ended: false,
            is_complete: false,
        }))
    }

    /// Nobody writes it any more: all that there is can be read.
    pub fn end(&mut self) {
        self.has_ended = true;
    }

    /// Reads what has come. True where there was anything.
    pub fn refresh(&mut self) -> Result<bool> {
        let began = self.offset;
        self.correct()?;
        while let Some((now, written)) = self.times.peek()? {
            if !self.read(written)? {
                break;
            }
            self.cutter.read_clock(self.icount, now)?;
            self.times.next_before(u64::MAX)?;
        }
        if !self.times.are_kept() || self.has_ended {
            self.read(u64::MAX)?;
        }
        Ok(self.offset > began)
    }

    /// Corrects what has come, and finds how far nothing will be.
    fn correct(&mut self) -> Result<()> {
        let len = self.file.metadata().map_err(Error::io("look at", &self.path))?.len();
        let mut events = events(&self.file, &self.path, self.looked..len, 0)?;
        while let Some(placed) = events.next_event()? {
            if let Some(correction) = self.warps.take(placed) {
                correction.write(&self.file, &self.path)?;
            }
        }
        self.looked = events.offset();
        self.corrected = if self.has_ended {
            len
        } else {
            let is_cut = self.looked < len && {
                let mut kind = [0];
                self.file
                    .read_exact_at(&mut kind, self.looked)
                    .map_err(Error::io("read", &self.path))?;
                kind == [WARP_CLOCK]
            };
            let open = self.warps.open_from().or(is_cut.then_some(self.looked)).unwrap_or(len);
            open - open % self.block_bytes
        };
        Ok(())
    }

    /// Reads the events that end at byte `until` or before. False where the file, as far as it is
    /// corrected, has not come to that yet.
    fn read(&mut self, until: u64) -> Result<bool> {
        let len = self.corrected;
        let mut events = events(&self.file, &self.path, self.offset..until.min(len), self.icount)?;
        while let Some(placed) = events.next_event()? {
            self.boundaries.take(placed);
            self.cutter.take(placed)?;
            self.is_complete |= placed.event == Event::End;
            if !self.times.are_kept()
                && let Event::HostClock(now) = placed.event
            {
                self.cutter.read_clock(placed.icount, now)?;
            }
        }
        (self.offset, self.icount) = (events.offset(), events.icount());
        Ok(len >= until || self.has_ended)
    }

    /// Instructions of what there is.
    pub fn icount(&self) -> u64 {
        self.icount
    }

    /// The last instruction that a replay may stand before as yet.
    pub fn last_standing(&self) -> u64 {
        self.boundaries.end().saturating_sub(1)
    }

    /// Where it has something, so far: an instruction that is unambiguous stays so.
    pub fn boundaries(&self) -> &Boundaries {
        &self.boundaries
    }

    /// The next instruction at which it is to be cut; none where that is not known yet.
    pub fn next_cut(&mut self) -> Option<u64> {
        self.cutter.next_cut(&self.boundaries)
    }

    /// Whether QEMU has ended it.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }
}

/// The events in the bytes `within` of the log, before which `icount` instructions ran.
fn events<'a>(
    mut file: &'a File,
    path: &Path,
    within: Range<u64>,
    icount: u64,
) -> Result<Events<Take<&'a File>>> {
    file.seek(SeekFrom::Start(within.start)).map_err(Error::io("read", path))?;
    let piece = file.take(within.end.saturating_sub(within.start));
    Ok(Events::resumed(piece, path, within.start, icount))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cutting;
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
    fn a_log_gets_its_header_once_there_is_something() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let every = Every::Instructions(10);
        let times = Path::new("/nowhere/times");
        assert!(Growing::open(Path::new("/nowhere/log"), times, every).unwrap().is_none());
        assert!(Growing::open(file.path(), times, every).unwrap().is_none());
        let mut log = events(&[(5, None), (100, None)]);
        log[..4].fill(0);
        std::fs::write(file.path(), &log).unwrap();
        let mut growing = Growing::open(file.path(), times, every).unwrap().unwrap();
        growing.block_bytes = 1;
        assert_eq!(std::fs::read(file.path()).unwrap()[..4], log::HEADER);
        assert!(growing.refresh().unwrap() && !growing.refresh().unwrap());
        assert_eq!(
            (growing.icount(), growing.last_standing(), growing.next_cut()),
            (105, 104, Some(11))
        );
        assert!(!growing.is_complete());
    }

    proptest! {
        /// However it comes, it is cut as a log that is whole, and never where a replay would run
        /// out of it.
        #[test]
        fn cuts_are_those_of_the_whole_log(
            log in prop::collection::vec((1u32..60, prop::option::of(0i64..2000)), 1..40),
            by_time in any::<bool>(),
            has_times in any::<bool>(),
            piece in 1usize..50,
        ) {
            let every =
                if by_time { Every::Time(std::time::Duration::from_nanos(100)) } else { Every::Instructions(50) };
            let mut log = events(&log);
            log.extend([28, 0, 0, 0, 0, 0, 0, 0, 0]);
            let whole = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(whole.path(), &log).unwrap();
            let boundaries = Boundaries::read(whole.path()).unwrap();
            // A piece each 30 ns, and the first with the file. The last is written, and nobody has
            // looked yet.
            let [head, rest] = [0..HEADER_BYTES as usize + 1, HEADER_BYTES as usize + 1..log.len()].map(|range| &log[range]);
            let pieces: Vec<&[u8]> = rest.chunks(piece).collect();
            let lines: Vec<String> = (0..pieces.len())
                .map(|number| format!("{} {}\n", 30 * number, head.len() + number * piece))
                .collect();
            let dir = tempfile::tempdir().unwrap();
            let times = dir.path().join("times");
            if has_times {
                std::fs::write(&times, lines.concat()).unwrap();
            }
            let expected =
                cutting::cuts(whole.path(), Times::open(&times).unwrap(), every, &boundaries).unwrap();

            let mut file = tempfile::NamedTempFile::new().unwrap();
            let mut kept = has_times.then(|| File::create(&times).unwrap());
            file.write_all(head).unwrap();
            let mut growing = Growing::open(file.path(), &times, every).unwrap().unwrap();
            growing.block_bytes = 1;
            let mut found = Vec::new();
            for number in 0..=pieces.len() {
                match pieces.get(number) {
                    Some(piece) => file.write_all(piece).unwrap(),
                    None => growing.end(),
                }
                if let (Some(kept), Some(line)) = (&mut kept, lines.get(number)) {
                    kept.write_all(line.as_bytes()).unwrap();
                }
                growing.refresh().unwrap();
                while let Some(cut) = growing.next_cut() {
                    prop_assert!(cut <= growing.last_standing());
                    found.push(cut);
                }
            }
            prop_assert_eq!(found, expected);
        }

        /// However it comes, what a replay may read of it is never corrected any more, and all of
        /// it is as the whole log's.
        #[test]
        fn no_replay_reads_what_is_still_to_be_corrected(
            letters in prop::collection::vec("[NWAhBI]|[1-9]|W 5 h 6 7|h 20 A|h 20 B A I N", 0..60),
            block_bytes in 1u64..40,
            piece in 1usize..50,
        ) {
            let log = crate::warps::tests::log(&letters.join(" "));
            let whole = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(whole.path(), &log).unwrap();
            crate::warps::correct(whole.path()).unwrap();
            let expected = std::fs::read(whole.path()).unwrap();

            let file = tempfile::NamedTempFile::new().unwrap();
            let (head, rest) = log.split_at((HEADER_BYTES as usize + 1).min(log.len()));
            let mut written = File::options().append(true).open(file.path()).unwrap();
            written.write_all(head).unwrap();
            let opened = Growing::open(file.path(), Path::new("/nowhere/times"), Every::Instructions(50)).unwrap();
            let Some(mut growing) = opened else { return Ok(()) };
            growing.block_bytes = block_bytes;
            for piece in rest.chunks(piece).map(Some).chain([None]) {
                match piece {
                    Some(piece) => written.write_all(piece).unwrap(),
                    None => growing.end(),
                }
                growing.refresh().unwrap();
                let until = growing.offset.next_multiple_of(block_bytes).min(expected.len() as u64) as usize;
                let there = std::fs::read(file.path()).unwrap();
                // Its first block is QEMU's own start.
                if growing.offset > HEADER_BYTES {
                    prop_assert!(until <= there.len());
                    prop_assert_eq!(&there[..until], &expected[..until]);
                }
            }
        }
    }
}
