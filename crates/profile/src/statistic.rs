//! Mean, deviation, minimum and maximum of a sample.

use serde::Serialize;

/// Mean, deviation, minimum and maximum of a sample of whole numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Statistic {
    /// The arithmetic mean.
    pub mean: f64,
    /// The sample standard deviation (divisor n - 1); 0 for a single number.
    pub deviation: f64,
    /// The minimum.
    pub min: u64,
    /// The maximum.
    pub max: u64,
}

impl Statistic {
    /// Computes the statistic of `sample`; `None` if it is empty.
    pub fn of(sample: &[u64]) -> Option<Self> {
        let (min, max) = (*sample.iter().min()?, *sample.iter().max()?);
        let count = sample.len() as f64;
        let mean = sample.iter().map(|v| *v as f64).sum::<f64>() / count;
        let squares: f64 = sample.iter().map(|v| (*v as f64 - mean).powi(2)).sum();
        let deviation = if sample.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 };
        Some(Self { mean, deviation, min, max })
    }

    /// Computes the statistic of numbers that may be missing. Returns `None` if one is missing, or
    /// if there are none.
    pub fn of_all(sample: impl Iterator<Item = Option<u64>>) -> Option<Self> {
        Self::of(&sample.collect::<Option<Vec<_>>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_known_sample() {
        let found = Statistic::of(&[2, 4, 4, 4, 5, 5, 7, 9]).unwrap();
        assert_eq!((found.mean, found.min, found.max), (5.0, 2, 9));
        assert!((found.deviation - 32f64.sqrt() / 7f64.sqrt()).abs() < 1e-9);
        assert!(Statistic::of(&[3]).unwrap().deviation < 1e-9);
        assert_eq!(Statistic::of(&[]), None);
        assert_eq!(Statistic::of_all([Some(1), None].into_iter()), None);
    }

    proptest! {
        #[test]
        fn the_mean_lies_between_the_extremes(sample in prop::collection::vec(0u64..1 << 40, 1..40)) {
            let s = Statistic::of(&sample).unwrap();
            prop_assert!(s.min as f64 <= s.mean + 1e-3 && s.mean <= s.max as f64 + 1e-3);
            prop_assert!(s.deviation >= 0.0 && s.deviation.is_finite());
        }
    }
}
