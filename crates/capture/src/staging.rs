//! Bounded memory for the pages of the checkpoint in progress, between the copy and the sink.
//!
//! ```text
//!   chunk 0 (16,384 pages)   chunk 1                 chunk 2
//!  |s0 s1 s2 ............. |s16384 ............... | free ........ |   slots, handed out rising
//!     ▲ slot_of[page]: the newest copy of a page; older copies of it are dead until the next `clear`
//! ```
//!
//! Slots are handed out end to end, so that a scan's pages are one long copy; a page that a later round finds again
//! gets a new slot. Chunks are faulted in when they are made, outside the pause, by [`Staging::reserve`].

use crate::ports::{BoxError, PageReader};
use keyframe_kernel::memory::Arena;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, PageSet};

const CHUNK_PAGES: u64 = 16_384;
const NONE: u32 = u32::MAX;

/// Why pages could not be staged.
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// The memory limit does not hold them.
    #[error("{needed_pages} pages to stage, {free_pages} of {capacity_pages} free")]
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
    #[error("allocate {len_bytes} bytes of staging memory: {source}")]
    Memory {
        /// Bytes of the chunk.
        len_bytes: u64,
        /// Why not.
        source: BoxError,
    },
}

/// The staged pages.
pub struct Staging {
    chunks: Vec<Arena>,
    capacity_pages: u64,
    used_slots: u64,
    slot_of: Vec<u32>,
    page_of: Vec<PageIndex>,
    live_pages: u64,
}

impl Staging {
    /// Memory for at most `capacity_pages` (at least one chunk) out of a space of `space_pages`.
    pub fn new(space_pages: u64, capacity_pages: u64) -> Result<Self, StagingError> {
        let capacity_pages =
            capacity_pages.next_multiple_of(CHUNK_PAGES).clamp(CHUNK_PAGES, u64::from(NONE) - CHUNK_PAGES);
        let mut staging = Self {
            chunks: Vec::new(),
            capacity_pages,
            used_slots: 0,
            slot_of: vec![NONE; space_pages as usize],
            page_of: Vec::new(),
            live_pages: 0,
        };
        staging.reserve(CHUNK_PAGES)?;
        Ok(staging)
    }

    /// Pages that still fit.
    pub fn free_pages(&self) -> u64 {
        self.capacity_pages - self.used_slots
    }

    /// Pages that fit in all.
    pub fn capacity_pages(&self) -> u64 {
        self.capacity_pages
    }

    /// Distinct pages staged.
    pub fn len(&self) -> u64 {
        self.live_pages
    }

    /// True where nothing is staged.
    pub fn is_empty(&self) -> bool {
        self.live_pages == 0
    }

    /// Makes memory for `pages` more pages, as far as the limit allows. Slow: never in the pause.
    pub fn reserve(&mut self, pages: u64) -> Result<(), StagingError> {
        let wanted = (self.used_slots + pages).min(self.capacity_pages);
        while self.made_pages() < wanted {
            self.grow()?;
        }
        Ok(())
    }

    /// Copies every page of `set` into the staging, or nothing where they do not fit.
    pub fn stage(&mut self, set: &PageSet, reader: &dyn PageReader) -> Result<(), StagingError> {
        if set.len() > self.free_pages() {
            return Err(StagingError::Full {
                needed_pages: set.len(),
                free_pages: self.free_pages(),
                capacity_pages: self.capacity_pages,
            });
        }
        let mut batch = Batch { ranges: Vec::new(), pages: 0 };
        for mut range in set.ranges() {
            while range.len_pages > 0 {
                let slot = self.used_slots + batch.pages;
                let room = CHUNK_PAGES - slot % CHUNK_PAGES;
                let part = PageRange::new(range.first, range.len_pages.min(room));
                batch.ranges.push(part);
                batch.pages += part.len_pages;
                range = PageRange::new(part.end(), range.len_pages - part.len_pages);
                if part.len_pages == room {
                    self.copy(&mut batch, reader)?;
                }
            }
        }
        self.copy(&mut batch, reader)
    }

