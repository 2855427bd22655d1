//! The sizes of checkpoints: table 6.5, figures 6.9 and A.4.

use super::super::checkpoint_figures::CheckpointFigures;
use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{Outputs, PaperFigure};
use super::super::rounds::RunRounds;
use super::chart::{
    Quantity, no_figure, over_interval, over_time, spread_row, spread_table, summary,
    values_of_runs,
};
use crate::{Error, Report};
use keyframe_plot::Scale;

type PartBytes = fn(&CheckpointFigures) -> f64;

/// The parts of a checkpoint that are not content.
const PARTS: [(&str, PartBytes); 4] = [
    ("metadata_bytes", CheckpointFigures::metadata_bytes),
    ("device_state_bytes", |one| one.device_bytes),
    ("ram_map_bytes", |one| one.ram_map_bytes),
    ("disk_map_bytes", |one| one.disk_map_bytes),
];

/// Writes them.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_metadata(groups, outputs)?;
    let total_mib = |run: &EvaluatedRun| run.total_bytes / f64::from(1 << 20);
    let quantity = Quantity { column: "total_mib", label: "MiB" };
    let (table, plot) = over_interval("Size of the store", quantity, groups, total_mib);
    let values =
        values_of_runs(groups, |group| format!("{} MiB", group.spread(total_mib).decimals(1)));
    let title = "size of all checkpoints of a run";
    let paper = PaperFigure { number: "6.9", file: "6.9-total-size", title };
    outputs.add(paper, &table, &plot, values)?;
    for group in groups {
        let metadata = group.spread(|run| run.mean(CheckpointFigures::metadata_bytes));
        report.figure(format!("{}_metadata_bytes", group.key()), metadata.median);
        let total = group.spread(|run| run.total_bytes);
        report.figure(format!("{}_total_bytes", group.key()), total.median);
    }
    Ok(())
}

/// Table 6.5 and figure A.4.
fn write_metadata(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = spread_table(&PARTS.map(|(name, _)| name));
    for group in groups {
        let spreads = PARTS.map(|(_, of)| group.spread(|run| run.mean(of)));
        spread_row(&mut table, group, &spreads);
    }
    let values = summary(groups, |group| {
        let [all, devices, ram_map, disk_map] =
            PARTS.map(|(_, of)| group.spread(|run| run.mean(of) / 1024.0).decimals(1));
        format!("{all} KiB (RAM map {ram_map}, disk map {disk_map}, devices {devices})")
    });
    let title = "mean metadata of a checkpoint: device state, RAM map, disk map";
    let paper = PaperFigure { number: "T6.5", file: "t6.5-metadata", title };
    outputs.add(paper, &table, &no_figure(), values)?;

    let quantity = Quantity { column: "metadata_kib", label: "KiB" };
    let title = "Metadata of each checkpoint";
    let kib = |one: &CheckpointFigures| one.metadata_bytes() / 1024.0;
    let (table, plot) = over_time(title, quantity, Scale::Log, groups, kib);
    let title = "metadata of each checkpoint";
    let paper = PaperFigure { number: "A.4", file: "a.4-metadata-over-time", title };
    outputs.add(paper, &table, &plot, String::new())
}
