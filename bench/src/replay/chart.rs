//! Draws the cost of recording by workload and by the interval between checkpoints.

use super::rows::Rows;
use crate::sample::Sample;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// Draws the charts that have values.
pub fn figure(rows: &Rows) -> Figure {
    let by_workload = [
        (
            "recording over QEMU that counts instructions",
            vec![("recording", "record", "icount"), ("checkpoints every 1 s", "1s", "icount")],
        ),
        (
            "two stages and three, over recording alone",
            vec![
                ("two: checkpoints every 1 s", "1s", "record"),
                ("three: a replay follows", "three_stage", "record"),
            ],
        ),
        (
            "replay over recording, boot to power-off",
            vec![
                ("replay", "replayed_whole", "recorded_whole"),
                ("replay that takes checkpoints", "segmented_whole", "recorded_whole"),
            ],
        ),
    ];
    let mut charts: Vec<Chart> =
        by_workload.iter().filter_map(|(title, lines)| workloads(rows, title, lines)).collect();
    charts.splice(0..0, sweep(rows));
    Figure { title: "Cost of recording and replaying".into(), charts }
}

fn point(x: f64, sample: &Sample) -> Point {
    let range = sample.percentile(100) - sample.percentile(1);
    let deviation = (sample.len() > 1).then_some((range / 2.0).into());
    Point { x, y: sample.median(), deviation }
}

/// Draws ratios over the workloads. The title names their numbers, because an axis has no words.
fn workloads(rows: &Rows, title: &str, lines: &[(&str, &str, &str)]) -> Option<Chart> {
    let mut names: Vec<&str> = Vec::new();
    let mut series = Vec::new();
    for (name, over, under) in lines {
        let mut points = Vec::new();
        for (workload, sample) in rows.of_workloads(over, under) {
            let at = names.iter().position(|known| *known == workload.key).unwrap_or_else(|| {
                names.push(workload.key);
                names.len() - 1
            });
            points.push(point((at + 1) as f64, &sample));
        }
        if !points.is_empty() {
            series.push(Series { name: (*name).into(), points });
        }
    }
    let numbered: Vec<String> =
        (1..).zip(&names).map(|(n, name): (u32, _)| format!("{n} {name}")).collect();
    (!series.is_empty()).then(|| Chart {
        title: format!("{title}: {}", numbered.join(", ")),
        x: Axis::new("workload", Scale::Linear),
        y: Axis::new("times", Scale::Linear),
        series,
    })
}

fn sweep(rows: &Rows) -> Option<Chart> {
    let points: Vec<Point> = rows
        .of_sweep()
        .iter()
        .filter_map(|(way, sample)| Some(point(seconds(way)?, sample)))
        .collect();
    (!points.is_empty()).then(|| Chart {
        title: "recording with checkpoints over recording".into(),
        x: Axis::new("seconds between checkpoints", Scale::Log),
        y: Axis::new("times", Scale::Linear),
        series: vec![Series { name: "two stages".into(), points }],
    })
}

/// Returns the seconds of `500ms` or `2s`.
fn seconds(time: &str) -> Option<f64> {
    match time.strip_suffix("ms") {
        Some(ms) => ms.parse::<f64>().ok().map(|ms| ms / 1e3),
        None => time.strip_suffix('s')?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_intervals_can_be_drawn() {
        assert_eq!(
            super::super::SWEEP.map(seconds),
            [Some(0.5), Some(1.0), Some(2.0), Some(4.0), Some(8.0)]
        );
        assert!(figure(&Rows::default()).charts.is_empty());
    }
}
