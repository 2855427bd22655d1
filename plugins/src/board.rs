//! The board: memory that the plugin in QEMU and a reader in another process have in common, with
//! counters and a ring of records.
//!
//! ```text
//!   byte     0  magic, ring's records │ 64: cut │ 128: refused               written by the reader (refused: by the plugin)
//!         4096  counters, 512 of 8 bytes                                  added to by translated code
//!         8192  head │ 128: plugin sleeps │ 192: reader sleeps │ 256: tail    head by the plugin, tail by the reader
//!        12288  ring: records of 16 bytes, a power of two of them (or none)
//!
//!   ring    ..................│ written, not read │.....................
//!                            tail                head      both count records and never wrap; place = number % records
//! ```
//!
//! Invariants:
//! 1. `tail <= head <= tail + records`. What lies in between belongs to the reader, the rest to the plugin.
//! 2. `head` is published with each record, so that a reader that looks while the VM stands still sees exactly what the
//!    guest did until then.
//! 3. Neither side trusts the other: a head beyond the ring is an error to the reader ([`Torn`]), and all places are taken
//!    modulo the ring.
//! 4. All waits are bounded: a sleep by [`NAP`], the plugin's patience with a reader that takes nothing by [`PATIENCE`].
//!
//! Left out: what a record means.

use crate::map::Map;
use std::fs::File;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The first eight bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"kfboard2");
/// Counters that translated code can add to.
pub const COUNTERS: usize = 512;
/// Counters of one thing: instructions of a block take turns with them, and the thing's number is
/// their sum. With one alone each instruction would wait for the addition of the one before.
pub const LANES: usize = 4;
/// Words of 8 bytes in a record.
pub const RECORD_WORDS: usize = 2;
/// Most records that a ring can have.
pub const RECORDS_MAX: u64 = 1 << 24;
/// Where the page of counters begins.
pub const COUNTERS_OFFSET_BYTES: usize = 4096;
/// A sleep ends after this, woken or not.
pub const NAP: Duration = Duration::from_millis(50);
/// How long the plugin waits for a reader that takes nothing.
pub const PATIENCE: Duration = Duration::from_secs(60);

const PAGE_WORDS: usize = 512;
const RING_WORD: usize = 3 * PAGE_WORDS;
const RING_RECORDS: usize = 1;
const CUT: usize = 8;
const REFUSED: usize = 16;
const HEAD: usize = 2 * PAGE_WORDS;
const PLUGIN_SLEEPS: usize = HEAD + 16;
const READER_SLEEPS: usize = HEAD + 24;
const TAIL: usize = HEAD + 32;

/// One record: two words.
pub type Record = [u64; RECORD_WORDS];

/// The mapped board, of either side.
pub struct Board {
    map: Map,
    records: u64,
}

/// What the other side wrote cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Torn {
    /// Too short, another magic, or a ring that is no power of two or does not fit the file.
    Header,
    /// More records between tail and head than the ring holds.
    Head {
        /// As it was read.
        head: u64,
        /// As the reader left it.
        tail: u64,
    },
}

impl Board {
    /// Bytes that a board with so many records takes.
    pub const fn len_bytes(records: u64) -> u64 {
        ((RING_WORD + RECORD_WORDS * records as usize) * 8) as u64
    }

    /// Makes a board of an empty `file`, with a ring of `records` (0 or a power of two).
    pub fn create(file: &File, records: u64) -> std::io::Result<Self> {
        assert!(
            records == 0 || (records.is_power_of_two() && records <= RECORDS_MAX),
            "a ring of {records}"
        );
        let len = Self::len_bytes(records);
        file.set_len(len)?;
        let board = Self { map: Map::shared(file, len as usize, true)?, records };
        board.word(RING_RECORDS).store(records, Ordering::Relaxed);
        board.word(0).store(MAGIC, Ordering::Release);
        Ok(board)
    }

