//! How often each instruction ran, summed over intervals, and grouped into blocks: for `hot` and
//! `coverage`.
//!
//! ```text
//!   instruction  0x10 0x13 0x15 │ 0x17 0x1c │ 0x30       adjacent and equally often: one block
//!   times          7    7    7  │   3    3  │   3
//! ```
//!
//! QEMU's own translation blocks differ between runs; these blocks do not.

use crate::context::Part;
use crate::error::{Error, Result};
use crate::part_table::PartTable;
use crate::symbols::SymbolTable;
use std::collections::BTreeMap;

/// The name of the plugin's table.
pub(crate) const KIND: &str = "counts";
/// The table's columns: pc, length, times.
pub(crate) const COLUMNS: usize = 3;
/// The longest instruction of x86, in bytes, rounded up.
const INSTRUCTION_BYTES_MAX: u64 = 16;

/// Adjacent instructions that ran equally often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodeBlock {
    /// The address of the first instruction.
    pub start: u64,
    /// The length of the code in bytes.
    pub len_bytes: u64,
    /// The number of instructions in the code.
    pub instructions: u64,
    /// The number of times that each of them ran.
    pub times: u64,
}

impl CodeBlock {
    /// Returns the number of instructions that the block executed: its length in instructions times
    /// how often it ran.
    pub fn executed(&self) -> u64 {
        self.instructions.saturating_mul(self.times)
    }
}

/// An instruction in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CodeSpan {
    /// The address of the instruction.
    pub pc: u64,
    /// The length of the instruction in bytes.
    pub len_bytes: u64,
}

/// How often each instruction ran.
pub(crate) type ExecutionCounts = BTreeMap<CodeSpan, u64>;

/// Sums the counts of all parts.
pub(crate) fn sum_counts(parts: &[Part]) -> Result<ExecutionCounts> {
    let mut counts = ExecutionCounts::new();
    for part in parts {
        let path = part.file(KIND, "part");
        for row in PartTable::read(&path, KIND, COLUMNS)?.rows() {
            let &[pc, len_bytes, times] = row else { continue };
            if len_bytes == 0 || len_bytes > INSTRUCTION_BYTES_MAX {
                let problem = format!("an instruction of {len_bytes} bytes");
                return Err(Error::Damaged { path, place: format!("pc {pc:#x}"), problem });
            }
            let sum = counts.entry(CodeSpan { pc, len_bytes }).or_default();
            *sum = sum.saturating_add(times);
        }
    }
    Ok(counts)
}

/// Groups instructions into blocks, by address. The first instruction of a function begins a block.
pub(crate) fn group_blocks(counts: &ExecutionCounts, symbols: &SymbolTable) -> Vec<CodeBlock> {
    let mut blocks: Vec<CodeBlock> = Vec::new();
    for (&CodeSpan { pc, len_bytes }, &times) in counts {
        let begins_function = symbols.find(pc).is_some_and(|symbol| symbol.address == pc);
        match blocks.last_mut() {
            Some(block)
                if block.start.wrapping_add(block.len_bytes) == pc
                    && block.times == times
                    && !begins_function =>
            {
                block.len_bytes += len_bytes;
                block.instructions += 1;
            }
            _ => blocks.push(CodeBlock { start: pc, len_bytes, instructions: 1, times }),
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_instructions_that_ran_equally_often_are_one_block() {
        let counts = ExecutionCounts::from(
            [
                (0x10, 3, 7),
                (0x13, 2, 7),
                (0x15, 2, 7),
                (0x17, 5, 3),
                (0x1c, 1, 3),
                (0x30, 4, 3),
                (u64::MAX - 1, 2, 1),
            ]
            .map(|(pc, len_bytes, times)| (CodeSpan { pc, len_bytes }, times)),
        );
        let blocks = group_blocks(&counts, &SymbolTable::default());
        let short: Vec<_> =
            blocks.iter().map(|b| (b.start, b.len_bytes, b.instructions, b.times)).collect();
        assert_eq!(
            short,
            [(0x10, 7, 3, 7), (0x17, 6, 2, 3), (0x30, 4, 1, 3), (u64::MAX - 1, 2, 1, 1)]
        );
        let executed: u64 = blocks.iter().map(CodeBlock::executed).sum();
        assert_eq!(executed, counts.values().sum::<u64>());
    }
}
