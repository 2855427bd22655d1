//! Plugin interface 1, QEMU 7.2: an inline counter is any 8 bytes of memory.

use super::{Instruction, RawInstruction};
use crate::board::{Board, COUNTERS_OFFSET_BYTES};
use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicU64;

/// The symbol by which QEMU checks the plugin's interface.
#[unsafe(no_mangle)]
#[used]
pub static qemu_plugin_version: c_int = 1;

const INLINE_ADD_U64: c_int = 0;

unsafe extern "C" {
    fn qemu_plugin_register_vcpu_insn_exec_inline(
        instruction: *mut RawInstruction,
        operation: c_int,
        counter: *mut c_void,
        add: u64,
    );
    fn qemu_plugin_insn_data(instruction: *const RawInstruction) -> *const c_void;
}

/// Eight bytes that are never freed.
#[derive(Clone, Copy)]
pub struct Counter(*mut u64);

impl Counter {
    /// Its value.
    #[inline]
    pub fn get(self) -> u64 {
        // SAFETY: it lives for ever, is aligned, and is written by this thread's translated code
        // alone.
        unsafe { self.0.read_volatile() }
    }
}

pub(super) fn count(instruction: &Instruction<'_>, counter: Counter) {
    // SAFETY: the handle is valid and the counter lives for ever.
    unsafe {
        qemu_plugin_register_vcpu_insn_exec_inline(
            instruction.raw(),
            INLINE_ADD_U64,
            counter.0.cast(),
            1,
        )
    }
}

pub(super) fn copy_bytes(instruction: &Instruction<'_>, into: &mut [u8]) {
    // SAFETY: the handle is valid; its data has the instruction's length, of which `into` is no
    // more.
    unsafe {
        let data = qemu_plugin_insn_data(instruction.raw());
        std::ptr::copy_nonoverlapping(data.cast(), into.as_mut_ptr(), into.len());
    }
}

/// The counters of a board.
pub struct BoardCounters(*mut u64);

impl BoardCounters {
    /// The counters of `board`.
    pub fn new(board: &'static Board) -> Self {
        Self(board.map().words()[COUNTERS_OFFSET_BYTES / 8].as_ptr())
    }

    /// Does nothing.
    pub fn vcpu_is_there(&mut self, _board: &'static Board) -> std::io::Result<()> {
        Ok(())
    }

    /// The counter `index`.
    pub fn counter(&self, index: usize) -> Counter {
        assert!(index < crate::board::COUNTERS, "counter {index}");
        // SAFETY: the page of counters has that many words after its first.
        Counter(unsafe { self.0.add(index) })
    }
}

/// Counters in any number, in chunks.
#[derive(Default)]
pub struct SlotCounters(Vec<&'static [AtomicU64]>);

const CHUNK: usize = 4096;

impl SlotCounters {
    /// The counter of `slot`. New slots must be requested in rising order.
    pub fn counter(&mut self, slot: usize) -> Counter {
        while self.0.len() <= slot / CHUNK {
            self.0.push(Box::leak((0..CHUNK).map(|_| AtomicU64::new(0)).collect()));
        }
        Counter(self.0[slot / CHUNK][slot % CHUNK].as_ptr())
    }
}
