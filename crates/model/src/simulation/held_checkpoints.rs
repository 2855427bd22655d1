//! The checkpoints that a node holds, and the bytes that it lacks of another one.

use super::{SimulatedInterval, Transfer};
use std::collections::BTreeSet;

/// The sizes of transfers, in bytes: of a whole checkpoint to a node, or of the bytes that a node
/// lacks of it.
pub struct TransferSizes {
    transfer: Transfer,
    images: Vec<f64>,
    /// `sums[i]` is the number of new bytes of all checkpoints before `i`.
    sums: Vec<f64>,
}

/// The set of checkpoints that a node holds.
#[derive(Clone, Debug, Default)]
pub struct HeldCheckpoints {
    intervals: BTreeSet<usize>,
}

impl TransferSizes {
    /// Computes the sizes in bytes of the checkpoints of `intervals`. `transfer` is the part of
    /// each that is sent.
    pub fn new(intervals: &[SimulatedInterval], transfer: Transfer) -> Self {
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

    /// Returns the number of bytes to send to a node that holds `held`, so that it has the
    /// checkpoint of interval number `interval`.
    ///
    /// Two checkpoints differ by the bytes written between them, whichever is first. The nearest
    /// held checkpoint on each side therefore gives the smallest transfer, and no transfer is
    /// larger than the whole image.
    pub fn missing(&self, interval: usize, held: &HeldCheckpoints) -> f64 {
        let all = self.images[interval];
        if self.transfer == Transfer::Whole {
            return all;
        }
        let between = |a: usize, b: usize| self.sums[b + 1] - self.sums[a + 1];
        let before =
            held.intervals.range(..=interval).next_back().map(|near| between(*near, interval));
        let after = held.intervals.range(interval..).next().map(|near| between(interval, *near));
        before.into_iter().chain(after).fold(all, f64::min)
    }
}

impl HeldCheckpoints {
    /// Returns whether the node holds the checkpoint before that of `interval`.
    pub fn has_before(&self, interval: usize) -> bool {
        interval.checked_sub(1).is_some_and(|before| self.intervals.contains(&before))
    }

    /// Adds the checkpoint of `interval`.
    pub fn add(&mut self, interval: usize) {
        self.intervals.insert(interval);
    }

    /// Removes all checkpoints.
    pub fn clear(&mut self) {
        self.intervals.clear();
    }

    /// Returns whether the node holds no checkpoint.
    pub fn is_empty(&self) -> bool {
        self.intervals.is_empty()
    }
}
