//! Page numbers, ranges of pages, and sets of pages.

use crate::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// The number of a page in a VM's linear page space (see [`crate::RamLayout`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageIndex(pub u64);

/// A range of consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRange {
    /// The number of the first page.
    pub first: PageIndex,
    /// The number of pages.
    pub len_pages: u64,
}

impl PageRange {
    /// Returns the range of `len_pages` pages that starts at `first`.
    pub fn new(first: PageIndex, len_pages: u64) -> Self {
        Self { first, len_pages }
    }

    /// Returns the number of the first page after the range.
    pub fn end(self) -> PageIndex {
        PageIndex(self.first.0 + self.len_pages)
    }

    /// Returns the length in bytes.
    pub fn len_bytes(self) -> u64 {
        self.len_pages * PAGE_BYTES as u64
    }

    /// Returns each page of the range, in rising order.
    pub fn iter(self) -> impl Iterator<Item = PageIndex> {
        (self.first.0..self.end().0).map(PageIndex)
    }
}

/// A set of pages out of a space of fixed size. It takes one bit a page and counts its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    space_pages: u64,
    count: u64,
}

impl PageSet {
    /// Returns an empty set over pages `0..space_pages`.
    pub fn new(space_pages: u64) -> Self {
        Self { words: vec![0; space_pages.div_ceil(64) as usize], space_pages, count: 0 }
    }

    /// Returns the number of pages in the set.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Returns true if the set has no page.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the number of pages in the space.
    pub fn space_pages(&self) -> u64 {
        self.space_pages
    }

    /// Adds a page and returns true if it was not in the set. Panics if the page lies outside the
    /// space.
    pub fn insert(&mut self, page: PageIndex) -> bool {
        assert!(
            page.0 < self.space_pages,
            "page {} outside a space of {}",
            page.0,
            self.space_pages
        );
        let (word, bit) = ((page.0 / 64) as usize, 1u64 << (page.0 % 64));
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.count += u64::from(new);
        new
    }

    /// Removes a page and returns true if it was in the set.
    pub fn remove(&mut self, page: PageIndex) -> bool {
        if page.0 >= self.space_pages {
            return false;
        }
        let (word, bit) = ((page.0 / 64) as usize, 1u64 << (page.0 % 64));
        let had = self.words[word] & bit != 0;
        self.words[word] &= !bit;
        self.count -= u64::from(had);
        had
    }

    /// Returns true if the page is in the set.
    pub fn contains(&self, page: PageIndex) -> bool {
        page.0 < self.space_pages && self.words[(page.0 / 64) as usize] & (1 << (page.0 % 64)) != 0
    }

    /// Adds every page of the range. Panics if the range reaches outside the space.
    pub fn insert_range(&mut self, range: PageRange) {
        assert!(
            range.end().0 <= self.space_pages,
            "{range:?} outside a space of {}",
            self.space_pages
        );
        let (mut page, end) = (range.first.0, range.end().0);
        while page < end {
            let word = (page / 64) as usize;
            let upto = end.min((page / 64 + 1) * 64);
            let len = upto - page;
            let mask = (if len == 64 { u64::MAX } else { (1u64 << len) - 1 }) << (page % 64);
            self.count += u64::from((mask & !self.words[word]).count_ones());
            self.words[word] |= mask;
            page = upto;
        }
    }

    /// Adds every page of `other`. Panics if `other` has another space.
    pub fn union_with(&mut self, other: &Self) {
        assert_eq!(self.space_pages, other.space_pages, "sets over different spaces");
        let mut count = 0;
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine |= theirs;
            count += u64::from(mine.count_ones());
        }
        self.count = count;
    }

    /// Returns the first page of the set from page `from` on; `None` if there is none.
    pub fn next_from(&self, from: PageIndex) -> Option<PageIndex> {
        let first = (from.0 / 64) as usize;
        let words = self.words.iter().enumerate().skip(first);
        let mut left = words.map(|(at, word)| {
            let below = if at == first { (1u64 << (from.0 % 64)) - 1 } else { 0 };
            (at, word & !below)
        });
        let (at, word) = left.find(|(_, word)| *word != 0)?;
        Some(PageIndex(at as u64 * 64 + u64::from(word.trailing_zeros())))
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.count = 0;
    }

    /// Returns the pages in rising order.
    pub fn iter(&self) -> impl Iterator<Item = PageIndex> + '_ {
        self.words.iter().enumerate().filter(|(_, w)| **w != 0).flat_map(|(i, w)| {
            let mut left = *w;
            std::iter::from_fn(move || {
                (left != 0).then(|| {
                    let bit = left.trailing_zeros();
                    left &= left - 1;
                    PageIndex(i as u64 * 64 + u64::from(bit))
                })
            })
        })
    }

    /// Returns the pages as the fewest ranges, in rising order.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> + '_ {
        let mut pages = self.iter().peekable();
        std::iter::from_fn(move || {
            let first = pages.next()?;
            let mut len = 1;
            while pages.next_if(|p| p.0 == first.0 + len).is_some() {
                len += 1;
            }
            Some(PageRange::new(first, len))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Compares the set with a naive one: a tree of page numbers.
        #[test]
        fn a_page_set_is_a_set(ops in prop::collection::vec((0u8..3, 0u64..300, 0u64..80), 0..60)) {
            const SPACE: u64 = 300;
            let (mut set, mut oracle) = (PageSet::new(SPACE), BTreeSet::new());
            for (op, page, len) in ops {
                match op {
                    0 => prop_assert_eq!(set.insert(PageIndex(page)), oracle.insert(page)),
                    1 => prop_assert_eq!(set.remove(PageIndex(page)), oracle.remove(&page)),
                    _ => {
                        let len = len.min(SPACE - page);
                        set.insert_range(PageRange::new(PageIndex(page), len));
                        oracle.extend(page..page + len);
                    }
                }
                prop_assert_eq!(set.len(), oracle.len() as u64);
            }
            prop_assert_eq!(set.iter().map(|p| p.0).collect::<Vec<_>>(), oracle.iter().copied().collect::<Vec<_>>());
            for from in 0..=SPACE {
                let next = set.next_from(PageIndex(from)).map(|page| page.0);
                prop_assert_eq!(next, oracle.range(from..).next().copied());
            }
            let ranges: Vec<_> = set.ranges().collect();
            prop_assert!(ranges.windows(2).all(|w| w[0].end() < w[1].first), "ranges touch: {:?}", ranges);
            let pages: Vec<_> = ranges.iter().flat_map(|r| r.iter()).map(|p| p.0).collect();
            prop_assert_eq!(pages, oracle.into_iter().collect::<Vec<_>>());
        }
    }
}
