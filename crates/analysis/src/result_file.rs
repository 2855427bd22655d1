//! Result files: text line by line, or comma-separated values.
//!
//! Invariant: a file that has its final name is complete.

use crate::error::{Error, Result, file};
use serde::{Serialize, Serializer};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The name of a result file while it is written, and its final name.
struct ResultPath {
    path: PathBuf,
    unfinished: PathBuf,
}

impl ResultPath {
    fn create(dir: &Path, name: &str) -> Result<(Self, BufWriter<File>)> {
        let (path, unfinished) = (dir.join(name), dir.join(format!("{name}.unfinished")));
        let out = File::create(&unfinished).map_err(file("creating", &unfinished))?;
        Ok((Self { path, unfinished }, BufWriter::new(out)))
    }

    fn failed_to_write(&self) -> impl FnOnce(std::io::Error) -> Error {
        file("writing", &self.unfinished)
    }

    fn complete(self) -> Result<PathBuf> {
        std::fs::rename(&self.unfinished, &self.path).map_err(file("renaming to", &self.path))?;
        Ok(self.path)
    }
}

/// A result file of text lines.
pub(crate) struct LineFile {
    path: ResultPath,
    out: BufWriter<File>,
}

impl LineFile {
    /// Creates the file `name` in `dir`. It has this name when it is complete. Error:
    /// [`Error::File`] if the file cannot be created.
    pub fn create(dir: &Path, name: &str) -> Result<Self> {
        let (path, out) = ResultPath::create(dir, name)?;
        Ok(Self { path, out })
    }

    /// Writes a line and its end. Error: [`Error::File`] if it cannot be written.
    pub fn line(&mut self, line: std::fmt::Arguments<'_>) -> Result<()> {
        writeln!(self.out, "{line}").map_err(self.path.failed_to_write())
    }

    /// Completes the file and returns its path. Error: [`Error::File`] if it cannot be written or
    /// get its final name.
    pub fn finish(mut self) -> Result<PathBuf> {
        self.out.flush().map_err(self.path.failed_to_write())?;
        self.path.complete()
    }
}

/// A result file of comma-separated values.
pub(crate) struct CsvFile {
    path: ResultPath,
    out: csv::Writer<BufWriter<File>>,
}

impl CsvFile {
    /// Creates the file `name` in `dir` and writes the header, a comma-separated list of names. The
    /// file has this name when it is complete. Error: [`Error::File`] if the file cannot be created
    /// or written.
    pub fn create(dir: &Path, name: &str, header: &str) -> Result<Self> {
        let (path, out) = ResultPath::create(dir, name)?;
        let out = csv::WriterBuilder::new().has_headers(false).flexible(true).from_writer(out);
        let mut csv = Self { path, out };
        let cells: Vec<&str> = header.split(',').collect();
        csv.row(cells)?;
        Ok(csv)
    }

    /// Writes a row, a sequence or tuple of cells. Cells with commas or quotes are quoted. Error:
    /// [`Error::File`] if the row cannot be written.
    pub fn row(&mut self, row: impl Serialize) -> Result<()> {
        self.out
            .serialize(row)
            .map_err(|error| self.path.failed_to_write()(std::io::Error::from(error)))
    }

    /// Completes the file and returns its path. Error: [`Error::File`] if it cannot be written or
    /// get its final name.
    pub fn finish(mut self) -> Result<PathBuf> {
        self.out.flush().map_err(self.path.failed_to_write())?;
        self.path.complete()
    }
}

/// A number that is written in hexadecimal, with the prefix `0x`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hex(pub u64);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#x}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_csv_file_quotes_cells_and_gets_its_name_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let mut csv = CsvFile::create(dir.path(), "a.csv", "address,count,name").unwrap();
        csv.row((Hex(255), 7, "plain")).unwrap();
        csv.row((Hex(0), None::<u64>, "f<a, \"b\">")).unwrap();
        assert!(!dir.path().join("a.csv").exists());
        let path = csv.finish().unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text, "address,count,name\n0xff,7,plain\n0x0,,\"f<a, \"\"b\"\">\"\n");
    }
}
