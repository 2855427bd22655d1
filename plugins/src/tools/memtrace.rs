//! `memtrace`: every access to memory, as one record of the ring.
//!
//! ```text
//!   access       virtual address │ physical address, bit 63: device │ instructions begun (low 32 bits) << 32 | site
//!   definition   pc              │ size in bytes | write << 32      │ site << 32                               | 0xffffffff
//! ```
//!
//! A *site* is an instruction with one kind of access (size, read or write). What is constant of it is looked up when it is
//! translated and when it first runs; the reader gets it once, before the first access that names it. So an access costs one compare, one
//! translation of its address and three stores.

use super::{Setup, Tool, fail};
use crate::api::{self, Block, MemoryInfo};
use crate::slots::Slots;
use crate::state::State;
use crate::stream::Stream;
use crate::translations::Places;
use std::ffi::{c_uint, c_void};

/// In place of a site: the record defines one.
pub const DEFINITION: u32 = u32::MAX;

/// The tool.
pub struct Memtrace {
    stream: Stream,
    places: Places,
    sites: Slots<(u64, u32)>,
    known: std::collections::HashMap<u64, &'static State<Access>>,
}

/// An instruction that accesses memory: what a callback gets, in one line of the cache.
#[repr(C, align(64))]
struct Access {
    /// The kinds of access seen last. Most instructions have one, some read and write.
    kinds: [Kind; 2],
    tool: *mut c_void,
    pc: u64,
}

/// A kind of access of an instruction.
#[derive(Clone, Copy)]
struct Kind {
    info: MemoryInfo,
    site: u32,
    store: bool,
}

/// No access has this.
const NO_KIND: Kind = Kind { info: MemoryInfo::MAX, site: 0, store: false };

impl Memtrace {
    /// Takes `ram`.
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let places = Places::new(setup.physical(false)?, setup.board);
        Ok(Self {
            stream: Stream::new(setup.board)?,
            places,
            sites: Slots::new(),
            known: std::collections::HashMap::new(),
        })
    }

    /// A kind of access that was not seen last; tells the reader of it if it is new.
    #[cold]
    fn kind(&mut self, access: &mut Access, info: MemoryInfo) -> Kind {
        let (size, store) = (api::size_bytes(info), api::is_store(info));
        let kind = size << 1 | u32::from(store);
        let Ok((site, new)) = self.sites.of((access.pc, kind)) else {
            fail("the guest has executed too much different code for a trace");
        };
        if new {
            let what = u64::from(size) | u64::from(store) << 32;
            self.stream.push([access.pc, what, u64::from(site) << 32 | u64::from(DEFINITION)]);
        }
        access.kinds = [Kind { info, site, store }, access.kinds[0]];
        access.kinds[0]
    }
}

/// Of an instruction that does not remap ([`Places::on_memory`]). What nearly all accesses need is here, without a call; for the others all begins
/// anew.
extern "C" fn on_access(vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: registered with an access's data; on the vCPU's thread.
    let access = unsafe { State::<Access>::of(data) };
    // SAFETY: the tool's own data, of another state than the access.
    let tool = unsafe { State::<Memtrace>::of(access.tool) };
    let [first, second] = &access.kinds;
    let kind = if first.info == info { first } else { second };
    if kind.info == info
        && let Some(physical) = tool.places.known(vaddr, kind.store)
        && tool.stream.push_below_mark([vaddr, physical, tool.stream.begun() << 32 | u64::from(kind.site)])
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
    // SAFETY: registered with an access's data; on the vCPU's thread.
    let access = unsafe { State::<Access>::of(data) };
    // SAFETY: the tool's own data, of another state than the access.
    let tool = unsafe { State::<Memtrace>::of(access.tool) };
    let kind = match access.kinds {
        [kind, _] | [_, kind] if kind.info == info => kind,
        _ => tool.kind(access, info),
    };
    let physical = tool.places.of_access::<REMAPS>(info, vaddr, kind.store);
    let record = [vaddr, physical, tool.stream.begun() << 32 | u64::from(kind.site)];
    tool.stream.push(record);
}

impl Tool for Memtrace {
    fn vcpu_is_there(&mut self) {
        self.stream.vcpu_is_there();
    }

    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        for (index, instruction) in block.instructions().enumerate() {
            self.stream.count(&instruction, index);
            let pc = instruction.pc();
            let access = self
                .known
                .entry(pc)
                .or_insert_with(|| State::leak(Access { kinds: [NO_KIND; 2], tool: data, pc }));
            self.places.on_memory(&instruction, [on_access, on_other_access::<true>], access.data());
        }
    }
}
