//! The copied pages of one checkpoint, or of a part of it.
//!
//! ```text
//!   chunk 0 (1,024 pages)    chunk 1                 slots, in rising order
//!  |s0 s1 s2 ............. |s1024 ..... | free ....|
//!   └─ runs: pages 7..9, page 40, pages 100..220 ...  a later round's copy takes a later slot
//! ```
//!
//! Slots are allotted without gaps, so the pages of one scan are one long copy. If a page has
//! several slots, the last one holds its valid copy.

use crate::ports::{BoxError, PageReader};
use crate::staging_pool::{StagingChunk, StagingPool, StagingPoolError};
use keyframe_units::{Page, PageIndex, PageRange, PageSet};

/// The reason why pages could not be copied into staging memory.
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// The pages exceed the memory limit.
    #[error(
        "{needed_pages} pages must be copied at once, but only {free_pages} of {capacity_pages} \
         pages of staging memory are free; a larger --staging allows more"
    )]
    Full {
        /// The number of pages to copy.
        needed_pages: u64,
        /// The number of pages that still fit.
        free_pages: u64,
        /// The memory limit in pages.
        capacity_pages: u64,
    },
    /// Reading the pages failed.
    #[error("copy {pages} pages of guest RAM: {source}")]
    Read {
        /// The number of pages to read.
        pages: u64,
        /// The reader's error.
        source: BoxError,
    },
    /// No memory for another chunk.
    #[error(transparent)]
    Memory(#[from] StagingPoolError),
}

/// Copies of pages in chunks of staging memory.
pub struct StagedPages {
    pool: StagingPool,
    chunks: Vec<StagingChunk>,
    /// The copied pages: slot `i` holds the i-th page of these ranges.
    runs: Vec<PageRange>,
    used_slots: u64,
}

impl StagedPages {
    /// Creates an empty set that takes its memory from `pool`.
    pub fn new(pool: &StagingPool) -> Self {
        Self { pool: pool.clone(), chunks: Vec::new(), runs: Vec::new(), used_slots: 0 }
    }

    /// Returns true if the set holds no page.
    pub fn is_empty(&self) -> bool {
        self.used_slots == 0
    }

    /// Returns the number of copies, including those that a later copy of the same page replaces.
    pub fn len_pages(&self) -> u64 {
        self.used_slots
    }

    /// Returns the number of pages that still fit.
    pub fn room_pages(&self) -> u64 {
        self.chunks.len() as u64 * self.pool.chunk_pages() - self.used_slots
            + self.pool.free_pages()
    }

