//! Charts and texts that several figures share: a mean over the interval with a line for each
//! workload, and a value of each checkpoint over time.

use super::super::evaluated_run::{CheckpointFigures, EvaluatedRun};
use super::super::output::CsvTable;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// The interval that the paper examines in detail, in seconds.
const DETAIL_S: f64 = 2.0;

/// The names of a quantity.
#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    /// The name of its column in CSV files.
    pub column: &'static str,
    /// The label of its axis.
    pub label: &'static str,
}

/// Returns a point without an error bar.
pub fn point(x: f64, y: f64) -> Point {
    Point { x, y, deviation: None }
}

/// Returns a figure of one chart.
pub fn figure(chart: Chart) -> Figure {
    Figure { title: chart.title.clone(), charts: vec![chart] }
}

/// Groups runs by workload, in their order.
pub fn by_workload(runs: &[EvaluatedRun]) -> Vec<(&'static str, Vec<&EvaluatedRun>)> {
    let mut groups: Vec<(&'static str, Vec<&EvaluatedRun>)> = Vec::new();
    for run in runs {
        match groups.iter_mut().find(|(key, _)| *key == run.workload.key) {
            Some((_, group)) => group.push(run),
            None => groups.push((run.workload.key, vec![run])),
        }
    }
    groups
}

/// Returns, for each workload, the run whose interval is nearest to 2 s.
pub fn in_detail(runs: &[EvaluatedRun]) -> Vec<&EvaluatedRun> {
    let distance = |run: &EvaluatedRun| (run.every_s / DETAIL_S).ln().abs();
    by_workload(runs)
        .into_iter()
        .filter_map(|(_, group)| {
            group.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))
        })
        .collect()
}

/// Returns the table and the chart of a value of each run over its interval.
pub fn over_interval(
    title: &str,
    quantity: Quantity,
    runs: &[EvaluatedRun],
    of: impl Fn(&EvaluatedRun) -> f64,
) -> (CsvTable, Figure) {
    let mut table = CsvTable::new(&["workload", "interval_s", quantity.column]);
    for run in runs {
        table.row(&[run.workload.key], &[run.every_s, of(run)]);
    }
    let series = by_workload(runs).into_iter().map(|(key, group)| Series {
        name: key.into(),
        points: group.iter().map(|run| point(run.every_s, of(run))).collect(),
    });
    let chart = Chart {
        title: title.into(),
        x: Axis::new("interval, seconds", Scale::Log),
        y: Axis::new(quantity.label, Scale::Linear),
        series: series.collect(),
    };
    (table, figure(chart))
}

/// Returns the table and the chart of a value of each checkpoint over time, for the runs of
/// [`in_detail`].
pub fn over_time(
    title: &str,
    quantity: Quantity,
    scale: Scale,
    runs: &[EvaluatedRun],
    of: impl Fn(&CheckpointFigures) -> f64,
) -> (CsvTable, Figure) {
    let mut table = CsvTable::new(&["workload", "interval_s", "at_s", quantity.column]);
    let mut series = Vec::new();
    for run in in_detail(runs) {
        for checkpoint in &run.checkpoints {
            let numbers = [run.every_s, checkpoint.at_s, of(checkpoint)];
            table.row(&[run.workload.key], &numbers);
        }
        let points = run.checkpoints.iter().map(|one| point(one.at_s, of(one))).collect();
        series.push(Series { name: run.label(), points });
    }
    let chart = Chart {
        title: title.into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new(quantity.label, scale),
        series,
    };
    (table, figure(chart))
}

/// Returns a text for each run of [`in_detail`], for example `compile 1.50 (2 s); stream 0.20 (2 s)`.
pub fn summary(runs: &[EvaluatedRun], of: impl Fn(&EvaluatedRun) -> String) -> String {
    let all: Vec<String> = in_detail(runs)
        .into_iter()
        .map(|run| format!("{} {} ({} s)", run.workload.key, of(run), run.every_s))
        .collect();
    all.join("; ")
}

/// Returns a text for each run, for example `compile_500ms 12; compile_1000ms 20`.
pub fn values_of_runs(runs: &[EvaluatedRun], of: impl Fn(&EvaluatedRun) -> String) -> String {
    let all: Vec<String> = runs.iter().map(|run| format!("{} {}", run.key(), of(run))).collect();
    all.join("; ")
}

/// Returns `part` in percent of `whole`; NaN if `whole` is 0.
pub fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole * 100.0 } else { f64::NAN }
}
