//! A simulated cluster beside the formulas: with intervals as they were measured, or equal ones.

use super::options::ClusterArgs;
use crate::failure::Failure;
use crate::output;
use keyframe_model::simulation::{ClusterRun, SimulationError};
use keyframe_model::{Constants, Formula};
use keyframe_replay_driver::{FailedSimulation, RecordingMeasurements, SimulatedClusters};

/// The numbers of nodes without `--nodes`.
const NODES: [u64; 5] = [1, 2, 4, 8, 16];
/// More have more slots than are worth looking at one by one.
const NODES_MAX: u64 = 4096;

/// Simulates a cluster of each number of `nodes`.
pub fn simulate(
    args: &ClusterArgs,
    constants: &Constants,
    measured: Option<&RecordingMeasurements>,
    nodes: &[u64],
) -> Result<SimulatedClusters, Failure> {
    let nodes = if nodes.is_empty() { &NODES[..] } else { nodes };
    if let Some(most) = nodes.iter().find(|nodes| **nodes > NODES_MAX) {
        return Err(Failure::new(format!(
            "{most} nodes cannot be simulated: at most {NODES_MAX} can"
        ))
        .fix(
            "ask for fewer with --nodes, or leave --simulate out: the formulas know of no limit",
        ));
    }
    let cluster = |count| args.cluster(count);
    SimulatedClusters::of((&cluster, args.sends_all()), constants, measured, nodes)
        .map_err(|e| failed(&e, args))
}

/// Prints the simulation for users.
pub fn tell(simulated: &SimulatedClusters) -> Result<(), Failure> {
    let of = match (simulated.intervals, simulated.range_s, simulated.estimated) {
        (Some(intervals), Some((least, most)), Some(estimated)) => {
            let guessed = if estimated > 0 {
                format!(", {estimated} of them not simulated yet and taken from t_i and s_sim")
            } else {
                String::new()
            };
            format!("{intervals} intervals of {least:.2} to {most:.2} s{guessed}")
        }
        _ => "equal intervals of the best length for each N".into(),
    };
    output::print_line("")?;
    output::print_line(&format!(
        "simulated from {}: {of}; one simulation: {:.1} s",
        simulated.times, simulated.sequential_s
    ))?;
    let header = [
        "N",
        "makespan",
        "speed-up",
        "efficiency",
        "busy",
        "sent",
        "failures",
        "formula: speed-up",
        "makespan",
    ];
    let rows: Vec<Vec<String>> = simulated.table.iter().map(|row| cells(simulated, row)).collect();
    output::print_line(output::table(&header, &rows).trim_end())?;
    output::print_line(
        "formula: equal intervals of the mean length, no network, start or failure; * nodes enough (2.1)",
    )
}

fn cells(simulated: &SimulatedClusters, row: &ClusterRun) -> Vec<String> {
    let ClusterRun { nodes, makespan_s, speed_up, efficiency, closed_form, outcome } = row;
    let busy_s: f64 = outcome.nodes.iter().map(|node| node.busy_s).sum();
    let all_s = makespan_s * (*nodes as f64) * simulated.slots as f64;
    let mark = if closed_form.formula == Formula::Enough { "*" } else { " " };
    vec![
        nodes.to_string(),
        format!("{makespan_s:.1} s"),
        format!("{speed_up:.2}"),
        format!("{:.0}%", efficiency * 100.0),
        format!("{:.0}%", busy_s / all_s * 100.0),
        output::bytes(outcome.sent_bytes as u64),
        outcome.failures().to_string(),
        format!("{:.2}{mark}", closed_form.speed_up),
        format!("{:.1} s", closed_form.run_time_s),
    ]
}

fn failed(error: &FailedSimulation, args: &ClusterArgs) -> Failure {
    let failure = Failure::new(error.to_string());
    match &error.source {
        SimulationError::Lost { .. } if !args.is_repaired() => failure.fix(
            "let nodes come back (--repair 1m), live longer (--mtbf), or take another --seed or more --nodes",
        ),
        SimulationError::Hopeless { .. } => {
            failure.fix("give a longer --mtbf, or cut the recording into shorter intervals")
        }
        _ => failure,
    }
}
