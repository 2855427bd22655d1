//! Appending pages to packs, each content once.
//!
//! ```text
//!             put                    buffer full             seal, or pack full
//!   page ──▶ index knows it? ──no──▶ buffer ──append──▶ file ──────sync──────▶ durable
//!                 │yes               |<- entries from `flushed` ->|<- from `synced` ->|
//!                 ▼
//!              its PageRef
//! ```
//!
//! Invariants: the index holds only records that are verified (an unfinished pack, walked), under a trailer, or in the
//! open pack and due to become durable with the next sync; a record that failed to get there leaves the index before the
//! error is returned. Only one pack is open, so that one sync makes all of a checkpoint durable.

use crate::backend::Growing;
use crate::codec::PageCompressor;
use crate::identity::{PACK_NUMBER_MAX, PageHash, PageRef};
use crate::pack_file::{Ending, PackFile};
use crate::record::{Entry, PACK_HEADER_BYTES, append_record, encode_pack_header, encode_trailer};
use crate::store::Inner;
use crate::writer::Tuning;
use crate::{Error, Result, names};
use keyframe_units::Page;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Where a page went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// Its content was in the store already.
    Known(PageRef),
    /// A new record of this many bytes.
    New(PageRef, u64),
}

/// The packs of a store, as their one writer sees them.
#[derive(Debug)]
pub struct PackWriter {
    inner: Arc<Inner>,
    index: FxHashMap<PageHash, PageRef>,
    next_pack: u32,
    open: Option<OpenPack>,
    compressor: PageCompressor,
    tuning: Tuning,
}

#[derive(Debug)]
struct OpenPack {
    number: u32,
    file: Box<dyn Growing>,
    header: [u8; PACK_HEADER_BYTES],
    /// Records that the file does not have yet; they belong at `flushed`.
    buffer: Vec<u8>,
    /// Bytes in the file, known to be there.
    flushed: u64,
    /// Bytes known to be durable.
    synced: u64,
    /// Every record of the pack, rising.
    entries: Vec<Entry>,
}

impl PackWriter {
    /// Reads the indexes of all packs. Unfinished ones are read whole, and synced: what can be read of them now may
    /// still be in memory alone.
    pub fn new(inner: Arc<Inner>, tuning: Tuning) -> Result<Self> {
        let mut numbers: Vec<u32> =
            inner.backend.list(names::PACKS)?.iter().filter_map(|file| names::parse_pack(file)).collect();
        numbers.sort_unstable();
        let next_pack = numbers.last().map_or(1, |last| last + 1);
        let compressor = PageCompressor::new();
        let mut this = Self { inner, index: FxHashMap::default(), next_pack, open: None, compressor, tuning };
        for number in numbers {
            this.learn(number)?;
        }
        Ok(this)
    }

