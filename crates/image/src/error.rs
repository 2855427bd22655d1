//! What can go wrong with a checkpoint as an image.

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: it names the object. What to do about it is [`Error::fix`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint does not tell where its RAM lies, and its machine is none where that is
    /// certain.
    #[error(
        "the checkpoint does not tell where its RAM lies in the guest's physical memory ({reason})"
    )]
    NoMap {
        /// Why it cannot be worked out.
        reason: String,
    },
    /// Map and RAM blocks do not fit together.
    #[error("the checkpoint's map of the guest's physical memory: {problem}")]
    Map {
        /// What is wrong.
        problem: String,
    },
}

impl Error {
    /// What a person can do about it.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoMap { .. } => {
                Some("restore it and take a checkpoint of the restored VM, which will tell".into())
            }
            Self::Map { .. } => None,
        }
    }
}
