//! The core on which requests are answered: any core, or the core of the guest that asks, before
//! the guest runs on.
//!
//! ```text
//!   any core          guest ── request ── runs ── halts     a recorded guest that has halted sees
//!                     server      └ another core ── answer  the answer only at its next timer, ms
//!                                                           later
//!
//!   the guest's core  guest ── request ┐          ┌ the answer is there: the thread that asked
//!                     server           └─ answer ─┘ takes it at once
//! ```
//!
//! A QEMU that records or replays runs on one core, one thread at a time (`keyframe-qemu`,
//! `thread_affinity`). A client's thread on the same core with a higher priority takes the core
//! when the request arrives and returns it with the answer. So the answer is there before QEMU
//! looks for it the first time, unless the read must wait for a device. If the process may not
//! raise the priority, the thread is an ordinary one, and the kernel usually decides the same.

use keyframe_kernel::{cpu_affinity, priority};
use nix::sys::resource::{UsageWho, getrusage};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The setting of the processor core on which all threads that serve clients answer. It counts its
/// changes: a thread applies the setting again after each one.
#[derive(Debug, Default)]
pub struct Affinity(AtomicU64);

/// Bits of a core's number, plus one.
const CORE_BITS: u32 = 32;

/// If a read took longer and its thread slept, it waited for a device.
const WAITED: Duration = Duration::from_micros(500);
/// The number of reads after one that waited that are expected to wait too.
const SLOW_READS_EXPECTED: u32 = 32;

/// The setting of [`Affinity`] that one client's thread has applied.
#[derive(Debug, Default)]
pub struct ThreadPlacement {
    said: u64,
    /// The number of reads that are still expected to wait.
    expected_slow: u32,
}

impl ThreadPlacement {
    /// Returns true if this thread may itself perform a read that might wait for a device (of an
    /// image in qcow2, of a checkpoint's blocks), so that the guest gets the answer at once.
    /// Returns false if no core is set, and for the next 32 such reads after one that has waited.
    pub fn may_read_inline(&mut self) -> bool {
        if core_of(self.said).is_none() {
            return false;
        }
        let may_read = self.expected_slow == 0;
        self.expected_slow = self.expected_slow.saturating_sub(1);
        may_read
    }

    /// Runs `read`, returns its result, and remembers whether it waited for a device.
    pub fn watch<T>(&mut self, read: impl FnOnce() -> T) -> T {
        let (began, slept) = (Instant::now(), sleeps());
        let result = read();
        // A thread that was only preempted has not slept.
        if began.elapsed() > WAITED && sleeps() > slept {
            self.expected_slow = SLOW_READS_EXPECTED;
        }
        result
    }
}

/// The number of times that the calling thread has gone to sleep.
fn sleeps() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches())
}

impl Affinity {
    /// Sets the processor core on which requests are answered. Each client's thread moves to it at
    /// its next request.
    pub fn set(&self, core: u32) {
        let round = (self.0.load(Ordering::Relaxed) >> CORE_BITS) + 1;
        self.0.store(round << CORE_BITS | (u64::from(core) + 1), Ordering::Release);
    }

    /// Makes all clients' threads apply the core again. The caller calls this after it changed the
    /// priority of the whole process.
    pub fn renew(&self) {
        if let Some(core) = core_of(self.0.load(Ordering::Relaxed)) {
            self.set(core);
        }
    }

    /// Moves the calling thread to the core that is set, if the setting has changed since
    /// `placement`, and raises the thread's priority there.
    pub fn take(&self, placement: &mut ThreadPlacement) {
        let said = self.0.load(Ordering::Acquire);
        if said != placement.said {
            placement.said = said;
            if let Some(core) = core_of(said) {
                // On another core the thread must not displace others, so its priority stays.
                let _ = cpu_affinity::bind_current_thread(core as usize)
                    && priority::raise_current_thread();
            }
        }
    }
}

fn core_of(said: u64) -> Option<u32> {
    (said as u32).checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_after_one_that_waited_are_not_tried() {
        let mut placement = ThreadPlacement::default();
        assert!(!placement.may_read_inline(), "it has no core");
        std::thread::spawn(move || {
            let affinity = Affinity::default();
            affinity.set(0);
            affinity.take(&mut placement);
            assert!(placement.may_read_inline());
            assert_eq!(placement.watch(|| 7), 7);
            assert!(placement.may_read_inline(), "the last read was quick");
            placement.watch(|| std::thread::sleep(WAITED * 4));
            let tried: Vec<bool> =
                (0..=SLOW_READS_EXPECTED).map(|_| placement.may_read_inline()).collect();
            assert!(tried.iter().rev().skip(1).all(|tried| !tried) && tried.last() == Some(&true));
        })
        .join()
        .unwrap();
    }
}
