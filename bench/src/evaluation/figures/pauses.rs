//! The pauses of checkpoints: figures 6.10 and A.5.

use super::super::checkpoint_figures::PAUSE_STEPS;
use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{Outputs, PaperFigure};
use super::super::rounds::RunRounds;
use super::chart::{Quantity, over_interval, over_time, spread_row, spread_table, values_of_runs};
use crate::{Error, Report};
use keyframe_plot::Scale;

/// Writes them.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let pause_ms = |run: &EvaluatedRun| run.mean(|one| one.pause_ns) / 1e6;
    let max_ms =
        |run: &EvaluatedRun| run.working().iter().map(|one| one.pause_ns).fold(0.0, f64::max) / 1e6;
    let steps = PAUSE_STEPS.map(|step| format!("{step}_ms"));
    let columns: Vec<&str> =
        ["pause_ms", "max_ms"].into_iter().chain(steps.iter().map(String::as_str)).collect();
    let mut table = spread_table(&columns);
    for group in groups {
        let steps = (0..PAUSE_STEPS.len())
            .map(|step| group.spread(|run| run.mean(|one| one.pause_steps_ns[step]) / 1e6));
        let spreads: Vec<_> =
            [group.spread(pause_ms), group.spread(max_ms)].into_iter().chain(steps).collect();
        spread_row(&mut table, group, &spreads);
        report.figure(format!("{}_pause_ns", group.key()), group.spread(pause_ms).median * 1e6);
    }
    let quantity = Quantity { column: "pause_ms", label: "ms, mean" };
    let (_, plot) = over_interval("Pause over the interval", quantity, groups, pause_ms);
    let values = values_of_runs(groups, |group| {
        let [pause, max] = [group.spread(pause_ms), group.spread(max_ms)];
        format!("{} ms, longest {:.1} ms", pause.decimals(1), max.median)
    });
    let title = "pause, mean by interval, and by step";
    outputs.add(
        PaperFigure { number: "6.10", file: "6.10-pause", title },
        &table,
        &plot,
        values,
    )?;

    let quantity = Quantity { column: "pause_ms", label: "ms" };
    let title = "Pause of each checkpoint";
    let (table, plot) = over_time(title, quantity, Scale::Log, groups, |one| one.pause_ns / 1e6);
    let title = "pause of each checkpoint";
    let paper = PaperFigure { number: "A.5", file: "a.5-pause-over-time", title };
    outputs.add(paper, &table, &plot, String::new())
}
