//! The outcome of a simulation.

use serde::{Deserialize, Serialize};

/// The outcome of the simulation of one interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct IntervalRun {
    /// The number of the node that simulated it.
    pub node: usize,
    /// The time at which the node got it, in seconds.
    pub begin_s: f64,
    /// The time at which its transfer was complete, in seconds.
    pub there_s: f64,
    /// The time at which its simulation was complete, in seconds.
    pub end_s: f64,
    /// The bytes of the transfer.
    pub sent_bytes: f64,
    /// The number of times that it was begun, with the attempts that ended with a failure.
    pub tries: u32,
}

/// The use of a node's time, in seconds over all its slots. The sum of the first five fields is the
/// makespan times the number of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeUsage {
    /// The time in which the node simulated, with the work that a failure undid.
    pub busy_s: f64,
    /// The time in which it waited for transfers.
    pub transfer_s: f64,
    /// The time in which it started.
    pub start_s: f64,
    /// The time in which it was down after a failure.
    pub down_s: f64,
    /// The time in which it had no work.
    pub idle_s: f64,
    /// The part of `busy_s` and `transfer_s` that failures undid.
    pub lost_s: f64,
    /// The number of intervals that it completed.
    pub intervals: usize,
    /// The number of its failures.
    pub failures: usize,
}

/// The outcome of a simulated run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimulationOutcome {
    /// The time from the beginning of the recording to the end of the last interval, in seconds.
    pub makespan_s: f64,
    /// The simulation of each interval, in their order.
    pub intervals: Vec<IntervalRun>,
    /// The use of each node, in their order.
    pub nodes: Vec<NodeUsage>,
    /// The bytes of all transfers, with those that a failure ended.
    pub sent_bytes: f64,
}

impl SimulationOutcome {
    /// Returns the speed-up over one simulation of the whole run that takes `sequential_s` seconds.
    pub fn speed_up(&self, sequential_s: f64) -> f64 {
        sequential_s / self.makespan_s
    }

    /// Returns the speed-up (see [`Self::speed_up`]) divided by the number of slots.
    pub fn efficiency(&self, sequential_s: f64, slots: usize) -> f64 {
        self.speed_up(sequential_s) / slots.max(1) as f64
    }

    /// Returns the number of failures of all nodes.
    pub fn failures(&self) -> usize {
        self.nodes.iter().map(|node| node.failures).sum()
    }
}
