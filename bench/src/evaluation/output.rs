//! Writes the files of the evaluation: CSV and pictures for each figure, and the report that lists
//! them.

use super::paper_statement::paper_statement;
use crate::Error;
use keyframe_plot::Figure;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A table that becomes a CSV file.
pub struct CsvTable {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl CsvTable {
    /// Makes a table without rows.
    pub fn new(columns: &[&str]) -> Self {
        Self { columns: columns.iter().map(ToString::to_string).collect(), rows: Vec::new() }
    }

    /// Makes a table without rows, whose columns have computed names.
    pub fn with_columns(columns: Vec<String>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row: words, then numbers. A number that is not finite becomes an empty cell.
    pub fn row(&mut self, words: &[&str], numbers: &[f64]) {
        let words = words.iter().map(ToString::to_string);
        self.rows.push(words.chain(numbers.iter().map(|number| cell(*number))).collect());
    }

    fn to_csv(&self) -> Result<Vec<u8>, csv::Error> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(&self.columns)?;
        self.rows.iter().try_for_each(|row| writer.write_record(row))?;
        writer.into_inner().map_err(|e| e.into_error().into())
    }
}

fn cell(number: f64) -> String {
    match number {
        _ if !number.is_finite() => String::new(),
        _ if number.fract() == 0.0 => format!("{number:.0}"),
        _ => format!("{number:.6}"),
    }
}

/// The figure or table of the paper that an output reproduces.
#[derive(Clone, Copy, Debug)]
pub struct PaperFigure {
    /// Its number in the paper. A table's number begins with `T`, for example `T6.3`, and a
    /// section's with `S`. Comparisons that the paper does not have are numbered `P1`, `P2`, ...
    pub number: &'static str,
    /// The name of the output's files, without their extension.
    pub file: &'static str,
    /// The title in the report.
    pub title: &'static str,
}

/// A line of the report.
struct ReportLine {
    figure: PaperFigure,
    /// Links to the files, in Markdown.
    links: String,
    /// The values measured here.
    values: String,
}

/// The output directory, and the lines of its report.
pub struct Outputs {
    dir: PathBuf,
    lines: Vec<ReportLine>,
}

impl Outputs {
    /// Uses the directory `dir`; creates it if it is missing.
    pub fn new(dir: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))?;
        Ok(Self { dir: dir.into(), lines: Vec::new() })
    }

    /// Writes the files of one figure: a CSV file, and an SVG and a PNG file if `plot` has a point.
    /// `values` are the values for the report.
    pub fn add(
        &mut self,
        figure: PaperFigure,
        table: &CsvTable,
        plot: &Figure,
        values: String,
    ) -> Result<(), Error> {
        let mut files = vec![format!("{}.csv", figure.file)];
        let csv = table.to_csv().map_err(|e| Error::failed(format!("write {}", files[0]), e))?;
        self.write(&files[0], &csv)?;
        let mut series = plot.charts.iter().flat_map(|chart| &chart.series);
        if series.any(|series| !series.points.is_empty()) {
            for extension in ["svg", "png"] {
                let file = format!("{}.{extension}", figure.file);
                plot.write(&self.dir.join(&file))
                    .map_err(|e| Error::failed(format!("draw {file}"), e))?;
                files.push(file);
            }
        }
        let links: Vec<String> = files.iter().map(|file| format!("[{file}]({file})")).collect();
        self.lines.push(ReportLine { figure, links: links.join(" "), values });
        Ok(())
    }

    /// Writes `report.md`: `head`, and a line for each figure.
    pub fn write_report(&self, head: &str) -> Result<(), Error> {
        let mut text = format!(
            "{head}\n| figure or table | content | files | the paper | here |\n|---|---|---|---|---|\n"
        );
        for ReportLine { figure: PaperFigure { number, title, .. }, links, values } in &self.lines {
            let name = name_of(number);
            let paper = paper_statement(number);
            let _ = writeln!(text, "| {name} | {title} | {links} | {paper} | {values} |");
        }
        text.push_str(REPORT_END);
        self.write("report.md", text.as_bytes())
    }

    fn write(&self, file: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.dir.join(file);
        std::fs::write(&path, bytes).map_err(Error::io(format!("write {}", path.display())))
    }
}

/// Returns the name of what has this number in the paper.
fn name_of(number: &str) -> String {
    let (kind, rest) = number.split_at(1);
    match kind {
        "T" => format!("table {rest}"),
        "S" => format!("section {rest}"),
        "P" => format!("prediction {rest}"),
        _ => format!("figure {number}"),
    }
}

const REPORT_END: &str = "
Not reproduced: figure 6.1 and tables 6.1 and 6.2 (the paper's machines).
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_not_measured_is_an_empty_cell() {
        let mut table = CsvTable::new(&["a", "b", "c"]);
        table.row(&["x"], &[f64::NAN, 1.5]);
        table.row(&["y"], &[2.0, f64::INFINITY]);
        assert_eq!(table.to_csv().unwrap(), b"a,b,c\nx,,1.500000\ny,2,\n");
    }
}
