//! A sparse map from ranges of blocks to values. Adjacent ranges with continuing values are one
//! entry.
//!
//! ```text
//!   insert 4..8 = b       |a a a a a a a a|     ->  |a a a a|b b b b|
//!                                                    the replaced a a a a go to `removed`
//! ```
//!
//! Invariants: entries do not overlap and are not empty, and no two neighbours could be one entry.
//! An entry has 24 bytes, in a B-tree that is at least half full. So a block that is written alone
//! costs at most 50 bytes.

use std::collections::BTreeMap;

/// The value of a range of blocks. If a range is divided, [`Self::skip`] gives the value of its
/// second part.
pub trait ExtentValue: Copy {
    /// Returns the value of the rest of the range after its first `blocks` blocks.
    #[must_use]
    fn skip(self, blocks: u64) -> Self;
    /// Returns true if `next`, directly after `blocks` blocks of this value, continues it.
    fn continues(self, blocks: u64, next: Self) -> bool;
}

impl ExtentValue for () {
    fn skip(self, _: u64) -> Self {}

    fn continues(self, _: u64, (): Self) -> bool {
        true
    }
}

/// A map from ranges of blocks to values. A range is given as its first block and its number of
/// blocks. Ranges do not overlap.
#[derive(Clone, Debug)]
pub struct ExtentMap<V>(BTreeMap<u64, (u64, V)>);

impl<V> Default for ExtentMap<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V: ExtentValue> ExtentMap<V> {
    /// Returns the number of ranges in the map. The map's memory is proportional to it.
    pub fn entries(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of blocks in all ranges.
    pub fn blocks(&self) -> u64 {
        self.0.values().map(|(len, _)| len).sum()
    }

    /// Sets the `len` blocks from `start` on to `value`. Calls `removed` with each part of an older
    /// range that this replaces: first block, number of blocks, value.
    pub fn insert(&mut self, start: u64, len: u64, value: V, removed: &mut dyn FnMut(u64, u64, V)) {
        if len == 0 {
            return;
        }
        self.remove(start, len, removed);
        let (mut start, mut len, mut value) = (start, len, value);
        if let Some((&before, &(before_len, before_value))) = self.0.range(..start).next_back()
            && before + before_len == start
            && before_value.continues(before_len, value)
        {
            self.0.remove(&before);
            (start, len, value) = (before, before_len + len, before_value);
        }
        if let Some(&(after_len, after_value)) = self.0.get(&(start + len))
            && value.continues(len, after_value)
        {
            self.0.remove(&(start + len));
            len += after_len;
        }
        self.0.insert(start, (len, value));
    }

    /// Removes the `len` blocks from `start` on. Calls `removed` with each part that the map had:
    /// first block, number of blocks, value.
    pub fn remove(&mut self, start: u64, len: u64, removed: &mut dyn FnMut(u64, u64, V)) {
        if len == 0 {
            return;
        }
        let end = start.saturating_add(len);
        if let Some((&first, &(first_len, value))) = self.0.range(..start).next_back()
            && first + first_len > start
        {
            self.0.insert(first, (start - first, value));
            self.0.insert(start, (first + first_len - start, value.skip(start - first)));
        }
        while let Some((&at, &(at_len, value))) = self.0.range(start..end).next() {
            self.0.remove(&at);
            let taken = at_len.min(end - at);
            if taken < at_len {
                self.0.insert(end, (at_len - taken, value.skip(taken)));
            }
            removed(at, taken, value);
        }
    }

    /// Calls `show` for each part of the `len` blocks from `start` on, in rising order: first
    /// block, number of blocks, and the value. The value of a gap is `None`.
    pub fn each(&self, start: u64, len: u64, show: &mut dyn FnMut(u64, u64, Option<V>)) {
        let end = start.saturating_add(len);
        let mut at = start;
        if let Some((&first, &(first_len, value))) = self.0.range(..start).next_back()
            && first + first_len > start
        {
            let stop = end.min(first + first_len);
            if stop > start {
                show(start, stop - start, Some(value.skip(start - first)));
                at = stop;
            }
        }
        for (&first, &(first_len, value)) in self.0.range(at..end) {
            if first > at {
                show(at, first - at, None);
            }
            let stop = end.min(first + first_len);
            show(first, stop - first, Some(value));
            at = stop;
        }
        if at < end {
            show(at, end - at, None);
        }
    }

    /// Returns the first range that ends after block `from`, without its blocks before `from`:
    /// first block, number of blocks, value. Returns `None` if there is none.
    pub fn next(&self, from: u64) -> Option<(u64, u64, V)> {
        if let Some((&first, &(len, value))) = self.0.range(..from).next_back()
            && first + len > from
        {
            return Some((from, first + len - from, value.skip(from - first)));
        }
        self.0.range(from..).next().map(|(&first, &(len, value))| (first, len, value))
    }

    /// Removes the first range and returns it: first block, number of blocks, value. Returns `None`
    /// if the map is empty.
    pub fn pop_first(&mut self) -> Option<(u64, u64, V)> {
        self.0.pop_first().map(|(start, (len, value))| (start, len, value))
    }

    /// Returns all ranges in rising order: first block, number of blocks, value.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64, V)> + '_ {
        self.0.iter().map(|(&start, &(len, value))| (start, len, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap as Naive;

    impl ExtentValue for (u8, u64) {
        fn skip(self, blocks: u64) -> Self {
            (self.0, self.1 + blocks)
        }

        fn continues(self, blocks: u64, next: Self) -> bool {
            next == self.skip(blocks)
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_map_of_single_blocks(
            steps in prop::collection::vec((0u64..60, 0u64..20, 0u8..4, any::<bool>()), 1..60),
            looks in prop::collection::vec((0u64..70, 0u64..30), 1..10),
        ) {
            let mut map = ExtentMap::default();
            let mut naive: Naive<u64, (u8, u64)> = Naive::new();
            for (start, len, tag, insert) in steps {
                let mut gone = Naive::new();
                let mut expected = Naive::new();
                for block in start..start + len {
                    if let Some(value) = naive.remove(&block) {
                        expected.insert(block, value);
                    }
                    if insert {
                        naive.insert(block, (tag, block));
                    }
                }
                let mut removed = |at: u64, n: u64, value: (u8, u64)| {
                    (0..n).for_each(|i| assert!(gone.insert(at + i, value.skip(i)).is_none()));
                };
                if insert {
                    map.insert(start, len, (tag, start), &mut removed);
                } else {
                    map.remove(start, len, &mut removed);
                }
                prop_assert_eq!(gone, expected);
                prop_assert_eq!(map.blocks(), naive.len() as u64);
            }
            for (start, len) in looks {
                let mut at = start;
                map.each(start, len, &mut |s, n, value| {
                    assert!(s == at && n > 0);
                    (0..n).for_each(|i| assert_eq!(naive.get(&(s + i)).copied(), value.map(|v| v.skip(i))));
                    at += n;
                });
                prop_assert_eq!(at, start + len);
                let next = map.next(start).map(|(s, _, v)| (s, v));
                prop_assert_eq!(next, naive.range(start..).next().map(|(b, v)| (*b, *v)));
            }
            let neighbours: Vec<_> = map.iter().collect();
            for pair in neighbours.windows(2) {
                prop_assert!(!(pair[0].0 + pair[0].1 == pair[1].0 && pair[0].2.continues(pair[0].1, pair[1].2)));
            }
        }
    }
}
