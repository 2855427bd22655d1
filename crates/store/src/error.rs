//! The errors of the store. Each variant names the object and the problem.

use crate::secret_kind::SecretKind;
use keyframe_store_backend::Error as BackendError;
use keyframe_store_format::FormatError;
use keyframe_store_format::identity::FORMAT_VERSION;
use keyframe_units::{CheckpointId, PageIndex};
use rustix::io::Errno;
use std::io;

/// An error of the store. `object` is a path, or the name of a file in the store, with an offset if
/// one applies.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no store at this place.
    #[error("{object}: no store here")]
    NoStore {
        /// The path that was opened.
        object: String,
    },
    /// A store, or something else, is at the place where a store should be made.
    #[error("{object}: {problem}")]
    Exists {
        /// The path.
        object: String,
        /// What is there.
        problem: String,
    },
    /// The store is encrypted, and no secret was given.
    #[error("{object}: the store is encrypted; its {kind} is needed")]
    KeyNeeded {
        /// The file with the locked keys.
        object: String,
        /// The kind of secret that is needed.
        kind: SecretKind,
    },
    /// The secret does not open the store.
    #[error("{object}: the {kind} is not that of this store (or the file was changed)")]
    WrongKey {
        /// The file with the locked keys.
        object: String,
        /// The kind of the secret.
        kind: SecretKind,
    },
    /// A key was given for a store that is not encrypted.
    #[error("{object}: the store is not encrypted, yet a key was given for it")]
    NotEncrypted {
        /// The store.
        object: String,
    },
    /// The secret is too short to lock a store with.
    #[error("a {kind} of {len} bytes is too short; it needs {min} at least")]
    WeakKey {
        /// The kind of the secret.
        kind: SecretKind,
        /// Its length in bytes.
        len: usize,
        /// The least length, in bytes.
        min: usize,
    },
    /// Others than its owner may access the key file.
    #[error("{object}: others may read or write it (mode {mode:03o})")]
    ExposedKey {
        /// The key file.
        object: String,
        /// Its permission bits.
        mode: u32,
    },
    /// The bytes of a file are not those that were written, or are missing.
    #[error("{object} is damaged: {problem}")]
    Damaged {
        /// The file, with an offset if one applies.
        object: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file has another version of the store format.
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
        /// The holder, as the lock file describes it.
        holder: String,
    },
    /// A writer of an encrypted store ended before all was durable, which needs the store's key to
    /// be looked at.
    #[error(
        "{object}: a writer ended before all that it wrote was durable, and the store is encrypted"
    )]
    Unsettled {
        /// The store.
        object: String,
    },
    /// The checkpoint is the newest, and a run at work builds upon it.
    #[error(
        "checkpoint {id} is the newest, and a run builds upon it: {holder} writes to the store"
    )]
    InUse {
        /// The checkpoint.
        id: CheckpointId,
        /// The writer of the store.
        holder: String,
    },
    /// The records that a checkpoint needs are not known, so nothing can be removed.
    #[error("prune: checkpoint {id} cannot be read, so that what it needs is not known: {source}")]
    Unreadable {
        /// The checkpoint.
        id: CheckpointId,
        /// The reason.
        source: Box<Error>,
    },
    /// No checkpoint has this number, tag or word.
    #[error("no checkpoint \"{name}\" in the store{}", newest.map_or(" (it holds none)".into(), |n| format!("; the newest is {n}")))]
    UnknownCheckpoint {
        /// The number, tag or word.
        name: String,
        /// The newest checkpoint of the store; `None` if it has none.
        newest: Option<CheckpointId>,
    },
    /// The store has no tag of this name.
    #[error("no tag \"{tag}\" in the store")]
    UnknownTag {
        /// The name.
        tag: String,
    },
    /// The checkpoint is pinned, so it is not forgotten.
    #[error("checkpoint {id} is pinned")]
    Pinned {
        /// The checkpoint.
        id: CheckpointId,
    },
    /// The source and the target of a copy are the same store.
    #[error("{object}: the checkpoints are in this store already: it is the one to copy from")]
    SameStore {
        /// The store.
        object: String,
    },
    /// The name cannot be a tag.
    #[error(
        "\"{tag}\" cannot be a tag: 1 to 64 letters, digits, dots, dashes or underscores, not digits or dots alone, not \"latest\", not beginning with \"pin.\""
    )]
    InvalidTag {
        /// The name.
        tag: String,
    },
    /// The checkpoint is sealed and durable, but its tag could not be written.
    #[error("checkpoint {id} is sealed, but its tag \"{tag}\" could not be set: {source}")]
    TagNotSet {
        /// The sealed checkpoint.
        id: CheckpointId,
        /// The missing tag.
        tag: String,
        /// The reason.
        source: Box<Error>,
    },
    /// The page is outside the RAM layout of the run.
    #[error("page {} is outside the {space_pages} pages of the run's RAM", page.0)]
    PageOutside {
        /// The page.
        page: PageIndex,
        /// The number of pages of the layout.
        space_pages: u64,
    },
    /// The VM has more RAM than a run can hold.
    #[error("RAM of {space_pages} pages is more than a run can hold (2^32 pages, 16 TiB)")]
    TooLarge {
        /// The number of pages of the RAM.
        space_pages: u64,
    },
    /// The blocks are outside the disk.
    #[error("disk {disk}: {blocks} blocks from {block} on are not all on it")]
    BlockOutside {
        /// The disk's number in the run.
        disk: usize,
        /// The first block.
        block: u64,
        /// The number of blocks.
        blocks: u64,
    },
    /// The VM has larger disks than a run can hold.
    #[error("the VM's disks and RAM together are more than a run can hold (2^40 blocks, 4 PiB)")]
    DisksTooLarge,
    /// The RAM layout of a seal differs from the one that the run began with.
    #[error(
        "run {run}: the RAM layout at epoch {epoch} differs from the one the run was begun with"
    )]
    LayoutChanged {
        /// The run.
        run: String,
        /// The epoch of the seal.
        epoch: u64,
    },
    /// All pack numbers are used up.
    #[error("{object}: all pack numbers are used up")]
    PacksExhausted {
        /// The folder of the packs.
        object: String,
    },
    /// The writer has an open run.
    #[error("a run is already open on this writer; finish it first")]
    RunOpen,
    /// An earlier put or seal of the run failed, and it was not abandoned.
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
        /// The path, with an offset if one applies.
        object: String,
        /// The operation, as a verb.
        operation: &'static str,
        /// The answer of the system.
        source: io::Error,
    },
}

