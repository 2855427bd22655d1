//! The intervals of a recording: from each checkpoint to the next one's instruction.
//!
//! ```text
//!   checkpoints   0        1            2 3                  log ends
//!                 ├────────┼────────────┼─┼───────────────────┤
//!   intervals        0          1        (2 and 3 at one instruction: one of them)  2
//!   standing places          │            │                                at the next instruction where the log has nothing
//! ```

use crate::log::Boundaries;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};

/// What a replay takes at an instruction at which the log has something, in instructions at which
/// it has nothing: measured, 1,000 where nothing is asked of the replay but that it runs
/// (docs/design/benchmarks.md). A boot that waits has 6 such places in 1,000 instructions, a
/// computation 3 in 100,000.
const EVENT_EFFORT: u64 = 1_000;

/// A checkpoint's place in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Instructions before it.
    pub icount: u64,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
}

/// One interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// Its number, from 0 on.
    pub index: u32,
    /// The checkpoint that its replay starts from.
    pub begin: Place,
    /// The instruction at which it begins: `begin`'s, or, where a replay can stand at both ends
    /// ([`with_standing_ends`]), one behind it.
    pub from_icount: u64,
    /// The checkpoint at its end; none where it ends with the log.
    pub end: Option<CheckpointId>,
    /// The instruction at which it ends.
    pub end_icount: u64,
}

impl Interval {
    /// Its instructions.
    pub fn len(&self) -> u64 {
        self.end_icount.saturating_sub(self.from_icount)
    }

    /// What its replay takes, in instructions that the log has nothing at.
    pub fn effort(&self, boundaries: &Boundaries) -> u64 {
        let events = boundaries.count(self.from_icount..self.end_icount);
        self.len().saturating_add(events.saturating_mul(EVENT_EFFORT))
    }

