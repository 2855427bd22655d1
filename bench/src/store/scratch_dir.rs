//! The directory of the stores: in memory, so that the medium is no part of the comparison.
//!
//! The directory is in `/dev/shm` if that has enough space and `TMPDIR` is not set, otherwise among the
//! temporary files. A benchmark removes the directories of killed benchmarks, which are those whose
//! lock no process holds.

use crate::{Error, Options};
use rustix::fs::{FlockOperation, flock, statvfs};
use std::fs::File;
use std::path::Path;
use tempfile::TempDir;

const MEMORY: &str = "/dev/shm";
const PREFIX: &str = "keyframe-bench-store-";
const LOCK: &str = "lock";

/// A directory that is removed when this is dropped.
pub struct ScratchDir {
    dir: TempDir,
    _lock: File,
}

impl ScratchDir {
    /// Makes a directory with at least `bytes` of free space.
    pub fn new(options: &Options, bytes: u64) -> Result<Self, Error> {
        let in_memory =
            std::env::var_os("TMPDIR").is_none() && free_bytes(Path::new(MEMORY)) > bytes;
        let parent = if in_memory { Path::new(MEMORY).to_path_buf() } else { std::env::temp_dir() };
        remove_left_over(&parent);
        let free = free_bytes(&parent);
        if free < bytes {
            let problem = format!(
                "{} has {} MiB free, and {} are needed",
                parent.display(),
                free >> 20,
                bytes >> 20
            );
            return Err(Error::failed("find space for the stores", problem));
        }
        options.say(format!("the stores are in {}", parent.display()));
        let made = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parent);
        let dir = made.map_err(Error::io(format!("make a directory in {}", parent.display())))?;
        let lock = File::create(dir.path().join(LOCK)).map_err(Error::io("make a lock file"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|e| Error::io("lock the directory")(e.into()))?;
        Ok(Self { dir, _lock: lock })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

fn free_bytes(dir: &Path) -> u64 {
    statvfs(dir).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn remove_left_over(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // A directory without a lock file is being made.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unlocked_directories_of_ours_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let dir = parent.path().join(name);
            std::fs::create_dir(&dir).unwrap();
            (File::create(dir.join(LOCK)).unwrap(), dir)
        };
        let (held, at_work) = make(&format!("{PREFIX}1"));
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        let (_, killed) = make(&format!("{PREFIX}2"));
        let (_, foreign) = make("another");
        remove_left_over(parent.path());
        assert!(at_work.exists() && foreign.exists() && !killed.exists());
    }
}
