//! The part of QEMU's interface for translator plugins (include/qemu/qemu-plugin.h) that the tools
//! need, declared by hand.
//!
//! ```text
//!   interface 1 (QEMU 7.2)    inline counters are plain memory          v1
//!   interface 4 (QEMU 10.0)   inline counters are in scoreboards        v4
//!   interface 7 (QEMU 11.1)   as 4, and callbacks get their data        v4, data_callbacks
//!   none                      no QEMU: callbacks are never called       none
//! ```
//!
//! The handles [`Block`] and [`Instruction`] are valid during the callback that received them, and
//! borrow from it. Constants of the binary interface have QEMU's names.

#[cfg(keyframe_interface = "7")]
mod data_callbacks;
#[cfg(not(keyframe_interface = "7"))]
mod id_callbacks;
#[cfg(not(any(keyframe_interface = "1", keyframe_interface = "4", keyframe_interface = "7")))]
mod none;
#[cfg(keyframe_interface = "1")]
mod v1;
#[cfg(any(keyframe_interface = "4", keyframe_interface = "7"))]
mod v4;

#[cfg(keyframe_interface = "7")]
pub use data_callbacks::register;
#[cfg(not(keyframe_interface = "7"))]
pub use id_callbacks::register;
#[cfg(not(any(
    keyframe_interface = "1",
    keyframe_interface = "4",
    keyframe_interface = "7"
)))]
use none as interface;
#[cfg(keyframe_interface = "1")]
use v1 as interface;
#[cfg(any(keyframe_interface = "4", keyframe_interface = "7"))]
use v4 as interface;

pub use interface::{BoardCounters, Counter, SlotCounters};

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;

/// QEMU's id of this plugin.
pub type PluginId = u64;
/// QEMU's description of an access, for [`is_store`] and [`size_bytes`].
pub type MemoryInfo = u32;
/// Called when an instruction is about to run.
pub type ExecutedCallback = extern "C" fn(vcpu: c_uint, data: *mut c_void);
/// Called after a memory access.
pub type MemoryCallback =
    extern "C" fn(vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void);
/// What a plugin does at the events of a VM. [`register`] has QEMU call it.
pub trait Events {
    /// Called on the thread of a vCPU at its start.
    fn vcpu(vcpu: c_uint);
    /// Called for each translated block, which is valid during the call.
    fn translated(block: *mut RawBlock);
    /// Called at QEMU's exit.
    fn exit();
}

/// The longest instruction of x86, in bytes.
pub const INSTRUCTION_BYTES_MAX: usize = 15;

/// QEMU's description of itself at installation (`struct qemu_info_t`).
#[repr(C)]
pub struct Info {
    target: *const c_char,
    version_min: c_int,
    version: c_int,
    /// Whether it emulates a system, not a user program.
    pub system: bool,
    /// The number of vCPUs at the start.
    pub vcpus: c_int,
    vcpus_max: c_int,
}

impl Info {
    /// Returns the name of the processor that QEMU emulates.
    ///
    /// # Safety
    /// QEMU has made this description.
    pub unsafe fn target(&self) -> String {
        // SAFETY: the caller's promise; the string is QEMU's, and ends in a zero byte.
        unsafe { CStr::from_ptr(self.target) }.to_string_lossy().into_owned()
    }
}

/// `struct qemu_plugin_tb`.
#[repr(C)]
pub struct RawBlock(());
/// `struct qemu_plugin_insn`.
#[repr(C)]
pub struct RawInstruction(());
#[repr(C)]
struct RawPhysical(());

const CB_NO_REGS: c_int = 0;
const MEM_W: c_int = 2;
const MEM_RW: c_int = 3;

/// The accesses for which a callback is called.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Accesses {
    /// Writes only.
    Writes,
    /// Reads and writes.
    All,
}

#[cfg(any(keyframe_interface = "1", keyframe_interface = "4", keyframe_interface = "7"))]
unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_exec_cb(
        block: *mut RawBlock,
        callback: ExecutedCallback,
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_tb_n_insns(block: *const RawBlock) -> usize;
    fn qemu_plugin_tb_get_insn(block: *const RawBlock, index: usize) -> *mut RawInstruction;
    fn qemu_plugin_insn_vaddr(instruction: *const RawInstruction) -> u64;
    fn qemu_plugin_insn_size(instruction: *const RawInstruction) -> usize;
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut RawInstruction,
        callback: ExecutedCallback,
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_mem_cb(
        instruction: *mut RawInstruction,
        callback: MemoryCallback,
        flags: c_int,
        accesses: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_mem_is_store(info: MemoryInfo) -> bool;
    fn qemu_plugin_mem_size_shift(info: MemoryInfo) -> c_uint;
    fn qemu_plugin_get_hwaddr(info: MemoryInfo, vaddr: u64) -> *mut RawPhysical;
    fn qemu_plugin_hwaddr_is_io(physical: *const RawPhysical) -> bool;
    fn qemu_plugin_hwaddr_phys_addr(physical: *const RawPhysical) -> u64;
}

#[cfg(not(any(
    keyframe_interface = "1",
    keyframe_interface = "4",
    keyframe_interface = "7"
)))]
use none::{
    qemu_plugin_get_hwaddr, qemu_plugin_hwaddr_is_io, qemu_plugin_hwaddr_phys_addr,
    qemu_plugin_insn_size, qemu_plugin_insn_vaddr, qemu_plugin_mem_is_store,
    qemu_plugin_mem_size_shift, qemu_plugin_register_vcpu_insn_exec_cb,
    qemu_plugin_register_vcpu_mem_cb, qemu_plugin_register_vcpu_tb_exec_cb,
    qemu_plugin_tb_get_insn, qemu_plugin_tb_n_insns,
};

