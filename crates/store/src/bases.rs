//! The pages that deltas are made on: of each page that was written again, the content of a plain
//! record.
//!
//! ```text
//!   page ──mod slots──▶ | page, its base's record and hash, what deltas on it have cost, place ─┐
//!                                      contents, as slots came into use:   | 0 | 1 | 2 | ... ◀─┘
//! ```
//!
//! One slot for each page that maps to it, the last one wins: where RAM is not larger than the
//! budget, each page has its own, and nothing has to be kept about what was used when. Contents lie
//! in the order in which their slots were used for the first time, so that memory is taken a huge
//! page at a time and all of it is used: first touches of small pages, all over the budget, cost
//! more than the deltas.
//!
//! Invariants: memory is bounded by the budget (and taken only as pages come); a base is a plain
//! record whose content is the one here. When records are lost or move, [`Bases::clear`].

use crate::identity::{PageHash, PageRef};
use keyframe_kernel::memory::PrefaultedBuffer;
use keyframe_units::{PAGE_BYTES, Page, PageIndex};

/// Deltas that have cost so much more than the first one are worth a new base: about what that
/// costs.
const DRIFT_BYTES_MAX: u32 = 2048;

/// A base.
#[derive(Clone, Copy, Debug)]
pub struct Base {
    pub record: PageRef,
    pub hash: PageHash,
    /// What its content takes in the store: about what a page like it would.
    pub payload_bytes: usize,
    /// The length of the first delta on it, and what those behind it were longer in all.
    first_bytes: u32,
    drift_bytes: u32,
}

impl Base {
    pub fn new(record: PageRef, hash: PageHash, payload_bytes: usize) -> Self {
        Self { record, hash, payload_bytes, first_bytes: 0, drift_bytes: 0 }
    }

    /// Its page has gone so far from it that a new one is cheaper in the long run (rent or buy).
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
    base: Base,
    /// The batch that reads it.
    batch: u64,
    /// Which of the contents is its.
    place: usize,
}

/// Contents whose memory is taken at once: a huge page.
const CHUNK_PAGES: usize = (2 << 20) / PAGE_BYTES;

/// The bases.
pub struct Bases {
    slots: Vec<Option<Slot>>,
    /// [`CHUNK_PAGES`] each, the last one of those that the budget allows may be shorter.
    chunks: Vec<PrefaultedBuffer>,
    /// Contents in use.
    used: usize,
    batch: u64,
}

/// Where a base is, for one batch.
#[derive(Clone, Copy, Debug)]
pub struct At(usize);

impl Bases {
    /// In at most `budget_bytes`; with less than a page, none.
    pub fn new(budget_bytes: usize) -> Self {
        let slots = budget_bytes / (PAGE_BYTES + size_of::<Option<Slot>>());
        Self { slots: vec![None; slots], chunks: Vec::new(), used: 0, batch: 0 }
    }

    /// From here on what was found is not needed any more.
    pub fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// The base of a page, which stays where it is until the next batch.
    pub fn find(&mut self, page: PageIndex) -> Option<At> {
        let (at, batch) = (self.at(page)?, self.batch);
        let slot = self.slots.get_mut(at)?.as_mut().filter(|slot| slot.page == page)?;
        slot.batch = batch;
        Some(At(at))
    }

    /// Takes a base in for a page; none where another one of this batch is in its place, or there
    /// is no memory.
    pub fn insert(&mut self, page: PageIndex, base: Base, content: &Page) -> Option<At> {
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

    /// What [`Self::find`] found in this batch.
    pub fn get(&self, at: At) -> Option<(Base, &Page)> {
        let slot = self.slots.get(at.0)?.as_ref()?;
        let chunk = self.chunks.get(slot.place / CHUNK_PAGES)?;
        Some((slot.base, chunk.as_chunks().0.get(slot.place % CHUNK_PAGES)?))
    }

    /// A delta of so many bytes was made on the base of `page`.
    pub fn used(&mut self, page: PageIndex, delta_bytes: u64) {
        if let Some(at) = self.at(page)
            && let Some(slot) =
                self.slots.get_mut(at).and_then(Option::as_mut).filter(|slot| slot.page == page)
        {
            slot.base.used(u32::try_from(delta_bytes).unwrap_or(u32::MAX));
        }
    }

    /// Forgets all. Their memory is used again.
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
        let base = |n: u64| Base::new(PageRef(n), PageHash([n, n]), 4096);
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
        let mut base = Base::new(PageRef(1), PageHash([1, 1]), 4096);
        (0..10_000).for_each(|_| base.used(300));
        assert!(!base.is_worn());
        (1..14).for_each(|n| base.used(300 + n * 20));
        assert!(!base.is_worn());
        (14..20).for_each(|n| base.used(300 + n * 20));
        assert!(base.is_worn());
    }
}
