//! Hosts made of network namespaces, for benchmarks and end-to-end tests.
//!
//! [`Host`] is one network namespace. [`Network`] joins three hosts by links of one rate. [`ledger`]
//! is the client of the small guest's `ledger` service, which checks each answer.
//!
//! Only root can make a network namespace.

mod host;
pub mod ledger;
mod network;

pub use host::Host;
pub use network::{Direction, Network, Rate};
