//! The tables and pictures of each tool, one file for each.

mod cache;
mod coverage;
mod events;
mod hot;
mod icount;
mod memtrace;
mod third_party;
mod working_set;

use crate::error::{Error, Result};
use crate::{AnalysisResults, ResultTable};
use keyframe_plot::Timeline;

/// Returns the tables of the tool's results. A table shows at most `top` rows.
///
/// Errors: a result file is missing, cannot be read or is damaged.
pub fn tables(results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
    match results.tool.as_str() {
        "icount" | "wait" => icount::tables(results, top),
        "hot" => hot::tables(results, top),
        "memtrace" => memtrace::tables(results),
        "coverage" => coverage::tables(results, top),
        "working-set" => working_set::tables(results, top),
        "watch" => events::WATCH.tables(results, top),
        "syscalls" => events::SYSCALLS.tables(results, top),
        "cache" => cache::tables(results, top),
        _ => third_party::tables(results, top),
    }
}

/// Returns the picture of the tool's results over the course of the recording.
///
/// Errors: [`Error::NoPicture`] for a tool whose results are not drawn; a result file is missing,
/// cannot be read or is damaged.
pub fn timeline(results: &AnalysisResults) -> Result<Timeline> {
    let tool = &results.tool;
    let none = |reason, fix| Err(Error::NoPicture { tool: tool.clone(), reason, fix });
    match tool.as_str() {
        "icount" | "wait" => icount::timeline(results),
        "hot" => hot::timeline(results),
        "working-set" => working_set::timeline(results),
        "watch" => events::WATCH.timeline(results),
        "syscalls" => events::SYSCALLS.timeline(results),
        "cache" => cache::timeline(results),
        "coverage" => none(
            "coverage has no order in time",
            "show it beside the sources: genhtml OUT/coverage.info",
        ),
        "memtrace" => none(
            "a trace has too many accesses",
            "query it with a database, such as DuckDB: select ... from 'OUT/memtrace.parquet'",
        ),
        _ => none(
            "Keyframe draws only the results of its own tools",
            "draw the tool's result files with another program",
        ),
    }
}
