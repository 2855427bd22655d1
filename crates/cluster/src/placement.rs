//! Chooses the item that a worker takes next. Pure.
//!
//! ```text
//!   open      · · 2 3 4 5 · · 8 9 10 11 12 13 · 15       (· taken or settled)
//!   the worker's last item was 7        ─▶ 8: its node has most of 8's pages
//!   it had none, and is the second of 4 ─▶ 5: where the second quarter of the work begins
//!   8 is taken                          ─▶ the middle of the longest stretch, 8..13
//!                                          (of an untouched stretch from 0: its first item)
//! ```
//!
//! A worker goes on from an interval to the next one, in the same QEMU or at least with most of its
//! pages on the node. So each worker begins with a range of its own. A worker that has nothing left
//! takes half of the longest stretch that is left, as work-stealing schedulers do (Blumofe and
//! Leiserson, Scheduling multithreaded computations by work stealing, 1999): few stretches are
//! begun, and all workers end at about the same time.

use crate::QueueItem;

/// The share of a worker in all work. The work is divided evenly among `count` workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The worker's number, from 0 on.
    pub number: u32,
    /// The number of workers.
    pub count: u32,
}

impl Share {
    /// Divides the share evenly among `slots` slots, and returns that of slot `slot`.
    #[must_use]
    pub fn of_slot(self, slot: u32, slots: u32) -> Self {
        let number = self.number.saturating_mul(slots).saturating_add(slot);
        Self { number, count: self.count.saturating_mul(slots) }
    }
}

/// The facts about a worker by which its next item is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preference<'a> {
    /// The worker's last item; `None` if it had none.
    pub last: Option<u32>,
    /// Its share of the work, at the begin of which it takes its first item; `None` if the work is
    /// not known as a whole.
    pub share: Option<Share>,
    /// The items that other workers have, if more items will come: the worker of such an item goes
    /// on to the next ones.
    pub live: Option<LiveRanges<'a>>,
}

/// The ranges of workers while items still come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveRanges<'a> {
    /// The numbers of the items that workers have.
    pub taken: &'a [u32],
    /// The number of items that a worker gets in a row, its present one included.
    pub length: u32,
}

/// The rule by which a worker chooses its next item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The longest item first (Graham, Bounds on multiprocessing timing anomalies, 1969): for
    /// workers that share memory and cache.
    LongestFirst,
    /// The item after the worker's last one: for workers that go on in the same QEMU, and for nodes
    /// with caches of their own.
    Neighbours,
}

impl Placement {
    /// Chooses an item of `open`, which is sorted by number and has each number once, for a worker
    /// with this `preference`. Returns `None` if `open` is empty.
    pub fn choose(self, open: &[QueueItem], preference: Preference<'_>) -> Option<QueueItem> {
        match self {
            // Of items with the same weight, the first.
            Self::LongestFirst => open.iter().rev().max_by_key(|item| item.weight).copied(),
            Self::Neighbours => {
                let Preference { last, share, live } = preference;
                if let Some(live) = live {
                    return after_ranges(open, live);
                }
                let Some(last) = last else {
                    let of_share = share.and_then(|share| of_share(open, share));
                    return of_share.or_else(|| of_longest_stretch(open));
                };
                let follows = |item: &&QueueItem| last.checked_add(1) == Some(item.index);
                open.iter().find(follows).copied().or_else(|| of_longest_stretch(open))
            }
        }
    }
}

/// The first item of the share, if no other worker has begun with that part of the work.
fn of_share(open: &[QueueItem], share: Share) -> Option<QueueItem> {
    let total: u128 = open.iter().map(|item| u128::from(item.weight)).sum();
    let before_share = total * u128::from(share.number) / u128::from(share.count.max(1));
    let mut before = 0;
    let at = open.iter().position(|item| {
        let is_in_share = before >= before_share;
        before += u128::from(item.weight);
        is_in_share
    })?;
    let (item, previous) = (open[at], at.checked_sub(1).map(|at| open[at].index));
    let is_untouched = previous.is_none_or(|index| index + 1 == item.index);
    is_untouched.then_some(item)
}

