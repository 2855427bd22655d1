//! Appending pages to packs, each content once.
//!
//! ```text
//!             put                    buffer full             seal, or pack full
//!   page ──▶ index knows it? ──no──▶ buffer ──append──▶ file ──────sync──────▶ durable
//!                 │yes      │        |<- entries from `flushed` ->|<- from `synced` ->|
//!                 ▼         ├─▶ a page of RAM: has it a base? then a delta, where that is smaller ([`pages`])
//!              its PageRef  └─▶ a block of a disk: are its sectors known? then composed, where that is smaller
//! ```
//!
//! Invariants: the index holds only records that are verified (an unfinished pack, walked), under a
//! trailer, or in the open pack and due to become durable with the next sync; a record that failed
//! to get there leaves the index before the error is returned. Only one pack is open, so that one
//! sync makes all of a checkpoint durable. A derived record (composed, or a delta) stands only on
//! plain records before it that were read and compared in that moment, or whose content was kept
//! since; one of an earlier writer, or out of a spill of the index, is read once before it is
//! relied on. Where the run has no disks, no sector costs anything.

mod keep;
mod kinds;
mod pages;

use crate::bases::Bases;
use crate::codec::{Codec, PageCompressor, SAVING_BYTES_MIN};
use crate::composed::{Composition, PART_BYTES, PARTS, Part, sectors};
use crate::dictionary::Dense;
use crate::durability::Durability;
use crate::files::NewFile;
use crate::identity::{PACK_NUMBER_MAX, PageHash, PageRef};
use crate::index::{Found, Index};
use crate::pack_file::{Ending, PackFile, seal_of};
use crate::prune::moves::Moves;
use crate::prune::packs;
use crate::record::{
    Entry, Kind, PACK_HEADER_BYTES, Record, append_record, encode_dictionary, encode_pack_header,
    encode_trailer,
};
use crate::sectors::{SectorFinder, Tags};
use crate::store::Inner;
use crate::writer::Tuning;
use crate::{Error, IndexUse, Result, SectorCounts};
use keyframe_store_backend::layout;
use keyframe_units::Page;
pub use pages::Input;
use pages::Scratch;
use rustc_hash::FxHashSet;
use std::sync::Arc;

/// Packs that others may have begun while this one was at work.
const TAKEN_MAX: u32 = 1 << 16;

/// Where a page went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// Its content was in the store already, in a record of this kind.
    Known(PageRef, Kind),
    /// A new record of this many bytes.
    New(PageRef, u64),
}

/// Where a block of a disk went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedBlock {
    pub placed: Placed,
    /// It was put together from parts.
    pub composed: bool,
    /// What became of its sectors.
    pub sectors: SectorCounts,
}

/// The packs of a store, as their one writer sees them.
#[derive(Debug)]
pub struct PackWriter {
    inner: Arc<Inner>,
    index: Index,
    /// Packs of others that have been looked at.
    learnt: FxHashSet<u32>,
    /// Present where the run has disks, and memory for it.
    finder: Option<SectorFinder>,
    /// The pack from which on `finder` has learnt all pages when they were put.
    learnt_from: u32,
    next_pack: u32,
    open: Option<OpenPack>,
    /// What deltas are made on.
    bases: Bases,
    /// Packs of this writer of which a sync has failed: no delta stands on what can still be read
    /// of them.
    given_up: FxHashSet<u32>,
    /// One for each thread.
    compressors: Vec<PageCompressor>,
    scratch: Vec<Scratch>,
    composed: Vec<u8>,
    /// Where packs are recompressed: what with. All packs begun from then on have its dictionary.
    dense: Option<Dense>,
    tuning: Tuning,
}

#[derive(Debug)]
struct OpenPack {
    number: u32,
    file: NewFile,
    header: [u8; PACK_HEADER_BYTES],
    /// Records that the file does not have yet; they belong at `flushed`.
    buffer: Vec<u8>,
    /// Bytes in the file, known to be there.
    flushed: u64,
    /// Bytes known to be durable.
    synced: u64,
    /// Bytes that sealed checkpoints may need, durable or not.
    sealed: u64,
    /// Every record of the pack, rising.
    entries: Vec<Entry>,
}

