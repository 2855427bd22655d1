//! Run times and speed-ups against the model: figures 6.14 and 6.15.
//!
//! Measured: the recording, and its analysis with one job and with two after it. Simulated from the
//! measured times of the intervals: more nodes, and intervals that are dispatched during the
//! recording. A speed-up is over one replay of the whole recording, which is measured.

use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::rounds::{RunRounds, Spread, spread_columns};
use super::super::simulations::{SimulatedRun, with_nodes};
use super::chart::{
    RunValue, by_workload, in_detail, point, spread_point, summary, values_of_runs,
};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

type SimulatedRows = fn(&EvaluatedRun) -> &[SimulatedRun];

/// The number of nodes in the paper.
const PAPER_NODES: u64 = 4;
/// The numbers of jobs that are measured.
const JOBS: [u64; 2] = [1, 2];
/// The numbers of nodes that are simulated.
const NODES: [u64; 5] = [1, 2, 4, 8, 16];

/// Writes them.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_run_times(groups, outputs)?;
    write_speed_ups(groups, outputs, report)?;
    write_analyses(groups, outputs)?;
    for group in groups {
        add_to_report(group, report);
    }
    Ok(())
}

/// Returns the time of the recording and an analysis after it with `jobs` jobs; NaN if it was not
/// measured.
fn run_time_s(run: &EvaluatedRun, jobs: u64) -> f64 {
    run.recorded_s + analysis_s(run, jobs)
}

fn analysis_s(run: &EvaluatedRun, jobs: u64) -> f64 {
    run.simulations.with_jobs(jobs).map_or(f64::NAN, |measured| measured.analysis_s)
}

/// Returns the speed-up of the analysis with `jobs` jobs over one replay.
fn speed_up(run: &EvaluatedRun, jobs: u64) -> f64 {
    run.simulations.sequential_s / analysis_s(run, jobs)
}

/// Returns the same of a simulated cluster. Its makespan has the recording in it.
fn simulated_speed_up(run: &EvaluatedRun, nodes: u64) -> f64 {
    let row = with_nodes(&run.simulations.deferred_simulated, nodes);
    row.map_or(f64::NAN, |row| run.simulations.sequential_s / (row.makespan_s - run.recorded_s))
}

/// Returns the value of the simulated run with `nodes` nodes; NaN if there is none.
fn value_of(rows: &[SimulatedRun], nodes: u64, of: fn(&SimulatedRun) -> f64) -> f64 {
    with_nodes(rows, nodes).map_or(f64::NAN, |row| of(&row))
}

/// Figure 6.14.
fn write_run_times(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let values = values_of_runs(groups, |group| {
        let shown = JOBS.map(|jobs| {
            let simulated = group.spread(|run| {
                value_of(&run.simulations.deferred_simulated, jobs, |row| row.makespan_s)
            });
            format!(
                "with {jobs} {} s measured, {:.1} s simulated",
                group.spread(|run| run_time_s(run, jobs)).decimals(1),
                simulated.median
            )
        });
        shown.join(", ")
    });
    let lines: [(&str, RunValue); 3] = [
        ("4 nodes, immediate, simulated", |run| {
            value_of(&run.simulations.immediate, PAPER_NODES, |row| row.makespan_s)
        }),
        ("4 nodes, model", |run| {
            value_of(&run.simulations.immediate, PAPER_NODES, |row| row.formula_makespan_s)
        }),
        ("2 jobs, deferred, measured", |run| run_time_s(run, 2)),
    ];
    let charts = by_interval(groups, "seconds", &lines);
    let plot = Figure { title: "Total run time".into(), charts };
    let title = "total run time of recording and deferred analysis; measured with 1 and 2 jobs, \
                 *simulated* beside them and in the CSV file beyond";
    let paper = PaperFigure { number: "6.14", file: "6.14-run-time", title };
    outputs.add(paper, &run_times(groups), &plot, values)
}

