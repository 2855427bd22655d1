//! Waiting for a condition.

use std::time::{Duration, Instant};

/// The time that a test waits for an event before it fails: long enough for a busy machine.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// Waits until `is_done` returns true.
///
/// # Panics
/// With `what` if that takes longer than [`PATIENCE`].
pub fn wait_until(what: &str, mut is_done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let began = Instant::now();
        if is_done() {
            return;
        }
        assert!(began < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(pause_after(began.elapsed()));
    }
}

/// Returns the time to wait after a look that took `took`. Looks that start programs must leave
/// processor time to the programs that they look at.
pub fn pause_after(took: Duration) -> Duration {
    (took * 5).clamp(Duration::from_millis(10), Duration::from_millis(250))
}
