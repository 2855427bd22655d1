//! Errors of disks. Each names the object and the operation.

use crate::DiskEpoch;
use std::io;

/// An error of a disk. `object` is a path, an export or a socket, with an offset in bytes if one
/// applies.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An image or overlay cannot be used.
    #[error("{object}: {problem}")]
    Refused {
        /// The image or overlay.
        object: String,
        /// The reason.
        problem: String,
        /// What the user can do about it. Empty if nothing is known.
        fix: String,
    },
    /// The bytes of a file are not the bytes that were written.
    #[error("{object} is damaged: {problem}")]
    Damaged {
        /// The file, with an offset if one applies.
        object: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Another process has the overlay open.
    #[error("{object} is in use by another process")]
    Locked {
        /// The overlay's directory.
        object: String,
    },
    /// An earlier sync failed. The kernel may have dropped written data, and does not report that
    /// again.
    #[error(
        "{object}: a sync failed earlier, so data written since may be lost; the disk takes no \
         more writes"
    )]
    Broken {
        /// The overlay's directory.
        object: String,
    },
    /// The epoch is not in flight.
    #[error(
        "{object}: epoch {epoch} is not in flight (released or given back already, or never cut)"
    )]
    NoEpoch {
        /// The overlay's directory.
        object: String,
        /// The epoch.
        epoch: DiskEpoch,
    },
    /// A limit of Keyframe is reached.
    #[error("{object}: {problem}")]
    Limit {
        /// The object that the limit applies to.
        object: String,
        /// The limit.
        problem: String,
    },
    /// The other end of a connection sent an invalid message.
    #[error("{object}: {problem}")]
    Protocol {
        /// The connection.
        object: String,
        /// What is wrong with the message.
        problem: String,
    },
    /// The process that serves the disks answered with an error.
    #[error("the process that serves the disks: {problem}")]
    Server {
        /// The error's text.
        problem: String,
        /// What the user can do about it. `None` if that is not known.
        fix: Option<String>,
    },
    /// The process that serves the disks has ended, or did not answer in time and was killed. Its
    /// supervisor starts a new one.
    #[error("the process that serves the disks has ended; it is started again")]
    ServerEnded,
    /// The process that cut the epoch has ended, so the epoch cannot be read any more. The next cut
    /// covers its blocks.
    #[error("the process that serves the disks has ended since this cut")]
    CutLost,
    /// The process that serves the disks has no space left. A retry can succeed once there is
    /// space.
    #[error("the process that serves the disks: {problem}")]
    ServerFull {
        /// The error's text.
        problem: String,
    },
    /// The operating system refused an operation.
    #[error("{object}: {operation}: {source}")]
    Io {
        /// The path, with an offset if one applies.
        object: String,
        /// The operation, as a verb: "read", "lock".
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

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Refused { fix, .. } => Some(fix.clone()).filter(|fix| !fix.is_empty()),
            Self::Damaged { .. } => {
                Some("use a copy of the file, or restore the VM from a checkpoint".into())
            }
            Self::Locked { .. } => Some("stop the VM that runs on it (keyframe stop)".into()),
            Self::Broken { .. } => {
                Some("stop the VM, and check the device of this directory".into())
            }
            Self::Server { fix, .. } => fix.clone(),
            _ if self.is_disk_full() => Some("free some space, and run it again".into()),
            _ => None,
        }
    }

    /// Returns true if the medium is full, a quota is used up, or a file has reached the largest
    /// size that the file system allows. The operation can succeed later, once there is space.
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

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let object = || String::from("/store/disks/vm.1/d");
        let errors = [
            Error::refused("a.vmdk", "it looks like VMDK", "convert it"),
            Error::damaged(object(), "slot 7 belongs to two blocks"),
            Error::Locked { object: object() },
            Error::Broken { object: object() },
            Error::NoEpoch { object: object(), epoch: DiskEpoch(3) },
            Error::Limit { object: object(), problem: "64 epochs are in flight".into() },
            Error::protocol("an NBD client", "a request with a wrong magic number"),
            Error::Server { problem: "it has ended".into(), fix: None },
            Error::ServerEnded,
            Error::CutLost,
            Error::ServerFull { problem: "/store: write: no space".into() },
            Error::io(object(), "read")(io::ErrorKind::PermissionDenied),
            Error::io(object(), "write")(io::ErrorKind::StorageFull),
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
