//! Errors of a simulation.

/// The reason why the simulation of a run has no outcome.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// A number is out of bounds.
    #[error("{what} is {value}: it must be {must}")]
    Number {
        /// The quantity.
        what: String,
        /// Its value.
        value: f64,
        /// The valid values.
        must: &'static str,
    },
    /// There is nothing of this kind: no interval, or no node with a slot.
    #[error("the cluster has no {0}")]
    None(&'static str),
    /// A listed failure names a node that does not exist.
    #[error("the failure of node {node}: the cluster has {nodes} nodes, numbered from 0")]
    NoNode {
        /// The node of the failure.
        node: usize,
        /// The number of nodes.
        nodes: usize,
    },
    /// All nodes have failed and do not come back.
    #[error(
        "all nodes have failed for good after {at_s:.1} s; {done} of {intervals} intervals are done"
    )]
    Lost {
        /// The time of the last failure, in seconds.
        at_s: f64,
        /// The number of intervals done by then.
        done: usize,
        /// The number of all intervals.
        intervals: usize,
    },
    /// Nodes fail more often than they complete intervals.
    #[error(
        "{done} of {intervals} intervals are done after {failures} failures: nodes fail more often than \
         they complete intervals"
    )]
    Hopeless {
        /// The number of failures.
        failures: usize,
        /// The number of intervals done by then.
        done: usize,
        /// The number of all intervals.
        intervals: usize,
    },
}