/// A block that is being translated.
pub struct Block<'a>(*mut RawBlock, PhantomData<&'a ()>);

impl Block<'_> {
    /// Wraps the pointer that a translation callback received.
    ///
    /// # Safety
    /// `raw` is that pointer, and the callback has not returned.
    pub unsafe fn new(raw: *mut RawBlock) -> Self {
        Self(raw, PhantomData)
    }

    /// Registers `callback` with `data`, to be called before each execution of the block.
    pub fn on_executed(&self, callback: ExecutedCallback, data: *mut c_void) {
        // SAFETY: the block is alive (`Block::new`); callback and data outlive translated code
        // (`state`).
        unsafe { qemu_plugin_register_vcpu_tb_exec_cb(self.0, callback, CB_NO_REGS, data) }
    }

    /// The instructions of the block.
    pub fn instructions(&self) -> impl Iterator<Item = Instruction<'_>> {
        // SAFETY: the block is alive (`Block::new`).
        let count = unsafe { qemu_plugin_tb_n_insns(self.0) };
        (0..count).map(|index| {
            // SAFETY: the block is alive, and the index is below the count.
            let instruction = unsafe { qemu_plugin_tb_get_insn(self.0, index) };
            Instruction(instruction, PhantomData)
        })
    }
}

/// An instruction of a block that is being translated.
pub struct Instruction<'a>(*mut RawInstruction, PhantomData<&'a ()>);

impl Instruction<'_> {
    /// Returns its virtual address.
    pub fn pc(&self) -> u64 {
        // SAFETY: the handle is valid while the block is.
        unsafe { qemu_plugin_insn_vaddr(self.0) }
    }

    /// Returns its length in bytes.
    pub fn len_bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe { qemu_plugin_insn_size(self.0) }
    }

    /// Returns its bytes and their number.
    pub fn bytes(&self) -> ([u8; INSTRUCTION_BYTES_MAX], usize) {
        let len = self.len_bytes().min(INSTRUCTION_BYTES_MAX);
        let mut bytes = [0; INSTRUCTION_BYTES_MAX];
        interface::copy_bytes(self, &mut bytes[..len]);
        (bytes, len)
    }

    /// Registers `callback` with `data`, to be called before each execution.
    pub fn on_executed(&self, callback: ExecutedCallback, data: *mut c_void) {
        // SAFETY: the handle is valid; callback and data outlive translated code (`state`).
        unsafe { qemu_plugin_register_vcpu_insn_exec_cb(self.0, callback, CB_NO_REGS, data) }
    }

    /// Registers `callback` with `data`, to be called after each of its memory accesses.
    pub fn on_memory(&self, accesses: Accesses, callback: MemoryCallback, data: *mut c_void) {
        let accesses = if accesses == Accesses::Writes { MEM_W } else { MEM_RW };
        // SAFETY: as for `on_executed`.
        unsafe { qemu_plugin_register_vcpu_mem_cb(self.0, callback, CB_NO_REGS, accesses, data) }
    }

    /// Lets translated code add 1 to `counter` before each execution.
    pub fn count(&self, counter: Counter) {
        interface::count(self, counter);
    }

    fn raw(&self) -> *mut RawInstruction {
        self.0
    }
}

/// Whether an access was a write.
pub fn is_store(info: MemoryInfo) -> bool {
    // SAFETY: a function of the value alone.
    unsafe { qemu_plugin_mem_is_store(info) }
}

/// The size of an access in bytes.
pub fn size_bytes(info: MemoryInfo) -> u32 {
    // SAFETY: a function of the value alone.
    1_u32.checked_shl(unsafe { qemu_plugin_mem_size_shift(info) }).unwrap_or(0)
}

/// The target of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessTarget {
    /// Memory. Under interface 1 the address is QEMU's `ram_addr_t`; `physical` converts it to a
    /// guest-physical address.
    Memory(u64),
    /// A device.
    Device(u64),
    /// QEMU does not tell.
    Unknown,
}

/// The target of the access for which the running memory callback was called.
#[inline]
pub fn access_target(info: MemoryInfo, vaddr: u64) -> AccessTarget {
    // SAFETY: called from a memory callback with that one's arguments, as the interface asks.
    let physical = unsafe { qemu_plugin_get_hwaddr(info, vaddr) };
    if physical.is_null() {
        return AccessTarget::Unknown;
    }
    // SAFETY: the handle is not null and valid until the callback returns.
    let (device, address) =
        unsafe { (qemu_plugin_hwaddr_is_io(physical), qemu_plugin_hwaddr_phys_addr(physical)) };
    if device { AccessTarget::Device(address) } else { AccessTarget::Memory(address) }
}
