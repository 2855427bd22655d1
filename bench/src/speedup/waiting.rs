//! The stand-in for a slow simulator with 1 to 16 workers of one process.

use super::{Plan, WAIT, ns, record};
use crate::replay::recording::Recording;
use crate::{Error, Options, Report};
use keyframe_plot::{Axis, Chart, Point, Scale, Series};
use std::path::Path;

/// The numbers of workers.
const WORKERS: [u64; 5] = [1, 2, 4, 8, 16];

/// Measures the speed-up with workers on this machine.
pub fn measure(
    options: &Options,
    plan: &Plan,
    dir: &Path,
    report: &mut Report,
) -> Result<Chart, Error> {
    let place = dir.join("wait");
    record(options, ("idle", plan.wait_units), plan.wait_every, dir, &place)?;
    let recording = Recording { options, dir: &place };
    let factor = format!("factor={}", plan.wait_factor);
    report.notes.insert(WAIT.into(), note(plan.wait_factor));
    let mut points = Vec::new();
    let mut one_ns = f64::NAN;
    for workers in WORKERS {
        options.say(format!("wait, {workers} workers"));
        let jobs = workers.to_string();
        let arguments = ["--tool", WAIT, "--tool-arg", &factor, "--jobs", &jobs];
        let (_, mut reports) = recording.reports(&arguments, 1)?;
        let wall_ns = ns(&reports.pop().unwrap_or_default(), "wall_ns");
        if workers == 1 {
            one_ns = wall_ns;
        }
        let speedup = one_ns / wall_ns;
        report.figure(format!("wait_{workers}_ns"), wall_ns);
        report.ratio(format!("speedup_wait_{workers}"), speedup);
        report.ratio(format!("speedup_over_workers_wait_{workers}"), speedup / workers as f64);
        points.push(Point { x: workers as f64, y: speedup, deviation: None });
    }
    let title = format!("a stand-in that takes {} times the recorded time", plan.wait_factor);
    Ok(speed_up_chart(title, "workers", vec![("measured".into(), points)]))
}

/// Says what the stand-in is.
pub fn note(factor: u64) -> String {
    format!(
        "a stand-in for a slow simulator: each interval is replayed exactly, then its worker waits \
         until {factor} times its recorded time has passed"
    )
}

/// Returns a chart of speed-ups over the number of `workers`, beside the ideal ones.
pub fn speed_up_chart(title: String, workers: &str, measured: Vec<(String, Vec<Point>)>) -> Chart {
    let ideal = WORKERS.map(|n| Point { x: n as f64, y: n as f64, deviation: None });
    let measured = measured.into_iter().map(|(name, points)| Series { name, points });
    let ideal = Series { name: "ideal".into(), points: ideal.into() };
    Chart {
        title,
        x: Axis::new(workers, Scale::Linear),
        y: Axis::new("speed-up", Scale::Linear),
        series: measured.chain([ideal]).collect(),
    }
}
