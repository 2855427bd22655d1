//! The processing of a checkpoint after its pause: figures 6.11 and A.7.

use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::chart::{Quantity, over_interval, percent, summary};
use crate::{Error, Report};

/// Writes them.
pub fn write(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let encode_ms = |run: &EvaluatedRun| run.mean(|one| one.encode_ns) / 1e6;
    let mut table = CsvTable::new(&[
        "workload",
        "interval_s",
        "encode_ms",
        "late_ms",
        "again_pages",
        "again_hash_ms",
        "again_look_up_and_store_ms",
        "again_seal_ms",
        "again_checkpoints",
    ]);
    for run in runs {
        let again = &run.processing;
        let numbers = [
            run.every_s,
            encode_ms(run),
            run.mean(|one| one.backlog_ns) / 1e6,
            again.pages,
            again.hash_s * 1e3,
            again.store_s * 1e3,
            again.seal_s * 1e3,
            again.count as f64,
        ];
        table.row(&[run.workload.key], &numbers);
        report.figure(format!("{}_encode_ns", run.key()), encode_ms(run) * 1e6);
    }
    let values = summary(runs, |run| {
        let again = &run.processing;
        let all = again.hash_s + again.store_s + again.seal_s;
        let part = |of: f64| format!("{:.0} %", percent(of, all));
        format!(
            "{:.0} ms; repeated one phase at a time: hashing {}, looking up, compressing and \
             writing {}, maps and syncing {}",
            encode_ms(run),
            part(again.hash_s),
            part(again.store_s),
            part(again.seal_s)
        )
    });
    let quantity = Quantity { column: "encode_ms", label: "ms, mean" };
    let (_, plot) = over_interval("Processing after the pause", quantity, runs, encode_ms);
    let title = "processing after the pause, by phase (A.7)";
    outputs.add(
        PaperFigure { number: "6.11", file: "6.11-processing", title },
        &table,
        &plot,
        values,
    )
}
