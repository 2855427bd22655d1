//! What checkpoints take: table 6.5, figure 6.9, A.4.

use super::super::measured::{Checkpoint, Run};
use super::super::output::Outputs;
use super::lines::{over_interval, over_time, told};
use crate::{Error, Report};
use keyframe_plot::Scale;

/// What is not content: the map of RAM's pages and disks' blocks, and the devices' state.
fn metadata(one: &Checkpoint) -> f64 {
    one.map_bytes + one.device_bytes
}

/// Writes them.
pub fn write(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    let (csv, plot) = over_time(
        "Metadata of each checkpoint (A.4)",
        ("metadata_bytes", "KiB"),
        Scale::Log,
        runs,
        |one| metadata(one) / 1024.0,
    );
    let ours = told(runs, |run| {
        let kib = |of: fn(&Checkpoint) -> f64| run.mean(of) / 1024.0;
        format!(
            "{:.1} KiB (maps {:.1}, devices {:.1})",
            kib(metadata),
            kib(|one| one.map_bytes),
            kib(|one| one.device_bytes)
        )
    });
    outputs.add(
        (
            "T6.5",
            "t6.5-metadata",
            "metadata of a checkpoint, in the mean; in KiB (and over time, A.4)",
        ),
        &csv,
        &plot,
        ours,
    )?;
    let total = |run: &Run| run.total_bytes / f64::from(1 << 20);
    let (csv, plot) = over_interval("All of the store", ("total_mib", "MiB"), runs, total);
    let all: Vec<String> =
        runs.iter().map(|run| format!("{} {:.1} MiB", run.key(), total(run))).collect();
    outputs.add(
        ("6.9", "6.9-total-size", "size of all checkpoints of a run"),
        &csv,
        &plot,
        all.join("; "),
    )?;
    for run in runs {
        report.figure(format!("{}_metadata_bytes", run.key()), run.mean(metadata));
        report.figure(format!("{}_total_bytes", run.key()), run.total_bytes);
    }
    Ok(())
}