    fn learn(&mut self, number: u32) -> Result<()> {
        let pack = match PackFile::open(&self.inner, number) {
            Ok(pack) => pack,
            // Nothing of it is used; `check` tells whom that hurts.
            Err(Error::Damaged { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let len_bytes = pack.file.len_bytes()?;
        let entries = match pack.ending(len_bytes) {
            Ending::Closed { entries, .. } => entries,
            Ending::Unfinished | Ending::Damaged(_) => {
                let mut entries = Vec::new();
                let from = PACK_HEADER_BYTES as u64;
                pack.walk(&self.inner.config.key, from, len_bytes, &mut |entry| entries.push(entry));
                if !entries.is_empty() {
                    self.inner.backend.sync(&names::pack(number))?;
                }
                entries
            }
        };
        for (hash, offset) in entries {
            self.index.entry(hash).or_insert(PageRef::new(number, offset));
        }
        Ok(())
    }

    /// Makes sure that the store holds the page, which is not zero. It is durable after the next [`Self::sync`].
    pub fn put(&mut self, page: &Page) -> Result<Placed> {
        let hash = PageHash::of(&self.inner.config.key, page);
        if let Some(known) = self.index.get(&hash) {
            return Ok(Placed::Known(*known));
        }
        if self.open.as_ref().is_some_and(|pack| pack.end() >= self.tuning.pack_bytes_max) {
            self.close()?;
        }
        let mut pack = match self.open.take() {
            Some(pack) => pack,
            None => self.create()?,
        };
        let place = PageRef::new(pack.number, pack.end());
        let before = pack.buffer.len();
        let (codec, payload) = self.compressor.compress(page);
        append_record(&mut pack.buffer, place, hash, codec, payload);
        let len_bytes = (pack.buffer.len() - before) as u64;
        pack.entries.push((hash, place.offset()));
        self.index.insert(hash, place);
        let full = pack.buffer.len() >= self.tuning.buffer_bytes;
        self.open = Some(pack);
        if full {
            self.flush()?;
        }
        Ok(Placed::New(place, len_bytes))
    }

    /// Makes everything put so far durable.
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        let Some(pack) = self.open.as_mut().filter(|pack| pack.flushed > pack.synced) else {
            return Ok(());
        };
        match pack.file.sync() {
            Ok(()) => {
                pack.synced = pack.flushed;
                Ok(())
            }
            Err(error) => {
                // The kernel may have dropped the pages and will not say so again: nothing since the last sync counts.
                // Cutting the file also takes them out of the page cache, where a later reader would find them well.
                let synced = pack.synced;
                let _ = pack.file.truncate(synced);
                self.retire();
                Err(error)
            }
        }
    }

    /// Closes the open pack with its trailer. Where only the trailer fails, the pack stays behind without one: what it
    /// holds is durable.
    pub fn close(&mut self) -> Result<()> {
        self.sync()?;
        let Some(mut pack) = self.open.take() else { return Ok(()) };
        let trailer = encode_trailer(&pack.header, &pack.entries, pack.flushed);
        let written = pack
            .file
            .append(&trailer.index)
            .and_then(|()| pack.file.sync())
            .and_then(|()| pack.file.append(&trailer.footer))
            .and_then(|()| pack.file.sync());
        if written.is_err() {
            let _ = pack.file.truncate(pack.flushed);
        }
        written
    }

    fn create(&mut self) -> Result<OpenPack> {
        let number = self.next_pack;
        if number > PACK_NUMBER_MAX {
            return Err(Error::PacksExhausted { object: self.inner.backend.describe(names::PACKS) });
        }
        // Never tried twice: a failed attempt may have left a file.
        self.next_pack += 1;
        let name = names::pack(number);
        let mut file = self.inner.backend.create(&name)?;
        let header = encode_pack_header(self.inner.config.id, number);
        if let Err(error) = file.append(&header) {
            let _ = self.inner.backend.remove(&name);
            return Err(error);
        }
        let buffer = Vec::with_capacity(self.tuning.buffer_bytes);
        let flushed = header.len() as u64;
        Ok(OpenPack { number, file, header, buffer, flushed, synced: 0, entries: Vec::new() })
    }

    /// Brings the buffer into the file; on failure its records are forgotten.
    fn flush(&mut self) -> Result<()> {
        let Some(pack) = self.open.as_mut().filter(|pack| !pack.buffer.is_empty()) else { return Ok(()) };
        let written = pack.file.append(&pack.buffer);
        if written.is_ok() {
            pack.flushed += pack.buffer.len() as u64;
            pack.buffer.clear();
            return Ok(());
        }
        pack.buffer.clear();
        let flushed = pack.flushed;
        let cut = pack.file.truncate(flushed);
        self.forget_from(flushed);
        if cut.is_err() {
            self.retire();
        }
        written
    }

    /// Gives up the open pack: what is durable of it stays known, the rest is forgotten.
    fn retire(&mut self) {
        if let Some(synced) = self.open.as_ref().map(|pack| pack.synced) {
            self.forget_from(synced);
            self.open = None;
        }
    }

    /// Forgets the records of the open pack from `offset` on.
    fn forget_from(&mut self, offset: u64) {
        let Some(pack) = self.open.as_mut() else { return };
        let keep = pack.entries.partition_point(|(_, at)| *at < offset);
        for (hash, _) in pack.entries.drain(keep..) {
            self.index.remove(&hash);
        }
    }
}

impl OpenPack {
    /// Where the next record goes.
    fn end(&self) -> u64 {
        self.flushed + self.buffer.len() as u64
    }
}
