//! How long the whole takes: recorded, then analysed with one job and two; and with more nodes,
//! simulated from the intervals' times.

use super::measured::number;
use super::recording::Recording;
use crate::Error;
use serde_json::Value;
use std::path::Path;

/// The analysis with one job, below the run's directory.
pub const ONE_JOB: &str = "one-job";
/// Nodes that are simulated.
const NODES: &str = "1,2,4,8,16";

/// A number of nodes.
#[derive(Clone, Copy, Debug)]
pub struct Simulated {
    pub nodes: u64,
    pub makespan_s: f64,
    pub speed_up: f64,
    /// By the paper's formulas, of equal intervals.
    pub formula_makespan_s: f64,
    pub formula_speed_up: f64,
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Simulations {
    /// One replay through all, in seconds. Measured.
    pub sequential_s: f64,
    /// Whether it found what the intervals did.
    pub is_same: bool,
    /// Recording, then the analysis with so many jobs: `(jobs, seconds)`. Measured.
    pub deferred: Vec<(u64, f64)>,
    /// The same, simulated.
    pub deferred_simulated: Vec<Simulated>,
    /// Intervals given out as they are sealed. Simulated.
    pub immediate: Vec<Simulated>,
    /// The same, over a link of 1 Gbit/s and with nodes that start within a second. Simulated.
    pub over_network: Vec<Simulated>,
    /// The model's constants, as they were found: `t_i`, `s_sim / s_log`, how well the line fits.
    pub fit: (f64, f64, f64),
}

/// Of a recording that took `recorded_s`, from instruction `from` on; analyses go below `dir`.
pub fn measure(
    recording: &Recording<'_>,
    (recorded_s, from): (f64, u64),
    dir: &Path,
) -> Result<Simulations, Error> {
    let mut deferred = Vec::new();
    let (mut sequential_s, mut is_same) = (f64::NAN, true);
    for (jobs, name) in [(1, ONE_JOB), (2, "two-jobs")] {
        let in_sequence = jobs == 1;
        let report = recording.analyze((jobs, in_sequence), from, &dir.join(name))?;
        if in_sequence {
            sequential_s = number(&report, "sequential_wall_ns")? / 1e9;
            is_same = report["equals_sequential"] == true;
        }
        deferred.push((jobs, recorded_s + number(&report, "wall_ns")? / 1e9));
    }
    let analysis = dir.join(ONE_JOB);
    let plan = |more: &[&str]| recording.plan(&analysis, &[&["--nodes", NODES], more].concat());
    let immediate = plan(&[])?;
    let fit = &immediate["measured"]["fit"];
    Ok(Simulations {
        sequential_s,
        is_same,
        deferred,
        deferred_simulated: rows(&plan(&["--deferred", "--policy", "in-order"])?, sequential_s)?,
        fit: (number(fit, "t_i")?, number(fit, "slowdown")?, number(fit, "r_squared")?),
        over_network: rows(&plan(&["--network", "1Gbit", "--node-start", "1s"])?, sequential_s)?,
        immediate: rows(&immediate, sequential_s)?,
    })
}

/// Run times are the plan's; speed-ups are over what one replay through all took, as it was
/// measured.
fn rows(plan: &Value, sequential_s: f64) -> Result<Vec<Simulated>, Error> {
    let table = plan["simulated"]["table"].as_array().into_iter().flatten();
    table
        .map(|row| {
            let makespan_s = number(row, "makespan_s")?;
            let formula_makespan_s = number(&row["closed_form"], "run_time_s")?;
            Ok(Simulated {
                nodes: number(row, "nodes")? as u64,
                makespan_s,
                speed_up: sequential_s / makespan_s,
                formula_makespan_s,
                formula_speed_up: sequential_s / formula_makespan_s,
            })
        })
        .collect()
}
