//! What a VM writes in epochs of different lengths: from counts to statistics, the dirty page set,
//! CSV and charts.
//!
//! ```text
//!   Ladder ──────────▶ lengths to measure      10 20 50 100 200 500 1000 2000 ms
//!   Epoch, Epoch ... ─▶ Curve ─┬─ Row per length: mean, deviation, min, max of pages, sectors, packets; growth
//!                              └─ DirtyPageSet: where growth ends
//!   Curve (1 vCPU), Curve (2 vCPUs) ... ──▶ csv, figure
//! ```
//!
//! After Gerofi and Ishikawa, "Workload Adaptive Checkpoint Scheduling of Virtual Machine
//! Replication" (CLUSTER 2011), section II: a workload writes new pages fast at the beginning of an
//! epoch and slower once it has gone through the set of pages that it works on.
//!
//! Invariants:
//! 1. What was not measured is `None`, an empty cell or no line; never 0.
//! 2. No clock and no I/O: the same epochs give the same answer.
//!
//! Left out: how epochs are measured (the binary's `profile` module).

mod chart;
mod csv;
mod curve;
mod ladder;
pub mod pcap;
mod statistic;

pub use chart::figure;
pub use csv::csv;
pub use curve::{Curve, DirtyPageSet, Epoch, PLATEAU_PERCENT, Row};
pub use ladder::{EPOCH_MAX, EPOCH_MIN, Ladder};
pub use statistic::Statistic;

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with what is asked of this crate.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// Epoch lengths that cannot be read, or measured.
    #[error(
        "epochs {text:?}: {problem}; write a range as in 10ms..2s, or a list as in 10ms,50ms,1s"
    )]
    Ladder {
        /// What was given.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A dump of packets that is none.
    #[error("the dump of packets, byte {offset}: {problem}")]
    Pcap {
        /// Where.
        offset: u64,
        /// What is wrong.
        problem: &'static str,
    },
}
