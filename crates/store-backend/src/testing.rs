//! Backends and servers for tests: a medium that fails on command, a conformance suite, an S3
//! server on this host.

pub mod conformance;
mod faulty;
mod random;
pub mod s3_server;

pub use crate::s3::faults::{S3Faults, S3TestOptions, running_server, test_backend};
pub use conformance::{check_backend, check_encrypted_backend};
pub use faulty::FaultyBackend;
pub use random::SeededRandom;
