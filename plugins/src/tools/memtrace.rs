//! `memtrace`: every access to memory, as one record of the ring.
//!
//! ```text
//!   access       virtual address │ physical address, bit 63: device │ instructions begun (low 32 bits) << 32 | instruction << 4 | kind
//!   definition   pc              │ instruction                      │ 0xffffffff
//! ```
//!
//! Instructions are numbered as they are translated, and defined before they run. A callback gets its instruction's number in place of a
//! pointer: what is known of thousands of instructions would not stay in the processor's cache. A *kind* of access is how many bytes it
//! has and whether it is a write. So an access costs two compares, four loads of counters and three stores.

use super::{Setup, Tool, fail};
use crate::api::{self, Block, MemoryInfo};
use crate::slots::Slots;
use crate::state::State;
use crate::stream::Stream;
use crate::translations::Places;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// In place of an instruction and a kind: the record defines one.
pub const DEFINITION: u32 = u32::MAX;
/// Bits of a kind: 1 a write, above that the power of two of bytes.
pub const KIND_BITS: u32 = 4;

/// The tool, for callbacks that get something else. There is one in a QEMU.
static TOOL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The tool.
pub struct Memtrace {
    kinds: Kinds,
    stream: Stream,
    places: Places,
    instructions: Slots<u64>,
}

impl Memtrace {
    /// Takes `ram`.
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let places = Places::new(setup.physical(false)?, setup.board);
        let (kinds, stream) = (Kinds::new(), Stream::new(setup.board)?);
        Ok(Self { kinds, stream, places, instructions: Slots::new() })
    }

    /// The number of the instruction at `pc`, which the reader knows.
    fn number(&mut self, pc: u64) -> u32 {
        let Ok((number, new)) = self.instructions.of(pc) else {
            fail("the guest has executed too much different code for a trace");
        };
        if new {
            self.stream.push([pc, u64::from(number), u64::from(DEFINITION)]);
        }
        number
    }

    fn record(&self, vaddr: u64, physical: u64, number: usize, kind: u32) -> [u64; 3] {
        let what = (number as u64) << KIND_BITS | u64::from(kind);
        [vaddr, physical, self.stream.begun() << 32 | what]
    }
}

/// The kinds of QEMU's descriptions of accesses, as they were met; some dozen there are.
struct Kinds([(MemoryInfo, u32); Kinds::ENTRIES]);

impl Kinds {
    const ENTRIES: usize = 64;

    fn new() -> Self {
        // No description has all bits.
        Self([(MemoryInfo::MAX, 0); Self::ENTRIES])
    }

    fn entry(info: MemoryInfo) -> usize {
        (info ^ info >> 6 ^ info >> 12) as usize % Self::ENTRIES
    }

    #[inline]
    fn known(&self, info: MemoryInfo) -> Option<u32> {
        let (of, kind) = self.0[Self::entry(info)];
        (of == info).then_some(kind)
    }

    fn learn(&mut self, info: MemoryInfo) -> u32 {
        let size = api::size_bytes(info).checked_ilog2().unwrap_or(0);
        let kind = (size << 1 | u32::from(api::is_store(info))) & ((1 << KIND_BITS) - 1);
        self.0[Self::entry(info)] = (info, kind);
        kind
    }
}

/// Of an instruction that does not remap ([`Places::on_memory`]). What nearly all accesses need is here, without a call; for the others all begins
/// anew.
extern "C" fn on_access(vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: set before any callback is registered; on the vCPU's thread.
    let tool = unsafe { State::<Memtrace>::of(TOOL.load(Ordering::Relaxed)) };
    if let Some(kind) = tool.kinds.known(info)
        && let Some(physical) = tool.places.known(vaddr, kind & 1 != 0)
        && tool.stream.push_below_mark(tool.record(vaddr, physical, data.addr(), kind))
    {
        return;
    }
    on_other_access::<false>(vcpu, info, vaddr, data);
}

/// `REMAPS`: of an instruction that may.
#[cold]
#[inline(never)]
extern "C" fn on_other_access<const REMAPS: bool>(
    _vcpu: c_uint,
    info: MemoryInfo,
    vaddr: u64,
    data: *mut c_void,
) {
    // SAFETY: as above; the other's reference is used no more.
    let tool = unsafe { State::<Memtrace>::of(TOOL.load(Ordering::Relaxed)) };
    let kind = tool.kinds.known(info).unwrap_or_else(|| tool.kinds.learn(info));
    let physical = tool.places.of_access::<REMAPS>(info, vaddr, kind & 1 != 0);
    let record = tool.record(vaddr, physical, data.addr(), kind);
    tool.stream.push(record);
}

impl Tool for Memtrace {
    fn vcpu_is_there(&mut self) {
        self.stream.vcpu_is_there();
    }

    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        TOOL.store(data, Ordering::Relaxed);
        for (index, instruction) in block.instructions().enumerate() {
            self.stream.count(&instruction, index);
            let number = self.number(instruction.pc()) as usize;
            let callbacks = [on_access, on_other_access::<true>];
            self.places.on_memory(&instruction, callbacks, std::ptr::without_provenance_mut(number));
        }
    }
}
