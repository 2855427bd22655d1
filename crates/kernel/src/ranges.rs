//! Sorted lists of address ranges: cut, joined, split by one another.
//!
//! Invariant: a list handed in or out rises and its ranges neither overlap nor are empty.

use keyframe_units::{HostRange, HostVirt};

/// A range from its two ends; empty if they meet.
pub(crate) fn between(start: u64, end: u64) -> HostRange {
    HostRange { start: HostVirt(start), len_bytes: end.saturating_sub(start) }
}

/// Returns the part that two ranges share; `None` if they do not overlap.
pub(crate) fn intersection(a: HostRange, b: HostRange) -> Option<HostRange> {
    let shared = between(a.start.0.max(b.start.0), a.end().0.min(b.end().0));
    (shared.len_bytes > 0).then_some(shared)
}

/// Appends a range to a list. Joins it with the last one if they touch or overlap.
pub(crate) fn push_joined(list: &mut Vec<HostRange>, range: HostRange) {
    assert!(
        list.last().is_none_or(|tail| tail.start <= range.start),
        "a list of ranges must rise: a range would be lost"
    );
    match list.last_mut() {
        Some(tail) if tail.end() >= range.start => {
            let end = tail.end().0.max(range.end().0);
            *tail = between(tail.start.0, end);
        }
        _ => list.push(range),
    }
}

/// The union of lists, each rising.
pub(crate) fn union(lists: &[&[HostRange]]) -> Vec<HostRange> {
    match lists.iter().filter(|list| !list.is_empty()).collect::<Vec<_>>().as_slice() {
        [] => Vec::new(),
        [one] => one.to_vec(),
        many => {
            let mut all: Vec<HostRange> =
                many.iter().flat_map(|list| list.iter().copied()).collect();
            all.sort_unstable_by_key(|range| range.start);
            let mut out = Vec::with_capacity(all.len());
            for range in all {
                push_joined(&mut out, range);
            }
            out
        }
    }
}

/// Returns the parts of `list` that lie in `window`.
pub(crate) fn clip(list: &[HostRange], window: HostRange) -> Vec<HostRange> {
    let first = list.partition_point(|range| range.end() <= window.start);
    let inside =
        list.get(first..).unwrap_or_default().iter().take_while(|range| range.start < window.end());
    inside.filter_map(|range| intersection(*range, window)).collect()
}

/// `list` without `hole`.
pub(crate) fn without(list: &[HostRange], hole: HostRange) -> Vec<HostRange> {
    let mut out = Vec::with_capacity(list.len() + 1);
    for range in list {
        let left = between(range.start.0, range.end().0.min(hole.start.0));
        let right = between(range.start.0.max(hole.end().0), range.end().0);
        if hole.len_bytes == 0 {
            out.push(*range);
        } else {
            out.extend([left, right].into_iter().filter(|part| part.len_bytes > 0));
        }
    }
    out
}

/// Cuts every range of `list` where `by` begins or ends, and tells for each piece whether it lies
/// in `by`.
pub(crate) fn split(list: &[HostRange], by: &[HostRange], mut each: impl FnMut(HostRange, bool)) {
    let mut next = 0;
    for range in list {
        let mut at = range.start.0;
        while by.get(next).is_some_and(|b| b.end().0 <= at) {
            next += 1;
        }
        // `next` stays: the same piece of `by` may reach into the following range too.
        let mut piece = next;
        while at < range.end().0 {
            let (until, inside) = match by.get(piece) {
                Some(b) if b.start.0 <= at => (b.end().0.min(range.end().0), true),
                Some(b) => (b.start.0.min(range.end().0), false),
                None => (range.end().0, false),
            };
            each(between(at, until), inside);
            piece += usize::from(inside);
            at = until;
        }
    }
}

/// Returns the parts of `list` that lie in `by` (`inside`), or that do not.
pub(crate) fn select(list: &[HostRange], by: &[HostRange], inside: bool) -> Vec<HostRange> {
    let mut out = Vec::new();
    split(list, by, |range, is_inside| {
        if is_inside == inside {
            push_joined(&mut out, range);
        }
    });
    out
}

/// Few windows that hold every range of `list`: neighbours less than `gap_bytes` apart share one.
pub(crate) fn windows(list: &[HostRange], gap_bytes: u64) -> Vec<HostRange> {
    let mut out: Vec<HostRange> = Vec::new();
    for range in list {
        match out.last_mut() {
            Some(tail) if range.start.0.saturating_sub(tail.end().0) < gap_bytes => {
                *tail = between(tail.start.0, range.end().0);
            }
            _ => out.push(*range),
        }
    }
    out
}

/// 4 KiB pages in a list.
pub(crate) fn pages(list: &[HostRange]) -> u64 {
    list.iter().map(|range| range.len_bytes / keyframe_units::PAGE_BYTES as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const SPACE: u64 = 64;

    fn list() -> impl Strategy<Value = BTreeSet<u64>> {
        prop::collection::btree_set(0..SPACE, 0..40)
    }

    fn ranges(set: &BTreeSet<u64>) -> Vec<HostRange> {
        let mut out = Vec::new();
        for at in set {
            push_joined(&mut out, between(*at, at + 1));
        }
        out
    }

    fn bytes(list: &[HostRange]) -> Vec<u64> {
        list.iter().flat_map(|range| range.start.0..range.end().0).collect()
    }

    proptest! {
        /// Against sets of single addresses.
        #[test]
        fn lists_are_sets((a, b, from, len) in (list(), list(), 0..SPACE, 0..SPACE)) {
            let (left, right, window) = (ranges(&a), ranges(&b), between(from, from + len));
            let inside = |at: &u64| (from..from + len).contains(at);
            prop_assert_eq!(bytes(&union(&[&left, &right])), a.union(&b).copied().collect::<Vec<_>>());
            prop_assert_eq!(bytes(&clip(&left, window)), a.iter().copied().filter(inside).collect::<Vec<_>>());
            let outside = a.iter().copied().filter(|at| !inside(at)).collect::<Vec<_>>();
            prop_assert_eq!(bytes(&without(&left, window)), outside);
            let (mut whole, mut shared) = (Vec::new(), Vec::new());
            split(&left, &right, |piece, in_b| {
                assert!(piece.len_bytes > 0);
                whole.push(piece);
                if in_b { shared.push(piece) }
            });
            prop_assert_eq!(bytes(&whole), a.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(bytes(&select(&left, &right, true)), bytes(&shared));
            prop_assert_eq!(bytes(&select(&left, &right, false)), a.difference(&b).copied().collect::<Vec<_>>());
            prop_assert_eq!(bytes(&shared), a.intersection(&b).copied().collect::<Vec<_>>());
        }

        /// Windows hold every range, and stand `gap` apart at least.
        #[test]
        fn windows_hold_all((a, gap) in (list(), 1u64..10)) {
            let found = windows(&ranges(&a), gap);
            prop_assert!(found.windows(2).all(|w| w[1].start.0 - w[0].end().0 >= gap));
            prop_assert!(ranges(&a).iter().all(|r| found.iter().any(|w| w.contains(*r))));
        }
    }
}
