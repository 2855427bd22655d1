//! The errors of this crate.

use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of an analysis.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No tool has this name.
    #[error("no tool is named {name:?}")]
    UnknownTool {
        /// The requested name.
        name: String,
        /// The names of all tools.
        known: String,
    },
    /// The tool does not accept an argument.
    #[error("tool {tool}, argument {argument}: {problem}")]
    Argument {
        /// The tool.
        tool: String,
        /// The argument as given.
        argument: String,
        /// What is wrong, and what would be accepted.
        problem: String,
    },
    /// A file operation failed.
    #[error("{operation} {path}")]
    File {
        /// The operation, a participle such as "reading".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file has invalid contents.
    #[error("{path}, {place}: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The position in it.
        place: String,
        /// What is invalid.
        problem: String,
    },
    /// The plugin, its board or its ring failed.
    #[error("the plugin in QEMU, {operation}: {problem}")]
    Plugin {
        /// The operation, a participle such as "reading its records".
        operation: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A Parquet file could not be read or written.
    #[error("{operation} {path}")]
    Parquet {
        /// The operation, a participle such as "completing".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// A tool run did not get exactly one cut at the end of each of its intervals.
    #[error("a run of {intervals} intervals was cut {cuts} times; each interval needs one cut")]
    Cuts {
        /// The number of intervals of the run, with its warm-up.
        intervals: usize,
        /// The number of cuts that were made.
        cuts: usize,
    },
    /// The merge program of a manifest failed.
    #[error("the merge program {program:?} failed: {problem}")]
    MergeCommand {
        /// The program.
        program: String,
        /// How it failed.
        problem: String,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::UnknownTool { known, .. } => {
                Some(format!("name one of {known}, or a manifest (FILE.toml)"))
            }
            Self::Argument { .. }
            | Self::File { .. }
            | Self::Damaged { .. }
            | Self::Plugin { .. }
            | Self::Parquet { .. }
            | Self::Cuts { .. }
            | Self::MergeCommand { .. } => None,
        }
    }
}

/// Turns an I/O error into [`Error::File`].
pub(crate) fn file(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { operation, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let path = || PathBuf::from("OUT/file");
        let errors = [
            Error::UnknownTool { name: "hit".into(), known: "hot, icount".into() },
            Error::Argument {
                tool: "hot".into(),
                argument: "top=x".into(),
                problem: "not a number from 1 to 16".into(),
            },
            Error::File {
                operation: "opening",
                path: path(),
                source: std::io::ErrorKind::NotFound.into(),
            },
            Error::Damaged { path: path(), place: "byte 0".into(), problem: "not a part".into() },
            Error::Plugin {
                operation: "reading its records",
                problem: "the reading thread has ended".into(),
            },
            Error::Parquet {
                operation: "completing",
                path: path(),
                source: parquet::errors::ParquetError::General("no rows".into()),
            },
            Error::Cuts { intervals: 2, cuts: 3 },
            Error::MergeCommand { program: "sort".into(), problem: "exit status: 2".into() },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
