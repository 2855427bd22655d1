//! What tools cost on one interval of a recording, and what a second job gains on all of them.

use super::Bench;
use super::recorded::{Analysed, Part, Recorded};
use super::rows::Rows;
use crate::Error;
use std::path::Path;

/// What tools are compared with: loaded and asking for nothing; called at each access; called, and
/// writing text.
pub const NOTHING: &str = "baseline-nothing";
pub const CALLBACK: &str = "baseline-callback";
pub const TEXT: &str = "baseline-text";
pub const MEMTRACE: &str = "memtrace";
/// The tool of which two jobs are run.
const OF_JOBS: &str = "icount";

/// Everything of the recording at `dir`.
pub fn all(bench: &Bench<'_>, dir: &Path, rows: &mut Rows) -> Result<(), Error> {
    let recorded = Recorded { options: bench.options, dir };
    if bench.chosen.section("jobs") {
        jobs(bench, &recorded, rows)?;
    }
    let mut tools = vec![NOTHING, CALLBACK, MEMTRACE];
    if bench.chosen.section("memtrace") {
        tools.push(TEXT);
    }
    if bench.chosen.section("tools") {
        tools.extend(bench.plan.tools);
    }
    if bench.chosen.section("tools") || bench.chosen.section("memtrace") {
        // In the work: the boot is before it, and behind it little.
        let around = Part::Around(recorded.instructions()? / 10 * 9);
        for round in 0..bench.rounds {
            if round % 2 == 1 {
                tools.reverse();
            }
            for tool in &tools {
                bench.options.say(format!("tool {tool}"));
                let analysed = recorded.analyse((tool, arguments(tool)), around, "1", 1)?;
                rows.push_tool(tool, analysed);
            }
            if round % 2 == 1 {
                tools.reverse();
            }
        }
    }
    Ok(())
}

/// What a tool has to be told.
fn arguments(tool: &str) -> &'static [&'static str] {
    match tool {
        // A page that the kernel writes to.
        "watch" => &["space=physical", "addr=0x1000", "len=4096"],
        _ => &[],
    }
}

/// One job, two jobs, and two processes with one job each: what the machine itself gains.
fn jobs(bench: &Bench<'_>, recorded: &Recorded<'_>, rows: &mut Rows) -> Result<(), Error> {
    // A look leaves out the boot.
    let part =
        if bench.options.quick { Part::Behind(recorded.instructions()? / 2) } else { Part::All };
    let analyse = |jobs: &str, at_once: usize| -> Result<Analysed, Error> {
        bench.options.say(format!("analyze --jobs {jobs}, {at_once} at once"));
        recorded.analyse((OF_JOBS, &[]), part, jobs, at_once)
    };
    for _ in 0..bench.rounds {
        let (one, two, both) = (analyse("1", 1)?, analyse("2", 1)?, analyse("1", 2)?);
        rows.push_jobs(one.wall_ns, two.wall_ns, both.wall_ns);
    }
    Ok(())
}
