//! Temporary directories that do not outlive a killed process for long.
//!
//! A directory is removed when its value is dropped. If its process is killed, the next process
//! that makes a scratch directory removes it:
//!
//! ```text
//!   $TMPDIR/keyframe-scratch-KIND-XXXXXX/
//!     .keyframe-scratch-lock    locked (flock) by the process that made the directory, until it ends
//!     ...                       the process's files
//! ```
//!
//! Only a directory with both names is removed: stores and results of analyses have lock files, too.
//! The lock file holds the boot id of its host, because a lock on a shared file system may not show
//! on another host. Where the file system has no locks, no lock file is left, and a directory of a
//! killed process stays.
//!
//! The lock file appears when it is locked already. A directory without it belongs to a process that
//! is about to lock it, so it is left alone.

use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Once;
use tempfile::TempDir;

/// How the names of all scratch directories begin.
const PREFIX: &str = "keyframe-scratch-";
/// The file that tells whether a directory is in use.
const LOCK: &str = ".keyframe-scratch-lock";
/// Its name before it is locked.
const UNLOCKED: &str = ".keyframe-scratch-unlocked";
/// Longer than a boot id.
const BOOT_ID_BYTES_MAX: u64 = 128;

/// A temporary directory.
#[derive(Debug)]
pub struct ScratchDirectory {
    // Dropped first: the directory is removed while it is locked.
    directory: TempDir,
    /// `None` where the file system has no locks.
    _lock: Option<File>,
}

impl ScratchDirectory {
    /// Makes a directory in the directory for temporary files (`TMPDIR`). `kind` becomes a part of
    /// its name, for example `log`. The first call of a process removes the directories that killed
    /// processes of this user left there. Error: the directory or its lock file cannot be made.
    pub fn new(kind: &str) -> io::Result<Self> {
        static SWEEP: Once = Once::new();
        let place = std::env::temp_dir();
        SWEEP.call_once(|| sweep(&place));
        Self::make(&place, kind)
    }

    /// Makes a directory in `place`, as [`ScratchDirectory::new`] does. Each call removes the
    /// directories that killed processes of this user left there. Error: the directory or its lock
    /// file cannot be made.
    pub fn new_in(place: &Path, kind: &str) -> io::Result<Self> {
        sweep(place);
        Self::make(place, kind)
    }

    fn make(place: &Path, kind: &str) -> io::Result<Self> {
        let directory =
            tempfile::Builder::new().prefix(&format!("{PREFIX}{kind}-")).tempdir_in(place)?;
        let unlocked = directory.path().join(UNLOCKED);
        let mut file = File::create_new(&unlocked)?;
        file.write_all(boot_id().as_bytes())?;
        let lock = if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            std::fs::rename(&unlocked, directory.path().join(LOCK))?;
            Some(file)
        } else {
            std::fs::remove_file(&unlocked)?;
            None
        };
        Ok(Self { directory, _lock: lock })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Returns the boot id of this host's kernel; empty if it cannot be read.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Removes the scratch directories in `place` whose processes have ended. What cannot be removed
/// stays.
fn sweep(place: &Path) {
    let own = rustix::process::geteuid().as_raw();
    let boot = boot_id();
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == own);
        if !is_ours {
            continue;
        }
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        let mut of = String::new();
        let is_read = (&lock).take(BOOT_ID_BYTES_MAX).read_to_string(&mut of).is_ok();
        let is_of_this_host = is_read && !of.is_empty() && of == boot;
        if is_of_this_host && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_with_its_value() {
        let place = tempfile::tempdir().unwrap();
        let scratch = ScratchDirectory::make(place.path(), "log").unwrap();
        std::fs::write(scratch.path().join("file"), "text").unwrap();
        let name = scratch.path().file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with("keyframe-scratch-log-"), "{name}");
        drop(scratch);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_directories_of_ended_processes_are_swept() {
        let place = tempfile::tempdir().unwrap();
        // What a killed process leaves: the directory, and a lock file that is not locked.
        let left = |kind: &str| {
            let mut left = ScratchDirectory::make(place.path(), kind).unwrap();
            left.directory.disable_cleanup(true);
            left.path().to_owned()
        };
        let (ended, of_another_boot) = (left("plugin"), left("log"));
        std::fs::write(of_another_boot.join(LOCK), "another boot").unwrap();
        let alive = ScratchDirectory::make(place.path(), "log").unwrap();
        let about_to_lock = place.path().join("keyframe-scratch-log-new");
        std::fs::create_dir(&about_to_lock).unwrap();
        // A store that no process uses.
        let store = place.path().join("keyframe-store");
        std::fs::create_dir(&store).unwrap();
        for lock in ["lock", LOCK] {
            std::fs::write(store.join(lock), boot_id()).unwrap();
        }
        assert!(ended.join(LOCK).exists());
        sweep(place.path());
        assert!(!ended.exists());
        for path in [alive.path(), &of_another_boot, &about_to_lock, &store] {
            assert!(path.exists(), "{} was removed", path.display());
        }
    }
}
