//! Which interval comes next, and on which node.

use super::holdings::{Holdings, Sizes};
use super::{Interval, Policy};
use std::collections::BTreeSet;

/// A node with a free slot.
pub struct Free<'a> {
    pub node: usize,
    pub speed: f64,
    pub holdings: &'a Holdings,
}

/// The next pair of interval and node; `free` is in the order of the nodes. None where there is
/// none.
pub fn choose(
    policy: Policy,
    (intervals, sizes): (&[Interval], &Sizes),
    waiting: &BTreeSet<usize>,
    free: &[Free<'_>],
) -> Option<(usize, usize)> {
    // Of equally fast ones the first.
    let fastest =
        free.iter().reduce(|best, one| if one.speed > best.speed { one } else { best })?;
    let first = *waiting.first()?;
    match policy {
        Policy::InOrder => Some((first, fastest.node)),
        Policy::LongestFirst => {
            let longest = waiting.iter().copied().reduce(|best, one| {
                if intervals[one].work_s > intervals[best].work_s { one } else { best }
            })?;
            Some((longest, fastest.node))
        }
        Policy::Near => near(sizes, waiting, free),
    }
}

fn near(sizes: &Sizes, waiting: &BTreeSet<usize>, free: &[Free<'_>]) -> Option<(usize, usize)> {
    let having = free.iter().filter(|one| !one.holdings.is_empty());
    let pairs = having.flat_map(|one| waiting.iter().map(move |interval| (one, *interval)));
    // Of equal ones the one that goes on: who goes back takes what another one comes to.
    let costs = pairs.map(|(one, interval)| {
        (
            sizes.missing(interval, one.holdings),
            !one.holdings.has_before(interval),
            interval,
            one.node,
        )
    });
    let least =
        costs.min_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    if let Some((_, _, interval, node)) = least {
        return Some((interval, node));
    }
    // All of them have nothing. The beginning has nobody before it; elsewhere somebody comes from
    // the front.
    let (from, len) = longest_stretch(waiting)?;
    let interval = if from == 0 { 0 } else { from + len / 2 };
    Some((interval, free.first()?.node))
}

/// The first of the longest stretches of neighbours: where it begins, and how many they are.
fn longest_stretch(waiting: &BTreeSet<usize>) -> Option<(usize, usize)> {
    let mut best: Option<(usize, usize)> = None;
    let mut here: Option<(usize, usize)> = None;
    for interval in waiting {
        here = match here {
            Some((from, len)) if from + len == *interval => Some((from, len + 1)),
            _ => Some((*interval, 1)),
        };
        if here.map(|(_, len)| len) > best.map(|(_, len)| len) {
            best = here;
        }
    }
    best
}
