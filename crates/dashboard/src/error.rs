//! Why a report could not be made.

use std::io;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a report. [`std::error::Error::source`] gives the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A plot cannot be drawn.
    #[error(transparent)]
    Plot(#[from] keyframe_plot::Error),
    /// The operating system refused an operation.
    #[error("{operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// An analysis cannot be read.
    #[error(transparent)]
    Analysis(#[from] keyframe_replay_driver::Error),
}
