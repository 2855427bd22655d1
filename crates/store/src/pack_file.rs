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
use keyframe_store_format::record::{RECORD_BYTES_MAX, RECORD_HEADER_BYTES, Record};
use keyframe_units::{Page, ZERO_PAGE};
use std::sync::{Arc, OnceLock};

/// The largest number of bytes of one read. So few stay in the cache of a core until they are
/// decoded.
pub const READ_BYTES_MAX: u64 = 1 << 18;
/// Up to this many unwanted bytes between two records, reading them is cheaper than skipping them.
const GAP_BYTES_MAX: u64 = 32 << 10;

/// The longest pack that is read: 2^39 bytes of records, and their index.
const PACK_BYTES_MAX: u64 = 1 << 40;
/// The first read of a trailer. Each later one is as long as all reads before it, so a trailer that
/// the file does not have costs little memory.
const TAIL_BYTES: u64 = 1 << 20;

/// The most ranges and bytes of one prefetch hint.
const HINT_SPANS: usize = 32;
const HINT_BYTES: u64 = 4 << 20;

/// An open pack with a correct header.
#[derive(Debug)]
pub struct PackFile {
    /// The number of the pack.
    pub number: u32,
    /// Its name in errors.
    pub object: String,
    /// The open file.
    pub file: StoreFile,
    /// The bytes of the pack's header.
    pub header: [u8; PACK_HEADER_BYTES],
    /// The offset of the first record in the file, in bytes.
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

    /// Creates pack number `number`, whose header has been checked. `object` is its name in errors,
    /// and `first` the offset of its first record in bytes.
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

    /// Returns the dictionary of the pack's dense records, which is read once. The inner error, a
    /// text, is damage of the dictionary. Error: the backend fails.
    pub fn dictionary(&self) -> Result<Result<Arc<Dictionary>, String>> {
        if let Some(known) = self.dictionary.get() {
            return Ok(known.clone());
        }
        let len = self.first.saturating_sub(PACK_HEADER_BYTES as u64);
        let mut bytes = vec![0; len as usize];
        match self.file.read_at(PACK_HEADER_BYTES as u64, &mut bytes) {
            Ok(()) => {}
            Err(error) if error.is_damage() => return Ok(Err(error.to_string())),
            Err(error) => return Err(error),
        }
        let decode = || Dictionary::new(decode_dictionary(&bytes)?).map(Arc::new);
        Ok(self.dictionary.get_or_init(decode).clone())
    }

