//! The basis of tools with records: the ring's writing end, and the count of instructions.
//!
//! The board's first quantity counts instructions ([`LANES`]): translated code increments it before
//! each instruction.

use crate::api::{BoardCounters, Counter, Instruction};
use crate::board::{Board, LANES, RECORD_WORDS, Record, RingWriter};
use crate::tools::fail;
use std::sync::atomic::{AtomicU64, Ordering};

/// A stream of records and its instruction count.
pub struct RecordStream {
    counters: BoardCounters,
    instructions: Option<[Counter; LANES]>,
    counted: &'static [AtomicU64; LANES],
    writer: RingWriter,
}

impl RecordStream {
    /// Writes to the ring of `board`.
    pub fn new(board: &'static Board) -> Result<Self, String> {
        if board.records() == 0 {
            return Err("the board has no ring".into());
        }
        let counters = BoardCounters::new(board);
        Ok(Self {
            counters,
            instructions: None,
            counted: board.lanes(),
            writer: RingWriter::new(board),
        })
    }

    /// Call it when the vCPU exists: from then on instructions can be counted.
    pub fn vcpu_is_there(&mut self) {
        if let Err(error) = self.counters.vcpu_is_there(self.writer.board()) {
            fail(&format!("sharing the counters: {error}"));
        }
        self.instructions = Some(std::array::from_fn(|lane| self.counters.counter(lane)));
    }

    /// Lets an instruction be counted; `index` is its index in its block.
    pub fn count(&self, instruction: &Instruction<'_>, index: usize) {
        if let Some(lanes) = self.instructions {
            instruction.count(lanes[index % LANES]);
        }
    }

    /// The number of instructions begun, including the running one.
    #[inline]
    pub fn begun(&self) -> u64 {
        self.counted.iter().fold(0, |sum, lane| sum.wrapping_add(lane.load(Ordering::Relaxed)))
    }

    /// Appends a record and returns true, unless the plugin has to look at the reader first.
    #[inline]
    pub fn push_below_mark(&mut self, record: Record) -> bool {
        self.writer.push_below_mark(record)
    }

    /// Appends a record. Ends QEMU if the ring stays full.
    #[inline]
    pub fn push(&mut self, record: Record) {
        if self.writer.push(record).is_err() {
            self.writer.board().refuse();
            fail("the ring is full and the reader does not read it");
        }
    }

    /// Appends an event of several records.
    pub fn push_event<const WORDS: usize>(&mut self, words: [u64; WORDS]) {
        const { assert!(WORDS.is_multiple_of(RECORD_WORDS), "an event is whole records") };
        words.as_chunks().0.iter().for_each(|record| self.push(*record));
    }
}
