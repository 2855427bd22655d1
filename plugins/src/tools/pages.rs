//! `pages`: reads and writes of each page of physical memory, for `working-set` and `hot`.
//!
//! Row: guest-physical address of the page │ reads │ writes. Accesses to devices do not count.

use super::{Setup, Tool};
use crate::api::{self, Block, MemoryInfo};
use crate::cut::{PartTable, TableTool};
use crate::physical::DEVICE;
use crate::state::State;
use crate::translations::AccessResolver;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};

/// Pages that are counted in an array, 64 GiB. The others are in a hash map.
const DENSE_MAX: usize = 1 << 24;

/// The table.
pub struct Table {
    places: AccessResolver,
    /// Reads and writes by page number; grows with the highest page.
    dense: Vec<[u64; 2]>,
    sparse: HashMap<u64, [u64; 2]>,
}

impl Table {
    #[inline]
    fn count(&mut self, page: u64, write: usize) {
        match self.dense.get_mut(page as usize) {
            Some(counts) => counts[write] += 1,
            None => self.grow(page)[write] += 1,
        }
    }

    #[cold]
    fn grow(&mut self, page: u64) -> &mut [u64; 2] {
        let index = page as usize;
        if index >= DENSE_MAX {
            return self.sparse.entry(page).or_default();
        }
        self.dense.resize((index + 1).next_power_of_two(), [0; 2]);
        &mut self.dense[index]
    }
}

impl PartTable for Table {
    const KIND: &'static str = "pages";
    const COLUMNS: usize = 3;

    fn take(&mut self) -> Vec<u64> {
        let dense = self.dense.iter().enumerate().map(|(page, &counts)| (page as u64, counts));
        let mut rows: Vec<[u64; 3]> = dense
            .chain(self.sparse.drain())
            .filter(|(_, counts)| *counts != [0; 2])
            .map(|(page, [reads, writes])| [page << 12, reads, writes])
            .collect();
        self.dense.fill([0; 2]);
        rows.sort_unstable();
        rows.into_flattened()
    }
}

/// The tool.
pub type Pages = TableTool<Table>;

impl Pages {
    /// Arguments: `ram`, `parts`, `cuts`.
    pub fn of(setup: &mut Setup) -> Result<Self, String> {
        let places = AccessResolver::new(setup.physical(false)?, setup.board);
        setup.reduced(Table { places, dense: Vec::new(), sparse: HashMap::new() })
    }
}

/// `REMAPS`: for an instruction that may remap ([`AccessResolver::on_memory`]).
extern "C" fn on_access<const REMAPS: bool>(
    _vcpu: c_uint,
    info: MemoryInfo,
    vaddr: u64,
    data: *mut c_void,
) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let table = &mut unsafe { State::<Pages>::of(data) }.table;
    let store = api::is_store(info);
    let at = table.places.of_access::<REMAPS>(info, vaddr, store);
    if at & DEVICE == 0 {
        table.count(at >> 12, usize::from(store));
    }
}

impl Tool for Pages {
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.watch_cuts(block, data);
        for instruction in block.instructions() {
            self.table.places.on_memory(
                &instruction,
                [on_access::<false>, on_access::<true>],
                data,
            );
        }
    }

    fn exit(&mut self) {
        self.write_ended();
    }
}
