//! `hot`: the blocks and functions that execute most instructions, and the most used pages.

mod functions;

use super::table_run::TableRun;
use super::{SYMBOLS, Tool, ToolArguments, ToolDescription, ToolRun};
use crate::code_symbols::CodeSymbols;
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::Result;
use crate::execution_counts::{self, CodeBlock, group_blocks, sum_counts};
use crate::part_table::PartTable;
use crate::result_file::{CsvFile, Hex};
use crate::symbols::SymbolTable;
use functions::HotFunctions;
use std::cmp::Reverse;
use std::collections::BTreeMap;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "hot",
    about: "Blocks and functions that execute most instructions, pages with most reads and writes",
    arguments: &[
        SYMBOLS[0],
        SYMBOLS[1],
        ("top", "lines of each result at most, the hottest first (default 10000)"),
    ],
    results: &[
        (
            "hot-blocks.csv",
            "address, bytes, instructions, times it ran, instructions executed, symbol",
        ),
        ("hot-functions.csv", "address, instructions executed, symbol"),
        (
            "hot-functions-by-interval.csv",
            "interval, first instruction, instructions of all code, address, instructions \
             executed, symbol; of the 32 hottest functions",
        ),
        ("hot-pages.csv", "guest-physical address, reads, writes"),
    ],
};

const PAGES: &str = "pages";
const TOP_DEFAULT: usize = 10_000;
/// Lines of each result in the summary.
const SUMMARY_LINES: usize = 5;

struct Hot {
    symbols: CodeSymbols,
    /// The most lines of a result file.
    top: usize,
}

pub(super) fn make(arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    let top = arguments.number("top", 1, 1 << 24)?.map_or(TOP_DEFAULT, |top| top as usize);
    Ok(Box::new(Hot { symbols: arguments.symbols()?, top }))
}

impl Tool for Hot {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn needs_guest_symbols(&self) -> bool {
        self.symbols.are_the_guests()
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        TableRun::begin(
            run,
            "counts+pages",
            &[execution_counts::KIND, PAGES],
            vec![("ram", run.ram.argument())],
        )
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let symbols = self.symbols.table(merge);
        let counts = sum_counts(&merge.parts)?;
        let blocks = group_blocks(&counts, symbols);
        let mut summary = ToolSummary::default();
        self.write_blocks(merge, symbols, &blocks, &mut summary)?;
        if !symbols.is_empty() {
            let functions = HotFunctions::of(&counts, symbols);
            summary.files.push(functions.write(merge, self.top)?);
            summary.files.push(functions.write_by_interval(merge, self.top)?);
        }
        self.write_pages(merge, &mut summary)?;
        Ok(summary)
    }
}

impl Hot {
    fn write_blocks(
        &self,
        merge: &MergeContext,
        symbols: &SymbolTable,
        blocks: &[CodeBlock],
        summary: &mut ToolSummary,
    ) -> Result<()> {
        let mut hottest: Vec<&CodeBlock> = blocks.iter().collect();
        hottest.sort_unstable_by_key(|block| (Reverse(block.executed()), block.start));
        let total: u64 = blocks.iter().map(CodeBlock::executed).fold(0, u64::saturating_add);
        let header = "address,bytes,instructions,times,executed,symbol";
        let mut csv = CsvFile::create(&merge.out, "hot-blocks.csv", header)?;
        for (rank, block) in hottest.iter().take(self.top).enumerate() {
            let &&CodeBlock { start, len_bytes, instructions, times } = block;
            let (executed, label) = (block.executed(), symbols.label(start));
            csv.row((Hex(start), len_bytes, instructions, times, executed, &label))?;
            if rank < SUMMARY_LINES {
                let percent = 100.0 * executed as f64 / total.max(1) as f64;
                summary
                    .lines
                    .push(format!("{percent:5.1} % of instructions: block {start:#x} {label}"));
            }
        }
        summary.files.push(csv.finish()?);
        Ok(())
    }

    fn write_pages(&self, merge: &MergeContext, summary: &mut ToolSummary) -> Result<()> {
        let mut pages: BTreeMap<u64, [u64; 2]> = BTreeMap::new();
        for part in &merge.parts {
            for row in PartTable::read(&part.file(PAGES, "part"), PAGES, 3)?.rows() {
                let &[page, reads, writes] = row else { continue };
                let sums = pages.entry(page).or_default();
                *sums = [sums[0].saturating_add(reads), sums[1].saturating_add(writes)];
            }
        }
        let mut hottest: Vec<_> = pages.into_iter().collect();
        hottest.sort_unstable_by_key(|&(page, [reads, writes])| {
            (Reverse(reads.saturating_add(writes)), page)
        });
        let mut csv = CsvFile::create(&merge.out, "hot-pages.csv", "page,reads,writes")?;
        for (rank, (page, [reads, writes])) in hottest.into_iter().take(self.top).enumerate() {
            csv.row((Hex(page), reads, writes))?;
            if rank < SUMMARY_LINES {
                summary.lines.push(format!("page {page:#x}: {reads} reads, {writes} writes"));
            }
        }
        summary.files.push(csv.finish()?);
        Ok(())
    }
}
