//! What can go wrong with a recording.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with a recording.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{operation} {}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// There is no recording there.
    #[error("{} is no recording: it has no recording.json", path.display())]
    NoRecording {
        /// The directory.
        path: PathBuf,
    },
    /// A directory that is to become a recording holds something.
    #[error("{} exists and is not empty", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// A file of the recording is not what it should be.
    #[error("{} is damaged at byte {offset}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        problem: String,
    },
    /// An image that the guest could only read is not what it read when it was recorded.
    #[error("{} has changed since the guest was recorded, which read it: {how}", path.display())]
    Changed {
        /// The image.
        path: PathBuf,
        /// What is different.
        how: String,
        /// When it had been written last, in nanoseconds since 1970.
        modified_ns: i64,
    },
    /// The host's clock is nowhere in the log.
    #[error("{} says nothing of the host's clock", path.display())]
    NoClock {
        /// The log.
        path: PathBuf,
    },
    /// The log would be cut too often.
    #[error("that would be more than {cuts_max} cuts")]
    TooManyCuts {
        /// How many there may be.
        cuts_max: usize,
    },
    /// It was written by a later version.
    #[error("{} has format version {found}; this Keyframe knows versions up to {known}", path.display())]
    LaterVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
}

impl Error {
    /// What a person can do about it.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoRecording { .. } => {
                Some("make one with: keyframe record --out REC -- qemu-system-x86_64 ...".into())
            }
            Self::Exists { .. } => Some("name a directory that does not exist yet".into()),
            Self::LaterVersion { .. } => Some("read it with a later Keyframe".into()),
            Self::NoClock { .. } => Some("cut it by instructions: --every-instructions".into()),
            Self::Changed { path, modified_ns, .. } => Some(format!(
                "put it back as it was; where you are sure that it is the same, say so by: touch -d @{}.{:09} {}",
                modified_ns.div_euclid(1_000_000_000),
                modified_ns.rem_euclid(1_000_000_000),
                path.display()
            )),
            Self::TooManyCuts { .. } => Some("cut it less often".into()),
            Self::Io { .. } | Self::Damaged { .. } => None,
        }
    }

    pub(crate) fn io(
        operation: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { operation, path, source }
    }
}
