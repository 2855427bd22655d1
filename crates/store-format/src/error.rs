//! The error of a decoder whose input is a whole file.

use crate::identity::FORMAT_VERSION;

/// The reason why the bytes of a file cannot be decoded. `object` is the name of the file as the
/// caller gave it, with an offset if one applies.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The bytes are not those that the store wrote.
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
        /// The version in it.
        found: u32,
    },
}

/// A result of a decoder.
pub type Result<T, E = FormatError> = std::result::Result<T, E>;

impl FormatError {
    pub(crate) fn damaged(object: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Damaged { object: object.into(), problem: problem.into() }
    }
}
