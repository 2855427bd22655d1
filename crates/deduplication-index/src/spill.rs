//! A spill: a file of index entries, sorted by hash, in buckets. It never changes.
//!
//! ```text
//!   | header 512 | bucket 512 | bucket | ... | fences | filter | packs | footer 64 |
//!
//!   header   0  8 magic "KF:IDX\r\n"    8  4 version    12  4 zero    16 16 store id    32 16 salt, random    48 .. zeros
//!   bucket   21 entries of 24 (of the last one: what is left, then zeros)    504  8 XXH3-64 of these, seed = salt + its number
//!   entry    0 16 hash    16  8 pack number (24 bits), kind (2), zero (2), offset (36); encrypted stores: masked
//!   fences   8 for each bucket: the first word of its first hash
//!   filter   32 for each block ([`crate::filter`])
//!   packs    24 for each pack whose records are all here, or in other spills: 8 number, 16 its trailer's checksum
//!   footer   0  8 entries    8  8 buckets    16  8 blocks of the filter    24  8 packs
//!           32 32 BLAKE3 of header, fences, filter, packs and bytes 0..32 of the footer
//! ```
//!
//! Fences, filter and packs are in memory: two bytes for each entry. A hash that passes the filter
//! costs one read of 512 bytes.
//!
//! Invariants: no part is used before its checksum matches. The salt distinguishes buckets of
//! another file, which a crash may have left in their place. Any damage is an [`io::Error`], after
//! which the file is not used.

use crate::filter::{self, Filter};
use crate::table::Slot;
use keyframe_store_format::pack::PackSeal;
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PACK_NUMBER_MAX;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const MAGIC: &[u8; 8] = b"KF:IDX\r\n";
const VERSION: u32 = 1;
/// The size of a bucket of a spill, in bytes.
pub const BUCKET_BYTES: usize = 512;
const ENTRY_BYTES: usize = 24;
const BUCKET_ENTRIES: usize = (BUCKET_BYTES - CHECK_BYTES) / ENTRY_BYTES;
const CHECK_BYTES: usize = 8;
const PACK_BYTES: usize = 24;
const FOOTER_BYTES: usize = 64;
const READ_AHEAD_BYTES: usize = 128 << 10;

type Bucket = [u8; BUCKET_BYTES];

/// The store of a spill, and the key that masks its values.
#[derive(Clone, Debug)]
pub struct Bond {
    /// The id of the store.
    pub store: [u8; 16],
    /// The key that masks the places in an encrypted store, which must not be in plain text. `None`
    /// if the store is not encrypted.
    pub mask: Option<MaskKey>,
}

/// The key of the masks. Its `Debug` form does not show it.
#[derive(Clone)]
pub struct MaskKey(pub [u8; 32]);

impl std::fmt::Debug for MaskKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MaskKey(secret)")
    }
}

