//! A discrete-event simulation of a cluster that simulates intervals. It includes unequal
//! intervals, nodes that start late or fail, and the transfer of checkpoints.
//!
//! ```text
//!   interval ─ ready ─▶ waits for a slot ─▶ transfer of missing bytes ─▶ simulated ─▶ done
//!                            ▲                      │                        │
//!                            └────── the node fails: it begins again ◀──────┘
//!
//!   node ─ demanded ─▶ starts ─▶ up ─▶ fails ─▶ comes back empty ─▶ starts ─▶ ...
//! ```
//!
//! One server sends all checkpoints. Its concurrent transfers share its link equally. A node keeps
//! the checkpoints that it has received, so that it lacks only the bytes written between the
//! requested checkpoint and the nearest one that it has.
//!
//! Invariants:
//! 1. No clock, no I/O: the same input gives the same outcome. Random failures come from a seed.
//! 2. Each interval is done exactly once, or the simulation fails.
//! 3. The time of each slot is accounted in full: simulating, transferring, starting, down, idle.
//!
//! Not modelled: a node's own link and disk, a limit of its cache, and slots of one machine that
//! slow each other down.

mod assignment;
mod cluster;
mod engine;
mod equal_intervals;
mod error;
mod failure_schedule;
mod held_checkpoints;
mod network_rate;
mod outcome;
mod planned_run;
mod server_link;
#[cfg(test)]
mod tests;

pub use cluster::{
    AssignmentPolicy, Cluster, ClusterNetwork, ClusterNode, Dispatch, Failures, NodeFailure,
    SimulatedInterval, Transfer,
};
pub use engine::simulate;
pub use equal_intervals::equal_intervals;
pub use error::SimulationError;
pub use network_rate::parse_rate;
pub use outcome::{IntervalRun, NodeUsage, SimulationOutcome};
pub use planned_run::{ClusterRun, PlannedRun};
