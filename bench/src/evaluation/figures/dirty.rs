//! The dirty pages and sectors of a checkpoint, and the instructions of an interval: figures 6.2 to
//! 6.5 and A.1, table 6.3.

use super::super::evaluated_run::{EvaluatedRun, mean};
use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::super::rounds::RunRounds;
use super::chart::{
    Quantity, figure, in_detail, no_figure, over_interval, over_time, point, spread_row,
    spread_table, summary, values_of_runs,
};
use crate::{Error, Report};
use keyframe_plot::{Axis, Chart, Scale, Series};

/// Writes them.
pub fn write(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    write_over_time(groups, outputs)?;
    write_by_interval(groups, outputs)?;
    write_instructions(groups, outputs)?;
    for group in groups {
        let key = group.key();
        report.figure(format!("{key}_dirty_pages"), group.spread(pages).median);
        report.figure(format!("{key}_dirty_sectors"), group.spread(sectors).median);
        report.figure(format!("{key}_interval_instructions"), group.spread(instructions).median);
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

/// Returns the text of a mean count.
fn count(of: fn(&EvaluatedRun) -> f64) -> impl Fn(&RunRounds) -> String {
    move |group| group.spread(of).decimals(0)
}

/// Figures 6.2 and 6.3.
fn write_over_time(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let (table, plot) = over_time(
        "Dirty pages of RAM per checkpoint",
        Quantity { column: "dirty_pages", label: "pages" },
        Scale::Linear,
        groups,
        |checkpoint| checkpoint.dirty_pages,
    );
    let title = "dirty pages of each checkpoint";
    let paper = PaperFigure { number: "6.2", file: "6.2-dirty-pages", title };
    outputs.add(paper, &table, &plot, summary(groups, count(pages)))?;

    let (table, plot) = over_time(
        "Dirty disk sectors of 512 bytes per checkpoint",
        Quantity { column: "sectors", label: "sectors" },
        Scale::Linear,
        groups,
        |checkpoint| checkpoint.sectors.written,
    );
    let title = "dirty sectors of each checkpoint, in sectors of 512 bytes";
    let paper = PaperFigure { number: "6.3", file: "6.3-dirty-sectors", title };
    outputs.add(paper, &table, &plot, summary(groups, count(sectors)))
}

/// Figures 6.4 and 6.5.
fn write_by_interval(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let quantity = Quantity { column: "dirty_pages", label: "pages, mean" };
    let (table, plot) = over_interval("Dirty pages over the interval", quantity, groups, pages);
    let title = "mean dirty pages, by interval";
    let paper = PaperFigure { number: "6.4", file: "6.4-dirty-pages-by-interval", title };
    outputs.add(paper, &table, &plot, values_of_runs(groups, count(pages)))?;

    let quantity = Quantity { column: "sectors", label: "sectors, mean" };
    let (table, plot) = over_interval("Dirty sectors over the interval", quantity, groups, sectors);
    let title = "mean dirty sectors of 512 bytes, by interval";
    let paper = PaperFigure { number: "6.5", file: "6.5-dirty-sectors-by-interval", title };
    outputs.add(paper, &table, &plot, values_of_runs(groups, count(sectors)))
}

/// Table 6.3 and figure A.1.
fn write_instructions(groups: &[RunRounds], outputs: &mut Outputs) -> Result<(), Error> {
    let mut means = spread_table(&["instructions"]);
    for group in groups {
        spread_row(&mut means, group, &[group.spread(instructions)]);
    }
    let title = "mean instructions of an interval";
    let paper = PaperFigure { number: "T6.3", file: "t6.3-instructions", title };
    outputs.add(paper, &means, &no_figure(), summary(groups, count(instructions)))?;

    let mut table = CsvTable::new(&["workload", "interval_s", "round", "end_s", "instructions"]);
    let mut series = Vec::new();
    for group in in_detail(groups) {
        let run = group.median_round();
        for interval in &run.instructions {
            let numbers = [run.every_s, f64::from(run.round), interval.end_s, interval.count];
            table.row(&[run.workload.key], &numbers);
        }
        let points = run.instructions.iter().map(|one| point(one.end_s, one.count)).collect();
        series.push(Series { name: group.label(), points });
    }
    let plot = figure(Chart {
        title: "Instructions of each interval".into(),
        x: Axis::new("seconds recorded", Scale::Linear),
        y: Axis::new("instructions", Scale::Linear),
        series,
    });
    let title = "instructions of each interval over time";
    let paper = PaperFigure { number: "A.1", file: "a.1-instructions-over-time", title };
    outputs.add(paper, &table, &plot, String::new())
}
