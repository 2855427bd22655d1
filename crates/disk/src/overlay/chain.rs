//! Maps each block to its slot, for every cut that is still needed.
//!
//! ```text
//!   lookups        current    written since the last cut; a rewrite goes to the same slot
//!      │           epoch 9    in flight
//!      │           epoch 8    done (released or given back), waits for 7 below it
//!      │           epoch 7    in flight
//!      ▼           settled    everything older, folded into one map
//!
//!   write ──▶ current ──cut──▶ in flight ──release──▶ done ──▶ folded into settled, oldest first
//!                                  └──give_back──▶ done, and its blocks are owed to the next cut
//! ```
//!
//! Invariants:
//! 1. A lookup that begins at the map of an epoch in flight finds the content at that epoch's cut.
//! 2. Each cut covers its own map and the blocks that are owed to it, so every written block is in
//!    a checkpoint.
//! 3. Folding goes from the oldest map up, so that newer content stays above older.
//!
//! Pure: no I/O. A cut swaps two maps and takes constant time. Folding goes in bounded steps.

use crate::extents::{ExtentMap, ExtentValue};
use crate::{BLOCK, DiskBlock, DiskEpoch, Slot};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The largest number of epochs whose maps are kept in memory: those in flight, and later ones that
/// were released or given back, which wait for an older one.
pub const EPOCHS_MAX: usize = 64;

/// The number of owed blocks that one step looks up.
const OWED_STEP_BLOCKS: u64 = 1 << 10;

/// The location of a block's content in an overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockPlace {
    /// In this slot.
    Slot(u32),
    /// No slot: the block is zero.
    Zero,
}

impl ExtentValue for BlockPlace {
    fn skip(self, blocks: u64) -> Self {
        match self {
            // An extent is no longer than the slots it names.
            Self::Slot(slot) => Self::Slot(slot.wrapping_add(blocks as u32)),
            Self::Zero => Self::Zero,
        }
    }

    fn continues(self, blocks: u64, next: Self) -> bool {
        match (self, next) {
            (Self::Slot(a), Self::Slot(b)) => u64::from(a) + blocks == u64::from(b),
            (Self::Zero, Self::Zero) => true,
            _ => false,
        }
    }
}

/// Consecutive blocks of one epoch, whose slots are consecutive too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The first block.
    pub block: DiskBlock,
    /// The number of blocks.
    pub blocks: u64,
    /// The slot of the first block. `None` if all blocks are zero.
    pub slot: Option<Slot>,
}

#[derive(Debug)]
struct Frozen {
    epoch: DiskEpoch,
    map: ExtentMap<BlockPlace>,
    owed: ExtentMap<()>,
    done: bool,
}

/// The maps of one disk, from blocks to slots: one map for each epoch in flight, one for the
/// current epoch, and one for all before.
#[derive(Debug, Default)]
pub struct EpochChain {
    current: ExtentMap<BlockPlace>,
    /// Blocks of failed epochs. The next cut covers them too.
    owed: ExtentMap<()>,
    /// Oldest first.
    frozen: VecDeque<Frozen>,
    settled: ExtentMap<BlockPlace>,
    last: u64,
}

impl EpochChain {
    /// Creates the chain of a disk whose overlay is opened again with the map `map`. All its blocks
    /// count as written since the last cut.
    pub fn recovered(map: ExtentMap<BlockPlace>) -> Self {
        let mut chain = Self { settled: map, ..Self::default() };
        chain.settled.iter().for_each(|(s, n, _)| chain.owed.insert(s, n, (), &mut |_, _, ()| {}));
        chain
    }

    /// Makes the numbers of later epochs greater than `after`.
    pub fn number_epochs_after(&mut self, after: DiskEpoch) {
        self.last = self.last.max(after.0);
    }

    /// Divides the `len` blocks from `start` on by their current place. Calls `show` for each part
    /// in rising order: first block, number of blocks, place of the first block. The place is
    /// `None` if the overlay does not hold the part.
    pub fn each(&self, start: u64, len: u64, show: &mut dyn FnMut(u64, u64, Option<BlockPlace>)) {
        self.each_below(0, start, len, show);
    }

