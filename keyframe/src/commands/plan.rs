//! `keyframe plan`: how many nodes and how long intervals a parallel simulation wants.

mod measured;
mod options;
mod simulated;

use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use crate::words::replay::ReplayWords;
use keyframe_model::{
    Constants, Formula, Prediction, Recommendation, prediction_figure, prediction_table, recommend,
    recommend_nodes,
};
use keyframe_replay_driver::{RecordingMeasurements, SimulatedClusters};
use keyframe_store_keys::KeyArg;
use options::ClusterArgs;
use serde::Serialize;
use std::path::PathBuf;

/// Predict a parallel simulation; recommend nodes and intervals
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A run is cut into intervals of L seconds, which N nodes simulate side by side while the run is still recorded. Two formulas give the
total time (Eicher, VM Checkpoint Storage and Distribution for SimuBoost, 2015): equation 2.1 if there are enough nodes, so that no
interval waits for one, and equation 3.5 if there are too few. The output says which one applies, and why. Without --s-cp the
slowdown by checkpoints follows from the pause: 1 + t_c/L.

With --from the run's time and the pause are those of a recording. With --analysis a line through the intervals of an analysis of that
recording gives the slowdown of a simulation and its start time. Values that you give yourself take precedence. The formulas assume
equal intervals, and know neither the network nor nodes that start and fail.

With --simulate the command also simulates a cluster event by event for each N. With --from it takes the recording's own intervals: each
is ready when its checkpoint was sealed, and takes as long as its analysis took. Otherwise all intervals are equal. One server feeds all
nodes over --network, and a node keeps what it has fetched. If a node fails, its interval starts again on another node. This is a
prediction: no VM runs.

Examples:
  keyframe plan --t-vm 3600 --s-sim 100 --s-log 1.08 --t-c 0.1 --t-i 1
  keyframe plan --t-vm 600 --s-sim 31 --t-c 0.05 --t-i 3.7 --nodes 4 --plot plan.svg
  keyframe analyze R --tool icount --out A && keyframe plan --from R --analysis A --nodes 8
  keyframe plan --from R --analysis A --nodes 1,2,4,8,16 --simulate --network 1Gbit --node-start 1s
  keyframe plan --from R --analysis A --nodes 16 --simulate --network 1Gbit --transfer whole --policy in-order --deferred
  keyframe plan --t-vm 3600 --s-sim 100 --t-c 0.1 --t-i 1 --nodes 32 --simulate --mtbf 1h --repair 5m --seed 7"
)]
pub struct Plan {
    /// How long the VM runs alone, in seconds
    #[arg(long, value_name = "SECONDS", required_unless_present = "from")]
    t_vm: Option<f64>,
    /// How many times as long its simulation takes
    #[arg(long, value_name = "FACTOR", required_unless_present = "analysis")]
    s_sim: Option<f64>,
    /// How many times as long it takes when it is recorded
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    s_log: f64,
    /// The pause of a checkpoint, in seconds
    #[arg(long, value_name = "SECONDS", required_unless_present = "from")]
    t_c: Option<f64>,
    /// How long a simulation takes to begin, in seconds
    #[arg(long, value_name = "SECONDS", required_unless_present = "analysis")]
    t_i: Option<f64>,
    /// How many times as long an interval takes with its checkpoint, whatever its length
    #[arg(long, value_name = "FACTOR")]
    s_cp: Option<f64>,
    /// Available nodes; several numbers are compared
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    nodes: Vec<u64>,
    /// Take the run's time and the pause from this recording
    #[arg(long, value_name = "REC")]
    from: Option<PathBuf>,
    /// The store that has its checkpoints [default: the one that the recording names]
    #[arg(long, value_name = "STORE", requires = "from")]
    store: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    /// Take the simulation's slowdown and begin from the intervals of this analysis of it
    #[arg(long, value_name = "DIR", requires = "from")]
    analysis: Option<PathBuf>,
    /// Draw speed-up over nodes and over interval length (FILE.svg, FILE.png)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    constants: Constants,
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<RecordingMeasurements>,
    /// Nodes with which no interval waits.
    n_opt: u64,
    /// The best length for the nodes that there are, or for these.
    l_opt_s: f64,
    run_time_s: f64,
    speed_up: f64,
    formula: Formula,
    equation: &'static str,
    why: String,
    /// With nodes enough.
    enough: Recommendation,
    /// With those that there are: the formulas' best for each number.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    with_nodes: Vec<Recommendation>,
    table: Vec<Prediction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    simulated: Option<SimulatedClusters>,
}

