//! `cache`: a hierarchy of data caches, each set-associative with LRU, indexed by physical address,
//! whose contents go on from one interval to the next ([`exact_cache`](crate::exact_cache)).
//!
//! Part: for each level reads │ writes │ read misses │ write misses, then the log, each one word.

use super::{Setup, Tool, fail};
use crate::access_kinds::AccessKinds;
use crate::api::{Block, MemoryInfo};
use crate::cut::{PartTable, TableTool};
use crate::exact_cache::{CacheRecorder, LruSets};
use crate::physical::DEVICE;
use crate::state::State;
use crate::translations::{AccessResolver, place_of_read};
use std::ffi::{c_uint, c_void};

/// The caches.
pub struct Table {
    kinds: AccessKinds,
    places: AccessResolver,
    line_shift: u32,
    recorder: CacheRecorder,
    /// The number of first intervals that do not count: after them nothing is known.
    skipped: u64,
}

impl Table {
    #[inline]
    fn access(&mut self, at: u64, size_bytes: u64, is_write: bool) {
        let (first, last) = (at >> self.line_shift, (at + size_bytes - 1) >> self.line_shift);
        if first != last || !self.recorder.access_most_recent(first, is_write) {
            self.access_lines(first, last, is_write);
        }
    }

    #[inline(never)]
    fn access_lines(&mut self, mut line: u64, last: u64, is_write: bool) {
        loop {
            if self.recorder.access(line, is_write).is_err() {
                log_is_full();
            }
            if line == last {
                break;
            }
            line += 1;
        }
    }
}

#[cold]
fn log_is_full() {
    fail(
        "the interval has too many accesses whose outcome depends on the caches' earlier contents; \
         simulate smaller caches or shorter intervals, or bounds (--tool-arg warmup=N)",
    );
}

impl PartTable for Table {
    const KIND: &'static str = "cachelog";
    const COLUMNS: usize = 1;

    fn take(&mut self) -> Vec<u64> {
        if self.skipped > 0 {
            self.skipped -= 1;
            self.recorder.clear();
        }
        self.recorder.end_interval()
    }
}

/// The tool.
pub type Cache = TableTool<Table>;

/// The argument `line`: the size of a line in bytes.
pub fn line_bytes(setup: &mut Setup) -> Result<u64, String> {
    let line = setup.arguments.number("line")?;
    if !line.is_power_of_two() || !(8..=4096).contains(&line) {
        return Err(format!("argument line={line} is not a power of two from 8 to 4096"));
    }
    Ok(line)
}

impl Cache {
    /// Arguments: `ram`, `parts`, `cuts`, `line` (bytes), `levels` (`BYTES:WAYS/BYTES:WAYS...`) and
    /// `skip` (the number of first intervals that do not count).
    pub fn of(setup: &mut Setup) -> Result<Self, String> {
        let line = line_bytes(setup)?;
        let mut further = LruSets::of_levels(&setup.arguments.text("levels")?, line)?;
        let first = further.remove(0);
        let skipped = setup.arguments.number("skip")?;
        let places = AccessResolver::new(setup.physical(false)?, setup.board);
        setup.reduced(Table {
            kinds: AccessKinds::new(),
            places,
            line_shift: line.trailing_zeros(),
            recorder: CacheRecorder::new(first, further),
            skipped,
        })
    }
}

/// For an instruction that does not remap ([`AccessResolver::on_memory`]): the fast path of nearly
/// all accesses, without a call of QEMU.
extern "C" fn on_access(vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let table = &mut unsafe { State::<Cache>::of(data) }.table;
    if let Some(kind) = table.kinds.known(info)
        && let Some(at) = table.places.known_target(vaddr, place_of_read(vaddr) | kind.store)
    {
        table.access(at, 1 << kind.size_log2, kind.is_store());
        return;
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
    let table = &mut unsafe { State::<Cache>::of(data) }.table;
    let kind = table.kinds.of(info);
    let at = table.places.of_access::<REMAPS>(info, vaddr, kind.is_store());
    if at & DEVICE == 0 {
        table.access(at, 1 << kind.size_log2, kind.is_store());
    }
}

impl Tool for Cache {
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.watch_cuts(block, data);
        for instruction in block.instructions() {
            let callbacks = [on_access, on_other_access::<true>];
            self.table.places.on_memory(&instruction, callbacks, data);
        }
    }

    fn exit(&mut self) {
        self.write_ended();
    }
}
