//! Where the files of a checkpoint store live: the [`Backend`] trait and its implementations.
//!
//! ```text
//!   store ──▶ EncryptedBackend (optional) ──▶ LocalBackend     a directory
//!                                             S3Backend        s3://BUCKET/PREFIX
//!                                             ServedBackend    kf://HOST:PORT, read-only
//!                                             ArchiveBackend   a file, read-only
//! ```
//!
//! - [`layout`] names the files of a store.
//! - [`cache`] keeps pieces of remote stores on this host.
//! - `testing` (feature of the same name): a medium that fails on command, and the conformance
//!   suite that every backend passes.
//!
//! This crate knows names and bytes only. The contents of the files are the store's concern.

pub mod archive;
mod backend;
mod cache;
mod encrypted;
mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod layout;
mod local;
mod s3;
pub mod served;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use archive::ArchiveBackend;
pub use backend::{
    AppendFile, Backend, FileStamp, LockGuard, ReadFile, STATE_BYTES_MAX, Space, StartingWriter,
    UnlockOutcome, WriterEntry, WriterSlot, create, is_read_only, is_remote, open,
};
pub use cache::cache_root;
pub use encrypted::{DataKey, EncryptedBackend};
pub use error::{Error, FileRefusal, RemoteFailure, Result, fix_of};
pub use local::LocalBackend;
pub use s3::S3Backend;
pub use served::ServedBackend;

/// Returns `N` bytes from the kernel's random number generator. Error: the generator fails.
pub fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::Io {
        object: "the kernel's random number generator".into(),
        operation: "read",
        source: error.into(),
    })?;
    Ok(bytes)
}