impl Plan {
    /// Computes and prints it.
    pub fn run(&self) -> Outcome {
        if let Some(path) = &self.plot {
            keyframe_plot::FigureFormat::of(path).map_err(|e| Failure::new(e.to_string()))?;
        }
        let measured = self.measured()?;
        let constants = self.constants(measured.as_ref())?;
        let enough = recommend_nodes(&constants);
        let with_nodes: Vec<Recommendation> =
            self.nodes.iter().map(|nodes| recommend(&constants, *nodes)).collect();
        let chosen = with_nodes.last().copied().unwrap_or(enough);
        let table = prediction_table(&constants, enough.best.nodes, &self.nodes);
        let simulated = self
            .cluster
            .simulate
            .then(|| simulated::simulate(&self.cluster, &constants, measured.as_ref(), &self.nodes))
            .transpose()?;
        if let Some(path) = &self.plot {
            let rows = simulated.as_ref().map_or(&[][..], |simulated| &simulated.table);
            let figure = prediction_figure(&constants, enough.best.nodes, &self.nodes, rows);
            figure.write(path).map_err(|e| Failure::new(crate::failure::chain(&e)))?;
        }
        let report = Report {
            constants,
            measured,
            n_opt: enough.best.nodes,
            l_opt_s: chosen.best.length_s,
            run_time_s: chosen.best.run_time_s,
            speed_up: chosen.best.speed_up,
            formula: chosen.best.formula,
            equation: chosen.best.formula.equation(),
            why: chosen.why(),
            enough,
            with_nodes,
            table,
            simulated,
        };
        if self.json {
            output::json(&report)?;
        } else {
            tell(&report)?;
        }
        Ok(DONE)
    }

    fn measured(&self) -> Result<Option<RecordingMeasurements>, Failure> {
        let Some(from) = &self.from else { return Ok(None) };
        let (store, analysis) = (self.store.as_deref(), self.analysis.as_deref());
        let events = ReplayWords::default();
        Ok(Some(RecordingMeasurements::read(from, store, &self.key, analysis, &events)?))
    }

    fn constants(&self, measured: Option<&RecordingMeasurements>) -> Result<Constants, Failure> {
        let fit = measured.and_then(|measured| measured.fit);
        let missing = |name: &str, from: &str| {
            Failure::new(format!("--{name} is not given, and {from} does not tell"))
                .fix(format!("give --{name}"))
        };
        let given = |given: Option<f64>, found: Option<f64>, name: &str, from: &str| {
            given.or(found).ok_or_else(|| missing(name, from))
        };
        let recorded_s = measured.map(|measured| measured.recorded_s / self.s_log);
        let constants = Constants {
            t_vm: given(self.t_vm, recorded_s, "t-vm", "the recording")?,
            s_sim: given(
                self.s_sim,
                fit.map(|fit| fit.slowdown * self.s_log),
                "s-sim",
                "the analysis",
            )?,
            s_log: self.s_log,
            t_c: given(
                self.t_c,
                measured.and_then(|m| m.pause_s),
                "t-c",
                "a recording without checkpoints",
            )?,
            t_i: given(self.t_i, fit.map(|fit| fit.t_i), "t-i", "the analysis")?,
            s_cp: self.s_cp,
        };
        constants.check().map_err(|e| {
            Failure::new(e.to_string())
                .fix(format!("give another one: --{}", e.name.replace('_', "-")))
        })?;
        Ok(constants)
    }
}

fn tell(report: &Report) -> Result<(), Failure> {
    let Constants { t_vm, s_sim, s_log, t_c, t_i, s_cp } = report.constants;
    if let Some(measured) = &report.measured {
        output::print_line(&measured::line(measured))?;
    }
    let given = s_cp.map_or_else(|| "1 + t_c/L".into(), |factor| factor.to_string());
    output::print_line(&format!(
        "T_vm {t_vm:.1} s, s_sim {s_sim:.2}, s_log {s_log:.2}, t_c {t_c:.4} s, t_i {t_i:.3} s, s_cp {given}; one simulation: {:.0} s",
        s_sim * t_vm
    ))?;
    let line = |plan: &Recommendation| {
        let Prediction { nodes, length_s, formula, run_time_s, speed_up } = plan.best;
        format!(
            "N {nodes}, L {length_s:.3} s: {run_time_s:.1} s, {speed_up:.2} times as fast (equation {}: {})",
            formula.equation(),
            plan.why()
        )
    };
    output::print_line(&format!("best:  {}", line(&report.enough)))?;
    for plan in &report.with_nodes {
        output::print_line(&format!("given: {}", line(plan)))?;
    }
    let mut nodes: Vec<u64> = report.table.iter().map(|point| point.nodes).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let header: Vec<String> = std::iter::once("speed-up at L".into())
        .chain(nodes.iter().map(|n| format!("N {n}")))
        .collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows: Vec<Vec<String>> = report
        .table
        .chunks(nodes.len().max(1))
        .map(|points| {
            let length =
                points.first().map_or_else(String::new, |point| format!("{} s", point.length_s));
            let cell = |point: &Prediction| match point.formula {
                Formula::Limited => format!("{:.2} ", point.speed_up),
                Formula::Enough => format!("{:.2}*", point.speed_up),
            };
            std::iter::once(length).chain(points.iter().map(cell)).collect()
        })
        .collect();
    output::print_line("")?;
    output::print_line(output::table(&header, &rows).trim_end())?;
    output::print_line("* nodes enough (equation 2.1); the others by equation 3.5")?;
    report.simulated.as_ref().map_or(Ok(()), simulated::tell)
}
