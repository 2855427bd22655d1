//! Reading a pack: its state, and its records in bulk.
//!
//! ```text
//!   closed       header, records, trailer                 its index is trusted for deduplication
//!   unfinished   header, records, perhaps a torn tail     its writer died or still writes: read record by record
//!   unreadable   the header is damaged                    nothing of it is used
//! ```

use crate::files::{StoreFile, StoreFiles};
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_store_format::dictionary::Dictionary;
use keyframe_store_format::identity::StoreId;
use keyframe_store_format::pack::{
    FOOTER_BYTES, PackEntry, PackSeal, check_pack_header, decode_dictionary, decode_trailer,
    parse_footer, seal_of,
};
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PACK_HEADER_BYTES;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{RECORD_BYTES_MAX, Record};
use keyframe_units::{Page, ZERO_PAGE};
use std::sync::{Arc, OnceLock};

/// The largest number of bytes of one read. So few stay in the cache of a core until they are
/// decoded.
pub const READ_BYTES_MAX: u64 = 1 << 18;
/// Up to this many unwanted bytes between two records, reading them is cheaper than skipping them.
const GAP_BYTES_MAX: u64 = 32 << 10;

/// The most ranges and bytes of one prefetch hint.
const HINT_SPANS: usize = 32;
const HINT_BYTES: u64 = 4 << 20;

/// An open pack with a correct header.
#[derive(Debug)]
pub struct PackFile {
    pub number: u32,
    /// Its name in errors.
    pub object: String,
    pub file: StoreFile,
    pub header: [u8; PACK_HEADER_BYTES],
    /// The offset of the first record.
    pub first: u64,
    /// Read when the first record needs it.
    dictionary: OnceLock<Result<Arc<Dictionary>, String>>,
}

/// The end of a pack: closed, unfinished or damaged.
#[derive(Debug)]
pub enum PackEnding {
    /// A correct trailer: the index, and the offset at which the records end.
    Closed { entries: Vec<PackEntry>, records_end: u64 },
    /// No trailer.
    Unfinished,
    /// A damaged trailer, and what is wrong with it.
    Damaged(String),
}

/// The content of a record that was read.
#[derive(Debug)]
pub enum PageContent<'a> {
    /// A page, and the hash in its record.
    Plain(&'a Page, PageHash),
    /// A page that has to be made from other records.
    Derived(&'a Record<'a>),
}

impl PackFile {
    /// Opens pack `number` of the store `id` and checks its header. Errors: [`Error::Damaged`] if
    /// the pack is missing or its header is damaged; the backend fails.
    pub fn open(files: &StoreFiles, id: StoreId, number: u32) -> Result<Self> {
        let name = layout::pack(number);
        let object = files.describe(&name);
        let file = files.open(&name).map_err(|e| {
            if e.is_not_found() { Error::damaged(&object, "the pack is missing") } else { e }
        })?;
        let mut header = [0; PACK_HEADER_BYTES];
        let len = file.len_bytes()?;
        if len < PACK_HEADER_BYTES as u64 {
            return Err(Error::damaged(object, "shorter than a pack's header"));
        }
        file.read_at(0, &mut header)?;
        let first = check_pack_header(&header, id, number, &object)?;
        Ok(Self::with_header(number, object, file, header, first))
    }

    /// Creates a pack whose header has been checked.
    pub fn with_header(
        number: u32,
        object: String,
        file: StoreFile,
        header: [u8; PACK_HEADER_BYTES],
        first: u64,
    ) -> Self {
        Self { number, object, file, header, first, dictionary: OnceLock::new() }
    }

    /// Returns true if the pack was recompressed. Then it has a dictionary, which may be empty.
    pub fn is_dense(&self) -> bool {
        self.first > PACK_HEADER_BYTES as u64
    }

    /// Returns the dictionary of the pack's dense records, which is read once. Error, as a text:
    /// the dictionary cannot be read or is damaged.
    pub fn dictionary(&self) -> Result<Arc<Dictionary>, String> {
        let read = || {
            let len = self.first.saturating_sub(PACK_HEADER_BYTES as u64);
            let mut bytes = vec![0; len as usize];
            self.file.read_at(PACK_HEADER_BYTES as u64, &mut bytes).map_err(|e| e.to_string())?;
            Dictionary::new(decode_dictionary(&bytes)?).map(Arc::new)
        };
        self.dictionary.get_or_init(read).clone()
    }

