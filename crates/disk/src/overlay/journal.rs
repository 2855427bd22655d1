//! The journal of an overlay: the slot of each block, up to the last sync.
//!
//! ```text
//!   | header 64 | batch | batch | ... | batch | torn tail |
//!
//!   header:  magic 8 | version 4 | block bytes 4 | disk bytes 8 | salt 8 | covered 8 | zero 16 |
//!            check 8
//!   batch:   magic 4 | records 4 | number 8 | covered 8 | check 8 | records
//!   record:  block 8 | blocks 8 | slot 4 | kind 4     (kind 0: slots from `slot` on, 1: zero)
//! ```
//!
//! Lengths are in bytes, and integers are little-endian. Checksums are XXH3-64; those of batches
//! are seeded with the salt, the batch's number, its number of records, and `covered`: the number
//! of the last record in [`super::recent`] that the journal holds.
//!
//! Invariants: a batch is written after its data was synced, and before the next batch. So an
//! invalid batch at the end is the last one that was begun, and no flush has acknowledged it. If a
//! valid batch follows an invalid one, the journal is damaged. A journal that is several times as
//! long as its content needs is rewritten to a second file, which then replaces it.

use super::chain::BlockPlace;
use super::medium::{OverlayFile, OverlayFolder};
use crate::extents::ExtentMap;
use crate::{BLOCK, BLOCK_BYTES, Error, Result};
use std::sync::Arc;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const MAGIC: [u8; 8] = *b"KFDISK\r\n";
const VERSION: u32 = 1;
/// The length of the journal's header in bytes.
pub const HEADER_BYTES: usize = 64;
const BATCH_MAGIC: u32 = 0x3142_464b;
const BATCH_HEADER_BYTES: usize = 32;
const RECORD_BYTES: usize = 24;
/// The largest number of records in one batch: 24 MiB.
const BATCH_RECORDS_MAX: usize = 1 << 20;
/// A journal below this length is not rewritten.
const REWRITE_BYTES_MIN: u64 = 4 << 20;
/// The name of the journal in the overlay's directory.
pub const NAME: &str = "journal";
const ASIDE: &str = "journal.new";

/// A record of the journal: consecutive blocks and their new place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalRecord {
    /// The number of the first block.
    pub block: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The place of the first block. If it is a slot, the slots of the others follow.
    pub place: BlockPlace,
}

impl JournalRecord {
    /// Returns true if the record has blocks, and all of them lie in a disk of `disk_bytes` bytes.
    pub fn is_possible(&self, disk_bytes: u64) -> bool {
        let end = self.block.checked_add(self.blocks);
        let has_slots = match self.place {
            BlockPlace::Slot(slot) => self.blocks < u64::from(u32::MAX - slot),
            BlockPlace::Zero => true,
        };
        self.blocks > 0 && has_slots && end.is_some_and(|end| end <= disk_bytes.div_ceil(BLOCK))
    }
}

/// A valid batch.
struct Batch {
    number: u64,
    covered: u64,
    body: Vec<u8>,
}

/// What a journal's header says.
struct ParsedHeader {
    disk_bytes: u64,
    salt: u64,
    covered: u64,
}

/// The content of a journal that was opened.
pub struct Recovered {
    /// The size of the disk in bytes.
    pub disk_bytes: u64,
    /// The place of each block that the journal names.
    pub map: ExtentMap<BlockPlace>,
    /// The number of the last record of [`super::recent`] that the journal holds. It holds all
    /// earlier ones too.
    pub covered: u64,
}

/// An open journal of an overlay.
pub struct Journal {
    folder: Arc<dyn OverlayFolder>,
    file: Arc<dyn OverlayFile>,
    disk_bytes: u64,
    salt: u64,
    next_batch: u64,
    /// All recent records up to this number are in the journal.
    covered: u64,
    end: u64,
    /// The length at which the journal is rewritten.
    rewrite_at: u64,
    /// A journal below this length is never rewritten.
    rewrite_bytes_min: u64,
}

