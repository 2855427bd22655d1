//! The writer of packs: its state, and the life of the open pack.

use crate::bases::Bases;
use crate::durability_kind::Durability;
use crate::medium;
use crate::open_store::OpenStore;
use crate::pack_writer::encode::Scratch;
use crate::pack_writer::open_pack::OpenPack;
use crate::pack_writer::placed::{Placed, PutTimes};
use crate::sectors::SectorFinder;
use crate::tuning::Tuning;
use crate::writers::WriterState;
use crate::{Error, IndexUse, Result};
use keyframe_deduplication_index::{Found, Index};
use keyframe_store_backend::{is_remote, layout};
use keyframe_store_format::codec::PageCompressor;
use keyframe_store_format::dictionary::DenseCompressor;
use keyframe_store_format::moves::Moves;
use keyframe_store_format::pack::{encode_dictionary, encode_pack_header, encode_trailer, seal_of};
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::{PACK_NUMBER_MAX, PageRef};
use keyframe_units::Page;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// The most packs that other processes may create while this writer creates one.
const TAKEN_MAX: u32 = 1 << 16;

/// Writes the packs of a store, and finds content that the store holds already.
#[derive(Debug)]
pub struct PackWriter {
    pub(super) inner: Arc<OpenStore>,
    pub(super) index: Index,
    /// Packs of other writers whose indexes were read.
    pub(super) learnt: FxHashSet<u32>,
    /// The open packs of other writers, with the offset up to which their records are known.
    pub(super) followed: FxHashMap<u32, u64>,
    /// The last look at what other writers have sealed.
    pub(super) followed_at: Option<Instant>,
    /// Present if the run has disks, and there is memory for it.
    pub(super) finder: Option<SectorFinder>,
    /// The first pack of which `finder` knows all pages.
    pub(super) learnt_from: u32,
    pub(super) next_pack: u32,
    pub(super) open: Option<OpenPack>,
    /// The bases of deltas.
    pub(super) bases: Bases,
    /// Packs of this writer that a sync failed for. No delta refers to what can still be read of
    /// them.
    pub(super) given_up: FxHashSet<u32>,
    /// One for each thread.
    pub(super) compressors: Vec<PageCompressor>,
    pub(super) scratch: Vec<Scratch>,
    pub(super) composed: Vec<u8>,
    /// Present while packs are recompressed. All packs that begin then have its dictionary.
    pub(super) dense: Option<DenseCompressor>,
    pub(super) tuning: Tuning,
    /// The number of bytes that this writer leaves free on the medium.
    pub(super) reserve_bytes: u64,
    /// Closed packs of this writer that no sealed checkpoint needs.
    pub(super) unsealed: BTreeSet<u32>,
    /// True if a write has failed for want of space since the last sync.
    pub(super) is_short: bool,
    /// The time of putting pages since [`Self::take_times`].
    pub(super) times: PutTimes,
}

impl PackWriter {
    /// Creates a writer whose packs get higher numbers than all existing ones. Its index is empty.
    /// Error: the packs cannot be listed.
    pub fn empty(inner: Arc<OpenStore>, tuning: Tuning) -> Result<Self> {
        let next_pack = inner.newest_pack()? + 1;
        let tuning = medium::fit(tuning, inner.backend.space());
        Ok(Self {
            inner,
            index: Index::new(tuning.index_bytes, None),
            learnt: FxHashSet::default(),
            followed: FxHashMap::default(),
            followed_at: None,
            finder: None,
            learnt_from: next_pack,
            next_pack,
            open: None,
            bases: Bases::new(tuning.base_bytes),
            given_up: FxHashSet::default(),
            compressors: (0..tuning.encode_threads.max(1)).map(|_| PageCompressor::new()).collect(),
            scratch: Vec::new(),
            composed: Vec::new(),
            dense: None,
            tuning,
            reserve_bytes: 0,
            unsealed: BTreeSet::new(),
            is_short: false,
            times: PutTimes::default(),
        })
    }

    /// Returns the time of putting pages since the last call.
    pub fn take_times(&mut self) -> PutTimes {
        std::mem::take(&mut self.times)
    }

    /// Makes the writer leave space on the medium in which a prune can copy.
    pub fn keep_reserve(&mut self) {
        self.reserve_bytes = medium::reserve_bytes(&self.tuning, self.inner.backend.space());
    }