impl PackWriter {
    /// Takes the index as an earlier writer left it, and reads the indexes of packs that are not in
    /// it, the newest first, as far as there is room. Unfinished packs are read whole, and synced:
    /// what can be read of them now may still be in memory alone. Packs that a prune gives up are
    /// left out, and unfinished ones while one is at work, or where a sync of them has failed
    /// before.
    pub fn new(inner: Arc<Inner>, tuning: Tuning, moves: Option<&Moves>) -> Result<Self> {
        let mut this = Self::empty(inner, tuning)?;
        this.index = Index::new(tuning.index_bytes, this.inner.index_folder());
        let is_going = |number: &u32| moves.is_some_and(|moves| moves.victims.contains(number));
        let mut numbers = packs::numbers(&this.inner)?;
        numbers.retain(|number| !is_going(number));
        // A prune takes back what it could not make durable.
        let is_pruned = this.inner.backend.is_pruning()?;
        let doubted = this.inner.doubted_packs()?;
        let inner = &this.inner;
        this.index.load(moves.is_some(), &mut |number| {
            numbers.binary_search(&number).ok()?;
            // What cannot be read is looked at below.
            PackFile::open(inner, number).and_then(|pack| pack.seal()).ok()?
        });
        for number in numbers.into_iter().rev() {
            if this.index.covers(number) || this.index.is_at_end() {
                this.learnt.insert(number);
            } else {
                this.learn(number, is_pruned || number <= doubted, moves.is_some())?;
            }
        }
        Ok(this)
    }

