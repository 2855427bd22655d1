//! The pages and sectors that need not be stored, by phase of the run and by the place where they
//! were found: table 6.4, figures 6.6 to 6.8, A.2, A.3.

use super::super::evaluated_run::{CheckpointFigures, EvaluatedRun, RunPhase};
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::chart::{
    Quantity, by_workload, figure, in_detail, over_interval, percent, point, summary,
    values_of_runs,
};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

type Rate = fn(&[&CheckpointFigures]) -> f64;
type Count = fn(&CheckpointFigures) -> f64;

const PHASES: [(&str, RunPhase); 3] =
    [("boot", RunPhase::Boot), ("first", RunPhase::FirstPass), ("rest", RunPhase::LaterPasses)];

/// Writes them.
pub fn write(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_by_phase(runs, outputs)?;
    write_sources_of_sectors(runs, outputs)?;
    write_by_interval(runs, outputs)?;
    for run in runs {
        let working = run.working();
        for (key, value) in [("ram", ram_percent(&working)), ("disk", disk_percent(&working))] {
            // A workload that does not write to its disk has no rate.
            if value.is_finite() {
                report.figure(format!("{}_{key}_deduplicated_percent", run.key()), value);
            }
        }
    }
    Ok(())
}

fn sum(checkpoints: &[&CheckpointFigures], of: Count) -> f64 {
    checkpoints.iter().map(|checkpoint| of(checkpoint)).sum()
}

/// Returns the dirty pages that were not stored, in percent of the dirty pages.
fn ram_percent(checkpoints: &[&CheckpointFigures]) -> f64 {
    let not_stored = sum(checkpoints, |one| one.dirty_pages - one.stored_pages);
    percent(not_stored, sum(checkpoints, |one| one.dirty_pages))
}

/// Returns the written sectors that were not stored, in percent of the written sectors.
fn disk_percent(checkpoints: &[&CheckpointFigures]) -> f64 {
    let not_stored = sum(checkpoints, |one| one.sectors.written - one.sectors.not_deduplicated);
    percent(not_stored, sum(checkpoints, |one| one.sectors.written))
}

fn of_phase(run: &EvaluatedRun, phase: RunPhase) -> Vec<&CheckpointFigures> {
    run.checkpoints.iter().filter(|checkpoint| checkpoint.phase == phase).collect()
}

fn rounded(value: f64) -> String {
    if value.is_finite() { format!("{value:.0}") } else { "-".into() }
}

/// Table 6.4, figures A.2 and A.3.
fn write_by_phase(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = CsvTable::new(&[
        "workload",
        "part",
        "interval_s",
        "ram_percent",
        "disk_percent",
        "pages",
        "zero_pages",
        "known_pages",
        "known_by_disk_pages",
        "unchanged_pages",
        "stored_pages",
    ]);
    for run in in_detail(runs) {
        for (name, phase) in PHASES {
            let all = of_phase(run, phase);
            let numbers = [
                run.every_s,
                ram_percent(&all),
                disk_percent(&all),
                sum(&all, |one| one.dirty_pages),
                sum(&all, |one| one.zero_pages),
                sum(&all, |one| one.dedup_pages - one.dedup_disk_pages),
                sum(&all, |one| one.dedup_disk_pages),
                sum(&all, |one| one.unchanged_pages),
                sum(&all, |one| one.stored_pages),
            ];
            table.row(&[run.workload.key, name], &numbers);
        }
    }
    let charts = [
        rate_over_time(runs, "Pages of RAM that need not be stored (A.2)", ram_percent),
        rate_over_time(runs, "Sectors of disks that need not be stored (A.3)", disk_percent),
    ];
    let plot = Figure { title: "Deduplication over time".into(), charts: charts.into() };
    let values = summary(runs, |run| {
        let rates =
            |rate: Rate| PHASES.map(|(_, phase)| rounded(rate(&of_phase(run, phase)))).join(" / ");
        format!("RAM {} %, disk {} %", rates(ram_percent), rates(disk_percent))
    });
    let title = "deduplication by phase of the run: boot / first pass / later passes";
    let paper = PaperFigure { number: "T6.4", file: "t6.4-deduplication", title };
    outputs.add(paper, &table, &plot, values)
}

