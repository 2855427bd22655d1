//! The policy that a user names: `adaptive`, `paper` or `fixed:100ms`.

use super::{AdaptiveParameters, AdaptivePolicy, FixedInterval, PaperPolicy, ReplicationScheduler};
use keyframe_units::duration_ns;
use std::{fmt, str::FromStr, time::Duration};

/// The shortest interval: with a shorter one the VM would be paused most of the time.
const INTERVAL_NS_MIN: u64 = 1_000_000;
/// The longest interval.
const INTERVAL_NS_MAX: u64 = 3_600_000_000_000;

/// A replication policy, as users name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicationPolicy {
    /// [`AdaptivePolicy`].
    #[default]
    Adaptive,
    /// [`PaperPolicy`]: figure 6 of the paper.
    Paper,
    /// [`FixedInterval`].
    Fixed {
        /// The time from the start of one capture to the start of the next, in nanoseconds.
        interval_ns: u64,
    },
}

impl ReplicationPolicy {
    /// Creates the policy. Only the adaptive policy has `parameters`; the caller should tell users
    /// who set a target for another one.
    pub fn build(self, parameters: AdaptiveParameters) -> Box<dyn ReplicationScheduler> {
        match self {
            Self::Adaptive => Box::new(AdaptivePolicy::new(parameters)),
            Self::Paper => Box::new(PaperPolicy::default()),
            Self::Fixed { interval_ns } => Box::new(FixedInterval::every(interval_ns)),
        }
    }
}

impl fmt::Display for ReplicationPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adaptive => f.write_str("adaptive"),
            Self::Paper => f.write_str("paper"),
            Self::Fixed { interval_ns } => {
                // No blank between units, so that it can be given back as one word.
                let text =
                    humantime::format_duration(Duration::from_nanos(*interval_ns)).to_string();
                write!(f, "fixed:{}", text.replace(' ', ""))
            }
        }
    }
}

/// The reason why a text names no replication policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownPolicy {
    /// There is no policy with this name.
    #[error(
        "there is no replication policy '{0}'; use adaptive, paper or fixed:INTERVAL, for example \
         fixed:100ms"
    )]
    Name(String),
    /// `fixed` without its interval.
    #[error("the policy 'fixed' needs an interval, for example fixed:100ms")]
    NoInterval,
    /// The interval after `fixed:` is invalid.
    #[error("'{text}' is not an interval: {why}; write for example 100ms")]
    Interval {
        /// The text after `fixed:`.
        text: String,
        /// What is wrong with it.
        why: String,
    },
}

impl FromStr for ReplicationPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        match text.trim() {
            "adaptive" => return Ok(Self::Adaptive),
            "paper" => return Ok(Self::Paper),
            "fixed" | "fixed:" => return Err(UnknownPolicy::NoInterval),
            _ => {}
        }
        let Some(interval) = text.trim().strip_prefix("fixed:") else {
            return Err(UnknownPolicy::Name(text.to_owned()));
        };
        let wrong = |why: String| UnknownPolicy::Interval { text: interval.to_owned(), why };
        let parsed =
            humantime::parse_duration(interval).map_err(|error| wrong(error.to_string()))?;
        let interval_ns = duration_ns(parsed);
        if !(INTERVAL_NS_MIN..=INTERVAL_NS_MAX).contains(&interval_ns) {
            return Err(wrong("it must be between 1ms and 1h".to_owned()));
        }
        Ok(Self::Fixed { interval_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written_back() {
        for (text, policy, name) in [
            ("adaptive", ReplicationPolicy::Adaptive, "adaptive (overhead 33%)"),
            ("paper", ReplicationPolicy::Paper, "paper"),
            ("fixed:100ms", ReplicationPolicy::Fixed { interval_ns: 100_000_000 }, "fixed 100ms"),
            (
                "fixed:1s500ms",
                ReplicationPolicy::Fixed { interval_ns: 1_500_000_000 },
                "fixed 1s 500ms",
            ),
        ] {
            assert_eq!(text.parse(), Ok(policy));
            assert_eq!(policy.to_string(), text);
            assert_eq!(policy.build(AdaptiveParameters::default()).name(), name);
        }
        assert_eq!(ReplicationPolicy::default(), ReplicationPolicy::Adaptive);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let said = |text: &str| text.parse::<ReplicationPolicy>().unwrap_err().to_string();
        assert_eq!(
            said("remus"),
            "there is no replication policy 'remus'; use adaptive, paper or fixed:INTERVAL, for example \
             fixed:100ms"
        );
        assert_eq!(said("fixed"), "the policy 'fixed' needs an interval, for example fixed:100ms");
        for wrong in ["fixed:fast", "fixed:100", "fixed:0ms", "fixed:10us", "fixed:2h", "fixed:-1s"]
        {
            let said = said(wrong);
            assert!(said.starts_with(&format!("'{}' is not an interval: ", &wrong[6..])), "{said}");
        }
    }

    #[test]
    fn error_texts_are_the_golden_ones() {
        use keyframe_testing::{assert_golden, error_text};
        let errors = [
            UnknownPolicy::Name("remus".into()),
            UnknownPolicy::NoInterval,
            UnknownPolicy::Interval { text: "fast".into(), why: "expected number at 0".into() },
        ];
        let texts: Vec<String> = errors.iter().map(|e| error_text(e, None)).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
