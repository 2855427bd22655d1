//! Tables of results, for a terminal and as JSON.

use crate::csv_rows::printable;
use keyframe_units::human_bytes;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

/// The columns of a text are not made narrower than this.
const TEXT_WIDTH_MIN: usize = 16;

/// A cell of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// A text.
    Text(String),
    /// A name of code, which is empty if there is none.
    Symbol(String),
    /// An address.
    Address(u64),
    /// A number of things.
    Count(u64),
    /// A size.
    Bytes(u64),
    /// A share.
    Percent(f64),
    /// There is no value.
    Missing,
}

impl Cell {
    /// Makes the cell of the share `part` of `whole`, in percent; [`Cell::Missing`] if the whole is
    /// not known or 0.
    pub fn share(part: u64, whole: Option<u64>) -> Self {
        match whole {
            Some(whole @ 1..) => Self::Percent(100.0 * part as f64 / whole as f64),
            _ => Self::Missing,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Text(text) => printable(text),
            Self::Symbol(name) if name.is_empty() => "(no symbol)".into(),
            Self::Symbol(name) => printable(name),
            Self::Address(address) => format!("{address:#x}"),
            Self::Count(count) => grouped(*count),
            Self::Bytes(bytes) => human_bytes(*bytes),
            Self::Percent(percent) => format!("{percent:.2}"),
            Self::Missing => "-".into(),
        }
    }

    /// Whether texts of this kind begin at the left.
    fn is_text(&self) -> bool {
        matches!(self, Self::Text(_) | Self::Symbol(_))
    }
}

impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) | Self::Symbol(text) => serializer.serialize_str(text),
            Self::Address(address) => serializer.collect_str(&format_args!("{address:#x}")),
            Self::Count(number) | Self::Bytes(number) => serializer.serialize_u64(*number),
            Self::Percent(percent) => serializer.serialize_f64(*percent),
            Self::Missing => serializer.serialize_none(),
        }
    }
}

/// The digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A table of results.
#[derive(Clone, Debug, PartialEq)]
pub struct ResultTable {
    /// What it shows.
    pub title: String,
    /// The names of its columns; in JSON with `_` in place of spaces.
    pub columns: Vec<String>,
    /// Its rows, each with a cell for each column.
    pub rows: Vec<Vec<Cell>>,
    /// The number of rows of the result that are left out.
    pub left_out: u64,
}

impl ResultTable {
    /// An empty table.
    pub(crate) fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|name| (*name).to_owned()).collect();
        Self { title: title.into(), columns, rows: Vec::new(), left_out: 0 }
    }

    /// Adds a row, or only counts it if there are `top` already.
    pub(crate) fn push(&mut self, top: usize, row: Vec<Cell>) {
        if self.rows.len() < top {
            self.rows.push(row);
        } else {
            self.left_out += 1;
        }
    }

    /// Returns the table as text, in lines of at most `width` characters if that is given. Names
    /// that are too long for that are shortened.
    pub fn text(&self, width: Option<usize>) -> String {
        let mut lines: Vec<Vec<String>> = vec![self.columns.iter().map(|c| printable(c)).collect()];
        lines.extend(self.rows.iter().map(|row| row.iter().map(Cell::text).collect()));
        let count = self.columns.len();
        let is_text: Vec<bool> = (0..count)
            .map(|column| self.rows.iter().any(|row| row.get(column).is_some_and(Cell::is_text)))
            .collect();
        let mut widths = vec![0; count];
        for cells in &lines {
            for (width, cell) in widths.iter_mut().zip(cells) {
                *width = cell.chars().count().max(*width);
            }
        }
        if let Some(width) = width {
            shrink(&mut widths, &is_text, width);
        }
        let mut text = vec![printable(&self.title)];
        for cells in &lines {
            let mut line = String::new();
            for ((cell, width), is_text) in cells.iter().zip(&widths).zip(&is_text) {
                let cell = shortened(cell, *width);
                let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
                let [before, after] = if *is_text { ["", &pad] } else { [&pad, ""] };
                line.extend(["  ", before, &cell, after]);
            }
            let line = line.trim_end();
            text.push(width.map_or_else(|| line.to_owned(), |width| shortened(line, width)));
        }
        if self.left_out > 0 {
            text.push(format!("  and {} more", grouped(self.left_out)));
        }
        text.join("\n")
    }
}

/// Makes columns of texts narrower, the widest first, until all columns fit `width`.
fn shrink(widths: &mut [usize], is_text: &[bool], width: usize) {
    loop {
        let all: usize = widths.iter().map(|one| one + 2).sum();
        let texts = widths.iter_mut().zip(is_text).filter(|(_, is_text)| **is_text);
        let widest = texts.map(|(width, _)| width).max();
        match widest {
            Some(widest) if all > width && *widest > TEXT_WIDTH_MIN => {
                *widest = widest.saturating_sub(all - width).max(TEXT_WIDTH_MIN);
            }
            _ => return,
        }
    }
}

fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

impl Serialize for ResultTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("title", &self.title)?;
        map.serialize_entry("rows", &Rows(self))?;
        map.serialize_entry("left_out", &self.left_out)?;
        map.end()
    }
}

struct Rows<'a>(&'a ResultTable);

impl Serialize for Rows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut rows = serializer.serialize_seq(Some(self.0.rows.len()))?;
        for row in &self.0.rows {
            rows.serialize_element(&Row(&self.0.columns, row))?;
        }
        rows.end()
    }
}

struct Row<'a>(&'a [String], &'a [Cell]);

impl Serialize for Row<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.1.len()))?;
        for (name, cell) in self.0.iter().zip(self.1) {
            map.serialize_entry(&name.replace(' ', "_"), cell)?;
        }
        map.end()
    }
}
