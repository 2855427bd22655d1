//! The bases of deltas in memory: for each page that was written again, the content of a plain
//! record.
//!
//! ```text
//!   page ──mod slots──▶ | page, its base's record and hash, the cost of deltas on it, place ─┐
//!                                      contents, in the order of first use:  | 0 | 1 | 2 | ... ◀─┘
//! ```
//!
//! Each slot serves all pages that map to it; the last one wins. If RAM is not larger than the
//! budget, each page has its own slot, and no order of use has to be kept. Contents lie in the
//! order in which their slots were first used. So memory is taken one huge page at a time, and all
//! of it is used. First touches of small pages all over the budget would cost more than the deltas.
//!
//! Invariants: memory is bounded by the budget, and taken only as pages come. A base is a plain
//! record with the content that is here. [`Bases::clear`] must be called if records are lost or
//! move.

use keyframe_kernel::memory::PrefaultedBuffer;
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{PAGE_BYTES, Page, PageIndex};

/// A new base costs about this much, in bytes. It is worth it when the deltas have cost this much
/// more than the first one.
const DRIFT_BYTES_MAX: u32 = 2048;

/// The base of deltas of one page: a record and its hash.
#[derive(Clone, Copy, Debug)]
pub struct DeltaBase {
    pub record: PageRef,
    pub hash: PageHash,
    /// The length in bytes of the payload of its record: about that of a plain record of a similar
    /// page.
    pub payload_bytes: usize,
    /// The length of the first delta on it, and the sum of how much longer later ones were.
    first_bytes: u32,
    drift_bytes: u32,
}

impl DeltaBase {
    /// Creates the base `record` with the page hash `hash` and a payload of `payload_bytes` bytes.
    pub fn new(record: PageRef, hash: PageHash, payload_bytes: usize) -> Self {
        Self { record, hash, payload_bytes, first_bytes: 0, drift_bytes: 0 }
    }

    /// Returns true if its page has changed so much that a new base is cheaper in the long run.
    pub fn is_worn(&self) -> bool {
        self.drift_bytes > DRIFT_BYTES_MAX
    }

    fn used(&mut self, delta_bytes: u32) {
        if self.first_bytes == 0 {
            self.first_bytes = delta_bytes;
        }
        self.drift_bytes =
            self.drift_bytes.saturating_add(delta_bytes.saturating_sub(self.first_bytes));
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    page: PageIndex,
    base: DeltaBase,
    /// The last batch that read it.
    batch: u64,
    /// The index of its content.
    place: usize,
}

/// The contents in one chunk of memory: a huge page.
const CHUNK_PAGES: usize = (2 << 20) / PAGE_BYTES;

/// The bases of deltas, by page. The memory for their contents is bounded.
pub struct Bases {
    slots: Vec<Option<Slot>>,
    /// [`CHUNK_PAGES`] each, the last one of those that the budget allows may be shorter.
    chunks: Vec<PrefaultedBuffer>,
    /// Contents in use.
    used: usize,
    batch: u64,
}

/// The place of a base in [`Bases`], valid for one batch.
#[derive(Clone, Copy, Debug)]
pub struct At(usize);

impl Bases {
    /// Creates an empty collection of bases whose contents take at most `budget_bytes` bytes. With
    /// less than the size of a page it never holds a base.
    pub fn new(budget_bytes: usize) -> Self {
        let slots = budget_bytes / (PAGE_BYTES + size_of::<Option<Slot>>());
        Self { slots: vec![None; slots], chunks: Vec::new(), used: 0, batch: 0 }
    }

    /// Begins a batch. From now on the bases of the previous batch may be replaced.
    pub fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// Returns the place of the base of `page`, which stays there until the next batch. Returns
    /// `None` if the page has no base.
    pub fn find(&mut self, page: PageIndex) -> Option<At> {
        let (at, batch) = (self.at(page)?, self.batch);
        let slot = self.slots.get_mut(at)?.as_mut().filter(|slot| slot.page == page)?;
        slot.batch = batch;
        Some(At(at))
    }

