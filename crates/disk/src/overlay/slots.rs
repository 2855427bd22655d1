//! Which slots of the data file are free.
//!
//! ```text
//!   tail, or free ──take──▶ written ──published──▶ in a map ──superseded──▶ waiting ──sync──▶ free
//! ```
//!
//! Invariant: a slot that the journal on disk may still name is not free. So a superseded one waits for the sync that
//! makes its successor durable.

use crate::extents::ExtentMap;

/// How many slots there can be: 16 TiB of blocks. The numbers above mean other things in the journal.
const SLOTS_MAX: u32 = u32::MAX - 1;

/// The slots of one overlay.
#[derive(Debug, Default)]
pub struct Slots {
    free: ExtentMap<()>,
    waiting: Vec<(u32, u32)>,
    tail: u32,
}

impl Slots {
    /// All slots below `tail` but those `used` (start and count, in any order, disjoint) are free.
    pub fn recovered(tail: u32, used: impl Iterator<Item = (u32, u32)>) -> Self {
        let mut free = ExtentMap::default();
        free.insert(0, tail.into(), (), &mut |_, _, ()| {});
        for (start, len) in used {
            free.remove(start.into(), len.into(), &mut |_, _, ()| {});
        }
        Self { free, waiting: Vec::new(), tail }
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
        for (start, len) in slots {
            self.untake(start, len);
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
