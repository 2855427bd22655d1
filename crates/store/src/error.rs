//! What can go wrong with a store: one enum, each variant naming the object and what was done with
//! it.

use crate::config::FORMAT_VERSION;
use crate::secret::SecretKind;
use keyframe_store_backend::Error as BackendError;
use keyframe_units::{CheckpointId, PageIndex};
use std::io;

/// An error of the store. `object` is a path, or the name of a file inside the store with the
/// offset where one applies.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no store at this place.
    #[error("{object}: no store here")]
    NoStore {
        /// The path that was opened.
        object: String,
    },
    /// A store, or something else, is already at the place where one should be made.
    #[error("{object}: {problem}")]
    Exists {
        /// The path.
        object: String,
        /// What is there.
        problem: String,
    },
    /// The store is encrypted, and nothing that opens it was given.
    #[error("{object}: the store is encrypted; its {kind} is needed")]
    KeyNeeded {
        /// The file that says so.
        object: String,
        /// What is needed.
        kind: SecretKind,
    },
    /// What was given does not open the store.
    #[error("{object}: the {kind} is not that of this store (or the file was changed)")]
    WrongKey {
        /// The file with the locked keys.
        object: String,
        /// What was given.
        kind: SecretKind,
    },
    /// A key was given for a store that is not encrypted.
    #[error("{object}: the store is not encrypted, yet a key was given for it")]
    NotEncrypted {
        /// The store.
        object: String,
    },
    /// Too short to lock a store with.
    #[error("a {kind} of {len} bytes is too short; it needs {min} at least")]
    WeakKey {
        /// What was given.
        kind: SecretKind,
        /// Its length in bytes.
        len: usize,
        /// What is needed.
        min: usize,
    },
    /// Bytes on disk are not what was written, or are missing.
    #[error("{object} is damaged: {problem}")]
    Damaged {
        /// The file, with the offset where one applies.
        object: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file has another version of the store format than this program reads.
    #[error("{object} has format version {found}; this program reads version {FORMAT_VERSION}")]
    OtherVersion {
        /// The file.
        object: String,
        /// The version found there.
        found: u32,
    },
    /// A build from before the first release made the store.
    #[error(
        "{object} was made by a pre-release build of Keyframe (format version {found}), which this \
         program does not read; nothing in it was changed"
    )]
    PreRelease {
        /// The file.
        object: String,
        /// The version found there.
        found: u32,
    },
    /// Another writer holds the store.
    #[error("the store is locked: {holder} writes to it")]
    Locked {
        /// Who holds it, as far as the lock file tells.
        holder: String,
    },
    /// A run that goes on builds upon the checkpoint.
    #[error(
        "checkpoint {id} is the newest, and a run builds upon it: {holder} writes to the store"
    )]
    InUse {
        /// The checkpoint.
        id: CheckpointId,
        /// Who holds the store.
        holder: String,
    },
    /// What a checkpoint needs cannot be told, so that nothing can be removed.
    #[error("prune: checkpoint {id} cannot be read, so that what it needs is not known: {source}")]
    Unreadable {
        /// The checkpoint.
        id: CheckpointId,
        /// Why.
        source: Box<Error>,
    },
    /// No checkpoint answers to this name.
    #[error("no checkpoint \"{name}\" in the store{}", newest.map_or(" (it holds none)".into(), |n| format!("; the newest is {n}")))]
    UnknownCheckpoint {
        /// The number, tag or word that was asked for.
        name: String,
        /// The newest checkpoint there is.
        newest: Option<CheckpointId>,
    },
    /// No tag of this name.
    #[error("no tag \"{tag}\" in the store")]
    UnknownTag {
        /// The name that was asked for.
        tag: String,
    },
    /// A pinned checkpoint is not forgotten unless that is asked for by name.
    #[error("checkpoint {id} is pinned")]
    Pinned {
        /// The checkpoint.
        id: CheckpointId,
    },
    /// Checkpoints were to be copied into the store that they are in.
    #[error("{object}: the checkpoints are in this store already: it is the one to copy from")]
    SameStore {
        /// The store.
        object: String,
    },
    /// Not usable as a tag.
    #[error(
        "\"{tag}\" cannot be a tag: 1 to 64 letters, digits, dots, dashes or underscores, not digits or dots alone, not \"latest\", not beginning with \"pin.\""
    )]
    InvalidTag {
        /// The name refused.
        tag: String,
    },
    /// The checkpoint is sealed and safe; only its tag could not be written.
    #[error("checkpoint {id} is sealed, but its tag \"{tag}\" could not be set: {source}")]
    TagNotSet {
        /// The sealed checkpoint.
        id: CheckpointId,
        /// The tag that is missing.
        tag: String,
        /// Why.
        source: Box<Error>,
    },
    /// A page outside the RAM layout that the run was begun with.
    #[error("page {} is outside the {space_pages} pages of the run's RAM", page.0)]
    PageOutside {
        /// The page.
        page: PageIndex,
        /// Pages that the layout has.
        space_pages: u64,
    },
    /// More RAM than a run can describe.
    #[error("RAM of {space_pages} pages is more than a run can hold (2^32 pages, 16 TiB)")]
    TooLarge {
        /// Pages asked for.
        space_pages: u64,
    },
    /// Blocks that no disk of the run has.
    #[error("disk {disk}: {blocks} blocks from {block} on are not all on it")]
    BlockOutside {
        /// The disk's number in the run.
        disk: usize,
        /// The first block.
        block: u64,
        /// How many.
        blocks: u64,
    },
    /// More disks than a run can describe.
    #[error("the VM's disks and RAM together are more than a run can hold (2^40 blocks, 4 PiB)")]
    DisksTooLarge,
    /// The RAM layout given at a seal is not the one that the run was begun with.
    #[error(
        "run {run}: the RAM layout at epoch {epoch} differs from the one the run was begun with"
    )]
    LayoutChanged {
        /// The run.
        run: String,
        /// The epoch that was to be sealed.
        epoch: u64,
    },
    /// Every number that a pack can have has been used.
    #[error("{object}: all pack numbers are used up")]
    PacksExhausted {
        /// The folder of the packs.
        object: String,
    },
    /// A run is still open on this writer.
    #[error("a run is already open on this writer; finish it first")]
    RunOpen,
    /// An earlier put or seal failed, and the puts since the last seal were not given up.
    #[error(
        "run {run}: an earlier put or seal failed; abandon the checkpoint and put its pages again"
    )]
    Broken {
        /// The run.
        run: String,
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

/// A result of the store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn damaged(object: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Damaged { object: object.into(), problem: problem.into() }
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
            Self::TagNotSet { source, .. } => source.is_disk_full(),
            _ => false,
        }
    }

    /// What a person can do about it, where the place of the store knows that.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Io { source, .. } => keyframe_store_backend::fix_of(source),
            Self::TagNotSet { source, .. } | Self::Unreadable { source, .. } => source.fix(),
            _ => None,
        }
    }

    /// What the system called it, where it was the system.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. } => Some(source.kind()),
            _ => None,
        }
    }

    /// True if the name is taken already.
    pub(crate) fn is_already_exists(&self) -> bool {
        self.io_kind() == Some(io::ErrorKind::AlreadyExists)
    }

    /// True where the object is not there at all.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// An error of a backend becomes the variant of the same name.
impl From<BackendError> for Error {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Exists { object, problem } => Self::Exists { object, problem },
            BackendError::Damaged { object, problem } => Self::Damaged { object, problem },
            BackendError::Locked { holder } => Self::Locked { holder },
            BackendError::Io { object, operation, source } => {
                Self::Io { object, operation, source }
            }
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Io { source, .. } => source.kind(),
            Error::Damaged { .. } | Error::OtherVersion { .. } | Error::PreRelease { .. } => {
                io::ErrorKind::InvalidData
            }
            Error::NoStore { .. } | Error::UnknownCheckpoint { .. } => io::ErrorKind::NotFound,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_recognised_also_behind_a_tag() {
        let full = || Error::Io {
            object: "packs/00000001.pack".into(),
            operation: "append",
            source: io::Error::from_raw_os_error(28),
        };
        assert!(full().is_disk_full());
        let tag =
            Error::TagNotSet { id: CheckpointId(1), tag: "a".into(), source: Box::new(full()) };
        assert!(tag.is_disk_full());
        assert!(!Error::RunOpen.is_disk_full());
        assert_eq!(io::Error::from(full()).kind(), io::ErrorKind::StorageFull);
    }
}
