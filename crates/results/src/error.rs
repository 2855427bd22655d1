//! The errors of this crate.

use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why results cannot be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A result file is not there.
    #[error("{}: no such result file", path.display())]
    NoResult {
        /// The file.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("read {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file has other contents than the tool writes.
    #[error("{}, {place}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The position in it.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// A Parquet file could not be read.
    #[error(transparent)]
    Parquet(#[from] keyframe_analysis::Error),
    /// The results of this tool have no picture.
    #[error("there is no picture of the results of {tool}: {reason}")]
    NoPicture {
        /// The tool.
        tool: String,
        /// Why not.
        reason: &'static str,
        /// What to do about it.
        fix: &'static str,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoResult { .. } => Some(
                "wait until keyframe analyze has ended; if it was interrupted, run the same command again"
                    .into(),
            ),
            Self::Damaged { .. } => Some("analyze again, into a new directory: --out DIR".into()),
            Self::NoPicture { fix, .. } => Some((*fix).to_owned()),
            Self::Parquet(error) => error.fix(),
            Self::File { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let path = || PathBuf::from("OUT/hot-functions.csv");
        let errors = [
            Error::NoResult { path: path() },
            Error::File { path: path(), source: std::io::ErrorKind::PermissionDenied.into() },
            Error::Damaged {
                path: path(),
                place: "line 7".into(),
                problem: "\"x\" is not a number".into(),
            },
            Error::NoPicture {
                tool: "coverage".into(),
                reason: "they have no order in time",
                fix: "use genhtml",
            },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
