//! Result files of lines, most of them of comma-separated values: a header, then lines, no quotes
//! needed.

use crate::error::{Result, file};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// A file that is being written, line by line. It has its name once it is complete.
pub(crate) struct Lined {
    path: PathBuf,
    unfinished: PathBuf,
    out: BufWriter<File>,
}

impl Lined {
    /// Begins `name` in `dir`.
    pub fn create(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let unfinished = dir.join(format!("{name}.unfinished"));
        let out = File::create(&unfinished).map_err(file("creating", &unfinished))?;
        Ok(Self { path, unfinished, out: BufWriter::new(out) })
    }

    /// A line.
    pub fn line(&mut self, line: std::fmt::Arguments<'_>) -> Result<()> {
        writeln!(self.out, "{line}").map_err(file("writing", &self.unfinished))
    }

    /// Completes it.
    pub fn finish(mut self) -> Result<PathBuf> {
        self.out.flush().map_err(file("writing", &self.unfinished))?;
        std::fs::rename(&self.unfinished, &self.path).map_err(file("renaming to", &self.path))?;
        Ok(self.path)
    }
}

/// Such a file with a header.
pub(crate) struct Csv;

impl Csv {
    /// Begins `name` in `dir` with a header.
    pub fn create(dir: &Path, name: &str, header: &str) -> Result<Lined> {
        let mut csv = Lined::create(dir, name)?;
        csv.line(format_args!("{header}"))?;
        Ok(csv)
    }
}

/// A name as one cell: commas and quotes, which C++ symbols have, become semicolons and
/// apostrophes.
pub(crate) fn cell(text: &str) -> String {
    text.chars()
        .map(|letter| match letter {
            ',' => ';',
            '"' => '\'',
            letter if letter.is_control() => ' ',
            letter => letter,
        })
        .collect()
}
