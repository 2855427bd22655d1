//! What can go wrong with the files of a store.

use std::io;

/// An error of a backend. `object` is a path or URL, with the offset in bytes if one applies.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A store, or something else, is already at the place where a store should be made.
    #[error("{object}: {problem}")]
    Exists {
        /// The path or URL.
        object: String,
        /// What is there.
        problem: String,
    },
    /// The bytes of a file are not the bytes that a backend wrote.
    #[error("{object} is damaged: {problem}")]
    Damaged {
        /// The file.
        object: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Another process holds the lock.
    #[error("the store is locked: {holder} writes to it")]
    Locked {
        /// The text with which the holder describes itself.
        holder: String,
    },
    /// The operating system or a remote service refused an operation. In the second case `source`
    /// holds a [`RemoteFailure`]. If Keyframe itself refused a file, it holds a [`FileRefusal`].
    #[error("{object}: {operation}: {source}")]
    Io {
        /// The file.
        object: String,
        /// The operation, as a verb: "read", "append".
        operation: &'static str,
        /// The answer.
        source: io::Error,
    },
}

/// A result of a backend.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a remote service (object storage, a checkpoint server) refused a request or did
/// not answer. Found in the source of [`Error::Io`].
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub struct RemoteFailure {
    /// The answer in words, or that there was none.
    pub problem: String,
    /// What the user can do about it, if that is known.
    pub fix: Option<String>,
}

/// The reason why Keyframe does not use a file of this host. Found in the source of [`Error::Io`].
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub struct FileRefusal {
    /// What is wrong with the file.
    pub problem: String,
    /// What the user can do about it.
    pub fix: String,
}

impl Error {
    /// Makes an [`Error::Damaged`] from its texts.
    pub fn damaged(object: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Damaged { object: object.into(), problem: problem.into() }
    }

    /// Makes the error of an attempt to write to a store that can only be read.
    pub(crate) fn read_only(object: &str, operation: &'static str, refusal: RemoteFailure) -> Self {
        let source = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, refusal);
        Self::Io { object: object.into(), operation, source }
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::Exists { .. } => "name another place; a store that is there needs no init".into(),
            Self::Damaged { .. } => {
                "find out what else is damaged: keyframe check --read-data".into()
            }
            Self::Locked { .. } => {
                "wait until that writer ends (keyframe status), or use another store".into()
            }
            Self::Io { source, .. } => return fix_of(source),
        })
    }

    /// Returns the kind of the I/O error, if this is one.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. } => Some(source.kind()),
            _ => None,
        }
    }

    /// Returns true if the name is taken already.
    pub fn is_already_exists(&self) -> bool {
        self.io_kind() == Some(io::ErrorKind::AlreadyExists)
    }

    /// Returns true if there is no such file.
    pub fn is_not_found(&self) -> bool {
        self.io_kind() == Some(io::ErrorKind::NotFound)
    }
}

/// Returns the fix that a [`RemoteFailure`] or a [`FileRefusal`] inside an I/O error names. Returns
/// `None` if there is none.
pub fn fix_of(source: &io::Error) -> Option<String> {
    let reason = source.get_ref()?;
    if let Some(refusal) = reason.downcast_ref::<FileRefusal>() {
        return Some(refusal.fix.clone());
    }
    reason.downcast_ref::<RemoteFailure>()?.fix.clone()
}
