//! The run times of recording and analysis: measured with one job and with two, and simulated with
//! more nodes from the measured times of the intervals.

use super::evaluated_run::number;
use super::recording::{AnalysisRequest, Recording};
use crate::Error;
use serde_json::Value;
use std::path::Path;

/// The directory of the analysis with one job, in the run's directory.
pub const ONE_JOB: &str = "one-job";
/// The numbers of nodes that are simulated.
const NODES: &str = "1,2,4,8,16";

/// A simulated run with some number of nodes.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedRun {
    pub nodes: u64,
    pub makespan_s: f64,
    pub speed_up: f64,
    /// By the paper's formulas, which assume equal intervals.
    pub formula_makespan_s: f64,
    pub formula_speed_up: f64,
}

/// A measured run time with some number of jobs.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredRunTime {
    pub jobs: u64,
    /// The recording, and the analysis after it.
    pub run_time_s: f64,
}

/// The constants of the speed-up model, fitted to the measured intervals.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelFit {
    /// The time to initialise a simulation.
    pub t_i_s: f64,
    /// `s_sim / s_log`.
    pub slowdown: f64,
    /// The part of the variance that the fit explains.
    pub r_squared: f64,
}

/// The measured and simulated run times of one recording.
#[derive(Clone, Debug, Default)]
pub struct Simulations {
    /// The time of one replay of the whole recording. Measured.
    pub sequential_s: f64,
    /// Whether that replay gave the same results as the intervals.
    pub is_same: bool,
    /// Analyses that begin after the recording. Measured.
    pub deferred: Vec<MeasuredRunTime>,
    /// The same, simulated.
    pub deferred_simulated: Vec<SimulatedRun>,
    /// Intervals that are dispatched during the recording. Simulated.
    pub immediate: Vec<SimulatedRun>,
    /// The same, over a link of 1 Gbit/s and with nodes that start within a second. Simulated.
    pub over_network: Vec<SimulatedRun>,
    pub fit: ModelFit,
}

/// Analyses a recording twice, and simulates more nodes. The analyses go to directories in `dir`.
pub fn measure(
    recording: &Recording<'_>,
    request: AnalysisRequest,
    dir: &Path,
) -> Result<Simulations, Error> {
    let mut deferred = Vec::new();
    let (mut sequential_s, mut is_same) = (f64::NAN, true);
    for (jobs, name) in [(1, ONE_JOB), (2, "two-jobs")] {
        let in_sequence = jobs == 1;
        let report = recording.analyze(request, jobs, in_sequence, &dir.join(name))?;
        if in_sequence {
            sequential_s = number(&report, "sequential_wall_ns")? / 1e9;
            is_same = report["equals_sequential"] == true;
        }
        let run_time_s = request.recorded_s + number(&report, "wall_ns")? / 1e9;
        deferred.push(MeasuredRunTime { jobs, run_time_s });
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
        fit: ModelFit {
            t_i_s: number(fit, "t_i")?,
            slowdown: number(fit, "slowdown")?,
            r_squared: number(fit, "r_squared")?,
        },
        over_network: rows(&plan(&["--network", "1Gbit", "--node-start", "1s"])?, sequential_s)?,
        immediate: rows(&immediate, sequential_s)?,
    })
}

/// Returns the simulated runs of a plan. Their speed-ups are over the measured time of one replay
/// of the whole recording.
fn rows(plan: &Value, sequential_s: f64) -> Result<Vec<SimulatedRun>, Error> {
    let table = plan["simulated"]["table"].as_array().into_iter().flatten();
    table
        .map(|row| {
            let makespan_s = number(row, "makespan_s")?;
            let formula_makespan_s = number(&row["closed_form"], "run_time_s")?;
            Ok(SimulatedRun {
                nodes: number(row, "nodes")? as u64,
                makespan_s,
                speed_up: sequential_s / makespan_s,
                formula_makespan_s,
                formula_speed_up: sequential_s / formula_makespan_s,
            })
        })
        .collect()
}