    /// Adds the base of `page` with its `content`. Returns `None` if another page of this batch
    /// uses its slot, or if there is no memory.
    pub fn insert(&mut self, page: PageIndex, base: DeltaBase, content: &Page) -> Option<At> {
        let (at, batch) = (self.at(page)?, self.batch);
        let before = *self.slots.get(at)?;
        if before.is_some_and(|slot| slot.batch == batch && slot.page != page) {
            return None;
        }
        let place = match before {
            Some(slot) => slot.place,
            None => self.take_place()?,
        };
        *self
            .chunks
            .get_mut(place / CHUNK_PAGES)?
            .as_chunks_mut()
            .0
            .get_mut(place % CHUNK_PAGES)? = *content;
        *self.slots.get_mut(at)? = Some(Slot { page, base, batch, place });
        Some(At(at))
    }

    fn take_place(&mut self) -> Option<usize> {
        if self.used == self.chunks.len() * CHUNK_PAGES {
            let pages = self.slots.len().saturating_sub(self.used).min(CHUNK_PAGES);
            self.chunks.push(PrefaultedBuffer::new(pages * PAGE_BYTES).ok()?);
        }
        self.used += 1;
        Some(self.used - 1)
    }

    /// Returns the base at a place of this batch, and its content. Returns `None` if there is none.
    pub fn get(&self, at: At) -> Option<(DeltaBase, &Page)> {
        let slot = self.slots.get(at.0)?.as_ref()?;
        let chunk = self.chunks.get(slot.place / CHUNK_PAGES)?;
        Some((slot.base, chunk.as_chunks().0.get(slot.place % CHUNK_PAGES)?))
    }

    /// Records that a delta of `delta_bytes` bytes was made on the base of `page`.
    pub fn used(&mut self, page: PageIndex, delta_bytes: u64) {
        if let Some(at) = self.at(page)
            && let Some(slot) =
                self.slots.get_mut(at).and_then(Option::as_mut).filter(|slot| slot.page == page)
        {
            slot.base.used(u32::try_from(delta_bytes).unwrap_or(u32::MAX));
        }
    }

    /// Removes all bases and keeps the memory.
    pub fn clear(&mut self) {
        self.slots.fill(None);
        self.used = 0;
    }

    fn at(&self, page: PageIndex) -> Option<usize> {
        page.0.checked_rem(self.slots.len() as u64).map(|at| at as usize)
    }
}

impl std::fmt::Debug for Bases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bases({} slots)", self.slots.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_pages_of_one_slot_take_turns_but_not_within_a_batch() {
        let per_slot = PAGE_BYTES + size_of::<Option<Slot>>();
        let mut bases = Bases::new(3 * per_slot + per_slot / 2);
        let base = |n: u64| DeltaBase::new(PageRef(n), PageHash([n, n]), 4096);
        bases.begin_batch();
        let at = bases.insert(PageIndex(1), base(7), &[7; PAGE_BYTES]).unwrap();
        assert!(bases.insert(PageIndex(4), base(8), &[8; PAGE_BYTES]).is_none());
        let found = bases.get(at).unwrap();
        assert_eq!((found.0.record, found.1[9]), (PageRef(7), 7));
        bases.begin_batch();
        assert!(bases.find(PageIndex(4)).is_none());
        bases.insert(PageIndex(4), base(8), &[8; PAGE_BYTES]).unwrap();
        assert!(bases.find(PageIndex(1)).is_none());
        bases.clear();
        assert!(bases.find(PageIndex(4)).is_none());
        let mut none = Bases::new(per_slot - 1);
        assert!(none.insert(PageIndex(0), base(1), &[0; PAGE_BYTES]).is_none());
    }

    #[test]
    fn a_base_is_worn_by_deltas_that_grow_and_by_no_others() {
        let mut base = DeltaBase::new(PageRef(1), PageHash([1, 1]), 4096);
        (0..10_000).for_each(|_| base.used(300));
        assert!(!base.is_worn());
        (1..14).for_each(|n| base.used(300 + n * 20));
        assert!(!base.is_worn());
        (14..20).for_each(|n| base.used(300 + n * 20));
        assert!(base.is_worn());
    }
}