/// Returns the little-endian number in the four bytes from `at` on, or 0 if they are not all in
/// `bytes`.
pub fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

/// Returns the little-endian number in the eight bytes from `at` on, or 0 if they are not all in
/// `bytes`.
pub fn le64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

impl Journal {
    /// Opens the journal of the overlay in `folder` and reads it. If there is none, creates one for
    /// a disk of `disk_bytes` bytes, or fails if `disk_bytes` is `None`.
    ///
    /// Errors: [`Error::Damaged`] if it is damaged, or if there is none and `disk_bytes` is `None`;
    /// [`Error::Refused`] if it is of a disk of another size or in a newer format; [`Error::Io`] if
    /// the files cannot be read or written.
    pub fn open(
        folder: Arc<dyn OverlayFolder>,
        disk_bytes: Option<u64>,
    ) -> Result<(Self, Recovered)> {
        let file = folder.open(NAME)?;
        let name = format!("{}/{NAME}", folder.name());
        let len = file.len_bytes()?;
        let mut header = [0u8; HEADER_BYTES];
        file.read(0, &mut header)?;
        let blank = len < HEADER_BYTES as u64 || header == [0; HEADER_BYTES];
        match disk_bytes {
            // The first header is synced before any flush is acknowledged, so a journal without a
            // complete header holds no data.
            Some(disk_bytes) if blank => Self::begin(folder, file, disk_bytes, 0),
            None if blank => Err(Error::damaged(name, "it holds no overlay")),
            wanted => {
                let ParsedHeader { disk_bytes, salt, covered } = parse_header(&header, &name)?;
                if let Some(wanted) = wanted.filter(|wanted| *wanted != disk_bytes) {
                    let problem = format!(
                        "it is of a disk of {disk_bytes} bytes, but the image has {wanted}"
                    );
                    return Err(Error::refused(
                        name,
                        problem,
                        "use the image that it was created for, or another directory",
                    ));
                }
                Self::recover(folder, file, ParsedHeader { disk_bytes, salt, covered }, len)
            }
        }
    }

    fn begin(
        folder: Arc<dyn OverlayFolder>,
        file: Arc<dyn OverlayFile>,
        disk_bytes: u64,
        covered: u64,
    ) -> Result<(Self, Recovered)> {
        let salt = fresh_salt();
        file.set_len(0)?;
        file.write(0, &header(disk_bytes, salt, covered))?;
        file.sync()?;
        folder.sync()?;
        let end = HEADER_BYTES as u64;
        let (rewrite_at, rewrite_bytes_min) = (REWRITE_BYTES_MIN, REWRITE_BYTES_MIN);
        let journal = Self {
            folder,
            file,
            disk_bytes,
            salt,
            next_batch: 1,
            covered,
            end,
            rewrite_at,
            rewrite_bytes_min,
        };
        Ok((journal, Recovered { disk_bytes, map: ExtentMap::default(), covered }))
    }

    fn recover(
        folder: Arc<dyn OverlayFolder>,
        file: Arc<dyn OverlayFile>,
        ParsedHeader { disk_bytes, salt, covered }: ParsedHeader,
        len: u64,
    ) -> Result<(Self, Recovered)> {
        let (end, rewrite_bytes_min) = (HEADER_BYTES as u64, REWRITE_BYTES_MIN);
        let mut this = Self {
            folder,
            file,
            disk_bytes,
            salt,
            next_batch: 1,
            covered,
            end,
            rewrite_at: 0,
            rewrite_bytes_min,
        };
        let map = this.replay(len)?;
        // No flush has acknowledged the rest of the file. It must not look like a batch after later
        // batches overwrite a part of it.
        if len > this.end {
            this.file.set_len(this.end)?;
        }
        // The bytes that were read may be in memory alone.
        this.file.sync()?;
        this.rewrite_at = this.rewrite_threshold(&map);
        let covered = this.covered;
        Ok((this, Recovered { disk_bytes, map, covered }))
    }

