//! A sample of measurements, and its quantiles.

/// Measurements of one thing, in one unit.
#[derive(Clone, Debug, Default)]
pub struct Sample(Vec<f64>);

impl Sample {
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub fn append(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    pub fn values(&self) -> impl Iterator<Item = f64> {
        self.0.iter().copied()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the percentile by nearest rank; NaN for an empty sample, which JSON shows as null.
    pub fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
    }

    /// Returns the least value; NaN for an empty sample.
    pub fn least(&self) -> f64 {
        self.percentile(0)
    }

    /// Returns the largest value; NaN for an empty sample.
    pub fn most(&self) -> f64 {
        self.percentile(100)
    }

    /// Returns the middle value, or the mean of the two middle values; NaN for an empty sample.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |rank: usize| sorted.get(rank).copied().unwrap_or(f64::NAN);
        f64::midpoint(at(sorted.len().saturating_sub(1) / 2), at(sorted.len() / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_small_samples() {
        assert!(Sample::default().median().is_nan());
        assert!(Sample::default().percentile(99).is_nan());
        assert!((Sample(vec![7.0]).median() - 7.0).abs() < 1e-9);
        assert!((Sample(vec![9.0, 1.0]).median() - 5.0).abs() < 1e-9);
        assert!((Sample(vec![9.0, 1.0, 2.0]).median() - 2.0).abs() < 1e-9);
        assert!((Sample(vec![9.0, 1.0, 2.0]).percentile(99) - 9.0).abs() < 1e-9);
        assert!((Sample(vec![9.0, 1.0, 2.0]).least() - 1.0).abs() < 1e-9);
        assert!((Sample(vec![9.0, 1.0, 2.0]).most() - 9.0).abs() < 1e-9);
    }
}
