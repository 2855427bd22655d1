//! Reading packs: what state a pack is in, its records in bulk and one after the other.
//!
//! ```text
//!   closed       header, records, trailer                       its index is trusted for deduplication
//!   unfinished   header, records, perhaps a torn tail            its writer died, or is still at it: read record by record
//!   unreadable   the header is not right                         nothing of it is used
//! ```

use crate::dictionary::Dictionary;
use crate::files::OpenFile;
use crate::identity::{PageHash, PageRef};
use crate::index::Seal;
use crate::record::{
    Entry, FOOTER_BYTES, PACK_HEADER_BYTES, RECORD_BYTES_MAX, Record, check_pack_header,
    decode_dictionary, decode_trailer, parse_footer,
};
use crate::store::Inner;
use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::layout;
use keyframe_units::{Page, ZERO_PAGE};
use std::sync::{Arc, OnceLock};

/// One read covers at most this much, which stays in the cache of a core until it is decoded.
const READ_BYTES_MAX: u64 = 1 << 18;
/// Unwanted bytes between two records that are cheaper to read than to skip.
const GAP_BYTES_MAX: u64 = 32 << 10;

/// What is said at once to be read next.
const HINT_SPANS: usize = 32;
const HINT_BYTES: u64 = 4 << 20;

/// A pack whose header is right.
#[derive(Debug)]
pub struct PackFile {
    pub number: u32,
    pub object: String,
    pub file: OpenFile,
    pub header: [u8; PACK_HEADER_BYTES],
    /// Where the first record is.
    pub first: u64,
    /// Read when a record needs it.
    dictionary: OnceLock<Result<Arc<Dictionary>, String>>,
}

/// What the end of a pack says.
#[derive(Debug)]
pub enum Ending {
    /// A trailer that holds: the index, and where the records end.
    Closed { entries: Vec<Entry>, records_end: u64 },
    /// No trailer.
    Unfinished,
    /// Something that was a trailer.
    Damaged(String),
}

/// What a record holds.
#[derive(Debug)]
pub enum Content<'a> {
    /// A page, and the hash that its record says.
    Plain(&'a Page, PageHash),
    /// A page that is still to be made from other records.
    Derived(&'a Record<'a>),
}

impl PackFile {
    /// Opens pack `number` and checks its header.
    pub fn open(inner: &Inner, number: u32) -> Result<Self> {
        let name = layout::pack(number);
        let object = inner.backend.describe(&name);
        let file = inner.backend.open(&name).map_err(|e| {
            if e.is_not_found() { Error::damaged(&object, "the pack is missing") } else { e }
        })?;
        let mut header = [0; PACK_HEADER_BYTES];
        let len = file.len_bytes()?;
        if len < PACK_HEADER_BYTES as u64 {
            return Err(Error::damaged(object, "shorter than a pack's header"));
        }
        file.read_at(0, &mut header)?;
        let first = check_pack_header(&header, inner.config.id, number, &object)?;
        Ok(Self::of(number, object, file, header, first))
    }

    /// Of a header that holds.
    pub fn of(
        number: u32,
        object: String,
        file: OpenFile,
        header: [u8; PACK_HEADER_BYTES],
        first: u64,
    ) -> Self {
        Self { number, object, file, header, first, dictionary: OnceLock::new() }
    }

    /// It was recompressed: it has a dictionary, if only an empty one.
    pub fn is_dense(&self) -> bool {
        self.first > PACK_HEADER_BYTES as u64
    }

    /// What its dense records are read with.
    pub fn dictionary(&self) -> Result<Arc<Dictionary>, String> {
        let read = || {
            let len = self.first.saturating_sub(PACK_HEADER_BYTES as u64);
            let mut bytes = vec![0; len as usize];
            self.file.read_at(PACK_HEADER_BYTES as u64, &mut bytes).map_err(|e| e.to_string())?;
            Dictionary::new(decode_dictionary(&bytes)?).map(Arc::new)
        };
        self.dictionary.get_or_init(read).clone()
    }

