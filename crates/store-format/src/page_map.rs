//! The map from the pages of a VM to records: a sparse array.
//!
//! A leaf covers 128 pages and exists only if one of them is not zero. So memory follows the pages
//! in use, not the size of the page space, which may come from a damaged file.

use crate::page_ref::PageRef;
use keyframe_units::{PageIndex, PageRange};
use std::collections::{BTreeMap, BTreeSet};

const LEAF_PAGES: u64 = 128;

type Leaf = Box<[PageRef; LEAF_PAGES as usize]>;

/// The record of each page of a VM's RAM. A page without a record is zero.
#[derive(Clone, Debug, Default)]
pub struct PageMap {
    leaves: BTreeMap<u64, Leaf>,
    nonzero_pages: u64,
}

impl PageMap {
    /// Returns the number of pages that are not zero.
    pub fn nonzero_pages(&self) -> u64 {
        self.nonzero_pages
    }

    /// Returns the record of a page; [`PageRef::ZERO`] if the page is zero.
    pub fn get(&self, page: PageIndex) -> PageRef {
        let leaf = self.leaves.get(&(page.0 / LEAF_PAGES));
        leaf.map_or(PageRef::ZERO, |leaf| leaf[(page.0 % LEAF_PAGES) as usize])
    }

    /// Sets the record of a page; returns the former one.
    pub fn set(&mut self, page: PageIndex, to: PageRef) -> PageRef {
        let number = page.0 / LEAF_PAGES;
        if to == PageRef::ZERO && !self.leaves.contains_key(&number) {
            return PageRef::ZERO;
        }
        let leaf = self.leaves.entry(number).or_insert_with(zero_leaf);
        replace(&mut leaf[(page.0 % LEAF_PAGES) as usize], to, &mut self.nonzero_pages)
    }

    /// Sets the records of several ranges of pages, which come in the order of their page numbers
    /// and do not overlap. A range comes with one record for each page, or `None` if its pages are
    /// zero. Faster than [`Self::set`] for each page.
    pub fn set_ranges<'a>(
        &mut self,
        ranges: impl Iterator<Item = (PageRange, Option<&'a [PageRef]>)>,
    ) {
        let mut ranges = ranges.peekable();
        while let Some((range, to)) = ranges.next() {
            let number = range.first.0 / LEAF_PAGES;
            let is_here = |range: PageRange| {
                range.first.0 / LEAF_PAGES == number
                    && range.first.0 % LEAF_PAGES + range.len_pages <= LEAF_PAGES
            };
            if !is_here(range) {
                match to {
                    Some(to) => self.set_all(range.first, to),
                    None => self.clear_range(range),
                }
                continue;
            }
            let leaf = match to {
                Some(_) => Some(self.leaves.entry(number).or_insert_with(zero_leaf)),
                None => self.leaves.get_mut(&number),
            };
            let Some(leaf) = leaf else { continue };
            fill(leaf, range, to, &mut self.nonzero_pages);
            while let Some((range, to)) = ranges.next_if(|(range, _)| is_here(*range)) {
                fill(leaf, range, to, &mut self.nonzero_pages);
            }
        }
    }

    /// Sets the records of consecutive pages.
    fn set_all(&mut self, first: PageIndex, mut to: &[PageRef]) {
        let mut next = first.0;
        while !to.is_empty() {
            let at = (next % LEAF_PAGES) as usize;
            let (here, rest) = to.split_at(to.len().min(LEAF_PAGES as usize - at));
            to = rest;
            if here.iter().any(|to| *to != PageRef::ZERO) {
                let leaf = self.leaves.entry(next / LEAF_PAGES);
                let leaf = leaf.or_insert_with(zero_leaf);
                for (entry, to) in leaf[at..].iter_mut().zip(here) {
                    replace(entry, *to, &mut self.nonzero_pages);
                }
            } else {
                self.clear_range(PageRange::new(PageIndex(next), here.len() as u64));
            }
            next += here.len() as u64;
        }
    }

