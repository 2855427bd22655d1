//! `coverage`: the code that ran.

use crate::csv_rows::{CsvRows, address, number};
use crate::error::Result;
use crate::{AnalysisResults, Cell, ResultTable};
use std::cmp::Reverse;

/// The most functions that are sorted.
const FUNCTIONS_MAX: usize = 1 << 22;

/// Returns the table of the code that ran in all, and if there are symbols, that of the functions
/// with most bytes that ran, with `top` rows at most. Error: a result file is missing, cannot be
/// read or is damaged.
pub fn tables(results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
    let (mut ranges, mut bytes, mut instructions) = (0_u64, 0_u64, 0_u64);
    let path = results.file("coverage.csv");
    CsvRows::open(&path)?.each(["bytes", "instructions"], |[len, count]| {
        ranges += 1;
        bytes = bytes.saturating_add(number(len)?);
        instructions = instructions.saturating_add(number(count)?);
        Ok(())
    })?;
    let mut all =
        ResultTable::new("Code that ran", &["instructions", "bytes", "contiguous ranges"]);
    all.push(1, vec![Cell::Count(instructions), Cell::Bytes(bytes), Cell::Count(ranges)]);
    let path = results.file("coverage-functions.csv");
    // Without symbols there are no functions.
    if !path.exists() {
        return Ok(vec![all]);
    }
    let mut functions = Vec::new();
    let columns = ["address", "bytes", "bytes_run", "symbol"];
    CsvRows::open(&path)?.each(columns, |[at, len, run, symbol]| {
        if functions.len() == FUNCTIONS_MAX {
            return Err(format!("more than {FUNCTIONS_MAX} functions"));
        }
        functions.push((number(run)?, number(len)?, address(at)?, symbol.to_owned()));
        Ok(())
    })?;
    functions.sort_by_key(|one| (Reverse(one.0), one.2));
    let header = ["bytes run", "of bytes", "percent", "address", "symbol"];
    let mut table = ResultTable::new("Functions by bytes of code that ran", &header);
    for (run, len, at, symbol) in functions {
        let counts = [Cell::Count(run), Cell::Count(len), Cell::share(run, Some(len))];
        table.push(top, [&counts[..], &[Cell::Address(at), Cell::Symbol(symbol)]].concat());
    }
    Ok(vec![all, table])
}
