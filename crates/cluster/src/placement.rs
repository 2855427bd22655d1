//! Chooses the item that a worker takes next. Pure.
//!
//! ```text
//!   open      · · 2 3 4 5 · · 8 9 10 11 12 13 · 15       (· taken or settled)
//!   the worker's last item was 7        ─▶ 8: its node has most of 8's pages
//!   it had none, or 8 is taken          ─▶ the middle of the longest stretch, 8..13
//!                                          (of an untouched stretch from 0: its first item)
//! ```
//!
//! Neighbours in time share most pages, so a node that has just processed an interval needs to
//! fetch little for the next. A new worker takes half of the longest stretch that is left, as
//! work-stealing schedulers do (Blumofe and Leiserson, Scheduling multithreaded computations by
//! work stealing, 1999): few stretches are begun, and all workers end at about the same time.

use crate::QueueItem;

/// The rule by which a worker chooses its next item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The longest item first (Graham, Bounds on multiprocessing timing anomalies, 1969): for
    /// workers that share memory and cache.
    LongestFirst,
    /// The item after the worker's last one: for nodes with caches of their own.
    Neighbours,
}

impl Placement {
    /// Chooses an item of `open` (ascending, each index once) for a worker whose last item was
    /// `last`; `None` if there is none.
    pub fn choose(self, open: &[QueueItem], last: Option<u32>) -> Option<QueueItem> {
        match self {
            // Of items with the same weight, the first.
            Self::LongestFirst => open.iter().rev().max_by_key(|item| item.weight).copied(),
            Self::Neighbours => {
                let follows = |item: &&QueueItem| {
                    last.and_then(|last| last.checked_add(1)) == Some(item.index)
                };
                open.iter().find(follows).copied().or_else(|| of_longest_stretch(open))
            }
        }
    }
}

/// The first item if the longest stretch begins with number 0 and is thus untouched, else its
/// middle by weight.
fn of_longest_stretch(open: &[QueueItem]) -> Option<QueueItem> {
    let weight =
        |stretch: &[QueueItem]| stretch.iter().map(|item| u128::from(item.weight)).sum::<u128>();
    let stretches = open.chunk_by(|a, b| a.index.checked_add(1) == Some(b.index));
    let longest = stretches.rev().max_by_key(|stretch| (weight(stretch), stretch.len()))?;
    let first = longest.first()?;
    // No worker can have come from before number 0.
    if first.index == 0 {
        return Some(*first);
    }
    let (half, mut before) = (weight(longest) / 2, 0);
    for item in longest {
        if before >= half {
            return Some(*item);
        }
        before += u128::from(item.weight);
    }
    longest.get(longest.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn items(all: &[(u32, u64)]) -> Vec<QueueItem> {
        all.iter().map(|&(index, weight)| QueueItem { index, weight }).collect()
    }

    #[test]
    fn the_longest_comes_first() {
        let open = items(&[(3, 5), (4, 9), (7, 9), (8, 1)]);
        assert_eq!(Placement::LongestFirst.choose(&open, Some(7)).unwrap().index, 4);
        assert_eq!(Placement::LongestFirst.choose(&[], None), None);
    }

    #[test]
    fn a_worker_goes_on_with_the_neighbour_and_a_new_one_begins_in_the_middle() {
        let all = items(&(0..16).map(|index| (index, 10)).collect::<Vec<_>>());
        let rule = Placement::Neighbours;
        assert_eq!(rule.choose(&all, None).unwrap().index, 0);
        assert_eq!(rule.choose(&all[1..], None).unwrap().index, 9);
        assert_eq!(rule.choose(&all[1..], Some(0)).unwrap().index, 1);
        // 3..8 and 11..16 are left; a worker whose next item is taken gets half of one of them.
        let left = [&all[3..8], &all[11..16]].concat();
        assert_eq!(rule.choose(&left, Some(8)).unwrap().index, 6);
        assert_eq!(rule.choose(&left, Some(u32::MAX)).unwrap().index, 6);
        assert_eq!(rule.choose(&all[5..6], Some(9)).unwrap().index, 5);
    }

    proptest! {
        /// Workers with caches of their own begin few stretches: each stretch makes a node fetch a
        /// whole RAM.
        #[test]
        fn all_are_taken_once_and_in_few_stretches(weights in prop::collection::vec(1u64..100, 1..200), workers in 1usize..9) {
            let mut open: Vec<QueueItem> =
                weights.iter().enumerate().map(|(index, &weight)| QueueItem { index: index as u32, weight }).collect();
            // Each worker with the time at which it is free again.
            let mut free = vec![(0u64, None); workers];
            let mut begun = 0;
            while !open.is_empty() {
                let who = (0..workers).min_by_key(|&who| free[who].0).unwrap();
                let last: Option<u32> = free[who].1;
                let next = Placement::Neighbours.choose(&open, last).unwrap();
                open.retain(|item| item.index != next.index);
                begun += usize::from(last.is_none_or(|last| last + 1 != next.index));
                free[who] = (free[who].0 + next.weight, Some(next.index));
            }
            let ends = free.iter().map(|(end, _)| *end);
            let total: u64 = weights.iter().sum();
            prop_assert!(ends.max().unwrap() <= total.div_ceil(workers as u64) + 100);
            prop_assert!(begun <= workers * (weights.len().ilog2() as usize + 2), "{begun} stretches");
        }
    }
}
