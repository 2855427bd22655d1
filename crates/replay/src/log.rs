//! QEMU's record/replay log, as 7.2 and 10.0 write it.
//!
//! ```text
//!   header 12 bytes: version e0200c (big-endian, 4) | 8 unused; zero until QEMU ends in good order
//!   events: kind (1) | what the kind has
//!     0        instructions: count (4, big-endian)      1, 2     interrupt, exception
//!     3..9     asynchronous: bottom half, bottom half once, input, input end, console input, block, network
//!     10..21   shutdown, by cause                        22       console output: result, offset (4 + 4)
//!     23..26   more console and audio                    27       random bytes: result, length (4 + 4), bytes
//!     28, 29   clock: value (8)                          30..38   checkpoint of the log's own
//!     39       end
//! ```
//!
//! The file is from outside: lengths are bounded before they are read.

use crate::{Error, Result};
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::Path;

/// What a complete log begins with.
pub const HEADER: [u8; 4] = [0x00, 0xe0, 0x20, 0x0c];
/// Where its events begin.
pub const HEADER_BYTES: u64 = 12;
/// The kinds of what has the processor leave its way: an interrupt, an exception.
const DELIVERIES: std::ops::RangeInclusive<u8> = 1..=2;
/// The kind of a disk's answer.
const BLOCK: u8 = 8;
/// The kind of a reading of the clock by which a halted guest's own jumps.
pub(crate) const WARP_CLOCK: u8 = 29;
/// The log's own checkpoint at which QEMU resets the machine that is to be.
const RESET: u8 = 2;
/// No packet and no input is longer.
const DATA_BYTES_MAX: u32 = 16 << 20;

/// An event, as far as anybody needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// So many instructions ran.
    Instructions(u32),
    /// So many bytes of a console's output were taken, as the answer says; negative in an error.
    ConsoleOutput(i32),
    /// The guest read the host's clock, in nanoseconds.
    HostClock(i64),
    /// The clock was read by which a halted guest's own jumps, in nanoseconds.
    WarpClock(i64),
    /// The machine was shut down or reset, for this cause.
    Shutdown(u8),
    /// A checkpoint of the log's own: its number.
    Checkpoint(u8),
    /// A device's bottom half ran that had been scheduled at this instruction.
    BottomHalf(u64),
    /// The log ends.
    End,
    /// Any other.
    Other(u8),
}

/// An event and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The event.
    pub event: Event,
    /// Where it begins in the file.
    pub offset: u64,
    /// Instructions that ran before it; of [`Event::Instructions`], with its own.
    pub icount: u64,
}

/// Reads a log event by event. It may still be growing: what is cut at its end is not given, and
/// can be read again later from [`Events::offset`] on.
pub struct Events<R> {
    input: BufReader<R>,
    path: std::path::PathBuf,
    offset: u64,
    icount: u64,
    ended: bool,
}

impl<R: Read> Events<R> {
    /// From the first event on; `input` stands behind the header. `path` is for errors.
    pub fn new(input: R, path: &Path) -> Self {
        Self::resumed(input, path, HEADER_BYTES, 0)
    }

    /// From `offset` on, before which `icount` instructions ran; `input` stands there.
    pub fn resumed(input: R, path: &Path, offset: u64, icount: u64) -> Self {
        Self {
            input: BufReader::with_capacity(1 << 16, input),
            path: path.into(),
            offset,
            icount,
            ended: false,
        }
    }

    /// Behind the last event that was given.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Instructions up to there.
    pub fn icount(&self) -> u64 {
        self.icount
    }

    /// The next event; none where the file ends, also within an event.
    ///
    /// Errors: [`Error::Damaged`] for what no QEMU writes.
    pub fn next_event(&mut self) -> Result<Option<Placed>> {
        if self.ended {
            return Ok(None);
        }
        let begins = self.offset;
        let mut len = 0;
        let read = self.event(&mut len);
        match read {
            Ok(event) => {
                if let Event::Instructions(count) = event {
                    self.icount = self.icount.saturating_add(u64::from(count));
                }
                self.ended = event == Event::End;
                self.offset += len;
                Ok(Some(Placed { event, offset: begins, icount: self.icount }))
            }
            Err(Stop::Short) => {
                self.ended = true;
                Ok(None)
            }
            Err(Stop::Io(source)) => {
                Err(Error::Io { operation: "read", path: self.path.clone(), source })
            }
            Err(Stop::Unknown(problem)) => {
                Err(Error::Damaged { path: self.path.clone(), offset: begins, problem })
            }
        }
    }

