//! How long the whole takes, against the model: figures 6.14 and 6.15.
//!
//! Measured are: the recording, then its analysis with one job and two. Simulated, from the
//! intervals' measured times: more nodes, and intervals that are given out while the recording goes
//! on.

use super::super::measured::Run;
use super::super::output::{Csv, Outputs};
use super::super::simulating::Simulated;
use super::lines::{by_workload, in_detail, point, told};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// Writes them.
pub fn write(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    let chart = by_length(runs, "Total run time, seconds", &RUN_TIME);
    let plot = Figure { title: "Total run time".into(), charts: vec![chart] };
    let ours = told(runs, measured_and_simulated);
    let what = "total run time; measured with 1 and 2 jobs, *simulated* beyond";
    outputs.add(("6.14", "6.14-run-time", what), &run_times(runs), &plot, ours)?;

    let mut csv = Csv::new(
        "workload,interval_s,nodes,speed_up_simulated,speed_up_model,t_i_s,slowdown,r_squared",
    );
    for run in runs {
        let (t_i, slowdown, r_squared) = run.simulations.fit;
        for row in &run.simulations.immediate {
            let numbers = [
                run.every_s,
                row.nodes as f64,
                row.speed_up,
                row.formula_speed_up,
                t_i,
                slowdown,
                r_squared,
            ];
            csv.row(&[run.kind.key], &numbers);
        }
    }
    let ours = told(runs, |run| {
        simulated(run, FEW).map_or_else(String::new, |row| {
            format!(
                "{FEW} nodes {:.2} simulated, {:.2} by the model (slowdown {:.1})",
                row.speed_up, row.formula_speed_up, run.simulations.fit.1
            )
        })
    });
    let chart = by_length(runs, "Speed-up over one simulation", &SPEED_UP);
    let plot = Figure { title: "Speed-up".into(), charts: vec![chart, over_nodes(runs)] };
    let what = "speed-up of immediate dispatch, *simulated*, against the model";
    outputs.add(("6.15", "6.15-speed-up", what), &csv, &plot, ours)?;
    report.plot = plot;
    for run in runs {
        into_report(run, report);
    }
    Ok(())
}

/// As many as the paper had.
const FEW: u64 = 4;

/// What a chart shows: of a simulated cluster, of the model, of a measured run time.
struct Shown {
    simulated: fn(&Simulated) -> f64,
    model: fn(&Simulated) -> f64,
    measured: fn(&Run, f64) -> f64,
}

const RUN_TIME: Shown = Shown {
    simulated: |row| row.makespan_s,
    model: |row| row.formula_makespan_s,
    measured: |_, run_time_s| run_time_s,
};
const SPEED_UP: Shown = Shown {
    simulated: |row| row.speed_up,
    model: |row| row.formula_speed_up,
    measured: |run, run_time_s| run.simulations.sequential_s / run_time_s,
};

fn simulated(run: &Run, nodes: u64) -> Option<Simulated> {
    run.simulations.immediate.iter().find(|row| row.nodes == nodes).copied()
}

fn by_length(runs: &[Run], title: &str, shown: &Shown) -> Chart {
    let mut series = Vec::new();
    for (key, group) in by_workload(runs) {
        let line = |name: &str, value: &dyn Fn(&Run) -> Option<f64>| Series {
            name: format!("{key}: {name}"),
            points: group.iter().filter_map(|run| Some(point(run.every_s, value(run)?))).collect(),
        };
        series.push(line("4 nodes, simulated", &|run| {
            simulated(run, FEW).as_ref().map(shown.simulated)
        }));
        series.push(line("4 nodes, model", &|run| simulated(run, FEW).as_ref().map(shown.model)));
        series.push(line("2 jobs, deferred, measured", &|run| {
            let (_, run_time_s) = run.simulations.deferred.iter().find(|(jobs, _)| *jobs == 2)?;
            Some((shown.measured)(run, *run_time_s))
        }));
    }
    Chart {
        title: title.into(),
        x: Axis::new("interval, seconds", Scale::Log),
        y: Axis::new(title, Scale::Linear),
        series,
    }
}

fn run_times(runs: &[Run]) -> Csv {
    let mut csv = Csv::new(
        "workload,how,interval_s,nodes,run_time_s,speed_up,model_run_time_s,model_speed_up",
    );
    for run in runs {
        let all = &run.simulations;
        for (jobs, run_time_s) in &all.deferred {
            let numbers = [run.every_s, *jobs as f64, *run_time_s, all.sequential_s / run_time_s];
            csv.row(
                &[run.kind.key, "measured: deferred"],
                &[&numbers[..], &[f64::NAN; 2]].concat(),
            );
        }
        for (how, rows) in [
            ("simulated: deferred", &all.deferred_simulated),
            ("simulated: immediate", &all.immediate),
            ("simulated: immediate over 1 Gbit/s", &all.over_network),
        ] {
            for row in rows {
                let Simulated { nodes, makespan_s, speed_up, formula_makespan_s, formula_speed_up } =
                    *row;
                let numbers = [
                    run.every_s,
                    nodes as f64,
                    makespan_s,
                    speed_up,
                    formula_makespan_s,
                    formula_speed_up,
                ];
                csv.row(&[run.kind.key, how], &numbers);
            }
        }
    }
    csv
}

fn measured_and_simulated(run: &Run) -> String {
    let all = &run.simulations;
    let pairs: Vec<String> = all
        .deferred
        .iter()
        .filter_map(|(jobs, run_time_s)| {
            let row = all.deferred_simulated.iter().find(|row| row.nodes == *jobs)?;
            Some(format!(
                "with {jobs}: {run_time_s:.1} s measured, {:.1} s simulated",
                row.makespan_s
            ))
        })
        .collect();
    format!("deferred: {}", pairs.join(", "))
}

fn over_nodes(runs: &[Run]) -> Chart {
    let mut series = Vec::new();
    for run in in_detail(runs) {
        let line = |name: &str, of: fn(&Simulated) -> f64| Series {
            name: format!("{}, {} s: {name}", run.kind.key, run.every_s),
            points: run
                .simulations
                .immediate
                .iter()
                .map(|row| point(row.nodes as f64, of(row)))
                .collect(),
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

fn into_report(run: &Run, report: &mut Report) {
    let (key, all) = (run.key(), &run.simulations);
    report.figure(format!("{key}_sequential_s"), all.sequential_s);
    report.figure(format!("{key}_recorded_s"), run.recorded_s);
    for (jobs, run_time_s) in &all.deferred {
        report.figure(format!("{key}_deferred_{jobs}_jobs_s"), *run_time_s);
        if let Some(row) = all.deferred_simulated.iter().find(|row| row.nodes == *jobs) {
            report.figure(format!("{key}_deferred_{jobs}_nodes_simulated_s"), row.makespan_s);
            report.ratio(
                format!("{key}_simulated_over_measured_{jobs}"),
                row.makespan_s / run_time_s,
            );
        }
    }
    for row in &all.immediate {
        report.ratio(format!("{key}_speed_up_{}_nodes_simulated", row.nodes), row.speed_up);
        report.ratio(format!("{key}_speed_up_{}_nodes_model", row.nodes), row.formula_speed_up);
    }
}
