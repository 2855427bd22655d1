//! `watch`: all writes to a range of addresses: when, by which instruction, which value.

use super::event_run;
use super::{SYMBOLS, Tool, ToolArguments, ToolDescription, ToolRun};
use crate::code_symbols::CodeSymbols;
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::Result;
use crate::part_table::PartTable;
use crate::result_file::{CsvFile, Hex};
use keyframe_plugins::{DEVICE, UNKNOWN};
use std::cmp::Reverse;
use std::collections::BTreeMap;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "watch",
    about: "Every write to a range of addresses: instruction count, instruction, value",
    arguments: &[
        ("addr", "first address of the range"),
        ("len", "its bytes (default 8)"),
        ("space", "virtual or physical (default virtual)"),
        SYMBOLS[0],
        SYMBOLS[1],
    ],
    results: &[(
        "watch.csv",
        "instruction, pc, virtual and physical address, bytes, value, symbol",
    )],
};

const KIND: &str = "watch";
/// Words of an event.
const WORDS: usize = 6;
/// Writing instructions in the summary.
const SUMMARY_LINES: usize = 10;

struct Watch {
    start: u64,
    len_bytes: u64,
    space: &'static str,
    symbols: CodeSymbols,
}

pub(super) fn make(arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    let start = arguments.number("addr", 0, u64::MAX)?;
    let start = start.ok_or_else(|| arguments.missing("addr", "the first address to watch"))?;
    let len_bytes = arguments.number("len", 1, 1 << 40)?.unwrap_or(8);
    let space = match arguments.text("space") {
        None | Some("virtual") => "virtual",
        Some("physical") => "physical",
        Some(_) => return Err(arguments.wrong("space", "neither virtual nor physical".into())),
    };
    Ok(Box::new(Watch { start, len_bytes, space, symbols: arguments.symbols()? }))
}

impl Tool for Watch {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn reads_ram(&self) -> bool {
        true
    }

    fn needs_guest_symbols(&self) -> bool {
        self.symbols.are_the_guests()
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let arguments = vec![
            ("start", self.start.to_string()),
            ("len", self.len_bytes.to_string()),
            ("space", self.space.to_owned()),
        ];
        event_run::begin(run, KIND, WORDS, arguments)
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let symbols = self.symbols.table(merge);
        let header = "icount,pc,vaddr,paddr,bytes,value,symbol";
        let mut csv = CsvFile::create(&merge.out, "watch.csv", header)?;
        let mut writers: BTreeMap<u64, u64> = BTreeMap::new();
        for part in &merge.parts {
            for row in PartTable::read(&part.file(KIND, "part"), KIND, WORDS)?.rows() {
                let &[icount, pc, vaddr, paddr, bytes, value] = row else { continue };
                *writers.entry(pc).or_default() += 1;
                let paddr = (paddr != UNKNOWN).then_some(Hex(paddr & !DEVICE));
                let label = symbols.label(pc);
                csv.row((icount, Hex(pc), Hex(vaddr), paddr, bytes, Hex(value), label))?;
            }
        }
        let mut most: Vec<_> = writers.into_iter().collect();
        most.sort_unstable_by_key(|&(pc, times)| (Reverse(times), pc));
        let total: u64 = most.iter().map(|(_, times)| times).sum();
        let mut lines = vec![format!("{total} writes by {} instructions", most.len())];
        let shown = most.iter().take(SUMMARY_LINES);
        lines.extend(shown.map(|(pc, times)| format!("{times} by {pc:#x} {}", symbols.label(*pc))));
        Ok(ToolSummary { lines, files: vec![csv.finish()?] })
    }
}
