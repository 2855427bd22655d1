//! The stand-in for a slow simulator on the nodes of a cluster, which fetch checkpoints over links.
//!
//! ```text
//!   deferred    a recording that has ended                   1, 2, 4, 8, 16 nodes
//!   delivery    the same, most nodes: whole, missing, cached, over each link
//!   immediate   the analysis begins with the recording       from the begin of the recording
//! ```
//!
//! All nodes share this machine, so that their replays share its processors. The waits do not.
//! `keyframe plan` predicts each run, by the equations of the SimuBoost checkpoint paper (2.1 with
//! enough nodes, else 3.5) and by a simulation of the intervals.

use super::node_cluster::{Delivery, NodeCluster, NodeRequest};
use super::waiting::{note, speed_up_chart};
use super::{analyse_meanwhile, ns, record};
use crate::keyframe_json::{KeyframeJson, start_ns};
use crate::{Error, Options, Report};
use jiff::Timestamp;
use keyframe_plot::{Chart, Point};
use keyframe_test_hosts::Rate;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The links by their names in keys. The curve over the number of nodes uses the first link.
const LINKS: [(&str, Rate); 2] = [("1gbit", Rate::GIGABIT), ("10gbit", Rate::TEN_GIGABIT)];
/// An immediate analysis.
pub struct Immediate {
    nodes: u64,
    factor: u64,
}

/// The extent of the measurement.
pub struct Plan {
    /// The recorded time of the guest's work, in seconds.
    seconds: u32,
    /// The interval between checkpoints of the deferred analyses.
    every: &'static str,
    factor: u64,
    /// The numbers of nodes of the deferred analyses, ascending.
    nodes: &'static [u64],
    /// The links with which deliveries are compared.
    links: usize,
    /// The interval between checkpoints of the immediate analyses.
    immediate_every: &'static str,
    immediate: &'static [Immediate],
}

/// The SimuBoost paper has intervals of 1 s and more, and a factor of 31. With short intervals the
/// last one of each node is a small part of the whole.
pub const FULL: Plan = Plan {
    seconds: 40,
    every: "100ms",
    factor: 31,
    nodes: &[1, 2, 4, 8, 16],
    links: 2,
    immediate_every: "1s",
    immediate: &[
        Immediate { nodes: 16, factor: 12 },
        Immediate { nodes: 16, factor: 31 },
        Immediate { nodes: 8, factor: 31 },
    ],
};
/// A look at all parts.
pub const QUICK: Plan = Plan {
    seconds: 8,
    every: "100ms",
    factor: 8,
    nodes: &[1, 4, 8],
    links: 1,
    immediate_every: "500ms",
    immediate: &[Immediate { nodes: 8, factor: 4 }],
};

/// What all measurements share.
struct MeasurementContext<'a> {
    options: &'a Options,
    plan: &'a Plan,
    dir: &'a Path,
}

/// Measures the selected parts, and adds the results to `report`.
pub fn measure(
    options: &Options,
    plan: &Plan,
    [deferred, immediate, delivery]: [bool; 3],
    dir: &Path,
    report: &mut Report,
) -> Result<Vec<Chart>, Error> {
    let stand_in = note(plan.factor);
    report.notes.insert("nodes".into(), format!("{stand_in}; immediate: the factor in the key"));
    let context = MeasurementContext { options, plan, dir };
    let recording = dir.join("nodes-recording");
    if deferred || delivery {
        record(options, ("idle", plan.seconds), plan.every, dir, &recording)?;
    }
    let most = plan.nodes.iter().chain(plan.immediate.iter().map(|one| &one.nodes)).max();
    let most = most.map_or(1, |most| *most as u32);
    let mut charts = Vec::new();
    let links = if delivery { plan.links } else { 1 };
    for (at, (link, rate)) in LINKS.into_iter().take(links).enumerate() {
        let cluster_dir = dir.join(link);
        let cluster = NodeCluster::start(options, &cluster_dir, most, rate)?;
        if at == 0 && deferred {
            charts.push(context.deferred(&cluster, &recording, report)?);
        }
        for run in plan.immediate.iter().filter(|_| at == 0 && immediate) {
            context.immediate(&cluster, run, report)?;
        }
        if delivery {
            context.deliveries(&cluster, link, &recording, report)?;
        }
    }
    Ok(charts)
}

