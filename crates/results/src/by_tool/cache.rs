//! `cache`: misses of each level.

use crate::csv_rows::{CsvRows, number};
use crate::error::Result;
use crate::intervals::{band, lines, percent_of, scaled};
use crate::{AnalysisResults, Cell, ResultTable};
use keyframe_plot::Timeline;

const FILE: &str = "cache.csv";
const LEVELS_MAX: u64 = 3;
const COLUMNS: [&str; 7] =
    ["interval", "start_icount", "level", "reads", "writes", "read_misses", "write_misses"];
/// The columns that `--tool-arg warmup=N` adds.
const BOUNDS: [&str; 2] = ["misses_least", "misses_most"];

/// A row of the file.
struct LevelRow {
    interval: usize,
    index: u64,
    start: u64,
    level: usize,
    accesses: u64,
    misses: u64,
    /// The bounds on the misses, if the tool had `warmup=N`.
    bounds: [Option<u64>; 2],
}

fn each_row(results: &AnalysisResults, mut take: impl FnMut(LevelRow)) -> Result<()> {
    let path = results.file(FILE);
    let rows = CsvRows::open(&path)?;
    // Without bounds the column "interval" fills their places and is ignored.
    let [least, most] = if rows.has(BOUNDS[0]) { BOUNDS } else { [COLUMNS[0]; 2] };
    let has_bounds = rows.has(BOUNDS[0]);
    let [interval, start, level, reads, writes, read_misses, write_misses] = COLUMNS;
    let columns = [interval, start, level, reads, writes, read_misses, write_misses, least, most];
    rows.each(columns, |cells| {
        let interval = results.interval_by_number(cells[0])?;
        let [index, start, level, reads, writes, read_misses, write_misses, least, most] = {
            let mut numbers = [0; 9];
            for (into, cell) in numbers.iter_mut().zip(cells) {
                *into = number(cell)?;
            }
            numbers
        };
        if !(1..=LEVELS_MAX).contains(&level) {
            return Err(format!("{level} is not a level"));
        }
        take(LevelRow {
            interval,
            index,
            start,
            level: level as usize,
            accesses: reads.saturating_add(writes),
            misses: read_misses.saturating_add(write_misses),
            bounds: [least, most].map(|bound| has_bounds.then_some(bound)),
        });
        Ok(())
    })
}

/// Returns the table of each level's accesses and misses in all, and that of their counts by
/// interval, with `top` rows at most. Error: the result file is missing, cannot be read or is
/// damaged.
pub fn tables(results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
    let header = ["interval", "first instruction", "level", "accesses", "misses", "percent"];
    let bounds = ["least misses", "most misses"];
    let mut by_interval = ResultTable::new("Misses by interval", &header);
    let mut sums: Vec<[u64; 4]> = Vec::new();
    let mut has_bounds = false;
    each_row(results, |row| {
        let LevelRow { index, start, level, accesses, misses, bounds, .. } = row;
        has_bounds = bounds[0].is_some();
        let mut cells = [index, start, level as u64, accesses, misses].map(Cell::Count).to_vec();
        cells.push(Cell::share(misses, Some(accesses)));
        cells.extend(bounds.into_iter().flatten().map(Cell::Count));
        by_interval.push(top, cells);
        sums.resize(sums.len().max(level), [0; 4]);
        let values = [accesses, misses, bounds[0].unwrap_or(0), bounds[1].unwrap_or(0)];
        for (sum, value) in sums[level - 1].iter_mut().zip(values) {
            *sum = sum.saturating_add(value);
        }
    })?;
    let mut all = ResultTable::new("Misses in all", &header[2..]);
    if has_bounds {
        for table in [&mut by_interval, &mut all] {
            table.columns.extend(bounds.map(String::from));
        }
    }
    for ([accesses, misses, least, most], level) in sums.into_iter().zip(1..) {
        let mut cells = [level, accesses, misses].map(Cell::Count).to_vec();
        cells.push(Cell::share(misses, Some(accesses)));
        if has_bounds {
            cells.extend([least, most].map(Cell::Count));
        }
        all.push(usize::MAX, cells);
    }
    Ok(vec![all, by_interval])
}

/// Returns the picture of the misses and of the miss rate of each level, by interval. Error: the
/// result file is missing, cannot be read or is damaged.
pub fn timeline(results: &AnalysisResults) -> Result<Timeline> {
    // Accesses and misses of each level, by interval.
    let mut levels: Vec<[Vec<u64>; 2]> = Vec::new();
    each_row(results, |row| {
        let count = levels.len().max(row.level);
        levels.resize_with(count, || [results.zeros(), results.zeros()]);
        let [accesses, misses] = &mut levels[row.level - 1];
        (accesses[row.interval], misses[row.interval]) = (row.accesses, row.misses);
    })?;
    let instructions = results.instructions_by_cell();
    let (mut counts, mut rates) = (Vec::new(), Vec::new());
    for ([accesses, misses], level) in levels.iter().zip(1..) {
        let (accesses, misses) = (results.summed(accesses), results.summed(misses));
        let name = format!("level {level}");
        rates.push(band(&name, percent_of(&misses, &accesses)));
        counts.push(band(
            name,
            match &instructions {
                Some(instructions) => scaled(&misses, instructions, 1000.0),
                None => misses,
            },
        ));
    }
    let label = if instructions.is_some() { "misses per 1,000 instructions" } else { "misses" };
    let panels = vec![
        lines("Misses by interval", label, counts),
        lines("Miss rate of each level", "% of the level's accesses", rates),
    ];
    Ok(results.timeline_of("Cache misses", panels))
}
