//! The length of the ranges that workers replay while the recording still goes on.
//!
//! ```text
//!   recorded     0 1 2 3 4 5 6 7 8 ...                one interval in T
//!   worker a     [start 0 1 2]      [start 6 7 8]     a range of L takes  start + L * run
//!   worker b           [start 3 4 5]                  n workers get n * L intervals in that time:
//!                                                     they keep up if  n * L * T >= start + L * run
//! ```

/// What the ranges of a live analysis have taken so far, each in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RangeTimes {
    /// The recorded time of an interval.
    pub interval_s: f64,
    /// The time of an interval in a QEMU that replayed the interval before.
    pub run_s: f64,
    /// The time that the first interval of a range takes in addition.
    pub start_s: f64,
}

/// The longest range. More would only make the last results later.
const LENGTH_MAX: u32 = 64;

/// Returns the number of intervals of a range with which `workers` just keep up with the recording:
/// the smallest whole L with `workers * L * interval >= start + L * run`. Returns 1 if they cannot
/// keep up with any length: the intervals that wait are then divided among the workers.
pub fn range_length(times: RangeTimes, workers: u64) -> u32 {
    let RangeTimes { interval_s, run_s, start_s } = times;
    let gained_s = workers as f64 * interval_s - run_s;
    let length = start_s / gained_s;
    if gained_s > 0.0 && length.is_finite() {
        (length.ceil() as u32).clamp(1, LENGTH_MAX)
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_just_keep_up() {
        let times = |run_s, start_s| RangeTimes { interval_s: 1.0, run_s, start_s };
        // 2 L >= 0.7 + 1.6 L.
        assert_eq!(range_length(times(1.6, 0.7), 2), 2);
        assert_eq!(range_length(times(1.9, 0.7), 2), 7);
        assert_eq!(range_length(times(0.3, 0.7), 1), 1);
        assert_eq!(range_length(times(2.5, 0.7), 2), 1, "two workers cannot keep up");
        assert_eq!(range_length(times(1.9999, 0.7), 2), 64);
        assert_eq!(range_length(times(f64::NAN, 0.7), 2), 1);
    }
}
