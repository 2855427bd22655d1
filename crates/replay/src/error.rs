//! The errors of this crate.

use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a recording.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// The operation that failed, as a verb such as "read".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The directory is not a recording.
    #[error("{} is not a recording: it has no recording.json", path.display())]
    NoRecording {
        /// The directory.
        path: PathBuf,
    },
    /// The directory of a new recording is not empty.
    #[error("{} exists and is not empty", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// A file of the recording has invalid contents.
    #[error("{} is damaged at byte {offset}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The byte offset of the problem in the file.
        offset: u64,
        /// What is invalid.
        problem: String,
    },
    /// An image that the guest could only read has changed since the recording.
    #[error("the image {} has changed since the recording: {how}", path.display())]
    Changed {
        /// The image.
        path: PathBuf,
        /// What is different.
        how: String,
        /// The time at which it had last been modified before the recording, in nanoseconds since
        /// 1970.
        modified_ns: i64,
    },
    /// The recording has no times, so it cannot be cut or searched by time.
    #[error("{} has no times", path.display())]
    NoTimes {
        /// The file of times.
        path: PathBuf,
    },
    /// The requested spacing gives too many cut points.
    #[error("that spacing gives more than {cuts_max} cuts")]
    TooManyCuts {
        /// The largest permitted number.
        cuts_max: usize,
    },
    /// The recording has a version that this program does not know.
    #[error("{} has format version {found}; this Keyframe reads version {known}", path.display())]
    UnsupportedVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version that this program reads.
        known: u32,
    },
    /// The recording was made by a build from before the first release.
    #[error(
        "{} has format version {found} of a pre-release Keyframe, which this Keyframe does not read",
        path.display()
    )]
    PreRelease {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoRecording { .. } => {
                Some("make one with: keyframe record --out REC -- qemu-system-x86_64 ...".into())
            }
            Self::Exists { .. } => Some("name a directory that does not exist yet".into()),
            Self::UnsupportedVersion { .. } => {
                Some("read it with the Keyframe that recorded it, or a newer one".into())
            }
            Self::PreRelease { .. } => Some("record the VM again with this Keyframe".into()),
            Self::NoTimes { .. } => {
                Some("use instructions instead: --every-instructions, --icount".into())
            }
            Self::Changed { path, modified_ns, .. } => Some(format!(
                "restore the image; if its contents are unchanged, reset its time: \
                 touch -d @{}.{:09} {}",
                modified_ns.div_euclid(1_000_000_000),
                modified_ns.rem_euclid(1_000_000_000),
                path.display()
            )),
            Self::TooManyCuts { .. } => Some("choose a larger spacing".into()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let path = || PathBuf::from("REC/file");
        let errors = [
            Error::Io {
                operation: "open",
                path: path(),
                source: std::io::ErrorKind::NotFound.into(),
            },
            Error::NoRecording { path: path() },
            Error::Exists { path: path() },
            Error::Damaged {
                path: path(),
                offset: 12,
                problem: "an event of unknown kind 99".into(),
            },
            Error::Changed {
                path: path(),
                how: "its modification time differs".into(),
                modified_ns: 1_700_000_000_000_000_005,
            },
            Error::NoTimes { path: path() },
            Error::TooManyCuts { cuts_max: 1 << 20 },
            Error::UnsupportedVersion { path: path(), found: 2, known: 1 },
            Error::PreRelease { path: path(), found: 1 },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
