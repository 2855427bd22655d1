//! `working-set`: pages of the guest's physical memory that each interval reads and writes.

use super::reduced::Reduced;
use super::{Arguments, Description, Running, Tool};
use crate::context::{MergeContext, RunContext, Summary};
use crate::csv::Csv;
use crate::error::Result;
use crate::part::Rows;
use crate::table::{Column, Kind, Layout, Table};
use std::collections::BTreeSet;

pub(super) const DESCRIPTION: Description = Description {
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

const COLUMNS: &[Column] = &[
    Column { name: "interval", kind: Kind::U32, layout: Layout::Dictionary, about: "the interval" },
    Column {
        name: "page",
        kind: Kind::U64,
        layout: Layout::Delta,
        about: "guest-physical address of the page",
    },
    Column { name: "reads", kind: Kind::U64, layout: Layout::Plain, about: "reads of it" },
    Column { name: "writes", kind: Kind::U64, layout: Layout::Plain, about: "writes to it" },
];

struct WorkingSet;

#[expect(clippy::unnecessary_wraps, reason = "one shape for all tools")]
pub(super) fn make(_arguments: &Arguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(WorkingSet))
}

impl Tool for WorkingSet {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        Reduced::begin(run, "pages", &[KIND], vec![("ram", run.ram.argument())])
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let header =
            "interval,start_icount,pages,pages_read,pages_written,pages_first_touched,reads,writes";
        let mut csv = Csv::create(&merge.out, "working-set.csv", header)?;
        let path = merge.out.join("working-set.parquet");
        let mut table = Table::create(&path, COLUMNS)?;
        let mut known = BTreeSet::new();
        let mut most = 0;
        for part in &merge.parts {
            let (mut read, mut written, mut first, mut reads, mut writes) =
                (0_u64, 0_u64, 0_u64, 0_u64, 0_u64);
            let mut pages = 0_u64;
            for row in Rows::read(&part.file(KIND, "part"), KIND, 3)?.iter() {
                let &[page, r, w] = row else { continue };
                pages += 1;
                read += u64::from(r > 0);
                written += u64::from(w > 0);
                first += u64::from(known.insert(page));
                (reads, writes) = (reads.saturating_add(r), writes.saturating_add(w));
                let values = [u64::from(part.interval.index), page, r, w];
                table.values.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
                table.row_is_complete()?;
            }
            let (index, start) = (part.interval.index, part.interval.start.0);
            csv.line(format_args!(
                "{index},{start},{pages},{read},{written},{first},{reads},{writes}"
            ))?;
            most = most.max(pages);
        }
        table.finish()?;
        let line = format!("{} pages touched in all, {most} in one interval at most", known.len());
        Ok(Summary { lines: vec![line], files: vec![csv.finish()?, path] })
    }
}
