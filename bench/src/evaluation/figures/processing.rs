//! What is done with a checkpoint behind its pause: figure 6.11, A.7.

use super::super::measured::Run;
use super::super::output::{Csv, Outputs};
use super::lines::{over_interval, percent, told};
use crate::{Error, Report};

/// Writes them.
pub fn write(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    let encode_ms = |run: &Run| run.mean(|one| one.encode_ns) / 1e6;
    let (_, plot) =
        over_interval("Processing behind the pause", ("encode_ms", "ms, mean"), runs, encode_ms);
    let mut csv = Csv::new(
        "workload,interval_s,encode_ms,late_ms,again_pages,again_hash_ms,again_look_up_and_store_ms,again_seal_ms,again_checkpoints",
    );
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
        csv.row(&[run.kind.key], &numbers);
        report.figure(format!("{}_encode_ns", run.key()), encode_ms(run) * 1e6);
    }
    let ours = told(runs, |run| {
        let again = &run.processing;
        let all = again.hash_s + again.store_s + again.seal_s;
        let part = |of: f64| format!("{:.0} %", percent(of, all));
        format!(
            "{:.0} ms; done again one by one: hashing {}, looking up, compressing and writing {}, maps and syncing {}",
            encode_ms(run),
            part(again.hash_s),
            part(again.store_s),
            part(again.seal_s)
        )
    });
    outputs.add(
        ("6.11", "6.11-processing", "processing behind the pause, by phase (A.7)"),
        &csv,
        &plot,
        ours,
    )
}
