//! When nodes fail.

use super::{Failure, Failures};

/// What is still to come.
pub enum Failing {
    Listed(Vec<Failure>),
    Random { mtbf_s: f64, repair_s: Option<f64>, generators: Vec<fastrand::Rng> },
}

impl Failing {
    pub fn of(failures: &Failures, nodes: usize) -> Self {
        match failures {
            Failures::Listed(failures) => {
                let mut failures = failures.clone();
                // The last one is the next.
                failures.sort_by(|a, b| b.at_s.total_cmp(&a.at_s).then(b.node.cmp(&a.node)));
                Self::Listed(failures)
            }
            Failures::Random { mtbf_s, repair_s, seed } => {
                // One for each node: what happens to one is the same however many others there are.
                let of_node = |node: usize| {
                    let mixed =
                        seed.wrapping_add((node as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
                    fastrand::Rng::with_seed(mixed)
                };
                let generators = (0..nodes).map(of_node).collect();
                Self::Random { mtbf_s: *mtbf_s, repair_s: *repair_s, generators }
            }
        }
    }

    /// All that are known at the beginning; of random ones the first of each node, which is
    /// demanded at `demanded_s`.
    pub fn begin(&mut self, demanded_s: f64) -> Vec<Failure> {
        match self {
            Self::Listed(failures) => std::mem::take(failures),
            Self::Random { generators, .. } => {
                let nodes = generators.len();
                (0..nodes).filter_map(|node| self.after(node, demanded_s)).collect()
            }
        }
    }

    /// The next one of `node`, which has come back at `from_s`.
    pub fn after(&mut self, node: usize, from_s: f64) -> Option<Failure> {
        let Self::Random { mtbf_s, repair_s, generators } = self else { return None };
        // 1 - u is more than 0, so that its logarithm is finite.
        let up_s = -(1.0 - generators.get_mut(node)?.f64()).ln() * *mtbf_s;
        let at_s = from_s + up_s;
        Some(Failure { node, at_s, back_s: repair_s.map(|repair_s| at_s + repair_s) })
    }
}
