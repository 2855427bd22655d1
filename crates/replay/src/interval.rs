//! The intervals of a recording: from each checkpoint to the instruction of the next one.
//!
//! ```text
//!   checkpoints        0        1            2 3                  log ends
//!                      ├────────┼────────────┼─┼───────────────────┤
//!   intervals              0          1        2: 2 and 3 are at one instruction
//!   unambiguous ends            │            │   each at the next instruction without an event
//! ```

use crate::log::LogIndex;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};

/// The replay time of an instruction with an event, as a number of instructions without one
/// (measured, docs/design/results/record-replay.md).
const EVENT_EFFORT: u64 = 1_000;

/// A checkpoint of a recording, with its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RecordedCheckpoint {
    /// The number of instructions that had run when it was taken.
    pub icount: u64,
    /// The checkpoint's id in the recording's store.
    pub checkpoint: CheckpointId,
}

/// An interval of a recording: the instructions between two checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// The interval's number, from 0 on.
    pub index: u32,
    /// The checkpoint from which its replay starts.
    pub begin: RecordedCheckpoint,
    /// The instruction at which the interval begins: that of `begin`, or a later one if the
    /// interval's ends are unambiguous ([`with_unambiguous_ends`]).
    pub from_icount: u64,
    /// The checkpoint at its end; `None` if the interval ends with the log.
    pub end: Option<CheckpointId>,
    /// The instruction at which it ends.
    pub end_icount: u64,
}

impl Interval {
    /// Returns the interval's length in instructions.
    pub fn len(&self) -> u64 {
        self.end_icount.saturating_sub(self.from_icount)
    }

    /// Returns the expected work of the interval's replay, in instructions without an event: an
    /// event counts as many instructions. `log` is the index of the recording's log.
    pub fn effort(&self, log: &LogIndex) -> u64 {
        let events = log.count(self.from_icount..self.end_icount);
        self.len().saturating_add(events.saturating_mul(EVENT_EFFORT))
    }

