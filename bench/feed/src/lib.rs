//! What `keyframe-bench store` feeds to each store, and how it measures them: one stream, one way,
//! for Keyframe and its peers.
//!
//! ```text
//!   Job ─▶ run ─▶ Stream ──checkpoints──▶ dyn Store    Keyframe, a flat file, borg, restic: bench/src/store
//!                                          │           databases, each a KeyValue in a Keyed: bench/peers
//!                 Stream ◀──images, compared──┘
//!                 Measured ─▶ one line of JSON
//! ```
//!
//! A crate of its own, so that the program with the peers needs nothing else of the workspace. One
//! job is one process: its memory and its CPU time are those of one store.
//!
//! Invariant: a store that gives back another image than it was fed has no figures.
//! Left out: which stores there are, and what follows from the figures.

mod job;
mod keyed;
mod pages;
mod random;
mod recorded;
mod run;
mod stream;
mod target;
mod usage;

pub use job::{Fed, IMAGE_MIB_MAX, Job, Measured, Rebuilt, Source, Words};
pub use keyed::{KEY_BYTES, Key, KeyValue, Keyed, KeyedStore, key_of};
pub use run::run;
pub use stream::{Second, Stream};
pub use target::{PageSink, Reading, Store, Writing};
pub use usage::stored_bytes;

use std::path::Path;

/// Why there is no measurement.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something that it needs could not be done.
    #[error("{operation}: {problem}")]
    Failed {
        /// What was to be done.
        operation: String,
        /// Why it was not.
        problem: String,
    },
    /// A file operation failed.
    #[error("{operation}: {source}")]
    Io {
        /// What was to be done.
        operation: String,
        /// Why it was not.
        source: std::io::Error,
    },
    /// The store lost or changed something.
    #[error("checkpoint {checkpoint}: page {page} is not what was stored")]
    Differs {
        /// The checkpoint, 0 is the first.
        checkpoint: usize,
        /// The first page that differs.
        page: u64,
    },
}

/// What most functions here return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of a library.
    pub fn failed(operation: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self::Failed { operation: operation.into(), problem: problem.to_string() }
    }

    /// An error of the system, for `map_err`.
    pub fn io(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }

    /// The same of an operation on a file.
    pub fn file(operation: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        Self::io(format!("{operation} {}", path.display()))
    }
}
