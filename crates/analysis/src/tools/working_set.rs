//! `working-set`: the pages of physical memory that each interval reads and writes.

use super::table_run::TableRun;
use super::{Tool, ToolArguments, ToolDescription, ToolRun};
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::Result;
use crate::parquet_table::{ColumnEncoding, ColumnSpec, ColumnType, ParquetTable};
use crate::part_table::PartTable;
use crate::result_file::CsvFile;
use std::collections::BTreeSet;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "working-set",
    about: "Pages of physical memory that each interval reads and writes",
    arguments: &[],
    results: &[
        (
            "working-set.csv",
            "interval, first instruction, pages touched, read, written, first touched; reads, writes",
        ),
        ("working-set.parquet", "interval, page's guest-physical address, reads, writes"),
    ],
};

const KIND: &str = "pages";

const COLUMNS: &[ColumnSpec] = &[
    ColumnSpec {
        name: "interval",
        kind: ColumnType::U32,
        encoding: ColumnEncoding::Dictionary,
        about: "the interval",
    },
    ColumnSpec {
        name: "page",
        kind: ColumnType::U64,
        encoding: ColumnEncoding::Delta,
        about: "guest-physical address of the page",
    },
    ColumnSpec {
        name: "reads",
        kind: ColumnType::U64,
        encoding: ColumnEncoding::Plain,
        about: "reads of the page",
    },
    ColumnSpec {
        name: "writes",
        kind: ColumnType::U64,
        encoding: ColumnEncoding::Plain,
        about: "writes to the page",
    },
];

struct WorkingSet;

#[expect(clippy::unnecessary_wraps, reason = "all tools have the same signature")]
pub(super) fn make(_arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(WorkingSet))
}

/// The sums of an interval.
#[derive(Default)]
struct IntervalSums {
    pages: u64,
    pages_read: u64,
    pages_written: u64,
    pages_first_touched: u64,
    reads: u64,
    writes: u64,
}

impl Tool for WorkingSet {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        TableRun::begin(run, "pages", &[KIND], vec![("ram", run.ram.argument())])
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let header =
            "interval,start_icount,pages,pages_read,pages_written,pages_first_touched,reads,writes";
        let mut csv = CsvFile::create(&merge.out, "working-set.csv", header)?;
        let path = merge.out.join("working-set.parquet");
        let mut table = ParquetTable::create(&path, COLUMNS)?;
        let mut touched = BTreeSet::new();
        let mut most = 0;
        for part in &merge.parts {
            let (index, start) = (part.interval.index, part.interval.start.0);
            let mut sums = IntervalSums::default();
            for row in PartTable::read(&part.file(KIND, "part"), KIND, 3)?.rows() {
                let &[page, reads, writes] = row else { continue };
                sums.pages += 1;
                sums.pages_read += u64::from(reads > 0);
                sums.pages_written += u64::from(writes > 0);
                sums.pages_first_touched += u64::from(touched.insert(page));
                sums.reads = sums.reads.saturating_add(reads);
                sums.writes = sums.writes.saturating_add(writes);
                let values = [u64::from(index), page, reads, writes];
                table.values.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
                table.complete_row()?;
            }
            csv.row((
                index,
                start,
                sums.pages,
                sums.pages_read,
                sums.pages_written,
                sums.pages_first_touched,
                sums.reads,
                sums.writes,
            ))?;
            most = most.max(sums.pages);
        }
        table.finish()?;
        let line =
            format!("{} pages touched in all, {most} in one interval at most", touched.len());
        Ok(ToolSummary { lines: vec![line], files: vec![csv.finish()?, path] })
    }
}
