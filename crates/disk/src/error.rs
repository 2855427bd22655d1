//! Errors of disks. Each variant names the object and the operation.

use crate::DiskEpoch;
use std::io;

/// An error of a disk. `object` is a path, an export, or a socket, with the offset where one
/// applies.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An image that cannot be served.
    #[error("{object}: {problem}; {fix}")]
    Refused {
        /// The image.
        object: String,
        /// What is in the way.
        problem: String,
        /// What can be done about it.
        fix: String,
    },
    /// Bytes on disk are not what was written.
    #[error("{object} is damaged: {problem}")]
    Damaged {
        /// The file, with the offset where one applies.
        object: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Somebody else has the overlay open.
    #[error("{object} is in use by another process; end the VM that runs on it first")]
    Locked {
        /// The overlay's directory.
        object: String,
    },
    /// An earlier sync failed: the kernel may have dropped what was written, and will not say so
    /// again.
    #[error(
        "{object}: a sync failed earlier, so nothing written since can be promised; the disk takes no more writes"
    )]
    Broken {
        /// The overlay's directory.
        object: String,
    },
    /// No such epoch is in flight.
    #[error(
        "{object}: epoch {epoch} is not in flight (released or given back already, or never cut)"
    )]
    NoEpoch {
        /// The overlay's directory.
        object: String,
        /// What was asked for.
        epoch: DiskEpoch,
    },
    /// A bound of this program.
    #[error("{object}: {problem}")]
    Limit {
        /// What is bounded.
        object: String,
        /// The bound, and what it is there for.
        problem: String,
    },
    /// The other side of a connection said what it must not say.
    #[error("{object}: {problem}")]
    Protocol {
        /// The connection.
        object: String,
        /// What was said.
        problem: String,
    },
    /// What the process that serves the disks answered.
    #[error("the process that serves the disks: {problem}")]
    Server {
        /// Its words.
        problem: String,
    },
    /// The same, where its medium is full: a retry can work once there is space again.
    #[error("the process that serves the disks: {problem}")]
    ServerFull {
        /// Its words.
        problem: String,
    },
    /// The operating system refused an operation.
    #[error("{object}: {operation}: {source}")]
    Io {
        /// The path, with the offset where one applies.
        object: String,
        /// What was being done.
        operation: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn io<E: Into<io::Error>>(
        object: impl Into<String>,
        operation: &'static str,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::Io { object, operation, source: source.into() }
    }

    pub(crate) fn damaged(object: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Damaged { object: object.into(), problem: problem.into() }
    }

    pub(crate) fn refused(
        object: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::Refused { object: object.into(), problem: problem.into(), fix: fix.into() }
    }

    pub(crate) fn protocol(object: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Protocol { object: object.into(), problem: problem.into() }
    }

    /// True where the medium is full (or a quota is used up): a retry can work once there is space
    /// again.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::StorageFull
                    | io::ErrorKind::QuotaExceeded
                    | io::ErrorKind::FileTooLarge
            ),
            Self::ServerFull { .. } => true,
            _ => false,
        }
    }
}
