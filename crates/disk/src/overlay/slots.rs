//! The free slots of the data file.
//!
//! ```text
//!   tail, or free ──take──▶ written ──published──▶ in a map ──superseded──▶ waiting ──sync──▶ free
//! ```
//!
//! Invariants: a slot that the journal on disk may still name is not free. So a superseded one
//! waits for the sync that makes its successor durable. Nor is one that somebody may still be
//! reading: who reads without holding the map enters a generation, and what becomes free meanwhile
//! is parked until all who entered that one or the one before have left.
//!
//! ```text
//!   generation 7  ──readers── ──▶ 8 begins once nobody is left in 6; what was parked in 6 is free then
//! ```

use crate::extents::ExtentMap;

/// How many slots there can be: 16 TiB of blocks. The numbers above mean other things in the
/// journal.
const SLOTS_MAX: u32 = u32::MAX - 1;

/// The slots of one overlay.
#[derive(Debug, Default)]
pub struct Slots {
    free: ExtentMap<()>,
    waiting: Vec<(u32, u32)>,
    tail: u32,
    /// The newest, and the one before: by its last bit.
    generation: u64,
    readers: [usize; 2],
    parked: [Vec<(u32, u32)>; 2],
}

/// The generation that a reader entered.
#[derive(Debug)]
#[must_use]
pub struct Entered(usize);

impl Slots {
    /// All slots below `tail` but those `used` (start and count, in any order, disjoint) are free.
    pub fn recovered(tail: u32, used: impl Iterator<Item = (u32, u32)>) -> Self {
        let mut free = ExtentMap::default();
        free.insert(0, tail.into(), (), &mut |_, _, ()| {});
        for (start, len) in used {
            free.remove(start.into(), len.into(), &mut |_, _, ()| {});
        }
        Self { free, tail, ..Self::default() }
    }

    /// Takes up to `count` neighbouring slots; `None` where there are none left.
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

    /// Gives back slots that no map and no journal ever named.
    pub fn untake(&mut self, start: u32, len: u32) {
        self.free.insert(start.into(), len.into(), (), &mut |_, _, ()| {});
    }

    /// Slots that no map names any more, but the journal may.
    pub fn supersede(&mut self, start: u32, len: u32) {
        self.waiting.push((start, len));
    }

    /// What a sync that begins now frees when it has succeeded.
    pub fn take_waiting(&mut self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.waiting)
    }

    /// The sync failed, and may be tried again.
    pub fn wait_again(&mut self, slots: Vec<(u32, u32)>) {
        self.waiting.extend(slots);
    }

    /// The sync succeeded.
    pub fn set_free(&mut self, slots: Vec<(u32, u32)>) {
        self.parked[self.newest()].extend(slots);
        self.advance();
    }

    /// Somebody begins to read slots that maps name now.
    pub fn enter(&mut self) -> Entered {
        let newest = self.newest();
        self.readers[newest] += 1;
        Entered(newest)
    }

    /// That one is done.
    #[expect(clippy::needless_pass_by_value, reason = "who has left cannot leave again")]
    pub fn leave(&mut self, entered: Entered) {
        self.readers[entered.0] -= 1;
        self.advance();
    }

    #[cfg(test)]
    pub fn nobody_reads(&self) -> bool {
        self.readers == [0, 0]
    }

    fn newest(&self) -> usize {
        (self.generation % 2) as usize
    }

    /// Two steps at most: then both generations are empty, or one has readers.
    fn advance(&mut self) {
        for _ in 0..2 {
            let before = 1 - self.newest();
            if self.readers[before] > 0 {
                return;
            }
            for (start, len) in std::mem::take(&mut self.parked[before]) {
                self.untake(start, len);
            }
            self.generation += 1;
        }
    }

    /// Slots that the data file has room for.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// Slots that could be taken without growing.
    pub fn free(&self) -> u64 {
        self.free.blocks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_read_is_not_free_and_one_that_is_not_is() {
        let mut slots = Slots::default();
        assert_eq!(slots.take(3), Some((0, 3)));
        slots.set_free(vec![(0, 1)]);
        assert_eq!(slots.free(), 1);
        let first = slots.enter();
        slots.set_free(vec![(1, 1)]);
        assert_eq!(slots.free(), 1);
        // Others that come and go do not hold it for ever.
        let second = slots.enter();
        slots.leave(first);
        slots.set_free(vec![(2, 1)]);
        let third = slots.enter();
        slots.leave(second);
        assert!(slots.free() >= 2, "nobody who could read slot 1 is left");
        slots.leave(third);
        assert_eq!(slots.free(), 3);
    }
}
