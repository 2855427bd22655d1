//! A simulated cluster beside the formulas: with intervals as they were measured, or equal ones.

use super::options::ClusterArgs;
use crate::failure::Failure;
use crate::output;
use keyframe_model::simulation::{ClusterRun, PlannedRun, SimulationError};
use keyframe_model::{Constants, Formula};
use keyframe_replay_driver::RecordingMeasurements;
use serde::Serialize;

/// The numbers of nodes without `--nodes`.
const NODES: [u64; 5] = [1, 2, 4, 8, 16];
/// More have more slots than are worth looking at one by one.
const NODES_MAX: u64 = 4096;

/// The simulation in the output of `--json`.
#[derive(Serialize)]
pub struct Simulated {
    /// Where the intervals' times come from.
    times: &'static str,
    /// The intervals of a recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    intervals: Option<u64>,
    /// Of these: not simulated yet, so that the line through the others has their time.
    #[serde(skip_serializing_if = "Option::is_none")]
    estimated: Option<u64>,
    /// The shortest and the longest one's simulation, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    range_s: Option<(f64, f64)>,
    /// One simulation of all, in seconds.
    sequential_s: f64,
    /// Slots of each node.
    slots: usize,
    /// One for each number of nodes.
    pub table: Vec<ClusterRun>,
}

impl Simulated {
    /// Simulates a cluster of each number of `nodes`.
    pub fn of(
        args: &ClusterArgs,
        constants: &Constants,
        measured: Option<&RecordingMeasurements>,
        nodes: &[u64],
    ) -> Result<Self, Failure> {
        let nodes = if nodes.is_empty() { &NODES[..] } else { nodes };
        if let Some(most) = nodes.iter().find(|nodes| **nodes > NODES_MAX) {
            return Err(Failure::new(format!("{most} nodes cannot be simulated: at most {NODES_MAX} can"))
                .fix("ask for fewer with --nodes, or leave --simulate out: the formulas know of no limit"));
        }
        let run = match measured {
            Some(measured) => {
                let intervals = measured.simulated_intervals(constants, args.sends_all());
                PlannedRun::of_intervals(constants, intervals, measured.length_s())
            }
            None => PlannedRun::of_equal_intervals(constants),
        };
        let on = |count: &u64| {
            run.on(*count, &args.cluster(*count)).map_err(|e| failed(&e, *count, args))
        };
        let intervals = run.intervals().map(|all| all.len() as u64);
        let estimated = measured.map(|measured| {
            measured.pieces.iter().filter(|one| one.took_s.is_none()).count() as u64
        });
        let are_measured = estimated < intervals;
        Ok(Self {
            times: if are_measured { "measured interval times" } else { "constants" },
            intervals,
            estimated,
            range_s: run.range_s(),
            sequential_s: run.sequential_s(),
            slots: args.cluster(1).slots(),
            table: nodes.iter().map(on).collect::<Result<_, _>>()?,
        })
    }

    /// Prints the simulation for users.
    pub fn tell(&self) -> Result<(), Failure> {
        let of = match (self.intervals, self.range_s, self.estimated) {
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
            self.times, self.sequential_s
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
        let rows: Vec<Vec<String>> = self.table.iter().map(|row| self.row(row)).collect();
        output::print_line(output::table(&header, &rows).trim_end())?;
        output::print_line(
            "formula: equal intervals of the mean length, no network, start or failure; * nodes enough (2.1)",
        )
    }

    fn row(&self, row: &ClusterRun) -> Vec<String> {
        let ClusterRun { nodes, makespan_s, speed_up, efficiency, closed_form, outcome } = row;
        let busy_s: f64 = outcome.nodes.iter().map(|node| node.busy_s).sum();
        let all_s = makespan_s * (*nodes as f64) * self.slots as f64;
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
}

fn failed(error: &SimulationError, nodes: u64, args: &ClusterArgs) -> Failure {
    let failure = Failure::new(format!("simulate {nodes} nodes: {error}"));
    match error {
        SimulationError::Lost { .. } if !args.is_repaired() => failure.fix(
            "let nodes come back (--repair 1m), live longer (--mtbf), or take another --seed or more --nodes",
        ),
        SimulationError::Hopeless { .. } => {
            failure.fix("give a longer --mtbf, or cut the recording into shorter intervals")
        }
        _ => failure,
    }
}