    /// Parses the record at `place`. `bytes` begin with the record. Errors, as a text: the record
    /// or the pack's dictionary is damaged.
    pub fn parse<'a>(&self, bytes: &'a [u8], place: PageRef) -> Result<Record<'a>, String> {
        let record = Record::parse(bytes, place)?;
        if record.is_dense() { Ok(record.with_dictionary(self.dictionary()?)) } else { Ok(record) }
    }

    /// Reads the trailer of a pack whose file has `len_bytes` bytes.
    pub fn ending(&self, len_bytes: u64) -> PackEnding {
        self.trailer(len_bytes).unwrap_or_else(PackEnding::Damaged)
    }

    /// Returns the checksum of the pack's trailer. Returns `None` if it has no trailer. Reads only
    /// the footer. Error: the backend fails.
    pub fn seal(&self) -> Result<Option<PackSeal>> {
        let len_bytes = self.file.len_bytes()?;
        let Some(at) = len_bytes.checked_sub(FOOTER_BYTES as u64) else { return Ok(None) };
        let mut footer = [0; FOOTER_BYTES];
        self.file.read_at(at, &mut footer)?;
        Ok(parse_footer(&footer, len_bytes).and_then(Result::ok).map(|_| seal_of(&footer)))
    }

    fn trailer(&self, len_bytes: u64) -> Result<PackEnding, String> {
        let Some(footer_at) =
            len_bytes.checked_sub(FOOTER_BYTES as u64).filter(|at| *at >= PACK_HEADER_BYTES as u64)
        else {
            return Ok(PackEnding::Unfinished);
        };
        let mut footer = [0; FOOTER_BYTES];
        self.file.read_at(footer_at, &mut footer).map_err(|e| e.to_string())?;
        let Some(footer) = parse_footer(&footer, len_bytes) else {
            return Ok(PackEnding::Unfinished);
        };
        let footer = footer?;
        let mut tail = vec![0; (len_bytes - footer.records_end) as usize];
        self.file.read_at(footer.records_end, &mut tail).map_err(|e| e.to_string())?;
        let entries = decode_trailer(&self.header, &tail, &footer)?;
        Ok(PackEnding::Closed { entries, records_end: footer.records_end })
    }

    /// Reads the records at `wanted` in few large reads. The references are in rising order and all
    /// of this pack. Passes each record to `sink` with its reference and the caller's value.
    /// Errors: a record is damaged; the backend fails; an error of `sink`.
    pub fn read_records<T: Copy, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        buffer: &mut Vec<u8>,
        sink: &mut dyn FnMut(PageRef, T, PageContent<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut page = ZERO_PAGE;
        let mut decoded = (PageRef::ZERO, PageHash([0; 2]));
        self.read_bytes(wanted, buffer, |at, bytes| {
            let Some((to, what)) = wanted.get(at) else { return Ok(()) };
            if decoded.0 == *to {
                return sink(*to, *what, PageContent::Plain(&page, decoded.1));
            }
            let record = self.parse(bytes, *to).map_err(|problem| self.damaged_at(*to, problem))?;
            if record.kind.is_derived() {
                return sink(*to, *what, PageContent::Derived(&record));
            }
            record.decompress(&mut page).map_err(|problem| self.damaged_at(*to, problem))?;
            decoded = (*to, record.hash);
            sink(*to, *what, PageContent::Plain(&page, record.hash))
        })
    }

    /// Returns the error of a damaged record at `to`.
    pub fn damaged_at(&self, to: PageRef, problem: impl Into<String>) -> Error {
        Error::damaged(format!("{} at offset {}", self.object, to.offset()), problem)
    }

    /// Reads the bytes of the records at `wanted` as [`Self::read_records`] does. Passes to `sink`
    /// the index of each record in `wanted`, and bytes that begin with the record. Errors: the
    /// backend fails; an error of `sink`.
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
                // The unreadable bytes may lie between the wanted records.
                Err(_) if count > 1 => {
                    count = 1;
                    self.read_span(*start, *start, len_bytes, buffer)?
                }
                other => other?,
            };
            let span = buffer.get(..span).unwrap_or_default();
            let (group, others) = rest.split_at(count);
            rest = others;
            for (to, _) in group {
                let bytes = span.get((to.offset() - start.offset()) as usize..).unwrap_or_default();
                sink(done, bytes)?;
                done += 1;
            }
        }
        Ok(())
    }

    /// Tells the file which ranges will be read next; returns for how many of the records. A single
    /// read needs no hint.
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

    /// Reads all bytes from the record at `first` to the end of the one at `last` into `buffer`;
    /// returns their number. Does not clear the rest of the buffer.
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

/// The number of records that the next read fetches; at least one.
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
