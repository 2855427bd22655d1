//! Charts and texts that several figures share: a mean over the interval with a line for each
//! workload, and a value of each checkpoint over time.

use super::super::checkpoint_figures::CheckpointFigures;
use super::super::evaluated_run::EvaluatedRun;
use super::super::output::CsvTable;
use super::super::rounds::{RunRounds, Spread, spread_columns};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// The interval that the paper examines in detail, in seconds.
const DETAIL_S: f64 = 2.0;

/// A function that reads a value from a run.
pub type RunValue = fn(&EvaluatedRun) -> f64;

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

/// Returns a figure without a chart, of which no picture is drawn.
pub fn no_figure() -> Figure {
    Figure { title: String::new(), charts: Vec::new() }
}

/// Groups runs by workload, in their order.
pub fn by_workload(groups: &[RunRounds]) -> Vec<(&'static str, Vec<&RunRounds>)> {
    let mut workloads: Vec<(&'static str, Vec<&RunRounds>)> = Vec::new();
    for group in groups {
        let key = group.workload().key;
        match workloads.iter_mut().find(|(known, _)| *known == key) {
            Some((_, of_workload)) => of_workload.push(group),
            None => workloads.push((key, vec![group])),
        }
    }
    workloads
}

/// Returns, for each workload, the rounds whose interval is nearest to 2 s.
pub fn in_detail(groups: &[RunRounds]) -> Vec<&RunRounds> {
    let distance = |group: &RunRounds| (group.every_s() / DETAIL_S).ln().abs();
    by_workload(groups)
        .into_iter()
        .filter_map(|(_, group)| {
            group.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))
        })
        .collect()
}

/// Returns a table whose rows begin with a workload and an interval. Each of `quantities` has three
/// columns: median, least and most.
pub fn spread_table(quantities: &[&str]) -> CsvTable {
    let fixed = ["workload", "interval_s", "rounds"].map(str::to_owned);
    let columns = fixed.into_iter().chain(quantities.iter().flat_map(|name| spread_columns(name)));
    CsvTable::with_columns(columns.collect())
}

/// Adds a row to a [`spread_table`].
pub fn spread_row(table: &mut CsvTable, group: &RunRounds, quantities: &[Spread]) {
    let fixed = [group.every_s(), group.rounds().len() as f64];
    let numbers: Vec<f64> =
        fixed.into_iter().chain(quantities.iter().flat_map(|one| one.numbers())).collect();
    table.row(&[group.workload().key], &numbers);
}

/// Returns the point of a spread at `x`, with a bar of half the distance between least and most.
pub fn spread_point(x: f64, spread: Spread) -> Point {
    Point { x, y: spread.median, deviation: spread.half_range().map(Into::into) }
}

/// Returns the table and the chart of a value of each run over its interval.
pub fn over_interval(
    title: &str,
    quantity: Quantity,
    groups: &[RunRounds],
    of: impl Fn(&EvaluatedRun) -> f64,
) -> (CsvTable, Figure) {
    let mut table = spread_table(&[quantity.column]);
    for group in groups {
        spread_row(&mut table, group, &[group.spread(&of)]);
    }
    let series = by_workload(groups).into_iter().map(|(key, of_workload)| Series {
        name: key.into(),
        points: of_workload
            .iter()
            .map(|group| spread_point(group.every_s(), group.spread(&of)))
            .collect(),
    });
    let chart = Chart {
        title: title.into(),
        x: Axis::new("interval, seconds", Scale::Log),
        y: Axis::new(quantity.label, Scale::Linear),
        series: series.collect(),
    };
    (table, figure(chart))
}

/// Returns the table and the chart of a value of each checkpoint over time, for the median rounds of
/// [`in_detail`].
pub fn over_time(
    title: &str,
    quantity: Quantity,
    scale: Scale,
    groups: &[RunRounds],
    of: impl Fn(&CheckpointFigures) -> f64,
) -> (CsvTable, Figure) {
    let mut table = CsvTable::new(&["workload", "interval_s", "round", "at_s", quantity.column]);
    let mut series = Vec::new();
    for group in in_detail(groups) {
        let run = group.median_round();
        for checkpoint in &run.checkpoints {
            let numbers = [run.every_s, f64::from(run.round), checkpoint.at_s, of(checkpoint)];
            table.row(&[run.workload.key], &numbers);
        }
        let points = run.checkpoints.iter().map(|one| point(one.at_s, of(one))).collect();
        series.push(Series { name: group.label(), points });
    }
    let chart = Chart {
        title: title.into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new(quantity.label, scale),
        series,
    };
    (table, figure(chart))
}

/// Returns a text for each of [`in_detail`], for example `compile 1.50 [2 s]; stream 0.20 [2 s]`.
pub fn summary(groups: &[RunRounds], of: impl Fn(&RunRounds) -> String) -> String {
    let all: Vec<String> = in_detail(groups)
        .into_iter()
        .map(|group| format!("{} {} [{} s]", group.workload().key, of(group), group.every_s()))
        .collect();
    all.join("; ")
}

/// Returns a text for each run, for example `compile_500ms 12; compile_1000ms 20`.
pub fn values_of_runs(groups: &[RunRounds], of: impl Fn(&RunRounds) -> String) -> String {
    let all: Vec<String> =
        groups.iter().map(|group| format!("{} {}", group.key(), of(group))).collect();
    all.join("; ")
}

/// Returns `part` in percent of `whole`; NaN if `whole` is 0.
pub fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole * 100.0 } else { f64::NAN }
}
