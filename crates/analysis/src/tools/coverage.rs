//! `coverage`: which code ran at all, as ranges of addresses, and how much of each function.

use super::reduced::Reduced;
use super::{Arguments, Description, Running, SYMBOLS, Tool};
use crate::context::{MergeContext, RunContext, Summary};
use crate::counted::{self, Counted};
use crate::csv::{Csv, cell};
use crate::error::Result;
use crate::symbols::Symbols;
use std::collections::BTreeMap;

pub(super) const DESCRIPTION: Description = Description {
    name: "coverage",
    about: "Code that ran: ranges of addresses, and with symbols how much of each function",
    arguments: &[SYMBOLS[0], SYMBOLS[1]],
    results: &[
        ("coverage.csv", "first address, bytes, instructions, symbol"),
        ("coverage-functions.csv", "address, bytes of the function, bytes and instructions that ran, symbol"),
    ],
};

struct Coverage {
    symbols: Symbols,
}

pub(super) fn make(arguments: &Arguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(Coverage { symbols: arguments.symbols()? }))
}

impl Tool for Coverage {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        Reduced::begin(run, "counts", &[counted::KIND], Vec::new())
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let mut ran: Counted = counted::counted(&merge.parts)?;
        for times in ran.values_mut() {
            *times = 1;
        }
        let mut summary = Summary::default();
        let mut csv = Csv::create(&merge.out, "coverage.csv", "address,bytes,instructions,symbol")?;
        let (mut bytes, mut ranges) = (0, 0_u64);
        for block in counted::blocks(&ran, &self.symbols) {
            let label = cell(&self.symbols.label(block.start));
            csv.line(format_args!("{:#x},{},{},{label}", block.start, block.len_bytes, block.instructions))?;
            (bytes, ranges) = (bytes + block.len_bytes, ranges + 1);
        }
        summary.files.push(csv.finish()?);
        summary.lines.push(format!("{} instructions ran, {bytes} bytes in {ranges} ranges", ran.len()));
        if !self.symbols.is_empty() {
            self.write_functions(merge, &ran, &mut summary)?;
        }
        Ok(summary)
    }
}

impl Coverage {
    fn write_functions(&self, merge: &MergeContext, ran: &Counted, summary: &mut Summary) -> Result<()> {
        let mut functions: BTreeMap<u64, (&str, u64, u64, u64)> = BTreeMap::new();
        for &(pc, len_bytes) in ran.keys() {
            if let Some(found) = self.symbols.find(pc) {
                let (_, _, bytes, instructions) =
                    functions.entry(found.address).or_insert((found.name, found.len_bytes, 0, 0));
                (*bytes, *instructions) = (*bytes + len_bytes, *instructions + 1);
            }
        }
        let header = "address,bytes,bytes_run,instructions_run,symbol";
        let mut csv = Csv::create(&merge.out, "coverage-functions.csv", header)?;
        for (address, (name, len_bytes, bytes, instructions)) in &functions {
            csv.line(format_args!("{address:#x},{len_bytes},{bytes},{instructions},{}", cell(name)))?;
        }
        summary.files.push(csv.finish()?);
        summary.lines.push(format!("{} functions ran", functions.len()));
        Ok(())
    }
}
