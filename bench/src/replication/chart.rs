//! Draws the slowdowns over the workloads, with a line for each policy.

use super::rows::Rows;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// Draws a chart for each link.
pub fn figure(rows: &Rows) -> Figure {
    let charts = rows.links().into_iter().map(|link| chart(rows, link)).collect();
    Figure { title: "Slowdown of the guest by a standby".into(), charts }
}

fn chart(rows: &Rows, link: &'static str) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    let workloads: Vec<_> = rows.workloads();
    for (workload, policy, slowdown) in rows.slowdowns(link) {
        let x = workloads.iter().position(|of| *of == workload).unwrap_or_default() as f64 + 1.0;
        let range = slowdown.percentile(100) - slowdown.percentile(1);
        let deviation = (slowdown.len() > 1).then_some(range / 2.0);
        let point = Point { x, y: slowdown.median(), deviation };
        match series.iter_mut().find(|series| series.name == policy) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name: policy.into(), points: vec![point] }),
        }
    }
    let names: Vec<String> = workloads
        .iter()
        .enumerate()
        .map(|(n, workload)| format!("{}: {workload}", n + 1))
        .collect();
    Chart {
        title: format!("{link}: {}", names.join(", ")),
        x: Axis::new("workload", Scale::Linear),
        y: Axis::new("slowdown", Scale::Linear),
        series,
    }
}
