//! The choice of variants.
//!
//! Some tests have many variants, such as five capture strategies or two QEMU versions, and each
//! takes seconds on a real VM. A run tests some of them. Consecutive seeds take turns: with seed
//! `s` a test runs its variants `s * count ..`, so that a few seeds cover all of them.

use std::fmt::Debug;

const DEFAULT_SEED: u64 = 1;

/// Returns the seed of this run: `KEYFRAME_TEST_SEED`, or 1.
///
/// # Panics
/// If `KEYFRAME_TEST_SEED` is not a number.
pub fn seed() -> u64 {
    std::env::var("KEYFRAME_TEST_SEED").map_or(DEFAULT_SEED, |text| {
        text.parse().unwrap_or_else(|_| panic!("KEYFRAME_TEST_SEED={text} is not a number"))
    })
}

/// Returns true if this run tests every variant, however long that takes: `KEYFRAME_TEST_ALL=1`, as
/// `make test-all` sets it.
pub fn tests_every_variant() -> bool {
    std::env::var_os("KEYFRAME_TEST_ALL").is_some_and(|value| !value.is_empty() && value != "0")
}

/// Chooses `count` of the variants by the seed; all of them if [`tests_every_variant`].
///
/// The choice depends on the seed, on `count` and on the order of `all`.
pub fn variants<T: Debug>(all: impl IntoIterator<Item = T>, count: usize) -> Vec<T> {
    let all: Vec<T> = all.into_iter().collect();
    if tests_every_variant() || count >= all.len() {
        return all;
    }
    let chosen = choose(all, count, seed().wrapping_mul(count as u64));
    report_choice(&chosen);
    chosen
}

/// `count` items from number `first` on, counted around the end.
pub(crate) fn choose<T>(mut all: Vec<T>, count: usize, first: u64) -> Vec<T> {
    let len = all.len() as u64;
    all.rotate_left((first % len) as usize);
    all.truncate(count);
    all
}

/// Prints a choice; a test that fails shows it.
pub(crate) fn report_choice(chosen: &[impl Debug]) {
    println!(
        "KEYFRAME_TEST_SEED={} chose {chosen:?}; KEYFRAME_TEST_ALL=1 tests every variant",
        seed()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_seeds_cover_every_variant() {
        let chosen = |seed: u64| choose(vec!['a', 'b', 'c', 'd', 'e'], 2, seed * 2);
        assert_eq!([0, 1, 2].map(chosen), [['a', 'b'], ['c', 'd'], ['e', 'a']]);
    }

    #[test]
    fn any_seed_chooses() {
        assert_eq!(choose(vec![1, 2, 3], 1, u64::MAX), [1]);
    }
}