    fn rewrite_threshold(&self, map: &ExtentMap<BlockPlace>) -> u64 {
        (map.entries() as u64 * RECORD_BYTES as u64 * 4).max(self.rewrite_bytes_min)
    }

    /// Sets the length from which the journal is rewritten, for tests.
    #[cfg(test)]
    pub fn rewrite_from(&mut self, bytes: u64) {
        (self.rewrite_at, self.rewrite_bytes_min) = (bytes, bytes);
    }

    /// Reads batches up to the first invalid one. Errors: [`Error::Damaged`] if a valid batch
    /// follows that one, or if a record is impossible; [`Error::Io`].
    fn replay(&mut self, len: u64) -> Result<ExtentMap<BlockPlace>> {
        let mut map = ExtentMap::default();
        while let Some(batch) =
            self.batch_at(self.end, len)?.filter(|batch| batch.number == self.next_batch)
        {
            for record in batch.body.chunks_exact(RECORD_BYTES) {
                let record = self.parse_record(record)?;
                map.insert(record.block, record.blocks, record.place, &mut |_, _, _| {});
            }
            self.end += (BATCH_HEADER_BYTES + batch.body.len()) as u64;
            self.next_batch += 1;
            self.covered = batch.covered;
        }
        self.nothing_good_behind(len)?;
        Ok(map)
    }

    /// The batch at byte `at` of the journal, which has `len` bytes. `None` if there is no valid
    /// one. Error: the file cannot be read.
    fn batch_at(&self, at: u64, len: u64) -> Result<Option<Batch>> {
        let left = len.saturating_sub(at);
        if left < BATCH_HEADER_BYTES as u64 {
            return Ok(None);
        }
        let mut header = [0u8; BATCH_HEADER_BYTES];
        self.file.read(at, &mut header)?;
        let (count, number) = (le32(&header, 4) as usize, le64(&header, 8));
        let covered = le64(&header, 16);
        let bytes = count.saturating_mul(RECORD_BYTES);
        if le32(&header, 0) != BATCH_MAGIC
            || count > BATCH_RECORDS_MAX
            || bytes as u64 > left - BATCH_HEADER_BYTES as u64
        {
            return Ok(None);
        }
        let mut body = vec![0; bytes];
        self.file.read(at + BATCH_HEADER_BYTES as u64, &mut body)?;
        let is_valid = check_of(self.salt, number, covered, &body) == le64(&header, 24);
        Ok(is_valid.then_some(Batch { number, covered, body }))
    }

    fn parse_record(&self, bytes: &[u8]) -> Result<JournalRecord> {
        let (block, blocks, slot) = (le64(bytes, 0), le64(bytes, 8), le32(bytes, 16));
        let place = match le32(bytes, 20) {
            0 => Some(BlockPlace::Slot(slot)),
            1 => Some(BlockPlace::Zero),
            _ => None,
        };
        let record = place.map(|place| JournalRecord { block, blocks, place });
        record.filter(|record| record.is_possible(self.disk_bytes)).ok_or_else(|| {
            let problem = format!("a record names {blocks} blocks at {block}, slot {slot}");
            Error::damaged(self.name(), problem)
        })
    }