    /// The newest copy of each staged page, in page order.
    pub fn pages(&self) -> impl Iterator<Item = (PageIndex, &Page)> {
        let mut live: Vec<(PageIndex, u32)> = (0..self.used_slots as u32)
            .map(|slot| (self.page_of[slot as usize], slot))
            .filter(|(page, slot)| self.slot_of[page.0 as usize] == *slot)
            .collect();
        live.sort_unstable();
        live.into_iter().map(|(page, slot)| (page, self.slot(slot)))
    }

    /// Frees every slot; the memory is kept for the next checkpoint.
    pub fn clear(&mut self) {
        for page in self.page_of.drain(..) {
            self.slot_of[page.0 as usize] = NONE;
        }
        self.used_slots = 0;
        self.live_pages = 0;
    }

    fn made_pages(&self) -> u64 {
        self.chunks.len() as u64 * CHUNK_PAGES
    }

    fn grow(&mut self) -> Result<(), StagingError> {
        let len_bytes = CHUNK_PAGES * PAGE_BYTES as u64;
        let arena = Arena::new(len_bytes as usize)
            .map_err(|e| StagingError::Memory { len_bytes, source: Box::new(e) })?;
        self.chunks.push(arena);
        Ok(())
    }

    fn slot(&self, slot: u32) -> &Page {
        let (chunk, at) = (u64::from(slot) / CHUNK_PAGES, u64::from(slot) % CHUNK_PAGES);
        &self.chunks[chunk as usize].as_chunks::<PAGE_BYTES>().0[at as usize]
    }

    /// Reads the batch, which lies in one chunk, and hands its slots out.
    fn copy(&mut self, batch: &mut Batch, reader: &dyn PageReader) -> Result<(), StagingError> {
        if batch.pages == 0 {
            return Ok(());
        }
        let chunk = (self.used_slots / CHUNK_PAGES) as usize;
        while self.chunks.len() <= chunk {
            self.grow()?;
        }
        let start = (self.used_slots % CHUNK_PAGES) as usize * PAGE_BYTES;
        let dst = &mut self.chunks[chunk][start..start + batch.pages as usize * PAGE_BYTES];
        reader
            .read(&batch.ranges, dst)
            .map_err(|source| StagingError::Read { pages: batch.pages, source })?;
        for page in batch.ranges.iter().flat_map(|r| r.iter()) {
            let slot = &mut self.slot_of[page.0 as usize];
            self.live_pages += u64::from(*slot == NONE);
            *slot = self.used_slots as u32;
            self.page_of.push(page);
            self.used_slots += 1;
        }
        batch.ranges.clear();
        batch.pages = 0;
        Ok(())
    }
}

struct Batch {
    ranges: Vec<PageRange>,
    pages: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Each page reads as its number and the generation of the reader, repeated.
    struct Numbered(u64);
    impl PageReader for Numbered {
        fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
            let pages = ranges.iter().flat_map(|r| r.iter());
            let mut cells = dst.chunks_exact_mut(PAGE_BYTES);
            for page in pages {
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
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Against a map of pages: the newest copy of every page, across chunk borders and `clear`.
        #[test]
        fn staged_pages_read_back(rounds in prop::collection::vec(
            (prop::collection::vec((0u64..40_000, 1u64..9_000), 0..6), prop::bool::weighted(0.2)), 1..6)) {
            const SPACE: u64 = 49_152;
            let mut staging = Staging::new(SPACE, 2 * SPACE).unwrap();
            let mut oracle = BTreeMap::new();
            for (generation, (ranges, clear)) in rounds.into_iter().enumerate() {
                let mut set = PageSet::new(SPACE);
                for (first, len) in ranges { set.insert_range(PageRange::new(PageIndex(first), len)); }
                if clear { staging.clear(); oracle.clear(); }
                match staging.stage(&set, &Numbered(generation as u64)) {
                    Ok(()) => oracle.extend(set.iter().map(|p| (p.0, generation as u64))),
                    Err(StagingError::Full { .. }) => prop_assert!(set.len() > staging.free_pages()),
                    Err(e) => return Err(TestCaseError::fail(e.to_string())),
                }
                prop_assert_eq!(staging.len(), oracle.len() as u64);
                let mut expected = oracle.iter();
                for (page, cell) in staging.pages() {
                    let (want, generation) = expected.next().unwrap();
                    prop_assert_eq!((page.0, *cell), (*want, content(*want, *generation)));
                }
                prop_assert!(expected.next().is_none());
            }
        }
    }
}
