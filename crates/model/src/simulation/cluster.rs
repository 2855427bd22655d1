//! The input of a simulation: intervals and a cluster.

use super::SimulationError;
use serde::{Deserialize, Serialize};

/// The largest number of seconds and bytes.
const MOST: f64 = 1e18;

/// A part of a run. The intervals of a run follow each other in the order in which they are given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimulatedInterval {
    /// The time at which it can be simulated, because its end is recorded and its checkpoint is
    /// sealed, in seconds since the recording began.
    pub ready_s: f64,
    /// The time to simulate it on a node of speed 1, after the transfer, in seconds.
    pub work_s: f64,
    /// The bytes to send to a node that has no checkpoint.
    pub image_bytes: f64,
    /// The bytes that differ from the checkpoint before.
    pub new_bytes: f64,
}

/// A machine of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterNode {
    /// The number of intervals that it simulates at once.
    pub slots: usize,
    /// The time from the request for the node, or from its return after a failure, to its first
    /// interval, in seconds: for example the start of a job in a batch system.
    pub start_s: f64,
    /// Its speed, relative to the machine on which the times of the intervals were measured.
    pub speed: f64,
}

/// The network link of the server that holds all checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterNetwork {
    /// Its rate for all nodes together, in bits per second; with `None` a transfer takes no time.
    pub bits_per_s: Option<f64>,
    /// The time from a request to its first byte, in seconds.
    pub latency_s: f64,
}

/// The part of a checkpoint that is sent to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// The whole checkpoint.
    Whole,
    /// The bytes that the node lacks.
    Missing,
}

/// The rule that selects the next interval and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AssignmentPolicy {
    /// The first interval.
    InOrder,
    /// The interval that takes longest.
    LongestFirst,
    /// The interval and node with the smallest transfer. A node without checkpoints begins in the
    /// middle of the longest stretch of waiting intervals.
    Near,
}

/// The time from which intervals are assigned to nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatch {
    /// Each interval when it is ready.
    Immediate,
    /// All intervals when the last one is ready.
    Deferred,
}

/// A failure of a node. The node loses its running intervals and its checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeFailure {
    /// The number of the node, from 0.
    pub node: usize,
    /// The time of the failure, in seconds.
    pub at_s: f64,
    /// The time at which the node comes back, in seconds; `None` if it does not.
    pub back_s: Option<f64>,
}

/// The failures of nodes in a simulated run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Failures {
    /// These failures. A failure of a node that is down has no effect.
    Listed(Vec<NodeFailure>),
    /// Random failures, with exponentially distributed times between them.
    Random {
        /// The mean time between failures of each node, in seconds.
        mtbf_s: f64,
        /// The time after which a failed node comes back, in seconds; `None` if it does not.
        repair_s: Option<f64>,
        /// The seed of the random numbers.
        seed: u64,
    },
}

/// The cluster that simulates intervals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// Its nodes.
    pub nodes: Vec<ClusterNode>,
    /// The network between the server and the nodes.
    pub network: ClusterNetwork,
    /// The part of a checkpoint that is sent.
    pub transfer: Transfer,
    /// The rule that selects the next interval.
    pub policy: AssignmentPolicy,
    /// The time from which intervals are assigned.
    pub dispatch: Dispatch,
    /// The failures of its nodes.
    pub failures: Failures,
}

impl Cluster {
    /// Makes a cluster of `count` equal nodes with one slot each. They start at once and never
    /// fail, and transfers take no time.
    pub fn of(count: usize) -> Self {
        Self {
            nodes: vec![ClusterNode { slots: 1, start_s: 0.0, speed: 1.0 }; count],
            network: ClusterNetwork { bits_per_s: None, latency_s: 0.0 },
            transfer: Transfer::Missing,
            policy: AssignmentPolicy::InOrder,
            dispatch: Dispatch::Immediate,
            failures: Failures::Listed(Vec::new()),
        }
    }

    /// Returns the number of slots of all nodes.
    pub fn slots(&self) -> usize {
        self.nodes.iter().map(|node| node.slots).sum()
    }

    /// Fails if an interval or a property of the cluster is out of bounds.
    pub(super) fn check(&self, intervals: &[SimulatedInterval]) -> Result<(), SimulationError> {
        if intervals.is_empty() {
            return Err(SimulationError::None("interval to simulate"));
        }
        if self.slots() == 0 {
            return Err(SimulationError::None("node with a slot"));
        }
        for (number, interval) in intervals.iter().enumerate() {
            for (what, value) in [
                ("ready time", interval.ready_s),
                ("time", interval.work_s),
                ("image", interval.image_bytes),
                ("new bytes", interval.new_bytes),
            ] {
                not_negative(|| format!("the {what} of interval {number}"), value)?;
            }
        }
        for (number, node) in self.nodes.iter().enumerate() {
            not_negative(|| format!("the start of node {number}"), node.start_s)?;
            positive(|| format!("the speed of node {number}"), node.speed)?;
        }
        not_negative(|| "the latency".into(), self.network.latency_s)?;
        if let Some(rate) = self.network.bits_per_s {
            positive(|| "the network's rate".into(), rate)?;
        }
        match &self.failures {
            Failures::Listed(failures) => {
                failures.iter().try_for_each(|failure| self.check_failure(failure))
            }
            Failures::Random { mtbf_s, repair_s, .. } => {
                positive(|| "the time between failures".into(), *mtbf_s)?;
                not_negative(|| "the time until a node is back".into(), repair_s.unwrap_or(0.0))
            }
        }
    }

    fn check_failure(&self, failure: &NodeFailure) -> Result<(), SimulationError> {
        let NodeFailure { node, at_s, back_s } = *failure;
        if node >= self.nodes.len() {
            return Err(SimulationError::NoNode { node, nodes: self.nodes.len() });
        }
        not_negative(|| format!("the failure of node {node}"), at_s)?;
        not_negative(|| format!("the absence of node {node}"), back_s.unwrap_or(at_s) - at_s)
    }
}

fn not_negative(what: impl FnOnce() -> String, value: f64) -> Result<(), SimulationError> {
    let must = "0 or more, and at most 1e18";
    if (0.0..=MOST).contains(&value) {
        Ok(())
    } else {
        Err(SimulationError::Number { what: what(), value, must })
    }
}

fn positive(what: impl FnOnce() -> String, value: f64) -> Result<(), SimulationError> {
    let must = "more than 0, and at most 1e18";
    let is_so = value > 0.0 && value <= MOST;
    if is_so { Ok(()) } else { Err(SimulationError::Number { what: what(), value, must }) }
}