    /// Parses the record at `place`, with which `bytes` begin.
    pub fn parse<'a>(&self, bytes: &'a [u8], place: PageRef) -> Result<Record<'a>, String> {
        let record = Record::parse(bytes, place)?;
        if record.is_dense() { Ok(record.with(self.dictionary()?)) } else { Ok(record) }
    }

    /// Reads the trailer of a pack of `len_bytes`.
    pub fn ending(&self, len_bytes: u64) -> Ending {
        self.trailer(len_bytes).unwrap_or_else(Ending::Damaged)
    }

    /// What its trailer is known by, unless it has none. The trailer itself is not looked at.
    pub fn seal(&self) -> Result<Option<Seal>> {
        let len_bytes = self.file.len_bytes()?;
        let Some(at) = len_bytes.checked_sub(FOOTER_BYTES as u64) else { return Ok(None) };
        let mut footer = [0; FOOTER_BYTES];
        self.file.read_at(at, &mut footer)?;
        Ok(parse_footer(&footer, len_bytes).and_then(Result::ok).map(|_| seal_of(&footer)))
    }

    fn trailer(&self, len_bytes: u64) -> Result<Ending, String> {
        let Some(footer_at) =
            len_bytes.checked_sub(FOOTER_BYTES as u64).filter(|at| *at >= PACK_HEADER_BYTES as u64)
        else {
            return Ok(Ending::Unfinished);
        };
        let mut footer = [0; FOOTER_BYTES];
        self.file.read_at(footer_at, &mut footer).map_err(|e| e.to_string())?;
        let Some(footer) = parse_footer(&footer, len_bytes) else { return Ok(Ending::Unfinished) };
        let footer = footer?;
        let mut tail = vec![0; (len_bytes - footer.records_end) as usize];
        self.file.read_at(footer.records_end, &mut tail).map_err(|e| e.to_string())?;
        let entries = decode_trailer(&self.header, &tail, &footer)?;
        Ok(Ending::Closed { entries, records_end: footer.records_end })
    }

    /// Walks the records from `from` on, up to `end` or the first whose bytes are not whole;
    /// returns where that is, and why. `visit` hears of each verified one, and of those whose bytes
    /// are whole but not what they stand for: offset and problem. Bytes that the medium does not
    /// give are as bad as wrong ones.
    pub fn walk(
        &self,
        inner: &Inner,
        from: u64,
        end: u64,
        visit: &mut dyn FnMut(Result<Entry, (u64, String)>),
    ) -> Option<(u64, String)> {
        let mut page = ZERO_PAGE;
        let mut buffer = Vec::new();
        let (mut at, mut buffer_at) = (from, from);
        while at < end {
            let have = (buffer_at + buffer.len() as u64).saturating_sub(at);
            let want = (end - at).min(RECORD_BYTES_MAX as u64);
            if have < want {
                buffer_at = at;
                buffer.resize((end - at).min(READ_BYTES_MAX) as usize, 0);
                if self.file.read_at(at, &mut buffer).is_err() {
                    // The bad place may lie further on: ask for no more than this record can take.
                    buffer.resize(want as usize, 0);
                    if let Err(error) = self.file.read_at(at, &mut buffer) {
                        return Some((at, error.to_string()));
                    }
                }
            }
            let bytes = buffer.get((at - buffer_at) as usize..).unwrap_or_default();
            let place = PageRef::new(self.number, at);
            let record = match Record::parse(bytes, place) {
                Ok(record) => record,
                Err(problem) => return Some((at, problem)),
            };
            let restored =
                self.parse(bytes, place).and_then(|whole| inner.restore(&whole, place, &mut page));
            visit(match restored {
                Ok(()) => Ok(Entry::new(record.hash, at, record.kind)),
                Err(problem) => Err((at, problem)),
            });
            at += record.len_bytes() as u64;
        }
        None
    }

    /// Reads the records that `wanted` lists (rising references, all of this pack, each with
    /// something of the caller's), in few large reads, and gives each to `sink`.
    pub fn read_records<T: Copy, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        buffer: &mut Vec<u8>,
        sink: &mut dyn FnMut(PageRef, T, Content<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut page = ZERO_PAGE;
        let mut decoded = (PageRef::ZERO, PageHash([0; 2]));
        self.read_bytes(wanted, buffer, |at, bytes| {
            let Some((to, what)) = wanted.get(at) else { return Ok(()) };
            if decoded.0 == *to {
                return sink(*to, *what, Content::Plain(&page, decoded.1));
            }
            let record = self.parse(bytes, *to).map_err(|problem| self.damaged_at(*to, problem))?;
            if record.kind.is_derived() {
                return sink(*to, *what, Content::Derived(&record));
            }
            record.decompress(&mut page).map_err(|problem| self.damaged_at(*to, problem))?;
            decoded = (*to, record.hash);
            sink(*to, *what, Content::Plain(&page, record.hash))
        })
    }

    /// What is wrong with a record.
    pub fn damaged_at(&self, to: PageRef, problem: impl Into<String>) -> Error {
        Error::damaged(format!("{} at offset {}", self.object, to.offset()), problem)
    }

    /// The bytes with which each of these records begins, one after the other, as
    /// [`Self::read_records`] reads them: `sink` gets the number of each in `wanted`.
    pub fn read_bytes<T, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        buffer: &mut Vec<u8>,
        mut sink: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let len_bytes = self.file.len_bytes()?;
        let mut done = 0;
        let mut rest = wanted;
        let mut hinted = if self.file.wants_prefetch() { 0 } else { usize::MAX };
        while let Some((start, _)) = rest.first() {
            if done >= hinted {
                hinted = done + self.hint(rest, len_bytes);
            }
            let mut count = group_len(rest);
            let last = rest.get(count - 1).map_or(*start, |(to, _)| *to);
            let span = match self.read_span(*start, last, len_bytes, buffer) {
                // What the medium does not give may lie between the records wanted.
                Err(_) if count > 1 => {
                    count = 1;
                    self.read_span(*start, *start, len_bytes, buffer)?
                }
                other => other?,
            };
            let span = buffer.get(..span).unwrap_or_default();
            let (group, behind) = rest.split_at(count);
            rest = behind;
            for (to, _) in group {
                let bytes = span.get((to.offset() - start.offset()) as usize..).unwrap_or_default();
                sink(done, bytes)?;
                done += 1;
            }
        }
        Ok(())
    }

    /// Says what will be read of the first of these records; of how many. One read alone needs no
    /// hint.
    fn hint<T>(&self, wanted: &[(PageRef, T)], len_bytes: u64) -> usize {
        let (mut spans, mut bytes, mut count) = (Vec::new(), 0, 0);
        while let Some((first, rest)) = wanted.get(count).zip(wanted.get(count..)) {
            if spans.len() == HINT_SPANS || bytes >= HINT_BYTES {
                break;
            }
            count += group_len(rest);
            let last = wanted.get(count - 1).map_or(first.0, |(to, _)| *to);
            let end = (last.offset() + RECORD_BYTES_MAX as u64).min(len_bytes);
            bytes += end.saturating_sub(first.0.offset());
            spans.push(first.0.offset()..end.max(first.0.offset()));
        }
        if spans.len() > 1 {
            self.file.prefetch(&spans);
        }
        count
    }

    /// Fills the beginning of `buffer` with everything from the record at `first` to the end of the
    /// one at `last`; how much that is. What the buffer held before is not cleared.
    fn read_span(
        &self,
        first: PageRef,
        last: PageRef,
        len_bytes: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<usize> {
        if first.offset() >= len_bytes {
            let object = format!("{} at offset {}", self.object, first.offset());
            return Err(Error::damaged(object, format!("the pack ends at {len_bytes} bytes")));
        }
        let end = (last.offset() + RECORD_BYTES_MAX as u64).min(len_bytes);
        let len = (end - first.offset()) as usize;
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        self.file.read_at(first.offset(), buffer.get_mut(..len).unwrap_or_default())?;
        Ok(len)
    }
}

/// What a trailer is known by: a part of its checksum.
pub fn seal_of(footer: &[u8; FOOTER_BYTES]) -> Seal {
    footer[32..].first_chunk().copied().unwrap_or_default()
}

/// How many of the first records one read should fetch; at least one.
fn group_len<T>(wanted: &[(PageRef, T)]) -> usize {
    let Some((first, _)) = wanted.first() else { return 1 };
    let far = wanted.windows(2).position(|pair| match pair {
        [(a, _), (b, _)] => {
            b.offset() - a.offset() > GAP_BYTES_MAX || b.offset() - first.offset() >= READ_BYTES_MAX
        }
        _ => true,
    });
    far.map_or(wanted.len(), |at| at + 1)
}

impl Inner {
    /// A pack, opened once and kept.
    pub fn pack(&self, number: u32) -> Result<Arc<PackFile>> {
        let mut packs = self.packs.lock().ignore_poison();
        if let Some(pack) = packs.get(&number) {
            return Ok(pack.clone());
        }
        let pack = Arc::new(PackFile::open(self, number)?);
        packs.insert(number, pack.clone());
        Ok(pack)
    }
}