/// Figure 6.15.
fn write_speed_ups(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let values = summary(groups, |group| {
        let of = |of: fn(&SimulatedRun) -> f64| {
            group.spread(|run| value_of(&run.simulations.immediate, PAPER_NODES, of))
        };
        format!(
            "{PAPER_NODES} nodes {} simulated, {:.2} by the model (one replay takes {} times the recording)",
            of(|row| row.speed_up).decimals(2),
            of(|row| row.formula_speed_up).median,
            group.spread(|run| run.simulations.sequential_s / run.recorded_s).decimals(2)
        )
    });
    let lines: [(&str, RunValue); 3] = [
        ("4 nodes, immediate, simulated", |run| {
            value_of(&run.simulations.immediate, PAPER_NODES, |row| row.speed_up)
        }),
        ("4 nodes, model", |run| {
            value_of(&run.simulations.immediate, PAPER_NODES, |row| row.formula_speed_up)
        }),
        ("2 jobs, deferred, measured", |run| run.simulations.sequential_s / run_time_s(run, 2)),
    ];
    let mut charts = by_interval(groups, "speed-up over one replay", &lines);
    charts.push(over_nodes(groups));
    let plot = Figure { title: "Speed-up, with the recording in the run time".into(), charts };
    let title = "speed-up of immediate dispatch with the recording in the run time, *simulated*, \
                 against the model";
    let paper = PaperFigure { number: "6.15", file: "6.15-speed-up", title };
    outputs.add(paper, &speed_ups(groups), &plot, values)?;
    report.plot = plot;
    Ok(())
}

/// The speed-up of the analysis alone.
fn write_analyses(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let fixed = ["workload", "how", "interval_s", "jobs_or_nodes", "rounds"].map(str::to_owned);
    let columns = fixed.into_iter().chain(spread_columns("speed_up")).collect();
    let mut table = CsvTable::with_columns(columns);
    for group in groups {
        let mut add = |how: &str, count: u64, spread: Spread| {
            let fixed = [group.every_s(), count as f64, spread.rounds as f64];
            table.row(&[group.workload().key, how], &[&fixed[..], &spread.numbers()].concat());
        };
        for jobs in JOBS {
            add("measured", jobs, group.spread(|run| speed_up(run, jobs)));
        }
        for nodes in NODES {
            add("simulated", nodes, group.spread(|run| simulated_speed_up(run, nodes)));
        }
    }
    let values = values_of_runs(groups, |group| {
        format!(
            "1 job {}, 2 jobs {}",
            group.spread(|run| speed_up(run, 1)).decimals(2),
            group.spread(|run| speed_up(run, 2)).decimals(2)
        )
    });
    let lines: [(&str, RunValue); 3] = [
        ("1 job, measured", |run| speed_up(run, 1)),
        ("2 jobs, measured", |run| speed_up(run, 2)),
        ("4 nodes, simulated", |run| simulated_speed_up(run, PAPER_NODES)),
    ];
    let charts = by_interval(groups, "speed-up over one replay", &lines);
    let plot = Figure { title: "Speed-up of the analysis over one replay".into(), charts };
    let title = "speed-up of the analysis alone over one replay of the whole recording: measured with 1 \
                 and 2 jobs, *simulated* beyond";
    let paper = PaperFigure { number: "6.15", file: "6.15-analysis-speed-up", title };
    outputs.add(paper, &table, &plot, values)
}

/// Returns a chart over the interval for each workload, with these lines.
fn by_interval(groups: &[RunRounds], label: &str, lines: &[(&str, RunValue)]) -> Vec<Chart> {
    let line = |of_workload: &[&RunRounds], name: &str, of: RunValue| Series {
        name: name.into(),
        points: of_workload
            .iter()
            .map(|group| spread_point(group.every_s(), group.spread(of)))
            .collect(),
    };
    let chart = |(key, of_workload): (&str, Vec<&RunRounds>)| Chart {
        title: key.into(),
        x: Axis::new("interval, seconds", Scale::Log),
        y: Axis::new(label, Scale::Linear),
        series: lines.iter().map(|(name, of)| line(&of_workload, name, *of)).collect(),
    };
    by_workload(groups).into_iter().map(chart).collect()
}

