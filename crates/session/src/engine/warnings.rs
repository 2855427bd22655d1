//! When the engine warns its users of what lasts: late checkpoints, and a disk that is filling up.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The shortest time between two events about late checkpoints. Each checkpoint's entry holds its
/// own delay.
const SAY_LATE_EVERY: Duration = Duration::from_secs(30);
/// The shortest time between two events about space.
const SAY_SPACE_EVERY: Duration = Duration::from_mins(5);
/// Space that lasts for less than this is worth a warning.
const LASTS_MIN: Duration = Duration::from_mins(15);
/// The time over which the loss of space is measured.
const MEASURED: Duration = Duration::from_mins(2);
/// A loss within less time may be a burst, such as the first image.
const MEASURED_MIN: Duration = Duration::from_secs(20);

/// The times of the last warnings, and what the engine measures for the next one.
#[derive(Default)]
pub(super) struct Warnings {
    said_late: Option<Instant>,
    said_space: Option<Instant>,
    /// The free bytes of the store's medium, oldest first.
    free: VecDeque<(Instant, u64)>,
}

impl Warnings {
    /// Returns whether to say at `now` that a checkpoint was late.
    pub fn is_late_due(&mut self, now: Instant) -> bool {
        is_due(&mut self.said_late, now, SAY_LATE_EVERY)
    }

    /// Notes that the medium of the store has `free_bytes` at `now`. Returns how long they last if
    /// they go on to shrink as fast, if that is so short that users should know.
    pub fn space_lasts(&mut self, now: Instant, free_bytes: u64) -> Option<Duration> {
        while self.free.front().is_some_and(|(at, _)| now.duration_since(*at) > MEASURED) {
            self.free.pop_front();
        }
        self.free.push_back((now, free_bytes));
        let (since, before) = *self.free.front()?;
        let measured = now.duration_since(since);
        let lost = before.checked_sub(free_bytes).filter(|lost| *lost > 0)?;
        let lasts_s = measured.as_secs_f64() * free_bytes as f64 / lost as f64;
        let is_short = measured >= MEASURED_MIN && lasts_s < LASTS_MIN.as_secs_f64();
        let is_said = is_short && is_due(&mut self.said_space, now, SAY_SPACE_EVERY);
        is_said.then(|| Duration::from_secs_f64(lasts_s))
    }
}

/// Returns whether `every` has passed since `said`, and notes `now` if so.
fn is_due(said: &mut Option<Instant>, now: Instant, every: Duration) -> bool {
    let is_due = said.is_none_or(|at| now.duration_since(at) > every);
    if is_due {
        *said = Some(now);
    }
    is_due
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// The warnings of a run of `seconds` that seals a checkpoint a second, and begins with `free`
    /// bytes that shrink by `step` each.
    fn warned(free: u64, step: u64, seconds: u64) -> Vec<(u64, Duration)> {
        let (mut warnings, began) = (Warnings::default(), Instant::now());
        let warned = |second| {
            let now = began + Duration::from_secs(second);
            let lasts = warnings.space_lasts(now, free.saturating_sub(step * second))?;
            Some((second, lasts))
        };
        (0..seconds).filter_map(warned).collect()
    }

    #[test]
    fn a_disk_that_is_nearly_full_is_told_now_and_then() {
        let told = warned(GIB, 4 << 20, 250);
        assert_eq!(told, [(20, Duration::from_secs(236))]);
        let told = warned(100 * GIB, 32 << 20, 3000);
        let seconds: Vec<_> = told.iter().map(|(second, _)| *second).collect();
        assert_eq!(seconds, [2301, 2602, 2903], "{told:?}");
    }

    #[test]
    fn a_disk_with_room_or_one_that_does_not_fill_up_causes_no_warning() {
        assert_eq!(warned(1000 * GIB, 32 << 20, 400), []);
        assert_eq!(warned(1000, 0, 400), []);
        assert_eq!(warned(GIB, 32 << 20, 15), [], "that may be the first image");
    }

    #[test]
    fn late_checkpoints_are_told_now_and_then() {
        let (mut warnings, began) = (Warnings::default(), Instant::now());
        let due = [0, 10, 31, 40, 62].map(|s| warnings.is_late_due(began + Duration::from_secs(s)));
        assert_eq!(due, [true, false, true, false, true]);
    }
}