    /// Fails with [`Error::Damaged`] if a valid batch follows: it proves that a flush has
    /// acknowledged the invalid one. Other error: the file cannot be read.
    fn nothing_good_behind(&self, len: u64) -> Result<()> {
        let mut at = self.end;
        let mut chunk = vec![0u8; 1 << 16];
        while at + (BATCH_HEADER_BYTES as u64) <= len {
            let take = ((len - at) as usize).min(chunk.len());
            self.file.read(at, &mut chunk[..take])?;
            // Batches begin at multiples of 8.
            for place in (0..take.saturating_sub(7)).step_by(8) {
                if le32(&chunk[..take], place) != BATCH_MAGIC {
                    continue;
                }
                let good = self.batch_at(at + place as u64, len)?;
                if good.is_some_and(|batch| batch.number > self.next_batch) {
                    let problem = format!(
                        "batch {} at {} is invalid, and later ones are valid",
                        self.next_batch, self.end
                    );
                    return Err(Error::damaged(self.name(), problem));
                }
            }
            at += take as u64;
        }
        Ok(())
    }

    fn name(&self) -> String {
        format!("{}/{NAME}", self.folder.name())
    }

    /// Appends `records` and makes them durable. `covered` is the number of the last record of
    /// [`super::recent`] that the journal then holds.
    ///
    /// Error: the file cannot be written or synced. [`AppendError::retry`] tells whether the caller
    /// may try again.
    pub fn append(&mut self, records: &[JournalRecord], covered: u64) -> Result<(), AppendError> {
        let mut chunks = records.chunks(BATCH_RECORDS_MAX).peekable();
        while let Some(records) = chunks.next() {
            // The recent records are complete with the last batch.
            let covered = if chunks.peek().is_none() { covered } else { self.covered };
            let bytes = self.encode(self.next_batch, covered, records);
            if let Err(error) = self.file.write(self.end, &bytes) {
                // Cutting the partly written batch restores the file.
                let retry = self.file.set_len(self.end).is_ok();
                return Err(AppendError { error, retry });
            }
            self.file.sync().map_err(|error| AppendError { error, retry: false })?;
            self.end += bytes.len() as u64;
            self.next_batch += 1;
            self.covered = covered;
        }
        Ok(())
    }

