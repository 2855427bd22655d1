//! Figure A.6: the pauses of a recording alone, and of one that is analysed while it is made.

use super::super::evaluated_run::{EvaluatedRun, ImmediateRun};
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::rounds::{RunRounds, Spread};
use super::chart::{figure, point};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// Writes it, if a recording was followed.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    let followed_groups: Vec<&RunRounds> =
        groups.iter().filter(|group| followed(group).next().is_some()).collect();
    if followed_groups.is_empty() {
        return Ok(());
    }
    let mut table = CsvTable::new(&["workload", "how", "interval_s", "round", "at_s", "pause_ms"]);
    let mut values = Vec::new();
    for group in &followed_groups {
        for (run, again) in followed(group) {
            let recordings = [("deferred", &run.checkpoints), ("immediate", &again.checkpoints)];
            for (how, checkpoints) in recordings {
                for one in checkpoints {
                    let fixed = [run.every_s, f64::from(run.round)];
                    let numbers = [&fixed[..], &[one.at_s, one.pause_ns / 1e6]].concat();
                    table.row(&[run.workload.key, how], &numbers);
                }
            }
        }
        let deferred =
            Spread::of(followed(group).map(|(run, _)| run.mean(|one| one.pause_ns / 1e6)));
        let immediate =
            Spread::of(followed(group).map(|(_, again)| again.mean(|one| one.pause_ns / 1e6)));
        let ratio = Spread::of(
            followed(group)
                .map(|(run, again)| again.mean(|one| one.pause_ns) / run.mean(|one| one.pause_ns)),
        );
        let run_time_s = Spread::of(followed(group).map(|(_, again)| again.run_time_s));
        values.push(format!(
            "{}: deferred {} ms, immediate {} ms; recording and analysis together {} s",
            group.key(),
            deferred.decimals(1),
            immediate.decimals(1),
            run_time_s.decimals(1)
        ));
        let key = group.key();
        report.figure(format!("{key}_immediate_pause_ns"), immediate.median * 1e6);
        report.figure(format!("{key}_immediate_1_jobs_s"), run_time_s.median);
        report.ratio(format!("{key}_immediate_over_deferred_pause"), ratio.median);
    }
    let title = "pauses of a recording alone (deferred), and of one that one job analyses meanwhile on \
                 the same machine (immediate)";
    let paper = PaperFigure { number: "A.6", file: "a.6-pause-immediate", title };
    outputs.add(paper, &table, &chart(&followed_groups), values.join("; "))
}

/// Returns the rounds with a recording that was analysed meanwhile.
fn followed(group: &RunRounds) -> impl Iterator<Item = (&EvaluatedRun, &ImmediateRun)> {
    group.rounds().iter().filter_map(|run| Some((run, run.followed.as_ref()?)))
}

/// The chart shows the first round.
fn chart(groups: &[&RunRounds]) -> Figure {
    let mut series = Vec::new();
    for group in groups {
        let Some((run, again)) = followed(group).next() else { continue };
        for (how, checkpoints) in
            [("deferred", &run.checkpoints), ("immediate", &again.checkpoints)]
        {
            series.push(Series {
                name: format!("{}, {how}", group.label()),
                points: checkpoints.iter().map(|one| point(one.at_s, one.pause_ns / 1e6)).collect(),
            });
        }
    }
    figure(Chart {
        title: "Pause of each checkpoint".into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("ms", Scale::Log),
        series,
    })
}
