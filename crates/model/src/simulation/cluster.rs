//! What is simulated, and on what.

use super::Error;
use serde::{Deserialize, Serialize};

/// Seconds and bytes that nothing here is more than.
const MOST: f64 = 1e18;

/// A stretch of a run. Intervals follow each other in the order in which they are given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// When it can be simulated: its end is recorded, its checkpoint sealed. Seconds since the
    /// recording began.
    pub ready_s: f64,
    /// How long its simulation takes on a node of speed 1, once all is there.
    pub work_s: f64,
    /// Bytes of its checkpoint for a node that has nothing.
    pub image_bytes: f64,
    /// Bytes that its checkpoint has and the one before has not.
    pub new_bytes: f64,
}

/// A machine that simulates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Intervals at a time.
    pub slots: usize,
    /// Until it takes its first interval, after it is demanded and each time it comes back, in
    /// seconds: a job of a batch system begins.
    pub start_s: f64,
    /// How many times as fast it is as the one on which the intervals' times were measured.
    pub speed: f64,
}

/// The link of the server that has all checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// Bits a second that it sends, to all nodes together. Without a number: no transfer takes
    /// time.
    pub bits_per_s: Option<f64>,
    /// From a request to its first byte, in seconds.
    pub latency_s: f64,
}

/// What is sent of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// All of it, each time.
    Whole,
    /// What the node lacks.
    Missing,
}

/// Which of the intervals that are ready comes next, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The first one.
    InOrder,
    /// The one that takes longest.
    LongestFirst,
    /// The one of which a free node lacks least; a node that has nothing begins in the middle of
    /// the longest stretch that is left.
    Near,
}

/// When intervals are given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatch {
    /// Each once it is ready.
    Immediate,
    /// All once the last one is.
    Deferred,
}

/// A node is lost, with what it does and has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Which, from 0 on.
    pub node: usize,
    /// When, in seconds.
    pub at_s: f64,
    /// When it comes back; none: never.
    pub back_s: Option<f64>,
}

/// Which nodes fail, and when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Failures {
    /// Just these. One that happens to a node that is down does nothing.
    Listed(Vec<Failure>),
    /// By chance, times without a failure distributed exponentially.
    Random {
        /// Their mean, for each node, in seconds.
        mtbf_s: f64,
        /// How long a node is away; none: for good.
        repair_s: Option<f64>,
        /// What chance follows.
        seed: u64,
    },
}

/// Where intervals are simulated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// Its machines.
    pub nodes: Vec<Node>,
    /// What feeds them.
    pub network: Network,
    /// What is sent.
    pub transfer: Transfer,
    /// Which interval comes next.
    pub policy: Policy,
    /// When it does.
    pub dispatch: Dispatch,
    /// What goes wrong.
    pub failures: Failures,
}

impl Cluster {
    /// `count` equal nodes of one slot that start at once and never fail, a network that costs
    /// nothing.
    pub fn of(count: usize) -> Self {
        Self {
            nodes: vec![Node { slots: 1, start_s: 0.0, speed: 1.0 }; count],
            network: Network { bits_per_s: None, latency_s: 0.0 },
            transfer: Transfer::Missing,
            policy: Policy::InOrder,
            dispatch: Dispatch::Immediate,
            failures: Failures::Listed(Vec::new()),
        }
    }

    /// All slots of all nodes.
    pub fn slots(&self) -> usize {
        self.nodes.iter().map(|node| node.slots).sum()
    }

    pub(super) fn check(&self, intervals: &[Interval]) -> Result<(), Error> {
        if intervals.is_empty() {
            return Err(Error::None("interval to simulate"));
        }
        if self.slots() == 0 {
            return Err(Error::None("node with a slot"));
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

    fn check_failure(&self, failure: &Failure) -> Result<(), Error> {
        let Failure { node, at_s, back_s } = *failure;
        if node >= self.nodes.len() {
            return Err(Error::NoNode { node, nodes: self.nodes.len() });
        }
        not_negative(|| format!("the failure of node {node}"), at_s)?;
        not_negative(|| format!("the absence of node {node}"), back_s.unwrap_or(at_s) - at_s)
    }
}

fn not_negative(what: impl FnOnce() -> String, value: f64) -> Result<(), Error> {
    let must = "0 or more, and at most 1e18";
    if (0.0..=MOST).contains(&value) {
        Ok(())
    } else {
        Err(Error::Number { what: what(), value, must })
    }
}

fn positive(what: impl FnOnce() -> String, value: f64) -> Result<(), Error> {
    let must = "more than 0, and at most 1e18";
    let is_so = value > 0.0 && value <= MOST;
    if is_so { Ok(()) } else { Err(Error::Number { what: what(), value, must }) }
}
