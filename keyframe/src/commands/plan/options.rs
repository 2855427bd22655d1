//! The description of the cluster for `keyframe plan --simulate`.

use super::super::checkpoints::parse_duration;
use keyframe_model::simulation::{
    AssignmentPolicy, Cluster, ClusterNetwork, ClusterNode, Dispatch, Failures, Transfer,
    parse_rate,
};
use std::time::Duration;

/// The cluster, as options describe it.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Simulation")]
pub struct ClusterArgs {
    /// Simulate the cluster, event by event, with the intervals as they are: of different lengths,
    /// transferred, nodes that start and fail
    #[arg(long)]
    pub simulate: bool,
    /// The server's link to all nodes together (100Mbit, 1Gbit); without it no transfer takes time
    #[arg(long, value_name = "RATE", value_parser = parse_rate, requires_all = ["simulate", "from"])]
    network: Option<f64>,
    /// From a request to the server to its first byte
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "simulate")]
    latency: Option<Duration>,
    /// What is sent of a checkpoint: what the node lacks, or all of the RAM each time
    #[arg(long, value_enum, default_value = "missing", requires = "simulate")]
    transfer: TransferArg,
    /// Until a node takes its first interval: a job of a batch system begins
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "simulate")]
    node_start: Option<Duration>,
    /// Intervals at a time on each node
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=1024), requires = "simulate")]
    slots: u16,
    /// Which interval comes next
    #[arg(long, value_enum, default_value = "near", requires = "simulate")]
    policy: PolicyArg,
    /// Give nothing out before the recording has ended
    #[arg(long, requires = "simulate")]
    deferred: bool,
    /// Let nodes fail, each after this time in the mean
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "simulate")]
    mtbf: Option<Duration>,
    /// After this time a node that failed is back [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "mtbf")]
    repair: Option<Duration>,
    /// What the failures' chance follows
    #[arg(long, value_name = "N", default_value = "1", requires = "mtbf")]
    seed: u64,
}

/// The values of `--transfer`.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum TransferArg {
    /// What the node lacks, as the store has it
    Missing,
    /// All RAM, for each interval
    Whole,
}

/// The values of `--policy`.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum PolicyArg {
    /// That of which a free node lacks least
    Near,
    /// The first one
    InOrder,
    /// The longest one
    LongestFirst,
}

impl ClusterArgs {
    /// The cluster with `nodes`.
    pub fn cluster(&self, nodes: u64) -> Cluster {
        let seconds = |time: Option<Duration>| time.map_or(0.0, |time| time.as_secs_f64());
        let node = ClusterNode {
            slots: usize::from(self.slots),
            start_s: seconds(self.node_start),
            speed: 1.0,
        };
        let failures = match self.mtbf {
            None => Failures::Listed(Vec::new()),
            Some(mtbf) => Failures::Random {
                mtbf_s: mtbf.as_secs_f64(),
                repair_s: self.repair.map(|repair| repair.as_secs_f64()),
                seed: self.seed,
            },
        };
        Cluster {
            nodes: vec![node; nodes as usize],
            network: ClusterNetwork { bits_per_s: self.network, latency_s: seconds(self.latency) },
            transfer: match self.transfer {
                TransferArg::Missing => Transfer::Missing,
                TransferArg::Whole => Transfer::Whole,
            },
            policy: match self.policy {
                PolicyArg::Near => AssignmentPolicy::Near,
                PolicyArg::InOrder => AssignmentPolicy::InOrder,
                PolicyArg::LongestFirst => AssignmentPolicy::LongestFirst,
            },
            dispatch: if self.deferred { Dispatch::Deferred } else { Dispatch::Immediate },
            failures,
        }
    }

    /// Whether all of the RAM is sent each time.
    pub fn sends_all(&self) -> bool {
        self.transfer == TransferArg::Whole
    }

    /// Whether nodes can be gone for good.
    pub fn is_repaired(&self) -> bool {
        self.repair.is_some()
    }
}
