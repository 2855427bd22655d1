//! The times at which nodes fail.

use super::{Failures, NodeFailure};

/// The failures of a simulated cluster that are still to come.
pub enum FailureSchedule {
    /// The failures that the caller listed, the latest first.
    Listed(Vec<NodeFailure>),
    /// Random failures, with exponentially distributed times between them.
    Random {
        /// The mean time between failures of each node, in seconds.
        mtbf_s: f64,
        /// The time after which a failed node comes back, in seconds; `None` if it does not.
        repair_s: Option<f64>,
        /// One generator for each node, so that the failures of a node do not depend on the number
        /// of nodes.
        generators: Vec<fastrand::Rng>,
    },
}

impl FailureSchedule {
    /// Makes the schedule of `failures` for a cluster with `nodes` nodes.
    pub fn new(failures: &Failures, nodes: usize) -> Self {
        match failures {
            Failures::Listed(failures) => {
                let mut failures = failures.clone();
                failures.sort_by(|a, b| b.at_s.total_cmp(&a.at_s).then(b.node.cmp(&a.node)));
                Self::Listed(failures)
            }
            Failures::Random { mtbf_s, repair_s, seed } => {
                let generator = |node: usize| {
                    let mixed =
                        seed.wrapping_add((node as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
                    fastrand::Rng::with_seed(mixed)
                };
                let generators = (0..nodes).map(generator).collect();
                Self::Random { mtbf_s: *mtbf_s, repair_s: *repair_s, generators }
            }
        }
    }

    /// Returns all listed failures, or the first random failure of each node after `demanded_s`:
    /// the time in seconds at which the run requests its nodes.
    pub fn begin(&mut self, demanded_s: f64) -> Vec<NodeFailure> {
        match self {
            Self::Listed(failures) => std::mem::take(failures),
            Self::Random { generators, .. } => {
                let nodes = generators.len();
                (0..nodes).filter_map(|node| self.after(node, demanded_s)).collect()
            }
        }
    }

    /// Returns the next random failure of node number `node`, which came back at the time `from_s`,
    /// in seconds. Returns `None` if the failures are listed, or if there is no such node.
    pub fn after(&mut self, node: usize, from_s: f64) -> Option<NodeFailure> {
        let Self::Random { mtbf_s, repair_s, generators } = self else { return None };
        // The argument of the logarithm is more than 0, so that the result is finite.
        let up_s = -(1.0 - generators.get_mut(node)?.f64()).ln() * *mtbf_s;
        let at_s = from_s + up_s;
        Some(NodeFailure { node, at_s, back_s: repair_s.map(|repair_s| at_s + repair_s) })
    }
}
