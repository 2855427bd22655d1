//! The journal of an overlay: the slot of each block, up to the last sync.
//!
//! ```text
//!   | header 64 | batch | batch | ... | batch | torn tail |
//!
//!   header:  magic 8 | version 4 | block bytes 4 | disk bytes 8 | salt 8 | zero 24 | check 8
//!   batch:   magic 4 | records 4 | number 8 | check 8 | records
//!   record:  block 8 | blocks 8 | slot 4 | kind 4     (kind 0: slots from `slot` on, 1: zero)
//! ```
//!
//! Integers are little-endian. Checksums are XXH3-64; those of batches are seeded with salt and
//! number.
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
pub const HEADER_BYTES: usize = 64;
const BATCH_MAGIC: u32 = 0x3142_464b;
const BATCH_HEADER_BYTES: usize = 24;
const RECORD_BYTES: usize = 24;
/// The largest number of records in one batch: 24 MiB.
const BATCH_RECORDS_MAX: usize = 1 << 20;
/// A journal below this length is not rewritten.
const REWRITE_BYTES_MIN: u64 = 4 << 20;
pub const NAME: &str = "journal";
const ASIDE: &str = "journal.new";

/// Blocks and their new place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalRecord {
    pub block: u64,
    pub blocks: u64,
    pub place: BlockPlace,
}

/// The content of a journal.
pub struct Recovered {
    pub disk_bytes: u64,
    pub map: ExtentMap<BlockPlace>,
}

