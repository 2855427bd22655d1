//! The records that the journal does not hold yet, in files that are never synced: they survive
//! the process that serves the disk, and not the machine.
//!
//! ```text
//!   | record | record | ... | records of an earlier use |
//!
//!   record:  number 8 | block 8 | blocks 8 | slot 4 | kind 4 | check 8
//!   kind:    0 slots from `slot` on, 1 zero, 2 a sync has failed
//! ```
//!
//! Lengths are in bytes, and integers are little-endian. The check is XXH3-64 of the bytes before
//! it, seeded with the boot of the machine, so a record of another boot is invalid. The record
//! numbers rise by one. The journal knows up to which number it holds all records.
//!
//! There are two such files. Each sync turns to the other one, if the journal holds all records in
//! that, and writes it from its beginning. So neither grows beyond the records between two syncs.
//!
//! Invariant: a write is in one of these files before it is acknowledged, until it is in the
//! journal.

use super::chain::BlockPlace;
use super::journal::{JournalRecord, le32, le64};
use super::medium::{OverlayFile, OverlayFolder};
use crate::{Error, Result};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const NAMES: [&str; 2] = ["recent.0", "recent.1"];
const RECORD_BYTES: usize = 40;
/// Records that are read at once.
const CHUNK_RECORDS: usize = 4096;
const BROKEN: u32 = 2;

/// One of the two files.
struct RecentFile {
    file: Arc<dyn OverlayFile>,
    /// Where the next record goes.
    end: u64,
    /// The number of its last record.
    last: u64,
}

/// The records that were appended since the newest one in the journal.
pub struct RecentLog {
    files: [RecentFile; 2],
    active: usize,
    seed: u64,
    /// The number of the last record.
    last: u64,
    /// The journal holds all records up to this number.
    covered: u64,
}

/// The records that an earlier process left behind when it ended without a sync.
#[derive(Default)]
pub struct Left {
    /// The records that the journal does not hold, in their order.
    pub records: Vec<JournalRecord>,
    /// True if a sync of that process had failed.
    pub is_broken: bool,
}

impl RecentLog {
    /// Opens the files in `folder`, or creates them. `covered` is the number of the last record
    /// that the journal holds. Returns the log, and the records that only the log holds. Errors:
    /// [`Error::Damaged`] if a record is missing; [`Error::Io`] if a file or the name of this boot
    /// cannot be read.
    pub fn open(folder: &dyn OverlayFolder, covered: u64) -> Result<(Self, Left)> {
        let seed = folder.boot_seed()?;
        let mut found = Vec::new();
        let mut open = |name| {
            let file = folder.open(name)?;
            let (end, last) = read_run(&*file, seed, &mut found)?;
            Ok(RecentFile { file, end, last })
        };
        let files = [open(NAMES[0])?, open(NAMES[1])?];
        found.retain(|(number, ..)| *number > covered);
        found.sort_by_key(|(number, ..)| *number);
        let mut left = Left::default();
        let mut last = covered;
        for (number, record) in found {
            last += 1;
            if number != last {
                let problem = format!("record {last} is missing, and {number} follows");
                return Err(Error::damaged(format!("{}/recent", folder.name()), problem));
            }
            match record {
                Some(record) => left.records.push(record),
                None => left.is_broken = true,
            }
        }
        let active = usize::from(files[1].last > files[0].last);
        Ok((Self { files, active, seed, last, covered }, left))
    }

    /// Appends a record. Error: the file cannot be written; then the record is not in it.
    pub fn append(&mut self, record: JournalRecord) -> Result<()> {
        self.append_raw(&bytes_of(record))
    }

    /// Records that a sync has failed: the next process must not serve the disk, because the kernel
    /// may have dropped written data.
    pub fn mark_broken(&mut self) {
        let mut mark = [0u8; RECORD_BYTES - 16];
        mark[20..24].copy_from_slice(&BROKEN.to_le_bytes());
        // Nothing more can be done on a medium that fails.
        let _ = self.append_raw(&mark);
    }

    fn append_raw(&mut self, content: &[u8; RECORD_BYTES - 16]) -> Result<()> {
        let number = self.last + 1;
        let mut bytes = [0u8; RECORD_BYTES];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..32].copy_from_slice(content);
        let check = check_of(self.seed, &bytes);
        bytes[32..].copy_from_slice(&check.to_le_bytes());
        let active = &mut self.files[self.active];
        active.file.write(active.end, &bytes)?;
        active.end += RECORD_BYTES as u64;
        (active.last, self.last) = (number, number);
        Ok(())
    }

    /// Begins a sync that takes all records up to now into the journal. Returns the number of the
    /// last of them.
    pub fn begin_sync(&mut self) -> u64 {
        let other = &mut self.files[1 - self.active];
        if other.last <= self.covered {
            other.end = 0;
            self.active = 1 - self.active;
        }
        self.last
    }

    /// Records that the journal holds all records up to `number`.
    pub fn set_covered(&mut self, number: u64) {
        self.covered = number;
    }

    /// Returns the number of the last record.
    pub fn last(&self) -> u64 {
        self.last
    }
}

/// Appends the consecutive records at the beginning of `file` to `found`, each with its number. The
/// record is `None` for the mark of a failed sync. Returns the end of the last one in bytes, and
/// its number; both are 0 if there is none. Error: the file cannot be read.
fn read_run(
    file: &dyn OverlayFile,
    seed: u64,
    found: &mut Vec<(u64, Option<JournalRecord>)>,
) -> Result<(u64, u64)> {
    let len = file.len_bytes()?;
    let (mut end, mut last) = (0u64, 0u64);
    let mut chunk = vec![0u8; CHUNK_RECORDS * RECORD_BYTES];
    while end + RECORD_BYTES as u64 <= len {
        file.read(end, &mut chunk)?;
        for bytes in chunk.chunks_exact(RECORD_BYTES) {
            let number = le64(bytes, 0);
            let follows = number > 0 && (end == 0 || number == last + 1);
            if !follows || check_of(seed, bytes) != le64(bytes, 32) {
                return Ok((end, last));
            }
            found.push((number, record_of(bytes)));
            (end, last) = (end + RECORD_BYTES as u64, number);
        }
    }
    Ok((end, last))
}

fn check_of(seed: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(&bytes[..32], seed)
}

fn bytes_of(record: JournalRecord) -> [u8; RECORD_BYTES - 16] {
    let (slot, kind) = match record.place {
        BlockPlace::Slot(slot) => (slot, 0u32),
        BlockPlace::Zero => (0, 1),
    };
    let mut bytes = [0u8; RECORD_BYTES - 16];
    bytes[..8].copy_from_slice(&record.block.to_le_bytes());
    bytes[8..16].copy_from_slice(&record.blocks.to_le_bytes());
    bytes[16..20].copy_from_slice(&slot.to_le_bytes());
    bytes[20..].copy_from_slice(&kind.to_le_bytes());
    bytes
}

/// `None` for the mark of a failed sync.
fn record_of(bytes: &[u8]) -> Option<JournalRecord> {
    let place = match le32(bytes, 28) {
        0 => BlockPlace::Slot(le32(bytes, 24)),
        1 => BlockPlace::Zero,
        _ => return None,
    };
    Some(JournalRecord { block: le64(bytes, 8), blocks: le64(bytes, 16), place })
}
