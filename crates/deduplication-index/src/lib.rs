//! The deduplication index: the record of each content, by page hash. Its memory is bounded. What
//! does not fit lies in files.
//!
//! ```text
//!                 ┌─ table: the newest entries ─┐  full, or the run ends   ┌─ spills: files, each sorted by hash ─┐
//!   insert ─────▶ │ also copies of spilled ones │ ───────────────────────▶ │ filter and fences in memory          │ ─▶ too many: merged
//!   get ────────▶ └─────────────────────────────┘ ──not there─▶ filter ──▶ └──────────────────────────────────────┘ ─▶ too large: oldest removed
//! ```
//!
//! A spill is a cache. It names the packs that it covers, each with the checksum of its trailer.
//! The next writer uses it for packs that still have this checksum, and reads the indexes of the
//! other packs. The index does not return an entry of a pack that has gone. Only records of closed
//! packs are spilled, because these packs do not change.
//!
//! Invariants: the index returns only entries that were inserted, of packs that exist; it compares
//! the full hash. A derived record from a spill is unproven: its references may have gone. Damage
//! of the files costs only deduplication, and no caller sees an error. The memory is within the
//! budget: a third for the table, which takes half as much more while it grows, two fifths for the
//! spills, the rest for merging.
//!
//! Not here: proving a derived record, and the choice of packs to read again. Both are the work of
//! the writer of a store.

mod filter;
mod folder;
mod merge;
mod spill;
mod table;
#[cfg(test)]
mod tests;
mod value;

pub use folder::Folder;
use keyframe_store_format::moves::{MovedPlace, Moves};
use keyframe_store_format::pack::{PackEntry, PackSeal};
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::RecordKind;
use merge::Source;
use rustc_hash::{FxHashMap, FxHashSet};
pub use spill::{Bond, MaskKey};
use std::path::PathBuf;
use table::Table;
pub use value::Found;
use value::{COPY, UNPROVEN, decode, encode, is_derived, moved, place};

/// The least budget.
const BUDGET_BYTES_MIN: usize = 128 << 10;
/// The memory of a spilled entry for fences and filter, in bytes.
const SPILLED_ENTRY_BYTES: usize = 2;
/// If there are more spills than this, the smallest are merged.
const SPILLS_MAX: usize = 6;
/// The most spills that are merged at once.
const MERGED_AT_ONCE: usize = 4;
/// A merged spill is at most this part of all entries. So the oldest entries can be removed in
/// pieces without rewriting a file.
const PIECES: usize = 4;
/// The fewest entries that are worth saving; fewer are read from the packs as quickly.
const SAVED_MIN: usize = 1 << 16;

/// The size of a deduplication index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexUse {
    /// The number of entries in its table in memory.
    pub entries: u64,
    /// The number of entries in files.
    pub spilled_entries: u64,
    /// The number of these files.
    pub spills: u64,
    /// The memory of both, in bytes.
    pub memory_bytes: u64,
}

/// The deduplication index: it finds the record of a page content by its hash.
#[derive(Debug)]
pub struct Index {
    table: Table,
    /// Closed packs with entries that are only in the table.
    closed: FxHashMap<u32, PackSeal>,
    /// Newest first.
    spills: Vec<LoadedSpill>,
    /// `None` if entries that do not fit are forgotten.
    folder: Option<Folder>,
    spilled_max: usize,
}

/// A spill with entries in use.
#[derive(Debug)]
struct LoadedSpill {
    source: Source,
    path: PathBuf,
}

impl Index {
    /// Creates an empty index that takes at most about `budget_bytes` bytes of memory and spills
    /// into `folder`. Without a folder, it forgets entries that do not fit.
    pub fn new(budget_bytes: usize, folder: Option<Folder>) -> Self {
        let budget_bytes = budget_bytes.max(BUDGET_BYTES_MIN);
        Self {
            table: Table::new(budget_bytes / 3),
            closed: FxHashMap::default(),
            spills: Vec::new(),
            folder,
            spilled_max: budget_bytes / 5 * 2 / SPILLED_ENTRY_BYTES,
        }
    }

    /// Loads the spills of earlier writers. `seal_of` returns the checksum of a pack's trailer, or
    /// `None` if the pack must not be used. If `plain_only` is true, the index uses no derived
    /// records.
    pub fn load(&mut self, plain_only: bool, seal_of: &mut dyn FnMut(u32) -> Option<PackSeal>) {
        let Some(folder) = &self.folder else { return };
        let mut seals = FxHashMap::<u32, Option<PackSeal>>::default();
        for (path, spill) in folder.spills(self.spilled_max * SPILLED_ENTRY_BYTES) {
            let is_there = |(number, seal): &(u32, PackSeal)| {
                (*seals.entry(*number).or_insert_with(|| seal_of(*number)) == Some(*seal))
                    .then_some(*number)
            };
            let live: FxHashSet<u32> = spill.packs().iter().filter_map(is_there).collect();
            if live.is_empty() || self.spilled() + spill.entries() > self.spilled_max {
                folder::remove(&path);
            } else {
                self.spills.push(LoadedSpill { source: Source { spill, live, plain_only }, path });
            }
        }
    }