impl Bond {
    /// Masks a value, or removes its mask. No mask is used twice, because no hash occurs twice in a
    /// file, and each file has its own salt.
    fn mask(&self, salt: [u8; 16], hash: PageHash, value: u64) -> u64 {
        let Some(MaskKey(key)) = &self.mask else { return value };
        let mut input = [0; 32];
        let (first, second) = input.split_at_mut(16);
        first.copy_from_slice(&salt);
        second.copy_from_slice(&hash.to_bytes());
        let mask = blake3::keyed_hash(key, &input);
        value ^ mask.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// An open spill. Its fences and its filter are in memory.
#[derive(Debug)]
pub struct Spill {
    file: File,
    bond: Bond,
    salt: [u8; 16],
    entries: u64,
    fences: Vec<u64>,
    filter: Filter,
    packs: Vec<(u32, PackSeal)>,
}

/// Returns the size in bytes of the memory for `entries` entries, without the list of packs.
pub fn memory_bytes(entries: usize) -> usize {
    entries.div_ceil(BUCKET_ENTRIES) * 8 + filter::blocks(entries) * filter::BLOCK_BYTES
}

impl Spill {
    /// Opens the spill at `path`. Its fences and its filter may take at most `bytes_max` bytes of
    /// memory. Errors: the file cannot be read; it is damaged, of another store, or too large.
    pub fn open(path: &Path, bond: &Bond, bytes_max: usize) -> io::Result<Self> {
        let file = File::open(path)?;
        let len_bytes = file.metadata()?.len();
        let mut header = [0; BUCKET_BYTES];
        file.read_exact_at(&mut header, 0)?;
        let mut footer = [0; FOOTER_BYTES];
        let footer_at =
            len_bytes.checked_sub(FOOTER_BYTES as u64).ok_or_else(|| bad("too short"))?;
        file.read_exact_at(&mut footer, footer_at)?;
        let counts: [u64; 4] = std::array::from_fn(|at| {
            footer.as_chunks::<8>().0.get(at).map_or(0, |bytes| u64::from_le_bytes(*bytes))
        });
        let [entries, buckets, blocks, packs] = counts;
        let meta_at = buckets.checked_add(1).and_then(|n| n.checked_mul(BUCKET_BYTES as u64));
        let meta_len = [(buckets, 8), (blocks, filter::BLOCK_BYTES), (packs, PACK_BYTES)]
            .into_iter()
            .try_fold(0u64, |sum, (n, each)| sum.checked_add(n.checked_mul(each as u64)?));
        let (Some(meta_at), Some(meta_len)) = (meta_at, meta_len) else {
            return Err(bad("impossible"));
        };
        let is_whole = meta_at.checked_add(meta_len) == Some(footer_at)
            && entries.div_ceil(BUCKET_ENTRIES as u64) == buckets
            && blocks > 0
            && packs <= u64::from(PACK_NUMBER_MAX)
            && meta_len - packs * PACK_BYTES as u64 <= bytes_max as u64;
        if !is_whole {
            return Err(bad("its length is not right, or too much for the memory"));
        }
        let mut meta = vec![0; meta_len as usize];
        file.read_exact_at(&mut meta, meta_at)?;
        if header != encode_header(bond.store, salt_of(&header))
            || footer[32..] != checksum(&header, &meta, &footer)
        {
            return Err(bad("of another store or version, or damaged"));
        }
        let (fences, rest) = meta.split_at(buckets as usize * 8);
        let (filter, packs) = rest.split_at(blocks as usize * filter::BLOCK_BYTES);
        Ok(Self {
            file,
            bond: bond.clone(),
            salt: salt_of(&header),
            entries,
            fences: fences.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect(),
            filter: Filter::decode(filter),
            packs: packs.as_chunks().0.iter().map(decode_pack).collect(),
        })
    }

    /// Returns the number of entries.
    pub fn entries(&self) -> usize {
        self.entries as usize
    }

    /// Returns the number and the trailer checksum of each pack whose records it has.
    pub fn packs(&self) -> &[(u32, PackSeal)] {
        &self.packs
    }

    /// Returns the size of its memory in bytes.
    pub fn bytes(&self) -> usize {
        self.fences.capacity() * 8
            + self.filter.bytes()
            + self.packs.capacity() * size_of::<(u32, PackSeal)>()
    }

    /// Returns the value of a hash. Returns `None` if the spill does not hold the hash. Errors: the
    /// file cannot be read; a bucket is damaged.
    pub fn get(&self, hash: PageHash) -> io::Result<Option<u64>> {
        if !self.filter.may_have(hash) {
            return Ok(None);
        }
        let Some(number) = self.bucket_of(hash.0[0]) else { return Ok(None) };
        let mut bucket = [0; BUCKET_BYTES];
        self.file.read_exact_at(&mut bucket, (number as u64 + 1) * BUCKET_BYTES as u64)?;
        let entries = self.checked(number, &bucket)?;
        let wanted = hash.to_bytes();
        let entry = entries.iter().find(|entry| entry[..16] == wanted);
        Ok(entry.map(|entry| self.bond.mask(self.salt, hash, decode_entry(entry).value)))
    }

    /// The last bucket whose first hash is not larger. Hashes are spread evenly, so it is close to
    /// where it would be if they had equal distances.
    fn bucket_of(&self, word: u64) -> Option<usize> {
        let all = self.fences.len();
        let guess = ((u128::from(word) * all as u128) >> 64) as usize;
        let mut step = 16;
        let (mut from, mut to) = (guess, guess);
        while from > 0 && self.fences.get(from).is_none_or(|fence| *fence > word) {
            from = from.saturating_sub(step);
            step *= 2;
        }
        step = 16;
        while to < all && self.fences.get(to).is_some_and(|fence| *fence <= word) {
            to = (to + step).min(all);
            step *= 2;
        }
        let near = self.fences.get(from..to)?;
        (from + near.partition_point(|fence| *fence <= word)).checked_sub(1)
    }

    /// The entries of a bucket, after its checksum matches.
    fn checked<'a>(
        &self,
        number: usize,
        bucket: &'a Bucket,
    ) -> io::Result<&'a [[u8; ENTRY_BYTES]]> {
        let (content, check) = bucket.split_at(BUCKET_BYTES - CHECK_BYTES);
        if check != bucket_check(self.salt, number, content) {
            return Err(bad("the checksum of a bucket does not match"));
        }
        let left = self.entries() - number * BUCKET_ENTRIES;
        let entries = content.as_chunks().0;
        Ok(entries.get(..left).unwrap_or(entries))
    }