    /// Divides the `len` bytes from byte `offset` of the disk on by their current place. Calls
    /// `show` for each part: first byte relative to `offset`, length in bytes, and the place of its
    /// first block with the offset of its first byte in that block. The place is `None` if the
    /// overlay does not hold the part.
    pub fn parts(
        &self,
        offset: u64,
        len: usize,
        show: &mut dyn FnMut(usize, usize, Option<(BlockPlace, u64)>),
    ) {
        let end = offset + len as u64;
        let first = offset / BLOCK;
        self.each(first, end.div_ceil(BLOCK) - first, &mut |s, n, place| {
            let from = offset.max(s * BLOCK);
            let to = end.min((s + n) * BLOCK);
            show(
                (from - offset) as usize,
                (to - from) as usize,
                place.map(|place| (place, from - s * BLOCK)),
            );
        });
    }

    /// Calls `show` as [`Self::each`] does, with the places of the blocks that were written since
    /// the last cut. The place of other blocks is `None`.
    pub fn each_current(
        &self,
        start: u64,
        len: u64,
        show: &mut dyn FnMut(u64, u64, Option<BlockPlace>),
    ) {
        self.current.each(start, len, show);
    }

    /// `depth` 0 is the current map; then follow the frozen maps, newest first, then the settled
    /// map.
    fn each_below(
        &self,
        depth: usize,
        start: u64,
        len: u64,
        show: &mut dyn FnMut(u64, u64, Option<BlockPlace>),
    ) {
        let frozen = self.frozen.len();
        let map = match depth {
            0 => &self.current,
            d if d <= frozen => &self.frozen[frozen - d].map,
            d if d == frozen + 1 => &self.settled,
            _ => return show(start, len, None),
        };
        map.each(start, len, &mut |s, n, place| match place {
            Some(place) => show(s, n, Some(place)),
            None => self.each_below(depth + 1, s, n, show),
        });
    }

    /// Records that the `len` blocks from `start` on were written to `place`. Calls `unused` with
    /// each range of slots (first slot, number of slots) that the current epoch used for them
    /// before.
    pub fn write(
        &mut self,
        start: u64,
        len: u64,
        place: BlockPlace,
        unused: &mut dyn FnMut(u32, u32),
    ) {
        self.current.insert(start, len, place, &mut |_, n, old| {
            if let BlockPlace::Slot(slot) = old {
                unused(slot, n as u32);
            }
        });
    }

    /// Ends the current epoch and returns its number. Returns `None` if the maps of [`EPOCHS_MAX`]
    /// epochs are kept.
    pub fn cut(&mut self) -> Option<DiskEpoch> {
        if self.frozen.len() >= EPOCHS_MAX {
            return None;
        }
        self.last += 1;
        let epoch = DiskEpoch(self.last);
        let map = std::mem::take(&mut self.current);
        self.frozen.push_back(Frozen {
            epoch,
            map,
            owed: std::mem::take(&mut self.owed),
            done: false,
        });
        Some(epoch)
    }

    fn find(&self, epoch: DiskEpoch) -> Option<usize> {
        self.frozen.iter().position(|f| f.epoch == epoch && !f.done)
    }

