//! Prints results: tables with aligned columns, and JSON.

/// As the standard macro, which panics if standard error cannot be written (a terminal that has
/// gone, a full disk). A message that cannot be written is dropped: it ends no command.
macro_rules! eprintln {
    ($($words:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr().lock(), $($words)*);
    }};
}

/// As [`eprintln`], without the line end.
macro_rules! eprint {
    ($($words:tt)*) => {{
        use std::io::Write;
        let _ = write!(std::io::stderr().lock(), $($words)*);
    }};
}

use crate::failure::Failure;
pub use keyframe_units::{human_bytes as bytes, human_duration as duration, percentile};
use serde::Serialize;

/// Prints one JSON value and a line end.
pub fn json<T: Serialize>(value: &T) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Failure::new(format!("write JSON: {e}")))?;
    print_line(&text)
}

/// Prints a line to standard output; a closed pipe (`| head`) ends the program quietly.
pub fn print_line(text: &str) -> Result<(), Failure> {
    use std::io::Write;
    writeln!(Pipe::new(), "{text}")
        .map_err(|e| Failure::new(format!("write to standard output: {e}")))
}

/// Standard output for data: a closed pipe (`| head`) ends the program quietly.
pub struct Pipe(std::io::StdoutLock<'static>);

impl Pipe {
    /// Locks standard output for this value: no other code prints as long as it lives.
    pub fn new() -> Self {
        Self(std::io::stdout().lock())
    }
}

impl std::io::Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes).or_else(unless_closed)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush().or_else(unless_closed)
    }
}

fn unless_closed<T>(error: std::io::Error) -> std::io::Result<T> {
    match error.kind() {
        std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        _ => Err(error),
    }
}

/// A table: first column to the left, the others to the right, two spaces between.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (i, (cell, width)) in cells.zip(&widths).enumerate() {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            match i {
                0 => text.extend([cell, &pad]),
                _ => text.extend(["  ", &pad, cell]),
            }
        }
        text.trim_end().to_owned()
    };
    let mut lines = vec![line(&mut header.iter().copied())];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines.join("\n")
}

/// Returns `number` and what is counted: `1 block`, `2 blocks`.
pub fn counted(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}
