//! A figure of predictions: the speed-up over nodes, each with its best intervals, and over the length
//! of an interval.

use crate::prediction_table::columns;
use crate::simulation::ClusterRun;
use crate::{Constants, Prediction, recommend};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// Points of a line.
const STEPS: u32 = 60;

/// Returns the figure for up to as many nodes as `nodes` has, or as `enough`, the number that is
/// enough. Runs of a simulated cluster are drawn beside the formulas, if there are any.
pub fn prediction_figure(
    constants: &Constants,
    enough: u64,
    nodes: &[u64],
    simulated: &[ClusterRun],
) -> Figure {
    let most = nodes.iter().copied().chain([enough, 2]).fold(0, u64::max);
    let point = |x: f64, y: f64| Point { x, y, deviation: None };
    let mut counts: Vec<u64> =
        (0..=STEPS).map(|step| geometric(1.0, most as f64, step) as u64).collect();
    counts.dedup();
    let with_best =
        counts.iter().map(|n| point(*n as f64, recommend(constants, *n).best.speed_up)).collect();
    let ideal = counts.iter().map(|n| point(*n as f64, *n as f64)).collect();
    let mut by_cluster: Vec<Point> =
        simulated.iter().map(|row| point(row.nodes as f64, row.speed_up)).collect();
    by_cluster.sort_by(|a, b| a.x.total_cmp(&b.x));
    let mut over_nodes = Chart {
        title: "With the best intervals for each number of nodes".into(),
        x: Axis::new("nodes", Scale::Log),
        y: Axis::new("speed-up", Scale::Log),
        series: vec![
            Series { name: "predicted".into(), points: with_best },
            Series { name: "as many as nodes".into(), points: ideal },
        ],
    };
    if !by_cluster.is_empty() {
        over_nodes.series.push(Series { name: "simulated cluster".into(), points: by_cluster });
    }
    let longest = (constants.s_log * constants.t_vm).min(100.0);
    let line = |count: u64| Series {
        name: format!("{count} nodes"),
        points: (0..=STEPS)
            .map(|step| geometric(longest / 1000.0, longest, step))
            .map(|length| point(length, Prediction::at(constants, count, length).speed_up))
            .collect(),
    };
    let over_length = Chart {
        title: "With intervals of one length".into(),
        x: Axis::new("interval length, seconds", Scale::Log),
        y: Axis::new("speed-up", Scale::Log),
        series: columns(enough, nodes).into_iter().map(line).collect(),
    };
    Figure { title: "Prediction speed-up".into(), charts: vec![over_nodes, over_length] }
}

fn geometric(from: f64, to: f64, step: u32) -> f64 {
    from * (to / from).powf(f64::from(step) / f64::from(STEPS))
}