    /// Returns about `max` extents of an epoch in flight, from block `from` on, and the block at
    /// which to continue: `None` after the last one. Returns `None` in place of both if the epoch
    /// is not in flight.
    pub fn pages(
        &self,
        epoch: DiskEpoch,
        from: u64,
        max: usize,
    ) -> Option<(Vec<Extent>, Option<u64>)> {
        let index = self.find(epoch)?;
        let frozen = self.frozen.get(index)?;
        let depth = self.frozen.len() - index;
        let (mut extents, mut at) = (Vec::new(), from);
        loop {
            let own = frozen.map.next(at).map(|(s, n, _)| (s, n));
            let owed = frozen.owed.next(at).map(|(s, n, ())| (s, n));
            let Some((start, len)) = [own, owed].into_iter().flatten().min() else {
                return Some((extents, None));
            };
            if extents.len() >= max {
                return Some((extents, Some(start)));
            }
            // An extent of the epoch's own map is in one piece. Owed blocks may lie in many pieces,
            // so they are looked up in short steps.
            let len = if own == Some((start, len)) { len } else { len.min(OWED_STEP_BLOCKS) };
            self.each_below(depth, start, len, &mut |s, n, place| {
                let slot = match place {
                    Some(BlockPlace::Slot(slot)) => Some(Slot(slot)),
                    // Every block of the epoch's map has a place, and every owed block was in such
                    // a map.
                    Some(BlockPlace::Zero) | None => None,
                };
                extents.push(Extent { block: DiskBlock(s), blocks: n, slot });
            });
            at = start + len;
        }
    }

    /// Releases an epoch whose checkpoint is sealed. Returns false if it is not in flight.
    pub fn release(&mut self, epoch: DiskEpoch) -> bool {
        let Some(frozen) = self.find(epoch).and_then(|index| self.frozen.get_mut(index)) else {
            return false;
        };
        frozen.done = true;
        frozen.owed = ExtentMap::default();
        true
    }

    /// Gives back an epoch whose checkpoint failed: the next cut covers its blocks too. Returns
    /// false if it is not in flight.
    pub fn give_back(&mut self, epoch: DiskEpoch) -> bool {
        let Some(frozen) = self.find(epoch).and_then(|index| self.frozen.get_mut(index)) else {
            return false;
        };
        frozen.done = true;
        let more = std::mem::take(&mut frozen.owed);
        for (start, len) in
            frozen.map.iter().map(|(s, n, _)| (s, n)).chain(more.iter().map(|(s, n, ())| (s, n)))
        {
            self.owed.insert(start, len, (), &mut |_, _, ()| {});
        }
        true
    }

    /// Returns the epochs in flight.
    pub fn in_flight(&self) -> Vec<DiskEpoch> {
        self.frozen.iter().filter(|f| !f.done).map(|f| f.epoch).collect()
    }

    /// Merges up to `max` extents of released epochs into the map of older blocks. Calls `unused`
    /// with each range of slots (first slot, number of slots) that becomes unused. Returns true if
    /// more extents remain to be merged.
    pub fn fold(&mut self, max: usize, unused: &mut dyn FnMut(u32, u32)) -> bool {
        for _ in 0..max {
            let Some(oldest) = self.frozen.front_mut().filter(|f| f.done) else { return false };
            match oldest.map.pop_first() {
                Some((start, len, place)) => {
                    self.settled.insert(start, len, place, &mut |_, n, old| {
                        if let BlockPlace::Slot(slot) = old {
                            unused(slot, n as u32);
                        }
                    });
                }
                None => drop(self.frozen.pop_front()),
            }
        }
        self.frozen.front().is_some_and(|f| f.done)
    }

    /// Returns the first range of blocks at or after block `from` that the overlay holds: first
    /// block, number of blocks. Returns `None` if there is none.
    pub fn next(&self, from: u64) -> Option<(u64, u64)> {
        let maps = self.frozen.iter().map(|f| &f.map).chain([&self.current, &self.settled]);
        maps.filter_map(|map| map.next(from)).map(|(s, n, _)| (s, n)).min()
    }

    /// Returns the number of ranges in all maps. Their memory is proportional to it.
    pub fn entries(&self) -> usize {
        let frozen: usize = self.frozen.iter().map(|f| f.map.entries() + f.owed.entries()).sum();
        self.current.entries() + self.owed.entries() + self.settled.entries() + frozen
    }

    /// Returns the number of blocks that the next cut covers: those written since the last cut, and
    /// those of epochs that were given back. A block that is both counts twice.
    pub fn dirty_blocks(&self) -> u64 {
        self.current.blocks() + self.owed.blocks()
    }
}