    fn event(&mut self, len: &mut u64) -> std::result::Result<Event, Stop> {
        let kind = self.bytes::<1>(len)?[0];
        Ok(match kind {
            0 => Event::Instructions(u32::from_be_bytes(self.bytes(len)?)),
            10..=21 => Event::Shutdown(kind - 10),
            22 => {
                let result = i32::from_be_bytes(self.bytes(len)?);
                self.bytes::<4>(len)?;
                Event::ConsoleOutput(result)
            }
            3 => Event::BottomHalf(u64::from_be_bytes(self.bytes(len)?)),
            28 => Event::HostClock(i64::from_be_bytes(self.bytes(len)?)),
            WARP_CLOCK => Event::WarpClock(i64::from_be_bytes(self.bytes(len)?)),
            30..=38 => Event::Checkpoint(kind - 30),
            39 => Event::End,
            _ => {
                self.skip_other(kind, len)?;
                Event::Other(kind)
            }
        })
    }

    /// What an event has that nobody needs.
    fn skip_other(&mut self, kind: u8, len: &mut u64) -> std::result::Result<(), Stop> {
        match kind {
            1 | 2 | 6 => Ok(()),
            // Bottom halves that run once and block requests have a number.
            4 | 8 => self.bytes::<8>(len).map(drop),
            5 => self.input_event(len),
            // The console; the network.
            7 => self.bytes::<1>(len).and_then(|_| self.data(len)),
            9 => self.bytes::<5>(len).and_then(|_| self.data(len)),
            23 => self.data(len),
            24 | 25 => self.bytes::<4>(len).map(drop),
            26 => Err(Stop::Unknown(
                "sound that was recorded, whose length the log does not tell".into(),
            )),
            27 => self.bytes::<4>(len).and_then(|_| self.data(len)),
            _ => Err(Stop::Unknown(format!("an event of unknown kind {kind}"))),
        }
    }

    /// A key or a pointer's movement.
    fn input_event(&mut self, len: &mut u64) -> std::result::Result<(), Stop> {
        match u32::from_be_bytes(self.bytes(len)?) {
            // A key, by its number or by its name, and whether it is down.
            0 => match u32::from_be_bytes(self.bytes(len)?) {
                0 => drop(self.bytes::<9>(len)?),
                _ => drop(self.bytes::<5>(len)?),
            },
            // A button.
            1 => {
                self.bytes::<5>(len)?;
            }
            // A pointer's axis and its value.
            2 | 3 => {
                self.bytes::<12>(len)?;
            }
            other => return Err(Stop::Unknown(format!("an input event of unknown kind {other}"))),
        }
        Ok(())
    }

    /// A length, and so many bytes.
    fn data(&mut self, len: &mut u64) -> std::result::Result<(), Stop> {
        let data_len = u32::from_be_bytes(self.bytes(len)?);
        if data_len > DATA_BYTES_MAX {
            return Err(Stop::Unknown(format!("{data_len} bytes at once")));
        }
        self.skip(u64::from(data_len), len)
    }

    fn skip(&mut self, count: u64, len: &mut u64) -> std::result::Result<(), Stop> {
        let mut left = count;
        while left > 0 {
            let here = self.input.fill_buf().map_err(Stop::Io)?.len() as u64;
            if here == 0 {
                return Err(Stop::Short);
            }
            let step = here.min(left);
            self.input.consume(step as usize);
            left -= step;
        }
        *len += count;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, len: &mut u64) -> std::result::Result<[u8; N], Stop> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Stop::Short,
            _ => Stop::Io(e),
        })?;
        *len += N as u64;
        Ok(bytes)
    }
}

enum Stop {
    /// The file ends within the event.
    Short,
    Io(std::io::Error),
    Unknown(String),
}

/// Where the machine was asked to shut down for good. QEMU does so some time later, and a replay at
/// another instruction than the recording: what the guest ran in between is in the log, but no
/// replay is sure to come to it. A reset has a checkpoint of the log's own instead, at which a
/// replay waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shutdown(Option<u64>);

impl Shutdown {
    fn take(&mut self, placed: Placed) {
        match placed.event {
            Event::Shutdown(_) => drop(self.0.get_or_insert(placed.icount)),
            Event::Checkpoint(RESET) => self.0 = None,
            _ => {}
        }
    }

