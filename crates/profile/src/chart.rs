//! Draws curves as charts, like figures 1 to 4 of Gerofi and Ishikawa (CLUSTER 2011): the mean over
//! the length of the epoch, a line for each number of vCPUs, the deviation as error bars.

use crate::{Curve, CurveRow, Statistic};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

type Count = fn(&CurveRow) -> Option<Statistic>;

/// Makes a figure of `curves` with a chart of pages, and one each of sectors and packets if these
/// were measured.
pub fn figure(title: &str, curves: &[Curve]) -> Figure {
    let counts: [(&str, &str, Count); 3] = [
        ("memory pages written", "pages (4 KiB) per epoch", |r| Some(r.pages)),
        ("disk sectors written", "sectors (512 B) per epoch", |r| r.sectors),
        ("network packets sent", "packets per epoch", |r| r.packets),
    ];
    let charts = counts
        .into_iter()
        .filter_map(|(title, label, count)| chart(title, label, count, curves))
        .collect();
    Figure { title: title.into(), charts }
}

fn chart(title: &str, label: &str, count: Count, curves: &[Curve]) -> Option<Chart> {
    let series: Vec<Series> = curves
        .iter()
        .map(|curve| Series {
            name: name(curve),
            points: curve.rows.iter().filter_map(|r| point(r, count)).collect(),
        })
        .filter(|series| !series.points.is_empty())
        .collect();
    let x = Axis { write: length, ..Axis::new("epoch", Scale::Log) };
    let chart = Chart { title: title.into(), x, y: Axis::new(label, Scale::Linear), series };
    (!chart.series.is_empty()).then_some(chart)
}

fn point(row: &CurveRow, count: Count) -> Option<Point> {
    let value = count(row)?;
    let deviation = Some(value.deviation.into());
    Some(Point { x: row.epoch_ns as f64 / 1e6, y: value.mean, deviation })
}

fn name(curve: &Curve) -> String {
    match curve.vcpus {
        Some(1) => "1 vCPU".into(),
        Some(n) => format!("{n} vCPUs"),
        None => "unknown vCPUs".into(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MeasuredEpoch;
    use std::time::Duration;

    #[test]
    fn a_count_that_was_not_measured_has_no_chart() {
        let epoch = |ms: u64| MeasuredEpoch {
            length: Duration::from_millis(ms),
            measured_ns: ms,
            pages: ms,
            sectors: None,
            disk_writes: None,
            packets: Some(0),
        };
        let curves = [1, 2].map(|n| Curve::new(Some(n), &[epoch(10), epoch(2000)]));
        let figure = figure("a VM", &curves);
        let titles: Vec<_> = figure.charts.iter().map(|c| c.title.as_str()).collect();
        assert_eq!(titles, ["memory pages written", "network packets sent"]);
        let svg = figure.svg().unwrap();
        for text in ["1 vCPU", "2 vCPUs", "10 ms", "2 s"] {
            assert!(svg.contains(text), "no {text}");
        }
        assert!(super::figure("none", &[]).charts.is_empty());
    }
}