    /// Calls `place` for the record of every page that is not zero. It may replace the record.
    pub fn repoint(&mut self, place: &mut dyn FnMut(&mut PageRef)) {
        let entries = self.leaves.values_mut().flat_map(|leaf| leaf.iter_mut());
        entries.filter(|to| **to != PageRef::ZERO).for_each(place);
    }

    /// Sets all pages of a range to zero. The time that it takes depends on the parts of the range
    /// that have records, not on the length of the range.
    pub fn clear_range(&mut self, range: PageRange) {
        let (first, end) = (range.first.0, range.end().0);
        if first >= end {
            return;
        }
        for (number, leaf) in self.leaves.range_mut(first / LEAF_PAGES..=(end - 1) / LEAF_PAGES) {
            let leaf_first = number * LEAF_PAGES;
            let from = first.saturating_sub(leaf_first).min(LEAF_PAGES) as usize;
            let to = end.saturating_sub(leaf_first).min(LEAF_PAGES) as usize;
            for entry in &mut leaf[from..to] {
                replace(entry, PageRef::ZERO, &mut self.nonzero_pages);
            }
        }
    }

    /// Returns the pages of a range that are not zero, in rising order, with their records.
    pub fn range(&self, range: PageRange) -> impl Iterator<Item = (PageIndex, PageRef)> + '_ {
        let (first, end) = (range.first.0, range.end().0);
        self.leaves
            .range(first / LEAF_PAGES..end.div_ceil(LEAF_PAGES).max(first / LEAF_PAGES))
            .flat_map(move |(number, leaf)| {
                (number * LEAF_PAGES..)
                    .zip(leaf.iter())
                    .filter(move |(page, to)| **to != PageRef::ZERO && (first..end).contains(page))
                    .map(|(page, to)| (PageIndex(page), *to))
            })
    }

    /// Calls `each` for the record of every page that is not zero, in the order of pages.
    pub fn for_each_ref(&self, mut each: impl FnMut(PageRef)) {
        for leaf in self.leaves.values() {
            leaf.iter().filter(|to| **to != PageRef::ZERO).for_each(|to| each(*to));
        }
    }

    /// Returns the pages whose records differ from those of `other`, in rising order.
    pub fn differing(&self, other: &Self) -> Vec<PageIndex> {
        let numbers: BTreeSet<u64> =
            self.leaves.keys().chain(other.leaves.keys()).copied().collect();
        let zeros = zero_leaf();
        let mut pages = Vec::new();
        for number in numbers {
            let leaf = |map: &'_ Self| map.leaves.get(&number).map_or(*zeros, |leaf| **leaf);
            let (mine, theirs) = (leaf(self), leaf(other));
            if mine == theirs {
                continue;
            }
            let pairs = (number * LEAF_PAGES..).zip(mine.iter().zip(&theirs));
            pages.extend(pairs.filter(|(_, (a, b))| a != b).map(|(page, _)| PageIndex(page)));
        }
        pages
    }

    /// Returns all pages that are not zero, in rising order, with their records.
    pub fn iter(&self) -> impl Iterator<Item = (PageIndex, PageRef)> + '_ {
        self.range(PageRange::new(PageIndex(0), u64::MAX))
    }
}

fn zero_leaf() -> Leaf {
    Box::new([PageRef::ZERO; LEAF_PAGES as usize])
}

/// Sets the entries of a range that lies in the leaf.
fn fill(leaf: &mut Leaf, range: PageRange, to: Option<&[PageRef]>, nonzero_pages: &mut u64) {
    let at = (range.first.0 % LEAF_PAGES) as usize;
    let entries = &mut leaf[at..at + range.len_pages as usize];
    match to {
        Some(to) => entries.iter_mut().zip(to).for_each(|(entry, to)| {
            replace(entry, *to, nonzero_pages);
        }),
        None => entries.iter_mut().for_each(|entry| {
            replace(entry, PageRef::ZERO, nonzero_pages);
        }),
    }
}

