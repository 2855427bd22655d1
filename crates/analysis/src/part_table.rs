//! Reads the tables that the plugin wrote as parts, without trusting them.

use crate::error::{Error, Result, file};
use keyframe_plugins::PartHeader;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The largest part that is read, in bytes: it is held in memory.
const BYTES_MAX: u64 = 4 << 30;

/// A part's table of 64-bit numbers.
pub struct PartTable {
    words: Vec<u64>,
    columns: usize,
}

impl PartTable {
    /// Reads the table `kind` with `columns` columns from the file at `path`.
    ///
    /// Errors: [`Error::File`] if the file cannot be read; [`Error::Damaged`] for another table,
    /// another number of columns or another length than the header says.
    pub fn read(path: &Path, kind: &str, columns: usize) -> Result<Self> {
        let damaged = |place: &str, problem: String| Error::Damaged {
            path: path.to_owned(),
            place: place.into(),
            problem: format!("{problem}; delete it and run the analysis again"),
        };
        let mut input = File::open(path).map_err(file("opening", path))?;
        let len = input.metadata().map_err(file("looking at", path))?.len();
        let mut header = [0; PartHeader::LEN_BYTES];
        input.read_exact(&mut header).map_err(file("reading", path))?;
        let header = PartHeader::from_bytes(&header)
            .ok_or_else(|| damaged("byte 0", "not a part".into()))?;
        if header != (PartHeader { rows: header.rows, ..PartHeader::new(kind, columns, 0) }) {
            return Err(damaged("byte 8", format!("not a table of {kind}")));
        }
        let bytes = header.rows.checked_mul(8 * columns as u64).filter(|bytes| *bytes <= BYTES_MAX);
        if bytes != len.checked_sub(PartHeader::LEN_BYTES as u64) || bytes.is_none() {
            return Err(damaged(
                "byte 24",
                format!("{} rows do not match the file's {len} bytes", header.rows),
            ));
        }
        let mut bytes = Vec::new();
        input.take(BYTES_MAX).read_to_end(&mut bytes).map_err(file("reading", path))?;
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        Ok(Self { words, columns })
    }

    /// Returns the numbers of all rows in order.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns the rows in order, each with the table's number of columns.
    pub fn rows(&self) -> impl Iterator<Item = &[u64]> {
        self.words.chunks_exact(self.columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.part");
        keyframe_plugins::write_part(&path, "counts", 3, &[1, 2, 3, 4, 5, 6]).unwrap();
        let table = PartTable::read(&path, "counts", 3).unwrap();
        assert_eq!(table.rows().collect::<Vec<_>>(), [[1, 2, 3], [4, 5, 6]]);
        let refusal = |bytes: &[u8], kind: &str| {
            std::fs::write(&path, bytes).unwrap();
            PartTable::read(&path, kind, 3).err().expect("refused").to_string()
        };
        let whole = std::fs::read(&path).unwrap();
        assert!(refusal(&whole, "pages").contains("not a table of pages"));
        assert!(refusal(&whole[..whole.len() - 1], "counts").contains("do not match"));
        assert!(refusal(&whole[..20], "counts").contains("reading"));
        let mut huge = whole.clone();
        huge[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(refusal(&huge, "counts").contains("do not match"));
        huge[24..32].copy_from_slice(&(1_u64 << 61).to_le_bytes());
        assert!(refusal(&huge, "counts").contains("do not match"));
        assert!(refusal(&[0; 64], "counts").contains("not a part"));
    }
}