/// A result of the store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn damaged(object: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Damaged { object: object.into(), problem: problem.into() }
    }

    /// Returns true if the medium is full or a quota is used up. A retry can work when there is
    /// space.
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

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        let fix = match self {
            Self::NoStore { .. } => "make one (keyframe init), or name another place",
            Self::Exists { .. } => "name another place; a store that is there needs no init",
            Self::KeyNeeded { kind, .. } | Self::WrongKey { kind, .. } => {
                return Some(format!("give the {kind} that the store was made with"));
            }
            Self::NotEncrypted { .. } => "open it without a key",
            Self::WeakKey { .. } => "take a longer one",
            Self::ExposedKey { object, .. } => return Some(format!("chmod 600 {object}")),
            Self::Damaged { .. } => "find out what else is damaged: keyframe check --read-data",
            Self::OtherVersion { .. } => "use the version of Keyframe that made the store",
            Self::PreRelease { .. } => {
                "make a new store with this build; only the build that made the old one reads it"
            }
            Self::Locked { .. } => {
                "wait until that writer ends (keyframe status), or use another store"
            }
            Self::Unsettled { .. } => {
                "settle it on the host where the store is, with its key: keyframe check --repair"
            }
            Self::InUse { .. } => "keep the newest, or stop the run first (keyframe stop)",
            Self::Unreadable { source, .. } => {
                return source.fix().or_else(|| Some("repair it: keyframe check --repair".into()));
            }
            Self::UnknownCheckpoint { .. } => "name a number, a tag or `latest` (keyframe list)",
            Self::UnknownTag { .. } => "name one of its tags (keyframe list)",
            Self::Pinned { id } => {
                return Some(format!("unpin it first: keyframe pin --remove {id}"));
            }
            Self::SameStore { .. } => "name another store to copy to",
            Self::TagNotSet { source, .. } => {
                return source.fix().or_else(|| Some("set it again: keyframe tag".into()));
            }
            Self::PacksExhausted { .. } => "copy the checkpoints into a new store (keyframe copy)",
            Self::Io { source, .. } => return self.fix_of_io(source),
            // The caller's mistakes, and texts that say what to do.
            Self::InvalidTag { .. }
            | Self::PageOutside { .. }
            | Self::TooLarge { .. }
            | Self::BlockOutside { .. }
            | Self::DisksTooLarge
            | Self::LayoutChanged { .. }
            | Self::RunOpen
            | Self::Broken { .. } => return None,
        };
        Some(fix.into())
    }

    fn fix_of_io(&self, source: &io::Error) -> Option<String> {
        keyframe_store_backend::fix_of(source).or_else(|| {
            self.is_disk_full().then(|| "free some space; sealed checkpoints are unharmed".into())
        })
    }

    /// Returns the kind of the I/O error, if this is one.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. } => Some(source.kind()),
            _ => None,
        }
    }

    /// True if what was read is damaged: it is not what was written, lies in a bad sector, or ends
    /// too early. Other errors, such as those of a network, may pass. They do not show damage.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. })
            || self.is_bad_sector()
            || self.io_kind() == Some(io::ErrorKind::UnexpectedEof)
    }

    /// True if the medium cannot read the bytes (EIO).
    pub(crate) fn is_bad_sector(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        source.raw_os_error() == Some(Errno::IO.raw_os_error())
    }

    /// True if the name is taken already.
    pub(crate) fn is_already_exists(&self) -> bool {
        self.io_kind() == Some(io::ErrorKind::AlreadyExists)
    }

    /// True if there is no such file.
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