/// An open journal.
pub struct Journal {
    folder: Arc<dyn OverlayFolder>,
    file: Arc<dyn OverlayFile>,
    disk_bytes: u64,
    salt: u64,
    next_batch: u64,
    end: u64,
    /// The length at which the journal is rewritten.
    rewrite_at: u64,
    /// A journal below this length is never rewritten.
    rewrite_bytes_min: u64,
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

impl Journal {
    /// Opens the journal of `folder`, or creates one for a disk of `disk_bytes` bytes. `None`: the
    /// journal must exist.
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
            Some(disk_bytes) if blank => Self::begin(folder, file, disk_bytes),
            None if blank => Err(Error::damaged(name, "it holds no overlay")),
            wanted => {
                let (disk_bytes, salt) = parse_header(&header, &name)?;
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
                Self::recover(folder, file, disk_bytes, salt, len)
            }
        }
    }

    fn begin(
        folder: Arc<dyn OverlayFolder>,
        file: Arc<dyn OverlayFile>,
        disk_bytes: u64,
    ) -> Result<(Self, Recovered)> {
        let salt = fresh_salt();
        file.set_len(0)?;
        file.write(0, &header(disk_bytes, salt))?;
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
            end,
            rewrite_at,
            rewrite_bytes_min,
        };
        Ok((journal, Recovered { disk_bytes, map: ExtentMap::default() }))
    }

    fn recover(
        folder: Arc<dyn OverlayFolder>,
        file: Arc<dyn OverlayFile>,
        disk_bytes: u64,
        salt: u64,
        len: u64,
    ) -> Result<(Self, Recovered)> {
        let (end, rewrite_bytes_min) = (HEADER_BYTES as u64, REWRITE_BYTES_MIN);
        let mut this = Self {
            folder,
            file,
            disk_bytes,
            salt,
            next_batch: 1,
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
        Ok((this, Recovered { disk_bytes, map }))
    }

    fn rewrite_threshold(&self, map: &ExtentMap<BlockPlace>) -> u64 {
        (map.entries() as u64 * RECORD_BYTES as u64 * 4).max(self.rewrite_bytes_min)
    }

    /// Sets the length from which the journal is rewritten, for tests.
    #[cfg(test)]
    pub fn rewrite_from(&mut self, bytes: u64) {
        (self.rewrite_at, self.rewrite_bytes_min) = (bytes, bytes);
    }

    /// Reads batches up to the first invalid one.
    fn replay(&mut self, len: u64) -> Result<ExtentMap<BlockPlace>> {
        let mut map = ExtentMap::default();
        while let Some(body) =
            self.batch_at(self.end, len)?.filter(|(number, _)| *number == self.next_batch)
        {
            for record in body.1.chunks_exact(RECORD_BYTES) {
                let record = self.parse_record(record)?;
                map.insert(record.block, record.blocks, record.place, &mut |_, _, _| {});
            }
            self.end += (BATCH_HEADER_BYTES + body.1.len()) as u64;
            self.next_batch += 1;
        }
        self.nothing_good_behind(len)?;
        Ok(map)
    }

    /// The number and the records of the batch at `at`, if it is valid.
    fn batch_at(&self, at: u64, len: u64) -> Result<Option<(u64, Vec<u8>)>> {
        let left = len.saturating_sub(at);
        if left < BATCH_HEADER_BYTES as u64 {
            return Ok(None);
        }
        let mut header = [0u8; BATCH_HEADER_BYTES];
        self.file.read(at, &mut header)?;
        let (count, number) = (le32(&header, 4) as usize, le64(&header, 8));
        let bytes = count.saturating_mul(RECORD_BYTES);
        if le32(&header, 0) != BATCH_MAGIC
            || count > BATCH_RECORDS_MAX
            || bytes as u64 > left - BATCH_HEADER_BYTES as u64
        {
            return Ok(None);
        }
        let mut body = vec![0; bytes];
        self.file.read(at + BATCH_HEADER_BYTES as u64, &mut body)?;
        Ok((self.check(number, &body) == le64(&header, 16)).then_some((number, body)))
    }

    fn check(&self, number: u64, records: &[u8]) -> u64 {
        check_of(self.salt, number, records)
    }

    fn parse_record(&self, bytes: &[u8]) -> Result<JournalRecord> {
        let (block, blocks, slot) = (le64(bytes, 0), le64(bytes, 8), le32(bytes, 16));
        let place = match le32(bytes, 20) {
            0 => Some(BlockPlace::Slot(slot)).filter(|_| blocks < u64::from(u32::MAX - slot)),
            1 => Some(BlockPlace::Zero),
            _ => None,
        };
        let inside =
            block.checked_add(blocks).is_some_and(|end| end <= self.disk_bytes.div_ceil(BLOCK));
        match place.filter(|_| inside && blocks > 0) {
            Some(place) => Ok(JournalRecord { block, blocks, place }),
            None => Err(Error::damaged(
                self.name(),
                format!("a record names {blocks} blocks at {block}, slot {slot}"),
            )),
        }
    }

    /// Fails if a valid batch follows: it proves that a flush has acknowledged the invalid one.
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
                if good.is_some_and(|(number, _)| number > self.next_batch) {
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

    /// Appends records and makes them durable. The error says whether a retry is possible.
    pub fn append(&mut self, records: &[JournalRecord]) -> Result<(), AppendError> {
        for records in records.chunks(BATCH_RECORDS_MAX) {
            let bytes = self.encode(self.next_batch, records);
            if let Err(error) = self.file.write(self.end, &bytes) {
                // Cutting the partly written batch restores the file.
                let retry = self.file.set_len(self.end).is_ok();
                return Err(AppendError { error, retry });
            }
            self.file.sync().map_err(|error| AppendError { error, retry: false })?;
            self.end += bytes.len() as u64;
            self.next_batch += 1;
        }
        Ok(())
    }

    fn encode(&self, number: u64, records: &[JournalRecord]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BATCH_HEADER_BYTES + records.len() * RECORD_BYTES);
        bytes.extend(BATCH_MAGIC.to_le_bytes());
        bytes.extend((records.len() as u32).to_le_bytes());
        bytes.extend(number.to_le_bytes());
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
        let check = self.check(number, &bytes[BATCH_HEADER_BYTES..]);
        bytes[16..BATCH_HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// True if the journal is several times as long as its content needs.
    pub fn is_long(&self) -> bool {
        self.end >= self.rewrite_at
    }

    /// Rewrites the journal without superseded records. If a retry is possible after a failure, the
    /// journal is unchanged.
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

    /// Replaces the journal with an empty one.
    pub fn clear(&mut self) -> Result<()> {
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
        let (mut new, _) = Self::begin(Arc::clone(&self.folder), file, self.disk_bytes)?;
        let records: Vec<JournalRecord> = map
            .iter()
            .map(|(block, blocks, place)| JournalRecord { block, blocks, place })
            .collect();
        new.append(&records).map_err(|e| e.error)?;
        new.rewrite_bytes_min = self.rewrite_bytes_min;
        new.rewrite_at = new.rewrite_threshold(map);
        Ok(new)
    }
}

/// Why records could not be appended.
pub struct AppendError {
    pub error: Error,
    /// True if the journal is unchanged, so that a retry is possible.
    pub retry: bool,
}

fn header(disk_bytes: u64, salt: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0u8; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
    header[16..24].copy_from_slice(&disk_bytes.to_le_bytes());
    header[24..32].copy_from_slice(&salt.to_le_bytes());
    let check = xxh3_64(&header[..56]);
    header[56..].copy_from_slice(&check.to_le_bytes());
    header
}

fn parse_header(header: &[u8; HEADER_BYTES], name: &str) -> Result<(u64, u64)> {
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
    Ok((le64(header, 16), le64(header, 24)))
}

/// Writes the correct checksums into a journal, up to the last complete batch.
pub fn mend(bytes: &mut [u8]) {
    let check = xxh3_64(&bytes[..56]);
    bytes[56..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
    let salt = le64(bytes, 24);
    let mut at = HEADER_BYTES;
    while let Some(batch) = bytes.get_mut(at..) {
        let count = le32(batch, 4) as usize;
        let end = BATCH_HEADER_BYTES.saturating_add(count.saturating_mul(RECORD_BYTES));
        let Some(records) = batch.get(BATCH_HEADER_BYTES..end) else { return };
        let check = check_of(salt, le64(batch, 8), records);
        batch[16..BATCH_HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
        at += end;
    }
}

fn check_of(salt: u64, number: u64, records: &[u8]) -> u64 {
    let count = (records.len() / RECORD_BYTES) as u64;
    xxh3_64_with_seed(records, salt ^ number.rotate_left(17) ^ count.rotate_left(47))
}

/// Not a secret: the salt makes batches that an older journal left on the medium invalid in this
/// one.
fn fresh_salt() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
