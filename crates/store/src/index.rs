//! The index of deduplication: where the content of a page is, by its hash. Bounded in memory; what
//! does not fit lies in files.
//!
//! ```text
//!                 ┌─ table: the newest entries ─┐  full, or the run ends   ┌─ spills: files, each sorted by hash ─┐
//!   insert ─────▶ │ also copies of spilled ones │ ───────────────────────▶ │ filter and fences in memory          │ ─▶ too many: merged
//!   get ────────▶ └─────────────────────────────┘ ──not there─▶ filter ──▶ └──────────────────────────────────────┘ ─▶ too large: oldest removed
//!
//!   value of an entry   | pack number 24 | kind 2 | unproven 1 | copy 1 | offset 36 |
//! ```
//!
//! A spill is a cache. It says which packs it covers, each by the checksum of its trailer: the next
//! writer takes it for those that are still there as they were, and reads the indexes of the others
//! itself. An entry of a pack that has gone is not given out. Only records of closed packs are
//! spilled: these stay as they are.
//!
//! Invariants: what is given out is an entry that was inserted, of a pack that is there; the full
//! hash is compared. Derived records out of a spill are unproven: what they stand on may have gone.
//! Whatever happens to the files, nothing but deduplication is lost, and no caller sees an error.
//! The memory is within the budget: a third of it for the table, which takes half as much more
//! while it grows, two fifths for the spills, the rest for the merging of a quarter of these.
//!
//! Not here: what a derived record needs to be proven, and which packs are read again
//! ([`crate::pack_writer`]).

mod filter;
mod folder;
mod merge;
mod spill;
mod table;
#[cfg(test)]
mod tests;

use crate::identity::{PageHash, PageRef};
use crate::prune::moves::{Moves, Place};
use crate::record::{Entry, Kind};
pub use folder::Folder;
use merge::Source;
use rustc_hash::{FxHashMap, FxHashSet};
pub use spill::{Bond, MaskKey, Seal};
use std::path::PathBuf;
use table::Table;

const OFFSET_BITS: u32 = 36;
/// It is known from a spill as well.
const COPY: u64 = 1 << 36;
const UNPROVEN: u64 = 1 << 37;
const KIND_SHIFT: u32 = 38;
const PACK_SHIFT: u32 = 40;
/// Less holds nothing.
const BUDGET_BYTES_MIN: usize = 128 << 10;
/// An entry of a spill takes two bytes, fences and filter.
const SPILLED_ENTRY_BYTES: usize = 2;
/// More spills than this are merged, the smallest first.
const SPILLS_MAX: usize = 6;
/// So many at a time,
const MERGED_AT_ONCE: usize = 4;
/// and none becomes larger than this part of all, so that what is too much goes in such pieces,
/// without being written anew.
const PIECES: usize = 4;
/// Fewer entries are as quickly read from the packs.
const SAVED_MIN: usize = 1 << 16;

/// A record that the index knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub place: PageRef,
    pub kind: Kind,
    /// Derived, of an earlier writer, and not read yet.
    pub unproven: bool,
}

/// What an index of deduplication holds, and takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexUse {
    /// Entries in its table in memory.
    pub entries: u64,
    /// Entries in files.
    pub spilled_entries: u64,
    /// These files.
    pub spills: u64,
    /// Memory of both.
    pub memory_bytes: u64,
}

/// Hashes of pages, and where these are.
#[derive(Debug)]
pub struct Index {
    table: Table,
    /// Closed packs of which entries are in the table alone.
    closed: FxHashMap<u32, Seal>,
    /// Newest first.
    spills: Vec<Loaded>,
    /// None: what does not fit is forgotten.
    folder: Option<Folder>,
    spilled_max: usize,
}

/// A spill of which something is believed.
#[derive(Debug)]
struct Loaded {
    source: Source,
    path: PathBuf,
}

impl Index {
    /// An empty one that takes about `budget_bytes` at most, and spills into `folder`.
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

