//! The intervals that the formulas know.

use super::Interval;
use crate::Constants;

/// Intervals in a run at most: a length that makes more is taken to be so long that it does not.
const INTERVALS_MAX: f64 = 100_000.0;

/// A run in equal intervals of `length` seconds, each ready at its end; nothing is to be
/// transferred.
pub fn regular(constants: &Constants, length: f64) -> Vec<Interval> {
    let count = (constants.s_log * constants.t_vm / length).round().clamp(1.0, INTERVALS_MAX);
    // Their sum is the run, whether the length divides it or not.
    let length = constants.s_log * constants.t_vm / count;
    let work_s = constants.simulation(length);
    let period = constants.period(length);
    (1..=count as u64)
        .map(|number| Interval {
            ready_s: number as f64 * period,
            work_s,
            image_bytes: 0.0,
            new_bytes: 0.0,
        })
        .collect()
}