    /// Copies every page of `set`. After an error it holds none of these pages.
    ///
    /// Errors: [`StagingError::Full`] if they do not all fit, [`StagingError::Memory`] if the host
    /// has no memory, [`StagingError::Read`] if a page cannot be read.
    pub fn stage(&mut self, set: &PageSet, reader: &dyn PageReader) -> Result<(), StagingError> {
        let slots = self.allot(set)?;
        for batch in slots.chunk_by(|a, b| a.chunk == b.chunk) {
            if let Err(error) = self.fill(batch, reader) {
                self.take_back(&slots);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Allots a slot to every page of `set`, sorted by page number. Returns the slots, for
    /// [`Self::fill`]. Allots none after an error.
    ///
    /// Errors: [`StagingError::Full`] if the pages do not all fit, [`StagingError::Memory`] if the
    /// host has no memory.
    pub fn allot(&mut self, set: &PageSet) -> Result<Vec<SlotRange>, StagingError> {
        let chunk_pages = self.pool.chunk_pages();
        let wanted = (self.used_slots + set.len()).div_ceil(chunk_pages);
        while (self.chunks.len() as u64) < wanted {
            match self.pool.take()? {
                Some(chunk) => self.chunks.push(chunk),
                None => {
                    return Err(StagingError::Full {
                        needed_pages: set.len(),
                        free_pages: self.room_pages(),
                        capacity_pages: self.pool.capacity_pages(),
                    });
                }
            }
        }
        let mut slots = Vec::new();
        for mut range in set.ranges() {
            self.runs.push(range);
            while range.len_pages > 0 {
                let (chunk, at) = (self.used_slots / chunk_pages, self.used_slots % chunk_pages);
                let part = PageRange::new(range.first, range.len_pages.min(chunk_pages - at));
                slots.push(SlotRange { pages: part, chunk, at });
                self.used_slots += part.len_pages;
                range = PageRange::new(part.end(), range.len_pages - part.len_pages);
            }
        }
        Ok(slots)
    }

    /// Copies the pages of `slots`, which must be consecutive slots of one chunk. Error:
    /// [`StagingError::Read`] if a page cannot be read.
    pub fn fill(
        &mut self,
        slots: &[SlotRange],
        reader: &dyn PageReader,
    ) -> Result<(), StagingError> {
        let Some(first) = slots.first() else { return Ok(()) };
        let ranges: Vec<PageRange> = slots.iter().map(|s| s.pages).collect();
        let pages = ranges.iter().map(|r| r.len_pages).sum();
        let read = match self.chunks.get_mut(first.chunk as usize) {
            Some(chunk) => reader.read(&ranges, chunk.bytes_mut(first.at, pages)),
            None => Err("the staging chunk does not exist".into()),
        };
        read.map_err(|source| StagingError::Read { pages, source })
    }

    /// Undoes the newest [`Self::allot`].
    fn take_back(&mut self, slots: &[SlotRange]) {
        let pages: u64 = slots.iter().map(|s| s.pages.len_pages).sum();
        self.used_slots -= pages;
        let mut left = pages;
        while left > 0 {
            left -= self.runs.pop().map_or(left, |run| run.len_pages);
        }
    }

    /// Returns the newest copy of each page, in the order of the page numbers. `seen` is scratch
    /// space: a set of the VM's page space.
    pub fn pages(&self, seen: &mut PageSet) -> impl Iterator<Item = (PageIndex, &Page)> {
        seen.clear();
        let mut live: Vec<(PageIndex, u64)> = Vec::with_capacity(self.used_slots as usize);
        let mut end = self.used_slots;
        for run in self.runs.iter().rev() {
            end -= run.len_pages;
            live.extend(run.iter().zip(end..).filter(|(page, _)| seen.insert(*page)));
        }
        live.sort_unstable();
        let chunk_pages = self.pool.chunk_pages();
        live.into_iter().filter_map(move |(page, slot)| {
            let chunk = self.chunks.get((slot / chunk_pages) as usize)?;
            Some((page, chunk.pages().get((slot % chunk_pages) as usize)?))
        })
    }
}

/// Consecutive pages and the slots, all in one chunk, that hold their copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRange {
    /// The pages.
    pub pages: PageRange,
    chunk: u64,
    at: u64,
}

impl SlotRange {
    /// Returns the slot of `page`, which must be in the range.
    #[must_use]
    pub fn of(&self, page: PageIndex) -> Self {
        let offset = page.0.saturating_sub(self.pages.first.0);
        Self { pages: PageRange::new(page, 1), chunk: self.chunk, at: self.at + offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::PAGE_BYTES;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Each page reads as its number and the reader's generation, which is the first field. Pages
    /// after the second field cannot be read.
    struct Numbered(u64, Option<u64>);
    impl PageReader for Numbered {
        fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
            let pages = ranges.iter().flat_map(|r| r.iter());
            let mut cells = dst.chunks_exact_mut(PAGE_BYTES);
            for page in pages {
                if self.1.is_some_and(|bad| page.0 > bad) {
                    return Err("injected".into());
                }
                cells.next().ok_or("short destination")?.copy_from_slice(&content(page.0, self.0));
            }
            if cells.next().is_some() { Err("long destination".into()) } else { Ok(()) }
        }
    }

    fn content(page: u64, generation: u64) -> Page {
        let mut cell = [0; PAGE_BYTES];
        cell[..8].copy_from_slice(&page.to_le_bytes());
        cell[4088..].copy_from_slice(&generation.to_le_bytes());
        cell
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Compares with a map of pages: the newest copy of every page, across chunk borders and
        /// failed rounds.
        #[test]
        fn staged_pages_read_back(rounds in prop::collection::vec(
            (prop::collection::vec((0u64..20_000, 1u64..5_000), 0..5), prop::option::weighted(0.2, 0u64..20_000)), 1..6)) {
            const SPACE: u64 = 25_000;
            let pool = StagingPool::of_chunks(2 * SPACE / 64, 64);
            let mut staged = StagedPages::new(&pool);
            let mut oracle = BTreeMap::new();
            let mut seen = PageSet::new(SPACE);
            for (generation, (ranges, fails)) in rounds.into_iter().enumerate() {
                let mut set = PageSet::new(SPACE);
                for (first, len) in ranges { set.insert_range(PageRange::new(PageIndex(first), len)); }
                let room = staged.room_pages();
                match staged.stage(&set, &Numbered(generation as u64, fails)) {
                    Ok(()) => oracle.extend(set.iter().map(|p| (p.0, generation as u64))),
                    Err(StagingError::Full { .. }) => prop_assert!(set.len() > room),
                    Err(StagingError::Read { .. }) => prop_assert!(fails.is_some()),
                    Err(e) => return Err(TestCaseError::fail(e.to_string())),
                }
                let mut expected = oracle.iter();
                for (page, cell) in staged.pages(&mut seen) {
                    let (want, generation) = expected.next().unwrap();
                    prop_assert_eq!((page.0, *cell), (*want, content(*want, *generation)));
                }
                prop_assert!(expected.next().is_none());
            }
            drop(staged);
            prop_assert_eq!(pool.free_pages(), pool.capacity_pages());
        }
    }
}
