//! Pseudo-random numbers by SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
//! Generators, 2014). No library is used, because the stream must not change with its version.

/// A generator. A seed always gives the same sequence.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number that is uniform in `0..end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// Returns a number that is uniform in `from..=to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to.saturating_sub(from) + 1)
    }

    /// Chooses one of `all`, which must not be empty.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len() as u64) as usize]
    }

    /// Chooses an index with a probability proportional to its weight.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let mut at = self.below(weights.iter().copied().map(u64::from).sum());
        for (which, weight) in weights.iter().enumerate() {
            match at.checked_sub(u64::from(*weight)) {
                Some(rest) => at = rest,
                None => return which,
            }
        }
        weights.len().saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first values of the reference implementation for seed 0.
    #[test]
    fn the_sequence_is_that_of_the_reference() {
        let mut random = Random::new(0);
        assert_eq!([random.next(), random.next()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn choices_stay_in_their_bounds_and_follow_weights() {
        let mut random = Random::new(1);
        let mut counts = [0; 3];
        for _ in 0..10_000 {
            assert!((5..=7).contains(&random.between(5, 7)));
            counts[random.weighted(&[1, 0, 3])] += 1;
        }
        assert_eq!(counts[1], 0);
        assert!((2000..3000).contains(&counts[0]), "{counts:?}");
    }
}
