//! What can be wrong with what is to be simulated.

/// Why there is no outcome.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number that says nothing.
    #[error("{what} is {value}: it must be {must}")]
    Number {
        /// Which.
        what: String,
        /// What it is.
        value: f64,
        /// What it must be.
        must: &'static str,
    },
    /// There is nothing to do it with.
    #[error("the cluster has no {0}")]
    None(&'static str),
    /// A failure of a node that there is not.
    #[error("node {node} is to fail, and there are {nodes}")]
    NoNode {
        /// Which.
        node: usize,
        /// How many there are.
        nodes: usize,
    },
    /// All nodes are gone for good.
    #[error(
        "all nodes have failed for good after {at_s:.1} s, with {done} of {intervals} intervals done"
    )]
    Lost {
        /// When the last one did.
        at_s: f64,
        /// Intervals done by then.
        done: usize,
        /// All intervals.
        intervals: usize,
    },
    /// Nodes fail faster than they simulate.
    #[error(
        "{done} of {intervals} intervals are done after {failures} failures: nodes fail more often than intervals end"
    )]
    Hopeless {
        /// How often nodes failed.
        failures: usize,
        /// Intervals done by then.
        done: usize,
        /// All intervals.
        intervals: usize,
    },
}
