//! `icount`: instructions of user programs and of the kernel.

use crate::csv_rows::{CsvRows, number};
use crate::error::Result;
use crate::intervals::{band, lines, percent_of, shares};
use crate::{AnalysisResults, Cell, ResultTable};
use keyframe_plot::Timeline;

const FILE: &str = "icount.csv";
const COLUMNS: [&str; 4] = ["interval", "start_icount", "user", "kernel"];

/// Returns the table of the instructions of user programs and of the kernel in all, and that of
/// their numbers by interval, with `top` rows at most. Error: the result file is missing, cannot be
/// read or is damaged.
pub fn tables(results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
    let header =
        ["interval", "first instruction", "instructions", "user", "kernel", "percent user"];
    let mut by_interval = ResultTable::new("Instructions by interval", &header);
    let mut sums = [0_u64; 2];
    CsvRows::open(&results.file(FILE))?.each(COLUMNS, |[interval, start, user, kernel]| {
        let counts = [number(user)?, number(kernel)?];
        let place = [number(interval)?, number(start)?].map(Cell::Count);
        by_interval.push(top, [&place[..], &row(counts)].concat());
        for (sum, one) in sums.iter_mut().zip(counts) {
            *sum = sum.saturating_add(one);
        }
        Ok(())
    })?;
    let mut all = ResultTable::new("Instructions in all", &header[2..]);
    all.push(1, row(sums).to_vec());
    Ok(vec![all, by_interval])
}

fn row(counts: [u64; 2]) -> [Cell; 4] {
    let [user, kernel] = counts;
    let both = user.saturating_add(kernel);
    [Cell::Count(both), Cell::Count(user), Cell::Count(kernel), Cell::share(user, Some(both))]
}

/// Returns the picture of the instructions of user programs and of the kernel, by interval. Error:
/// the result file is missing, cannot be read or is damaged.
pub fn timeline(results: &AnalysisResults) -> Result<Timeline> {
    let (mut user, mut kernel) = (results.zeros(), results.zeros());
    CsvRows::open(&results.file(FILE))?.each(COLUMNS, |[interval, _, in_user, in_kernel]| {
        let at = results.interval_by_number(interval)?;
        (user[at], kernel[at]) = (number(in_user)?, number(in_kernel)?);
        Ok(())
    })?;
    let (user, kernel) = (results.summed(&user), results.summed(&kernel));
    let both: Vec<f64> = user.iter().zip(&kernel).map(|(user, kernel)| user + kernel).collect();
    let by_half = vec![
        band("kernel", percent_of(&kernel, &both)),
        band("user programs", percent_of(&user, &both)),
    ];
    let panels = vec![
        shares("Share of the kernel and of user programs", "% of instructions", by_half),
        lines("Instructions of each interval", "instructions", vec![band("instructions", both)]),
    ];
    Ok(results.timeline_of("Instructions of user programs and of the kernel", panels))
}
