//! The free slots of the data file.
//!
//! ```text
//!   tail, or free ──take──▶ written ──published──▶ in a map ──superseded──▶ waiting ──sync──▶ free
//! ```
//!
//! Invariants: a slot that the journal on disk may still name is not free. So a superseded slot
//! waits for the sync that makes its successor durable. A slot that is being read is not free
//! either: a reader that does not hold the map enters a generation, and slots that become free
//! meanwhile are parked until all readers of that generation and the one before have left.
//!
//! ```text
//!   generation 7  ── 8 begins after all readers of 6 have left; slots parked in 6 are free then
//! ```

use crate::extents::ExtentMap;

/// The largest number of slots: 16 TiB of blocks. The numbers above are reserved in the journal.
const SLOTS_MAX: u32 = u32::MAX - 1;

/// The allocator of the slots of one overlay.
#[derive(Debug, Default)]
pub struct SlotAllocator {
    free: ExtentMap<()>,
    waiting: Vec<(u32, u32)>,
    tail: u32,
    /// The newest generation. It and the one before are indexed by their last bit.
    generation: u64,
    readers: [usize; 2],
    parked: [Vec<(u32, u32)>; 2],
}

/// The generation of slots that a reader has entered. [`SlotAllocator::leave`] takes it back.
#[derive(Debug)]
#[must_use]
pub struct ReaderGeneration(usize);

impl SlotAllocator {
    /// Creates the allocator of an existing overlay with `tail` slots. All are free except those in
    /// `used`: disjoint pairs of first slot and number of slots, in any order.
    pub fn recovered(tail: u32, used: impl Iterator<Item = (u32, u32)>) -> Self {
        let mut free = ExtentMap::default();
        free.insert(0, tail.into(), (), &mut |_, _, ()| {});
        for (start, len) in used {
            free.remove(start.into(), len.into(), &mut |_, _, ()| {});
        }
        Self { free, tail, ..Self::default() }
    }

    /// Takes up to `count` consecutive slots. Returns the first slot and the number of slots taken,
    /// or `None` if no slot is left.
    pub fn take(&mut self, count: u64) -> Option<(u32, u32)> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if let Some((start, len, ())) = self.free.next(0) {
            let taken = len.min(count.into());
            self.free.remove(start, taken, &mut |_, _, ()| {});
            return Some((start as u32, taken as u32));
        }
        let start = self.tail;
        let taken = count.min(SLOTS_MAX - start);
        self.tail += taken;
        (taken > 0).then_some((start, taken))
    }

    /// Frees `len` slots from `start` on at once. Neither a map nor the journal may ever have named
    /// these slots.
    pub fn put_back(&mut self, start: u32, len: u32) {
        self.free.insert(start.into(), len.into(), (), &mut |_, _, ()| {});
    }

    /// Marks `len` slots from `start` on as used by no map any more. They stay used until the next
    /// sync, because the journal may name them.
    pub fn supersede(&mut self, start: u32, len: u32) {
        self.waiting.push((start, len));
    }

    /// Returns the slots that the next successful sync frees, as pairs of first slot and number of
    /// slots, and removes them from the allocator's list.
    pub fn take_waiting(&mut self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.waiting)
    }

    /// Puts the `slots` that [`Self::take_waiting`] returned back on the list, because the sync
    /// failed and may be repeated.
    pub fn wait_again(&mut self, slots: Vec<(u32, u32)>) {
        self.waiting.extend(slots);
    }

    /// Frees the `slots` that [`Self::take_waiting`] returned, after a successful sync. A slot that
    /// a reader may still read becomes free after that reader has left.
    pub fn set_free(&mut self, slots: Vec<(u32, u32)>) {
        self.parked[self.newest()].extend(slots);
        self.advance();
    }

    /// Registers a reader of slots that maps name now. The allocator gives these slots to no writer
    /// before [`Self::leave`], to which the caller passes the result.
    pub fn enter(&mut self) -> ReaderGeneration {
        let newest = self.newest();
        self.readers[newest] += 1;
        ReaderGeneration(newest)
    }

    /// Removes a reader that [`Self::enter`] registered. Frees the slots that only this reader
    /// could still read.
    #[expect(clippy::needless_pass_by_value, reason = "a reader leaves once")]
    pub fn leave(&mut self, entered: ReaderGeneration) {
        self.readers[entered.0] -= 1;
        self.advance();
    }

    /// Returns true if no read of a slot is in progress.
    #[cfg(test)]
    pub fn has_no_reader(&self) -> bool {
        self.readers == [0, 0]
    }

    fn newest(&self) -> usize {
        (self.generation % 2) as usize
    }

    /// Advances at most two steps: then both generations are empty, or one has readers.
    fn advance(&mut self) {
        for _ in 0..2 {
            let before = 1 - self.newest();
            if self.readers[before] > 0 {
                return;
            }
            for (start, len) in std::mem::take(&mut self.parked[before]) {
                self.put_back(start, len);
            }
            self.generation += 1;
        }
    }

    /// Returns the number of slots in the data file.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// Returns the number of slots that can be taken without extending the data file.
    pub fn free(&self) -> u64 {
        self.free.blocks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slots_that_are_not_being_read_are_free() {
        let mut slots = SlotAllocator::default();
        assert_eq!(slots.take(3), Some((0, 3)));
        slots.set_free(vec![(0, 1)]);
        assert_eq!(slots.free(), 1);
        let first = slots.enter();
        slots.set_free(vec![(1, 1)]);
        assert_eq!(slots.free(), 1);
        // Later readers do not keep the slot forever.
        let second = slots.enter();
        slots.leave(first);
        slots.set_free(vec![(2, 1)]);
        let third = slots.enter();
        slots.leave(second);
        assert!(slots.free() >= 2, "no reader of slot 1 is left");
        slots.leave(third);
        assert_eq!(slots.free(), 3);
    }
}
