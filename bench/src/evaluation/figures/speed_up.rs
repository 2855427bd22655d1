//! Run times and speed-ups against the model: figures 6.14 and 6.15.
//!
//! Measured: the recording, and its analysis with one job and with two after it. Simulated from the
//! measured times of the intervals: more nodes, and intervals that are dispatched during the
//! recording.

use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::simulations::SimulatedRun;
use super::chart::{by_workload, in_detail, point, summary};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// The number of nodes in the paper.
const PAPER_NODES: u64 = 4;

/// Writes them.
pub fn write(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let chart = by_interval(runs, "Total run time, seconds", &RUN_TIME);
    let plot = Figure { title: "Total run time".into(), charts: vec![chart] };
    let values = summary(runs, measured_and_simulated);
    let title = "total run time; measured with 1 and 2 jobs, *simulated* beyond";
    let paper = PaperFigure { number: "6.14", file: "6.14-run-time", title };
    outputs.add(paper, &run_times(runs), &plot, values)?;

    let values = summary(runs, |run| {
        with_nodes(run, PAPER_NODES).map_or_else(String::new, |row| {
            format!(
                "{PAPER_NODES} nodes {:.2} simulated, {:.2} by the model (slowdown {:.1})",
                row.speed_up, row.formula_speed_up, run.simulations.fit.slowdown
            )
        })
    });
    let chart = by_interval(runs, "Speed-up over one simulation", &SPEED_UP);
    let plot = Figure { title: "Speed-up".into(), charts: vec![chart, over_nodes(runs)] };
    let title = "speed-up of immediate dispatch, *simulated*, against the model";
    let paper = PaperFigure { number: "6.15", file: "6.15-speed-up", title };
    outputs.add(paper, &speed_ups(runs), &plot, values)?;
    report.plot = plot;
    for run in runs {
        add_to_report(run, report);
    }
    Ok(())
}

/// The values that a chart shows.
struct ShownValues {
    /// The value of a simulated cluster.
    simulated: fn(&SimulatedRun) -> f64,
    /// The value of the model.
    model: fn(&SimulatedRun) -> f64,
    /// The value of a measured run time in seconds.
    measured: fn(&EvaluatedRun, f64) -> f64,
}

const RUN_TIME: ShownValues = ShownValues {
    simulated: |row| row.makespan_s,
    model: |row| row.formula_makespan_s,
    measured: |_, run_time_s| run_time_s,
};
const SPEED_UP: ShownValues = ShownValues {
    simulated: |row| row.speed_up,
    model: |row| row.formula_speed_up,
    measured: |run, run_time_s| run.simulations.sequential_s / run_time_s,
};

/// Returns the simulation of immediate dispatch with `nodes` nodes.
fn with_nodes(run: &EvaluatedRun, nodes: u64) -> Option<SimulatedRun> {
    run.simulations.immediate.iter().find(|row| row.nodes == nodes).copied()
}

fn by_interval(runs: &[EvaluatedRun], title: &str, shown: &ShownValues) -> Chart {
    let mut series = Vec::new();
    for (key, group) in by_workload(runs) {
        let line = |name: &str, value: &dyn Fn(&EvaluatedRun) -> Option<f64>| Series {
            name: format!("{key}: {name}"),
            points: group.iter().filter_map(|run| Some(point(run.every_s, value(run)?))).collect(),
        };
        series.push(line("4 nodes, simulated", &|run| {
            with_nodes(run, PAPER_NODES).as_ref().map(shown.simulated)
        }));
        series.push(line("4 nodes, model", &|run| {
            with_nodes(run, PAPER_NODES).as_ref().map(shown.model)
        }));
        series.push(line("2 jobs, deferred, measured", &|run| {
            let with_two = run.simulations.deferred.iter().find(|measured| measured.jobs == 2)?;
            Some((shown.measured)(run, with_two.run_time_s))
        }));
    }
    Chart {
        title: title.into(),
        x: Axis::new("interval, seconds", Scale::Log),
        y: Axis::new(title, Scale::Linear),
        series,
    }
}