    /// Returns an iterator over all entries, in the order of their hashes. Error: the file cannot
    /// be read.
    pub fn read(&self) -> io::Result<Entries<'_>> {
        let mut file = self.file.try_clone()?;
        file.seek(io::SeekFrom::Start(BUCKET_BYTES as u64))?;
        let file = BufReader::with_capacity(READ_AHEAD_BYTES, file);
        Ok(Entries { spill: self, file, number: 0, bucket: Vec::new(), at: 0 })
    }
}

/// An iterator over the entries of a spill.
pub struct Entries<'a> {
    spill: &'a Spill,
    file: BufReader<File>,
    number: usize,
    bucket: Vec<Slot>,
    at: usize,
}

impl Entries<'_> {
    /// Returns the next entry, which [`Self::pop`] removes. Returns `None` after the last one.
    /// Errors: the file cannot be read; a bucket is damaged.
    pub fn peek(&mut self) -> io::Result<Option<Slot>> {
        if self.at == self.bucket.len() && self.number < self.spill.fences.len() {
            let mut bucket = [0; BUCKET_BYTES];
            self.file.read_exact(&mut bucket)?;
            let entries = self.spill.checked(self.number, &bucket)?;
            self.bucket.clear();
            self.bucket.extend(entries.iter().map(decode_entry));
            for slot in &mut self.bucket {
                slot.value = self.spill.bond.mask(self.spill.salt, slot.hash, slot.value);
            }
            (self.number, self.at) = (self.number + 1, 0);
        }
        Ok(self.bucket.get(self.at).copied())
    }

    /// Moves to the next entry.
    pub fn pop(&mut self) {
        self.at += 1;
    }
}

/// Writes a spill, entry by entry.
pub struct SpillWriter {
    out: BufWriter<tempfile::NamedTempFile>,
    bond: Bond,
    salt: [u8; 16],
    bucket: Vec<u8>,
    last: Option<PageHash>,
    entries: usize,
    fences: Vec<u64>,
    filter: Filter,
}

