//! A simulated cluster beside the formulas: with intervals as they were measured, or equal ones.

use super::measured::Measured;
use super::options::ClusterArgs;
use crate::failure::Failure;
use crate::output;
use keyframe_model::simulation::{
    SimulatedInterval, SimulationError, SimulationOutcome, equal_intervals, simulate,
};
use keyframe_model::{Constants, Formula, Prediction, recommend};
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
    pub table: Vec<Row>,
}

/// The simulated run with a number of nodes.
#[derive(Serialize)]
pub struct Row {
    /// Nodes.
    pub nodes: u64,
    /// From the recording's begin to the last interval's end, in seconds.
    makespan_s: f64,
    /// Over one simulation of all.
    pub speed_up: f64,
    /// Of that, for each slot.
    efficiency: f64,
    /// What the formulas say of equal intervals of the mean length, on a cluster without a network
    /// and failures.
    closed_form: Prediction,
    /// What happened.
    outcome: SimulationOutcome,
}

impl Simulated {
    /// Simulates a cluster of each number of `nodes`.
    pub fn of(
        args: &ClusterArgs,
        constants: &Constants,
        measured: Option<&Measured>,
        nodes: &[u64],
    ) -> Result<Self, Failure> {
        let nodes = if nodes.is_empty() { &NODES[..] } else { nodes };
        if let Some(most) = nodes.iter().find(|nodes| **nodes > NODES_MAX) {
            return Err(Failure::new(format!("{most} nodes cannot be simulated: at most {NODES_MAX} can"))
                .fix("ask for fewer with --nodes, or leave --simulate out: the formulas know of no limit"));
        }
        let given = measured.map(|measured| of_recording(measured, constants, args.sends_all()));
        let sequential_s = match &given {
            Some(intervals) => {
                // All begin; one simulation of all begins once.
                let all_s: f64 = intervals.iter().map(|interval| interval.work_s).sum();
                (all_s - (intervals.len() as f64 - 1.0) * constants.t_i).max(f64::MIN_POSITIVE)
            }
            None => constants.s_sim * constants.t_vm,
        };
        // The formulas are asked about as much of the run as is simulated.
        let of_part =
            |measured: &Measured| measured.pieces.iter().map(|piece| piece.length_s).sum::<f64>();
        let constants = match measured.map(of_part).filter(|part_s| *part_s > 0.0) {
            Some(part_s) => &Constants { t_vm: part_s / constants.s_log, ..*constants },
            None => constants,
        };
        let mut table = Vec::with_capacity(nodes.len());
        for count in nodes {
            let cluster = args.cluster(*count);
            let slots = cluster.slots();
            let length = match &given {
                Some(intervals) => constants.s_log * constants.t_vm / intervals.len() as f64,
                None => recommend(constants, slots as u64).best.length_s,
            };
            let own = given.is_none().then(|| equal_intervals(constants, length));
            let intervals = given.as_ref().or(own.as_ref()).map_or(&[][..], Vec::as_slice);
            let outcome = simulate(intervals, &cluster).map_err(|e| failed(&e, *count, args))?;
            table.push(Row {
                nodes: *count,
                makespan_s: outcome.makespan_s,
                speed_up: outcome.speed_up(sequential_s),
                efficiency: outcome.efficiency(sequential_s, slots),
                closed_form: Prediction::at(constants, slots as u64, length),
                outcome,
            });
        }
        let works = || given.iter().flatten().map(|interval| interval.work_s);
        let estimated = measured.map(|measured| {
            measured.pieces.iter().filter(|one| one.took_s.is_none()).count() as u64
        });
        let are_measured =
            given.is_some() && estimated < given.as_ref().map(|all| all.len() as u64);
        Ok(Self {
            times: if are_measured { "measured interval times" } else { "constants" },
            intervals: given.as_ref().map(|all| all.len() as u64),
            estimated,
            range_s: given
                .as_ref()
                .map(|_| (works().fold(f64::INFINITY, f64::min), works().fold(0.0, f64::max))),
            sequential_s,
            slots: args.cluster(1).slots(),
            table,
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

    fn row(&self, row: &Row) -> Vec<String> {
        let Row { nodes, makespan_s, speed_up, efficiency, closed_form, outcome } = row;
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

/// The intervals of a recording, as they were measured; what was not is on the line.
fn of_recording(
    measured: &Measured,
    constants: &Constants,
    sends_all: bool,
) -> Vec<SimulatedInterval> {
    measured
        .pieces
        .iter()
        .map(|piece| SimulatedInterval {
            ready_s: piece.ready_s,
            work_s: piece.took_s.unwrap_or_else(|| constants.simulation(piece.length_s)),
            image_bytes: if sends_all {
                piece.ram_bytes
            } else {
                piece.stored_bytes.min(piece.ram_bytes)
            },
            new_bytes: piece.new_bytes,
        })
        .collect()
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
