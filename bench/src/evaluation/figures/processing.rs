//! The processing of a checkpoint after its pause: figures 6.11 and A.7. The steps are those that
//! each checkpoint recorded while it was processed.

use super::super::checkpoint_figures::{CheckpointFigures, PROCESSING_STEPS};
use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::rounds::{RunRounds, Spread};
use super::chart::{
    Quantity, figure, in_detail, over_interval, percent, point, spread_row, spread_table, summary,
    values_of_runs,
};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// The step for the time of the encoder that no other step has: joining copies of a page, counting.
const REST: &str = "rest";
/// The number of steps with [`REST`].
const STEPS: usize = PROCESSING_STEPS.len() + 1;

/// Writes them.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_by_interval(groups, outputs)?;
    write_steps(groups, outputs)?;
    for group in groups {
        let ns = |of: fn(&CheckpointFigures) -> f64| group.spread(|run| run.mean(of)).median;
        report.figure(format!("{}_encode_ns", group.key()), ns(|one| one.encode_ns));
        report
            .figure(format!("{}_processing_ns", group.key()), ns(CheckpointFigures::processing_ns));
    }
    Ok(())
}

fn processing_ms(run: &EvaluatedRun) -> f64 {
    run.mean(CheckpointFigures::processing_ns) / 1e6
}

/// Returns the time of each step in milliseconds, those of [`PROCESSING_STEPS`] and [`REST`].
fn steps_ms(checkpoint: &CheckpointFigures) -> [f64; STEPS] {
    let steps_ns = &checkpoint.processing_steps_ns;
    let of_pages: f64 = steps_ns[..4].iter().sum();
    let mut all = [0.0; STEPS];
    for (ms, ns) in all.iter_mut().zip(steps_ns) {
        *ms = ns / 1e6;
    }
    all[STEPS - 1] = (checkpoint.encode_ns - of_pages).max(0.0) / 1e6;
    all
}

fn names() -> [&'static str; STEPS] {
    let mut names = [REST; STEPS];
    names[..STEPS - 1].copy_from_slice(&PROCESSING_STEPS);
    names
}

/// Figure 6.11.
fn write_by_interval(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let encode_ms = |run: &EvaluatedRun| run.mean(|one| one.encode_ns) / 1e6;
    let late_ms = |run: &EvaluatedRun| run.mean(|one| one.backlog_ns) / 1e6;
    let mut table = spread_table(&["processing_ms", "encode_ms", "late_ms"]);
    for group in groups {
        let spreads = [group.spread(processing_ms), group.spread(encode_ms), group.spread(late_ms)];
        spread_row(&mut table, group, &spreads);
    }
    let quantity = Quantity { column: "processing_ms", label: "ms, mean" };
    let (_, plot) = over_interval("Processing after the pause", quantity, groups, processing_ms);
    let values =
        values_of_runs(groups, |group| format!("{} ms", group.spread(processing_ms).decimals(0)));
    let title = "processing after the pause, mean by interval; seal and disks included";
    let paper = PaperFigure { number: "6.11", file: "6.11-processing", title };
    outputs.add(paper, &table, &plot, values)
}

/// Figure A.7.
fn write_steps(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let columns = names().map(|step| format!("{step}_ms"));
    let fixed = ["workload", "interval_s", "round", "at_s"];
    let all: Vec<&str> = fixed.into_iter().chain(columns.iter().map(String::as_str)).collect();
    let mut over_time = CsvTable::new(&all);
    for group in in_detail(groups) {
        let run = group.median_round();
        for checkpoint in &run.checkpoints {
            let fixed = [run.every_s, f64::from(run.round), checkpoint.at_s];
            let numbers = [&fixed[..], &steps_ms(checkpoint)].concat();
            over_time.row(&[run.workload.key], &numbers);
        }
    }
    let step = |group: &RunRounds, at: usize| group.spread(|run| run.mean(|one| steps_ms(one)[at]));
    let mut means = spread_table(&columns.iter().map(String::as_str).collect::<Vec<_>>());
    for group in groups {
        let spreads: Vec<Spread> = (0..STEPS).map(|at| step(group, at)).collect();
        spread_row(&mut means, group, &spreads);
    }
    let values = summary(groups, |group| {
        let medians: Vec<f64> = (0..STEPS).map(|at| step(group, at).median).collect();
        let all: f64 = medians.iter().sum();
        let parts = names().into_iter().zip(&medians);
        let shown: Vec<String> = parts
            .map(|(name, ms)| format!("{} {:.0} %", name.replace('_', " "), percent(*ms, all)))
            .collect();
        format!("{all:.0} ms: {}", shown.join(", "))
    });
    let title = "steps of the processing, as each checkpoint recorded them";
    let paper = PaperFigure { number: "A.7", file: "a.7-processing-steps", title };
    outputs.add(paper, &over_time, &steps_over_time(groups), values)?;
    let title = "steps of the processing, means by interval";
    let paper = PaperFigure { number: "A.7", file: "a.7-processing-steps-by-interval", title };
    outputs.add(paper, &means, &super::chart::no_figure(), String::new())
}

/// The chart shows the first workload, without [`REST`]: there are no more colours.
fn steps_over_time(groups: &[RunRounds]) -> Figure {
    let first = in_detail(groups).into_iter().next();
    let checkpoints = first.map(|group| &group.median_round().checkpoints[..]).unwrap_or_default();
    let series = PROCESSING_STEPS.into_iter().enumerate().map(|(at, name)| Series {
        name: name.replace('_', " "),
        points: checkpoints.iter().map(|one| point(one.at_s, steps_ms(one)[at])).collect(),
    });
    figure(Chart {
        title: format!(
            "Steps after the pause of {}",
            first.map(RunRounds::label).unwrap_or_default()
        ),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("ms", Scale::Log),
        series: series.collect(),
    })
}
