//! Detects a replay that is idle, and needs to be woken.
//!
//! The log holds each turn of QEMU's main loop in which a clock was read or a timer was looked for:
//! some thousand a second while the guest waits for a disk. A replay passes these by turns of its
//! own main loop, and has few reasons for turns, because the disk has answered long ago. On its own
//! it takes a minute for a fifth of a second. Each command that the main loop answers is a turn;
//! what the monitor's thread reads alone is none. So the process that waits for an idle replay asks
//! it for its instruction.

use keyframe_kernel::cpu_time::process_cpu_time;
use std::time::{Duration, Instant};

/// How often a replay is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How often an idle replay is looked at, and woken.
const WAKE_EVERY: Duration = Duration::from_micros(200);

/// Measures how busy a QEMU is.
#[derive(Debug)]
pub struct IdleWatch {
    pid: u32,
    looked_at: Instant,
    cpu_time: Duration,
}

/// The result of [`IdleWatch::look`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idleness {
    /// True if the QEMU was on a processor for less than half of the time since the last look.
    pub is_idle: bool,
    /// The time to wait until the next look.
    pub wait: Duration,
}

impl IdleWatch {
    /// Begins to watch the QEMU with the process id `pid`.
    pub fn new(pid: u32) -> Self {
        let cpu_time = process_cpu_time(pid).unwrap_or_default();
        Self { pid, looked_at: Instant::now(), cpu_time }
    }

    /// Compares the QEMU's CPU time with the time since the last look. A QEMU whose virtual
    /// processor runs is never idle: waking would only hold it up.
    pub fn look(&mut self) -> Idleness {
        let Some(cpu_time) = process_cpu_time(self.pid) else {
            return Idleness { is_idle: false, wait: LOOK_EVERY };
        };
        let is_idle = cpu_time.saturating_sub(self.cpu_time) * 2 < self.looked_at.elapsed();
        (self.looked_at, self.cpu_time) = (Instant::now(), cpu_time);
        Idleness { is_idle, wait: if is_idle { WAKE_EVERY } else { LOOK_EVERY } }
    }
}