    /// Returns whether the interval has no instruction. The functions of this module return no such
    /// interval.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns the intervals between `checkpoints` of a recording with `instructions` instructions.
/// Two checkpoints at the same instruction count as one.
pub fn intervals(mut checkpoints: Vec<RecordedCheckpoint>, instructions: u64) -> Vec<Interval> {
    checkpoints.sort_unstable();
    checkpoints.dedup_by_key(|checkpoint| checkpoint.icount);
    checkpoints.retain(|checkpoint| checkpoint.icount <= instructions);
    let mut all = Vec::with_capacity(checkpoints.len());
    for (at, begin) in checkpoints.iter().enumerate() {
        let next = checkpoints.get(at + 1);
        let end_icount = next.map_or(instructions, |next| next.icount);
        if end_icount > begin.icount {
            let index = all.len() as u32;
            let end = next.map(|next| next.checkpoint);
            all.push(Interval { index, begin: *begin, from_icount: begin.icount, end, end_icount });
        }
    }
    all
}

/// Returns `all` with the last interval's end moved back to an unambiguous instruction. Drops
/// intervals that become empty.
///
/// QEMU stops a machine at an event, usually a timer interrupt. Of the replays that stop there,
/// some have taken the interrupt and some have not. Do not use this for a recording whose replays
/// end with its log.
pub fn with_unambiguous_last_end(mut all: Vec<Interval>, log: &LogIndex) -> Vec<Interval> {
    while let [before @ .., last] = all.as_mut_slice() {
        let end_icount = log.last_unambiguous(last.end_icount);
        if end_icount > last.from_icount {
            last.end_icount = end_icount;
            break;
        }
        if before.is_empty() {
            // Each instruction of the only interval has an event.
            break;
        }
        all.pop();
    }
    all
}

/// Returns `all` with each inner end moved to the next unambiguous instruction, where a replay can
/// stop and go on. Drops intervals that become empty; the part after the last unambiguous
/// instruction becomes one interval.
pub fn with_unambiguous_ends(all: &[Interval], log: &LogIndex) -> Vec<Interval> {
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return Vec::new() };
    let mut moved: Vec<Interval> = Vec::with_capacity(all.len());
    let mut from_icount = first.from_icount;
    for interval in all {
        let index = moved.len() as u32;
        let next = log.next_unambiguous(interval.end_icount);
        let Some(end_icount) = next.filter(|next| *next <= last.end_icount) else {
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

    fn checkpoint(icount: u64, id: u64) -> RecordedCheckpoint {
        RecordedCheckpoint { icount, checkpoint: CheckpointId(id) }
    }

    #[test]
    fn checkpoints_at_one_instruction_make_no_interval() {
        let all = intervals(
            vec![checkpoint(0, 1), checkpoint(10, 2), checkpoint(10, 3), checkpoint(25, 4)],
            25,
        );
        assert_eq!(
            all.iter().map(|i| (i.begin.icount, i.end_icount)).collect::<Vec<_>>(),
            [(0, 10), (10, 25)]
        );
        assert_eq!(all[1].end, Some(CheckpointId(4)));
        let open = intervals(vec![checkpoint(0, 1)], 7);
        assert_eq!((open[0].end, open[0].end_icount), (None, 7));
    }

    fn log_index(counts: &[u32]) -> LogIndex {
        let file = tempfile::NamedTempFile::new().unwrap();
        let events: Vec<_> = counts.iter().map(|n| [&[0], &n.to_be_bytes()[..]].concat()).collect();
        let events: Vec<&[u8]> = events.iter().map(Vec::as_slice).collect();
        std::fs::write(file.path(), crate::log::tests::bytes(&events)).unwrap();
        LogIndex::read(file.path()).unwrap()
    }

    fn ends(all: &[Interval]) -> Vec<(u64, u64, u64)> {
        all.iter().map(|i| (i.begin.icount, i.from_icount, i.end_icount)).collect()
    }

    #[test]
    fn inner_ends_move_to_the_next_unambiguous_instruction() {
        // Events at 10, 11, 12, 20, 30.
        let log_index = log_index(&[10, 1, 1, 8, 10]);
        let all = intervals(
            vec![checkpoint(0, 1), checkpoint(10, 2), checkpoint(12, 3), checkpoint(20, 4)],
            30,
        );
        let moved = with_unambiguous_ends(&all, &log_index);
        assert_eq!(
            ends(&moved),
            [(0, 0, 13), (12, 13, 21), (20, 21, 30)],
            "the interval of two instructions is gone"
        );
        assert_eq!(moved.iter().map(|i| i.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(moved[1].end.is_some() && moved[2].end.is_none());
        // After the last checkpoint every instruction has an event.
        let all = intervals(vec![checkpoint(0, 1), checkpoint(10, 2), checkpoint(29, 3)], 30);
        assert_eq!(ends(&with_unambiguous_ends(&all, &log_index)), [(0, 0, 13), (10, 13, 30)]);
    }

    #[test]
    fn the_last_end_moves_back_to_an_unambiguous_instruction() {
        // Events at 10, 11, 12, 20, 30.
        let log_index = log_index(&[10, 1, 1, 8, 10]);
        let back = |checkpoints: &[u64], end| {
            let all = checkpoints
                .iter()
                .enumerate()
                .map(|(n, icount)| checkpoint(*icount, n as u64))
                .collect();
            let trimmed = with_unambiguous_last_end(intervals(all, end), &log_index);
            (ends(&trimmed), ends(&with_unambiguous_ends(&trimmed, &log_index)))
        };
        assert_eq!(
            back(&[0, 20], 30),
            (vec![(0, 0, 20), (20, 20, 29)], vec![(0, 0, 21), (20, 21, 29)])
        );
        assert_eq!(back(&[0], 25), (vec![(0, 0, 25)], vec![(0, 0, 25)]), "no event there");
        assert_eq!(back(&[0, 4], 12), (vec![(0, 0, 4), (4, 4, 9)], vec![(0, 0, 5), (4, 5, 9)]));
        // The last intervals become empty, or the first end is the end of all.
        assert_eq!(back(&[0, 10, 11], 12), (vec![(0, 0, 9)], vec![(0, 0, 9)]));
        assert_eq!(back(&[0, 28], 30), (vec![(0, 0, 28), (28, 28, 29)], vec![(0, 0, 29)]));
        assert_eq!(
            back(&[10], 12),
            (vec![(10, 10, 12)], vec![(10, 10, 12)]),
            "the only interval stays"
        );
    }

    #[test]
    fn events_add_to_the_effort() {
        // Events at 10, 11, 12, 20, 30.
        let log_index = log_index(&[10, 1, 1, 8, 10]);
        let all = intervals(vec![checkpoint(0, 1), checkpoint(10, 2), checkpoint(12, 3)], 30);
        let efforts: Vec<u64> = all.iter().map(|interval| interval.effort(&log_index)).collect();
        assert_eq!(efforts, [10, 2 + 2 * EVENT_EFFORT, 18 + 2 * EVENT_EFFORT]);
    }

    proptest! {
        /// For any log, moved intervals cover each instruction once, and each begins at or after
        /// its checkpoint.
        #[test]
        fn moved_ends_cover_the_same(
            counts in prop::collection::vec(0u64..50, 1..12),
            log in prop::collection::vec(1u32..6, 0..40),
        ) {
            let end = u64::from(log.iter().sum::<u32>()).max(counts.iter().max().unwrap() + 1);
            let checkpoints = counts.iter().enumerate().map(|(n, c)| checkpoint(*c, n as u64)).collect();
            let (all, log_index) = (intervals(checkpoints, end), log_index(&log));
            let trimmed = with_unambiguous_last_end(all.clone(), &log_index);
            let last = trimmed.last().map_or(0, |i| i.end_icount);
            prop_assert!(last == log_index.last_unambiguous(end) || trimmed.len() == 1);
            for (all, end) in [(all, end), (trimmed, last)] {
                let moved = with_unambiguous_ends(&all, &log_index);
                prop_assert_eq!(moved[0].from_icount, all[0].from_icount);
                prop_assert_eq!(moved.last().map(|i| i.end_icount), Some(end));
                prop_assert!(moved.windows(2).all(|pair| pair[0].end_icount == pair[1].from_icount));
                prop_assert!(moved.iter().all(|i| i.begin.icount <= i.from_icount && !i.is_empty()));
                prop_assert!(moved.iter().all(|i| i.end.is_some() || i.end_icount == end));
            }
        }

        /// The intervals cover everything after the first checkpoint.
        #[test]
        fn intervals_leave_no_gap(counts in prop::collection::vec(0u64..50, 1..12), more in 0u64..20) {
            let end = counts.iter().max().unwrap() + more;
            let checkpoints = counts.iter().enumerate().map(|(n, c)| checkpoint(*c, n as u64)).collect();
            let all = intervals(checkpoints, end);
            let first = *counts.iter().min().unwrap();
            prop_assert_eq!(all.iter().map(Interval::len).sum::<u64>(), end - first);
            prop_assert!(all.windows(2).all(|pair| pair[0].end_icount == pair[1].begin.icount));
        }
    }
}
