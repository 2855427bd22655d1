//! Pure policy: observations in, decision out. No clock, no I/O, so that every rule is tested by a
//! table.
//!
//! - [`auto`]: whether pre-copy pays at all.
//! - [`cadence`]: when the next checkpoint is due, and how far behind it is.
//! - [`precopy`]: whether another round of copying pays before the VM is paused.
//! - [`recording`]: when a flight recorder looks at its store, and when it prunes.
//! - [`replication`]: when a protected VM is checkpointed, and when it is suspended early.
//! - [`threads`]: how many threads copy.
//! - [`tuning`]: interval and pre-copy target that keep a longest pause and a largest overhead.

pub mod auto;
pub mod cadence;
pub mod precopy;
pub mod recording;
pub mod replication;
pub mod threads;
pub mod tuning;

pub use auto::{AutoPolicy, Choice, Observed};
pub use cadence::Cadence;
pub use precopy::{Decision, PrecopyPolicy, Round};
pub use recording::Recording;
pub use replication::ReplicationPolicy;
pub use threads::ThreadChoice;
pub use tuning::{Budget, Measured, Tuned, Tuner, Why};
