//! What a simulated cluster did.

use serde::{Deserialize, Serialize};

/// How an interval was simulated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ran {
    /// The node that did it.
    pub node: usize,
    /// When it was given to it, in seconds.
    pub begin_s: f64,
    /// When what the node lacked was there.
    pub there_s: f64,
    /// When it was done.
    pub end_s: f64,
    /// What was sent for that.
    pub sent_bytes: f64,
    /// How often it was begun.
    pub tries: u32,
}

/// What became of a node's time, in seconds, over all its slots: the sum is the makespan for each
/// slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Used {
    /// It simulated. What a failure undid counts, too.
    pub busy_s: f64,
    /// It waited for what it lacked.
    pub transfer_s: f64,
    /// It started.
    pub start_s: f64,
    /// It was down.
    pub down_s: f64,
    /// It had nothing to do.
    pub idle_s: f64,
    /// Of busy and transfer: for intervals that were begun anew then.
    pub lost_s: f64,
    /// Intervals that it has done.
    pub intervals: usize,
    /// How often it failed.
    pub failures: usize,
}

/// A simulated run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// From the recording's begin to the last interval's end, in seconds.
    pub makespan_s: f64,
    /// How each interval was simulated, in their order.
    pub intervals: Vec<Ran>,
    /// What each node did.
    pub nodes: Vec<Used>,
    /// What was asked of the server, in all tries.
    pub sent_bytes: f64,
}

impl Outcome {
    /// How many times as fast that is as a simulation that takes `sequential_s`.
    pub fn speed_up(&self, sequential_s: f64) -> f64 {
        sequential_s / self.makespan_s
    }

    /// The speed-up for each of `slots`.
    pub fn efficiency(&self, sequential_s: f64, slots: usize) -> f64 {
        self.speed_up(sequential_s) / slots.max(1) as f64
    }

    /// Failures of all nodes.
    pub fn failures(&self) -> usize {
        self.nodes.iter().map(|node| node.failures).sum()
    }
}
