//! The board: memory that the plugin in QEMU shares with a reader in another process, with counters
//! and a ring of records.
//!
//! ```text
//!   byte     0  magic, ring's records │ 64: cut │ 128: refused │ 192: exact   by the reader (refused, exact: by the plugin)
//!         4096  counters, 512 of 8 bytes                                    by translated code
//!         8192  head │ 128: plugin sleeps │ 192: reader sleeps │ 256: tail  head by the plugin, tail by the reader
//!        12288  ring: records of 16 bytes, a power of two of them (or none)
//!
//!   ring    ..................│ written, not read │.....................
//!                            tail                head      both count records and never wrap; position = number % records
//! ```
//!
//! Invariants:
//! 1. `tail <= head <= tail + records`. The records in between belong to the reader, the others to
//!    the plugin.
//! 2. `head` is published with each record. A reader that looks while the VM is stopped sees exactly
//!    the guest's execution so far.
//! 3. Neither side trusts the other: a head beyond the ring is an error for the reader
//!    ([`BoardError`]), and all positions are taken modulo the ring.
//! 4. Every wait is bounded: a sleep by [`NAP`], the plugin's wait for the reader by [`PATIENCE`].
//!
//! Not here: the meaning of records.

use crate::shared_map::SharedMap;
use std::fs::File;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The first eight bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"kfboard2");
/// The number of counters that translated code can increment.
pub const COUNTERS: usize = 512;
/// The number of counters for one quantity, which is their sum. Neighbouring instructions use
/// different ones, so that no addition waits for the previous one.
pub const LANES: usize = 4;
/// Words of 8 bytes in a record.
pub const RECORD_WORDS: usize = 2;
/// The most records of a ring.
pub const RECORDS_MAX: u64 = 1 << 24;
/// The offset of the page of counters.
pub const COUNTERS_OFFSET_BYTES: usize = 4096;
/// The longest sleep of either side.
pub const NAP: Duration = Duration::from_millis(50);
/// The longest time for which the plugin waits for a reader.
pub const PATIENCE: Duration = Duration::from_secs(60);

const PAGE_WORDS: usize = 512;
const RING_WORD: usize = 3 * PAGE_WORDS;
const RING_RECORDS: usize = 1;
const CUT: usize = 8;
const REFUSED: usize = 16;
const EXACT: usize = 24;
const HEAD: usize = 2 * PAGE_WORDS;
const PLUGIN_SLEEPS: usize = HEAD + 16;
const READER_SLEEPS: usize = HEAD + 24;
const TAIL: usize = HEAD + 32;

/// A record: two words.
pub type Record = [u64; RECORD_WORDS];

/// A mapped board, on either side.
pub struct Board {
    map: SharedMap,
    records: u64,
}

/// The board is invalid: the other side wrote something impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoardError {
    /// Too short, another magic, or a ring whose size is not a power of two or not the file's.
    Header,
    /// More records between tail and head than the ring holds.
    Head {
        /// The head as read.
        head: u64,
        /// The tail as the reader left it.
        tail: u64,
    },
}

impl Board {
    /// The size of a board with a ring of `records` records, in bytes.
    pub const fn len_bytes(records: u64) -> u64 {
        ((RING_WORD + RECORD_WORDS * records as usize) * 8) as u64
    }

    /// Creates a board in the empty file `file`, with a ring of `records` records (0 or a power of
    /// two).
    pub fn create(file: &File, records: u64) -> std::io::Result<Self> {
        assert!(
            records == 0 || (records.is_power_of_two() && records <= RECORDS_MAX),
            "a ring of {records}"
        );
        let len = Self::len_bytes(records);
        file.set_len(len)?;
        let board = Self { map: SharedMap::shared(file, len as usize, true)?, records };
        board.word(RING_RECORDS).store(records, Ordering::Relaxed);
        board.word(0).store(MAGIC, Ordering::Release);
        Ok(board)
    }

    /// Maps the board in `file`.
    pub fn open(file: &File) -> std::io::Result<Result<Self, BoardError>> {
        let len = file.metadata()?.len();
        if len < Self::len_bytes(0) || len > Self::len_bytes(RECORDS_MAX) {
            return Ok(Err(BoardError::Header));
        }
        let map = SharedMap::shared(file, len as usize, true)?;
        let records = map.words()[RING_RECORDS].load(Ordering::Relaxed);
        let fits = records == 0 || (records.is_power_of_two() && records <= RECORDS_MAX);
        if map.words()[0].load(Ordering::Acquire) != MAGIC
            || !fits
            || Self::len_bytes(records) != len
        {
            return Ok(Err(BoardError::Header));
        }
        Ok(Ok(Self { map, records }))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.map.words()[index]
    }

    /// A flag on which a thread can sleep.
    fn flag(&self, index: usize) -> &AtomicU32 {
        self.map.half(index)
    }

    /// The counter `index`.
    pub fn counter(&self, index: usize) -> &AtomicU64 {
        assert!(index < COUNTERS, "counter {index}");
        self.word(COUNTERS_OFFSET_BYTES / 8 + index)
    }

