//! The map from the blocks of a VM's disks to records.
//!
//! ```text
//!   page space of a run:   | RAM | disk 0 | disk 1 | ...      blocks of 4096 bytes, numbered after the pages of RAM
//!
//!   records   block -> record                    zeros   ranges that were made zero
//!   in neither: never written, the image beneath holds the block
//! ```
//!
//! Invariants: no block is in both. Memory follows what was written, not the size of the disks: a
//! range of zeros is one entry however long it is.

use crate::page_map::PageMap;
use crate::page_ref::PageRef;
use keyframe_units::{PageIndex, PageRange};
use rangemap::RangeSet;
use std::ops::Range;

/// The largest number of pages of a page space. All numbers of blocks are below it.
pub const SPACE_PAGES_MAX: u64 = 1 << 40;

/// The known content of the blocks of all disks.
#[derive(Clone, Debug, Default)]
pub struct DiskMap {
    records: PageMap,
    zeros: RangeSet<u64>,
}

/// The former content of a range of blocks, for [`DiskMap::put_back`].
#[derive(Debug)]
pub struct FormerRange {
    range: Range<u64>,
    records: Vec<(PageIndex, PageRef)>,
    zeros: Vec<Range<u64>>,
}

impl FormerRange {
    /// Calls `place` for every record of a block in the range. It may replace the record.
    pub fn repoint(&mut self, place: &mut dyn FnMut(&mut PageRef)) {
        self.records
            .iter_mut()
            .map(|(_, to)| to)
            .filter(|to| **to != PageRef::ZERO)
            .for_each(place);
    }
}

/// Returns a range of blocks as a range of their numbers.
pub fn block_numbers(range: PageRange) -> Range<u64> {
    range.first.0..range.end().0
}

/// Returns the number of blocks in a set.
pub fn count_blocks(set: &RangeSet<u64>) -> u64 {
    set.iter().map(|range| range.end - range.start).sum()
}

impl DiskMap {
    /// Returns the record of a block; [`PageRef::ZERO`] if the block is zero; `None` if its image
    /// holds it.
    pub fn get(&self, block: PageIndex) -> Option<PageRef> {
        match self.records.get(block) {
            PageRef::ZERO => self.zeros.contains(&block.0).then_some(PageRef::ZERO),
            record => Some(record),
        }
    }

    /// Returns the first block at or after `from` that was written; `None` if there is none.
    pub fn next(&self, from: PageIndex) -> Option<PageIndex> {
        if from.0 >= SPACE_PAGES_MAX {
            return None;
        }
        let rest = PageRange::new(from, SPACE_PAGES_MAX - from.0);
        let record = self.records.range(rest).next().map(|(block, _)| block);
        let zero = self
            .zeros
            .overlapping(&block_numbers(rest))
            .next()
            .map(|r| PageIndex(r.start.max(from.0)));
        record.into_iter().chain(zero).min()
    }

    /// Returns the same disks behind `to_pages` pages of RAM, where they lie behind `from_pages` pages
    /// of it here.
    #[must_use]
    pub fn behind(&self, from_pages: u64, to_pages: u64) -> Self {
        let mut moved = Self::default();
        // No block lies before the RAM's end.
        let place = |block: u64| block.saturating_sub(from_pages).saturating_add(to_pages);
        let all = PageRange::new(PageIndex(0), SPACE_PAGES_MAX);
        for (block, record) in self.records.range(all) {
            moved.records.set(PageIndex(place(block.0)), record);
        }
        moved.zeros.extend(self.zeros.iter().map(|range| place(range.start)..place(range.end)));
        moved
    }

    /// Returns the number of blocks that were written.
    pub fn known_blocks(&self) -> u64 {
        self.records.nonzero_pages() + count_blocks(&self.zeros)
    }

    /// Sets the record of a block.
    pub fn set(&mut self, block: PageIndex, record: PageRef) {
        if record == PageRef::ZERO {
            return self.set_zero(PageRange::new(block, 1));
        }
        self.zeros.remove(block.0..block.0 + 1);
        self.records.set(block, record);
    }

    /// Sets all blocks of a range to zero.
    pub fn set_zero(&mut self, range: PageRange) {
        if range.len_pages > 0 {
            self.records.clear_range(range);
            self.zeros.insert(block_numbers(range));
        }
    }

    /// Calls `place` for every record of a block. It may replace the record.
    pub fn repoint(&mut self, place: &mut dyn FnMut(&mut PageRef)) {
        self.records.repoint(place);
    }

    /// Returns the present content of a range, for [`Self::put_back`].
    pub fn former(&self, range: PageRange) -> FormerRange {
        let numbers = block_numbers(range);
        let clip = |r: &Range<u64>| r.start.max(numbers.start)..r.end.min(numbers.end);
        let zeros = self.zeros.overlapping(&numbers).map(clip).collect();
        FormerRange { records: self.records.range(range).collect(), zeros, range: numbers }
    }

