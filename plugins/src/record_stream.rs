//! The basis of tools with records: the ring's writing end, and the count of instructions.
//!
//! The board's first quantity counts instructions ([`LANES`]): translated code increments it before
//! each instruction. At the begin of each block it is set to QEMU's own count, so that an
//! instruction that an exception interrupts is not counted twice:
//!
//! ```text
//!   board, by the reader   number of the run's first instruction
//!   block begins           number of the block's first instruction ([`QemuIcount`])
//!   instruction begins     + 1
//! ```
//!
//! If QEMU does not tell its count, the numbers are too high after each such instruction.

use crate::api::{Block, BoardCounters, Counter};
use crate::board::{Board, LANES, RECORD_WORDS, Record, RingWriter};
use crate::qemu_icount::QemuIcount;
use crate::tools::fail;
use std::ffi::{c_uint, c_void};
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// A stream of records and its instruction count.
pub struct RecordStream {
    counters: BoardCounters,
    instructions: Option<[Counter; LANES]>,
    counted: &'static [AtomicU64; LANES],
    writer: RingWriter,
}

impl RecordStream {
    /// Writes to the ring of `board`. There is one in a QEMU.
    pub fn new(board: &'static Board) -> Result<Self, String> {
        if board.records() == 0 {
            return Err("the board has no ring".into());
        }
        let counters = BoardCounters::new(board);
        let correction = Correction { board, counted: board.lanes(), source: Source::Unknown };
        CORRECTION.store(Box::leak(Box::new(correction)), Ordering::Relaxed);
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

    /// Lets the instructions of `block`, which is being translated, be counted. Call it before
    /// anything else is registered for the block.
    pub fn count(&self, block: &Block<'_>) {
        let (mut len, mut last) = (0, 0);
        for (index, instruction) in block.instructions().enumerate() {
            if let Some(lanes) = self.instructions {
                instruction.count(lanes[index % LANES]);
            }
            (len, last) = (index + 1, instruction.pc());
        }
        let begun = BlockBegin::new(len, last);
        block.on_executed(on_block, without_provenance_mut(begun.0));
    }

    /// The number of instructions begun, including the running one.
    #[inline]
    pub fn begun(&self) -> u64 {
        sum(self.counted)
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

#[inline]
fn sum(lanes: &[AtomicU64; LANES]) -> u64 {
    lanes.iter().fold(0, |sum, lane| sum.wrapping_add(lane.load(Ordering::Relaxed)))
}

/// Sets the count at the begin of each block.
struct Correction {
    board: &'static Board,
    counted: &'static [AtomicU64; LANES],
    source: Source,
}

enum Source {
    /// No block has run.
    Unknown,
    Qemu(QemuIcount),
    /// QEMU does not tell.
    None,
}

/// The only one in a QEMU, for callbacks that receive other data.
static CORRECTION: AtomicPtr<Correction> = AtomicPtr::new(null_mut());

/// What the callback at a block's begin knows of the block: its number of instructions, and the bit
/// [`BlockBegin::UNCERTAIN`].
#[derive(Clone, Copy)]
struct BlockBegin(usize);

impl BlockBegin {
    /// The block may have one instruction less than its description.
    ///
    /// QEMU 7.2 describes to a plugin also an instruction that it then leaves to the next block,
    /// because it reaches into another page. Such an instruction begins in the last bytes of a page.
    const UNCERTAIN: usize = 1 << 31;
    /// An instruction that begins there may reach into the next page.
    const LAST_BYTES: u64 = crate::api::INSTRUCTION_BYTES_MAX as u64 - 1;

    /// A block of `len` instructions, the last one at `last`.
    fn new(len: usize, last: u64) -> Self {
        let crosses = last & 4095 > 4095 - Self::LAST_BYTES;
        let is_uncertain = cfg!(keyframe_interface = "1") && len > 1 && crosses;
        Self(len | if is_uncertain { Self::UNCERTAIN } else { 0 })
    }

    /// The number of the block's first instruction. `with_block` is QEMU's count including the
    /// block, `counted` the number that follows from the instructions that have begun.
    #[inline]
    fn first(self, with_block: u64, counted: u64) -> u64 {
        let len = (self.0 & !Self::UNCERTAIN) as u64;
        let first = with_block.wrapping_sub(len);
        // An exception's handler does not begin at the end of a page, so nothing was interrupted.
        let lacks_one = self.0 & Self::UNCERTAIN != 0 && counted == first.wrapping_add(1);
        if lacks_one { counted } else { first }
    }
}

extern "C" fn on_block(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: set before any callback is registered, and never freed; on the vCPU's thread, which
    // alone uses it.
    let correction = unsafe { &mut *CORRECTION.load(Ordering::Relaxed) };
    match &correction.source {
        Source::Qemu(qemu) => {
            let counted = sum(correction.counted);
            let first = BlockBegin(data.addr()).first(qemu.with_block(), counted);
            if first != counted {
                correction.add(first.wrapping_sub(counted));
            }
        }
        Source::None => {}
        Source::Unknown => correction.find(data),
    }
}

impl Correction {
    #[cold]
    fn add(&self, difference: u64) {
        // Translated code, which is the only other writer, does not run now.
        let lane = &self.counted[0];
        lane.store(lane.load(Ordering::Relaxed).wrapping_add(difference), Ordering::Relaxed);
    }

    #[cold]
    fn find(&mut self, data: *mut c_void) {
        self.source = QemuIcount::find().map_or(Source::None, Source::Qemu);
        if matches!(self.source, Source::Qemu(_)) {
            self.board.set_exact();
            on_block(0, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_begins_at_qemus_count() {
        let block = BlockBegin(5);
        assert_eq!(block.first(105, 100), 100);
        assert_eq!(block.first(104, 100), 99, "an instruction was interrupted");
        assert_eq!(block.first(1005, 0), 1000, "the first block of a run");
        let uncertain = BlockBegin(5 | BlockBegin::UNCERTAIN);
        assert_eq!(uncertain.first(105, 100), 100, "it has five");
        assert_eq!(uncertain.first(104, 100), 100, "it has four");
        assert_eq!(BlockBegin::new(5, 0x1ff8).0 & !BlockBegin::UNCERTAIN, 5);
    }

    #[test]
    fn the_count_is_corrected_in_either_direction() {
        let board = crate::translations::tests::board();
        let counted = board.lanes();
        let correction = Correction { board, counted, source: Source::None };
        counted[3].store(7, Ordering::Relaxed);
        correction.add(1_u64.wrapping_neg());
        assert_eq!(board.counted(0), 6);
        correction.add(4);
        assert_eq!(board.counted(0), 10);
    }
}
