//! What workloads write, and how much they run, in an interval: figures 6.2 to 6.5 and A.1, table
//! 6.3.

use super::super::measured::{Run, mean};
use super::super::output::{Csv, Outputs};
use super::lines::{figure, in_detail, over_interval, over_time, point, told};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Scale, Series};

/// Writes them.
pub fn write(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    let pages = |run: &Run| run.mean(|one| one.dirty_pages);
    let sectors = |run: &Run| run.mean(|one| one.sectors.written);
    let count = |mean: f64| format!("{mean:.0}");

    let (csv, plot) = over_time(
        "Dirty pages of RAM per checkpoint",
        ("dirty_pages", "pages"),
        Scale::Linear,
        runs,
        |one| one.dirty_pages,
    );
    let ours = told(runs, |run| count(pages(run)));
    outputs.add(("6.2", "6.2-dirty-pages", "dirty pages of each checkpoint"), &csv, &plot, ours)?;
    let (csv, plot) = over_time(
        "Dirty disk sectors per checkpoint",
        ("sectors", "sectors"),
        Scale::Linear,
        runs,
        |one| one.sectors.written,
    );
    let ours = told(runs, |run| count(sectors(run)));
    outputs.add(
        ("6.3", "6.3-dirty-sectors", "dirty sectors of each checkpoint"),
        &csv,
        &plot,
        ours,
    )?;

    let by_length = |of: &dyn Fn(&Run) -> f64| {
        let all: Vec<String> =
            runs.iter().map(|run| format!("{} {:.0}", run.key(), of(run))).collect();
        all.join("; ")
    };
    let (csv, plot) =
        over_interval("Dirty pages over the interval", ("dirty_pages", "pages, mean"), runs, pages);
    outputs.add(
        ("6.4", "6.4-dirty-pages-by-interval", "their mean, by interval"),
        &csv,
        &plot,
        by_length(&pages),
    )?;
    let (csv, plot) = over_interval(
        "Dirty sectors over the interval",
        ("sectors", "sectors, mean"),
        runs,
        sectors,
    );
    outputs.add(
        ("6.5", "6.5-dirty-sectors-by-interval", "their mean, by interval"),
        &csv,
        &plot,
        by_length(&sectors),
    )?;

    let instructions = |run: &Run| mean(run.instructions.iter().map(|(_, count)| *count));
    let mut csv = Csv::new("workload,interval_s,end_s,instructions");
    let mut series = Vec::new();
    for run in in_detail(runs) {
        for (end_s, count) in &run.instructions {
            csv.row(&[run.kind.key], &[run.every_s, *end_s, *count]);
        }
        let points = run.instructions.iter().map(|(end_s, count)| point(*end_s, *count)).collect();
        series.push(Series { name: format!("{}, {} s", run.kind.key, run.every_s), points });
    }
    let plot = figure(Chart {
        title: "Instructions of each interval (A.1)".into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("instructions", Scale::Linear),
        series,
    });
    let ours = told(runs, |run| count(instructions(run)));
    outputs.add(
        ("T6.3", "t6.3-instructions", "instructions of an interval (and over time, A.1)"),
        &csv,
        &plot,
        ours,
    )?;

    for run in runs {
        let key = run.key();
        report.figure(format!("{key}_dirty_pages"), pages(run));
        report.figure(format!("{key}_dirty_sectors"), sectors(run));
        report.figure(format!("{key}_interval_instructions"), instructions(run));
    }
    Ok(())
}
