//! Plugin interfaces 4 (QEMU 10.0) and 7 (QEMU 11.1): inline counters are in scoreboards, QEMU's arrays with an entry
//! for each vCPU.
//!
//! Another process must read the board's counters while the VM is stopped. The scoreboard's entry
//! is therefore large enough for a page, and the board's page of counters is mapped into it:
//!
//! ```text
//!   scoreboard, in QEMU's heap  │ entry of vCPU 0: 16 KiB                            │ entry of vCPU 1 ...
//!                               │ .... │ page: the board's counters, shared │ ...... │
//! ```
//!
//! QEMU allocates entries for more vCPUs than exist, and moves them only if even more are added.
//! There is one vCPU.

use super::{Instruction, RawInstruction};
use crate::board::{Board, COUNTERS_OFFSET_BYTES};
use std::ffi::{c_int, c_uint, c_void};

/// The symbol by which QEMU checks the plugin's interface.
#[unsafe(no_mangle)]
#[used]
pub static qemu_plugin_version: c_int = if cfg!(keyframe_interface = "7") { 7 } else { 4 };

const INLINE_ADD_U64: c_int = 0;
const ENTRY_BYTES: usize = 16384;
const CHUNK: usize = 4096;

#[repr(C)]
struct Scoreboard(());

#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    score: *mut Scoreboard,
    offset: usize,
}

unsafe extern "C" {
    fn qemu_plugin_scoreboard_new(entry_bytes: usize) -> *mut Scoreboard;
    fn qemu_plugin_scoreboard_find(score: *mut Scoreboard, vcpu: c_uint) -> *mut c_void;
    fn qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(
        instruction: *mut RawInstruction,
        operation: c_int,
        entry: Entry,
        add: u64,
    );
    fn qemu_plugin_insn_data(
        instruction: *const RawInstruction,
        into: *mut c_void,
        len: usize,
    ) -> usize;
}

/// A word of a scoreboard.
#[derive(Clone, Copy)]
pub struct Counter {
    entry: Entry,
    at: *const u64,
}

impl Counter {
    fn new(score: *mut Scoreboard, offset: usize) -> Self {
        // SAFETY: the scoreboard is never freed, vCPU 0 is there (translation and `vcpu_is_there`
        // come after it), and the offset is inside of the entry.
        let at = unsafe { qemu_plugin_scoreboard_find(score, 0).byte_add(offset) };
        Self { entry: Entry { score, offset }, at: at.cast() }
    }

    /// Its value.
    #[inline]
    pub fn get(self) -> u64 {
        // SAFETY: the scoreboard is never freed nor moved with one vCPU, and written by this
        // thread's translated code alone.
        unsafe { self.at.read_volatile() }
    }
}

pub(super) fn count(instruction: &Instruction<'_>, counter: Counter) {
    // SAFETY: the handle is valid; the scoreboard is never freed and the offset inside of its
    // entry.
    unsafe {
        qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(
            instruction.raw(),
            INLINE_ADD_U64,
            counter.entry,
            1,
        );
    }
}

pub(super) fn copy_bytes(instruction: &Instruction<'_>, into: &mut [u8]) {
    // SAFETY: the handle is valid, and at most `into.len()` bytes are written to `into`.
    unsafe { qemu_plugin_insn_data(instruction.raw(), into.as_mut_ptr().cast(), into.len()) };
}

/// The counters of a board.
pub struct BoardCounters {
    score: *mut Scoreboard,
    /// The offset of the shared page in the entry of vCPU 0.
    offset: usize,
}

impl BoardCounters {
    /// Creates a scoreboard for the board's counters.
    pub fn new(_board: &'static Board) -> Self {
        // SAFETY: called from qemu_plugin_install; the size is in bytes.
        Self { score: unsafe { qemu_plugin_scoreboard_new(ENTRY_BYTES) }, offset: 0 }
    }

    /// Maps the board's page into the entry of vCPU 0. Call it before the first translation.
    pub fn vcpu_is_there(&mut self, board: &'static Board) -> std::io::Result<()> {
        // SAFETY: vCPU 0 has been initialised: this is its callback.
        let entry: *mut u8 = unsafe { qemu_plugin_scoreboard_find(self.score, 0) }.cast();
        self.offset = entry.align_offset(4096);
        let page = entry.wrapping_add(self.offset);
        assert!(self.offset + 4096 <= ENTRY_BYTES, "an entry has room for a page");
        // SAFETY: the page lies whole inside of the entry, which is this plugin's, zero, and never
        // freed or moved.
        unsafe { board.map().put_page(COUNTERS_OFFSET_BYTES, page) }
    }

    /// The counter `index`.
    pub fn counter(&self, index: usize) -> Counter {
        assert!(index < crate::board::COUNTERS, "counter {index}");
        Counter::new(self.score, self.offset + index * 8)
    }
}

/// Counters in any number, in chunks of a scoreboard each.
#[derive(Default)]
pub struct SlotCounters(Vec<*mut Scoreboard>);

impl SlotCounters {
    /// The counter of `slot`.
    pub fn counter(&mut self, slot: usize) -> Counter {
        while self.0.len() <= slot / CHUNK {
            // SAFETY: called from a translation callback, where QEMU allows it; the size is in
            // bytes.
            self.0.push(unsafe { qemu_plugin_scoreboard_new(CHUNK * 8) });
        }
        Counter::new(self.0[slot / CHUNK], slot % CHUNK * 8)
    }
}
