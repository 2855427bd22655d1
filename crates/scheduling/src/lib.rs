//! Scheduling policies without clock and I/O: observations go in, decisions come out. Each rule is
//! tested by a table.
//!
//! - [`cadence`]: when the next checkpoint is due, and how late it is.
//! - [`copy_choice`]: whether a checkpoint uses pre-copy or copies everything in the pause.
//! - [`precopy`]: whether another pre-copy round pays before the pause.
//! - [`prune_schedule`]: when a flight recorder looks at its store, and when it prunes.
//! - [`replication`]: when a protected VM is checkpointed, and when it is suspended early.
//! - [`thread_choice`]: how many threads copy.
//! - [`tuning`]: the interval and the pre-copy target that keep a longest pause and a largest
//!   overhead.

pub mod cadence;
pub mod copy_choice;
pub mod precopy;
pub mod prune_schedule;
pub mod replication;
pub mod thread_choice;
pub mod tuning;

pub use cadence::Cadence;
pub use copy_choice::{CopyChoice, CopyCost, CopyPolicy};
pub use precopy::{PrecopyPolicy, Round, RoundDecision, burst_pages};
pub use prune_schedule::PruneSchedule;
pub use replication::ReplicationPolicy;
pub use thread_choice::ThreadChoice;
pub use tuning::{Budget, CheckpointCost, Tuned, Tuner, TuningReason};
