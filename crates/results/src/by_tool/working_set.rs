//! `working-set`: the pages that each interval touches.

use crate::csv_rows::{CsvRows, number};
use crate::error::Result;
use crate::intervals::{band, lines};
use crate::{AnalysisResults, Cell, ResultTable};
use keyframe_plot::Timeline;

const FILE: &str = "working-set.csv";
const PAGE_BYTES: u64 = 4096;
const COLUMNS: [&str; 8] = [
    "interval",
    "start_icount",
    "pages",
    "pages_read",
    "pages_written",
    "pages_first_touched",
    "reads",
    "writes",
];

fn each_row(results: &AnalysisResults, mut take: impl FnMut(usize, [u64; 8])) -> Result<()> {
    CsvRows::open(&results.file(FILE))?.each(COLUMNS, |cells| {
        let mut numbers = [0; 8];
        for (into, cell) in numbers.iter_mut().zip(cells) {
            *into = number(cell)?;
        }
        take(results.interval_by_number(cells[0])?, numbers);
        Ok(())
    })
}

/// Returns the table of the memory that the intervals touch in all, and that of the pages by
/// interval, with `top` rows at most. Error: the result file is missing, cannot be read or is
/// damaged.
pub fn tables(results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
    let header = [
        "interval",
        "first instruction",
        "touched",
        "pages",
        "read",
        "written",
        "first touched",
        "reads",
        "writes",
    ];
    let mut by_interval = ResultTable::new("Pages by interval", &header);
    let (mut first_touched, mut most) = (0_u64, 0);
    each_row(results, |_, [index, start, pages, read, written, first, reads, writes]| {
        let mut cells = [index, start].map(Cell::Count).to_vec();
        cells.push(Cell::Bytes(pages.saturating_mul(PAGE_BYTES)));
        cells.extend([pages, read, written, first, reads, writes].map(Cell::Count));
        by_interval.push(top, cells);
        first_touched = first_touched.saturating_add(first);
        most = pages.max(most);
    })?;
    let mut all = ResultTable::new("Pages in all", &["working set", "touched", "pages"]);
    for (name, pages) in
        [("all intervals", first_touched), ("the interval that touches most", most)]
    {
        let bytes = Cell::Bytes(pages.saturating_mul(PAGE_BYTES));
        all.push(usize::MAX, vec![Cell::Text(name.into()), bytes, Cell::Count(pages)]);
    }
    Ok(vec![all, by_interval])
}

/// Returns the picture of the memory that each interval touches, and that was touched so far, in
/// MiB. Error: the result file is missing, cannot be read or is damaged.
pub fn timeline(results: &AnalysisResults) -> Result<Timeline> {
    let [mut touched, mut read, mut written, mut so_far] = [(); 4].map(|()| results.zeros());
    let mut sum = 0_u64;
    each_row(results, |at, [_, _, pages, pages_read, pages_written, first, ..]| {
        sum = sum.saturating_add(first);
        (touched[at], read[at], written[at]) = (pages, pages_read, pages_written);
        so_far[at] = sum;
    })?;
    let mib = |name: &str, pages: &[u64]| {
        let values = results.largest(pages);
        band(
            name,
            values.into_iter().map(|pages| pages * PAGE_BYTES as f64 / 1_048_576.0).collect(),
        )
    };
    let panels = vec![
        lines(
            "Memory that each interval touches",
            "MiB",
            vec![mib("touched", &touched), mib("written", &written), mib("read", &read)],
        ),
        lines(
            "Memory touched since the analysis begins",
            "MiB",
            vec![mib("touched so far", &so_far)],
        ),
    ];
    Ok(results.timeline_of("Working set", panels))
}