impl SpillWriter {
    /// Begins a spill of at most `entries_max` entries in `folder`, which is created if it does not
    /// exist. Errors: the folder or the file cannot be created; the system gives no random numbers.
    pub fn new(folder: &Path, bond: &Bond, entries_max: usize) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
        let file = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(folder)?;
        let salt = keyframe_store_backend::random_bytes().map_err(io::Error::other)?;
        let mut out = BufWriter::with_capacity(READ_AHEAD_BYTES, file);
        out.write_all(&encode_header(bond.store, salt))?;
        Ok(Self {
            out,
            bond: bond.clone(),
            salt,
            bucket: Vec::with_capacity(BUCKET_BYTES),
            last: None,
            entries: 0,
            fences: Vec::with_capacity(entries_max.div_ceil(BUCKET_ENTRIES)),
            filter: Filter::new(entries_max),
        })
    }

    /// Appends an entry. Ignores an entry whose hash is not larger than that of the entry before.
    /// Error: the file cannot be written.
    pub fn push(&mut self, slot: Slot) -> io::Result<()> {
        if self.last.is_some_and(|last| last >= slot.hash) {
            return Ok(());
        }
        self.last = Some(slot.hash);
        if self.bucket.is_empty() {
            self.fences.push(slot.hash.0[0]);
        }
        self.filter.insert(slot.hash);
        self.bucket.extend_from_slice(&slot.hash.to_bytes());
        let value = self.bond.mask(self.salt, slot.hash, slot.value);
        self.bucket.extend_from_slice(&value.to_le_bytes());
        self.entries += 1;
        if self.bucket.len() == BUCKET_ENTRIES * ENTRY_BYTES { self.end_bucket() } else { Ok(()) }
    }

    fn end_bucket(&mut self) -> io::Result<()> {
        self.bucket.resize(BUCKET_BYTES - CHECK_BYTES, 0);
        let check = bucket_check(self.salt, self.fences.len() - 1, &self.bucket);
        self.out.write_all(&self.bucket)?;
        self.bucket.clear();
        self.out.write_all(&check)
    }

    /// Completes the file under the name `path`. `packs` are the numbers and checksums of the packs
    /// that the spill covers. Does not sync, because the file is a cache. Returns the completed
    /// spill. Error: the file cannot be written or renamed.
    pub fn finish(mut self, path: &Path, packs: Vec<(u32, PackSeal)>) -> io::Result<Spill> {
        if !self.bucket.is_empty() {
            self.end_bucket()?;
        }
        let mut meta = Vec::new();
        self.fences.iter().for_each(|fence| meta.extend_from_slice(&fence.to_le_bytes()));
        self.filter.encode(&mut meta);
        for (number, seal) in &packs {
            meta.extend_from_slice(&u64::from(*number).to_le_bytes());
            meta.extend_from_slice(seal);
        }
        let mut footer = [0; FOOTER_BYTES];
        let blocks = self.filter.bytes() / filter::BLOCK_BYTES;
        let counts = [self.entries, self.fences.len(), blocks, packs.len()];
        footer
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(counts)
            .for_each(|(to, n)| *to = (n as u64).to_le_bytes());
        let hash = checksum(&encode_header(self.bond.store, self.salt), &meta, &footer);
        footer[32..].copy_from_slice(&hash);
        self.out.write_all(&meta)?;
        self.out.write_all(&footer)?;
        let file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        let file = file.persist(path).map_err(|failed| failed.error)?;
        let (bond, salt, entries) = (self.bond, self.salt, self.entries as u64);
        Ok(Spill { file, bond, salt, entries, fences: self.fences, filter: self.filter, packs })
    }
}

/// The prefix of the name of a spill that is being written.
pub const TEMPORARY: &str = ".new-";

fn encode_header(store: [u8; 16], salt: [u8; 16]) -> Bucket {
    let mut header = [0; BUCKET_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..32].copy_from_slice(&store);
    header[32..48].copy_from_slice(&salt);
    header
}

fn salt_of(header: &Bucket) -> [u8; 16] {
    let mut salt = [0; 16];
    salt.copy_from_slice(&header[32..48]);
    salt
}

fn checksum(header: &Bucket, meta: &[u8], footer: &[u8; FOOTER_BYTES]) -> [u8; 32] {
    *blake3::Hasher::new().update(header).update(meta).update(&footer[..32]).finalize().as_bytes()
}

fn bucket_check(salt: [u8; 16], number: usize, content: &[u8]) -> [u8; CHECK_BYTES] {
    let seed = salt.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    xxh3_64_with_seed(content, seed.wrapping_add(number as u64)).to_le_bytes()
}

fn decode_entry(bytes: &[u8; ENTRY_BYTES]) -> Slot {
    let (mut hash, mut value) = ([0; 16], [0; 8]);
    hash.copy_from_slice(&bytes[..16]);
    value.copy_from_slice(&bytes[16..]);
    Slot { hash: PageHash::from_bytes(hash), value: u64::from_le_bytes(value) }
}

fn decode_pack(bytes: &[u8; PACK_BYTES]) -> (u32, PackSeal) {
    let (mut number, mut seal) = ([0; 4], [0; 16]);
    number.copy_from_slice(&bytes[..4]);
    seal.copy_from_slice(&bytes[8..]);
    (u32::from_le_bytes(number), seal)
}

fn bad(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}
