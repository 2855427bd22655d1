//! The run times of recording and analysis: measured with one job and with two, and simulated with
//! more nodes from the measured times of the intervals.

use super::recording::{Recording, read_json};
use crate::Error;
use crate::keyframe_json::number;
use crate::keyframe_json::start_ns;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The directory of the analysis with one job, in the run's directory.
pub const ONE_JOB: &str = "one-job";
/// The numbers of nodes that are simulated.
const NODES: &str = "1,2,4,8,16";

/// A simulated run with some number of nodes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SimulatedRun {
    pub nodes: u64,
    pub makespan_s: f64,
    pub speed_up: f64,
    /// By the paper's formulas, which assume equal intervals.
    pub formula_makespan_s: f64,
    pub formula_speed_up: f64,
}

/// The time of an interval in an analysis.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct IntervalTime {
    /// The time between its checkpoints.
    pub recorded_s: f64,
    pub instructions: f64,
    /// The time of its replay, with the start of QEMU if it is the first of a range.
    pub replay_s: f64,
    /// The time to start QEMU at its begin; `None` if the worker went on to it from the interval
    /// before.
    pub start_s: Option<f64>,
}

/// A measured analysis after the recording, with some number of jobs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredAnalysis {
    pub jobs: u64,
    pub analysis_s: f64,
    pub intervals: Vec<IntervalTime>,
}

/// The constants of the speed-up model, fitted to the measured intervals.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct ModelFit {
    /// The time to initialise a simulation.
    pub t_i_s: f64,
    /// `s_sim / s_log`.
    pub slowdown: f64,
    /// The part of the variance that the fit explains.
    pub r_squared: f64,
}

/// The measured and simulated run times of one recording.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Simulations {
    /// The time of one replay of the whole recording. Measured.
    pub sequential_s: f64,
    /// Whether that replay gave the same results as the intervals.
    pub is_same: bool,
    /// Analyses that begin after the recording. Measured.
    pub deferred: Vec<MeasuredAnalysis>,
    /// The same, simulated.
    pub deferred_simulated: Vec<SimulatedRun>,
    /// Intervals that are dispatched during the recording. Simulated.
    pub immediate: Vec<SimulatedRun>,
    /// The same, over a link of 1 Gbit/s and with nodes that start within a second. Simulated.
    pub over_network: Vec<SimulatedRun>,
    /// The same, and each node gets the whole RAM for each interval, as in the paper. Simulated.
    pub en_bloc: Vec<SimulatedRun>,
    pub fit: ModelFit,
}

impl Simulations {
    /// Returns the measured analysis with this number of jobs.
    pub fn with_jobs(&self, jobs: u64) -> Option<&MeasuredAnalysis> {
        self.deferred.iter().find(|measured| measured.jobs == jobs)
    }
}

/// Returns the row of `rows` with this number of nodes.
pub fn with_nodes(rows: &[SimulatedRun], nodes: u64) -> Option<SimulatedRun> {
    rows.iter().find(|row| row.nodes == nodes).copied()
}

/// Analyses a recording twice, from an instruction on, and simulates more nodes. `times` are those
/// of its checkpoints. The analyses go to directories in `dir`.
pub fn measure(
    recording: &Recording<'_>,
    from_instruction: u64,
    times: &CheckpointTimes,
    dir: &Path,
) -> Result<Simulations, Error> {
    let mut deferred = Vec::new();
    let (mut sequential_s, mut is_same) = (f64::NAN, true);
    for (jobs, name) in [(1, ONE_JOB), (2, "two-jobs")] {
        let in_sequence = jobs == 1;
        let out = dir.join(name);
        let report = recording.analyze(from_instruction, jobs, in_sequence, &out)?;
        if in_sequence {
            sequential_s = number(&report, "sequential_wall_ns")? / 1e9;
            is_same = report["equals_sequential"] == true;
        }
        let analysis = read_json(&out.join("analysis.json"))?;
        let intervals = interval_times(&report, &analysis, times)?;
        let analysis_s = number(&report, "wall_ns")? / 1e9;
        deferred.push(MeasuredAnalysis { jobs, analysis_s, intervals });
    }
    let analysis = dir.join(ONE_JOB);
    let plan = |more: &[&str]| recording.plan(&analysis, &[&["--nodes", NODES], more].concat());
    let simulated = |more: &[&str]| rows(&plan(more)?, sequential_s);
    let immediate = plan(&[])?;
    let fit = &immediate["measured"]["fit"];
    let network = ["--network", "1Gbit", "--node-start", "1s"];
    Ok(Simulations {
        sequential_s,
        is_same,
        deferred,
        deferred_simulated: simulated(&["--deferred", "--policy", "in-order"])?,
        fit: ModelFit {
            t_i_s: number(fit, "t_i")?,
            slowdown: number(fit, "slowdown")?,
            r_squared: number(fit, "r_squared")?,
        },
        over_network: simulated(&network)?,
        en_bloc: simulated(
            &[&network[..], &["--transfer", "whole", "--policy", "in-order"]].concat(),
        )?,
        immediate: rows(&immediate, sequential_s)?,
    })
}

/// The times at which checkpoints of a recording were taken.
pub struct CheckpointTimes {
    /// Numbers of checkpoints, and seconds since the recording began.
    pub at_s: Vec<(u64, f64)>,
    /// The duration of the recording.
    pub recorded_s: f64,
}

impl CheckpointTimes {
    /// Returns the time of the checkpoint number `id`. Without one, it is the end of the recording.
    pub fn of(&self, id: Option<u64>) -> f64 {
        let taken = self.at_s.iter().find(|(known, _)| Some(*known) == id);
        taken.map_or(self.recorded_s, |(_, at_s)| *at_s)
    }
}

/// Returns the times of the intervals of an analysis.
fn interval_times(
    report: &Value,
    analysis: &Value,
    times: &CheckpointTimes,
) -> Result<Vec<IntervalTime>, Error> {
    let known = analysis["intervals"].as_array().map(Vec::as_slice).unwrap_or_default();
    let replayed = report["intervals"].as_array().into_iter().flatten();
    replayed
        .map(|one| {
            let index = number(one, "index")?;
            let interval = known
                .iter()
                .find(|interval| interval["index"].as_f64() == Some(index))
                .ok_or_else(|| {
                    Error::failed("read the analysis", format!("interval {index} has no ends"))
                })?;
            let (begin, end) = (interval["begin"]["checkpoint"].as_u64(), interval["end"].as_u64());
            Ok(IntervalTime {
                recorded_s: (times.of(end) - times.of(begin)).max(0.0),
                instructions: number(interval, "end_icount")? - number(interval, "from_icount")?,
                replay_s: number(one, "wall_ns")? / 1e9,
                start_s: start_ns(one)?.map(|ns| ns / 1e9),
            })
        })
        .collect()
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
