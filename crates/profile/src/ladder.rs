//! Parses the epoch lengths to measure: `10ms..2s` means 10, 20, 50, 100 ... 2000 ms, and
//! `10ms,50ms` means these two.

use crate::{Error, Result};
use std::str::FromStr;
use std::time::Duration;

/// The shortest epoch. A scan takes about 1 ms, which must be a small part of the epoch.
pub const EPOCH_MIN: Duration = Duration::from_millis(1);
/// The longest epoch that can be measured.
pub const EPOCH_MAX: Duration = Duration::from_secs(600);
/// The largest number of lengths.
const LENGTHS_MAX: usize = 64;

/// The lengths of the epochs that a profile measures: at least one, sorted, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ladder(Vec<Duration>);

impl Ladder {
    /// Returns the lengths, the shortest first.
    pub fn lengths(&self) -> &[Duration] {
        &self.0
    }

    /// Returns the sum of the lengths: the time that one epoch of each takes.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// Returns the number of epochs of each length to measure within `budget`: as many as fit, but
    /// at least 3 and at most 200.
    pub fn samples_within(&self, budget: Duration) -> u32 {
        let fit = budget.as_nanos() / self.total().as_nanos().max(1);
        u32::try_from(fit).unwrap_or(u32::MAX).clamp(3, 200)
    }
}

impl FromStr for Ladder {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let failed =
            |problem: String| Error::Ladder { text: text.chars().take(80).collect(), problem };
        let length = |part: &str| {
            let length =
                humantime::parse_duration(part.trim()).map_err(|e| failed(e.to_string()))?;
            if !(EPOCH_MIN..=EPOCH_MAX).contains(&length) {
                let [least, most] = [EPOCH_MIN, EPOCH_MAX].map(humantime::format_duration);
                return Err(failed(format!("{} is not between {least} and {most}", part.trim())));
            }
            Ok(length)
        };
        let mut lengths = match text.split_once("..") {
            Some((from, to)) => {
                let (from, to) = (length(from)?, length(to)?);
                if from > to {
                    return Err(failed("it ends before it begins".into()));
                }
                steps(from, to)
            }
            None => text.split(',').map(length).collect::<Result<_>>()?,
        };
        lengths.sort_unstable();
        lengths.dedup();
        if lengths.len() > LENGTHS_MAX {
            return Err(failed(format!("more than {LENGTHS_MAX} lengths")));
        }
        Ok(Self(lengths))
    }
}

/// Returns `from`, `to`, and between them 1, 2 and 5 times each power of ten milliseconds.
fn steps(from: Duration, to: Duration) -> Vec<Duration> {
    let powers = (0..6).map(|power| 10u64.pow(power));
    let round = powers.flat_map(|ms| [ms, 2 * ms, 5 * ms]).map(Duration::from_millis);
    let inside = round.filter(|step| from < *step && *step < to);
    [from].into_iter().chain(inside).chain([to]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(text: &str) -> Vec<u128> {
        text.parse::<Ladder>().unwrap().lengths().iter().map(Duration::as_millis).collect()
    }

    #[test]
    fn a_range_has_even_factors_and_a_list_keeps_its_lengths() {
        assert_eq!(ms("10ms..2s"), [10, 20, 50, 100, 200, 500, 1000, 2000]);
        assert_eq!(ms("30ms .. 120ms"), [30, 50, 100, 120]);
        assert_eq!(ms("1s..1s"), [1000]);
        assert_eq!(ms("50ms, 10ms,50ms"), [10, 50]);
    }

    #[test]
    fn invalid_lengths_are_refused_with_an_example() {
        for text in [
            "",
            "10",
            "2s..10ms",
            "0ms..1s",
            "10ms..",
            "1h",
            "fast",
            "10ms,",
            "100us",
            "1ms..2s..3s",
        ] {
            let error = text.parse::<Ladder>().unwrap_err().to_string();
            assert!(error.contains("10ms..2s"), "{text}: {error}");
        }
        let long: Vec<String> = (1..=LENGTHS_MAX + 1).map(|n| format!("{n}ms")).collect();
        assert!(long.join(",").parse::<Ladder>().is_err());
    }

    #[test]
    fn samples_fit_the_budget() {
        let ladder: Ladder = "10ms..2s".parse().unwrap();
        assert_eq!(ladder.samples_within(Duration::from_secs(60)), 15);
        assert_eq!("600s".parse::<Ladder>().unwrap().samples_within(Duration::from_secs(60)), 3);
        assert_eq!("1ms".parse::<Ladder>().unwrap().samples_within(Duration::from_secs(60)), 200);
    }

    proptest! {
        #[test]
        fn no_text_panics_and_parsed_lengths_rise(text in "[0-9msuh., ]{0,24}") {
            if let Ok(ladder) = text.parse::<Ladder>() {
                prop_assert!(!ladder.lengths().is_empty());
                prop_assert!(ladder.lengths().windows(2).all(|w| w[0] < w[1]));
            }
        }
    }
}