    /// The last instruction that a replay is sure to come to, of a log with so many.
    fn end(self, instructions: u64) -> u64 {
        self.0.map_or(instructions, |at| at.min(instructions))
    }
}

/// What a log holds, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Instructions up to where the machine was shut down, or else to its end.
    pub instructions: u64,
    /// Events.
    pub events: u64,
    /// Bytes up to behind the last whole event.
    pub bytes: u64,
    /// QEMU ended it.
    pub is_complete: bool,
}

/// Reads the whole log in the file at `path`.
pub fn summary(path: &Path) -> Result<Summary> {
    let mut events = open(path)?;
    let (mut summary, mut shutdown) = (Summary::default(), Shutdown::default());
    while let Some(placed) = events.next_event()? {
        summary.events += 1;
        summary.is_complete |= placed.event == Event::End;
        shutdown.take(placed);
    }
    (summary.instructions, summary.bytes) = (shutdown.end(events.icount()), events.offset());
    Ok(summary)
}

/// The instructions at which something happened besides: between two of them a VM's state at an
/// instruction is one and no other. At one of them there are several, before and behind each event.
#[derive(Clone, Debug, Default)]
pub struct Boundaries {
    all: Vec<u64>,
    /// Those at which a disk answered.
    answers: Vec<u64>,
    /// See [`Boundaries::holds`].
    holds: Vec<u64>,
    /// The last bottom half at this instruction.
    last_half: Option<u64>,
    /// The last instruction up to the end at which an interrupt or an exception was delivered.
    last_delivery: Option<u64>,
    shutdown: Shutdown,
}

impl Boundaries {
    /// Those of the log in the file at `path`.
    pub fn read(path: &Path) -> Result<Self> {
        let mut events = open(path)?;
        let mut boundaries = Self::default();
        while let Some(placed) = events.next_event()? {
            boundaries.take(placed);
        }
        Ok(boundaries)
    }

    /// Takes the log's next event.
    pub fn take(&mut self, placed: Placed) {
        self.shutdown.take(placed);
        let of = match placed.event {
            Event::Instructions(_) => {
                self.last_half = None;
                &mut self.all
            }
            Event::Other(BLOCK) => &mut self.answers,
            Event::Other(kind) if DELIVERIES.contains(&kind) => {
                if self.shutdown.0.is_none_or(|end| end == placed.icount) {
                    self.last_delivery = Some(placed.icount);
                }
                return;
            }
            Event::BottomHalf(at) if self.last_half == Some(at) => &mut self.holds,
            Event::BottomHalf(at) => {
                self.last_half = Some(at);
                return;
            }
            _ => return,
        };
        if of.last() != Some(&placed.icount) {
            of.push(placed.icount);
        }
    }

    /// The last instruction that a replay is sure to come to: the log's last, or the one before
    /// which the machine was asked to shut down.
    pub fn end(&self) -> u64 {
        self.shutdown.end(self.all.last().copied().unwrap_or(0))
    }

    /// Whether it ends as the machine was asked to shut down. A replay whose guest had QEMU end
    /// there and then ends with its log.
    pub fn end_with_shutdown(&self) -> bool {
        self.shutdown.0.is_some()
    }

    /// The instructions at which the recorded VM stood while a network card was about to send. When
    /// a VM goes on, such a card schedules the bottom half that sends once more, so that the log
    /// has it twice; a replay gets by only if it stands there too.
    pub fn holds(&self) -> &[u64] {
        &self.holds
    }

    /// Whether the guest's own state at the end is one of two, before and behind an interrupt. The
    /// log always has something there.
    pub fn end_is_ambiguous(&self) -> bool {
        self.last_delivery == Some(self.end())
    }

    /// Whether a VM has one state only at instruction `icount`.
    pub fn is_unambiguous(&self, icount: u64) -> bool {
        self.all.binary_search(&icount).is_err()
    }

    /// How many there are in `range`.
    pub fn count(&self, range: Range<u64>) -> u64 {
        let before = |icount| self.all.partition_point(|boundary| *boundary < icount);
        before(range.end).saturating_sub(before(range.start)) as u64
    }

    /// The last instruction up to `icount` at which a VM has one state only.
    pub fn last_unambiguous(&self, icount: u64) -> u64 {
        let upto = self.all.partition_point(|boundary| *boundary <= icount);
        let mut candidate = icount;
        for boundary in self.all[..upto].iter().rev() {
            if *boundary != candidate {
                break;
            }
            candidate = candidate.saturating_sub(1);
        }
        candidate
    }

