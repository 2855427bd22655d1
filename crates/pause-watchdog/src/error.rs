//! The errors of a watchdog and of the engine's handle to it.

use keyframe_vmm::{VmmError, VmmErrorKind};
use std::io;

/// An error of a watchdog.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation.
    #[error("{operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// The watchdog process has ended, does not answer, or was given a bad order.
    #[error("the watchdog: {problem}")]
    Problem {
        /// What is wrong.
        problem: String,
    },
    /// The engine died during a rollback, and the watchdog ended the VM.
    #[error(
        "the engine died during a rollback, which the watchdog could not end in its place \
         ({problem}); so the watchdog ended the VM, whose state was incomplete"
    )]
    PutDown {
        /// Why it could not.
        problem: String,
    },
}

impl Error {
    pub(crate) fn io<E: Into<io::Error>>(operation: &str) -> impl FnOnce(E) -> Self {
        let operation = operation.to_owned();
        move |source| Self::Io { operation, source: source.into() }
    }
}

impl From<Error> for VmmError {
    fn from(error: Error) -> Self {
        Self::new(VmmErrorKind::Other, error, None)
    }
}
