//! Analysis inside QEMU: one plugin for QEMU's translator (TCG), which runs one or more tools, and
//! the board that it shares with the process that reads the results.
//!
//! ```text
//!   QEMU ── dlopen ──▶ qemu_plugin_install("tool=memtrace", "board=/proc/PID/fd/N", ...)
//!     │ translates ──▶ Tool: registers callbacks and counters for each instruction
//!     │ runs ────────▶ callbacks ──┬─▶ records into the board's ring ─▶ reader in another process   record streams
//!     │                            └─▶ tables in the plugin ──────────▶ part files, at cut and exit table tools
//!     └ runs ────────▶ counters on the board, incremented by translated code without a call         counters
//! ```
//!
//! A *cut* is the end of an interval: the VM is stopped, the reader increments the board's number of
//! cuts, and the next callback of a table tool writes the part of the ended interval (`cut`). One
//! replay of many intervals therefore gives the same parts as a QEMU for each.
//!
//! The same source is compiled three times: for plugin interface 1 (QEMU 7.2) and 4 (QEMU 10.0) as
//! the shared library that the program contains, and without QEMU for tests and for the reader. It
//! depends on `std` only, so that a single compiler call builds it.
//!
//! Invariants:
//! 1. There is one vCPU: callbacks run on one thread, so tables need no locks (`state`). A VM with
//!    more is refused.
//! 2. A wait for the reader is bounded. Without a reader QEMU ends with a message; it neither hangs
//!    nor loses records.
//! 3. The output depends only on the guest's execution: it contains no times and no host addresses,
//!    and is sorted.
//! 4. A panic ends QEMU; it never unwinds into C.
//!
//! Not here: result files for users (`crates/analysis` makes them from the parts), symbols, and the
//! choice of intervals.

mod access_kinds;
mod api;
mod arguments;
pub mod board;
mod cut;
pub mod exact_cache;
mod part;
mod physical;
mod qemu_icount;
mod record_stream;
mod shared_map;
mod slots;
mod state;
mod tools;
mod translations;

pub use part::{PartHeader, write as write_part};
pub use physical::{DEVICE, FILE_ARGUMENTS, UNKNOWN};
pub use tools::{GENERIC_NUMBERS, NO_DIRECT_MAP, NO_TASK, NOT_ASKED, qemu_plugin_install, trace};