    /// Never: intervals without an instruction are not made.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The intervals between `places` of a recording that ends after `instructions`. Two checkpoints at
/// one instruction are one: a replay has nothing to do between them.
pub fn intervals(mut places: Vec<Place>, instructions: u64) -> Vec<Interval> {
    places.sort_unstable();
    places.dedup_by_key(|place| place.icount);
    places.retain(|place| place.icount <= instructions);
    let mut all = Vec::with_capacity(places.len());
    for (at, begin) in places.iter().enumerate() {
        let next = places.get(at + 1);
        let end_icount = next.map_or(instructions, |next| next.icount);
        if end_icount > begin.icount {
            let index = all.len() as u32;
            let end = next.map(|next| next.checkpoint);
            all.push(Interval { index, begin: *begin, from_icount: begin.icount, end, end_icount });
        }
    }
    all
}

/// The intervals up to the last instruction at which the log has nothing. A machine is stopped
/// where something happens, most often at an interrupt by its timer: of replays that are stopped
/// there, some have come to that as well and some have not. Not for a recording whose replays end
/// with its log.
pub fn with_standing_end(mut all: Vec<Interval>, boundaries: &Boundaries) -> Vec<Interval> {
    while let [before @ .., last] = all.as_mut_slice() {
        let end_icount = boundaries.last_unambiguous(last.end_icount);
        if end_icount > last.from_icount {
            last.end_icount = end_icount;
            break;
        }
        if before.is_empty() {
            // Something happens at each of its instructions, and it is all that there is.
            break;
        }
        all.pop();
    }
    all
}

/// The intervals with their inner ends moved to where a replay can stand and go on: to the next
/// instruction at which the log has nothing. Those that this leaves nothing of go; behind the last
/// such instruction, what is left is one interval.
pub fn with_standing_ends(all: &[Interval], boundaries: &Boundaries) -> Vec<Interval> {
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return Vec::new() };
    let mut moved: Vec<Interval> = Vec::with_capacity(all.len());
    let mut from_icount = first.from_icount;
    for interval in all {
        let index = moved.len() as u32;
        let behind = boundaries.next_unambiguous(interval.end_icount);
        let Some(end_icount) = behind.filter(|behind| *behind <= last.end_icount) else {
            moved.push(Interval {
                index,
                from_icount,
                end: last.end,
                end_icount: last.end_icount,
                ..*interval
            });
            break;
        };
        if end_icount > from_icount {
            moved.push(Interval { index, from_icount, end_icount, ..*interval });
            from_icount = end_icount;
        }
        if end_icount == last.end_icount {
            break;
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(icount: u64, id: u64) -> Place {
        Place { icount, checkpoint: CheckpointId(id) }
    }

    #[test]
    fn empty_intervals_are_none() {
        let all = intervals(vec![place(0, 1), place(10, 2), place(10, 3), place(25, 4)], 25);
        assert_eq!(
            all.iter().map(|i| (i.begin.icount, i.end_icount)).collect::<Vec<_>>(),
            [(0, 10), (10, 25)]
        );
        assert_eq!(all[1].end, Some(CheckpointId(4)));
        let open = intervals(vec![place(0, 1)], 7);
        assert_eq!((open[0].end, open[0].end_icount), (None, 7));
    }

    fn boundaries(counts: &[u32]) -> Boundaries {
        let file = tempfile::NamedTempFile::new().unwrap();
        let events: Vec<_> = counts.iter().map(|n| [&[0], &n.to_be_bytes()[..]].concat()).collect();
        let events: Vec<&[u8]> = events.iter().map(Vec::as_slice).collect();
        std::fs::write(file.path(), crate::log::tests::bytes(&events)).unwrap();
        Boundaries::read(file.path()).unwrap()
    }

    fn ends(all: &[Interval]) -> Vec<(u64, u64, u64)> {
        all.iter().map(|i| (i.begin.icount, i.from_icount, i.end_icount)).collect()
    }

    #[test]
    fn ends_move_to_where_a_replay_can_stand() {
        // Something happens at 10, 11, 12, 20, 30.
        let boundaries = boundaries(&[10, 1, 1, 8, 10]);
        let all = intervals(vec![place(0, 1), place(10, 2), place(12, 3), place(20, 4)], 30);
        let moved = with_standing_ends(&all, &boundaries);
        assert_eq!(
            ends(&moved),
            [(0, 0, 13), (12, 13, 21), (20, 21, 30)],
            "one of two instructions has gone"
        );
        assert_eq!(moved.iter().map(|i| i.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(moved[1].end.is_some() && moved[2].end.is_none());
        // Behind the last one the log has something at each instruction.
        let all = intervals(vec![place(0, 1), place(10, 2), place(29, 3)], 30);
        assert_eq!(ends(&with_standing_ends(&all, &boundaries)), [(0, 0, 13), (10, 13, 30)]);
    }

    #[test]
    fn the_end_moves_back_to_where_a_replay_can_stand() {
        // Something happens at 10, 11, 12, 20, 30.
        let boundaries = boundaries(&[10, 1, 1, 8, 10]);
        let back = |places: &[u64], end| {
            let all =
                places.iter().enumerate().map(|(n, icount)| place(*icount, n as u64)).collect();
            let stood = with_standing_end(intervals(all, end), &boundaries);
            (ends(&stood), ends(&with_standing_ends(&stood, &boundaries)))
        };
        assert_eq!(
            back(&[0, 20], 30),
            (vec![(0, 0, 20), (20, 20, 29)], vec![(0, 0, 21), (20, 21, 29)])
        );
        assert_eq!(back(&[0], 25), (vec![(0, 0, 25)], vec![(0, 0, 25)]), "nothing happens there");
        assert_eq!(back(&[0, 4], 12), (vec![(0, 0, 4), (4, 4, 9)], vec![(0, 0, 5), (4, 5, 9)]));
        // Nothing is left of the last ones, or the first end lies at the end of all.
        assert_eq!(back(&[0, 10, 11], 12), (vec![(0, 0, 9)], vec![(0, 0, 9)]));
        assert_eq!(back(&[0, 28], 30), (vec![(0, 0, 28), (28, 28, 29)], vec![(0, 0, 29)]));
        assert_eq!(
            back(&[10], 12),
            (vec![(10, 10, 12)], vec![(10, 10, 12)]),
            "it is all that there is"
        );
    }

    #[test]
    fn what_the_log_has_is_part_of_the_effort() {
        // Something happens at 10, 11, 12, 20, 30.
        let boundaries = boundaries(&[10, 1, 1, 8, 10]);
        let all = intervals(vec![place(0, 1), place(10, 2), place(12, 3)], 30);
        let efforts: Vec<u64> = all.iter().map(|interval| interval.effort(&boundaries)).collect();
        assert_eq!(efforts, [10, 2 + 2 * EVENT_EFFORT, 18 + 2 * EVENT_EFFORT]);
    }

    proptest! {
        /// However the log lies, nothing is left out or twice, and each begins at or behind its
        /// checkpoint.
        #[test]
        fn moved_ends_cover_the_same(
            counts in prop::collection::vec(0u64..50, 1..12),
            log in prop::collection::vec(1u32..6, 0..40),
        ) {
            let end = u64::from(log.iter().sum::<u32>()).max(counts.iter().max().unwrap() + 1);
            let places = counts.iter().enumerate().map(|(n, c)| place(*c, n as u64)).collect();
            let (all, boundaries) = (intervals(places, end), boundaries(&log));
            let stood = with_standing_end(all.clone(), &boundaries);
            let last = stood.last().map_or(0, |i| i.end_icount);
            prop_assert!(last == boundaries.last_unambiguous(end) || stood.len() == 1);
            for (all, end) in [(all, end), (stood, last)] {
                let moved = with_standing_ends(&all, &boundaries);
                prop_assert_eq!(moved[0].from_icount, all[0].from_icount);
                prop_assert_eq!(moved.last().map(|i| i.end_icount), Some(end));
                prop_assert!(moved.windows(2).all(|pair| pair[0].end_icount == pair[1].from_icount));
                prop_assert!(moved.iter().all(|i| i.begin.icount <= i.from_icount && !i.is_empty()));
                prop_assert!(moved.iter().all(|i| i.end.is_some() || i.end_icount == end));
            }
        }

        /// They cover what lies behind the first checkpoint without a gap.
        #[test]
        fn nothing_is_left_out(counts in prop::collection::vec(0u64..50, 1..12), more in 0u64..20) {
            let end = counts.iter().max().unwrap() + more;
            let places = counts.iter().enumerate().map(|(n, c)| place(*c, n as u64)).collect();
            let all = intervals(places, end);
            let first = *counts.iter().min().unwrap();
            prop_assert_eq!(all.iter().map(Interval::len).sum::<u64>(), end - first);
            prop_assert!(all.windows(2).all(|pair| pair[0].end_icount == pair[1].begin.icount));
        }
    }
}