    /// Takes the spills of earlier writers. `seal_of` tells how a pack is closed that is there and
    /// may be relied on; with `plain_only` no derived record is.
    pub fn load(&mut self, plain_only: bool, seal_of: &mut dyn FnMut(u32) -> Option<Seal>) {
        let Some(folder) = &self.folder else { return };
        let mut seals = FxHashMap::<u32, Option<Seal>>::default();
        for (path, spill) in folder.spills(self.spilled_max * SPILLED_ENTRY_BYTES) {
            let is_there = |(number, seal): &(u32, Seal)| {
                (*seals.entry(*number).or_insert_with(|| seal_of(*number)) == Some(*seal))
                    .then_some(*number)
            };
            let live: FxHashSet<u32> = spill.packs().iter().filter_map(is_there).collect();
            if live.is_empty() || self.spilled() + spill.entries() > self.spilled_max {
                folder::remove(&path);
            } else {
                self.spills.push(Loaded { source: Source { spill, live, plain_only }, path });
            }
        }
    }

    /// Whether the records of a pack are known from a spill.
    pub fn covers(&self, pack: u32) -> bool {
        self.spills.iter().any(|loaded| loaded.source.live.contains(&pack))
    }

    /// What a hash stands for.
    pub fn get(&mut self, hash: PageHash) -> Option<Found> {
        if let Some(value) = self.table.get(hash) {
            return Some(decode(value));
        }
        let mut at = 0;
        while let Some(loaded) = self.spills.get(at) {
            match loaded.source.get(hash) {
                Ok(None) => at += 1,
                Ok(Some(value)) => {
                    // Pages that come once more come often. Room for new ones is kept.
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

    /// A record with this content was written, or has taken the place of what was known.
    pub fn insert(&mut self, hash: PageHash, place: PageRef, kind: Kind) {
        if let Some(value) = encode(place, kind) {
            self.table.insert(hash, value);
        }
    }

    /// Learns what the index of a pack says, closed with `seal`, or unfinished; what is in the
    /// table already stays. Derived records are unproven.
    pub fn learn<'a>(
        &mut self,
        pack: u32,
        seal: Option<Seal>,
        entries: impl Iterator<Item = &'a Entry> + Clone,
    ) {
        let is_seen = |index: &mut Self| seal.map(|seal| index.closed(pack, seal));
        if self.table.len() + entries.clone().count() >= self.full_at() && self.folder.is_some() {
            self.make_room();
        }
        is_seen(self);
        for entry in entries {
            // One that is larger than the table is spilled in parts.
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

    /// A derived record was read, and holds.
    pub fn prove(&mut self, hash: PageHash) {
        if let Some(value) = self.table.get(hash) {
            self.table.insert(hash, value & !UNPROVEN);
        }
    }

    /// Forgets what was inserted last for this hash.
    pub fn remove(&mut self, hash: PageHash) {
        self.table.remove(hash);
    }

    /// No derived record is relied on that is known now.
    pub fn forget_derived(&mut self) {
        self.table.retain(&mut |_, value| !is_derived(*value));
        self.spills.iter_mut().for_each(|loaded| loaded.source.plain_only = true);
    }

    /// Knows nothing in the packs that go any more, but where their records are now, if these are
    /// in the table; of derived records only those that have moved.
    pub fn follow(&mut self, moves: &Moves) {
        self.table.retain(&mut |_, value| match moves.place(place(*value)) {
            Place::Same => !is_derived(*value),
            Place::Moved(to) => {
                let flags = *value & (UNPROVEN | 3 << KIND_SHIFT);
                *value = encode(to, Kind::Page).map_or(0, |at| at | flags);
                *value != 0
            }
            Place::Gone => false,
        });
        self.closed.retain(|pack, _| !moves.victims.contains(pack));
        for loaded in &mut self.spills {
            loaded.source.plain_only = true;
            loaded.source.live.retain(|pack| !moves.victims.contains(pack));
        }
    }

    /// A pack whose records are in the table was closed: they may be spilled from now on.
    pub fn closed(&mut self, pack: u32, seal: Seal) {
        self.closed.insert(pack, seal);
    }

    /// Whether there is hardly room in the table: time for [`Self::make_room`].
    pub fn is_full(&self) -> bool {
        self.table.len() >= self.full_at()
    }

    fn full_at(&self) -> usize {
        self.table.len_max() / 16 * 15
    }

    /// Whether all that is known is as much as can be.
    pub fn is_at_end(&self) -> bool {
        match self.folder {
            Some(_) => self.spilled() + self.table.len_max() > self.spilled_max,
            None => self.is_full(),
        }
    }

    /// Empties the table: what is of closed packs is spilled, the rest forgotten. No pack that is
    /// being written may have records in it.
    pub fn make_room(&mut self) {
        // Where it cannot be written it is forgotten.
        let _ = self.spill();
        self.table.clear();
        self.closed.clear();
    }

    /// For the next writer: spills what is in the table, if that is much.
    pub fn save(&mut self) {
        if self.folder.is_some() && self.table.len() >= SAVED_MIN.min(self.table.len_max() / 8) {
            self.make_room();
        }
    }

    /// What it holds, and takes.
    pub fn usage(&self) -> IndexUse {
        // Sets and maps of packs: about two slots for each.
        let of_pack = 2 * size_of::<(u32, Seal)>();
        let of_spill =
            |Loaded { source, .. }: &Loaded| source.spill.bytes() + source.live.len() * of_pack;
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
        // The oldest go: those whose newest pack is the oldest.
        while !self.spills.is_empty() && self.spilled() + new > self.spilled_max {
            let newest =
                |loaded: &Loaded| loaded.source.spill.packs().iter().map(|(pack, _)| *pack).max();
            let oldest =
                (0..self.spills.len()).min_by_key(|at| self.spills.get(*at).and_then(newest));
            folder::remove(&self.spills.remove(oldest.unwrap_or(0)).path);
        }
        let mut writer = folder.begin(new)?;
        for mut slot in self.table.iter().filter(|slot| is_new(slot.value)) {
            slot.value &= !UNPROVEN;
            writer.push(slot)?;
        }
        let mut packs: Vec<(u32, Seal)> =
            self.closed.iter().map(|(pack, seal)| (*pack, *seal)).collect();
        packs.sort_unstable();
        let live = self.closed.keys().copied().collect();
        let (path, spill) = folder.finish(writer, packs)?;
        // Its derived records are as good as when they were inserted; read once more before they
        // are relied on.
        self.spills.insert(0, Loaded { source: Source { spill, live, plain_only: false }, path });
        self.merge(&folder);
        Ok(())
    }

    /// Merges the smallest spills where there are too many.
    fn merge(&mut self, folder: &Folder) {
        while self.spills.len() > SPILLS_MAX {
            let entries = |loaded: &Loaded| loaded.source.spill.entries();
            let mut order: Vec<usize> = (0..self.spills.len()).collect();
            // Of those as large, the oldest: so each holds what came in one time.
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
                    // What was hidden in one of them is not in it.
                    let source = Source { spill, live, plain_only: false };
                    let newest = chosen.first().copied().unwrap_or(0);
                    for at in chosen.into_iter().rev() {
                        folder::remove(&self.spills.remove(at).path);
                    }
                    self.spills.insert(newest, Loaded { source, path });
                }
                Err(merge::Failed::Source(at)) => {
                    if let Some(at) = chosen.get(at) {
                        folder::remove(&self.spills.remove(*at).path);
                    }
                }
                // No room on the disk: they stay as they are.
                Err(merge::Failed::Target) => return,
            }
        }
    }
}

/// None for what no entry can name: it is not known then.
fn encode(place: PageRef, kind: Kind) -> Option<u64> {
    let at = u64::from(place.pack()) << PACK_SHIFT | place.offset();
    (place.offset() < 1 << OFFSET_BITS).then_some(at | u64::from(kind.number()) << KIND_SHIFT)
}

fn place(value: u64) -> PageRef {
    PageRef(value >> PACK_SHIFT << PACK_SHIFT | value & ((1 << OFFSET_BITS) - 1))
}

fn kind(value: u64) -> Kind {
    Kind::of_number((value >> KIND_SHIFT & 3) as u8).unwrap_or(Kind::Page)
}

fn is_derived(value: u64) -> bool {
    kind(value).is_derived()
}

fn decode(value: u64) -> Found {
    Found { place: place(value), kind: kind(value), unproven: value & UNPROVEN != 0 }
}
