//! The cost of tools on one interval of a recording, and the gain of a second job.

use super::Bench;
use super::recording::{AnalysedPart, AnalysisCosts, Recording};
use super::rows::Rows;
use crate::Error;
use std::path::Path;

/// The plugin that asks for no callbacks.
pub const NOTHING: &str = "baseline-nothing";
/// The plugin that is called at each access and does nothing.
pub const CALLBACK: &str = "baseline-callback";
/// The plugin that writes a line of text for each access.
pub const TEXT: &str = "baseline-text";
/// The tool `memtrace`.
pub const MEMTRACE: &str = "memtrace";
/// The tool with which jobs are compared.
const JOBS_TOOL: &str = "icount";

/// Measures jobs and tools on the recording in `dir`.
pub fn measure(bench: &Bench<'_>, dir: &Path, rows: &mut Rows) -> Result<(), Error> {
    let recording = Recording { options: bench.options, dir };
    if bench.selection.section("jobs") {
        jobs(bench, &recording, rows)?;
    }
    let mut tools = vec![NOTHING, CALLBACK, MEMTRACE];
    if bench.selection.section("memtrace") {
        tools.push(TEXT);
    }
    if bench.selection.section("tools") {
        tools.extend(bench.plan.tools);
    }
    if bench.selection.section("tools") || bench.selection.section("memtrace") {
        // This instruction is in the work, not in the boot.
        let around = AnalysedPart::Around(recording.instructions()? / 10 * 9);
        for round in 0..bench.rounds {
            if round % 2 == 1 {
                tools.reverse();
            }
            for tool in &tools {
                bench.options.say(format!("tool {tool}"));
                let analysed = recording.analyse(tool, arguments(tool), around, "1", 1)?;
                rows.push_tool(tool, analysed);
            }
            if round % 2 == 1 {
                tools.reverse();
            }
        }
    }
    Ok(())
}

/// Returns the arguments of a tool.
fn arguments(tool: &str) -> &'static [&'static str] {
    match tool {
        // A page that the kernel writes to.
        "watch" => &["space=physical", "addr=0x1000", "len=4096"],
        _ => &[],
    }
}

/// Measures one job, two jobs, and two processes with one job each (the gain of the machine).
fn jobs(bench: &Bench<'_>, recording: &Recording<'_>, rows: &mut Rows) -> Result<(), Error> {
    // A quick run leaves out the boot.
    let part = if bench.options.quick {
        AnalysedPart::From(recording.instructions()? / 2)
    } else {
        AnalysedPart::All
    };
    let analyse = |jobs: &str, at_once: usize| -> Result<AnalysisCosts, Error> {
        bench.options.say(format!("analyze --jobs {jobs}, {at_once} at once"));
        recording.analyse(JOBS_TOOL, &[], part, jobs, at_once)
    };
    for _ in 0..bench.rounds {
        let (one, two, both) = (analyse("1", 1)?, analyse("2", 1)?, analyse("1", 2)?);
        rows.push_jobs(one.wall_ns, two.wall_ns, both.wall_ns);
    }
    Ok(())
}
