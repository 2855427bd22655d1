//! What tools with records have in common: the ring's writing end, and the number of the
//! instruction that runs.
//!
//! The board's first counters count instructions, by turns ([`LANES`]); translated code adds to one
//! before each of them runs.

use crate::api::{BoardCounters, Counter, Instruction};
use crate::board::{Board, LANES, RECORD_WORDS, Record, Writer};
use crate::tools::fail;
use std::sync::atomic::{AtomicU64, Ordering};

/// A stream of records.
pub struct Stream {
    counters: BoardCounters,
    instructions: Option<[Counter; LANES]>,
    counted: &'static [AtomicU64; LANES],
    writer: Writer,
}

impl Stream {
    /// Over the board's ring.
    pub fn new(board: &'static Board) -> Result<Self, String> {
        if board.records() == 0 {
            return Err("the board has no ring".into());
        }
        let counters = BoardCounters::new(board);
        Ok(Self {
            counters,
            instructions: None,
            counted: board.lanes(),
            writer: Writer::new(board),
        })
    }

    /// The vCPU is there: from now on instructions can be counted.
    pub fn vcpu_is_there(&mut self) {
        if let Err(error) = self.counters.vcpu_is_there(self.writer.board()) {
            fail(&format!("sharing the counters: {error}"));
        }
        self.instructions = Some(std::array::from_fn(|lane| self.counters.counter(lane)));
    }

    /// Has an instruction counted, the `index`th of its block.
    pub fn count(&self, instruction: &Instruction<'_>, index: usize) {
        if let Some(lanes) = self.instructions {
            instruction.count(lanes[index % LANES]);
        }
    }

    /// Instructions begun, the running one among them.
    #[inline]
    pub fn begun(&self) -> u64 {
        self.counted.iter().fold(0, |sum, lane| sum.wrapping_add(lane.load(Ordering::Relaxed)))
    }

    /// Appends a record, unless the reader has to be looked at first, as [`Stream::push`] does.
    #[inline]
    pub fn push_below_mark(&mut self, record: Record) -> bool {
        self.writer.push_below_mark(record)
    }

    /// Appends a record; ends QEMU where nobody reads.
    #[inline]
    pub fn push(&mut self, record: Record) {
        if self.writer.push(record).is_err() {
            self.writer.board().refuse();
            fail("the ring is full and nobody reads it");
        }
    }

    /// Appends an event of some records.
    pub fn push_event<const WORDS: usize>(&mut self, words: [u64; WORDS]) {
        const { assert!(WORDS.is_multiple_of(RECORD_WORDS), "an event is whole records") };
        words.as_chunks().0.iter().for_each(|record| self.push(*record));
    }
}
