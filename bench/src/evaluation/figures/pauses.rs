//! How long the VM stands still: figure 6.10, A.5.

use super::super::measured::Run;
use super::super::output::{Csv, Outputs};
use super::lines::{over_interval, over_time};
use crate::{Error, Report};
use keyframe_plot::{Figure, Scale};

/// Writes them.
pub fn write(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    let pause_ms = |run: &Run| run.mean(|one| one.pause_ns) / 1e6;
    let (_, by_length) =
        over_interval("Pause over the interval", ("pause_ms", "ms, mean"), runs, pause_ms);
    let (over, by_time) =
        over_time("Pause of each checkpoint (A.5)", ("pause_ms", "ms"), Scale::Log, runs, |one| {
            one.pause_ns / 1e6
        });
    let mut csv = Csv::new(
        "workload,interval_s,pause_ms,max_ms,stop_ms,device_state_ms,scan_ms,copy_ms,resume_ms",
    );
    for run in runs {
        let most = run.working().iter().map(|one| one.pause_ns).fold(0.0, f64::max) / 1e6;
        let parts: Vec<f64> =
            (0..5).map(|part| run.mean(|one| one.pause_parts_ns[part]) / 1e6).collect();
        csv.row(&[run.kind.key], &[&[run.every_s, pause_ms(run), most][..], &parts].concat());
        report.figure(format!("{}_pause_ns", run.key()), pause_ms(run) * 1e6);
    }
    let charts = [by_length.charts, by_time.charts].concat();
    let plot = Figure { title: "Pauses".into(), charts };
    let all: Vec<String> =
        runs.iter().map(|run| format!("{} {:.1} ms", run.key(), pause_ms(run))).collect();
    outputs.add(
        ("6.10", "6.10-pause", "pause, mean by interval, and by phase"),
        &csv,
        &plot,
        all.join("; "),
    )?;
    let none = Figure { title: String::new(), charts: Vec::new() };
    outputs.add(
        ("A.5", "a.5-pause-over-time", "pause of each checkpoint (drawn in 6.10)"),
        &over,
        &none,
        String::new(),
    )
}