    /// The record in which the store holds this content; `None` if it does not hold it.
    pub(super) fn known(&mut self, hash: PageHash, page: &Page) -> Option<Placed> {
        let Found { place, kind, unproven } = self.index.get(hash)?;
        if unproven {
            // Reading compares the content with its hash.
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

    /// Makes everything put so far durable, unless the tuning leaves that to later syncs. Error:
    /// the pack cannot be written.
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        if self.tuning.durability == Durability::Checkpoint {
            self.sync_open()?;
        }
        if let Some(pack) = &mut self.open {
            pack.sealed = pack.flushed;
        }
        // A checkpoint may be sealed now that needs them.
        self.unsealed.clear();
        self.is_short = false;
        Ok(())
    }

    pub(super) fn sync_open(&mut self) -> Result<()> {
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
                // The kernel may have dropped the pages without a second error. So everything since
                // the last sync is discarded. Truncating the file also removes it from the page
                // cache, where a later reader would find it intact. What checkpoints need that did
                // not wait for a sync stays, as long as it can be read.
                let keep = pack.synced.max(pack.sealed);
                let _ = pack.file.truncate(keep);
                self.retire();
                Err(error)
            }
        }
    }

    /// Notes that everything that sealed checkpoints need is durable, and tells other writers. Error:
    /// they cannot be told.
    pub fn note_durable(&mut self) -> Result<()> {
        if let Some(pack) = &mut self.open {
            pack.synced = pack.synced.max(pack.sealed);
        }
        self.tell_open(|_| {})
    }

    /// Tells other writers which packs this one has open, and which records they may use. `change`
    /// changes what else it says. Error: they cannot be told.
    pub fn tell_open(&self, change: impl FnOnce(&mut WriterState)) -> Result<()> {
        let open = self.open.as_ref();
        self.inner.tell(|said| {
            if let Some(pack) = open {
                said.pack = pack.number;
                // What is both durable and needed by a sealed checkpoint is never cut.
                said.shared = PageRef::new(pack.number, pack.synced.min(pack.sealed)).0;
            } else {
                (said.pack, said.shared) = (0, 0);
            }
            said.set_unsealed(self.unsealed.iter().copied());
            change(said);
        })
    }

    /// Closes the open pack with its trailer. If only the trailer fails, the pack stays without
    /// one, and its records are durable. Error: the records cannot be written.
    pub fn close(&mut self) -> Result<()> {
        self.flush()?;
        self.sync_open()?;
        let Some(mut pack) = self.open.take() else { return Ok(()) };
        if pack.sealed == 0 {
            self.unsealed.insert(pack.number);
        }
        let trailer = encode_trailer(&pack.header, &pack.entries, pack.flushed);
        let written = pack
            .file
            .append(&trailer.index)
            .and_then(|()| pack.file.sync())
            .and_then(|()| pack.file.append(&trailer.footer))
            .and_then(|()| pack.file.sync());
        match &written {
            Ok(()) => self.index.closed(pack.number, seal_of(&trailer.footer)),
            Err(error) => {
                self.is_short |= error.is_disk_full();
                let _ = pack.file.truncate(pack.flushed);
            }
        }
        if self.index.is_full() {
            self.index.make_room();
        }
        // Otherwise others learn it after the next seal.
        let _ = self.tell_open(|_| {});
        written
    }

    /// Returns true if the writer has lost its place: see [`crate::Writer::is_lost`].
    fn is_lost(&self) -> bool {
        self.inner.own_slot.as_ref().is_some_and(|own| own.is_lost())
    }

    /// Frees the memory of the index and of the bases if the writer has lost its place: then nothing
    /// is put any more.
    pub fn free_memory_if_lost(&mut self) {
        if self.is_lost() {
            self.index = Index::new(0, None);
            self.forget_relations();
        }
    }

    /// Returns the size of the index.
    pub fn index_use(&self) -> IndexUse {
        self.index.usage()
    }

    /// Saves the index for the next writer, if no pack is open. Of several writers only the first
    /// does so: the files of others would hold the same.
    pub fn save_index(&mut self) {
        let is_first =
            self.inner.own_slot.as_ref().is_none_or(|own| own.number().unwrap_or(0) == 0);
        if self.open.is_none() && is_first {
            self.index.save();
        }
    }

    /// Takes the pack for the next record out of `self`. [`Self::give_back`] returns it.
    pub(super) fn take_pack(&mut self) -> Result<OpenPack> {
        // The index can spill records after their pack is closed.
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

    pub(super) fn give_back(&mut self, pack: OpenPack) -> Result<()> {
        let full = pack.buffer.len() >= self.tuning.buffer_bytes;
        self.open = Some(pack);
        if full { self.flush() } else { Ok(()) }
    }

    /// Creates a pack. A run or a prune may have created some meanwhile.
    pub(super) fn create(&mut self) -> Result<OpenPack> {
        let mut taken = 0;
        let (number, name, mut file) = loop {
            if self.inner.is_shared() || !is_remote(&self.inner.path) {
                // Others may have created and removed higher ones.
                self.next_pack = self.next_pack.max(self.inner.newest_pack()? + 1);
            }
            let number = self.next_pack;
            if number > PACK_NUMBER_MAX {
                return Err(Error::PacksExhausted {
                    object: self.inner.backend.describe(layout::PACKS),
                });
            }
            // A failed attempt may have left a file, so no number is tried twice.
            self.next_pack += 1;
            let name = layout::pack(number);
            self.tell_open(|said| (said.pack, said.shared) = (number, 0))?;
            match self.inner.backend.create(&name) {
                Err(error) if error.is_already_exists() && taken < TAKEN_MAX => taken += 1,
                file => break (number, name, file?),
            }
        };
        // It need not be learnt.
        self.learnt.insert(number);
        let id = self.inner.config.id;
        let dictionary = self.dense.as_ref().map(DenseCompressor::bytes);
        let header = encode_pack_header(id, number, dictionary.map(|bytes| bytes.len() as u64));
        let dictionary = dictionary.map(encode_dictionary).unwrap_or_default();
        let head = [&header[..], &dictionary].concat();
        if let Err(error) = file.append(&head) {
            self.is_short |= error.is_disk_full();
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

    /// Writes the buffer to the file. If that fails, the checkpoint in progress fails, too: forgets
    /// the records since the last sealed one and cuts the pack there. The space that this returns
    /// to a full disk is enough for a prune to begin.
    pub(super) fn flush(&mut self) -> Result<()> {
        let Some(pack) = self.open.as_mut().filter(|pack| !pack.buffer.is_empty()) else {
            return Ok(());
        };
        let reserved = medium::check_reserve(
            &self.inner.backend,
            pack.buffer.len() as u64,
            self.reserve_bytes,
        );
        let written = reserved.and_then(|()| pack.file.append(&pack.buffer));
        if written.is_ok() {
            pack.flushed += pack.buffer.len() as u64;
            pack.buffer.clear();
            return Ok(());
        }
        self.is_short |= written.as_ref().is_err_and(Error::is_disk_full);
        pack.buffer.clear();
        let first = pack
            .entries
            .first()
            .map_or(pack.flushed, keyframe_store_format::pack::PackEntry::offset);
        let keep = if pack.sealed > 0 { pack.sealed } else { first.min(pack.flushed) };
        let cut = pack.file.truncate(keep);
        (pack.flushed, pack.synced) = (keep, pack.synced.min(keep));
        self.forget_from(keep);
        if cut.is_err() {
            self.retire();
        }
        written
    }

    /// Removes the packs that only an abandoned checkpoint has filled, if the medium was too full
    /// for it. The caller needs none of their records. A prune at work takes such a pack for one
    /// without needed records, and accepts that it is gone.
    pub fn return_space(&mut self) {
        if !std::mem::take(&mut self.is_short) || self.unsealed.is_empty() {
            return;
        }
        let last = self.unsealed.last().copied().unwrap_or_default();
        if self.open.as_ref().is_none_or(|open| open.number < last) {
            // Its number is higher, so no number is used again.
            match self.create() {
                Ok(pack) => self.open = Some(pack),
                Err(_) => drop(self.unsealed.pop_last()),
            }
        }
        let victims = std::mem::take(&mut self.unsealed);
        self.index.follow(&Moves { victims: victims.clone(), ..Moves::default() });
        self.forget_relations();
        if self.inner.remove_packs(&victims).is_err() {
            // Others must not use those that are left: a later attempt may remove them.
            self.unsealed = victims;
        }
        // Otherwise others do not use packs that are gone.
        let _ = self.tell_open(|_| {});
    }

    /// Forgets the bases of deltas and the sectors of blocks.
    pub(super) fn forget_relations(&mut self) {
        self.bases.clear();
        if let Some(finder) = &mut self.finder {
            finder.clear();
        }
    }

    /// Gives up the open pack. The index keeps the pack's durable records and forgets its others.
    pub fn retire(&mut self) {
        if let Some((number, synced)) = self.open.as_ref().map(|pack| (pack.number, pack.synced)) {
            self.forget_from(synced);
            self.given_up.insert(number);
            self.open = None;
        }
    }

    /// Forgets the records of the open pack from `offset` on.
    pub(super) fn forget_from(&mut self, offset: u64) {
        let Some(pack) = self.open.as_mut() else { return };
        let keep = pack.entries.partition_point(|entry| entry.offset() < offset);
        for entry in pack.entries.drain(keep..) {
            self.index.remove(entry.hash);
        }
        // No delta and no composed block may refer to these records.
        self.forget_relations();
    }

    /// Sets how the following packs are compressed: if `dense` is given, with its dictionary, which
    /// each pack begins with; otherwise as in a run. Error: the pack cannot be written.
    pub fn set_dense(&mut self, dense: Option<DenseCompressor>) -> Result<()> {
        self.close()?;
        self.dense = dense;
        Ok(())
    }
}