    /// Parses the record at `place`. `bytes` begin with the record. Errors: the record or the
    /// pack's dictionary is damaged; the backend fails.
    pub fn parse<'a>(&self, bytes: &'a [u8], place: PageRef) -> Result<Record<'a>> {
        let damaged = |problem| self.damaged_at(place, problem);
        let record = Record::parse(bytes, place).map_err(damaged)?;
        if !record.is_dense() {
            return Ok(record);
        }
        Ok(record.with_dictionary(self.dictionary()?.map_err(damaged)?))
    }

    /// Reads the trailer of a pack whose file has `len_bytes` bytes. A pack that was removed since
    /// it was opened counts as damaged. Error: the backend fails.
    pub fn ending(&self, len_bytes: u64) -> Result<PackEnding> {
        match self.trailer(len_bytes) {
            Err(Error::Damaged { problem, .. }) => Ok(PackEnding::Damaged(problem)),
            Err(error) if error.is_damage() || error.is_not_found() => {
                Ok(PackEnding::Damaged(error.to_string()))
            }
            other => other,
        }
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

    fn trailer(&self, len_bytes: u64) -> Result<PackEnding> {
        let damaged = |problem: String| Error::damaged(&self.object, problem);
        let Some(footer_at) =
            len_bytes.checked_sub(FOOTER_BYTES as u64).filter(|at| *at >= PACK_HEADER_BYTES as u64)
        else {
            return Ok(PackEnding::Unfinished);
        };
        if len_bytes > PACK_BYTES_MAX {
            let problem = format!("{len_bytes} bytes long; at most {PACK_BYTES_MAX} make sense");
            return Err(damaged(problem));
        }
        let mut footer = [0; FOOTER_BYTES];
        self.file.read_at(footer_at, &mut footer)?;
        let Some(footer) = parse_footer(&footer, len_bytes) else {
            return Ok(PackEnding::Unfinished);
        };
        let footer = footer.map_err(damaged)?;
        if footer.entries > footer.records_end / RECORD_HEADER_BYTES as u64 {
            return Err(damaged("its trailer lists more records than fit before it".into()));
        }
        let tail = self.tail(footer.records_end, len_bytes)?;
        let entries = decode_trailer(&self.header, &tail, &footer).map_err(damaged)?;
        Ok(PackEnding::Closed { entries, records_end: footer.records_end })
    }

    /// Reads the bytes from offset `from` to offset `end`. Memory follows the bytes that arrive,
    /// because the length that a server or a sparse file tells may be false.
    fn tail(&self, from: u64, end: u64) -> Result<Vec<u8>> {
        let mut tail = Vec::new();
        loop {
            let have = tail.len();
            let at = from + have as u64;
            if at >= end {
                return Ok(tail);
            }
            tail.resize(have + (end - at).min(TAIL_BYTES.max(have as u64)) as usize, 0);
            self.file.read_at(at, tail.get_mut(have..).unwrap_or_default())?;
        }
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
            let record = self.parse(bytes, *to)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store_backend::{self as backend, ReadFile};
    use keyframe_store_format::pack::ENTRY_BYTES;
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A file that has a length and a footer, and no other bytes.
    #[derive(Debug)]
    struct OnlyFooter {
        len_bytes: u64,
        footer: [u8; FOOTER_BYTES],
        longest_read: AtomicUsize,
    }

    impl ReadFile for OnlyFooter {
        fn len_bytes(&self) -> backend::Result<u64> {
            Ok(self.len_bytes)
        }

        fn read_at(&self, offset: u64, buffer: &mut [u8]) -> backend::Result<()> {
            self.longest_read.fetch_max(buffer.len(), Ordering::Relaxed);
            if buffer.len() == FOOTER_BYTES && offset + FOOTER_BYTES as u64 == self.len_bytes {
                buffer.copy_from_slice(&self.footer);
                return Ok(());
            }
            let source = io::Error::from(io::ErrorKind::UnexpectedEof);
            Err(backend::Error::Io { object: "pack".into(), operation: "read", source })
        }
    }

    /// The problem of a pack whose footer tells these numbers, and the length of the longest read.
    fn problem_of(entries: u64, records_end: u64) -> (String, usize) {
        let index_end = records_end + entries * ENTRY_BYTES as u64;
        let len_bytes = index_end.next_multiple_of(FOOTER_BYTES as u64) + FOOTER_BYTES as u64;
        let mut footer = [0; FOOTER_BYTES];
        footer[..8].copy_from_slice(b"KF:INDEX");
        footer[8..16].copy_from_slice(&entries.to_le_bytes());
        footer[16..24].copy_from_slice(&records_end.to_le_bytes());
        let file = Arc::new(OnlyFooter { len_bytes, footer, longest_read: AtomicUsize::new(0) });
        let open = StoreFile::from(Arc::clone(&file) as Arc<dyn ReadFile>);
        let first = PACK_HEADER_BYTES as u64;
        let pack = PackFile::with_header(1, "pack".into(), open, [0; PACK_HEADER_BYTES], first);
        match pack.ending(len_bytes).unwrap() {
            PackEnding::Damaged(problem) => (problem, file.longest_read.load(Ordering::Relaxed)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_trailer_gets_memory_only_as_its_bytes_arrive() {
        let (problem, longest_read) = problem_of(1 << 30, 28 << 30);
        assert!(problem.contains("unexpected end of file"), "{problem}");
        assert_eq!(longest_read as u64, TAIL_BYTES);
        let (problem, longest_read) = problem_of(1 << 30, 64);
        assert!(problem.contains("more records than fit"), "{problem}");
        assert_eq!(longest_read, FOOTER_BYTES);
        let (problem, longest_read) = problem_of(0, 1 << 41);
        assert!(problem.contains("at most"), "{problem}");
        assert_eq!(longest_read, 0);
    }
}
