//! A table of predictions: over lengths of intervals and numbers of nodes.

use crate::{Constants, Prediction};

/// Interval lengths of the table, in seconds.
const LENGTHS: [f64; 10] = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];

/// Returns predictions for the interval lengths from 0.1 s to 100 s that do not exceed the run, the
/// shortest length first. Each length has a prediction for the powers of two up to `enough`, the number
/// of nodes that is enough, for `enough` itself, and for each of `nodes`.
pub fn prediction_table(constants: &Constants, enough: u64, nodes: &[u64]) -> Vec<Prediction> {
    let columns = columns(enough, nodes);
    let longest = constants.s_log * constants.t_vm;
    let lengths = LENGTHS.iter().filter(|length| **length <= longest);
    lengths
        .flat_map(|length| columns.iter().map(|nodes| Prediction::at(constants, *nodes, *length)))
        .collect()
}

/// The most columns of the table.
const COLUMNS_MAX: usize = 8;

/// Returns the numbers of nodes of [`prediction_table`], ascending.
pub(crate) fn columns(enough: u64, nodes: &[u64]) -> Vec<u64> {
    let powers =
        std::iter::successors(Some(1_u64), |n| n.checked_mul(2)).take_while(|n| *n < enough);
    let mut all: Vec<u64> = powers.collect();
    if let Some(more) = all.len().checked_sub(COLUMNS_MAX).filter(|more| *more > 0) {
        // One node stays, and the largest.
        all.drain(1..=more);
    }
    all.push(enough);
    all.extend(nodes);
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_few_and_have_what_was_asked_for() {
        assert_eq!(columns(1, &[]), [1]);
        assert_eq!(columns(90, &[4]), [1, 2, 4, 8, 16, 32, 64, 90]);
        assert_eq!(columns(90, &[5]), [1, 2, 4, 5, 8, 16, 32, 64, 90]);
        let many = columns(u64::MAX, &[7]);
        assert!(
            many.len() <= COLUMNS_MAX + 2 && many.contains(&1) && many.contains(&7),
            "{many:?}"
        );
    }
}