/// An error of a decoder becomes the variant of the same name.
impl From<FormatError> for Error {
    fn from(error: FormatError) -> Self {
        match error {
            FormatError::Damaged { object, problem } => Self::Damaged { object, problem },
            FormatError::OtherVersion { object, found } => Self::OtherVersion { object, found },
            other => Self::damaged("a file of the store", other.to_string()),
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
    use keyframe_testing::{assert_golden, error_text};

    fn full() -> Error {
        Error::Io {
            object: "packs/00000001.pack".into(),
            operation: "append",
            source: io::Error::from_raw_os_error(28),
        }
    }

    /// Errors about a store or one of its files.
    fn errors_of_files() -> Vec<Error> {
        let object = || "/store".to_owned();
        let kind = SecretKind::KeyFile;
        let damaged = || Error::damaged("maps/0000000003.map", "its checksum does not match");
        vec![
            Error::NoStore { object: object() },
            Error::Exists { object: object(), problem: "the directory is not empty".into() },
            Error::KeyNeeded { object: object(), kind: SecretKind::Passphrase },
            Error::WrongKey { object: object(), kind },
            Error::NotEncrypted { object: object() },
            Error::WeakKey { kind, len: 31, min: 32 },
            Error::ExposedKey { object: "key".into(), mode: 0o640 },
            damaged(),
            Error::OtherVersion { object: object(), found: 7 },
            Error::PreRelease { object: object(), found: 8 },
            Error::Locked { holder: "keyframe run (process 7 on host)".into() },
            Error::PacksExhausted { object: "/store/packs".into() },
            Error::SameStore { object: object() },
            Error::Unreadable { id: CheckpointId(3), source: Box::new(damaged()) },
            full(),
            Error::Io {
                object: object(),
                operation: "open",
                source: io::Error::from(io::ErrorKind::PermissionDenied),
            },
        ]
    }

    /// Errors about checkpoints, tags and runs.
    fn errors_of_checkpoints() -> Vec<Error> {
        let (id, run) = (CheckpointId(3), "00".repeat(16));
        vec![
            Error::InUse { id, holder: "keyframe run (process 7 on host)".into() },
            Error::UnknownCheckpoint { name: "9".into(), newest: Some(id) },
            Error::UnknownCheckpoint { name: "9".into(), newest: None },
            Error::UnknownTag { tag: "good".into() },
            Error::Pinned { id },
            Error::InvalidTag { tag: "latest".into() },
            Error::TagNotSet { id, tag: "good".into(), source: Box::new(full()) },
            Error::PageOutside { page: PageIndex(9), space_pages: 8 },
            Error::TooLarge { space_pages: 1 << 33 },
            Error::BlockOutside { disk: 1, block: 8, blocks: 2 },
            Error::DisksTooLarge,
            Error::LayoutChanged { run: run.clone(), epoch: 4 },
            Error::RunOpen,
            Error::Broken { run },
        ]
    }

    #[test]
    fn texts_and_fixes_are_those_of_the_golden_file() {
        let errors = errors_of_files().into_iter().chain(errors_of_checkpoints());
        let texts: Vec<_> = errors.map(|error| error_text(&error, error.fix())).collect();
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/errors.txt");
        assert_golden(golden, &texts.join("\n"));
    }

    #[test]
    fn only_errors_that_last_show_damage() {
        let io = |source| Error::Io { object: "o".into(), operation: "read", source };
        let bad_sector = io(io::Error::from_raw_os_error(5));
        assert!(bad_sector.is_damage() && bad_sector.is_bad_sector());
        let too_short = io(io::ErrorKind::UnexpectedEof.into());
        assert!(too_short.is_damage() && !too_short.is_bad_sector());
        assert!(Error::damaged("o", "p").is_damage());
        // No memory, no more file descriptors, a file of a server that is gone.
        for number in [12, 24, 116] {
            assert!(!io(io::Error::from_raw_os_error(number)).is_damage(), "{number}");
        }
        for kind in [io::ErrorKind::TimedOut, io::ErrorKind::PermissionDenied] {
            assert!(!io(kind.into()).is_damage(), "{kind}");
        }
        assert!(!Error::OtherVersion { object: "o".into(), found: 7 }.is_damage());
    }

    #[test]
    fn an_error_of_a_backend_has_the_same_text_and_fix_here() {
        let full = || io::Error::other("no answer");
        let errors = || {
            [
                BackendError::Exists { object: "o".into(), problem: "p".into() },
                BackendError::damaged("o", "p"),
                BackendError::Locked { holder: "h".into() },
                BackendError::Io { object: "o".into(), operation: "read", source: full() },
            ]
        };
        for (backend, same) in errors().into_iter().zip(errors()) {
            let error = Error::from(same);
            assert_eq!((error.to_string(), error.fix()), (backend.to_string(), backend.fix()));
        }
    }

    #[test]
    fn a_full_disk_is_recognised_also_in_the_source_of_an_error() {
        assert!(full().is_disk_full());
        let tag =
            Error::TagNotSet { id: CheckpointId(1), tag: "a".into(), source: Box::new(full()) };
        assert!(tag.is_disk_full());
        assert!(!Error::RunOpen.is_disk_full());
        assert_eq!(io::Error::from(full()).kind(), io::ErrorKind::StorageFull);
    }
}
