//! The figure of how a store grew.

use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};
use keyframe_store::Growth;
use keyframe_units::human_bytes;

/// Returns the figure of the dirty bytes and the stored bytes, summed over time, in seconds since the
/// first checkpoint.
pub fn growth_figure(growth: &Growth) -> Figure {
    let first = growth.checkpoints.iter().map(|added| added.taken_at).min();
    let seconds =
        |at: jiff::Timestamp| first.map_or(0.0, |first| at.duration_since(first).as_secs_f64());
    let mut dirty_bytes = 0;
    let (mut dirty, mut stored) = (Vec::new(), Vec::new());
    for added in &growth.checkpoints {
        dirty_bytes += added.dirty_bytes;
        let point = |y: u64| Point { x: seconds(added.taken_at), y: y as f64, deviation: None };
        dirty.push(point(dirty_bytes));
        stored.push(point(added.sum_bytes));
    }
    let series = [("dirty", dirty), ("stored", stored)]
        .map(|(name, points)| Series { name: name.into(), points });
    let bytes = |value: f64| human_bytes(value as u64);
    let chart = Chart {
        title: "Sum over all checkpoints that are left".into(),
        x: Axis::new("seconds since the first checkpoint", Scale::Linear),
        y: Axis { write: bytes, ..Axis::new("bytes", Scale::Linear) },
        series: series.into(),
    };
    Figure { title: "How the store grew".into(), charts: vec![chart] }
}
