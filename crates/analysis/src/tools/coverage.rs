//! `coverage`: the code that ran, as address ranges, the covered part of each function, and lcov's
//! tracefile of lines and functions.

use super::table_run::TableRun;
use super::{SYMBOLS, Tool, ToolArguments, ToolDescription, ToolRun};
use crate::code_symbols::{CodeSymbols, GUEST};
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::{Result, file};
use crate::execution_counts::{self, ExecutionCounts, group_blocks, sum_counts};
use crate::lcov;
use crate::result_file::{CsvFile, Hex, LineFile};
use crate::source_lines::SourceLines;
use crate::symbols::{self, SymbolTable};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "coverage",
    about: "Code that ran: address ranges, and with symbols the covered part of each function \
            and, for lcov, of each line",
    arguments: &[SYMBOLS[0], SYMBOLS[1]],
    results: &[
        ("coverage.csv", "first address, bytes, instructions, symbol"),
        (
            "coverage-functions.csv",
            "address, bytes of the function, bytes and instructions that ran, symbol",
        ),
        (
            "coverage.info",
            "for lcov and genhtml: how often each function ran, and each line if the symbols are \
             an ELF file with debug information",
        ),
    ],
};

struct Coverage {
    symbols: CodeSymbols,
    lines: SourceLines,
    /// The path of the symbol file, or what stands for the guest.
    symbols_path: String,
}

pub(super) fn make(arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    let mut tool = Coverage {
        symbols: CodeSymbols::Given(SymbolTable::default()),
        lines: SourceLines::default(),
        symbols_path: String::new(),
    };
    let slide = arguments.slide()?;
    if arguments.text("symbols") == Some(GUEST) {
        tool.symbols = CodeSymbols::Guest;
        tool.symbols_path = "guest".into();
    } else if let Some(path) = arguments.text("symbols") {
        let path = Path::new(path);
        let bytes = symbols::read_file(path)?;
        tool.symbols = CodeSymbols::Given(SymbolTable::parse(path, &bytes, slide)?);
        if symbols::is_elf(&bytes) {
            tool.lines = SourceLines::parse(path, &bytes, slide)?;
        }
        let path = std::path::absolute(path).map_err(file("resolving", path))?;
        tool.symbols_path = path.display().to_string().replace(char::is_control, " ");
    }
    Ok(Box::new(tool))
}

impl Tool for Coverage {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn needs_guest_symbols(&self) -> bool {
        self.symbols.are_the_guests()
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        TableRun::begin(run, "counts", &[execution_counts::KIND], Vec::new())
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let symbols = self.symbols.table(merge);
        let mut counts = sum_counts(&merge.parts)?;
        let mut summary = ToolSummary::default();
        if !symbols.is_empty() {
            self.write_lcov(merge, &counts, &mut summary)?;
        }
        // Blocks are contiguous code that ran, however often.
        for times in counts.values_mut() {
            *times = 1;
        }
        let header = "address,bytes,instructions,symbol";
        let mut csv = CsvFile::create(&merge.out, "coverage.csv", header)?;
        let (mut bytes, mut ranges) = (0, 0_u64);
        for block in group_blocks(&counts, symbols) {
            let label = symbols.label(block.start);
            csv.row((Hex(block.start), block.len_bytes, block.instructions, label))?;
            (bytes, ranges) = (bytes + block.len_bytes, ranges + 1);
        }
        summary.files.push(csv.finish()?);
        summary
            .lines
            .push(format!("{} instructions ran, {bytes} bytes in {ranges} ranges", counts.len()));
        if !symbols.is_empty() {
            write_functions(merge, symbols, &counts, &mut summary)?;
        }
        Ok(summary)
    }
}

/// The covered part of a function.
struct FunctionCoverage<'a> {
    name: &'a str,
    len_bytes: u64,
    bytes_run: u64,
    instructions_run: u64,
}

impl Coverage {
    fn write_lcov(
        &self,
        merge: &MergeContext,
        counts: &ExecutionCounts,
        summary: &mut ToolSummary,
    ) -> Result<()> {
        let mut out = LineFile::create(&merge.out, "coverage.info")?;
        let mut line = |line: std::fmt::Arguments<'_>| out.line(line);
        let symbols = self.symbols.table(merge);
        let totals = lcov::write(counts, symbols, &self.lines, &self.symbols_path, &mut line)?;
        summary.files.push(out.finish()?);
        let lcov::CoverageTotals { files, lines, lines_run, functions, functions_run } = totals;
        summary.lines.push(if self.lines.is_empty() {
            format!(
                "{functions_run} of {functions} functions entered; no lines: the symbols have no \
                 debug information"
            )
        } else {
            format!(
                "{lines_run} of {lines} lines and {functions_run} of {functions} functions in \
                 {files} source files"
            )
        });
        Ok(())
    }
}

fn write_functions(
    merge: &MergeContext,
    symbols: &SymbolTable,
    counts: &ExecutionCounts,
    summary: &mut ToolSummary,
) -> Result<()> {
    let mut functions: BTreeMap<u64, FunctionCoverage<'_>> = BTreeMap::new();
    for instruction in counts.keys() {
        if let Some(symbol) = symbols.find(instruction.pc) {
            let function = functions.entry(symbol.address).or_insert_with(|| FunctionCoverage {
                name: symbol.name,
                len_bytes: symbol.len_bytes,
                bytes_run: 0,
                instructions_run: 0,
            });
            function.bytes_run += instruction.len_bytes;
            function.instructions_run += 1;
        }
    }
    let header = "address,bytes,bytes_run,instructions_run,symbol";
    let mut csv = CsvFile::create(&merge.out, "coverage-functions.csv", header)?;
    for (&address, function) in &functions {
        let FunctionCoverage { name, len_bytes, bytes_run, instructions_run } = *function;
        csv.row((Hex(address), len_bytes, bytes_run, instructions_run, name))?;
    }
    summary.files.push(csv.finish()?);
    summary.lines.push(format!("{} functions ran", functions.len()));
    Ok(())
}