    /// Returns true if a spill has the records of pack number `pack`.
    pub fn covers(&self, pack: u32) -> bool {
        self.spills.iter().any(|loaded| loaded.source.live.contains(&pack))
    }

    /// Returns the record with the page hash `hash`. Returns `None` if the index has none.
    pub fn get(&mut self, hash: PageHash) -> Option<Found> {
        if let Some(value) = self.table.get(hash) {
            return Some(decode(value));
        }
        let mut at = 0;
        while let Some(loaded) = self.spills.get(at) {
            match loaded.source.get(hash) {
                Ok(None) => at += 1,
                Ok(Some(value)) => {
                    // A page that occurs again occurs often. Half of the table stays free for new
                    // ones.
                    if self.table.len() < self.table.len_max() / 2 {
                        self.table.insert(hash, value | COPY);
                    }
                    return Some(decode(value));
                }
                Err(_) => folder::remove(&self.spills.remove(at).path),
            }
        }
        None
    }

    /// Adds the record of kind `kind` at `place` with the page hash `hash`. Replaces an older
    /// record with this hash.
    pub fn insert(&mut self, hash: PageHash, place: PageRef, kind: RecordKind) {
        if let Some(value) = encode(place, kind) {
            self.table.insert(hash, value);
        }
    }

    /// Adds the entries of pack number `pack`, which is closed with the trailer checksum `seal`, or
    /// unfinished (`None`). Keeps existing entries. Its derived records are marked as unproven: the
    /// references of such a record may be gone until it was read.
    pub fn learn<'a>(
        &mut self,
        pack: u32,
        seal: Option<PackSeal>,
        entries: impl Iterator<Item = &'a PackEntry> + Clone,
    ) {
        let is_seen = |index: &mut Self| seal.map(|seal| index.closed(pack, seal));
        if self.table.len() + entries.clone().count() >= self.full_at() && self.folder.is_some() {
            self.make_room();
        }
        is_seen(self);
        for entry in entries {
            // A pack with more entries than the table is spilled in parts.
            if self.is_full() && self.folder.is_some() && seal.is_some() {
                self.make_room();
                is_seen(self);
            }
            let (hash, kind) = (entry.hash, entry.kind());
            let value = encode(PageRef::new(pack, entry.offset()), kind);
            if let Some(value) = value.filter(|_| self.table.get(hash).is_none()) {
                self.table.insert(hash, if kind.is_derived() { value | UNPROVEN } else { value });
            }
        }
    }

    /// Marks the derived record with the page hash `hash` as readable, after it was read. Before
    /// that, its references may be gone.
    pub fn prove(&mut self, hash: PageHash) {
        if let Some(value) = self.table.get(hash) {
            self.table.insert(hash, value & !UNPROVEN);
        }
    }

    /// Removes the entry of `hash` from the table in memory.
    pub fn remove(&mut self, hash: PageHash) {
        self.table.remove(hash);
    }

    /// Removes all derived records.
    pub fn forget_derived(&mut self) {
        self.table.retain(&mut |_, value| !is_derived(*value));
        self.spills.iter_mut().for_each(|loaded| loaded.source.plain_only = true);
    }

    /// Follows the moves of a prune: removes the records of its victims. Keeps records in the table
    /// that have moved, with their new place, and plain records of other packs.
    pub fn follow(&mut self, moves: &Moves) {
        self.table.retain(&mut |_, value| match moves.place(place(*value)) {
            MovedPlace::Same => !is_derived(*value),
            MovedPlace::Moved(to) => {
                *value = moved(*value, to).unwrap_or_default();
                *value != 0
            }
            MovedPlace::Gone => false,
        });
        self.closed.retain(|pack, _| !moves.victims.contains(pack));
        for loaded in &mut self.spills {
            loaded.source.plain_only = true;
            loaded.source.live.retain(|pack| !moves.victims.contains(pack));
        }
    }

    /// Records that pack number `pack` was closed with the trailer checksum `seal`. From now on its
    /// records may be spilled.
    pub fn closed(&mut self, pack: u32, seal: PackSeal) {
        self.closed.insert(pack, seal);
    }

    /// Returns true if the table in memory is nearly full, so that [`Self::make_room`] is due.
    pub fn is_full(&self) -> bool {
        self.table.len() >= self.full_at()
    }

    fn full_at(&self) -> usize {
        self.table.len_max() / 16 * 15
    }

    /// Returns true if the table in memory takes `entries` more entries without [`Self::make_room`].
    pub fn has_room_for(&self, entries: usize) -> bool {
        self.table.len() + entries < self.full_at()
    }

    /// Returns true if the index can hold no more entries.
    pub fn is_at_end(&self) -> bool {
        match self.folder {
            Some(_) => self.spilled() + self.table.len_max() > self.spilled_max,
            None => self.is_full(),
        }
    }

    /// Empties the table in memory: spills the records of closed packs and forgets the others. No
    /// pack that is being written may have records in it.
    pub fn make_room(&mut self) {
        // Where it cannot be written it is forgotten.
        let _ = self.spill();
        self.table.clear();
        self.closed.clear();
    }

    /// Spills the table in memory for the next writer, if it holds many entries.
    pub fn save(&mut self) {
        if self.folder.is_some() && self.table.len() >= SAVED_MIN.min(self.table.len_max() / 8) {
            self.make_room();
        }
    }

    /// Returns the size of the index.
    pub fn usage(&self) -> IndexUse {
        // A set or map of packs has about two slots for each pack.
        let of_pack = 2 * size_of::<(u32, PackSeal)>();
        let of_spill = |LoadedSpill { source, .. }: &LoadedSpill| {
            source.spill.bytes() + source.live.len() * of_pack
        };
        let spills = self.spills.iter().map(of_spill).sum::<usize>();
        IndexUse {
            entries: self.table.len() as u64,
            spilled_entries: self.spilled() as u64,
            spills: self.spills.len() as u64,
            memory_bytes: (self.table.bytes() + self.closed.len() * of_pack + spills) as u64,
        }
    }

    fn spilled(&self) -> usize {
        self.spills.iter().map(|loaded| loaded.source.spill.entries()).sum()
    }

    fn spill(&mut self) -> std::io::Result<()> {
        let Some(folder) = self.folder.clone() else { return Ok(()) };
        let closed = &self.closed;
        let is_new = |value: u64| value & COPY == 0 && closed.contains_key(&place(value).pack());
        let new = self.table.iter().filter(|slot| is_new(slot.value)).count();
        if new == 0 {
            return Ok(());
        }
        // Removes the oldest spills: those whose newest pack is the oldest.
        while !self.spills.is_empty() && self.spilled() + new > self.spilled_max {
            let newest = |loaded: &LoadedSpill| {
                loaded.source.spill.packs().iter().map(|(pack, _)| *pack).max()
            };
            let oldest =
                (0..self.spills.len()).min_by_key(|at| self.spills.get(*at).and_then(newest));
            folder::remove(&self.spills.remove(oldest.unwrap_or(0)).path);
        }
        let mut writer = folder.begin(new)?;
        for mut slot in self.table.iter().filter(|slot| is_new(slot.value)) {
            slot.value &= !UNPROVEN;
            writer.push(slot)?;
        }
        let mut packs: Vec<(u32, PackSeal)> =
            self.closed.iter().map(|(pack, seal)| (*pack, *seal)).collect();
        packs.sort_unstable();
        let live = self.closed.keys().copied().collect();
        let (path, spill) = folder.finish(writer, packs)?;
        // Its derived records are still correct, and are read once before they are used again.
        self.spills
            .insert(0, LoadedSpill { source: Source { spill, live, plain_only: false }, path });
        self.merge(&folder);
        Ok(())
    }

    /// Merges the smallest spills if there are too many.
    fn merge(&mut self, folder: &Folder) {
        while self.spills.len() > SPILLS_MAX {
            let entries = |loaded: &LoadedSpill| loaded.source.spill.entries();
            let mut order: Vec<usize> = (0..self.spills.len()).collect();
            // Of spills of the same size takes the oldest, so each spill covers one period.
            order.sort_by_key(|at| (self.spills.get(*at).map(entries), std::cmp::Reverse(*at)));
            let mut sum = 0;
            let fits = |at: &usize| {
                sum += self.spills.get(*at).map_or(0, entries);
                sum <= self.spilled_max / PIECES
            };
            let mut chosen: Vec<usize> =
                order.into_iter().take(MERGED_AT_ONCE).take_while(fits).collect();
            if chosen.len() < 2 {
                return;
            }
            chosen.sort_unstable();
            let mut sources: Vec<&Source> = Vec::new();
            sources.extend(
                chosen.iter().filter_map(|at| self.spills.get(*at)).map(|loaded| &loaded.source),
            );
            match merge::merge(&sources, folder) {
                Ok((path, spill)) => {
                    let live = spill.packs().iter().map(|(pack, _)| *pack).collect();
                    // The merge has left out entries that are not in use.
                    let source = Source { spill, live, plain_only: false };
                    let newest = chosen.first().copied().unwrap_or(0);
                    for at in chosen.into_iter().rev() {
                        folder::remove(&self.spills.remove(at).path);
                    }
                    self.spills.insert(newest, LoadedSpill { source, path });
                }
                Err(merge::Failed::Source(at)) => {
                    if let Some(at) = chosen.get(at) {
                        folder::remove(&self.spills.remove(*at).path);
                    }
                }
                // The disk is full: the spills stay.
                Err(merge::Failed::Target) => return,
            }
        }
    }
}
