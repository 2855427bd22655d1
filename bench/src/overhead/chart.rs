//! Draws the lost work over the interval: a chart for each workload, a line for each strategy.

use super::LostWork;
use super::workload::Workload;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// Draws a chart for each workload.
pub fn figure(charted: &[(Workload, Vec<LostWork>)]) -> Figure {
    let charts = charted.iter().map(|(workload, lost)| chart(workload, lost)).collect();
    Figure { title: "Work lost to checkpoints".into(), charts }
}

fn chart(workload: &Workload, lost: &[LostWork]) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for lost in lost {
        let x = f64::from(lost.setting.interval_ms);
        let name = lost.setting.strategy.to_owned();
        let y = lost.work.median() * 100.0;
        let range = lost.work.percentile(100) - lost.work.percentile(1);
        let deviation = (lost.work.len() > 1).then_some((range * 50.0).into());
        let point = Point { x, y, deviation };
        match series.iter_mut().find(|s| s.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name, points: vec![point] }),
        }
    }
    for line in &mut series {
        line.points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    Chart {
        title: workload.title.into(),
        x: Axis { write: length, ..Axis::new("time between checkpoints", Scale::Log) },
        y: Axis::new("work lost, percent", Scale::Linear),
        series,
    }
}

/// Writes a length in milliseconds or seconds.
fn length(ms: f64) -> String {
    if ms >= 1000.0 {
        format!("{} s", keyframe_plot::decimal(ms / 1000.0))
    } else {
        format!("{} ms", keyframe_plot::decimal(ms))
    }
}
