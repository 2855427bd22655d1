//! A replay that does nothing, and what has it go on.
//!
//! The log has each turn of the main loop in which a clock was read or a timer looked for: some
//! thousand a second while the guest waits for a disk. A replay goes through these by turns of its
//! own main loop, and has few reasons for one: the disk has answered long ago. Left to itself it
//! takes a minute for a fifth of a second. Any command that the main loop answers is a turn (what
//! the monitor's thread reads alone is none): whoever waits for a replay asks it for its
//! instruction while it is idle.

use std::time::{Duration, Instant};

/// How often a replay is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// And one that does nothing.
const WAKE_EVERY: Duration = Duration::from_micros(200);

/// Looks at one.
#[derive(Debug)]
pub struct Idling {
    pid: u32,
    seen: Instant,
    used: Duration,
}

impl Idling {
    /// At the QEMU with that pid.
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            seen: Instant::now(),
            used: keyframe_kernel::cpu_time::process_cpu_time(pid).unwrap_or_default(),
        }
    }

    /// Whether it was on a processor for less than half of the time since the last look, and how
    /// long to wait until the next one. One whose vCPU runs is all the time, and would only be kept
    /// from it.
    pub fn look(&mut self) -> (bool, Duration) {
        let Some(used) = keyframe_kernel::cpu_time::process_cpu_time(self.pid) else {
            return (false, LOOK_EVERY);
        };
        let is_idle = used.saturating_sub(self.used) * 2 < self.seen.elapsed();
        (self.seen, self.used) = (Instant::now(), used);
        (is_idle, if is_idle { WAKE_EVERY } else { LOOK_EVERY })
    }
}
