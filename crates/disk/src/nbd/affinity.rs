//! Where requests are answered: wherever the kernel likes, or on the core of the guest that asks,
//! and before it runs on.
//!
//! ```text
//!   anywhere          guest ── request ── runs ── halts            a recorded guest that has halted gets the answer at its next timer only,
//!                     server      └ woken on another core ── answer          ms later
//!
//!   on its core       guest ── request ┐          ┌ the answer is there: taken by the thread that asked, at once
//!                     server           └─ answer ─┘
//! ```
//!
//! A QEMU that records or replays is on one core, by turns (`keyframe-qemu`, `turns`). A client's
//! thread that is on that core too, and in front of the guest's, takes the core with the request,
//! and gives it back with the answer: what the guest asked for is there before QEMU looks for it
//! the first time, as long as nothing has to be waited for. Where the priority is not permitted the
//! thread is an ordinary one, and the kernel most often decides the same.

use keyframe_kernel::{cpu_affinity, priority};
use nix::sys::resource::{UsageWho, getrusage};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The core that all clients' threads answer on, and how often that was said: a thread whose
/// priority was changed takes its place anew.
#[derive(Debug, Default)]
pub struct Affinity(AtomicU64);

/// Bits of a core's number, plus one.
const CORE_BITS: u32 = 32;

/// A read that took longer, and had its thread sleep, has waited for a device.
const WAITED: Duration = Duration::from_micros(500);
/// How many reads are taken to be like one that has.
const LIKE_IT: u32 = 32;

/// What a client's thread has taken.
#[derive(Debug, Default)]
pub struct Placement {
    said: u64,
    /// How many reads behind one that waited are left.
    like_it: u32,
}

impl Placement {
    /// Whether what nobody knows to be quick (an image that has to be decoded, a checkpoint's
    /// blocks) is read by this thread all the same: the guest would have it at once. Not while the
    /// last of those has waited for a device.
    pub fn tries(&mut self) -> bool {
        if core_of(self.said).is_none() {
            return false;
        }
        let tries = self.like_it == 0;
        self.like_it = self.like_it.saturating_sub(1);
        tries
    }

    /// Reads so, and remembers whether it had to wait.
    pub fn watch<T>(&mut self, read: impl FnOnce() -> T) -> T {
        let (began, slept) = (Instant::now(), sleeps());
        let result = read();
        // A thread whose core was taken has not slept.
        if began.elapsed() > WAITED && sleeps() > slept {
            self.like_it = LIKE_IT;
        }
        result
    }
}

/// How often the calling thread has gone to sleep.
fn sleeps() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches())
}

impl Affinity {
    /// Answers come from `core` from each client's next request on.
    pub fn set(&self, core: u32) {
        let round = (self.0.load(Ordering::Relaxed) >> CORE_BITS) + 1;
        self.0.store(round << CORE_BITS | (u64::from(core) + 1), Ordering::Release);
    }

    /// Threads take their places anew: all of this process have got another priority.
    pub fn renew(&self) {
        if let Some(core) = core_of(self.0.load(Ordering::Relaxed)) {
            self.set(core);
        }
    }

    /// Has the calling thread take its place, where it has not yet.
    pub fn take(&self, placement: &mut Placement) {
        let said = self.0.load(Ordering::Acquire);
        if said != placement.said {
            placement.said = said;
            if let Some(core) = core_of(said) {
                // On another core it is to be in nobody's way.
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
    fn reads_behind_one_that_waited_are_not_tried() {
        let mut placement = Placement::default();
        assert!(!placement.tries(), "it has no place");
        std::thread::spawn(move || {
            let affinity = Affinity::default();
            affinity.set(0);
            affinity.take(&mut placement);
            assert!(placement.tries());
            assert_eq!(placement.watch(|| 7), 7);
            assert!(placement.tries(), "that one was quick");
            placement.watch(|| std::thread::sleep(WAITED * 4));
            let tried: Vec<bool> = (0..=LIKE_IT).map(|_| placement.tries()).collect();
            assert!(tried.iter().rev().skip(1).all(|tried| !tried) && tried.last() == Some(&true));
        })
        .join()
        .unwrap();
    }
}
