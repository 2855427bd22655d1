//! `cache`: a hierarchy of data caches, each set-associative with LRU, filled by physical address.
//!
//! ```text
//!   access ──▶ level 1 ── miss ──▶ level 2 ── miss ──▶ level 3 ── miss ──▶ memory          a miss fills all levels on its way
//!   set of level 1  │ line used last │ ... │ line used longest ago │                      number of ways lines
//! ```
//!
//! Caches keep what they hold at a cut; only the counts begin again. So a run that begins before its first interval (warm-up)
//! knows, nearly, what was in them.
//!
//! Row: level │ reads │ writes │ reads that missed │ writes that missed. Instruction fetches, prefetching and devices are left out.

use super::{Setup, Tool};
use crate::api::{self, Accesses, Block, MemoryInfo};
use crate::arguments::number;
use crate::cut::{Reduced, Reducer};
use crate::physical::{DEVICE, Physical};
use crate::state::State;
use std::ffi::{c_uint, c_void};

/// No line has this number.
const EMPTY: u64 = u64::MAX;
/// Most bytes of a level, lines of a set, levels.
const LEVEL_BYTES_MAX: u64 = 1 << 30;
const WAYS_MAX: u64 = 64;
const LEVELS_MAX: usize = 4;

/// One level.
struct Level {
    /// Line numbers, set by set, the one used last first.
    lines: Vec<u64>,
    ways: usize,
    sets: u64,
    /// Reads and writes, then those that missed.
    counts: [u64; 4],
}

impl Level {
    /// Of `BYTES:WAYS`.
    fn new(text: &str, line_bytes: u64) -> Result<Self, String> {
        let wrong = || format!("cache level {text:?} is not BYTES:WAYS with a whole number of sets");
        let (bytes, ways) = text.split_once(':').ok_or_else(wrong)?;
        let (bytes, ways) = (number(bytes).ok_or_else(wrong)?, number(ways).ok_or_else(wrong)?);
        let whole = (1..=WAYS_MAX).contains(&ways) && (1..=LEVEL_BYTES_MAX).contains(&bytes);
        if !whole || bytes % (ways * line_bytes) != 0 {
            return Err(wrong());
        }
        let lines = (bytes / line_bytes) as usize;
        Ok(Self { lines: vec![EMPTY; lines], ways: ways as usize, sets: lines as u64 / ways, counts: [0; 4] })
    }

    /// Whether it had the line; it has it afterwards.
    #[inline]
    fn access(&mut self, line: u64, write: usize) -> bool {
        let set = (line % self.sets) as usize * self.ways;
        let set = &mut self.lines[set..set + self.ways];
        self.counts[write] += 1;
        let found = set.iter().position(|held| *held == line);
        if found.is_none() {
            self.counts[2 + write] += 1;
        }
        set[..=found.unwrap_or(self.ways - 1)].rotate_right(1);
        set[0] = line;
        found.is_some()
    }
}

/// The hierarchy.
pub struct Table {
    physical: Physical,
    levels: Vec<Level>,
    line_shift: u32,
}

impl Table {
    fn access(&mut self, at: u64, size: u64, write: usize) {
        let (first, last) = (at >> self.line_shift, (at + size.max(1) - 1) >> self.line_shift);
        for line in first..=last {
            for level in &mut self.levels {
                if level.access(line, write) {
                    break;
                }
            }
        }
    }
}

impl Reducer for Table {
    const KIND: &'static str = "cache";
    const COLUMNS: usize = 5;

    fn take(&mut self) -> Vec<u64> {
        let mut rows = Vec::new();
        for (number, level) in self.levels.iter_mut().enumerate() {
            rows.push(number as u64 + 1);
            rows.extend(std::mem::take(&mut level.counts));
        }
        rows
    }
}

/// The tool.
pub type Cache = Reduced<Table>;

impl Cache {
    /// Takes `ram`, `parts`, `cuts`, `line` (bytes) and `levels` (`BYTES:WAYS/BYTES:WAYS...`).
    pub fn of(setup: &mut Setup) -> Result<Self, String> {
        let line = setup.arguments.number("line")?;
        if !line.is_power_of_two() || !(8..=4096).contains(&line) {
            return Err(format!("argument line={line} is no power of two from 8 to 4096"));
        }
        let levels: Result<Vec<_>, _> =
            setup.arguments.text("levels")?.split('/').map(|level| Level::new(level, line)).collect();
        let levels = levels?;
        if levels.len() > LEVELS_MAX {
            return Err(format!("more than {LEVELS_MAX} cache levels"));
        }
        let physical = setup.physical(false)?;
        setup.reduced(Table { physical, levels, line_shift: line.trailing_zeros() })
    }
}

extern "C" fn on_access(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let table = &mut unsafe { State::<Cache>::of(data) }.table;
    let at = table.physical.of_access(info, vaddr);
    if at & DEVICE == 0 {
        table.access(at, api::size_bytes(info).into(), usize::from(api::is_store(info)));
    }
}

impl Tool for Cache {
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.watch_cuts(block, data);
        for instruction in block.instructions() {
            instruction.on_memory(Accesses::All, on_access, data);
        }
    }

    fn exit(&mut self) {
        self.write_ended();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(levels: &[&str]) -> Table {
        let levels = levels.iter().map(|level| Level::new(level, 64).unwrap()).collect();
        Table { physical: Physical::new("", None).unwrap(), levels, line_shift: 6 }
    }

    #[test]
    fn the_line_used_longest_ago_goes() {
        // One set of two lines.
        let mut table = table(&["128:2"]);
        for line in [0, 1, 0, 2, 0, 1] {
            table.access(line * 64, 8, 0);
        }
        // 0 and 1 are new; 0 is there; 2 takes the place of 1; 0 is there; 1 is gone.
        assert_eq!(table.take(), [1, 6, 0, 4, 0]);
        table.access(0, 1, 1);
        assert_eq!(table.take(), [1, 0, 1, 0, 0], "counts begin again, lines stay");
    }

    #[test]
    fn a_miss_asks_the_next_level_and_a_wide_access_takes_two_lines() {
        let mut table = table(&["64:1", "256:4"]);
        table.access(60, 8, 1);
        table.access(0, 1, 0);
        table.access(0, 1, 0);
        assert_eq!(table.take(), [1, 2, 2, 1, 2, 2, 1, 2, 0, 2]);
    }

    #[test]
    fn impossible_levels_are_refused() {
        for level in ["", "64", "0:1", "100:1", "64:0", "64:65", "0x100000000000:1", "64:1:1"] {
            assert!(Level::new(level, 64).is_err(), "{level}");
        }
    }
}
