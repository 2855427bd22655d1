//! The locks of a store in a directory: `flock` on a file that says who holds it.
//!
//! The kernel drops a lock with its process. A lock is exclusive or shared. A process that asks who
//! holds a lock takes it shared for a moment, so that taking one is tried several times.

use super::io_error;
use super::regular_file::open_regular;
use crate::{Error, LockGuard, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The most bytes of the text of a lock.
pub const HOLDER_BYTES_MAX: u64 = 4096;
const LOCK_ATTEMPTS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(2);
/// The longest wait for another process that holds a lock for some seconds at most, unless it is
/// stopped.
const WAIT_MAX: Duration = Duration::from_secs(60);
const WAIT_PAUSE: Duration = Duration::from_millis(20);

/// An `flock`. The kernel releases it when the descriptor closes, however the process ends.
#[derive(Debug)]
pub struct Flock {
    pub file: File,
}

impl LockGuard for Flock {}

impl Drop for Flock {
    fn drop(&mut self) {
        // Closing the descriptor releases the lock too, unless a child process inherited it. If
        // this fails, closing is all that is left.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Takes the lock in the file `path` exclusively, and writes `holder` into it. Errors:
/// [`Error::Locked`] with the text of the file if another process holds the lock; the file cannot
/// be written.
pub fn take_lock(path: &Path, holder: &str) -> Result<Flock> {
    take(path, FlockOperation::NonBlockingLockExclusive, holder)
}

/// Takes the lock in the file `path` shared with others that do so. Errors: those of
/// [`take_lock`].
pub fn lock_shared(path: &Path, holder: &str) -> Result<Flock> {
    take(path, FlockOperation::NonBlockingLockShared, holder)
}

/// Takes the lock in the file `path` exclusively. Waits for another process that holds it. Errors:
/// those of [`take_lock`], after a minute.
pub fn wait_for_lock(path: &Path, holder: &str) -> Result<Flock> {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        match take_lock(path, holder) {
            Err(Error::Locked { .. }) if Instant::now() < deadline => {
                std::thread::sleep(WAIT_PAUSE);
            }
            other => return other,
        }
    }
}

/// Takes the lock in the file `path` exclusively, without a wait. Returns `None` if another process
/// holds it. Leaves the content of the file as it is. Error: the file cannot be opened.
pub fn try_lock(path: &Path) -> Result<Option<Flock>> {
    let file = lock_file(path)?;
    let is_taken = lock(&file, path, FlockOperation::NonBlockingLockExclusive, 1)?;
    Ok(is_taken.then_some(Flock { file }))
}

/// Returns true if a process holds the lock in `file` exclusively. Error: the file cannot be locked.
pub fn is_locked(file: &File, path: &Path) -> Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            // Closing the file would release it too, but a reader keeps the file open.
            flock(file, FlockOperation::Unlock).map_err(|e| io_error(path, "unlock", e.into()))?;
            Ok(false)
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(e) => Err(io_error(path, "lock", e.into())),
    }
}

fn lock_file(path: &Path) -> Result<File> {
    open_regular(
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600),
        path,
    )
}

fn take(path: &Path, operation: FlockOperation, holder: &str) -> Result<Flock> {
    let mut file = lock_file(path)?;
    if !lock(&file, path, operation, LOCK_ATTEMPTS)? {
        return Err(Error::Locked { holder: holder_in(&file, path)? });
    }
    // The text is for messages only, so a crash while it is written does no harm.
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(holder.as_bytes()))
        .map_err(|e| io_error(path, "write", e))?;
    Ok(Flock { file })
}

/// Takes the lock; false if another process has it. Tries `attempts` times.
fn lock(file: &File, path: &Path, operation: FlockOperation, attempts: u32) -> Result<bool> {
    for attempt in 1..=attempts {
        match flock(file, operation) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) if attempt < attempts => {
                std::thread::sleep(LOCK_PAUSE);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(e) => return Err(io_error(path, "lock", e.into())),
        }
    }
    Ok(false)
}

/// Returns the text of the process that holds the lock in the file `path` exclusively; `None` if
/// none does. Error: the file cannot be read.
pub fn holder_of(path: &Path) -> Result<Option<String>> {
    let file = match open_regular(OpenOptions::new().read(true), path) {
        Err(e) if e.is_not_found() => return Ok(None),
        other => other?,
    };
    if is_locked(&file, path)? { holder_in(&file, path).map(Some) } else { Ok(None) }
}

/// Returns the text in a lock file. Error: the file cannot be read.
pub fn holder_in(file: &File, path: &Path) -> Result<String> {
    let mut text = Vec::new();
    file.take(HOLDER_BYTES_MAX).read_to_end(&mut text).map_err(|e| io_error(path, "read", e))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