fn run_times(groups: &[RunRounds]) -> CsvTable {
    let fixed = ["workload", "how", "interval_s", "nodes", "rounds"].map(str::to_owned);
    let quantities = ["run_time_s", "speed_up", "model_run_time_s", "model_speed_up"];
    let columns = fixed.into_iter().chain(quantities.into_iter().flat_map(spread_columns));
    let mut table = CsvTable::with_columns(columns.collect());
    let none = || Spread::of(std::iter::empty());
    for group in groups {
        let mut add = |how: &str, nodes: u64, spreads: [Spread; 4]| {
            let fixed = [group.every_s(), nodes as f64, spreads[0].rounds as f64];
            let spreads = spreads.iter().flat_map(|spread| spread.numbers());
            let numbers: Vec<f64> = fixed.into_iter().chain(spreads).collect();
            table.row(&[group.workload().key, how], &numbers);
        };
        for jobs in JOBS {
            let run_time = group.spread(|run| run_time_s(run, jobs));
            let speed_up = group.spread(|run| run.simulations.sequential_s / run_time_s(run, jobs));
            add("measured: deferred", jobs, [run_time, speed_up, none(), none()]);
        }
        let simulated: [(&str, SimulatedRows); 4] = [
            ("simulated: deferred", |run| &run.simulations.deferred_simulated),
            ("simulated: immediate", |run| &run.simulations.immediate),
            ("simulated: immediate over 1 Gbit/s", |run| &run.simulations.over_network),
            ("simulated: immediate with whole images over 1 Gbit/s", |run| {
                &run.simulations.en_bloc
            }),
        ];
        for (how, rows) in simulated {
            for nodes in NODES {
                let of = |of: fn(&SimulatedRun) -> f64| {
                    group.spread(|run| value_of(rows(run), nodes, of))
                };
                let spreads = [
                    of(|row| row.makespan_s),
                    of(|row| row.speed_up),
                    of(|row| row.formula_makespan_s),
                    of(|row| row.formula_speed_up),
                ];
                add(how, nodes, spreads);
            }
        }
    }
    table
}

fn speed_ups(groups: &[RunRounds]) -> CsvTable {
    let fixed = ["workload", "interval_s", "nodes", "rounds"].map(str::to_owned);
    let quantities = ["speed_up_simulated", "speed_up_model", "t_i_s", "slowdown", "r_squared"];
    let columns = fixed.into_iter().chain(quantities.into_iter().flat_map(spread_columns));
    let mut table = CsvTable::with_columns(columns.collect());
    for group in groups {
        for nodes in NODES {
            let of = |of: fn(&SimulatedRun) -> f64| {
                group.spread(|run| value_of(&run.simulations.immediate, nodes, of))
            };
            let spreads = [
                of(|row| row.speed_up),
                of(|row| row.formula_speed_up),
                group.spread(|run| run.simulations.fit.t_i_s),
                group.spread(|run| run.simulations.fit.slowdown),
                group.spread(|run| run.simulations.fit.r_squared),
            ];
            let fixed = [group.every_s(), nodes as f64, spreads[0].rounds as f64];
            let spreads = spreads.iter().flat_map(|spread| spread.numbers());
            let numbers: Vec<f64> = fixed.into_iter().chain(spreads).collect();
            table.row(&[group.workload().key], &numbers);
        }
    }
    table
}

/// The chart shows the median rounds.
fn over_nodes(groups: &[RunRounds]) -> Chart {
    let mut series = Vec::new();
    for group in in_detail(groups) {
        let rows = &group.median_round().simulations.immediate;
        let line = |name: &str, of: fn(&SimulatedRun) -> f64| Series {
            name: format!("{}: {name}", group.label()),
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

fn add_to_report(group: &RunRounds, report: &mut Report) {
    let key = group.key();
    let median = |of: &dyn Fn(&EvaluatedRun) -> f64| group.spread(of).median;
    report.figure(format!("{key}_sequential_s"), median(&|run| run.simulations.sequential_s));
    report.figure(format!("{key}_recorded_s"), median(&|run| run.recorded_s));
    for jobs in JOBS {
        let simulated = |run: &EvaluatedRun| {
            value_of(&run.simulations.deferred_simulated, jobs, |row| row.makespan_s)
        };
        report
            .figure(format!("{key}_deferred_{jobs}_jobs_s"), median(&|run| run_time_s(run, jobs)));
        report.figure(format!("{key}_deferred_{jobs}_nodes_simulated_s"), median(&simulated));
        let over = |run: &EvaluatedRun| simulated(run) / run_time_s(run, jobs);
        report.ratio(format!("{key}_simulated_over_measured_{jobs}"), median(&over));
        let speed_up = median(&|run| speed_up(run, jobs));
        report.ratio(format!("{key}_analysis_speed_up_{jobs}_jobs"), speed_up);
    }
    for nodes in NODES {
        let of = |of: fn(&SimulatedRun) -> f64| {
            median(&|run| value_of(&run.simulations.immediate, nodes, of))
        };
        report.ratio(format!("{key}_speed_up_{nodes}_nodes_simulated"), of(|row| row.speed_up));
        report.ratio(format!("{key}_speed_up_{nodes}_nodes_model"), of(|row| row.formula_speed_up));
    }
}