/// The first item that lies behind the ranges of other workers. A stretch behind a worker's present
/// item is that worker's up to the length of a range, or up to its middle if it is longer than two.
fn after_ranges(open: &[QueueItem], live: LiveRanges<'_>) -> Option<QueueItem> {
    let stretches = open.chunk_by(|a, b| a.index.checked_add(1) == Some(b.index));
    let free = stretches.filter_map(|stretch| {
        let first = stretch.first()?.index;
        let is_behind_a_worker =
            first.checked_sub(1).is_some_and(|before| live.taken.contains(&before));
        let kept = if is_behind_a_worker {
            (live.length.saturating_sub(1) as usize).max(stretch.len() / 2)
        } else {
            0
        };
        stretch.get(kept..).filter(|free| !free.is_empty())
    });
    // Of several, the longest; of equal ones, the oldest.
    free.rev().max_by_key(|free| free.len()).and_then(|free| free.first()).copied()
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

    fn after(last: u32) -> Preference<'static> {
        Preference { last: Some(last), ..Preference::default() }
    }

    #[test]
    fn while_items_come_a_worker_keeps_the_next_ones() {
        let all = items(&(0..12).map(|index| (index, 10)).collect::<Vec<_>>());
        let next = |open: &[QueueItem], taken: &[u32], length| {
            let live = Some(LiveRanges { taken, length });
            let preference = Preference { live, ..Preference::default() };
            Placement::Neighbours.choose(open, preference).map(|item| item.index)
        };
        assert_eq!(next(&all[..3], &[], 4), Some(0));
        // The worker of 0 will do 1, 2 and 3.
        assert_eq!(next(&all[1..4], &[0], 4), None);
        assert_eq!(next(&all[1..5], &[0], 4), Some(4));
        // The workers do not keep up: half of what waits.
        assert_eq!(next(&all[1..], &[0], 1), Some(6));
        // The worker of 3 has given up its range.
        assert_eq!(next(&all[4..6], &[8], 4), Some(4));
    }

    #[test]
    fn each_worker_begins_with_its_share() {
        let all = items(&(0..12).map(|index| (index, 10)).collect::<Vec<_>>());
        let first = |open: &[QueueItem], number| {
            let share = Some(Share { number, count: 3 });
            Placement::Neighbours
                .choose(open, Preference { share, ..Preference::default() })
                .unwrap()
                .index
        };
        assert_eq!([0, 1, 2].map(|number| first(&all, number)), [0, 4, 8]);
        // Another worker has begun where the share begins: half of the longest stretch.
        let left = [&all[..4], &all[5..]].concat();
        assert_eq!(first(&left, 1), 9);
        let slots = [0, 1].map(|slot| Share { number: 1, count: 2 }.of_slot(slot, 2).number);
        assert_eq!(slots, [2, 3]);
    }

    #[test]
    fn the_longest_comes_first() {
        let open = items(&[(3, 5), (4, 9), (7, 9), (8, 1)]);
        assert_eq!(Placement::LongestFirst.choose(&open, after(7)).unwrap().index, 4);
        assert_eq!(Placement::LongestFirst.choose(&[], Preference::default()), None);
    }

    #[test]
    fn a_worker_goes_on_with_the_neighbour_and_a_new_one_begins_in_the_middle() {
        let all = items(&(0..16).map(|index| (index, 10)).collect::<Vec<_>>());
        let rule = Placement::Neighbours;
        assert_eq!(rule.choose(&all, Preference::default()).unwrap().index, 0);
        assert_eq!(rule.choose(&all[1..], Preference::default()).unwrap().index, 9);
        assert_eq!(rule.choose(&all[1..], after(0)).unwrap().index, 1);
        // 3..8 and 11..16 are left; a worker whose next item is taken gets half of one of them.
        let left = [&all[3..8], &all[11..16]].concat();
        assert_eq!(rule.choose(&left, after(8)).unwrap().index, 6);
        assert_eq!(rule.choose(&left, after(u32::MAX)).unwrap().index, 6);
        assert_eq!(rule.choose(&all[5..6], after(9)).unwrap().index, 5);
    }

    proptest! {
        /// Workers with caches of their own begin few stretches: each stretch makes a node fetch a
        /// whole RAM.
        #[test]
        fn all_are_taken_once_and_in_few_stretches(weights in prop::collection::vec(1u64..100, 1..200), workers in 1usize..9, has_shares: bool) {
            let mut open: Vec<QueueItem> =
                weights.iter().enumerate().map(|(index, &weight)| QueueItem { index: index as u32, weight }).collect();
            // Each worker with the time at which it is free again.
            let mut free = vec![(0u64, None); workers];
            let mut begun = 0;
            while !open.is_empty() {
                let who = (0..workers).min_by_key(|&who| free[who].0).unwrap();
                let last: Option<u32> = free[who].1;
                let share = Some(Share { number: who as u32, count: workers as u32 });
                let share = share.filter(|_| has_shares);
                let preference = Preference { last, share, live: None };
                let next = Placement::Neighbours.choose(&open, preference).unwrap();
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