    /// Maps the board that `file` is.
    pub fn open(file: &File) -> std::io::Result<Result<Self, Torn>> {
        let len = file.metadata()?.len();
        if len < Self::len_bytes(0) || len > Self::len_bytes(RECORDS_MAX) {
            return Ok(Err(Torn::Header));
        }
        let map = Map::shared(file, len as usize, true)?;
        let records = map.words()[RING_RECORDS].load(Ordering::Relaxed);
        let fits = records == 0 || (records.is_power_of_two() && records <= RECORDS_MAX);
        if map.words()[0].load(Ordering::Acquire) != MAGIC
            || !fits
            || Self::len_bytes(records) != len
        {
            return Ok(Err(Torn::Header));
        }
        Ok(Ok(Self { map, records }))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.map.words()[index]
    }

    /// A flag that a thread can sleep on.
    fn flag(&self, index: usize) -> &AtomicU32 {
        self.map.half(index)
    }

    /// A counter.
    pub fn counter(&self, index: usize) -> &AtomicU64 {
        assert!(index < COUNTERS, "counter {index}");
        self.word(COUNTERS_OFFSET_BYTES / 8 + index)
    }

    /// The sum of a thing's counters, of the `number`th thing.
    pub fn counted(&self, number: usize) -> u64 {
        let lanes =
            (0..LANES).map(|lane| self.counter(number * LANES + lane).load(Ordering::Acquire));
        lanes.fold(0, u64::wrapping_add)
    }

