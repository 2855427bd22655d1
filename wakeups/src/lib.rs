//! Inside a QEMU that replays: an eventfd that is signalled already is not written to again.
//!
//! ```text
//!   QEMU ── write(eventfd) ──▶ here ── signalled, and nobody has read it since? ── yes ──▶ done
//!                                                                                └ no ──▶ kernel
//! ```
//!
//! QEMU tells its main loop and its monitor's thread of each event of the log that a replay passes,
//! three system calls each. They are awake, and wait for their turn; the first of those calls has
//! woken them. While a guest boots that is a million events a second, and the calls were more than
//! half of the replay's time.
//!
//! It is loaded before QEMU (`LD_PRELOAD`) and stands in for four functions of the C library:
//! `eventfd`, by which it knows which descriptors are meant, `write`, `read` and `close`. QEMU
//! itself is as its distribution built it, and who looks at an eventfd sees what they would see
//! without: readable or not.
//!
//! Invariants:
//! 1. A write is left out only where one that went to the kernel has not been read, or is being read by a call that returns behind it ([`table`]).
//! 2. What is not an eventfd goes to the kernel as it came; so does one that nobody read by way of this library, which may have another reader.
//! 3. Neither memory nor a lock: it may be called in a signal handler and between fork and exec.

#![cfg_attr(keyframe_preloaded, no_std)]

#[cfg(keyframe_preloaded)]
mod exports;
pub mod table;
