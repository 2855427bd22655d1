//! What a node has of which checkpoints, and what it lacks of another one.

use super::{Interval, Transfer};
use std::collections::BTreeSet;

/// What intervals' checkpoints have in common.
pub struct Sizes {
    transfer: Transfer,
    images: Vec<f64>,
    /// At `i`: the new bytes of all up to `i`, without it.
    sums: Vec<f64>,
}

/// The checkpoints that a node has.
#[derive(Clone, Debug, Default)]
pub struct Holdings {
    held: BTreeSet<usize>,
}

impl Sizes {
    pub fn of(intervals: &[Interval], transfer: Transfer) -> Self {
        let mut sums = vec![0.0];
        let mut sum = 0.0;
        for interval in intervals {
            sum += interval.new_bytes;
            sums.push(sum);
        }
        Self {
            transfer,
            images: intervals.iter().map(|interval| interval.image_bytes).collect(),
            sums,
        }
    }

    /// Bytes that are sent of `interval` to a node that has `holdings`.
    ///
    /// What is written between two checkpoints is all in which they differ, whichever of them comes
    /// first; so the nearest on either side says most, and no node lacks more than all.
    pub fn missing(&self, interval: usize, holdings: &Holdings) -> f64 {
        let all = self.images[interval];
        if self.transfer == Transfer::Whole {
            return all;
        }
        let between = |a: usize, b: usize| self.sums[b + 1] - self.sums[a + 1];
        let before =
            holdings.held.range(..=interval).next_back().map(|held| between(*held, interval));
        let behind = holdings.held.range(interval..).next().map(|held| between(interval, *held));
        before.into_iter().chain(behind).fold(all, f64::min)
    }
}

impl Holdings {
    /// Whether the one before `interval` is there.
    pub fn has_before(&self, interval: usize) -> bool {
        interval.checked_sub(1).is_some_and(|before| self.held.contains(&before))
    }

    /// The node has the checkpoint of `interval` from now on.
    pub fn add(&mut self, interval: usize) {
        self.held.insert(interval);
    }

    /// It has nothing any more.
    pub fn clear(&mut self) {
        self.held.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}
