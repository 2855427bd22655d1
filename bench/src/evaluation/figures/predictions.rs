//! The predictions of the model beside the measured times, and its constants.

use super::super::checkpoint_cost;
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::prediction::{self, FittedConstants, PredictedAnalysis};
use super::super::rounds::{RunRounds, Spread, spread_columns};
use super::chart::{by_workload, no_figure, spread_point};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// Writes them.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_analyses(groups, outputs, report)?;
    write_following(groups, outputs)?;
    write_constants(groups, outputs)?;
    write_checkpoint_cost(groups, outputs)
}

fn columns(fixed: &[&str], spreads: &[&str]) -> CsvTable {
    let fixed = fixed.iter().map(ToString::to_string);
    CsvTable::with_columns(
        fixed.chain(spreads.iter().flat_map(|name| spread_columns(name))).collect(),
    )
}

fn numbers(fixed: &[f64], spreads: &[Spread]) -> Vec<f64> {
    fixed.iter().copied().chain(spreads.iter().flat_map(|one| one.numbers())).collect()
}

fn count_of_jobs(jobs: u64) -> String {
    if jobs == 1 { "1 job".into() } else { format!("{jobs} jobs") }
}

/// The analyses after the recording.
fn write_analyses(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let mut table = columns(
        &["workload", "role", "interval_s", "jobs"],
        &[
            "measured_s",
            "formula_s",
            "simulated_s",
            "formula_over_measured",
            "simulated_over_measured",
        ],
    );
    let mut predicted: Vec<(&RunRounds, PredictedAnalysis)> = Vec::new();
    for (key, of_workload) in by_workload(groups) {
        for constants in prediction::fit(groups, key) {
            for group in &of_workload {
                let found = prediction::analysis(group, &constants)?;
                predicted.extend(found.map(|one| (*group, one)));
            }
        }
    }
    let mut values = Vec::new();
    for (group, one) in &predicted {
        let role = if one.is_test { "test" } else { "fitted" };
        let spreads = [
            one.measured_s,
            one.formula_s,
            one.simulated_s,
            one.formula_over_measured,
            one.simulated_over_measured,
        ];
        let fixed = [group.every_s(), one.jobs as f64];
        table.row(&[group.workload().key, role], &numbers(&fixed, &spreads));
        let key = format!("{}_{}_jobs", group.key(), one.jobs);
        let [formula, simulated] = [one.formula_over_measured, one.simulated_over_measured];
        report.ratio(format!("{key}_formula_over_measured"), formula.median);
        report.ratio(format!("{key}_fitted_simulation_over_measured"), simulated.median);
        if one.is_test {
            values.push(format!(
                "{}, {}: measured {} s, formula {:.1} s (ratio {}), simulated {:.1} s (ratio {})",
                group.key(),
                count_of_jobs(one.jobs),
                one.measured_s.decimals(1),
                one.formula_s.median,
                formula.decimals(2),
                one.simulated_s.median,
                simulated.decimals(2)
            ));
        }
    }
    if values.is_empty() {
        values.push("all measured intervals were used for the fit, so none tests it".into());
    }
    let title = "time of an analysis after the recording: equation 3.5's busy time and a simulated \
                 cluster, with constants fitted to intervals of 0.5, 2 and 8 s, tested on the others";
    let paper = PaperFigure { number: "P1", file: "p1-predictions", title };
    outputs.add(paper, &table, &chart(&predicted), values.join("; "))
}

/// Each workload has its own chart.
fn chart(predicted: &[(&RunRounds, PredictedAnalysis)]) -> Figure {
    let mut charts: Vec<Chart> = Vec::new();
    for (group, one) in predicted {
        let key = group.workload().key;
        if charts.last().is_none_or(|chart| chart.title != key) {
            charts.push(Chart {
                title: key.into(),
                x: Axis::new("interval, seconds", Scale::Log),
                y: Axis::new("ratio", Scale::Linear),
                series: Vec::new(),
            });
        }
        let Some(Chart { series, .. }) = charts.last_mut() else { continue };
        let ratios =
            [("formula", one.formula_over_measured), ("simulated", one.simulated_over_measured)];
        for (how, ratio) in ratios {
            let name = format!("{}, {how}", count_of_jobs(one.jobs));
            let point = spread_point(group.every_s(), ratio);
            match series.iter_mut().find(|known| known.name == name) {
                Some(known) => known.points.push(point),
                None => series.push(Series { name, points: vec![point] }),
            }
        }
    }
    Figure { title: "Predicted over measured time of an analysis".into(), charts }
}

