//! The pack that a writer appends to.

use crate::files::NewFile;
use keyframe_store_format::codec::Codec;
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::{PACK_HEADER_BYTES, PageRef};
use keyframe_store_format::record::{RecordKind, append_record};

/// The pack that the writer appends to.
#[derive(Debug)]
pub struct OpenPack {
    pub number: u32,
    pub file: NewFile,
    pub header: [u8; PACK_HEADER_BYTES],
    /// Records that are not in the file yet. The first one belongs at the offset `flushed`.
    pub buffer: Vec<u8>,
    /// The number of bytes that were written to the file.
    pub flushed: u64,
    /// The number of bytes that are durable.
    pub synced: u64,
    /// The number of bytes that sealed checkpoints may need, durable or not. They stay, whatever
    /// fails.
    pub sealed: u64,
    /// The entries of all records of the pack, in rising order of offset.
    pub entries: Vec<PackEntry>,
}

impl OpenPack {
    /// Returns the offset of the next record.
    pub fn end(&self) -> u64 {
        self.flushed + self.buffer.len() as u64
    }

    /// Appends a record with this hash, kind, codec and payload. Returns its length in bytes.
    pub fn append(&mut self, hash: PageHash, kind: RecordKind, payload: (Codec, &[u8])) -> u64 {
        let place = PageRef::new(self.number, self.end());
        let before = self.buffer.len();
        append_record(&mut self.buffer, place, hash, kind, payload);
        self.entries.push(PackEntry::new(hash, place.offset(), kind));
        (self.buffer.len() - before) as u64
    }

    /// Returns the buffered bytes from the record at `at` on; `None` if the record is in the file.
    pub fn unflushed(&self, at: PageRef) -> Option<&[u8]> {
        let at = at.offset().checked_sub(self.flushed)?;
        self.buffer.get(at as usize..)
    }
}
