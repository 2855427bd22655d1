//! `hot`: where the guest spends its instructions, and which pages it uses most.

use super::reduced::Reduced;
use super::{Arguments, Description, Running, SYMBOLS, Tool};
use crate::context::{MergeContext, RunContext, Summary};
use crate::counted::{self, Block};
use crate::csv::{Csv, cell};
use crate::error::Result;
use crate::part::Rows;
use crate::symbols::Symbols;
use std::collections::BTreeMap;

pub(super) const DESCRIPTION: Description = Description {
    name: "hot",
    about: "Blocks and functions that execute most instructions, pages that are read and written most",
    arguments: &[
        SYMBOLS[0],
        SYMBOLS[1],
        ("top", "lines of each result at most, those with most first (default 10000)"),
    ],
    results: &[
        (
            "hot-blocks.csv",
            "address, bytes, instructions, times it ran, instructions executed, symbol",
        ),
        ("hot-functions.csv", "address, instructions executed, symbol"),
        ("hot-pages.csv", "guest-physical address, reads, writes"),
    ],
};

const PAGES: &str = "pages";
const TOP_DEFAULT: usize = 10_000;

struct Hot {
    symbols: Symbols,
    top: usize,
}

pub(super) fn make(arguments: &Arguments) -> Result<Box<dyn Tool>> {
    let top = arguments.number("top", 1, 1 << 24)?.map_or(TOP_DEFAULT, |top| top as usize);
    Ok(Box::new(Hot { symbols: arguments.symbols()?, top }))
}

impl Tool for Hot {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        Reduced::begin(
            run,
            "counts+pages",
            &[counted::KIND, PAGES],
            vec![("ram", run.ram.argument())],
        )
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let counted = counted::counted(&merge.parts)?;
        let blocks = counted::blocks(&counted, &self.symbols);
        let mut summary = Summary::default();
        self.write_blocks(merge, &blocks, &mut summary)?;
        self.write_functions(merge, &blocks, &mut summary)?;
        self.write_pages(merge, &mut summary)?;
        Ok(summary)
    }
}

/// Lines that a terminal shows of each result.
const SHOWN: usize = 5;

impl Hot {
    fn write_blocks(
        &self,
        merge: &MergeContext,
        blocks: &[Block],
        summary: &mut Summary,
    ) -> Result<()> {
        let mut hottest: Vec<&Block> = blocks.iter().collect();
        hottest.sort_unstable_by_key(|block| (std::cmp::Reverse(block.executed()), block.start));
        let all: u64 = blocks.iter().map(Block::executed).fold(0, u64::saturating_add);
        let header = "address,bytes,instructions,times,executed,symbol";
        let mut csv = Csv::create(&merge.out, "hot-blocks.csv", header)?;
        for (place, block) in hottest.iter().take(self.top).enumerate() {
            let &&Block { start, len_bytes, instructions, times } = block;
            let (executed, label) = (block.executed(), self.symbols.label(start));
            csv.line(format_args!(
                "{start:#x},{len_bytes},{instructions},{times},{executed},{}",
                cell(&label)
            ))?;
            if place < SHOWN {
                let percent = 100.0 * executed as f64 / all.max(1) as f64;
                summary
                    .lines
                    .push(format!("{percent:5.1} % of instructions: block {start:#x} {label}"));
            }
        }
        summary.files.push(csv.finish()?);
        Ok(())
    }

    fn write_functions(
        &self,
        merge: &MergeContext,
        blocks: &[Block],
        summary: &mut Summary,
    ) -> Result<()> {
        if self.symbols.is_empty() {
            return Ok(());
        }
        let mut functions: BTreeMap<(u64, &str), u64> = BTreeMap::new();
        for block in blocks {
            let name =
                self.symbols.find(block.start).map_or((0, ""), |found| (found.address, found.name));
            let sum = functions.entry(name).or_default();
            *sum = sum.saturating_add(block.executed());
        }
        let mut hottest: Vec<_> = functions.into_iter().collect();
        hottest.sort_unstable_by_key(|&(name, executed)| (std::cmp::Reverse(executed), name));
        let mut csv = Csv::create(&merge.out, "hot-functions.csv", "address,executed,symbol")?;
        for ((address, name), executed) in hottest.into_iter().take(self.top) {
            csv.line(format_args!("{address:#x},{executed},{}", cell(name)))?;
        }
        summary.files.push(csv.finish()?);
        Ok(())
    }

    fn write_pages(&self, merge: &MergeContext, summary: &mut Summary) -> Result<()> {
        let mut pages: BTreeMap<u64, [u64; 2]> = BTreeMap::new();
        for part in &merge.parts {
            for row in Rows::read(&part.file(PAGES, "part"), PAGES, 3)?.iter() {
                let &[page, reads, writes] = row else { continue };
                let sums = pages.entry(page).or_default();
                *sums = [sums[0].saturating_add(reads), sums[1].saturating_add(writes)];
            }
        }
        let mut hottest: Vec<_> = pages.into_iter().collect();
        hottest.sort_unstable_by_key(|&(page, [reads, writes])| {
            (std::cmp::Reverse(reads.saturating_add(writes)), page)
        });
        let mut csv = Csv::create(&merge.out, "hot-pages.csv", "page,reads,writes")?;
        for (place, (page, [reads, writes])) in hottest.into_iter().take(self.top).enumerate() {
            csv.line(format_args!("{page:#x},{reads},{writes}"))?;
            if place < SHOWN {
                summary.lines.push(format!("page {page:#x}: {reads} reads, {writes} writes"));
            }
        }
        summary.files.push(csv.finish()?);
        Ok(())
    }
}
