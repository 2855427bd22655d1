//! A tool of a third party: the first rows of its CSV files.

use crate::csv_rows::CsvRows;
use crate::error::{Error, Result};
use crate::{AnalysisResults, Cell, ResultTable, name_of};
use std::path::PathBuf;

/// The most files that are shown.
const FILES_MAX: usize = 100;

/// Returns a table for each CSV file in the directory of the results, sorted by name, with `top`
/// rows at most each.
///
/// Errors: [`Error::NoResult`] if there is no such file; the directory or a file cannot be read; a
/// file is damaged.
pub fn tables(results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
    let failed = |source| Error::File { path: results.dir.clone(), source };
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(&results.dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|end| end == "csv") && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    paths.truncate(FILES_MAX);
    if paths.is_empty() {
        return Err(Error::NoResult { path: results.file("*.csv") });
    }
    let table = |path: &PathBuf| {
        let rows = CsvRows::open(path)?;
        let columns = rows.header.clone();
        let (rows, left_out) = rows.first(top)?;
        // A number stays as it is written: it may be a name.
        let cells = |row: Vec<String>| row.into_iter().map(Cell::Text).collect();
        let rows = rows.into_iter().map(cells).collect();
        Ok(ResultTable { title: name_of(path), columns, rows, left_out })
    };
    paths.iter().map(table).collect()
}
