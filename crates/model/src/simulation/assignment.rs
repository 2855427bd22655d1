//! The choice of the next interval and its node.

use super::held_checkpoints::{HeldCheckpoints, TransferSizes};
use super::{AssignmentPolicy, SimulatedInterval};
use std::collections::BTreeSet;

/// A node with a free slot, on which an interval can be simulated.
pub struct FreeNode<'a> {
    /// The number of the node.
    pub node: usize,
    /// The speed of the node. A higher number is faster.
    pub speed: f64,
    /// The checkpoints that the node holds.
    pub held: &'a HeldCheckpoints,
}

/// An interval and the node that simulates it.
#[derive(Clone, Copy, Debug)]
pub struct Assignment {
    /// The index of the interval.
    pub interval: usize,
    /// The number of the node.
    pub node: usize,
}

/// Chooses by `policy` which interval is simulated next, and on which node. `waiting` holds the
/// indices in `intervals` of the intervals that no node has begun; `sizes` gives the bytes that a
/// node lacks of each. `free` lists the nodes with a free slot, in the order of their numbers.
/// Returns `None` if no interval waits or no node is free.
pub fn choose(
    policy: AssignmentPolicy,
    intervals: &[SimulatedInterval],
    sizes: &TransferSizes,
    waiting: &BTreeSet<usize>,
    free: &[FreeNode<'_>],
) -> Option<Assignment> {
    // The first of equally fast nodes.
    let fastest =
        free.iter().reduce(|best, one| if one.speed > best.speed { one } else { best })?;
    let first = *waiting.first()?;
    match policy {
        AssignmentPolicy::InOrder => Some(Assignment { interval: first, node: fastest.node }),
        AssignmentPolicy::LongestFirst => {
            let longest = waiting.iter().copied().reduce(|best, one| {
                if intervals[one].work_s > intervals[best].work_s { one } else { best }
            })?;
            Some(Assignment { interval: longest, node: fastest.node })
        }
        AssignmentPolicy::Near => nearest(sizes, waiting, free),
    }
}

/// Chooses the assignment with the smallest transfer.
fn nearest(
    sizes: &TransferSizes,
    waiting: &BTreeSet<usize>,
    free: &[FreeNode<'_>],
) -> Option<Assignment> {
    let with_checkpoints = free.iter().filter(|one| !one.held.is_empty());
    let pairs =
        with_checkpoints.flat_map(|one| waiting.iter().map(move |interval| (one, *interval)));
    // Of equal transfers, the one that goes forward: another node would come to the interval that
    // a node going backward takes.
    let costs = pairs.map(|(one, interval)| {
        let goes_back = !one.held.has_before(interval);
        (sizes.missing(interval, one.held), goes_back, interval, one.node)
    });
    let least =
        costs.min_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    if let Some((_, _, interval, node)) = least {
        return Some(Assignment { interval, node });
    }
    // All free nodes are empty. The first interval has no other node before it; elsewhere a node
    // comes from the front of the stretch.
    let stretch = longest_stretch(waiting)?;
    let interval = if stretch.first == 0 { 0 } else { stretch.first + stretch.len / 2 };
    Some(Assignment { interval, node: free.first()?.node })
}

/// Consecutive intervals.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    first: usize,
    len: usize,
}

/// Returns the first of the longest stretches of consecutive waiting intervals.
fn longest_stretch(waiting: &BTreeSet<usize>) -> Option<Stretch> {
    let mut longest: Option<Stretch> = None;
    let mut current: Option<Stretch> = None;
    for interval in waiting {
        current = match current {
            Some(Stretch { first, len }) if first + len == *interval => {
                Some(Stretch { first, len: len + 1 })
            }
            _ => Some(Stretch { first: *interval, len: 1 }),
        };
        if current.map(|stretch| stretch.len) > longest.map(|stretch| stretch.len) {
            longest = current;
        }
    }
    longest
}
