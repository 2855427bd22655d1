//! The stream of pages that `keyframe-bench store` feeds to each store, and its measurement: the same
//! for Keyframe and for its peers.
//!
//! ```text
//!   Job ─▶ run ─▶ Stream ──checkpoints──▶ dyn Store    in bench/src/store: Keyframe, a flat file,
//!                                          │           borg, restic; in bench/peers: databases,
//!                 Stream ◀──images, compared──┘           each through KeyValue
//!                 StoreMeasurement ─▶ one line of JSON
//! ```
//!
//! This is a crate of its own so that the program with the databases needs hardly any other crate of
//! the workspace. One job is one process, so that its memory and CPU time are those of one store.
//!
//! Invariant: a store that returns a different image than it was fed has no figures.

mod job;
mod key_value_store;
mod measure;
mod page_maker;
mod random;
mod store;
mod stream;
mod stream_file;
mod usage;

pub use job::{
    ChangedWords, FeedTime, IMAGE_MIB_MAX, Job, RebuildTimes, StoreMeasurement, StreamSource,
};
pub use key_value_store::{KEY_BYTES, Key, KeyValue, KeyValueAccess, KeyedStore, key_of};
pub use measure::run;
pub use store::{FeedSink, ProgramUsage, Store, StoreReader, StoreWriter};
pub use stream::{DirtySecond, Stream};
pub use usage::stored_bytes;

use std::path::Path;

/// Why a benchmark's operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation failed.
    #[error("{operation}: {problem}")]
    Failed {
        /// The operation.
        operation: String,
        /// The cause.
        problem: String,
    },
    /// A file operation failed.
    #[error("{operation}: {source}")]
    Io {
        /// The operation.
        operation: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The store returned a page that differs.
    #[error("checkpoint {checkpoint}: page {page} differs from the stored page")]
    Differs {
        /// The number of the checkpoint, from 0.
        checkpoint: usize,
        /// The number of the first page that differs.
        page: u64,
    },
}

/// The result of most functions here.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error of an operation from the text of its cause.
    pub fn failed(operation: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self::Failed { operation: operation.into(), problem: problem.to_string() }
    }

    /// Makes an error of a system call, for `map_err`.
    pub fn io(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }

    /// Makes an error of an operation on a file, for `map_err`.
    pub fn file(operation: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        Self::io(format!("{operation} {}", path.display()))
    }
}
