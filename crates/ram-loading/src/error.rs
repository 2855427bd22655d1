//! The errors of loading RAM.

use keyframe_units::PageIndex;
use keyframe_vmm::{VmmError, VmmErrorKind};
use std::io;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of loading RAM.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation.
    #[error("{operation}: {source}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// The VM needed a page that cannot be read. It was ended.
    #[error("page {} (RAM block {block}, offset {offset:#x}) cannot be read: {source}", page.0)]
    PageLost {
        /// The page.
        page: PageIndex,
        /// The RAM block.
        block: String,
        /// The page's offset in the block, in bytes.
        offset: u64,
        /// Why not.
        source: io::Error,
    },
    /// A RAM block could not be found in the memory of its VMM.
    #[error("find RAM block {block} in the memory of process {pid}: {problem}")]
    NotMapped {
        /// The block.
        block: String,
        /// The process of the VMM.
        pid: u32,
        /// The reason why not.
        problem: String,
    },
    /// An interface of the kernel failed.
    #[error(transparent)]
    Kernel(#[from] keyframe_kernel::Error),
}

impl Error {
    pub(crate) fn io<E: Into<io::Error>>(operation: impl Into<String>) -> impl FnOnce(E) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source: source.into() }
    }
}

impl From<Error> for VmmError {
    fn from(error: Error) -> Self {
        let fix = match &error {
            Error::Kernel(error) => error.fix(),
            _ => None,
        };
        Self::new(VmmErrorKind::Other, error, fix)
    }
}
