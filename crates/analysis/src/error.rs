//! What can go wrong, with the object, the operation and the fix.

use std::path::{Path, PathBuf};

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No tool of this name.
    #[error("no tool is named {name:?}; there are {known}, and those that a manifest describes")]
    UnknownTool {
        /// As asked for.
        name: String,
        /// All names.
        known: String,
    },
    /// An argument that the tool does not take, or not so.
    #[error("tool {tool}, argument {argument}: {problem}")]
    Argument {
        /// The tool.
        tool: String,
        /// As given.
        argument: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// A file.
    #[error("{operation} {path}")]
    File {
        /// What was done.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// A file that is not what it should be.
    #[error("{path}, {place}: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// The board or its ring.
    #[error("the plugin in QEMU, {operation}: {problem}")]
    Plugin {
        /// What was done.
        operation: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A Parquet file.
    #[error("{operation} {path}")]
    Parquet {
        /// What was done.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// Fewer or more cuts than intervals.
    #[error("a run of {intervals} intervals was cut {cuts} times; it is cut once where each ends")]
    Cuts {
        /// Of the run.
        intervals: usize,
        /// As made.
        cuts: usize,
    },
    /// The program of a manifest's merge rule.
    #[error("merging with {program:?}: {problem}")]
    MergeCommand {
        /// Its first word.
        program: String,
        /// How it failed.
        problem: String,
    },
}

/// For a file operation.
pub(crate) fn file(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { operation, path, source }
}
