//! `coverage`: which code ran at all, as ranges of addresses, how much of each function, and lcov's
//! tracefile of lines and functions.

use super::reduced::Reduced;
use super::{Arguments, Description, Running, SYMBOLS, Tool};
use crate::context::{MergeContext, RunContext, Summary};
use crate::counted::{self, Counted};
use crate::csv::{Csv, Lined, cell};
use crate::error::{Result, file};
use crate::lcov;
use crate::lines::Lines;
use crate::symbols::{self, Symbols};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const DESCRIPTION: Description = Description {
    name: "coverage",
    about: "Code that ran: ranges of addresses, and with symbols how much of each function, and which lines (lcov)",
    arguments: &[SYMBOLS[0], SYMBOLS[1]],
    results: &[
        ("coverage.csv", "first address, bytes, instructions, symbol"),
        (
            "coverage-functions.csv",
            "address, bytes of the function, bytes and instructions that ran, symbol",
        ),
        (
            "coverage.info",
            "for lcov and genhtml: times that each function ran, and each line where the symbols are an ELF file with debug information",
        ),
    ],
};

struct Coverage {
    symbols: Symbols,
    lines: Lines,
    /// The file of symbols.
    path: String,
}

pub(super) fn make(arguments: &Arguments) -> Result<Box<dyn Tool>> {
    let mut tool =
        Coverage { symbols: Symbols::default(), lines: Lines::default(), path: String::new() };
    if let Some(path) = arguments.text("symbols") {
        let (slide, path) = (arguments.slide()?, Path::new(path));
        let bytes = symbols::contents(path)?;
        tool.symbols = Symbols::parse(path, &bytes, slide)?;
        if symbols::is_elf(&bytes) {
            tool.lines = Lines::parse(path, &bytes, slide)?;
        }
        let path = std::path::absolute(path).map_err(file("resolving", path))?;
        tool.path = path.display().to_string().replace(char::is_control, " ");
    }
    Ok(Box::new(tool))
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
        let mut summary = Summary::default();
        if !self.symbols.is_empty() {
            self.write_lcov(merge, &ran, &mut summary)?;
        }
        for times in ran.values_mut() {
            *times = 1;
        }
        let mut csv = Csv::create(&merge.out, "coverage.csv", "address,bytes,instructions,symbol")?;
        let (mut bytes, mut ranges) = (0, 0_u64);
        for block in counted::blocks(&ran, &self.symbols) {
            let label = cell(&self.symbols.label(block.start));
            csv.line(format_args!(
                "{:#x},{},{},{label}",
                block.start, block.len_bytes, block.instructions
            ))?;
            (bytes, ranges) = (bytes + block.len_bytes, ranges + 1);
        }
        summary.files.push(csv.finish()?);
        summary
            .lines
            .push(format!("{} instructions ran, {bytes} bytes in {ranges} ranges", ran.len()));
        if !self.symbols.is_empty() {
            self.write_functions(merge, &ran, &mut summary)?;
        }
        Ok(summary)
    }
}

impl Coverage {
    fn write_lcov(&self, merge: &MergeContext, ran: &Counted, summary: &mut Summary) -> Result<()> {
        let mut out = Lined::create(&merge.out, "coverage.info")?;
        let mut line = |line: std::fmt::Arguments<'_>| out.line(line);
        let sums = lcov::write(ran, &self.symbols, &self.lines, &self.path, &mut line)?;
        summary.files.push(out.finish()?);
        let lcov::Sums { files, lines, lines_run, functions, functions_run } = sums;
        summary.lines.push(if self.lines.is_empty() {
            format!("{functions_run} of {functions} functions entered; no lines: the symbols have no debug information")
        } else {
            format!("{lines_run} of {lines} lines and {functions_run} of {functions} functions in {files} source files")
        });
        Ok(())
    }

    fn write_functions(
        &self,
        merge: &MergeContext,
        ran: &Counted,
        summary: &mut Summary,
    ) -> Result<()> {
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
            csv.line(format_args!(
                "{address:#x},{len_bytes},{bytes},{instructions},{}",
                cell(name)
            ))?;
        }
        summary.files.push(csv.finish()?);
        summary.lines.push(format!("{} functions ran", functions.len()));
        Ok(())
    }
}