    /// Learns what is in a pack, but for records that are not relied on: of an unfinished pack,
    /// where `closed_only`; derived ones, where `plain_only`.
    fn learn(&mut self, number: u32, closed_only: bool, plain_only: bool) -> Result<()> {
        let pack = match PackFile::open(&self.inner, number) {
            Ok(pack) => pack,
            // Nothing of it is used; `check` tells whom that hurts.
            Err(Error::Damaged { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let len_bytes = pack.file.len_bytes()?;
        let ending = pack.ending(len_bytes);
        let is_closed = matches!(ending, Ending::Closed { .. });
        let entries = match ending {
            Ending::Closed { entries, .. } => entries,
            Ending::Unfinished | Ending::Damaged(_) if closed_only => Vec::new(),
            Ending::Unfinished | Ending::Damaged(_) => {
                let mut entries = Vec::new();
                pack.walk(&self.inner, pack.first, len_bytes, &mut |entry| entries.extend(entry));
                if !entries.is_empty() {
                    self.inner.rely_on_packs(|| self.inner.backend.sync(&layout::pack(number)))?;
                }
                entries
            }
        };
        self.learnt.insert(number);
        let seal = if is_closed { pack.seal()? } else { None };
        let relied_on = entries.iter().filter(|entry| !(plain_only && entry.kind().is_derived()));
        self.index.learn(number, seal, relied_on);
        Ok(())
    }

    /// The next run has disks, or has none.
    pub fn begin_run(&mut self, with_disks: bool) {
        self.bases.clear();
        if !with_disks {
            self.finder = None;
        } else if self.finder.is_none() {
            let Tuning { sector_index_bytes, sector_parts_min, .. } = self.tuning;
            self.finder =
                SectorFinder::new(&self.inner.config.key, sector_index_bytes, sector_parts_min);
            self.learnt_from = self.next_pack;
        }
    }

    /// Makes sure that the store holds a block of a disk, which is not zero. It is durable after
    /// the next [`Self::sync`].
    pub fn put_block(&mut self, page: &Page) -> Result<PlacedBlock> {
        let hash = PageHash::of(&self.inner.config.key, page);
        if let Some(placed) = self.known(hash, page) {
            let whole = PARTS as u64;
            let mut sectors = SectorCounts::default();
            match placed {
                Placed::Known(_, kind) if kind.is_of_ram() => {
                    sectors.against_ram_whole_sectors = whole;
                }
                _ => sectors.against_disk_whole_sectors = whole,
            }
            return Ok(PlacedBlock { placed, composed: false, sectors });
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        let tags = self.finder.as_ref().map(|finder| finder.tags(page));
        let composition = tags.as_ref().and_then(|tags| self.compose(page, tags, &pack));
        let codec = composition.and_then(|composition| self.encode_composed(&composition, page));
        let (kind, payload) = match codec {
            Some(codec) => (Kind::Composed, (codec, self.composed.as_slice())),
            None => (Kind::Block, self.compressors[0].compress(page)),
        };
        let len_bytes = pack.append(hash, kind, payload);
        let composed = kind == Kind::Composed;
        if let (Some(finder), Some(tags), Kind::Block) = (&mut self.finder, &tags, kind) {
            finder.learn(tags, place);
        }
        let sectors = self.count(page, composition.as_ref().filter(|_| composed), &pack);
        self.index.insert(hash, place, kind);
        self.give_back(pack)?;
        Ok(PlacedBlock { placed: Placed::New(place, len_bytes), composed, sectors })
    }

    /// Where the store holds this content already.
    fn known(&mut self, hash: PageHash, page: &Page) -> Option<Placed> {
        let Found { place, kind, unproven } = self.index.get(hash)?;
        if unproven {
            // Compared with its hash as it is read.
            let read = self.inner.read_pages(&[(place, ())], &mut |(), _| Ok::<_, Error>(()));
            if read.is_err() {
                self.index.remove(hash);
                return None;
            }
            self.index.prove(hash);
        }
        if let Some(finder) = self.finder.as_mut().filter(|_| place.pack() < self.learnt_from)
            && !kind.is_derived()
        {
            let tags = finder.tags(page);
            finder.learn(&tags, place);
        }
        Some(Placed::Known(place, kind))
    }

    /// How a block can be put together from what is in the store, `pack` included.
    fn compose(&mut self, page: &Page, tags: &Tags, pack: &OpenPack) -> Option<Composition> {
        let inner = &self.inner;
        self.finder.as_mut()?.compose(page, tags, &mut |record, into| {
            if record.pack() == pack.number && record.offset() >= pack.flushed {
                let bytes = pack
                    .buffer
                    .get((record.offset() - pack.flushed) as usize..)
                    .unwrap_or_default();
                return Record::parse(bytes, record)
                    .and_then(|record| record.decompress(into))
                    .is_ok();
            }
            inner.read_plain(record, into).is_ok()
        })
    }

    /// Encodes it into `self.composed`, if it is smaller there than what is stored otherwise.
    fn encode_composed(&mut self, composition: &Composition, page: &Page) -> Option<Codec> {
        let plain_len = self.compressors[0].compress(page).1.len();
        self.composed.clear();
        let codec = composition.encode(page, &mut self.compressors[0], &mut self.composed);
        (self.composed.len() + SAVING_BYTES_MIN <= plain_len).then_some(codec)
    }

    fn count(
        &self,
        page: &Page,
        composition: Option<&Composition>,
        pack: &OpenPack,
    ) -> SectorCounts {
        let mut counts = SectorCounts::default();
        for (at, sector) in sectors(page).iter().enumerate() {
            let counted = match composition.and_then(|c| c.0.get(at)) {
                Some(Part::Of(record, _)) if self.is_of_ram(*record, pack) => {
                    &mut counts.against_ram_part_sectors
                }
                Some(Part::Of(..)) => &mut counts.against_disk_part_sectors,
                _ if *sector == [0; PART_BYTES] => &mut counts.zero_sectors,
                _ => &mut counts.not_deduplicated_sectors,
            };
            *counted += 1;
        }
        counts
    }

    /// Makes everything put so far durable, as far as the tuning has it so.
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        if self.tuning.durability == Durability::Checkpoint {
            self.sync_open()?;
        }
        if let Some(pack) = &mut self.open {
            pack.sealed = pack.flushed;
        }
        Ok(())
    }

    fn sync_open(&mut self) -> Result<()> {
        let Some(pack) = self.open.as_mut().filter(|pack| pack.flushed > pack.synced) else {
            return Ok(());
        };
        let synced = if pack.sealed > pack.synced {
            self.inner.sync_sealed(|| pack.file.sync())
        } else {
            pack.file.sync()
        };
        match synced {
            Ok(()) => {
                pack.synced = pack.flushed;
                Ok(())
            }
            Err(error) => {
                // The kernel may have dropped the pages and will not say so again: nothing since
                // the last sync counts. Cutting the file also takes them out of the page cache,
                // where a later reader would find them well. What checkpoints need that did not
                // wait for a sync stays, for as long as it can be read.
                let keep = pack.synced.max(pack.sealed);
                let _ = pack.file.truncate(keep);
                self.retire();
                Err(error)
            }
        }
    }

    /// Closes the open pack with its trailer. Where only the trailer fails, the pack stays behind
    /// without one: what it holds is durable.
    pub fn close(&mut self) -> Result<()> {
        self.flush()?;
        self.sync_open()?;
        let Some(mut pack) = self.open.take() else { return Ok(()) };
        let trailer = encode_trailer(&pack.header, &pack.entries, pack.flushed);
        let written = pack
            .file
            .append(&trailer.index)
            .and_then(|()| pack.file.sync())
            .and_then(|()| pack.file.append(&trailer.footer))
            .and_then(|()| pack.file.sync());
        match written {
            Ok(()) => self.index.closed(pack.number, seal_of(&trailer.footer)),
            Err(_) => drop(pack.file.truncate(pack.flushed)),
        }
        if self.index.is_full() {
            self.index.make_room();
        }
        written
    }

    /// What the index holds.
    pub fn index_use(&self) -> IndexUse {
        self.index.usage()
    }

    /// Leaves the index to the next writer, once the pack is closed.
    pub fn save_index(&mut self) {
        if self.open.is_none() {
            self.index.save();
        }
    }

    /// The pack that the next record goes to; [`Self::give_back`] it.
    fn take_pack(&mut self) -> Result<OpenPack> {
        // Records leave the index's memory once their pack is closed.
        let is_over =
            |pack: &OpenPack| pack.end() >= self.tuning.pack_bytes_max || self.index.is_full();
        if self.open.as_ref().is_some_and(is_over) {
            self.close()?;
        }
        if let Some(pack) = self.open.take() {
            return Ok(pack);
        }
        if self.index.is_full() {
            self.index.make_room();
        }
        self.create()
    }

    fn give_back(&mut self, pack: OpenPack) -> Result<()> {
        let full = pack.buffer.len() >= self.tuning.buffer_bytes;
        self.open = Some(pack);
        if full { self.flush() } else { Ok(()) }
    }

    /// Begins a pack. Others, a run or a prune, may have begun some meanwhile.
    fn create(&mut self) -> Result<OpenPack> {
        let mut taken = 0;
        let (number, name, mut file) = loop {
            let number = self.next_pack;
            if number > PACK_NUMBER_MAX {
                return Err(Error::PacksExhausted {
                    object: self.inner.backend.describe(layout::PACKS),
                });
            }
            // Never tried twice: a failed attempt may have left a file.
            self.next_pack += 1;
            let name = layout::pack(number);
            match self.inner.backend.create(&name) {
                Err(error) if error.is_already_exists() && taken < TAKEN_MAX => taken += 1,
                file => break (number, name, file?),
            }
        };
        let id = self.inner.config.id;
        let dictionary = self.dense.as_ref().map(Dense::bytes);
        let header = encode_pack_header(id, number, dictionary.map(|bytes| bytes.len() as u64));
        let dictionary = dictionary.map(encode_dictionary).unwrap_or_default();
        let head = [&header[..], &dictionary].concat();
        if let Err(error) = file.append(&head) {
            let _ = self.inner.backend.remove(&name);
            return Err(error);
        }
        let buffer = Vec::with_capacity(self.tuning.buffer_bytes);
        let flushed = head.len() as u64;
        Ok(OpenPack {
            number,
            file,
            header,
            buffer,
            flushed,
            synced: 0,
            sealed: 0,
            entries: Vec::new(),
        })
    }

    /// Brings the buffer into the file; on failure its records are forgotten.
    fn flush(&mut self) -> Result<()> {
        let Some(pack) = self.open.as_mut().filter(|pack| !pack.buffer.is_empty()) else {
            return Ok(());
        };
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
    pub fn retire(&mut self) {
        if let Some((number, synced)) = self.open.as_ref().map(|pack| (pack.number, pack.synced)) {
            self.forget_from(synced);
            self.given_up.insert(number);
            self.open = None;
        }
    }

    /// Forgets the records of the open pack from `offset` on.
    fn forget_from(&mut self, offset: u64) {
        let Some(pack) = self.open.as_mut() else { return };
        let keep = pack.entries.partition_point(|entry| entry.offset() < offset);
        for entry in pack.entries.drain(keep..) {
            self.index.remove(entry.hash);
        }
        // What can still be read of them must not be referred to.
        self.bases.clear();
        if let Some(finder) = &mut self.finder {
            finder.clear();
        }
    }
}

impl OpenPack {
    /// Where the next record goes.
    fn end(&self) -> u64 {
        self.flushed + self.buffer.len() as u64
    }

    /// Appends a record; returns its length.
    fn append(&mut self, hash: PageHash, kind: Kind, payload: (Codec, &[u8])) -> u64 {
        let place = PageRef::new(self.number, self.end());
        let before = self.buffer.len();
        append_record(&mut self.buffer, place, hash, kind, payload);
        self.entries.push(Entry::new(hash, place.offset(), kind));
        (self.buffer.len() - before) as u64
    }
}
