//! The copied pages of one checkpoint, or of a part of it.
//!
//! ```text
//!   chunk 0 (1,024 pages)    chunk 1                 slots, handed out rising
//!  |s0 s1 s2 ............. |s1024 ..... | free ....|
//!   └─ runs: pages 7..9, page 40, pages 100..220 ...  a page that a later round found again has a later slot too
//! ```
//!
//! Slots are handed out end to end, so that a scan's pages are one long copy. Of a page with
//! several slots the last one counts.

use crate::pool::{Chunk, Pool, PoolError};
use crate::ports::{BoxError, PageReader};
use keyframe_units::{Page, PageIndex, PageRange, PageSet};

/// Why pages could not be staged.
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// The memory limit does not hold them.
    #[error(
        "{needed_pages} pages to copy at once and memory for {free_pages} of {capacity_pages} (a larger --staging has more)"
    )]
    Full {
        /// Pages to be staged.
        needed_pages: u64,
        /// Pages that still fit.
        free_pages: u64,
        /// The limit.
        capacity_pages: u64,
    },
    /// Reading them failed.
    #[error("copy {pages} pages of guest RAM: {source}")]
    Read {
        /// Pages to be read.
        pages: u64,
        /// Why not.
        source: BoxError,
    },
    /// No memory for another chunk.
    #[error(transparent)]
    Memory(#[from] PoolError),
}

/// Pages and where their copies lie: `slots[i]` belongs to the i-th page of `runs`.
pub struct Parcel {
    pool: Pool,
    chunks: Vec<Chunk>,
    runs: Vec<PageRange>,
    used_slots: u64,
}

impl Parcel {
    /// An empty parcel, with memory from `pool`.
    pub fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), chunks: Vec::new(), runs: Vec::new(), used_slots: 0 }
    }

    /// True where nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.used_slots == 0
    }

    /// Copies in it, superseded ones included.
    pub fn len_pages(&self) -> u64 {
        self.used_slots
    }

    /// Pages that still fit.
    pub fn room_pages(&self) -> u64 {
        self.chunks.len() as u64 * self.pool.chunk_pages() - self.used_slots
            + self.pool.free_pages()
    }

    /// Copies every page of `set`, or nothing where they do not fit.
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

    /// Hands out slots for every page of `set`, rising, for [`Self::fill`]; none where they do not
    /// fit.
    pub fn allot(&mut self, set: &PageSet) -> Result<Vec<Slots>, StagingError> {
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
                slots.push(Slots { pages: part, chunk, at });
                self.used_slots += part.len_pages;
                range = PageRange::new(part.end(), range.len_pages - part.len_pages);
            }
        }
        Ok(slots)
    }

    /// Reads the pages of `slots`, which lie end to end in one chunk.
    pub fn fill(&mut self, slots: &[Slots], reader: &dyn PageReader) -> Result<(), StagingError> {
        let Some(first) = slots.first() else { return Ok(()) };
        let ranges: Vec<PageRange> = slots.iter().map(|s| s.pages).collect();
        let pages = ranges.iter().map(|r| r.len_pages).sum();
        let read = match self.chunks.get_mut(first.chunk as usize) {
            Some(chunk) => reader.read(&ranges, chunk.bytes_mut(first.at, pages)),
            None => Err("the chunk is not there".into()),
        };
        read.map_err(|source| StagingError::Read { pages, source })
    }

    /// Undoes the newest [`Self::allot`].
    fn take_back(&mut self, slots: &[Slots]) {
        let pages: u64 = slots.iter().map(|s| s.pages.len_pages).sum();
        self.used_slots -= pages;
        let mut left = pages;
        while left > 0 {
            left -= self.runs.pop().map_or(left, |run| run.len_pages);
        }
    }

    /// The last copy of each page, in page order. `seen` is scratch space over the VM's pages.
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

/// Where copies of consecutive pages go: within one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// The pages.
    pub pages: PageRange,
    chunk: u64,
    at: u64,
}

impl Slots {
    /// The slot of one page of it.
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

    /// Each page reads as its number and the generation of the reader; fails at page `1`'s multiple
    /// of the second.
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
        /// Against a map of pages: the newest copy of every page, across chunk borders and failed
        /// rounds.
        #[test]
        fn staged_pages_read_back(rounds in prop::collection::vec(
            (prop::collection::vec((0u64..20_000, 1u64..5_000), 0..5), prop::option::weighted(0.2, 0u64..20_000)), 1..6)) {
            const SPACE: u64 = 25_000;
            let pool = Pool::of_chunks(2 * SPACE / 64, 64);
            let mut parcel = Parcel::new(&pool);
            let mut oracle = BTreeMap::new();
            let mut seen = PageSet::new(SPACE);
            for (generation, (ranges, fails)) in rounds.into_iter().enumerate() {
                let mut set = PageSet::new(SPACE);
                for (first, len) in ranges { set.insert_range(PageRange::new(PageIndex(first), len)); }
                let room = parcel.room_pages();
                match parcel.stage(&set, &Numbered(generation as u64, fails)) {
                    Ok(()) => oracle.extend(set.iter().map(|p| (p.0, generation as u64))),
                    Err(StagingError::Full { .. }) => prop_assert!(set.len() > room),
                    Err(StagingError::Read { .. }) => prop_assert!(fails.is_some()),
                    Err(e) => return Err(TestCaseError::fail(e.to_string())),
                }
                let mut expected = oracle.iter();
                for (page, cell) in parcel.pages(&mut seen) {
                    let (want, generation) = expected.next().unwrap();
                    prop_assert_eq!((page.0, *cell), (*want, content(*want, *generation)));
                }
                prop_assert!(expected.next().is_none());
            }
            drop(parcel);
            prop_assert_eq!(pool.free_pages(), pool.capacity_pages());
        }
    }
}
