//! `hot`: the functions, blocks and pages that are used most.

use crate::csv_rows::{CsvRows, address, number, printable};
use crate::error::{Error, Result};
use crate::intervals::{band, percent_of, rest, shares};
use crate::{AnalysisResults, Cell, ResultTable};
use keyframe_plot::Timeline;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The number of functions that a picture tells apart.
const FUNCTIONS_DRAWN: usize = 12;
/// The most functions that a file lists by interval.
const FUNCTIONS_MAX: usize = 4096;
const BY_INTERVAL: &str = "hot-functions-by-interval.csv";

/// Returns the tables of the functions (if there are symbols) and of the blocks that executed most
/// instructions, and of the most used pages, each with `top` rows at most. Error: a result file is
/// missing, cannot be read or is damaged.
pub fn tables(results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
    let all = results.instructions();
    let header = ["executed", "percent", "address", "symbol"];
    let mut functions = ResultTable::new("Functions that executed most instructions", &header);
    let mut take_function = |[at, executed, symbol]: [&str; 3]| {
        let (at, executed) = (address(at)?, number(executed)?);
        let at = if symbol.is_empty() { Cell::Missing } else { Cell::Address(at) };
        let cells = [Cell::Count(executed), Cell::share(executed, all), at];
        functions.push(top, [&cells[..], &[Cell::Symbol(symbol.to_owned())]].concat());
        Ok(())
    };
    let path = results.file("hot-functions.csv");
    // Without symbols there are no functions.
    let has_functions = path.exists();
    if has_functions {
        CsvRows::open(&path)?.each(["address", "executed", "symbol"], &mut take_function)?;
    }
    let header = ["executed", "percent", "times", "address", "bytes", "symbol"];
    let mut blocks = ResultTable::new("Blocks that executed most instructions", &header);
    let columns = ["executed", "times", "address", "bytes", "symbol"];
    let path = results.file("hot-blocks.csv");
    CsvRows::open(&path)?.each(columns, |[executed, times, at, bytes, symbol]| {
        let executed = number(executed)?;
        let row = vec![
            Cell::Count(executed),
            Cell::share(executed, all),
            Cell::Count(number(times)?),
            Cell::Address(address(at)?),
            Cell::Count(number(bytes)?),
            Cell::Symbol(symbol.to_owned()),
        ];
        blocks.push(top, row);
        Ok(())
    })?;
    let mut pages = ResultTable::new("Most used pages", &["reads", "writes", "page"]);
    let path = results.file("hot-pages.csv");
    CsvRows::open(&path)?.each(["reads", "writes", "page"], |[reads, writes, page]| {
        let counts = [number(reads)?, number(writes)?].map(Cell::Count);
        pages.push(top, [&counts[..], &[Cell::Address(address(page)?)]].concat());
        Ok(())
    })?;
    let functions = has_functions.then_some(functions);
    Ok(functions.into_iter().chain([blocks, pages]).collect())
}

/// Returns the picture of the functions that executed most instructions, by interval.
///
/// Errors: [`Error::NoPicture`] if the results name no functions; the result file is missing,
/// cannot be read or is damaged.
pub fn timeline(results: &AnalysisResults) -> Result<Timeline> {
    let path = results.file(BY_INTERVAL);
    if !path.exists() && results.file("hot-blocks.csv").exists() {
        return Err(Error::NoPicture {
            tool: results.tool.clone(),
            reason: "they name no functions",
            fix: "analyze again with symbols: --tool-arg symbols=guest, or a file of symbols",
        });
    }
    let mut instructions = results.zeros();
    // By address and name, as several functions may have one name.
    let mut functions: BTreeMap<(u64, String), Vec<u64>> = BTreeMap::new();
    let columns = ["interval", "instructions", "address", "executed", "symbol"];
    CsvRows::open(&path)?.each(columns, |[interval, all, at, executed, symbol]| {
        let place = results.interval_by_number(interval)?;
        instructions[place] = number(all)?;
        let function = (address(at)?, printable(symbol));
        if !functions.contains_key(&function) && functions.len() == FUNCTIONS_MAX {
            return Err(format!("more than {FUNCTIONS_MAX} functions"));
        }
        let by_interval = functions.entry(function).or_insert_with(|| results.zeros());
        by_interval[place] = number(executed)?;
        Ok(())
    })?;
    let mut functions: Vec<_> = functions.into_iter().collect();
    functions.sort_by_key(|(_, executed)| {
        Reverse(executed.iter().copied().fold(0, u64::saturating_add))
    });
    let whole = results.summed(&instructions);
    let mut bands = Vec::new();
    let mut left = instructions;
    let mut without_symbol = None;
    for ((_, name), executed) in functions {
        if name.is_empty() {
            without_symbol = Some(executed);
        } else if bands.len() < FUNCTIONS_DRAWN {
            bands.push(band(name, percent_of(&results.summed(&executed), &whole)));
            subtract(&mut left, &executed);
        }
    }
    let without_symbol = without_symbol.unwrap_or_else(|| results.zeros());
    subtract(&mut left, &without_symbol);
    bands.push(rest("other functions", percent_of(&results.summed(&left), &whole)));
    let name = "code without a symbol";
    bands.push(rest(name, percent_of(&results.summed(&without_symbol), &whole)));
    let title = "Share of each function, of those that executed most instructions in all";
    let panels = vec![shares(title, "% of instructions", bands)];
    Ok(results.timeline_of("Hottest functions over time", panels))
}

fn subtract(from: &mut [u64], values: &[u64]) {
    for (from, value) in from.iter_mut().zip(values) {
        *from = from.saturating_sub(*value);
    }
}
