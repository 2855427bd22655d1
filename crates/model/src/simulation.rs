//! A discrete-event simulation of a cluster that simulates intervals: where they are not equal,
//! nodes begin late or fail, or the network counts.
//!
//! ```text
//!   interval ─ ready ─▶ waits for a slot ─▶ request ─▶ transfer of what the node lacks ─▶ simulated ─▶ done
//!                            ▲                             │                                  │
//!                            └──────────── the node fails: it begins anew ◀──────────────────┘
//!
//!   node ─ demanded ─▶ starts ─▶ up ─▶ fails ─▶ comes back, with nothing kept ─▶ starts ─▶ ...
//! ```
//!
//! One server feeds all: what it sends at one time shares its link fairly. A node that keeps what
//! it got lacks only what was written between the checkpoint that it is to have and the nearest
//! that it has.
//!
//! Invariants:
//! 1. No clock, no I/O: the same input gives the same outcome; what is random comes from a seed.
//! 2. Each interval is done exactly once, or there is an error.
//! 3. Each slot's time is told in full: simulating, transferring, starting, down, idle.
//!
//! Left out: a node's own link, its disk, caches that are too small, one machine's slots disturbing
//! each other.

mod cluster;
mod dispatch;
mod engine;
mod error;
mod failing;
mod holdings;
mod link;
mod outcome;
mod regular;
#[cfg(test)]
mod tests;

pub use cluster::{
    Cluster, Dispatch, Failure, Failures, Interval, Network, Node, Policy, Transfer,
};
pub use engine::simulate;
pub use error::Error;
pub use outcome::{Outcome, Ran, Used};
pub use regular::regular;
