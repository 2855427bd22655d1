//! `counts`: how often each instruction ran, for `hot` and `coverage`. Translated code increments the
//! counters without a call.
//!
//! An instruction is named by its virtual address and length: translation blocks differ between
//! runs, these do not. Programs of different processes at the same address share their counts.
//!
//! Row: pc │ length │ times.

use super::{Setup, Tool, fail};
use crate::api::{Block, Counter, SlotCounters};
use crate::cut::{PartTable, TableTool};
use crate::slots::Slots;
use std::ffi::c_void;

/// The table.
pub struct Table {
    slots: Slots<(u64, u32)>,
    counters: SlotCounters,
    /// By slot: the counter, and its value at the last cut.
    seen: Vec<(Counter, u64)>,
}

impl PartTable for Table {
    const KIND: &'static str = "counts";
    const COLUMNS: usize = 3;

    fn take(&mut self) -> Vec<u64> {
        let mut rows: Vec<[u64; 3]> = Vec::new();
        for ((pc, len), slot) in self.slots.iter() {
            let (counter, before) = &mut self.seen[slot as usize];
            let now = counter.get();
            if now != *before {
                rows.push([pc, u64::from(len), now - *before]);
            }
            *before = now;
        }
        rows.sort_unstable();
        rows.into_flattened()
    }
}

/// The tool.
pub struct Counts(TableTool<Table>);

impl Counts {
    /// Arguments: `parts`, `cuts`.
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let table =
            Table { slots: Slots::new(), counters: SlotCounters::default(), seen: Vec::new() };
        Ok(Self(setup.reduced(table)?))
    }
}

impl Tool for Counts {
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.0.watch_cuts(block, data);
        let table = &mut self.0.table;
        for instruction in block.instructions() {
            let Ok((slot, new)) =
                table.slots.of((instruction.pc(), instruction.len_bytes() as u32))
            else {
                fail("the guest has executed too many different instructions to count them");
            };
            if new {
                table.seen.push((table.counters.counter(slot as usize), 0));
            }
            instruction.count(table.seen[slot as usize].0);
        }
    }

    fn exit(&mut self) {
        self.0.write_ended();
    }
}
