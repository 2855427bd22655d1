//! A part: the table of one interval, which a table tool writes and `crates/analysis` reads.
//!
//! ```text
//!   byte 0  magic "kfpart1\n" │ 8 kind, zero-padded │ 16 columns │ 24 rows │ 32 rows, each of `columns` words, little-endian
//! ```
//!
//! Invariant: a file that has its final name is complete; it is written under another name and
//! renamed.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"kfpart1\n";

/// The header of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartHeader {
    /// The table's name, zero-padded.
    pub kind: [u8; 8],
    /// The number of words in a row.
    pub columns: u64,
    /// The number of rows.
    pub rows: u64,
}

impl PartHeader {
    /// The length of the header in bytes.
    pub const LEN_BYTES: usize = 32;

    /// The header of a table with `rows` rows.
    pub fn new(kind: &str, columns: usize, rows: usize) -> Self {
        let mut name = [0; 8];
        name[..kind.len()].copy_from_slice(kind.as_bytes());
        Self { kind: name, columns: columns as u64, rows: rows as u64 }
    }

    /// The header as bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN_BYTES] {
        let mut bytes = [0; Self::LEN_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.kind);
        bytes[16..24].copy_from_slice(&self.columns.to_le_bytes());
        bytes[24..].copy_from_slice(&self.rows.to_le_bytes());
        bytes
    }

    /// Parses the first bytes of a file; `None` if it is not a part.
    pub fn from_bytes(bytes: &[u8; Self::LEN_BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        let kind = bytes[8..16].try_into().ok()?;
        (bytes[..8] == MAGIC).then_some(Self { kind, columns: word(16)?, rows: word(24)? })
    }
}

/// Writes the table `rows` (whole rows of `columns` words, in order) to `path`.
pub fn write(path: &Path, kind: &str, columns: usize, rows: &[u64]) -> std::io::Result<()> {
    let unfinished = path.with_extension("part-unfinished");
    let mut out = BufWriter::new(File::create(&unfinished)?);
    out.write_all(&PartHeader::new(kind, columns, rows.len() / columns).to_bytes())?;
    for word in rows {
        out.write_all(&word.to_le_bytes())?;
    }
    out.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    std::fs::rename(unfinished, path)
}