fn rate_over_time(runs: &[EvaluatedRun], title: &str, rate: Rate) -> Chart {
    let series = in_detail(runs).into_iter().map(|run| Series {
        name: run.label(),
        points: run.checkpoints.iter().map(|one| point(one.at_s, rate(&[one]))).collect(),
    });
    Chart {
        title: title.into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("percent", Scale::Linear),
        series: series.collect(),
    }
}

/// Figures 6.7 and 6.8.
fn write_by_interval(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let ram = |run: &EvaluatedRun| ram_percent(&run.working());
    let disk = |run: &EvaluatedRun| disk_percent(&run.working());
    let quantity = Quantity { column: "ram_percent", label: "percent" };
    let (table, plot) = over_interval("Pages of RAM that need not be stored", quantity, runs, ram);
    let title = "deduplication of RAM, by interval";
    let paper = PaperFigure { number: "6.7", file: "6.7-deduplication-ram", title };
    let values = values_of_runs(runs, |run| format!("{} %", rounded(ram(run))));
    outputs.add(paper, &table, &plot, values)?;

    let quantity = Quantity { column: "disk_percent", label: "percent" };
    let (table, plot) = over_interval("Sectors that need not be stored", quantity, runs, disk);
    let title = "deduplication of disks, by interval";
    let paper = PaperFigure { number: "6.8", file: "6.8-deduplication-disk", title };
    let values = values_of_runs(runs, |run| format!("{} %", rounded(disk(run))));
    outputs.add(paper, &table, &plot, values)
}

/// Figure 6.6: where the sectors were found. The chart shows the first workload.
fn write_sources_of_sectors(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = CsvTable::new(&[
        "workload",
        "interval_s",
        "at_s",
        "written",
        "not_deduplicated",
        "against_disk",
        "against_ram",
        "zero",
        "unchanged",
    ]);
    for run in in_detail(runs) {
        for checkpoint in &run.checkpoints {
            let s = &checkpoint.sectors;
            let counts =
                [s.written, s.not_deduplicated, s.against_disk, s.against_ram, s.zero, s.unchanged];
            let numbers = [&[run.every_s, checkpoint.at_s][..], &counts].concat();
            table.row(&[run.workload.key], &numbers);
        }
    }
    let values = summary(runs, |run| {
        let working = run.working();
        let all = sum(&working, |one| one.sectors.written);
        let part = |of: Count| {
            let value = percent(sum(&working, of), all);
            if value.is_finite() { format!("{value:.0} %") } else { "-".into() }
        };
        format!(
            "RAM {}, disk {}, zero or unchanged {}, stored {}",
            part(|one| one.sectors.against_ram),
            part(|one| one.sectors.against_disk),
            part(|one| one.sectors.zero + one.sectors.unchanged),
            part(|one| one.sectors.not_deduplicated)
        )
    });
    let title = "places where the content of written sectors was found";
    let paper = PaperFigure { number: "6.6", file: "6.6-sectors", title };
    outputs.add(paper, &table, &sources_of_sectors(runs), values)
}

fn sources_of_sectors(runs: &[EvaluatedRun]) -> Figure {
    let first = by_workload(runs).into_iter().next().map(|(key, _)| key);
    let detail = in_detail(runs).into_iter().find(|run| Some(run.workload.key) == first);
    let line = |name: &str, of: Count| Series {
        name: name.into(),
        points: detail
            .iter()
            .flat_map(|run| &run.checkpoints)
            .map(|one| point(one.at_s, of(one)))
            .collect(),
    };
    figure(Chart {
        title: format!("Sectors of {} by place of their content", first.unwrap_or_default()),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("sectors", Scale::Linear),
        series: vec![
            line("not deduplicated", |one| one.sectors.not_deduplicated),
            line("found on a disk", |one| one.sectors.against_disk),
            line("found in RAM", |one| one.sectors.against_ram),
            line("zero or unchanged", |one| one.sectors.zero + one.sectors.unchanged),
        ],
    })
}
