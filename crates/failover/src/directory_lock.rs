//! The lock file of a directory, which keeps a second process out.

use crate::error::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io;
use std::path::Path;

/// Locks the directory `folder`, which it creates if it does not exist. Returns the lock file: the
/// lock lasts until it is closed. Returns `None` if another process has locked the directory.
/// Error: [`Error::Io`] if the lock file cannot be created or locked.
pub fn lock_directory(folder: &Path) -> Result<Option<File>> {
    let path = folder.join("lock");
    let failed = |e: io::Error| Error::file("lock", &path, e);
    std::fs::create_dir_all(folder).map_err(failed)?;
    let file =
        File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(failed(e.into())),
    }
}
