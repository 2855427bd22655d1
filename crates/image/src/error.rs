//! The errors of this crate.

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why no image can be made of a checkpoint. [`Error::fix`] says what the user can do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint does not record the addresses of its RAM, and its machine type does not imply
    /// them.
    #[error(
        "the checkpoint does not tell where its RAM lies in the guest's physical memory ({reason})"
    )]
    NoMap {
        /// The reason why the machine type does not imply them.
        reason: String,
    },
    /// The memory map and the RAM blocks do not fit together.
    #[error("the checkpoint's map of the guest's physical memory: {problem}")]
    Map {
        /// The contradiction.
        problem: String,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoMap { .. } => {
                Some("restore it and take a checkpoint of the restored VM, which will tell".into())
            }
            Self::Map { .. } => None,
        }
    }
}