    /// The counters of the first thing, for a callback that sums them up at each event.
    pub fn lanes(&'static self) -> &'static [AtomicU64; LANES] {
        let counters = &self.map.words()[COUNTERS_OFFSET_BYTES / 8..];
        counters.first_chunk().expect("a board has a page of counters")
    }

    /// How many cuts have been made.
    pub fn cuts(&self) -> u64 {
        self.word(CUT).load(Ordering::Acquire)
    }

    /// The word itself, for a callback that looks at each event.
    pub fn cuts_word(&'static self) -> &'static AtomicU64 {
        self.word(CUT)
    }

    /// Makes a cut. The VM stands still.
    pub fn cut(&self) {
        self.word(CUT).fetch_add(1, Ordering::AcqRel);
    }

    /// The plugin gave up; it has told why on its standard error.
    pub fn refuse(&self) {
        self.word(REFUSED).store(1, Ordering::Release);
    }

    /// Whether it gave up.
    pub fn refused(&self) -> bool {
        self.word(REFUSED).load(Ordering::Acquire) != 0
    }

    /// Records in the ring.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Records written so far.
    pub fn head(&self) -> u64 {
        self.word(HEAD).load(Ordering::Acquire)
    }

    /// Records read so far.
    pub fn tail(&self) -> u64 {
        self.word(TAIL).load(Ordering::Acquire)
    }

    /// Where the counters are in this process, for the plugin to have them added to.
    pub(crate) fn map(&self) -> &Map {
        &self.map
    }

    /// Hands the records from the tail up to `head` to `take`, a few thousand at most; returns how
    /// many. The reader's side.
    pub fn read(&self, head: u64, mut take: impl FnMut(Record)) -> Result<u64, Torn> {
        let tail = self.word(TAIL).load(Ordering::Relaxed);
        let ready = head.wrapping_sub(tail);
        if ready > self.records || head < tail {
            return Err(Torn::Head { head, tail });
        }
        let ready = ready.min(self.records.div_ceil(4).min(1 << 13));
        let ring = &self.map.words()[RING_WORD..];
        for number in tail..tail + ready {
            let at = (number & (self.records - 1)) as usize * RECORD_WORDS;
            let words = &ring[at..at + RECORD_WORDS];
            take(std::array::from_fn(|word| words[word].load(Ordering::Relaxed)));
        }
        self.word(TAIL).store(tail + ready, Ordering::Release);
        wake(self.flag(PLUGIN_SLEEPS));
        Ok(ready)
    }

    /// A good part of the ring: so often the two sides look at each other.
    fn quarter(&self) -> u64 {
        (self.records / 4).max(1)
    }

    /// Whether a good part of the ring is full. A reader close behind the plugin would take from
    /// its cache, again and again, the lines that it is writing. The reader's side.
    pub fn is_worth_reading(&self) -> bool {
        // Where the head is torn, a cut tells.
        (self.quarter()..=self.records).contains(&self.head().wrapping_sub(self.tail()))
    }

    /// Sleeps until a good part of the ring is full, or for [`NAP`]. The reader's side.
    pub fn sleep(&self) {
        let flag = self.flag(READER_SLEEPS);
        flag.store(1, Ordering::SeqCst);
        if !self.is_worth_reading() {
            self.map.sleep(READER_SLEEPS, NAP);
        }
        flag.store(0, Ordering::SeqCst);
    }

    /// Ends the reader's sleep.
    pub fn wake_reader(&self) {
        wake(self.flag(READER_SLEEPS));
    }
}

/// Wakes who sleeps on `flag`, if it says that someone does.
fn wake(flag: &AtomicU32) {
    if flag.load(Ordering::SeqCst) == 1 {
        flag.store(0, Ordering::SeqCst);
        Map::wake(flag);
    }
}

/// The writing end, in the plugin. What each record needs is in here itself: a record takes a few
/// nanoseconds, and each pointer on the way to a word would be one of them.
pub struct Writer {
    board: &'static Board,
    ring: &'static [[AtomicU64; RECORD_WORDS]],
    published: &'static AtomicU64,
    /// The ring's records less one.
    mask: u64,
    head: u64,
    /// Where it next has to look at the reader.
    mark: u64,
}

/// The reader took nothing for [`PATIENCE`].
#[derive(Debug, PartialEq, Eq)]
pub struct NoReader;

impl Writer {
    /// Of a board with a ring.
    pub fn new(board: &'static Board) -> Self {
        let head = board.head();
        let (ring, _) = board.map.words().get(RING_WORD..).unwrap_or_default().as_chunks();
        let mask = board.records.saturating_sub(1);
        Self { mark: head, head, mask, board, ring, published: board.word(HEAD) }
    }

    /// The board.
    pub fn board(&self) -> &'static Board {
        self.board
    }

    /// Appends a record; waits where the ring is full.
    #[inline]
    pub fn push(&mut self, record: Record) -> Result<(), NoReader> {
        if !self.push_below_mark(record) {
            self.pass_mark()?;
            self.push_below_mark(record);
        }
        Ok(())
    }

    /// Appends a record, unless the reader has to be looked at first.
    #[inline]
    pub fn push_below_mark(&mut self, record: Record) -> bool {
        if self.head == self.mark {
            return false;
        }
        // SAFETY: the mask is one less than the ring's records, a power of two, and the mark is the
        // head of a board without any.
        let words = unsafe { self.ring.get_unchecked((self.head & self.mask) as usize) };
        for (word, value) in words.iter().zip(record) {
            word.store(value, Ordering::Relaxed);
        }
        self.head += 1;
        self.published.store(self.head, Ordering::Release);
        true
    }

    /// A quarter of the ring is written: wakes the reader, waits for room, sets the next mark.
    #[cold]
    fn pass_mark(&mut self) -> Result<(), NoReader> {
        self.board.wake_reader();
        let quarter = self.board.quarter();
        let mut patience = Instant::now() + PATIENCE;
        let mut seen = self.board.tail();
        while self.head + quarter > seen + self.board.records {
            let flag = self.board.flag(PLUGIN_SLEEPS);
            flag.store(1, Ordering::SeqCst);
            if self.board.tail() == seen {
                self.board.wake_reader();
                self.board.map.sleep(PLUGIN_SLEEPS, NAP);
            }
            flag.store(0, Ordering::SeqCst);
            let tail = self.board.tail();
            if tail != seen {
                (seen, patience) = (tail, Instant::now() + PATIENCE);
            } else if Instant::now() > patience {
                return Err(NoReader);
            }
        }
        self.mark = self.head + quarter;
        Ok(())
    }
}
