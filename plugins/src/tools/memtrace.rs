//! `memtrace`: every access to memory, as one record of the ring.
//!
//! ```text
//!   access        instructions begun (low 32 bits) << 32 | instruction << 4 | log2 of bytes      place << 12 | address in its page
//!   instruction   number << 32 | INSTRUCTION                                                     pc
//!   place         number << 32 | VIRTUAL                                                         address of a virtual page
//!                 number << 32 | PHYSICAL                                                        where that is now, bit 63: device
//! ```
//!
//! Instructions are numbered as they are translated, and defined before they run. A callback gets
//! its instruction's number in place of a pointer: what is known of thousands of instructions would
//! not stay in the processor's cache. A *place* is a page, virtual and physical, and whether it is
//! read or written: an entry of what is known of translations, first those of reads, then those of
//! writes, defined where the reader does not know it as that. Behind them are one of a read and one
//! of a write, for accesses that no entry tells. So an access costs four compares, four loads of
//! counters and three stores.

use super::{Setup, Tool, fail};
use crate::api::{self, Block, MemoryInfo};
use crate::board::Record;
use crate::physical::UNKNOWN;
use crate::slots::Slots;
use crate::state::State;
use crate::stream::Stream;
use crate::translations::{ENTRIES, PAGE_MASK, Places, STORE, place_of_read};
use layout::{INSTRUCTION, PAGE_BITS, PHYSICAL, PLACES, SIZE_BITS, VIRTUAL};
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// How records are told apart.
pub mod layout {
    pub use crate::translations::PAGE_BITS;
    use crate::translations::{ENTRIES, READS};

    /// In place of an instruction and a size: the record defines an instruction.
    pub const INSTRUCTION: u32 = u32::MAX;
    /// It defines a place's virtual page.
    pub const VIRTUAL: u32 = u32::MAX - 1;
    /// It defines a place's physical page, behind the virtual one.
    pub const PHYSICAL: u32 = u32::MAX - 2;
    /// Bits of the logarithm of how many bytes are accessed.
    pub const SIZE_BITS: u32 = 4;
    /// How many places there are.
    pub const PLACES: usize = ENTRIES + 2;

    /// Whether a place is of writes.
    pub fn is_written(place: usize) -> bool {
        match place.checked_sub(ENTRIES) {
            None => place >= READS,
            Some(of_no_entry) => of_no_entry == 1,
        }
    }
}

/// The tool, for callbacks that get something else. There is one in a QEMU.
static TOOL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The tool.
pub struct Memtrace {
    kinds: Kinds,
    stream: Stream,
    places: Places,
    instructions: Slots<u64>,
    /// What the reader knows of each place: the virtual page and where it is.
    told: Box<[[u64; 2]]>,
}

impl Memtrace {
    /// Takes `ram`.
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let places = Places::new(setup.physical(false)?, setup.board);
        let (kinds, stream) = (Kinds::new(), Stream::new(setup.board)?);
        // No page has such an address.
        let told = vec![[u64::MAX; 2]; PLACES].into();
        Ok(Self { kinds, stream, places, instructions: Slots::new(), told })
    }

    /// The number of the instruction at `pc`, which the reader knows.
    fn number(&mut self, pc: u64) -> u32 {
        let Ok((number, new)) = self.instructions.of(pc) else {
            fail("the guest has executed too much different code for a trace");
        };
        if new {
            self.define(number as usize, INSTRUCTION, pc);
        }
        number
    }

    fn define(&mut self, number: usize, what: u32, is: u64) {
        self.stream.push([(number as u64) << 32 | u64::from(what), is]);
    }

    /// Defines a place, if the reader does not know it as that.
    fn tell(&mut self, place: usize, vaddr: u64, physical: u64) {
        // Of what is unknown there is no page.
        let is =
            [vaddr & !PAGE_MASK, if physical == UNKNOWN { UNKNOWN } else { physical & !PAGE_MASK }];
        if self.told[place] != is {
            self.told[place] = is;
            self.define(place, VIRTUAL, is[0]);
            self.define(place, PHYSICAL, is[1]);
        }
    }

    #[inline]
    fn record(&self, place: u64, data: *mut c_void, size: u32) -> Record {
        [self.stream.begun() << 32 | data.addr() as u64 | u64::from(size), place]
    }
}

/// What QEMU's description of an access says.
#[derive(Clone, Copy)]
struct Kind {
    info: MemoryInfo,
    /// The power of two of bytes.
    size: u32,
    /// [`STORE`] or nothing.
    store: u64,
}

/// The kinds, as they were met; some dozen there are.
struct Kinds([Kind; 1 << Kinds::BITS]);

impl Kinds {
    const BITS: u32 = 6;

    fn new() -> Self {
        // No description has all bits.
        Self([Kind { info: MemoryInfo::MAX, size: 0, store: 0 }; 1 << Self::BITS])
    }

    #[inline]
    fn entry(info: MemoryInfo) -> usize {
        // The multiplier of Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4).
        (info.wrapping_mul(0x9e37_79b9) >> (MemoryInfo::BITS - Self::BITS)) as usize
    }

    #[inline]
    fn known(&self, info: MemoryInfo) -> Option<Kind> {
        let kind = self.0[Self::entry(info)];
        (kind.info == info).then_some(kind)
    }

    fn learn(&mut self, info: MemoryInfo) -> Kind {
        let size = api::size_bytes(info).checked_ilog2().unwrap_or(0) & ((1 << SIZE_BITS) - 1);
        let kind = Kind { info, size, store: if api::is_store(info) { STORE } else { 0 } };
        self.0[Self::entry(info)] = kind;
        kind
    }
}

/// Of an instruction that does not remap ([`Places::on_memory`]). What nearly all accesses need is
/// here, without a call; for the others all begins anew.
extern "C" fn on_access(vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: set before any callback is registered; on the vCPU's thread.
    let tool = unsafe { State::<Memtrace>::of(TOOL.load(Ordering::Relaxed)) };
    if let Some(kind) = tool.kinds.known(info) {
        let place = place_of_read(vaddr) | kind.store;
        if tool.places.is_known(vaddr, place)
            && tool.stream.push_below_mark(tool.record(place, data, kind.size))
        {
            return;
        }
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
    let physical = tool.places.of_access::<REMAPS>(info, vaddr, kind.store != 0);
    let mut place = place_of_read(vaddr) | kind.store;
    if REMAPS || !tool.places.is_known(vaddr, place) {
        let of_no_entry = ENTRIES as u64 + u64::from(kind.store != 0);
        place = of_no_entry << PAGE_BITS | vaddr & PAGE_MASK;
    }
    tool.tell((place >> PAGE_BITS) as usize, vaddr, physical);
    let record = tool.record(place, data, kind.size);
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
            let data = (self.number(instruction.pc()) as usize) << SIZE_BITS;
            let callbacks = [on_access, on_other_access::<true>];
            self.places.on_memory(&instruction, callbacks, std::ptr::without_provenance_mut(data));
        }
    }
}
