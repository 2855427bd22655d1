//! The time until a node has a checkpoint: read from the store (figure 6.12), and sent over a link
//! (figure 6.13, computed).

use super::super::checkpoint_figures::CheckpointFigures;
use super::super::evaluated_run::{EvaluatedRun, mean};
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::rounds::RunRounds;
use super::chart::{
    Quantity, figure, in_detail, over_interval, point, spread_row, spread_table, summary,
};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// The rate of the link for which transfers are computed.
const BITS_PER_S: f64 = 1e9;

/// Writes them.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_reading(groups, outputs)?;
    write_transfer(groups, outputs)?;
    for group in groups {
        let key = group.key();
        report.figure(format!("{key}_read_warm_ns"), group.spread(warm_ms).median * 1e6);
        report.figure(format!("{key}_read_cold_ns"), group.spread(cold_ms).median * 1e6);
        report.figure(format!("{key}_transfer_missing_bytes"), group.spread(missing_bytes).median);
        let over_ram = group.spread(|run| missing_bytes(run) / run.mean(|one| one.ram_bytes));
        report.ratio(format!("{key}_missing_over_ram"), over_ram.median);
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
    run.mean(CheckpointFigures::missing_bytes)
}

/// Returns the seconds that `bytes` take on the link.
fn on_link_s(bytes: f64) -> f64 {
    bytes * 8.0 / BITS_PER_S
}

/// Figure 6.12.
fn write_reading(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let columns =
        ["workload", "interval_s", "round", "checkpoint", "image_bytes", "warm_ms", "cold_ms"];
    let mut table = CsvTable::new(&columns);
    for run in groups.iter().flat_map(RunRounds::rounds) {
        for read in &run.reads {
            let numbers = [
                run.every_s,
                f64::from(run.round),
                read.checkpoint as f64,
                read.image_bytes,
                read.warm_s * 1e3,
                read.cold_s * 1e3,
            ];
            table.row(&[run.workload.key], &numbers);
        }
    }
    let values = summary(groups, |group| {
        let [warm, cold] = [group.spread(warm_ms), group.spread(cold_ms)];
        format!("warm {} ms, cold {} ms", warm.decimals(0), cold.decimals(0))
    });
    let title = "reading a whole image from the store, warm and cold";
    let paper = PaperFigure { number: "6.12", file: "6.12-read", title };
    outputs.add(paper, &table, &reading_chart(groups), values)
}

fn reading_chart(groups: &[RunRounds]) -> Figure {
    let mut series = Vec::new();
    for group in in_detail(groups) {
        let run = group.median_round();
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
fn write_transfer(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let whole_s = |run: &EvaluatedRun| run.mean(|one| on_link_s(one.ram_bytes));
    let missing_ms = |run: &EvaluatedRun| on_link_s(missing_bytes(run)) * 1e3;
    let mut table = spread_table(&["whole_ram_s", "missing_bytes", "missing_ms"]);
    for group in groups {
        let spreads =
            [group.spread(whole_s), group.spread(missing_bytes), group.spread(missing_ms)];
        spread_row(&mut table, group, &spreads);
    }
    let title = "Computed: a checkpoint for a node that has the one before, over 1 Gbit/s";
    let quantity = Quantity { column: "missing_ms", label: "ms, mean" };
    let (_, plot) = over_interval(title, quantity, groups, missing_ms);
    let values = summary(groups, |group| {
        let [whole, missing] = [group.spread(whole_s), group.spread(missing_ms)];
        format!("whole RAM {:.2} s, missing parts {} ms", whole.median, missing.decimals(0))
    });
    let title = "transfer, *computed* from bytes for 1 Gbit/s";
    let paper = PaperFigure { number: "6.13", file: "6.13-transfer", title };
    outputs.add(paper, &table, &plot, values)
}
