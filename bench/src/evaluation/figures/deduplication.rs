//! The pages and sectors that need not be stored, by phase of the run and by the place where they
//! were found: table 6.4, figures 6.6 to 6.8, A.2, A.3.

use super::super::checkpoint_figures::{CheckpointFigures, RunPhase};
use super::super::evaluated_run::EvaluatedRun;
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::rounds::{RunRounds, Spread, spread_columns};
use super::chart::{
    Quantity, figure, in_detail, no_figure, over_interval, over_time, percent, point, summary,
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
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_by_phase(groups, outputs)?;
    write_rates_over_time(groups, outputs)?;
    write_sources_of_sectors(groups, outputs)?;
    write_by_interval(groups, outputs)?;
    for group in groups {
        let of_work: [(&str, Rate); 2] = [("ram", ram_percent), ("disk", disk_percent)];
        for (key, rate) in of_work {
            let value = group.spread(|run| rate(&run.working())).median;
            // A workload that does not write to its disk has no rate.
            if value.is_finite() {
                report.figure(format!("{}_{key}_deduplicated_percent", group.key()), value);
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

/// Table 6.4.
fn write_by_phase(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let fixed = ["workload", "part", "interval_s", "rounds"].map(str::to_owned);
    let counts: [(&str, Count); 7] = [
        ("pages", |one| one.dirty_pages),
        ("zero_pages", |one| one.zero_pages),
        ("known_pages", |one| one.dedup_pages - one.dedup_disk_pages),
        ("known_by_disk_pages", |one| one.dedup_disk_pages),
        ("unchanged_pages", |one| one.unchanged_pages),
        ("stored_pages", |one| one.stored_pages),
        ("sectors", |one| one.sectors.written),
    ];
    let names = ["ram_percent", "disk_percent"].into_iter().chain(counts.map(|(name, _)| name));
    let columns = fixed.into_iter().chain(names.flat_map(spread_columns));
    let mut table = CsvTable::with_columns(columns.collect());
    for group in in_detail(groups) {
        for (name, phase) in PHASES {
            let rates = [ram_percent, disk_percent]
                .map(|rate: Rate| group.spread(|run| rate(&of_phase(run, phase))));
            let sums =
                counts.map(|(_, count)| group.spread(|run| sum(&of_phase(run, phase), count)));
            let spreads = rates.iter().chain(&sums).flat_map(|spread| spread.numbers());
            let fixed = [group.every_s(), group.rounds().len() as f64];
            let numbers: Vec<f64> = fixed.into_iter().chain(spreads).collect();
            table.row(&[group.workload().key, name], &numbers);
        }
    }
    let values = summary(groups, |group| {
        let rates = |rate: Rate| {
            let of = |(_, phase)| group.spread(|run| rate(&of_phase(run, phase))).decimals(0);
            PHASES.map(of).join(" / ")
        };
        format!("RAM {} %, disk {} %", rates(ram_percent), rates(disk_percent))
    });
    let title = "deduplication by phase of the run: boot / first pass / later passes";
    let paper = PaperFigure { number: "T6.4", file: "t6.4-deduplication", title };
    outputs.add(paper, &table, &no_figure(), values)
}

/// Figures A.2 and A.3.
fn write_rates_over_time(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let mut write = |column, title, paper, percent: fn(&CheckpointFigures) -> f64| {
        let quantity = Quantity { column, label: "percent" };
        let (table, plot) = over_time(title, quantity, Scale::Linear, groups, percent);
        outputs.add(paper, &table, &plot, String::new())
    };
    let title = "deduplication of RAM over time";
    let paper = PaperFigure { number: "A.2", file: "a.2-deduplication-ram-over-time", title };
    let title = "Pages of RAM that need not be stored";
    write("ram_percent", title, paper, |one| ram_percent(&[one]))?;
    let title = "deduplication of disks over time";
    let paper = PaperFigure { number: "A.3", file: "a.3-deduplication-disk-over-time", title };
    let title = "Sectors of disks that need not be stored";
    write("disk_percent", title, paper, |one| disk_percent(&[one]))
}

/// Figures 6.7 and 6.8.
fn write_by_interval(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let ram = |run: &EvaluatedRun| ram_percent(&run.working());
    let disk = |run: &EvaluatedRun| disk_percent(&run.working());
    let shown = |spread: Spread| spread.text(|value| format!("{value:.0} %"));
    let quantity = Quantity { column: "ram_percent", label: "percent" };
    let title = "Pages of RAM that need not be stored";
    let (table, plot) = over_interval(title, quantity, groups, ram);
    let title = "deduplication of RAM, by interval";
    let paper = PaperFigure { number: "6.7", file: "6.7-deduplication-ram", title };
    let values = values_of_runs(groups, |group| shown(group.spread(ram)));
    outputs.add(paper, &table, &plot, values)?;

    let quantity = Quantity { column: "disk_percent", label: "percent" };
    let (table, plot) = over_interval("Sectors that need not be stored", quantity, groups, disk);
    let title = "deduplication of disks, by interval";
    let paper = PaperFigure { number: "6.8", file: "6.8-deduplication-disk", title };
    let values = values_of_runs(groups, |group| shown(group.spread(disk)));
    outputs.add(paper, &table, &plot, values)
}

/// Figure 6.6: where the sectors were found. The chart shows the first workload.
fn write_sources_of_sectors(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let sources: [(&str, Count); 6] = [
        ("written", |one| one.sectors.written),
        ("not_deduplicated", |one| one.sectors.not_deduplicated),
        ("against_disk", |one| one.sectors.against_disk),
        ("against_ram", |one| one.sectors.against_ram),
        ("zero", |one| one.sectors.zero),
        ("unchanged", |one| one.sectors.unchanged),
    ];
    let fixed = ["workload", "interval_s", "round", "at_s"];
    let columns = fixed.into_iter().chain(sources.map(|(name, _)| name));
    let mut table = CsvTable::new(&columns.collect::<Vec<_>>());
    for group in in_detail(groups) {
        let run = group.median_round();
        for checkpoint in &run.checkpoints {
            let fixed = [run.every_s, f64::from(run.round), checkpoint.at_s];
            let numbers: Vec<f64> =
                fixed.into_iter().chain(sources.map(|(_, count)| count(checkpoint))).collect();
            table.row(&[run.workload.key], &numbers);
        }
    }
    let values = summary(groups, |group| {
        let part = |of: Count| {
            let rate = |run: &EvaluatedRun| {
                let working = run.working();
                percent(sum(&working, of), sum(&working, |one| one.sectors.written))
            };
            group.spread(rate).text(|value| format!("{value:.0} %"))
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
    outputs.add(paper, &table, &sources_of_sectors(groups), values)
}

fn sources_of_sectors(groups: &[RunRounds]) -> Figure {
    let first = in_detail(groups).into_iter().next();
    let checkpoints = first.map(|group| &group.median_round().checkpoints[..]).unwrap_or_default();
    let line = |name: &str, of: Count| Series {
        name: name.into(),
        points: checkpoints.iter().map(|one| point(one.at_s, of(one))).collect(),
    };
    figure(Chart {
        title: format!(
            "Sectors of {} by place of their content",
            first.map(RunRounds::label).unwrap_or_default()
        ),
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
