//! Draws the slowdowns over the workloads, with a line for each method and bars from the least to the
//! largest slowdown of a round.

use super::rows::Rows;
use keyframe_plot::{Axis, Chart, Deviation, Figure, Point, Scale, Series};

/// The distance of two methods on the axis of workloads.
const BESIDE: f64 = 0.04;

/// Draws a chart for each link.
pub fn figure(rows: &Rows) -> Figure {
    let charts = rows.links().into_iter().map(|link| chart(rows, link)).collect();
    Figure { title: "Slowdown of the guest by a standby".into(), charts }
}

fn chart(rows: &Rows, link: &'static str) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    let workloads: Vec<_> = rows.workloads();
    for (workload, method, slowdown) in rows.slowdowns(link) {
        let x = workloads.iter().position(|of| *of == workload).unwrap_or_default() as f64 + 1.0;
        let y = slowdown.median();
        let deviation = (slowdown.len() > 1)
            .then(|| Deviation { below: y - slowdown.least(), above: slowdown.most() - y });
        let point = Point { x, y, deviation };
        match series.iter_mut().find(|series| series.name == method) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name: method.into(), points: vec![point] }),
        }
    }
    // Beside each other, so that no bar hides another.
    let middle = series.len().saturating_sub(1) as f64 / 2.0;
    for (n, series) in series.iter_mut().enumerate() {
        series.points.iter_mut().for_each(|point| point.x += (n as f64 - middle) * BESIDE);
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
