//! Fits constants of the model to measurements.

use serde::{Deserialize, Serialize};

/// A line through measured simulations: the time of a simulation as a function of the recorded time
/// of its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlowdownFit {
    /// The time to initialise a simulation, in seconds.
    pub t_i: f64,
    /// The number of seconds of simulation for each second of the interval: `s_sim / s_log`.
    pub slowdown: f64,
    /// The part of the variance that the line explains, from 0 to 1.
    pub r_squared: f64,
}

/// The measured times of one interval: recorded and simulated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedSimulation {
    /// The recorded time of the interval, in seconds.
    pub recorded_s: f64,
    /// The time of its simulation, in seconds.
    pub simulated_s: f64,
}

/// Fits a line by least squares to the measured times. If the intercept or the slope is negative,
/// the line goes through 0. Returns `None` if no interval has two positive, finite times.
pub fn fit_slowdown(times: &[TimedSimulation]) -> Option<SlowdownFit> {
    let usable: Vec<(f64, f64)> = times
        .iter()
        .map(|one| (one.recorded_s, one.simulated_s))
        .filter(|(x, y)| x.is_finite() && y.is_finite() && *x > 0.0 && *y > 0.0)
        .collect();
    let count = usable.len() as f64;
    let (sum_x, sum_y) = usable.iter().fold((0.0, 0.0), |(x, y), pair| (x + pair.0, y + pair.1));
    if usable.is_empty() {
        return None;
    }
    let (mean_x, mean_y) = (sum_x / count, sum_y / count);
    let (mut across, mut along, mut all) = (0.0, 0.0, 0.0);
    for (x, y) in &usable {
        across += (x - mean_x) * (y - mean_y);
        along += (x - mean_x) * (x - mean_x);
        all += (y - mean_y) * (y - mean_y);
    }
    let slope = across / along;
    let begin = mean_y - slope * mean_x;
    let (t_i, slowdown) = if slope.is_finite() && slope > 0.0 && begin >= 0.0 {
        (begin, slope)
    } else {
        (0.0, sum_y / sum_x)
    };
    let left: f64 = usable.iter().map(|(x, y)| (y - t_i - slowdown * x).powi(2)).sum();
    let r_squared = if all > 0.0 { (1.0 - left / all).max(0.0) } else { 1.0 };
    Some(SlowdownFit { t_i, slowdown, r_squared })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitted(pairs: &[(f64, f64)]) -> Option<SlowdownFit> {
        let timed = |pair: &(f64, f64)| TimedSimulation { recorded_s: pair.0, simulated_s: pair.1 };
        fit_slowdown(&pairs.iter().map(timed).collect::<Vec<_>>())
    }

    #[test]
    fn an_impossible_line_goes_through_0() {
        let found = fitted(&[(1.0, 5.0), (2.0, 8.0), (4.0, 14.0)]).unwrap();
        assert!((found.t_i - 2.0).abs() < 1e-9 && (found.slowdown - 3.0).abs() < 1e-9, "{found:?}");
        assert!(found.r_squared > 0.999);
        // One interval; equal intervals; longer ones that take less.
        for pairs in [&[(2.0, 8.0)][..], &[(2.0, 7.0), (2.0, 9.0)], &[(1.0, 8.0), (3.0, 8.0)]] {
            let found = fitted(pairs).unwrap();
            assert_eq!((found.t_i, found.slowdown), (0.0, 4.0), "{pairs:?}");
        }
        assert_eq!(fitted(&[(0.0, 1.0), (f64::NAN, 1.0)]), None);
    }
}
