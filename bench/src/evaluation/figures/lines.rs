//! What the figures have in common: a mean over the interval with a line for each workload, a value
//! of each checkpoint over time.

use super::super::measured::{Checkpoint, Run};
use super::super::output::Csv;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// The interval that the paper looks at in detail.
const DETAIL_S: f64 = 2.0;

/// A point without an error bar.
pub fn point(x: f64, y: f64) -> Point {
    Point { x, y, deviation: None }
}

/// A figure of one chart.
pub fn figure(chart: Chart) -> Figure {
    Figure { title: chart.title.clone(), charts: vec![chart] }
}

/// Runs by workload, in order.
pub fn by_workload(runs: &[Run]) -> Vec<(&'static str, Vec<&Run>)> {
    let mut groups: Vec<(&'static str, Vec<&Run>)> = Vec::new();
    for run in runs {
        match groups.iter_mut().find(|(key, _)| *key == run.kind.key) {
            Some((_, group)) => group.push(run),
            None => groups.push((run.kind.key, vec![run])),
        }
    }
    groups
}

/// Of each workload the run with the interval that is nearest to 2 s.
pub fn in_detail(runs: &[Run]) -> Vec<&Run> {
    let off = |run: &Run| (run.every_s / DETAIL_S).ln().abs();
    by_workload(runs)
        .into_iter()
        .filter_map(|(_, group)| group.into_iter().min_by(|a, b| off(a).total_cmp(&off(b))))
        .collect()
}

/// A value of each run over its interval.
pub fn over_interval(
    title: &str,
    (column, label): (&str, &str),
    runs: &[Run],
    of: impl Fn(&Run) -> f64,
) -> (Csv, Figure) {
    let mut csv = Csv::new(&format!("workload,interval_s,{column}"));
    for run in runs {
        csv.row(&[run.kind.key], &[run.every_s, of(run)]);
    }
    let series = by_workload(runs).into_iter().map(|(key, group)| Series {
        name: key.into(),
        points: group.iter().map(|run| point(run.every_s, of(run))).collect(),
    });
    let chart = Chart {
        title: title.into(),
        x: Axis::new("interval, seconds", Scale::Log),
        y: Axis::new(label, Scale::Linear),
        series: series.collect(),
    };
    (csv, figure(chart))
}

/// A value of each checkpoint over time, for each workload with the interval nearest to 2 s.
pub fn over_time(
    title: &str,
    (column, label): (&str, &str),
    scale: Scale,
    runs: &[Run],
    of: impl Fn(&Checkpoint) -> f64,
) -> (Csv, Figure) {
    let mut csv = Csv::new(&format!("workload,interval_s,at_s,{column}"));
    let mut series = Vec::new();
    for run in in_detail(runs) {
        for one in &run.checkpoints {
            csv.row(&[run.kind.key], &[run.every_s, one.at_s, of(one)]);
        }
        let points = run.checkpoints.iter().map(|one| point(one.at_s, of(one))).collect();
        series.push(Series { name: format!("{}, {} s", run.kind.key, run.every_s), points });
    }
    let chart = Chart {
        title: title.into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new(label, scale),
        series,
    };
    (csv, figure(chart))
}

/// `compile 1.50, stream 0.20`: of each workload with the interval nearest to 2 s.
pub fn told(runs: &[Run], of: impl Fn(&Run) -> String) -> String {
    let all: Vec<String> = in_detail(runs)
        .into_iter()
        .map(|run| format!("{} {} ({} s)", run.kind.key, of(run), run.every_s))
        .collect();
    all.join("; ")
}

/// Part of a whole in percent; NaN where there is no whole.
pub fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole * 100.0 } else { f64::NAN }
}
