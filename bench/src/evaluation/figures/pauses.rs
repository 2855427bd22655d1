//! The pauses of checkpoints: figures 6.10 and A.5.

use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::chart::{Quantity, over_interval, over_time, values_of_runs};
use crate::{Error, Report};
use keyframe_plot::{Figure, Scale};

/// Writes them.
pub fn write(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let pause_ms = |run: &EvaluatedRun| run.mean(|one| one.pause_ns) / 1e6;
    let mut table = CsvTable::new(&[
        "workload",
        "interval_s",
        "pause_ms",
        "max_ms",
        "stop_ms",
        "device_state_ms",
        "scan_ms",
        "copy_ms",
        "resume_ms",
    ]);
    for run in runs {
        let max_ms = run.working().iter().map(|one| one.pause_ns).fold(0.0, f64::max) / 1e6;
        let phases: Vec<f64> =
            (0..5).map(|phase| run.mean(|one| one.pause_phases_ns[phase]) / 1e6).collect();
        let numbers = [&[run.every_s, pause_ms(run), max_ms][..], &phases].concat();
        table.row(&[run.workload.key], &numbers);
        report.figure(format!("{}_pause_ns", run.key()), pause_ms(run) * 1e6);
    }
    let quantity = Quantity { column: "pause_ms", label: "ms, mean" };
    let (_, by_interval) = over_interval("Pause over the interval", quantity, runs, pause_ms);
    let quantity = Quantity { column: "pause_ms", label: "ms" };
    let title = "Pause of each checkpoint (A.5)";
    let (over_time, by_time) =
        over_time(title, quantity, Scale::Log, runs, |one| one.pause_ns / 1e6);
    let charts = [by_interval.charts, by_time.charts].concat();
    let plot = Figure { title: "Pauses".into(), charts };
    let values = values_of_runs(runs, |run| format!("{:.1} ms", pause_ms(run)));
    let title = "pause, mean by interval, and by phase";
    outputs.add(
        PaperFigure { number: "6.10", file: "6.10-pause", title },
        &table,
        &plot,
        values,
    )?;

    let no_plot = Figure { title: String::new(), charts: Vec::new() };
    let title = "pause of each checkpoint (drawn in 6.10)";
    let paper = PaperFigure { number: "A.5", file: "a.5-pause-over-time", title };
    outputs.add(paper, &over_time, &no_plot, String::new())
}
