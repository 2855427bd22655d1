//! How long a checkpoint takes to get to a node: read (figure 6.12), and sent (6.13, computed).

use super::super::measured::{Checkpoint, Run, mean};
use super::super::output::{Csv, Outputs};
use super::lines::{figure, in_detail, over_interval, point, told};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Scale, Series};

/// Of the link that transfers are computed for.
const BITS_PER_S: f64 = 1e9;

/// Seconds on the link.
fn on_link(bytes: f64) -> f64 {
    bytes * 8.0 / BITS_PER_S
}

/// What a node that has the checkpoint before lacks.
fn missing(one: &Checkpoint) -> f64 {
    one.stored_bytes + one.disk_stored_bytes + one.map_bytes + one.device_bytes
}

/// Writes them.
pub fn write(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    let mut csv = Csv::new("workload,interval_s,checkpoint,image_bytes,warm_ms,cold_ms");
    for run in runs {
        for read in &run.reads {
            let numbers = [
                run.every_s,
                read.checkpoint as f64,
                read.image_bytes,
                read.warm_s * 1e3,
                read.cold_s * 1e3,
            ];
            csv.row(&[run.kind.key], &numbers);
        }
    }
    let mut series = Vec::new();
    for run in in_detail(runs) {
        for (name, of) in [("warm", false), ("cold", true)] {
            let ms = |one: &super::super::reading::Read| {
                (if of { one.cold_s } else { one.warm_s }) * 1e3
            };
            let points =
                run.reads.iter().map(|one| point(one.checkpoint as f64, ms(one))).collect();
            series.push(Series { name: format!("{}, {name}", run.kind.key), points });
        }
    }
    let plot = figure(Chart {
        title: "Reading an image".into(),
        x: Axis::new("checkpoint", Scale::Linear),
        y: Axis::new("ms", Scale::Log),
        series,
    });
    let warm = |run: &Run| mean(run.reads.iter().map(|read| read.warm_s * 1e3));
    let cold = |run: &Run| mean(run.reads.iter().map(|read| read.cold_s * 1e3));
    let ours = told(runs, |run| format!("warm {:.0} ms, cold {:.0} ms", warm(run), cold(run)));
    outputs.add(
        ("6.12", "6.12-read", "reading a whole image from the store, warm and cold"),
        &csv,
        &plot,
        ours,
    )?;

    let mut csv = Csv::new("workload,interval_s,whole_ram_s,missing_bytes,missing_s");
    let lacking = |run: &Run| run.mean(missing);
    let whole = |run: &Run| run.mean(|one| on_link(one.ram_bytes));
    for run in runs {
        csv.row(&[run.kind.key], &[run.every_s, whole(run), lacking(run), on_link(lacking(run))]);
    }
    let title = "Computed: what a node lacks of the next checkpoint, over 1 Gbit/s";
    let (_, plot) =
        over_interval(title, ("missing_ms", "ms, mean"), runs, |run| on_link(lacking(run)) * 1e3);
    let ours = told(runs, |run| {
        format!(
            "whole RAM {:.2} s, what is missing {:.0} ms",
            whole(run),
            on_link(lacking(run)) * 1e3
        )
    });
    let what = "transfer, *computed* from bytes for 1 Gbit/s";
    outputs.add(("6.13", "6.13-transfer", what), &csv, &plot, ours)?;
    for run in runs {
        let key = run.key();
        report.figure(format!("{key}_read_warm_ns"), warm(run) * 1e6);
        report.figure(format!("{key}_read_cold_ns"), cold(run) * 1e6);
        report.figure(format!("{key}_transfer_missing_bytes"), lacking(run));
        report
            .ratio(format!("{key}_missing_over_ram"), lacking(run) / run.mean(|one| one.ram_bytes));
    }
    Ok(())
}
