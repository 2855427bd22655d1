//! `memtrace`: the size of the trace, and of its columns.

use crate::error::{Error, Result};
use crate::{AnalysisResults, Cell, ResultTable};
use keyframe_analysis::parquet_table::{ParquetSummary, summary};

/// Returns the table of the trace's size, and that of the size of each of its columns. Errors:
/// [`Error::NoResult`] if there is no trace; the footer of its file cannot be read.
pub fn tables(results: &AnalysisResults) -> Result<Vec<ResultTable>> {
    let path = results.file("memtrace.parquet");
    if !path.exists() {
        return Err(Error::NoResult { path });
    }
    let ParquetSummary { rows, row_groups, columns } = summary(&path)?;
    let bytes = columns.iter().map(|(_, bytes)| *bytes).fold(0_u64, u64::saturating_add);
    let mut all = ResultTable::new("Accesses to memory", &["accesses", "size", "row groups"]);
    all.push(1, vec![Cell::Count(rows), Cell::Bytes(bytes), Cell::Count(row_groups)]);
    let mut table = ResultTable::new("Columns", &["column", "size", "percent"]);
    for (name, size) in columns {
        let share = Cell::share(size, Some(bytes));
        table.push(usize::MAX, vec![Cell::Text(name), Cell::Bytes(size), share]);
    }
    Ok(vec![all, table])
}
