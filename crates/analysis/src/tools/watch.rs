//! `watch`: who wrote to a range of addresses, when, and what.

use super::events;
use super::{Arguments, Description, Running, SYMBOLS, Tool};
use crate::context::{MergeContext, RunContext, Summary};
use crate::csv::{Csv, cell};
use crate::error::Result;
use crate::part::Rows;
use crate::symbols::Symbols;
use keyframe_plugins::{DEVICE, UNKNOWN};
use std::collections::BTreeMap;

pub(super) const DESCRIPTION: Description = Description {
    name: "watch",
    about: "Every write to a range of addresses: instruction, who, what",
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
/// Of an event.
const WORDS: usize = 6;

struct Watch {
    start: u64,
    len_bytes: u64,
    space: &'static str,
    symbols: Symbols,
}

pub(super) fn make(arguments: &Arguments) -> Result<Box<dyn Tool>> {
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

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        let arguments = vec![
            ("start", self.start.to_string()),
            ("len", self.len_bytes.to_string()),
            ("space", self.space.to_owned()),
        ];
        events::begin(run, KIND, WORDS, arguments)
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let mut csv =
            Csv::create(&merge.out, "watch.csv", "icount,pc,vaddr,paddr,bytes,value,symbol")?;
        let mut writers: BTreeMap<u64, u64> = BTreeMap::new();
        for part in &merge.parts {
            for row in Rows::read(&part.file(KIND, "part"), KIND, WORDS)?.iter() {
                let &[icount, pc, vaddr, paddr, bytes, value] = row else { continue };
                *writers.entry(pc).or_default() += 1;
                let label = cell(&self.symbols.label(pc));
                let known = if paddr == UNKNOWN {
                    String::new()
                } else {
                    format!("{:#x}", paddr & !DEVICE)
                };
                csv.line(format_args!(
                    "{icount},{pc:#x},{vaddr:#x},{known},{bytes},{value:#x},{label}"
                ))?;
            }
        }
        let mut most: Vec<_> = writers.into_iter().collect();
        most.sort_unstable_by_key(|&(pc, times)| (std::cmp::Reverse(times), pc));
        let all: u64 = most.iter().map(|(_, times)| times).sum();
        let mut lines = vec![format!("{all} writes by {} instructions", most.len())];
        let shown = most.iter().take(10);
        lines.extend(
            shown.map(|(pc, times)| format!("{times} by {pc:#x} {}", self.symbols.label(*pc))),
        );
        Ok(Summary { lines, files: vec![csv.finish()?] })
    }
}
