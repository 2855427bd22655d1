//! What need not be stored, by part of the run and by source: table 6.4, figures 6.6 to 6.8, A.2,
//! A.3.

use super::super::measured::{Checkpoint, Part, Run};
use super::super::output::{Csv, Outputs};
use super::lines::{by_workload, figure, in_detail, over_interval, percent, point, told};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Scale, Series};

type Rate = fn(&[&Checkpoint]) -> f64;

/// Of RAM: pages that were not stored though they were written, in percent.
fn of_ram(all: &[&Checkpoint]) -> f64 {
    let sum = |of: fn(&Checkpoint) -> f64| all.iter().map(|one| of(one)).sum::<f64>();
    percent(sum(|one| one.dirty_pages - one.stored_pages), sum(|one| one.dirty_pages))
}

/// Of disks, in percent of sectors.
fn of_disks(all: &[&Checkpoint]) -> f64 {
    let sum = |of: fn(&Checkpoint) -> f64| all.iter().map(|one| of(one)).sum::<f64>();
    percent(
        sum(|one| one.sectors.written - one.sectors.not_deduplicated),
        sum(|one| one.sectors.written),
    )
}

fn of(run: &Run, part: Part) -> Vec<&Checkpoint> {
    run.checkpoints.iter().filter(|one| one.part == part).collect()
}

/// Writes them.
pub fn write(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    let parts = [("boot", Part::Boot), ("first", Part::First), ("rest", Part::Rest)];
    let mut csv = Csv::new(
        "workload,part,interval_s,ram_percent,disk_percent,pages,zero_pages,known_pages,known_by_disk_pages,unchanged_pages,stored_pages",
    );
    for run in in_detail(runs) {
        for (name, part) in parts {
            let all = of(run, part);
            let sum = |of: fn(&Checkpoint) -> f64| all.iter().map(|one| of(one)).sum::<f64>();
            let counts = [
                sum(|one| one.dirty_pages),
                sum(|one| one.zero_pages),
                sum(|one| one.dedup_pages - one.dedup_disk_pages),
                sum(|one| one.dedup_disk_pages),
                sum(|one| one.unchanged_pages),
                sum(|one| one.stored_pages),
            ];
            let rates = [run.every_s, of_ram(&all), of_disks(&all)];
            csv.row(&[run.kind.key, name], &[&rates[..], &counts].concat());
        }
    }
    let mut charts = Vec::new();
    for (title, rate) in [
        ("Pages of RAM that need not be stored (A.2)", of_ram as Rate),
        ("Sectors of disks that need not be stored (A.3)", of_disks),
    ] {
        let series = in_detail(runs).into_iter().map(|run| Series {
            name: format!("{}, {} s", run.kind.key, run.every_s),
            points: run.checkpoints.iter().map(|one| point(one.at_s, rate(&[one]))).collect(),
        });
        charts.push(Chart {
            title: title.into(),
            x: Axis::new("seconds recorded", Scale::Linear),
            y: Axis::new("percent", Scale::Linear),
            series: series.collect(),
        });
    }
    let plot = keyframe_plot::Figure { title: "Deduplication over time".into(), charts };
    let shown = |value: f64| if value.is_finite() { format!("{value:.0}") } else { "-".into() };
    let ours = told(runs, |run| {
        let rates = |rate: Rate| parts.map(|(_, part)| shown(rate(&of(run, part)))).join(" / ");
        format!("RAM {} %, disk {} %", rates(of_ram), rates(of_disks))
    });
    outputs.add(
        (
            "T6.4",
            "t6.4-deduplication",
            "deduplication by part of the run: boot / first pass / rest",
        ),
        &csv,
        &plot,
        ours,
    )?;
    sectors(runs, outputs)?;

    let ram = |run: &Run| of_ram(&run.working());
    let disk = |run: &Run| of_disks(&run.working());
    let by_length = |of: &dyn Fn(&Run) -> f64| {
        let all: Vec<String> =
            runs.iter().map(|run| format!("{} {} %", run.key(), shown(of(run)))).collect();
        all.join("; ")
    };
    let (csv, plot) = over_interval(
        "Pages of RAM that need not be stored",
        ("ram_percent", "percent"),
        runs,
        ram,
    );
    outputs.add(
        ("6.7", "6.7-deduplication-ram", "deduplication of RAM, by interval"),
        &csv,
        &plot,
        by_length(&ram),
    )?;
    let (csv, plot) =
        over_interval("Sectors that need not be stored", ("disk_percent", "percent"), runs, disk);
    outputs.add(
        ("6.8", "6.8-deduplication-disk", "deduplication of disks, by interval"),
        &csv,
        &plot,
        by_length(&disk),
    )?;
    for run in runs {
        for (key, value) in [("ram", ram(run)), ("disk", disk(run))] {
            // A workload that does not write to its disk has no rate.
            if value.is_finite() {
                report.figure(format!("{}_{key}_deduplicated_percent", run.key()), value);
            }
        }
    }
    Ok(())
}

/// Figure 6.6: of the first workload, what sectors were found in.
fn sectors(runs: &[Run], outputs: &mut Outputs) -> Result<(), Error> {
    let mut csv = Csv::new(
        "workload,interval_s,at_s,written,not_deduplicated,against_disk,against_ram,zero,unchanged",
    );
    for run in in_detail(runs) {
        for one in &run.checkpoints {
            let s = &one.sectors;
            let counts =
                [s.written, s.not_deduplicated, s.against_disk, s.against_ram, s.zero, s.unchanged];
            csv.row(&[run.kind.key], &[&[run.every_s, one.at_s][..], &counts].concat());
        }
    }
    let first = by_workload(runs).into_iter().next().map(|(key, _)| key);
    let detail = in_detail(runs).into_iter().find(|run| Some(run.kind.key) == first);
    let line = |name: &str, of: fn(&Checkpoint) -> f64| Series {
        name: name.into(),
        points: detail
            .iter()
            .flat_map(|run| &run.checkpoints)
            .map(|one| point(one.at_s, of(one)))
            .collect(),
    };
    let plot = figure(Chart {
        title: format!("Sectors of {} by what became of them", first.unwrap_or_default()),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("sectors", Scale::Linear),
        series: vec![
            line("not deduplicated", |one| one.sectors.not_deduplicated),
            line("found in a disk's", |one| one.sectors.against_disk),
            line("found in RAM's", |one| one.sectors.against_ram),
            line("zero or unchanged", |one| one.sectors.zero + one.sectors.unchanged),
        ],
    });
    let ours = told(runs, |run| {
        let sum = |of: fn(&Checkpoint) -> f64| run.working().into_iter().map(of).sum::<f64>();
        let all = sum(|one| one.sectors.written);
        let part = |of: fn(&Checkpoint) -> f64| {
            let value = percent(sum(of), all);
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
    outputs.add(("6.6", "6.6-sectors", "what sectors were found in"), &csv, &plot, ours)
}
