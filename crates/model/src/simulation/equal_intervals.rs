//! Equal intervals, as the formulas assume them.

use super::SimulatedInterval;
use crate::Constants;

/// The largest number of intervals in a run. A length that would give more is increased.
const INTERVALS_MAX: f64 = 100_000.0;

/// Divides a run into equal intervals of about `length` seconds, whose sum is the run, and returns
/// them in order. Each is ready at its end. Their checkpoints have no bytes to transfer.
pub fn equal_intervals(constants: &Constants, length: f64) -> Vec<SimulatedInterval> {
    let count = (constants.s_log * constants.t_vm / length).round().clamp(1.0, INTERVALS_MAX);
    let length = constants.s_log * constants.t_vm / count;
    let work_s = constants.simulation(length);
    let period = constants.period(length);
    (1..=count as u64)
        .map(|number| SimulatedInterval {
            ready_s: number as f64 * period,
            work_s,
            image_bytes: 0.0,
            new_bytes: 0.0,
        })
        .collect()
}
