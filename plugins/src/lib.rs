//! Analysis inside QEMU: one plugin for its translator (TCG) with one tool each run, and the board
//! that it shares with the process which reads it.
//!
//! ```text
//!   QEMU ── dlopen ──▶ qemu_plugin_install("tool=memtrace", "board=/proc/PID/fd/N", ...)
//!     │ translates ──▶ Tool: what each instruction is to call or to count
//!     │ runs ────────▶ callbacks ──┬─▶ records into the board's ring ──────▶ reader in another process      streams
//!     │                            └─▶ tables of the plugin's own ─────────▶ part files, at a cut and at exit   reducers
//!     └ runs ────────▶ counters on the board, added to by translated code alone                            counters
//! ```
//!
//! A *cut* is the end of an interval: the VM stands still, the reader raises the board's number of
//! cuts, and the next callback of a reducer writes out what belongs to the interval before (`cut`).
//! So one replay of many intervals gives the same parts as a QEMU for each.
//!
//! The same file is compiled three times: for interface 1 (QEMU 7.2) and 4 (QEMU 10.0) as the
//! shared library that `crates/carried` carries, and without QEMU for tests and for the reader. It
//! depends on nothing but `std`, so that a bare compiler call builds it.
//!
//! Invariants:
//! 1. One vCPU: callbacks run on one thread, so tables need no locks (`state`). A VM with more is refused.
//! 2. A wait for the reader is bounded; without a reader QEMU ends, with a message, rather than hang or lose records.
//! 3. What is written is a function of what the guest executed: no times, no addresses of the host, all sorted.
//! 4. A panic ends QEMU; it never unwinds into C.
//!
//! Left out: files that users read (`crates/analysis` makes them of the parts), symbols, where
//! intervals begin and end.

mod api;
mod arguments;
pub mod board;
mod cut;
mod map;
mod part;
mod physical;
mod slots;
mod state;
mod stream;
mod tools;
mod translations;

pub use part::{Header as PartHeader, write as write_part};
pub use physical::{DEVICE, FILE_ARGUMENTS, UNKNOWN};
pub use tools::{NO_DIRECT_MAP, NO_TASK, NOT_ASKED, qemu_plugin_install, trace};
