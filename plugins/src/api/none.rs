//! The interface without QEMU, for tests of the plugin's code and for the reader of a board.
//!
//! Registrations are ignored and callbacks never called.

#![allow(
    clippy::unused_self,
    clippy::unnecessary_wraps,
    reason = "the signatures of the interface"
)]

use super::id_callbacks::{AtExitCallback, TranslatedCallback, VcpuCallback};
use super::{
    ExecutedCallback, Instruction, MemoryCallback, MemoryInfo, PluginId, RawBlock, RawInstruction,
    RawPhysical,
};
use crate::board::Board;
use std::ffi::{c_int, c_uint, c_void};

macro_rules! nothing {
    ($($name:ident($($argument:ty),*) $(-> $result:ty = $value:expr)?;)*) => {
        $(pub(super) unsafe fn $name($(_: $argument),*) $(-> $result)? { $($value)? })*
    };
}

nothing! {
    qemu_plugin_register_vcpu_tb_trans_cb(PluginId, TranslatedCallback);
    qemu_plugin_register_atexit_cb(PluginId, AtExitCallback, *mut c_void);
    qemu_plugin_register_vcpu_init_cb(PluginId, VcpuCallback);
    qemu_plugin_register_vcpu_tb_exec_cb(*mut RawBlock, ExecutedCallback, c_int, *mut c_void);
    qemu_plugin_tb_n_insns(*const RawBlock) -> usize = 0;
    qemu_plugin_tb_get_insn(*const RawBlock, usize) -> *mut RawInstruction = std::ptr::null_mut();
    qemu_plugin_insn_vaddr(*const RawInstruction) -> u64 = 0;
    qemu_plugin_insn_size(*const RawInstruction) -> usize = 0;
    qemu_plugin_register_vcpu_insn_exec_cb(*mut RawInstruction, ExecutedCallback, c_int, *mut c_void);
    qemu_plugin_register_vcpu_mem_cb(*mut RawInstruction, MemoryCallback, c_int, c_int, *mut c_void);
    qemu_plugin_mem_is_store(MemoryInfo) -> bool = false;
    qemu_plugin_mem_size_shift(MemoryInfo) -> c_uint = 0;
    qemu_plugin_get_hwaddr(MemoryInfo, u64) -> *mut RawPhysical = std::ptr::null_mut();
    qemu_plugin_hwaddr_is_io(*const RawPhysical) -> bool = false;
    qemu_plugin_hwaddr_phys_addr(*const RawPhysical) -> u64 = 0;
}

/// A counter that is always 0.
#[derive(Clone, Copy)]
pub struct Counter;

impl Counter {
    /// Its value.
    pub fn get(self) -> u64 {
        0
    }
}

pub(super) fn count(instruction: &Instruction<'_>, _counter: Counter) {
    let _ = instruction.raw();
}

pub(super) fn copy_bytes(_instruction: &Instruction<'_>, _into: &mut [u8]) {}

/// The counters of a board.
pub struct BoardCounters;

impl BoardCounters {
    /// The counters of `board`.
    pub fn new(board: &'static Board) -> Self {
        let _ = board.map();
        Self
    }

    /// Does nothing.
    pub fn vcpu_is_there(&mut self, _board: &'static Board) -> std::io::Result<()> {
        Ok(())
    }

    /// The counter `index`.
    pub fn counter(&self, _index: usize) -> Counter {
        Counter
    }
}

/// Counters in any number.
#[derive(Default)]
pub struct SlotCounters(());

impl SlotCounters {
    /// The counter of `slot`.
    pub fn counter(&mut self, _slot: usize) -> Counter {
        Counter
    }
}