/// The analyses beside the recording.
fn write_following(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = columns(
        &["workload", "interval_s", "jobs"],
        &["measured_s", "equation_2_1_s", "equation_3_5_s", "nodes_demanded", "simulated_s"],
    );
    let mut values = Vec::new();
    for (key, of_workload) in by_workload(groups) {
        let of_one_job = prediction::fit(groups, key).into_iter().find(|one| one.jobs == 1);
        let Some(constants) = of_one_job else { continue };
        for group in of_workload {
            let Some(one) = prediction::following(group, &constants)? else { continue };
            let spreads =
                [one.measured_s, one.enough_s, one.limited_s, one.nodes_demanded, one.simulated_s];
            let fixed = [group.every_s(), one.jobs as f64];
            table.row(&[key], &numbers(&fixed, &spreads));
            let over = |predicted: Spread| predicted.median / one.measured_s.median;
            values.push(format!(
                "{}, {} node: measured {} s; equation 2.1 {:.1} s (ratio {:.2}), 3.5 {:.1} s (ratio \
                 {:.2}), simulated {:.1} s (ratio {:.2}); {:.2} nodes are enough",
                group.key(),
                one.jobs,
                one.measured_s.decimals(1),
                one.enough_s.median,
                over(one.enough_s),
                one.limited_s.median,
                over(one.limited_s),
                one.simulated_s.median,
                over(one.simulated_s),
                one.nodes_demanded.median
            ));
        }
    }
    if values.is_empty() {
        return Ok(());
    }
    let title = "time of a recording that is analysed meanwhile: equation 2.1 (enough nodes), equation \
                 3.5 (too few), and a simulated cluster";
    let paper = PaperFigure { number: "P2", file: "p2-immediate", title };
    outputs.add(paper, &table, &no_figure(), values.join("; "))
}

/// The constants of the model.
fn write_constants(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = columns(
        &["workload", "jobs", "t_i_s_all", "slowdown_all", "t_start_s_all", "r_squared"],
        &["t_i_s", "slowdown", "t_start_s", "t_c_ms"],
    );
    let mut values = Vec::new();
    for (key, of_workload) in by_workload(groups) {
        let pauses = of_workload.iter().flat_map(|group| group.rounds());
        let pause_ms = Spread::of(pauses.map(|run| run.mean(|one| one.pause_ns / 1e6)));
        for constants in prediction::fit(groups, key) {
            let FittedConstants { jobs, fit, t_start_s, t_i_s, slowdown, t_start_spread_s } =
                constants;
            let fixed = [jobs as f64, fit.t_i, fit.slowdown, t_start_s, fit.r_squared];
            let spreads = [t_i_s, slowdown, t_start_spread_s, pause_ms];
            table.row(&[key], &numbers(&fixed, &spreads));
            values.push(format!(
                "{key}, {}: t_i {} s, s_sim/s_log {}, t_start {} s (R² {:.2})",
                count_of_jobs(jobs),
                t_i_s.decimals(3),
                slowdown.decimals(2),
                t_start_spread_s.decimals(2),
                fit.r_squared
            ));
        }
        values.push(format!("{key}: t_c {} ms", pause_ms.decimals(1)));
    }
    let title = "constants of the model: t_i is the cost of each interval; t_start that of a range (the \
                 start of QEMU, and code that is not translated yet), paid once by each job; t_c is \
                 the mean pause";
    let paper = PaperFigure { number: "P3", file: "p3-constants", title };
    outputs.add(paper, &table, &no_figure(), values.join("; "))
}

/// The slowdown by checkpoints.
fn write_checkpoint_cost(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = columns(
        &["workload", "interval_s"],
        &["s_cp_least", "s_cp_most", "fitted_cost_ms", "s_cp_fitted"],
    );
    let mut values = Vec::new();
    for (key, of_workload) in by_workload(groups) {
        let cost_s = checkpoint_cost::fitted_cost_s(groups, key);
        let shown: Vec<String> = of_workload
            .iter()
            .map(|group| {
                let bounds = checkpoint_cost::bounds(group);
                let every_s = group.every_s();
                let fitted = cost_s.numbers().map(|cost_s| every_s / (every_s - cost_s));
                let fitted = Spread::of(fitted.into_iter());
                let cost_ms = Spread::of(cost_s.numbers().map(|cost_s| cost_s * 1e3).into_iter());
                let spreads = [bounds.least, bounds.most, cost_ms, fitted];
                table.row(&[key], &numbers(&[group.every_s()], &spreads));
                format!(
                    "{} s: {:.3} to {:.3}",
                    group.every_s(),
                    bounds.least.median,
                    bounds.most.median
                )
            })
            .collect();
        let fitted = match cost_s.rounds {
            0 => "not fitted: fewer than three intervals".into(),
            _ => format!(
                "fitted over the intervals, a checkpoint costs the guest {} ms",
                cost_s.text(|cost_s| format!("{:.0}", cost_s * 1e3))
            ),
        };
        values.push(format!("{key}: {}; {fitted}", shown.join(", ")));
    }
    let title = "s_cp, the slowdown of an interval by its checkpoint: at least by the pause, at most by \
                 the pause and all of the processing";
    let paper = PaperFigure { number: "P4", file: "p4-checkpoint-slowdown", title };
    outputs.add(paper, &table, &no_figure(), values.join("; "))
}
