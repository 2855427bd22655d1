//! Reads CSV files of results, which may come from anywhere.

use crate::error::{Error, Result};
use csv::StringRecord;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::rc::Rc;

/// The longest row, in bytes.
const ROW_BYTES_MAX: usize = 1 << 20;
/// The most columns of a file.
const COLUMNS_MAX: usize = 1024;

/// A file that ends with an error if a row does not end in time.
struct BoundedRows {
    file: File,
    /// The bytes that may be read before the next row ends.
    left: Rc<Cell<usize>>,
}

impl Read for BoundedRows {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let most = out.len().min(self.left.get());
        if most == 0 && !out.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a row has more than {ROW_BYTES_MAX} bytes"),
            ));
        }
        let len = self.file.read(out.get_mut(..most).unwrap_or_default())?;
        self.left.set(self.left.get().saturating_sub(len));
        Ok(len)
    }
}

/// Reads a CSV file with a header, row by row.
pub struct CsvRows<'a> {
    path: &'a Path,
    reader: csv::Reader<BoundedRows>,
    left: Rc<Cell<usize>>,
    /// The names of the columns.
    pub header: Vec<String>,
}

impl<'a> CsvRows<'a> {
    /// Opens the file and reads its header.
    ///
    /// Errors: [`Error::NoResult`] if there is no file, [`Error::File`] if it cannot be read,
    /// [`Error::Damaged`] if it is empty or has too many columns, or the header is not CSV.
    pub fn open(path: &'a Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::NoResult { path: path.to_owned() },
            _ => Error::File { path: path.to_owned(), source },
        })?;
        let left = Rc::new(Cell::new(ROW_BYTES_MAX));
        let bounded = BoundedRows { file, left: left.clone() };
        let reader =
            csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(bounded);
        let mut rows = Self { path, reader, left, header: Vec::new() };
        let mut header = StringRecord::new();
        if !rows.next_record(&mut header)? {
            return Err(rows.damaged("it is empty"));
        }
        if header.len() > COLUMNS_MAX {
            return Err(rows.damaged(&format!("it has more than {COLUMNS_MAX} columns")));
        }
        rows.header = header.iter().map(printable).collect();
        Ok(rows)
    }

    /// Returns whether there is a column of this name.
    pub fn has(&self, column: &str) -> bool {
        self.header.iter().any(|one| one == column)
    }

    /// Passes the cells in `columns` of each row to `take`.
    ///
    /// Errors: [`Error::File`] if the file cannot be read; [`Error::Damaged`] if a column or a cell
    /// is missing, a row is not CSV, or `take` fails, with the text of its error.
    pub fn each<const N: usize>(
        mut self,
        columns: [&str; N],
        mut take: impl FnMut([&str; N]) -> Result<(), String>,
    ) -> Result<()> {
        let mut places = [0; N];
        for (place, name) in places.iter_mut().zip(columns) {
            let found = self.header.iter().position(|one| one == name);
            *place = found.ok_or_else(|| self.damaged(&format!("it has no column {name:?}")))?;
        }
        let mut record = StringRecord::new();
        while self.next_record(&mut record)? {
            let cells = places.map(|place| record.get(place));
            let taken = if cells.iter().all(Option::is_some) {
                take(cells.map(Option::unwrap_or_default))
            } else {
                Err("a cell is missing".to_owned())
            };
            taken.map_err(|problem| self.damaged(&problem))?;
        }
        Ok(())
    }

    /// Returns the next rows, `most` at most, and the number of rows after them. A row has at most
    /// as many cells as the header.
    ///
    /// Errors: [`Error::File`] if the file cannot be read, [`Error::Damaged`] if a row is not CSV.
    pub fn first(mut self, most: usize) -> Result<(Vec<Vec<String>>, u64)> {
        let (mut rows, mut left_out) = (Vec::new(), 0);
        let mut record = StringRecord::new();
        while self.next_record(&mut record)? {
            if rows.len() < most {
                rows.push(record.iter().take(self.header.len()).map(printable).collect());
            } else {
                left_out += 1;
            }
        }
        Ok((rows, left_out))
    }

    fn next_record(&mut self, record: &mut StringRecord) -> Result<bool> {
        let read = self.reader.read_record(record);
        self.left.set(ROW_BYTES_MAX);
        read.map_err(|error| {
            let problem = error.to_string();
            match error.into_kind() {
                csv::ErrorKind::Io(source) if source.kind() != io::ErrorKind::InvalidData => {
                    Error::File { path: self.path.to_owned(), source }
                }
                csv::ErrorKind::Io(source) => self.damaged(&source.to_string()),
                _ => self.damaged(&problem),
            }
        })
    }

    fn damaged(&self, problem: &str) -> Error {
        Error::Damaged {
            path: self.path.to_owned(),
            place: format!("line {}", self.reader.position().line().saturating_sub(1).max(1)),
            problem: printable(problem),
        }
    }
}

/// Returns the text with a space in place of each control character.
pub fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// Reads a decimal number. The error tells as a text that `cell` is none.
pub fn number(cell: &str) -> Result<u64, String> {
    cell.parse().map_err(|_| format!("{cell:?} is not a number"))
}

/// Reads a hexadecimal number with the prefix `0x`. The error tells as a text that `cell` is none.
pub fn address(cell: &str) -> Result<u64, String> {
    let digits = cell.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
    digits.ok_or_else(|| format!("{cell:?} is not an address"))
}
