//! Draws the pauses as two charts: over the dirty rate, and over the size of RAM.

use super::rows::{Load, Rows};
use crate::qemu_peer::SaveMethod;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// Draws a line for each method, with the median of each load as a point.
pub fn figure(rows: &Rows) -> Figure {
    let pause = || Axis::new("median pause, ms", Scale::Log);
    let by_rate = Chart {
        title: "1 GiB, by the rate at which the guest writes".into(),
        x: Axis::new("dirty pages (4 KiB) a second", Scale::Log),
        y: pause(),
        series: series(rows, |load| load.gib.is_none().then_some(load.rate as f64)),
    };
    let by_size = Chart {
        title: "20,000 dirty pages a second, all RAM was written, by its size".into(),
        x: Axis::new("RAM, GiB", Scale::Linear),
        y: pause(),
        series: series(rows, |load| load.gib.map(|gib| gib as f64)),
    };
    let title = "Pause of a VM for a checkpoint".into();
    Figure { title, charts: vec![by_rate, by_size] }
}

/// Draws the rows for which `x` returns a position.
fn series(rows: &Rows, x: impl Fn(Load) -> Option<f64>) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for row in rows.iter() {
        // The live migration has one point only, and the colours are few.
        let Some(x) = x(row.load).filter(|_| row.way != SaveMethod::LiveMigrate.key()) else {
            continue;
        };
        let name = row.way.replace('_', "-");
        let point = Point { x, y: row.pause_ns.median() / 1e6, deviation: None };
        match all.iter_mut().find(|s| s.name == name) {
            Some(series) => series.points.push(point),
            None => all.push(Series { name, points: vec![point] }),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_load_is_in_its_chart() {
        let mut rows = Rows::default();
        for (way, rate, gib) in [
            ("precopy", 1000, None),
            ("precopy", 20_000, None),
            ("stop_copy", 1000, None),
            ("stop_copy", 20_000, Some(4)),
        ] {
            rows.of(way, Load { rate, gib }).pause_ns.push(2e6);
        }
        let figure = figure(&rows);
        let [by_rate, by_size] = &figure.charts[..] else {
            panic!("{} charts", figure.charts.len())
        };
        assert_eq!(by_rate.series[0].points.iter().map(|p| p.x).collect::<Vec<_>>(), [1e3, 2e4]);
        assert_eq!(
            (by_size.series[0].name.as_str(), by_size.series[0].points[0].x),
            ("stop-copy", 4.0)
        );
        assert!(figure.svg().unwrap().contains("stop-copy"));
    }
}