    /// The first instruction behind `icount` at which a VM has one state only; none where a replay
    /// is not sure to come to one.
    pub fn next_unambiguous(&self, icount: u64) -> Option<u64> {
        let first = icount.checked_add(1)?;
        let from = self.all.partition_point(|boundary| *boundary < first);
        // They are rising: as long as each is the candidate itself, the next instruction is the
        // next candidate.
        (first..)
            .zip(self.all.get(from..)?)
            .find(|(candidate, boundary)| *boundary > candidate)
            .map(|(candidate, _)| candidate)
            .filter(|candidate| *candidate < self.end())
    }

    /// The same behind the next answer of a disk.
    pub fn next_behind_answer(&self, icount: u64) -> Option<u64> {
        let next = self.answers.partition_point(|answer| *answer < icount);
        self.next_unambiguous(*self.answers.get(next)?)
    }
}

/// The events of the log in the file at `path`.
pub fn open(path: &Path) -> Result<Events<std::fs::File>> {
    let mut file = std::fs::File::open(path).map_err(Error::io("open", path))?;
    let mut header = [0; HEADER_BYTES as usize];
    file.read_exact(&mut header).map_err(Error::io("read the header of", path))?;
    Ok(Events::new(file, path))
}

/// Gives a log whose QEMU did not end in good order the header without which no QEMU reads it, and
/// cuts what is not whole of its last event. True where it lacked it.
pub fn mend(path: &Path) -> Result<bool> {
    let whole = summary(path)?;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(Error::io("open", path))?;
    let lacks = give_header(&file, path)?;
    let len = file.metadata().map_err(Error::io("look at", path))?.len();
    if len > whole.bytes && !whole.is_complete {
        file.set_len(whole.bytes).map_err(Error::io("cut", path))?;
    }
    Ok(lacks)
}

