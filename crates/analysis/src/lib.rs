//! Analysis tools over the intervals of a recording: what each hands to QEMU, what it reads back,
//! and the results that it makes of the parts.
//!
//! ```text
//!   orchestrator ── tools::by_name ──▶ Tool
//!     for each interval, side by side:
//!       Tool::begin ──▶ Running ── option ──▶ QEMU with the plugin (plugins/) ──┬─ records, through the board's ring ─▶ thread ─▶ part
//!                                                                             └─ part files of its own
//!       at the interval's end, VM standing: Running::cut;  QEMU has quit: Running::finish ──▶ Part
//!   Tool::merge: all parts in order ──▶ result files (Parquet, CSV), Summary
//! ```
//!
//! Invariants:
//! 1. Parts depend on what the guest executed in their interval alone. So the results of intervals that ran side by side are those of one
//!    replay of all, byte for byte: the same cuts, the same parts.
//! 2. A part file is complete once it has its name.
//! 3. What the plugin wrote is checked before it is believed: it ran beside a guest in QEMU.
//!
//! Left out: QEMU processes, recordings and where intervals begin (the caller's); a file that is
//! not a tool's own is never read.

mod btf;
mod chunk;
mod context;
mod counted;
mod csv;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod lcov;
mod lines;
mod manifest;
mod part;
pub mod plugin;
mod ring;
mod symbols;
mod table;
pub mod tools;

pub use context::{
    GuestRam, Icount, Interval, MergeContext, Part, RamFile, RamRange, RunContext, Summary,
};
pub use error::{Error, Result};
pub use manifest::Foreign;
pub use tools::{Description, Running, Tool};