/// Replaces an entry and updates the count of pages that are not zero; returns the former entry.
fn replace(entry: &mut PageRef, to: PageRef, nonzero_pages: &mut u64) -> PageRef {
    let was = std::mem::replace(entry, to);
    *nonzero_pages += u64::from(to != PageRef::ZERO);
    *nonzero_pages -= u64::from(was != PageRef::ZERO);
    was
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against the naive oracle: one entry a page.
        #[test]
        fn a_page_map_is_an_array(ops in prop::collection::vec((0u8..5, 0u64..600, 0u64..300), 0..60), from in 0u64..700, len in 0u64..700) {
            let (mut map, mut oracle) = (PageMap::default(), vec![0u64; 1200]);
            for (op, page, value) in ops {
                if op == 0 {
                    map.clear_range(PageRange::new(PageIndex(page), value));
                    oracle[page as usize..(page + value) as usize].fill(0);
                } else if op == 1 {
                    let to: Vec<_> = (page..page + value).map(|at| PageRef(at % (value + 1) % 7)).collect();
                    map.set_ranges(std::iter::once((PageRange::new(PageIndex(page), value), Some(&to[..]))));
                    oracle[page as usize..].iter_mut().zip(to).for_each(|(entry, to)| *entry = to.0);
                } else if op == 2 {
                    // Ranges of one to some pages, gaps of none to some between them; every third
                    // one is zero.
                    let to: Vec<_> = (0..value).map(|at| PageRef(at + 1)).collect();
                    let mut ranges = Vec::new();
                    let (mut first, mut rest) = (page, &to[..]);
                    while !rest.is_empty() {
                        let (here, behind) = rest.split_at(rest.len().min(1 + (first % 5) as usize));
                        let to = (first % 3 > 0).then_some(here);
                        ranges.push((PageRange::new(PageIndex(first), here.len() as u64), to));
                        for (entry, to) in oracle[first as usize..].iter_mut().zip(here) {
                            *entry = if first % 3 > 0 { to.0 } else { 0 };
                        }
                        (first, rest) = (first + here.len() as u64 + first % 2, behind);
                    }
                    map.set_ranges(ranges.into_iter());
                } else {
                    // Values repeat zero often enough to clear pages one by one too.
                    let value = value % 50;
                    let was = map.set(PageIndex(page), PageRef(value));
                    prop_assert_eq!(was.0, std::mem::replace(&mut oracle[page as usize], value));
                }
                prop_assert_eq!(map.nonzero_pages(), oracle.iter().filter(|r| **r != 0).count() as u64);
            }
            let all: Vec<u64> = (0..1200).map(|p| map.get(PageIndex(p)).0).collect();
            prop_assert_eq!(&all, &oracle);
            let mut other = map.clone();
            other.clear_range(PageRange::new(PageIndex(from), len));
            other.set(PageIndex(len), PageRef(99));
            let differ: Vec<u64> = map.differing(&other).into_iter().map(|page| page.0).collect();
            let expected: Vec<u64> =
                (0..1200).filter(|p| map.get(PageIndex(*p)) != other.get(PageIndex(*p))).collect();
            prop_assert_eq!(differ, expected);
            let part: Vec<_> = map.range(PageRange::new(PageIndex(from), len)).map(|(p, r)| (p.0, r.0)).collect();
            let expected: Vec<_> = (0u64..).zip(oracle).filter(|(p, r)| *r != 0 && (from..from + len).contains(p)).collect();
            prop_assert_eq!(part, expected);
        }
    }

    #[test]
    fn clearing_an_enormous_range_costs_nothing() {
        let mut map = PageMap::default();
        map.set(PageIndex(77), PageRef(5));
        map.clear_range(PageRange::new(PageIndex(0), 1 << 40));
        assert_eq!((map.nonzero_pages(), map.iter().count()), (0, 0));
    }
}
