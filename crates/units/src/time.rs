//! Times as whole nanoseconds.

use std::time::{Duration, Instant};

/// Returns `duration` in nanoseconds, at most `u64::MAX` (584 years).
pub fn duration_ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the nanoseconds since `start`, at most `u64::MAX`.
pub fn elapsed_ns(start: Instant) -> u64 {
    duration_ns(start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_whole_nanoseconds_and_saturate() {
        assert_eq!(duration_ns(Duration::new(3, 7)), 3_000_000_007);
        assert_eq!(duration_ns(Duration::MAX), u64::MAX);
        let start = Instant::now();
        assert!(elapsed_ns(start) <= elapsed_ns(start));
    }
}