fn run_times(runs: &[EvaluatedRun]) -> CsvTable {
    let mut table = CsvTable::new(&[
        "workload",
        "how",
        "interval_s",
        "nodes",
        "run_time_s",
        "speed_up",
        "model_run_time_s",
        "model_speed_up",
    ]);
    for run in runs {
        let all = &run.simulations;
        for measured in &all.deferred {
            let run_time_s = measured.run_time_s;
            let speed_up = all.sequential_s / run_time_s;
            let (nodes, none) = (measured.jobs as f64, f64::NAN);
            let numbers = [run.every_s, nodes, run_time_s, speed_up, none, none];
            table.row(&[run.workload.key, "measured: deferred"], &numbers);
        }
        for (how, rows) in [
            ("simulated: deferred", &all.deferred_simulated),
            ("simulated: immediate", &all.immediate),
            ("simulated: immediate over 1 Gbit/s", &all.over_network),
        ] {
            for row in rows {
                let numbers = [
                    run.every_s,
                    row.nodes as f64,
                    row.makespan_s,
                    row.speed_up,
                    row.formula_makespan_s,
                    row.formula_speed_up,
                ];
                table.row(&[run.workload.key, how], &numbers);
            }
        }
    }
    table
}

fn speed_ups(runs: &[EvaluatedRun]) -> CsvTable {
    let mut table = CsvTable::new(&[
        "workload",
        "interval_s",
        "nodes",
        "speed_up_simulated",
        "speed_up_model",
        "t_i_s",
        "slowdown",
        "r_squared",
    ]);
    for run in runs {
        let fit = run.simulations.fit;
        for row in &run.simulations.immediate {
            let numbers = [
                run.every_s,
                row.nodes as f64,
                row.speed_up,
                row.formula_speed_up,
                fit.t_i_s,
                fit.slowdown,
                fit.r_squared,
            ];
            table.row(&[run.workload.key], &numbers);
        }
    }
    table
}

fn measured_and_simulated(run: &EvaluatedRun) -> String {
    let all = &run.simulations;
    let pairs: Vec<String> = all
        .deferred
        .iter()
        .filter_map(|measured| {
            let row = all.deferred_simulated.iter().find(|row| row.nodes == measured.jobs)?;
            Some(format!(
                "with {}: {:.1} s measured, {:.1} s simulated",
                measured.jobs, measured.run_time_s, row.makespan_s
            ))
        })
        .collect();
    format!("deferred: {}", pairs.join(", "))
}

fn over_nodes(runs: &[EvaluatedRun]) -> Chart {
    let mut series = Vec::new();
    for run in in_detail(runs) {
        let rows = &run.simulations.immediate;
        let line = |name: &str, of: fn(&SimulatedRun) -> f64| Series {
            name: format!("{}: {name}", run.label()),
            points: rows.iter().map(|row| point(row.nodes as f64, of(row))).collect(),
        };
        series.push(line("simulated", |row| row.speed_up));
        series.push(line("model", |row| row.formula_speed_up));
    }
    Chart {
        title: "By nodes, immediate".into(),
        x: Axis::new("nodes", Scale::Log),
        y: Axis::new("speed-up", Scale::Linear),
        series,
    }
}

fn add_to_report(run: &EvaluatedRun, report: &mut Report) {
    let (key, all) = (run.key(), &run.simulations);
    report.figure(format!("{key}_sequential_s"), all.sequential_s);
    report.figure(format!("{key}_recorded_s"), run.recorded_s);
    for measured in &all.deferred {
        let jobs = measured.jobs;
        report.figure(format!("{key}_deferred_{jobs}_jobs_s"), measured.run_time_s);
        if let Some(row) = all.deferred_simulated.iter().find(|row| row.nodes == jobs) {
            report.figure(format!("{key}_deferred_{jobs}_nodes_simulated_s"), row.makespan_s);
            let ratio = row.makespan_s / measured.run_time_s;
            report.ratio(format!("{key}_simulated_over_measured_{jobs}"), ratio);
        }
    }
    for row in &all.immediate {
        report.ratio(format!("{key}_speed_up_{}_nodes_simulated", row.nodes), row.speed_up);
        report.ratio(format!("{key}_speed_up_{}_nodes_model", row.nodes), row.formula_speed_up);
    }
}
