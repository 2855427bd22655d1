//! Analysis tools over the intervals of a recording: what each tool passes to QEMU, what it reads
//! back, and the results that it makes of the parts.
//!
//! ```text
//!   orchestrator ── tools::by_name ──▶ Tool
//!     for each interval, in parallel:
//!       Tool::begin ─▶ ToolRun ─ option ─▶ QEMU with the plugin (plugins/)
//!                                            ├─ records through the board's ring ─▶ thread ─▶ part
//!                                            └─ part files that the plugin writes
//!       at the interval's end, VM stopped: ToolRun::cut;  QEMU has exited: ToolRun::finish ─▶ Part
//!   Tool::merge: all parts in order ──▶ result files (Parquet, CSV), ToolSummary
//! ```
//!
//! Invariants:
//! 1. A part depends only on the guest's execution in its interval. The results of intervals that
//!    were replayed in parallel therefore equal those of one replay of all, byte for byte.
//! 2. A part file that has its final name is complete.
//! 3. The plugin ran beside a guest in QEMU, so its output is checked before it is used.
//!
//! Not here: QEMU processes, recordings, and the choice of intervals. They are the caller's.

mod btf;
mod code_symbols;
mod column_chunk;
mod context;
mod error;
mod execution_counts;
#[doc(hidden)]
pub mod fuzzing;
mod lcov;
pub mod parquet_table;
mod part_table;
pub mod plugin;
mod result_file;
mod ring_reader;
mod source_lines;
mod symbols;
mod third_party;
pub mod tools;

pub use context::{
    Icount, IcountInterval, MergeContext, Part, RamFile, RamRange, ReplayRam, RunContext,
    ToolSummary,
};
pub use error::{Error, Result};
pub use symbols::SymbolTable;
pub use third_party::ThirdPartyTool;
pub use tools::{Tool, ToolDescription, ToolRun};
