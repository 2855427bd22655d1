//! The pages, sectors and packets that a VM writes in epochs of different lengths: statistics, the
//! dirty page set, CSV and charts.
//!
//! ```text
//!   Ladder ──────────▶ lengths to measure      10 20 50 100 200 500 1000 2000 ms
//!   Epoch, Epoch ... ─▶ Curve ─┬─ Row per length: mean, deviation, min, max of pages, sectors, packets; growth
//!                              └─ DirtyPageSet: where growth ends
//!   Curve (1 vCPU), Curve (2 vCPUs) ... ──▶ curves_to_csv, figure
//! ```
//!
//! After Gerofi and Ishikawa, "Workload Adaptive Checkpoint Scheduling of Virtual Machine
//! Replication" (CLUSTER 2011), section II: a workload writes new pages fast at the beginning of an
//! epoch and slower once it has gone through the set of pages that it works on.
//!
//! Invariants:
//! 1. A value that was not measured is `None`, an empty cell or no line; never 0.
//! 2. No clock and no I/O: the same epochs give the same result.
//!
//! The crate `profiler` measures the epochs.

mod chart;
mod curve;
mod curve_csv;
mod ladder;
pub mod pcap;
mod statistic;

pub use chart::figure;
pub use curve::{Curve, CurveRow, DirtyPageSet, MeasuredEpoch, PLATEAU_PERCENT};
pub use curve_csv::curves_to_csv;
pub use ladder::{EPOCH_MAX, EPOCH_MIN, Ladder};
pub use statistic::Statistic;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The errors of this crate.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A list of epoch lengths cannot be parsed, or contains a length out of bounds.
    #[error(
        "epochs {text:?}: {problem}; write a range as in 10ms..2s, or a list as in 10ms,50ms,1s"
    )]
    Ladder {
        /// The list.
        text: String,
        /// What is wrong with the list.
        problem: String,
    },
    /// A file is not a capture file, or is damaged.
    #[error("the capture file, byte {offset}: {problem}")]
    Pcap {
        /// The position in the file, in bytes.
        offset: u64,
        /// What is wrong there.
        problem: &'static str,
    },
    /// Curves could not be written as CSV.
    #[error("write the curves as CSV: {problem}")]
    Csv {
        /// The cause.
        problem: String,
    },
}