    fn encode(&self, number: u64, covered: u64, records: &[JournalRecord]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BATCH_HEADER_BYTES + records.len() * RECORD_BYTES);
        bytes.extend(BATCH_MAGIC.to_le_bytes());
        bytes.extend((records.len() as u32).to_le_bytes());
        bytes.extend(number.to_le_bytes());
        bytes.extend(covered.to_le_bytes());
        bytes.extend([0; 8]);
        for record in records {
            let (slot, kind) = match record.place {
                BlockPlace::Slot(slot) => (slot, 0u32),
                BlockPlace::Zero => (0, 1),
            };
            bytes.extend(record.block.to_le_bytes());
            bytes.extend(record.blocks.to_le_bytes());
            bytes.extend(slot.to_le_bytes());
            bytes.extend(kind.to_le_bytes());
        }
        let check = check_of(self.salt, number, covered, &bytes[BATCH_HEADER_BYTES..]);
        bytes[24..BATCH_HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Returns true if the journal is so much longer than its content needs that a rewrite is due.
    pub fn is_long(&self) -> bool {
        self.end >= self.rewrite_at
    }

    /// Writes a new journal without superseded records, which replaces this one.
    ///
    /// Errors: a file cannot be read, written or synced; [`AppendError::retry`] tells whether the
    /// journal is unchanged, so that the caller may try again.
    pub fn rewrite(&mut self) -> Result<(), AppendError> {
        // After any result, the next rewrite waits until the length has doubled.
        self.rewrite_at = self.end.saturating_mul(2);
        let mut old = Self {
            folder: Arc::clone(&self.folder),
            file: Arc::clone(&self.file),
            end: HEADER_BYTES as u64,
            next_batch: 1,
            ..*self
        };
        let map = old.replay(self.end).map_err(|error| AppendError { error, retry: true })?;
        self.replace(&map)
    }

    /// Replaces the journal with an empty one. Records of [`super::recent`] up to number `covered`
    /// become void. Error: a file cannot be written or synced.
    pub fn clear(&mut self, covered: u64) -> Result<()> {
        self.covered = covered;
        self.replace(&ExtentMap::default()).map_err(|e| e.error)
    }

    fn replace(&mut self, map: &ExtentMap<BlockPlace>) -> Result<(), AppendError> {
        let new = self.write_aside(map).map_err(|error| AppendError { error, retry: true })?;
        self.folder.replace(ASIDE, NAME).map_err(|error| AppendError { error, retry: true })?;
        *self = new;
        // Until this sync, a power loss can bring the old journal back, without later appends to
        // the new one.
        self.folder.sync().map_err(|error| AppendError { error, retry: false })
    }

    fn write_aside(&self, map: &ExtentMap<BlockPlace>) -> Result<Self> {
        let file = self.folder.open(ASIDE)?;
        let (mut new, _) =
            Self::begin(Arc::clone(&self.folder), file, self.disk_bytes, self.covered)?;
        let records: Vec<JournalRecord> = map
            .iter()
            .map(|(block, blocks, place)| JournalRecord { block, blocks, place })
            .collect();
        new.append(&records, self.covered).map_err(|e| e.error)?;
        new.rewrite_bytes_min = self.rewrite_bytes_min;
        new.rewrite_at = new.rewrite_threshold(map);
        Ok(new)
    }
}

/// The failure of a write to the journal.
pub struct AppendError {
    /// The error.
    pub error: Error,
    /// True if the journal is unchanged, so that the caller may try again.
    pub retry: bool,
}

fn header(disk_bytes: u64, salt: u64, covered: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0u8; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
    header[16..24].copy_from_slice(&disk_bytes.to_le_bytes());
    header[24..32].copy_from_slice(&salt.to_le_bytes());
    header[32..40].copy_from_slice(&covered.to_le_bytes());
    let check = xxh3_64(&header[..56]);
    header[56..].copy_from_slice(&check.to_le_bytes());
    header
}

fn parse_header(header: &[u8; HEADER_BYTES], name: &str) -> Result<ParsedHeader> {
    if header[..8] != MAGIC {
        return Err(Error::damaged(
            name,
            "it does not begin with the magic number of an overlay's journal",
        ));
    }
    let version = le32(header, 8);
    if version > VERSION {
        let problem =
            format!("it has format version {version}; this program reads version {VERSION}");
        return Err(Error::refused(name, problem, "use the keyframe that wrote it"));
    }
    if xxh3_64(&header[..56]) != le64(header, 56) || le32(header, 12) as usize != BLOCK_BYTES {
        return Err(Error::damaged(name, "its header does not match its checksum"));
    }
    let (disk_bytes, salt, covered) = (le64(header, 16), le64(header, 24), le64(header, 32));
    Ok(ParsedHeader { disk_bytes, salt, covered })
}

/// Writes valid checksums into the journal `bytes`, up to its last complete batch.
pub fn mend(bytes: &mut [u8]) {
    let check = xxh3_64(&bytes[..56]);
    bytes[56..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
    let salt = le64(bytes, 24);
    let mut at = HEADER_BYTES;
    while let Some(batch) = bytes.get_mut(at..) {
        let count = le32(batch, 4) as usize;
        let end = BATCH_HEADER_BYTES.saturating_add(count.saturating_mul(RECORD_BYTES));
        let Some(records) = batch.get(BATCH_HEADER_BYTES..end) else { return };
        let check = check_of(salt, le64(batch, 8), le64(batch, 16), records);
        batch[24..BATCH_HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
        at += end;
    }
}

fn check_of(salt: u64, number: u64, covered: u64, records: &[u8]) -> u64 {
    let count = (records.len() / RECORD_BYTES) as u64;
    let of_header = number.rotate_left(17) ^ count.rotate_left(47) ^ covered.rotate_left(32);
    xxh3_64_with_seed(records, salt ^ of_header)
}

/// Not a secret: the salt makes batches that an older journal left on the medium invalid in this
/// one.
fn fresh_salt() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