impl MeasurementContext<'_> {
    /// Analyses the recording with each number of nodes.
    fn deferred(
        &self,
        cluster: &NodeCluster<'_>,
        recording: &Path,
        report: &mut Report,
    ) -> Result<Chart, Error> {
        let (mut points, mut predicted) = (Vec::new(), Vec::new());
        let mut one: Option<(f64, PathBuf)> = None;
        for nodes in self.plan.nodes.iter().copied() {
            self.options.say(format!("nodes, {nodes} deferred"));
            let out = self.dir.join(format!("deferred-{nodes}"));
            let request = NodeRequest {
                recording,
                nodes,
                delivery: Delivery::Missing,
                factor: self.plan.factor,
                follow: false,
                out: &out,
            };
            let began_ns = unix_ns(Timestamp::now());
            let analysed = cluster.analyse(&request)?.report;
            let ended_ns = unix_ns(Timestamp::now());
            let wall_ns = ns(&analysed, "wall_ns");
            report.figure(format!("nodes_{nodes}_ns"), wall_ns);
            // Slurm starts the pilots, and the results are merged.
            let (first_ns, last_ns) = work_span_ns(&analysed);
            report.figure(format!("nodes_{nodes}_before_first_interval_ns"), first_ns - began_ns);
            report.figure(format!("nodes_{nodes}_after_last_interval_ns"), ended_ns - last_ns);
            let (one_ns, analysis) = one.get_or_insert((wall_ns, out));
            let speed_up = *one_ns / wall_ns;
            report.ratio(format!("speedup_nodes_{nodes}"), speed_up);
            report.ratio(format!("speedup_over_nodes_{nodes}"), speed_up / nodes as f64);
            points.push(point(nodes, speed_up));
            // From the intervals of one node.
            let prediction =
                Self::predict(cluster.keyframe(), recording, analysis, nodes, &["--deferred"])?;
            let simulated_ns = prediction.simulated_ns - prediction.recorded_ns;
            report.ratio(format!("simulation_over_measured_nodes_{nodes}"), simulated_ns / wall_ns);
            predicted.push(point(nodes, *one_ns / simulated_ns));
        }
        let title = format!(
            "Nodes that wait {} times the recorded time, deferred, {}",
            self.plan.factor, LINKS[0].0
        );
        let series = vec![("measured".into(), points), ("simulated".into(), predicted)];
        Ok(speed_up_chart(title, "nodes", series))
    }

    /// Analyses the recording with the most nodes and each delivery.
    fn deliveries(
        &self,
        cluster: &NodeCluster<'_>,
        link: &str,
        recording: &Path,
        report: &mut Report,
    ) -> Result<(), Error> {
        let nodes = self.plan.nodes.last().copied().unwrap_or(1);
        for delivery in [Delivery::Whole, Delivery::Missing, Delivery::Cached] {
            let key = format!("nodes_{nodes}_{link}_{}", delivery.key());
            self.options.say(&key);
            let request = NodeRequest {
                recording,
                nodes,
                delivery,
                factor: self.plan.factor,
                follow: false,
                out: &self.dir.join(&key),
            };
            let analysis = cluster.analyse(&request)?;
            report.figure(format!("{key}_ns"), ns(&analysis.report, "wall_ns"));
            report.figure(format!("{key}_fetched_bytes"), analysis.fetched_bytes);
            report.figure(format!("{key}_serve_cpu_ns"), analysis.serve_cpu_ns);
            let intervals = analysis.report["intervals"].as_array().into_iter().flatten();
            let starts: Vec<Option<f64>> = intervals.map(start_ns).collect::<Result<_, Error>>()?;
            report.figure(format!("{key}_starts"), starts.iter().flatten().count() as f64);
            report.figure(format!("{key}_all_starts_ns"), starts.iter().flatten().sum());
        }
        Ok(())
    }

    /// Records, and analyses at the same time.
    fn immediate(
        &self,
        cluster: &NodeCluster<'_>,
        Immediate { nodes, factor }: &Immediate,
        report: &mut Report,
    ) -> Result<(), Error> {
        let key = format!("immediate_{nodes}_nodes_factor_{factor}");
        self.options.say(format!("nodes, {key}"));
        let (recording, out) =
            (self.dir.join(format!("{key}-recording")), self.dir.join(format!("{key}-analysis")));
        let work = (("idle", self.plan.seconds), self.plan.immediate_every);
        let (analysis, took_ns) =
            analyse_meanwhile(self.options, work, self.dir, &recording, || {
                cluster.analyse(&NodeRequest {
                    recording: &recording,
                    nodes: *nodes,
                    delivery: Delivery::Missing,
                    factor: *factor,
                    follow: true,
                    out: &out,
                })
            })?;
        report.figure(format!("{key}_ns"), took_ns);
        report.figure(format!("{key}_fetched_bytes"), analysis.fetched_bytes);
        // Figure A.6: what serving the nodes costs the host that records.
        report.figure(format!("{key}_serve_cpu_ns"), analysis.serve_cpu_ns);
        let prediction = Self::predict(cluster.keyframe(), &recording, &out, *nodes, &[])?;
        report.figure(format!("{key}_recorded_ns"), prediction.recorded_ns);
        let serve_share = analysis.serve_cpu_ns / prediction.recorded_ns;
        report.ratio(format!("{key}_serve_cpu_over_recorded_time"), serve_share);
        let equation_key = format!("{key}_over_equation_{}", prediction.equation.replace('.', "_"));
        report.ratio(equation_key, took_ns / prediction.formula_ns);
        report.ratio(format!("{key}_over_simulation"), took_ns / prediction.simulated_ns);
        Ok(())
    }

    /// Predicts an analysis with `nodes` nodes by `keyframe plan`, from the times in `analysis`.
    fn predict(
        keyframe: KeyframeJson<'_>,
        recording: &Path,
        analysis: &Path,
        nodes: u64,
        more: &[&str],
    ) -> Result<Prediction, Error> {
        let (analysis, nodes) = (analysis.display().to_string(), nodes.to_string());
        let fixed = ["--analysis", &analysis, "--simulate", "--json", "--nodes", &nodes];
        let plan = keyframe.run(&["plan", "--from"], recording, &[&fixed[..], more].concat())?;
        let row = &plan["simulated"]["table"][0];
        let seconds = |value: &Value| value.as_f64().unwrap_or(f64::NAN) * 1e9;
        let is_enough = row["closed_form"]["formula"] == "enough";
        Ok(Prediction {
            recorded_ns: seconds(&plan["measured"]["recorded_s"]),
            simulated_ns: seconds(&row["makespan_s"]),
            formula_ns: seconds(&row["closed_form"]["run_time_s"]),
            equation: if is_enough { "2.1" } else { "3.5" },
        })
    }
}

/// The times of an analysis and its recording, as `keyframe plan` predicts them.
struct Prediction {
    recorded_ns: f64,
    simulated_ns: f64,
    /// By the equation.
    formula_ns: f64,
    equation: &'static str,
}

fn point(nodes: u64, y: f64) -> Point {
    Point { x: nodes as f64, y, deviation: None }
}

fn unix_ns(time: Timestamp) -> f64 {
    time.as_nanosecond() as f64
}

/// Returns the begin of the first interval and the end of the last one, in nanoseconds since 1970.
fn work_span_ns(analysed: &Value) -> (f64, f64) {
    let intervals = analysed["intervals"].as_array().into_iter().flatten();
    intervals.fold((f64::INFINITY, 0.0), |(first, last), interval| {
        let began = ns(interval, "began_at_ns");
        (f64::min(first, began), f64::max(last, began + ns(interval, "wall_ns")))
    })
}
