//! Hosts made of network namespaces, for benchmarks and end-to-end tests.
//!
//! [`Host`] is one network namespace. [`Network`] joins three hosts by links of one rate;
//! [`SlurmCluster`] joins the nodes of a Slurm cluster to their server. [`ledger`] is the client of
//! the small guest's `ledger` service, which checks each answer.
//!
//! Only root can make a network namespace.

mod host;
pub mod ledger;
mod network;
mod slurm_cluster;

pub use host::Host;
pub use network::{Direction, Network, Rate};
pub use slurm_cluster::{SERVER_ADDRESS, SlurmCluster};
