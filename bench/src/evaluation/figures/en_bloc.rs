//! Whole images against missing parts: the design of section 4.2.1, in which the server sends each
//! node the whole RAM and all sectors written so far, as a baseline. The bytes are exact, the times
//! are computed, and the run times are simulated.

use super::super::checkpoint_figures::CheckpointFigures;
use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{Outputs, PaperFigure};
use super::super::rounds::RunRounds;
use super::super::simulations::with_nodes;
use super::chart::{
    RunValue, by_workload, figure, spread_point, spread_row, spread_table, values_of_runs,
};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

const MIB: f64 = 1_048_576.0;
/// The number of nodes of the simulated runs, as in the paper.
const NODES: u64 = 4;

/// Writes it.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let quantities: [(&str, RunValue); 9] = [
        ("whole_bytes", whole_bytes),
        ("missing_bytes", missing_bytes),
        ("whole_over_missing", |run| whole_bytes(run) / missing_bytes(run)),
        ("whole_s_1gbit", |run| on_link_s(whole_bytes(run), 1e9)),
        ("missing_s_1gbit", |run| on_link_s(missing_bytes(run), 1e9)),
        ("whole_s_10gbit", |run| on_link_s(whole_bytes(run), 1e10)),
        ("missing_s_10gbit", |run| on_link_s(missing_bytes(run), 1e10)),
        ("whole_run_time_s_simulated", whole_run_time_s),
        ("missing_run_time_s_simulated", missing_run_time_s),
    ];
    let mut table = spread_table(&quantities.map(|(name, _)| name));
    for group in groups {
        spread_row(&mut table, group, &quantities.map(|(_, of)| group.spread(of)));
        let over_missing = group.spread(|run| whole_bytes(run) / missing_bytes(run));
        report.ratio(format!("{}_whole_over_missing", group.key()), over_missing.median);
    }
    let values = values_of_runs(groups, |group| {
        let mib = |of: RunValue| group.spread(|run| of(run) / MIB).decimals(1);
        let [whole_s, missing_s] =
            [whole_run_time_s, missing_run_time_s].map(|of| group.spread(of).median);
        format!(
            "whole {} MiB, missing {} MiB; {NODES} nodes over 1 Gbit/s: {whole_s:.1} s and \
             {missing_s:.1} s *simulated*",
            mib(whole_bytes),
            mib(missing_bytes)
        )
    });
    let title = "a checkpoint for a node: whole images en bloc against missing parts";
    let paper = PaperFigure { number: "S4.2.1", file: "s4.2.1-en-bloc", title };
    outputs.add(paper, &table, &chart(groups), values)
}

fn whole_bytes(run: &EvaluatedRun) -> f64 {
    run.mean(CheckpointFigures::whole_bytes)
}

fn missing_bytes(run: &EvaluatedRun) -> f64 {
    run.mean(CheckpointFigures::missing_bytes)
}

fn on_link_s(bytes: f64, bits_per_s: f64) -> f64 {
    bytes * 8.0 / bits_per_s
}

fn whole_run_time_s(run: &EvaluatedRun) -> f64 {
    with_nodes(&run.simulations.en_bloc, NODES).map_or(f64::NAN, |row| row.makespan_s)
}

fn missing_run_time_s(run: &EvaluatedRun) -> f64 {
    with_nodes(&run.simulations.over_network, NODES).map_or(f64::NAN, |row| row.makespan_s)
}

fn chart(groups: &[RunRounds]) -> Figure {
    let mut series = Vec::new();
    for (key, of_workload) in by_workload(groups) {
        let line = |name: &str, of: RunValue| Series {
            name: format!("{key}: {name}"),
            points: of_workload
                .iter()
                .map(|group| spread_point(group.every_s(), group.spread(of)))
                .collect(),
        };
        series.push(line("whole", |run| whole_bytes(run) / MIB));
        series.push(line("missing", |run| missing_bytes(run) / MIB));
    }
    figure(Chart {
        title: "Bytes for a node that has the checkpoint before: the whole, or what is missing"
            .into(),
        x: Axis::new("interval, seconds", Scale::Log),
        y: Axis::new("MiB, mean", Scale::Log),
        series,
    })
}
