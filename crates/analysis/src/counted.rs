//! How often instructions ran, put together over intervals, as blocks and by function: for `hot`
//! and `coverage`.
//!
//! ```text
//!   instruction  0x10 0x13 0x15 │ 0x17 0x1c │ 0x30       next to each other and run equally often: one block
//!   times          7    7    7  │   3    3  │   3
//! ```
//!
//! QEMU's own blocks differ between runs, these do not.

use crate::context::Part;
use crate::error::{Error, Result};
use crate::part::Rows;
use crate::symbols::Symbols;
use std::collections::BTreeMap;

/// Of the plugin's table.
pub(crate) const KIND: &str = "counts";
/// pc, length, times.
pub(crate) const COLUMNS: usize = 3;

/// Instructions that lie next to each other and ran equally often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub start: u64,
    pub len_bytes: u64,
    pub instructions: u64,
    pub times: u64,
}

impl Block {
    /// Instructions that were executed in it.
    pub fn executed(&self) -> u64 {
        self.instructions.saturating_mul(self.times)
    }
}

/// Times by pc and length.
pub(crate) type Counted = BTreeMap<(u64, u64), u64>;

/// Adds up the parts.
pub(crate) fn counted(parts: &[Part]) -> Result<Counted> {
    let mut all = Counted::new();
    for part in parts {
        let path = part.file(KIND, "part");
        for row in Rows::read(&path, KIND, COLUMNS)?.iter() {
            let &[pc, len, times] = row else { continue };
            if len == 0 || len > 16 {
                let problem = format!("an instruction of {len} bytes");
                return Err(Error::Damaged { path, place: format!("pc {pc:#x}"), problem });
            }
            let sum = all.entry((pc, len)).or_default();
            *sum = sum.saturating_add(times);
        }
    }
    Ok(all)
}

/// The blocks, by address. A function's first instruction begins one.
pub(crate) fn blocks(counted: &Counted, symbols: &Symbols) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for (&(pc, len_bytes), &times) in counted {
        let begins = symbols.find(pc).is_some_and(|found| found.address == pc);
        match blocks.last_mut() {
            Some(block)
                if block.start.wrapping_add(block.len_bytes) == pc
                    && block.times == times
                    && !begins =>
            {
                block.len_bytes += len_bytes;
                block.instructions += 1;
            }
            _ => blocks.push(Block { start: pc, len_bytes, instructions: 1, times }),
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_ran_equally_often_are_one_block() {
        let counted = Counted::from([
            ((0x10, 3), 7),
            ((0x13, 2), 7),
            ((0x15, 2), 7),
            ((0x17, 5), 3),
            ((0x1c, 1), 3),
            ((0x30, 4), 3),
            ((u64::MAX - 1, 2), 1),
        ]);
        let blocks = blocks(&counted, &Symbols::default());
        let short: Vec<_> =
            blocks.iter().map(|b| (b.start, b.len_bytes, b.instructions, b.times)).collect();
        assert_eq!(
            short,
            [(0x10, 7, 3, 7), (0x17, 6, 2, 3), (0x30, 4, 1, 3), (u64::MAX - 1, 2, 1, 1)]
        );
        let executed: u64 = blocks.iter().map(Block::executed).sum();
        assert_eq!(executed, counted.values().sum::<u64>());
    }
}
