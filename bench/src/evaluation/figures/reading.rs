//! The time until a node has a checkpoint: read from the store (figure 6.12), and sent over a link
//! (figure 6.13, computed).

use super::super::evaluated_run::{CheckpointFigures, EvaluatedRun, mean};
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::chart::{Quantity, figure, in_detail, over_interval, point, summary};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// The rate of the link for which transfers are computed.
const BITS_PER_S: f64 = 1e9;

/// Writes them.
pub fn write(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_reading(runs, outputs)?;
    write_transfer(runs, outputs)?;
    for run in runs {
        let key = run.key();
        let ram_bytes = run.mean(|checkpoint| checkpoint.ram_bytes);
        report.figure(format!("{key}_read_warm_ns"), warm_ms(run) * 1e6);
        report.figure(format!("{key}_read_cold_ns"), cold_ms(run) * 1e6);
        report.figure(format!("{key}_transfer_missing_bytes"), missing_bytes(run));
        report.ratio(format!("{key}_missing_over_ram"), missing_bytes(run) / ram_bytes);
    }
    Ok(())
}

fn warm_ms(run: &EvaluatedRun) -> f64 {
    mean(run.reads.iter().map(|read| read.warm_s * 1e3))
}

fn cold_ms(run: &EvaluatedRun) -> f64 {
    mean(run.reads.iter().map(|read| read.cold_s * 1e3))
}

/// Returns the mean size of a checkpoint for a node that has the one before, in bytes.
fn missing_bytes(run: &EvaluatedRun) -> f64 {
    let missing = |one: &CheckpointFigures| {
        one.stored_bytes + one.disk_stored_bytes + one.map_bytes + one.device_bytes
    };
    run.mean(missing)
}

/// Returns the seconds that `bytes` take on the link.
fn on_link_s(bytes: f64) -> f64 {
    bytes * 8.0 / BITS_PER_S
}

/// Figure 6.12.
fn write_reading(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let columns = ["workload", "interval_s", "checkpoint", "image_bytes", "warm_ms", "cold_ms"];
    let mut table = CsvTable::new(&columns);
    for run in runs {
        for read in &run.reads {
            let numbers = [
                run.every_s,
                read.checkpoint as f64,
                read.image_bytes,
                read.warm_s * 1e3,
                read.cold_s * 1e3,
            ];
            table.row(&[run.workload.key], &numbers);
        }
    }
    let values =
        summary(runs, |run| format!("warm {:.0} ms, cold {:.0} ms", warm_ms(run), cold_ms(run)));
    let title = "reading a whole image from the store, warm and cold";
    let paper = PaperFigure { number: "6.12", file: "6.12-read", title };
    outputs.add(paper, &table, &reading_chart(runs), values)
}

fn reading_chart(runs: &[EvaluatedRun]) -> Figure {
    let mut series = Vec::new();
    for run in in_detail(runs) {
        let warm = run.reads.iter().map(|one| point(one.checkpoint as f64, one.warm_s * 1e3));
        let cold = run.reads.iter().map(|one| point(one.checkpoint as f64, one.cold_s * 1e3));
        let workload = run.workload.key;
        series.push(Series { name: format!("{workload}, warm"), points: warm.collect() });
        series.push(Series { name: format!("{workload}, cold"), points: cold.collect() });
    }
    figure(Chart {
        title: "Reading an image".into(),
        x: Axis::new("checkpoint", Scale::Linear),
        y: Axis::new("ms", Scale::Log),
        series,
    })
}

/// Figure 6.13.
fn write_transfer(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let columns = ["workload", "interval_s", "whole_ram_s", "missing_bytes", "missing_s"];
    let mut table = CsvTable::new(&columns);
    let whole_s = |run: &EvaluatedRun| run.mean(|checkpoint| on_link_s(checkpoint.ram_bytes));
    for run in runs {
        let missing = missing_bytes(run);
        let numbers = [run.every_s, whole_s(run), missing, on_link_s(missing)];
        table.row(&[run.workload.key], &numbers);
    }
    let missing_ms = |run: &EvaluatedRun| on_link_s(missing_bytes(run)) * 1e3;
    let title = "Computed: a checkpoint for a node that has the one before, over 1 Gbit/s";
    let quantity = Quantity { column: "missing_ms", label: "ms, mean" };
    let (_, plot) = over_interval(title, quantity, runs, missing_ms);
    let values = summary(runs, |run| {
        format!("whole RAM {:.2} s, missing pages {:.0} ms", whole_s(run), missing_ms(run))
    });
    let title = "transfer, *computed* from bytes for 1 Gbit/s";
    let paper = PaperFigure { number: "6.13", file: "6.13-transfer", title };
    outputs.add(paper, &table, &plot, values)
}
