//! The dirty pages and sectors of a checkpoint, and the instructions of an interval: figures 6.2 to
//! 6.5 and A.1, table 6.3.

use super::super::evaluated_run::{EvaluatedRun, mean};
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::chart::{
    Quantity, figure, in_detail, over_interval, over_time, point, summary, values_of_runs,
};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Scale, Series};

/// Writes them.
pub fn write(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_over_time(runs, outputs)?;
    write_by_interval(runs, outputs)?;
    write_instructions(runs, outputs)?;
    for run in runs {
        let key = run.key();
        report.figure(format!("{key}_dirty_pages"), pages(run));
        report.figure(format!("{key}_dirty_sectors"), sectors(run));
        report.figure(format!("{key}_interval_instructions"), instructions(run));
    }
    Ok(())
}

fn pages(run: &EvaluatedRun) -> f64 {
    run.mean(|checkpoint| checkpoint.dirty_pages)
}

fn sectors(run: &EvaluatedRun) -> f64 {
    run.mean(|checkpoint| checkpoint.sectors.written)
}

fn instructions(run: &EvaluatedRun) -> f64 {
    mean(run.instructions.iter().map(|interval| interval.count))
}

fn count(mean: f64) -> String {
    format!("{mean:.0}")
}

/// Figures 6.2 and 6.3.
fn write_over_time(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let (table, plot) = over_time(
        "Dirty pages of RAM per checkpoint",
        Quantity { column: "dirty_pages", label: "pages" },
        Scale::Linear,
        runs,
        |checkpoint| checkpoint.dirty_pages,
    );
    let values = summary(runs, |run| count(pages(run)));
    let title = "dirty pages of each checkpoint";
    let paper = PaperFigure { number: "6.2", file: "6.2-dirty-pages", title };
    outputs.add(paper, &table, &plot, values)?;

    let (table, plot) = over_time(
        "Dirty disk sectors per checkpoint",
        Quantity { column: "sectors", label: "sectors" },
        Scale::Linear,
        runs,
        |checkpoint| checkpoint.sectors.written,
    );
    let values = summary(runs, |run| count(sectors(run)));
    let title = "dirty sectors of each checkpoint";
    let paper = PaperFigure { number: "6.3", file: "6.3-dirty-sectors", title };
    outputs.add(paper, &table, &plot, values)
}

/// Figures 6.4 and 6.5.
fn write_by_interval(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let quantity = Quantity { column: "dirty_pages", label: "pages, mean" };
    let (table, plot) = over_interval("Dirty pages over the interval", quantity, runs, pages);
    let title = "mean dirty pages, by interval";
    let paper = PaperFigure { number: "6.4", file: "6.4-dirty-pages-by-interval", title };
    outputs.add(paper, &table, &plot, values_of_runs(runs, |run| count(pages(run))))?;

    let quantity = Quantity { column: "sectors", label: "sectors, mean" };
    let (table, plot) = over_interval("Dirty sectors over the interval", quantity, runs, sectors);
    let title = "mean dirty sectors, by interval";
    let paper = PaperFigure { number: "6.5", file: "6.5-dirty-sectors-by-interval", title };
    outputs.add(paper, &table, &plot, values_of_runs(runs, |run| count(sectors(run))))
}

/// Table 6.3 and figure A.1.
fn write_instructions(runs: &[EvaluatedRun], outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = CsvTable::new(&["workload", "interval_s", "end_s", "instructions"]);
    let mut series = Vec::new();
    for run in in_detail(runs) {
        for interval in &run.instructions {
            table.row(&[run.workload.key], &[run.every_s, interval.end_s, interval.count]);
        }
        let points = run.instructions.iter().map(|one| point(one.end_s, one.count)).collect();
        series.push(Series { name: run.label(), points });
    }
    let plot = figure(Chart {
        title: "Instructions of each interval (A.1)".into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("instructions", Scale::Linear),
        series,
    });
    let values = summary(runs, |run| count(instructions(run)));
    let title = "instructions of an interval (and over time, A.1)";
    let paper = PaperFigure { number: "T6.3", file: "t6.3-instructions", title };
    outputs.add(paper, &table, &plot, values)
}
