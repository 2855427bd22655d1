//! Files of the evaluation: a CSV and two pictures for each figure, and the report that lists them.

use super::measured::Run;
use super::paper;
use crate::Error;
use keyframe_plot::Figure;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Rows of numbers under names.
pub struct Csv {
    header: String,
    rows: String,
}

impl Csv {
    /// Columns' names, separated by commas.
    pub fn new(header: &str) -> Self {
        Self { header: header.into(), rows: String::new() }
    }

    /// A row: words first, then numbers. What is not there is an empty cell.
    pub fn row(&mut self, words: &[&str], numbers: &[f64]) {
        let cells =
            words.iter().map(ToString::to_string).chain(numbers.iter().map(|number| cell(*number)));
        let cells: Vec<String> = cells.collect();
        let _ = writeln!(self.rows, "{}", cells.join(","));
    }
}

/// Never `NaN`: nothing was measured.
fn cell(number: f64) -> String {
    match number {
        _ if !number.is_finite() => String::new(),
        _ if number.fract() == 0.0 => format!("{number:.0}"),
        _ => format!("{number:.6}"),
    }
}

/// What stands in the report's table for it.
struct Line {
    number: &'static str,
    title: &'static str,
    files: String,
    ours: String,
}

/// The directory and what is in it.
pub struct Outputs {
    dir: PathBuf,
    lines: Vec<Line>,
}

impl Outputs {
    /// Into `dir`, which is made where it is not there.
    pub fn new(dir: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))?;
        Ok(Self { dir: dir.into(), lines: Vec::new() })
    }

    /// What stands for the paper's figure `number` (`T6.3`: a table): `NAME.csv`, and the pictures
    /// where there is something to draw.
    pub fn add(
        &mut self,
        (number, name, title): (&'static str, &str, &'static str),
        csv: &Csv,
        figure: &Figure,
        ours: String,
    ) -> Result<(), Error> {
        let mut files = vec![format!("{name}.csv")];
        self.write(&files[0], &format!("{}\n{}", csv.header, csv.rows))?;
        if figure
            .charts
            .iter()
            .any(|chart| chart.series.iter().any(|series| !series.points.is_empty()))
        {
            for end in ["svg", "png"] {
                let file = format!("{name}.{end}");
                figure
                    .write(&self.dir.join(&file))
                    .map_err(|e| Error::failed(format!("draw {file}"), e))?;
                files.push(file);
            }
        }
        let files: Vec<String> = files.iter().map(|file| format!("[{file}]({file})")).collect();
        self.lines.push(Line { number, title, files: files.join(" "), ours });
        Ok(())
    }

    /// `report.md`.
    pub fn index(&self, runs: &[Run]) -> Result<(), Error> {
        let mut text = String::from(
            "# Evaluation, after chapter 6 of the SimuBoost checkpoint paper\n\n\
             All numbers were measured in this run, on this machine, under TCG (a recording counts instructions), but for what is called *computed* or *simulated*. \
             The paper's are its own machine's, under KVM: they show what was looked at, not what is to be met. Means are over checkpoints behind the boot. Where not all \
             intervals were analysed, run times and speed-ups are of the recording and of those that were.\n\n\
             | run | stands for | recorded | checkpoints | intervals analysed | results equal to one replay's |\n|---|---|---|---|---|---|\n",
        );
        for run in runs {
            let _ = writeln!(
                text,
                "| {}: {} | {} | {:.1} s | {} | {} | {} |",
                run.key(),
                run.kind.about,
                run.kind.stands_for,
                run.recorded_s,
                run.checkpoints.len() + usize::from(run.first.is_some()),
                run.instructions.len(),
                if run.simulations.is_same { "yes" } else { "**no**" }
            );
        }
        text.push_str(
            "\n| figure or table | what | files | the paper | here |\n|---|---|---|---|---|\n",
        );
        for Line { number, title, files, ours } in &self.lines {
            let name = number
                .strip_prefix('T')
                .map_or_else(|| format!("figure {number}"), |n| format!("table {n}"));
            let _ =
                writeln!(text, "| {name} | {title} | {files} | {} | {ours} |", paper::said(number));
        }
        text.push_str(
            "\nNot here: figure 6.1, tables 6.1 and 6.2 (its machines), A.6 (what distribution costs the recording: intervals are dispatched while it runs only in simulation).\n",
        );
        self.write("report.md", &text)
    }

    fn write(&self, file: &str, text: &str) -> Result<(), Error> {
        let path = self.dir.join(file);
        std::fs::write(&path, text).map_err(Error::io(format!("write {}", path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_an_empty_cell() {
        let mut csv = Csv::new("a,b,c");
        csv.row(&["x"], &[f64::NAN, 1.5]);
        csv.row(&["y"], &[2.0, f64::INFINITY]);
        assert_eq!(csv.rows, "x,,1.500000\ny,2,\n");
    }
}