/// Writes the header into a log that has none yet; QEMU does so only when it ends. True where there
/// was none.
pub(crate) fn give_header(file: &std::fs::File, path: &Path) -> Result<bool> {
    use std::os::unix::fs::FileExt;
    let mut header = [0; 4];
    file.read_exact_at(&mut header, 0).map_err(Error::io("read the header of", path))?;
    if header == HEADER {
        return Ok(false);
    }
    if header != [0; 4] {
        let problem = "this is no log of a QEMU known here".into();
        return Err(Error::Damaged { path: path.into(), offset: 0, problem });
    }
    file.write_all_at(&HEADER, 0).map_err(Error::io("write the header of", path))?;
    Ok(true)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The bytes of a log.
    pub fn bytes(events: &[&[u8]]) -> Vec<u8> {
        let mut all = HEADER.to_vec();
        all.extend([0; 8]);
        all.extend(events.concat());
        all
    }

    fn instructions(count: u32) -> Vec<u8> {
        [&[0], &count.to_be_bytes()[..]].concat()
    }

    fn read(bytes: &[u8]) -> Result<(Vec<Placed>, u64)> {
        let mut events = Events::new(&bytes[HEADER_BYTES as usize..], Path::new("log"));
        let mut all = Vec::new();
        while let Some(event) = events.next_event()? {
            all.push(event);
        }
        Ok((all, events.offset()))
    }

    #[test]
    fn instructions_are_added_up_over_all_kinds() {
        let packet = [&[9, 1, 0, 0, 0, 0, 0, 0, 0, 3][..], b"abc"].concat();
        let log = bytes(&[&instructions(5), &[1], &packet, &instructions(7), &[30], &[39]]);
        let (all, end) = read(&log).unwrap();
        assert_eq!(all.iter().map(|p| p.icount).collect::<Vec<_>>(), [5, 5, 5, 12, 12, 12]);
        assert_eq!(all[3].event, Event::Instructions(7));
        assert_eq!((all[4].event, all[5].event), (Event::Checkpoint(0), Event::End));
        assert_eq!(end, log.len() as u64);
    }

    #[test]
    fn what_is_cut_is_not_given_and_where_it_goes_on_is_known() {
        let log = bytes(&[&instructions(5), &instructions(9)]);
        for cut in 1..=4 {
            let (all, end) = read(&log[..log.len() - cut]).unwrap();
            assert_eq!((all.len(), end), (1, HEADER_BYTES + 5));
        }
        let mut rest = Events::resumed(&log[17..], Path::new("log"), 17, 5);
        assert_eq!(rest.next_event().unwrap().unwrap().icount, 14);
    }

    #[test]
    fn between_two_events_a_state_is_one() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            bytes(&[&instructions(5), &[1], &instructions(1), &[2], &instructions(7)]),
        )
        .unwrap();
        let boundaries = Boundaries::read(file.path()).unwrap();
        let next: Vec<_> =
            [0, 4, 5, 6, 11, 12, 13].iter().map(|n| boundaries.next_unambiguous(*n)).collect();
        assert_eq!(next, [Some(1), Some(7), Some(7), Some(7), Some(12), None, None]);
        assert!(
            next.iter().flatten().all(|n| boundaries.is_unambiguous(*n))
                && !boundaries.is_unambiguous(6)
        );
    }

    /// QEMU ends some time after it was asked to, and a replay elsewhere than the recording.
    #[test]
    fn what_ran_behind_a_shutdown_is_none_of_the_recording() {
        let ends = |log: &[&[u8]]| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes(log)).unwrap();
            let boundaries = Boundaries::read(file.path()).unwrap();
            let summary = summary(file.path()).unwrap();
            assert_eq!(summary.instructions, boundaries.end());
            let last = (0..40).filter_map(|n| boundaries.next_unambiguous(n)).max();
            (boundaries.end(), boundaries.end_with_shutdown(), last, summary.is_complete)
        };
        let (five, nine) = (instructions(5), instructions(9));
        assert_eq!(ends(&[&five, &nine, &[39]]), (14, false, Some(13), true));
        assert_eq!(ends(&[&five, &[16], &nine, &[14], &[39]]), (5, true, Some(4), true));
        assert_eq!(ends(&[&five, &[16], &nine]), (5, true, Some(4), false));
        // A reset is waited for; what shut it down then is another.
        assert_eq!(ends(&[&five, &[17], &nine, &[32], &five, &[39]]), (19, false, Some(18), true));
        assert_eq!(
            ends(&[&five, &[17], &nine, &[32], &five, &[12], &nine, &[39]]),
            (19, true, Some(18), true)
        );
    }

    #[test]
    fn an_interrupt_at_the_end_is_told() {
        let is_ambiguous = |log: &[&[u8]]| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes(log)).unwrap();
            Boundaries::read(file.path()).unwrap().end_is_ambiguous()
        };
        let five = instructions(5);
        let shutdown: &[u8] = &[10];
        assert!(is_ambiguous(&[&five, &[1], shutdown, &five, &[39]]));
        assert!(is_ambiguous(&[&five, shutdown, &[2], &five, &[1], &[39]]));
        assert!(!is_ambiguous(&[&five, &[1], &five, shutdown, &five, &[1], &[39]]));
        assert!(!is_ambiguous(&[&five, shutdown, &[39]]));
    }

    #[test]
    fn a_bottom_half_that_was_scheduled_twice_is_a_hold() {
        let half = |at: u64| [&[3][..], &at.to_be_bytes()].concat();
        let packet = [&[9, 1, 0, 0, 0, 0, 0, 0, 0, 3][..], b"abc"].concat();
        let file = tempfile::NamedTempFile::new().unwrap();
        // Once, and by another device; twice with packets between; again at a later instruction.
        let log = [
            instructions(5),
            half(5),
            half(4),
            instructions(5),
            half(10),
            packet,
            half(10),
            instructions(5),
            half(10),
        ];
        std::fs::write(file.path(), bytes(&log.iter().map(Vec::as_slice).collect::<Vec<_>>()))
            .unwrap();
        assert_eq!(Boundaries::read(file.path()).unwrap().holds(), [10]);
    }

    #[test]
    fn a_log_without_its_end_is_mended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut log = bytes(&[&instructions(5), &[0, 1]]);
        log[..4].fill(0);
        std::fs::write(file.path(), &log).unwrap();
        assert!(mend(file.path()).unwrap());
        let mended = std::fs::read(file.path()).unwrap();
        assert_eq!((&mended[..4], mended.len()), (&HEADER[..], 17));
        assert!(!mend(file.path()).unwrap(), "there is nothing more to do");
        std::fs::write(file.path(), b"something else").unwrap();
        assert!(mend(file.path()).is_err());
    }

    proptest! {
        /// Whatever is in the file is read or refused, in bounded memory.
        #[test]
        fn no_log_panics(log in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut events = Events::new(&log[..], Path::new("log"));
            while let Ok(Some(_)) = events.next_event() {}
            prop_assert!(events.offset() <= HEADER_BYTES + log.len() as u64);
        }
    }
}
