//! The sizes of checkpoints: table 6.5, figures 6.9 and A.4.

use super::super::evaluated_run::{CheckpointFigures, EvaluatedRun};
use super::super::output::{Outputs, PaperFigure};
use super::chart::{Quantity, over_interval, over_time, summary, values_of_runs};
use crate::{Error, Report};
use keyframe_plot::Scale;

/// Writes them.
pub fn write(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_metadata(runs, outputs)?;
    let total_mib = |run: &EvaluatedRun| run.total_bytes / f64::from(1 << 20);
    let quantity = Quantity { column: "total_mib", label: "MiB" };
    let (table, plot) = over_interval("Size of the store", quantity, runs, total_mib);
    let values = values_of_runs(runs, |run| format!("{:.1} MiB", total_mib(run)));
    let title = "size of all checkpoints of a run";
    outputs.add(
        PaperFigure { number: "6.9", file: "6.9-total-size", title },
        &table,
        &plot,
        values,
    )?;
    for run in runs {
        report.figure(format!("{}_metadata_bytes", run.key()), run.mean(metadata_bytes));
        report.figure(format!("{}_total_bytes", run.key()), run.total_bytes);
    }
    Ok(())
}

/// Returns the size of a checkpoint without its contents: the maps of RAM and disks, and the
/// device state.
fn metadata_bytes(checkpoint: &CheckpointFigures) -> f64 {
    checkpoint.map_bytes + checkpoint.device_bytes
}

/// Table 6.5 and figure A.4.
fn write_metadata(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let quantity = Quantity { column: "metadata_bytes", label: "KiB" };
    let title = "Metadata of each checkpoint (A.4)";
    let (table, plot) =
        over_time(title, quantity, Scale::Log, runs, |one| metadata_bytes(one) / 1024.0);
    let values = summary(runs, |run| {
        let kib = |of: fn(&CheckpointFigures) -> f64| run.mean(of) / 1024.0;
        format!(
            "{:.1} KiB (maps {:.1}, devices {:.1})",
            kib(metadata_bytes),
            kib(|one| one.map_bytes),
            kib(|one| one.device_bytes)
        )
    });
    let title = "mean metadata of a checkpoint, in KiB (and over time, A.4)";
    outputs.add(PaperFigure { number: "T6.5", file: "t6.5-metadata", title }, &table, &plot, values)
}