    /// Restores the content that [`Self::former`] returned.
    pub fn put_back(&mut self, former: FormerRange) {
        let FormerRange { range, records, zeros } = former;
        self.records.clear_range(PageRange::new(PageIndex(range.start), range.end - range.start));
        self.zeros.remove(range);
        for (block, record) in records {
            self.records.set(block, record);
        }
        self.zeros.extend(zeros);
    }

    /// Calls `show` for all written blocks of a range, rising: one block and its record, or a range
    /// and [`PageRef::ZERO`].
    pub fn each(&self, range: Range<u64>, show: &mut dyn FnMut(PageRange, PageRef)) {
        let pages = PageRange::new(PageIndex(range.start), range.end.saturating_sub(range.start));
        let mut zeros = self.zeros.overlapping(&range).peekable();
        let mut zeros_before = |end: u64, show: &mut dyn FnMut(PageRange, PageRef)| {
            while let Some(zero) = zeros.next_if(|zero| zero.start < end) {
                let (first, end) = (zero.start.max(range.start), zero.end.min(range.end));
                show(PageRange::new(PageIndex(first), end - first), PageRef::ZERO);
            }
        };
        for (block, record) in self.records.range(pages) {
            zeros_before(block.0, show);
            show(PageRange::new(block, 1), record);
        }
        zeros_before(range.end, show);
    }

    /// Returns the records of all blocks that have one.
    pub fn records(&self) -> impl Iterator<Item = PageRef> + '_ {
        self.records.iter().map(|(_, record)| record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_move_with_the_end_of_ram() {
        let mut map = DiskMap::default();
        let record = PageRef::new(3, 100);
        map.set(PageIndex(12), record);
        map.set_zero(PageRange::new(PageIndex(14), 3));
        for (from, to, first) in [(10, 10, 12), (10, 15, 17), (10, 2, 4)] {
            let moved = map.behind(from, to);
            assert_eq!(moved.get(PageIndex(first)), Some(record));
            assert_eq!(moved.get(PageIndex(first + 1)), None);
            assert_eq!(moved.get(PageIndex(first + 4)), Some(PageRef::ZERO));
            assert_eq!(moved.known_blocks(), map.known_blocks());
        }
    }
    use proptest::prelude::*;

    proptest! {
        /// Against the naive oracle: one entry a block.
        #[test]
        fn a_disk_map_is_an_array(
            ops in prop::collection::vec((0u8..3, 0u64..300, 1u64..60, 1u64..50), 0..50), from in 0u64..400,
        ) {
            let (mut map, mut oracle) = (DiskMap::default(), vec![None; 400]);
            for (op, block, len, record) in ops {
                let range = PageRange::new(PageIndex(block), len);
                let written = block as usize..(block + len) as usize;
                match op {
                    0 => {
                        map.set_zero(range);
                        oracle[written].fill(Some(0));
                    }
                    1 => {
                        map.set(PageIndex(block), PageRef(record));
                        oracle[block as usize] = Some(record);
                    }
                    // A change that is taken back.
                    _ => {
                        let former = map.former(range);
                        map.set_zero(PageRange::new(PageIndex(block), len / 2));
                        map.set(PageIndex(block + len - 1), PageRef(record));
                        map.put_back(former);
                    }
                }
            }
            let all: Vec<_> = (0..400).map(|b| map.get(PageIndex(b)).map(|r| r.0)).collect();
            prop_assert_eq!(&all, &oracle);
            let next = (from as usize..400).find(|b| oracle[*b].is_some()).map(|b| PageIndex(b as u64));
            prop_assert_eq!(map.next(PageIndex(from)), next);
            prop_assert_eq!(map.known_blocks(), oracle.iter().flatten().count() as u64);
            let (mut shown, mut end) = (vec![None; 400], from);
            map.each(from..380, &mut |range, record| {
                assert!(range.first.0 >= end, "not rising");
                end = range.end().0;
                range.iter().for_each(|b| shown[b.0 as usize] = Some(record.0));
            });
            let expected: Vec<_> = (0u64..).zip(&oracle).map(|(b, c)| c.filter(|_| (from..380).contains(&b))).collect();
            prop_assert_eq!(shown, expected);
        }
    }

    #[test]
    fn an_enormous_range_of_zeros_is_one_entry() {
        let mut map = DiskMap::default();
        map.set(PageIndex(7), PageRef(3));
        let all = PageRange::new(PageIndex(0), SPACE_PAGES_MAX);
        let former = map.former(all);
        map.set_zero(all);
        assert_eq!((map.known_blocks(), map.zeros.len()), (SPACE_PAGES_MAX, 1));
        map.put_back(former);
        assert_eq!((map.known_blocks(), map.get(PageIndex(7))), (1, Some(PageRef(3))));
    }
}
