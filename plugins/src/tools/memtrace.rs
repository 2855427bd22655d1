//! `memtrace`: every memory access, as one record of the ring.
//!
//! ```text
//!   access        instructions begun (low 32 bits) << 32 | instruction << 4 | log2 of bytes      place << 12 | offset in page
//!   instruction   number << 32 | INSTRUCTION                                                     pc
//!   place         number << 32 | VIRTUAL                                                         address of a virtual page
//!                 number << 32 | PHYSICAL                                                        its physical page, bit 63: device
//! ```
//!
//! Instructions are numbered as they are translated, and defined before they run. A callback
//! receives its instruction's number instead of a pointer, whose target would not stay in the
//! processor's cache for thousands of instructions. A *place* is an entry of the translation cache: a
//! virtual page, its physical page, and read or write. Entries of reads come first, then those of
//! writes. A place is defined when the reader does not know its current contents. Two more places,
//! one of a read and one of a write, serve accesses that have no entry. An access costs four
//! comparisons, four loads of counters and three stores.

use super::{Setup, Tool, fail};
use crate::access_kinds::AccessKinds;
use crate::api::{Block, MemoryInfo};
use crate::board::Record;
use crate::physical::UNKNOWN;
use crate::record_stream::RecordStream;
use crate::slots::Slots;
use crate::state::State;
use crate::translations::{AccessResolver, ENTRIES, PAGE_MASK, place_of_read};
use layout::{INSTRUCTION, PAGE_BITS, PHYSICAL, PLACES, SIZE_BITS, VIRTUAL};
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The encoding of records.
pub mod layout {
    pub use crate::translations::PAGE_BITS;
    use crate::translations::{ENTRIES, READS};

    /// In place of an instruction and a size: the record defines an instruction.
    pub const INSTRUCTION: u32 = u32::MAX;
    /// The record defines a place's virtual page.
    pub const VIRTUAL: u32 = u32::MAX - 1;
    /// The record defines a place's physical page, after its virtual page.
    pub const PHYSICAL: u32 = u32::MAX - 2;
    /// The number of bits for the logarithm of the size.
    pub const SIZE_BITS: u32 = 4;
    /// The number of places.
    pub const PLACES: usize = ENTRIES + 2;

    /// Whether a place is one of writes.
    pub fn is_written(place: usize) -> bool {
        match place.checked_sub(ENTRIES) {
            None => place >= READS,
            Some(of_no_entry) => of_no_entry == 1,
        }
    }
}

/// The only tool of this kind in a QEMU, for callbacks that receive other data.
static TOOL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The tool.
pub struct Memtrace {
    kinds: AccessKinds,
    stream: RecordStream,
    places: AccessResolver,
    instructions: Slots<u64>,
    /// The contents of each place as the reader knows them: virtual and physical page.
    told: Box<[[u64; 2]]>,
}

impl Memtrace {
    /// Argument: `ram`.
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let places = AccessResolver::new(setup.physical(false)?, setup.board);
        let (kinds, stream) = (AccessKinds::new(), RecordStream::new(setup.board)?);
        // No page has this address.
        let told = vec![[u64::MAX; 2]; PLACES].into();
        Ok(Self { kinds, stream, places, instructions: Slots::new(), told })
    }

    /// The number of the instruction at `pc`. Defines the instruction if it is new.
    fn number(&mut self, pc: u64) -> u32 {
        let Ok((number, new)) = self.instructions.of(pc) else {
            fail("the guest has executed too many different instructions for a trace");
        };
        if new {
            self.define(number as usize, INSTRUCTION, pc);
        }
        number
    }

    fn define(&mut self, number: usize, what: u32, is: u64) {
        self.stream.push([(number as u64) << 32 | u64::from(what), is]);
    }

    /// Defines a place, if the reader does not know its current contents.
    fn tell(&mut self, place: usize, vaddr: u64, physical: u64) {
        // An unknown target has no page.
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

/// For an instruction that does not remap ([`AccessResolver::on_memory`]): the fast path of nearly
/// all accesses, without a call.
extern "C" fn on_access(vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: set before any callback is registered; on the vCPU's thread.
    let tool = unsafe { State::<Memtrace>::of(TOOL.load(Ordering::Relaxed)) };
    if let Some(kind) = tool.kinds.known(info) {
        let place = place_of_read(vaddr) | kind.store;
        if tool.places.is_known(vaddr, place)
            && tool.stream.push_below_mark(tool.record(place, data, kind.size_log2))
        {
            return;
        }
    }
    on_other_access::<false>(vcpu, info, vaddr, data);
}

/// The slow path. `REMAPS`: for an instruction that may remap.
#[cold]
#[inline(never)]
extern "C" fn on_other_access<const REMAPS: bool>(
    _vcpu: c_uint,
    info: MemoryInfo,
    vaddr: u64,
    data: *mut c_void,
) {
    // SAFETY: as above; the other reference is no longer used.
    let tool = unsafe { State::<Memtrace>::of(TOOL.load(Ordering::Relaxed)) };
    let kind = tool.kinds.of(info);
    let physical = tool.places.of_access::<REMAPS>(info, vaddr, kind.is_store());
    let mut place = place_of_read(vaddr) | kind.store;
    if REMAPS || !tool.places.is_known(vaddr, place) {
        let of_no_entry = ENTRIES as u64 + u64::from(kind.is_store());
        place = of_no_entry << PAGE_BITS | vaddr & PAGE_MASK;
    }
    tool.tell((place >> PAGE_BITS) as usize, vaddr, physical);
    let record = tool.record(place, data, kind.size_log2);
    tool.stream.push(record);
}

impl Tool for Memtrace {
    fn vcpu_is_there(&mut self) {
        self.stream.vcpu_is_there();
    }

    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        TOOL.store(data, Ordering::Relaxed);
        self.stream.count(block);
        for instruction in block.instructions() {
            let data = (self.number(instruction.pc()) as usize) << SIZE_BITS;
            let callbacks = [on_access, on_other_access::<true>];
            self.places.on_memory(&instruction, callbacks, std::ptr::without_provenance_mut(data));
        }
    }
}
