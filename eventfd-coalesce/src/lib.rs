//! Runs inside a replaying QEMU and skips writes to eventfds that are already signalled.
//!
//! ```text
//!   QEMU ── write(eventfd) ──▶ this library ── signalled, and not read since? ── yes ──▶ done
//!                                                                              └ no ──▶ kernel
//! ```
//!
//! QEMU notifies its main loop and its monitor's thread of each log event that a replay passes, with
//! three system calls each. The first call wakes them; the others have no effect while they wait for
//! the log's lock (docs/design/record-replay.md has measurements).
//!
//! The library is loaded before QEMU (`LD_PRELOAD`) and replaces four functions of the C library:
//! `eventfd`, from which it learns the descriptors, `write`, `read` and `close`. QEMU itself is
//! unchanged, and a reader of an eventfd sees the same state as without the library.
//!
//! Invariants:
//! 1. A write is skipped only if an earlier write that reached the kernel has not been read, or is
//!    being read by a call that returns later ([`table`]).
//! 2. Calls on other descriptors go to the kernel unchanged. So do writes to an eventfd that was
//!    never read through this library, because it may have another reader.
//! 3. The library allocates no memory and takes no lock, so it can be called in a signal handler and
//!    between fork and exec.

#![cfg_attr(keyframe_preloaded, no_std)]

#[cfg(keyframe_preloaded)]
mod exports;
pub mod table;