    /// The value of quantity `number`: the sum of its counters.
    pub fn counted(&self, number: usize) -> u64 {
        let lanes =
            (0..LANES).map(|lane| self.counter(number * LANES + lane).load(Ordering::Acquire));
        lanes.fold(0, u64::wrapping_add)
    }

    /// The counters of the first quantity, for a callback that sums them at each event.
    pub fn lanes(&'static self) -> &'static [AtomicU64; LANES] {
        let counters = &self.map.words()[COUNTERS_OFFSET_BYTES / 8..];
        counters.first_chunk().expect("a board has a page of counters")
    }

    /// The number of cuts.
    pub fn cuts(&self) -> u64 {
        self.word(CUT).load(Ordering::Acquire)
    }

    /// The word with the number of cuts, for a callback that reads it at each event.
    pub fn cuts_word(&'static self) -> &'static AtomicU64 {
        self.word(CUT)
    }

    /// Makes a cut. The VM must be stopped.
    pub fn cut(&self) {
        self.word(CUT).fetch_add(1, Ordering::AcqRel);
    }

    /// Tells the reader that the plugin has given up. The plugin prints the reason to standard error.
    pub fn refuse(&self) {
        self.word(REFUSED).store(1, Ordering::Release);
    }

    /// Whether the plugin has given up.
    pub fn refused(&self) -> bool {
        self.word(REFUSED).load(Ordering::Acquire) != 0
    }

    /// Tells the reader that the first quantity is QEMU's own count of instructions.
    pub fn set_exact(&self) {
        self.word(EXACT).store(1, Ordering::Release);
    }

    /// Whether the first quantity is QEMU's own count of instructions.
    pub fn is_exact(&self) -> bool {
        self.word(EXACT).load(Ordering::Acquire) != 0
    }

    /// Reader: sets the first quantity to `first`, the number of instructions before the run's
    /// first one. QEMU must not have started.
    pub fn start_count(&self, first: u64) {
        self.counter(0).store(first, Ordering::Release);
    }

    /// The number of records of the ring.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The number of records written so far.
    pub fn head(&self) -> u64 {
        self.word(HEAD).load(Ordering::Acquire)
    }

    /// The number of records read so far.
    pub fn tail(&self) -> u64 {
        self.word(TAIL).load(Ordering::Acquire)
    }

    /// The mapping, in which the plugin finds the counters.
    pub(crate) fn map(&self) -> &SharedMap {
        &self.map
    }

    /// Reader: passes records from the tail up to `head` to `take`, at most a few thousand. Returns
    /// their number.
    pub fn read(&self, head: u64, mut take: impl FnMut(Record)) -> Result<u64, BoardError> {
        let tail = self.word(TAIL).load(Ordering::Relaxed);
        let ready = head.wrapping_sub(tail);
        if ready > self.records || head < tail {
            return Err(BoardError::Head { head, tail });
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

    /// A quarter of the ring: the distance at which the two sides look at each other.
    fn quarter(&self) -> u64 {
        (self.records / 4).max(1)
    }

    /// Reader: whether a quarter of the ring is full. A reader that follows the plugin closely would
    /// repeatedly take the cache lines that the plugin is writing.
    pub fn is_worth_reading(&self) -> bool {
        // A cut reports an invalid head.
        (self.quarter()..=self.records).contains(&self.head().wrapping_sub(self.tail()))
    }

    /// Reader: sleeps until a quarter of the ring is full, or for [`NAP`].
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

/// Wakes the thread that sleeps on `flag`, if one does.
fn wake(flag: &AtomicU32) {
    if flag.load(Ordering::SeqCst) == 1 {
        flag.store(0, Ordering::SeqCst);
        SharedMap::wake(flag);
    }
}

/// The plugin's end of the ring. It holds everything that a record needs: a record takes a few
/// nanoseconds, and each further pointer would add one.
pub struct RingWriter {
    board: &'static Board,
    ring: &'static [[AtomicU64; RECORD_WORDS]],
    published: &'static AtomicU64,
    /// The number of records of the ring, less one.
    mask: u64,
    head: u64,
    /// The head at which the plugin next looks at the reader.
    mark: u64,
}

/// The reader has read nothing for [`PATIENCE`].
#[derive(Debug, PartialEq, Eq)]
pub struct NoReader;

impl RingWriter {
    /// Writes to the ring of `board`.
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

    /// Appends a record. Waits if the ring is full.
    #[inline]
    pub fn push(&mut self, record: Record) -> Result<(), NoReader> {
        if !self.push_below_mark(record) {
            self.pass_mark()?;
            self.push_below_mark(record);
        }
        Ok(())
    }

    /// Appends a record and returns true, unless the plugin has to look at the reader first.
    #[inline]
    pub fn push_below_mark(&mut self, record: Record) -> bool {
        if self.head == self.mark {
            return false;
        }
        // SAFETY: the mask is one less than the ring's number of records, a power of two. On a board
        // without a ring, the mark equals the head.
        let words = unsafe { self.ring.get_unchecked((self.head & self.mask) as usize) };
        for (word, value) in words.iter().zip(record) {
            word.store(value, Ordering::Relaxed);
        }
        self.head += 1;
        self.published.store(self.head, Ordering::Release);
        true
    }

    /// After each quarter of the ring: wakes the reader, waits for room, sets the next mark.
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
