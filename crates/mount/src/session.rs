//! A mounted store: its begin and its end.

use crate::{CheckpointTree, MountedFiles};
use fuser::{BackgroundSession, Config, MountOption};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::io;
use std::path::{Path, PathBuf};

/// Threads that answer the kernel.
const THREADS: usize = 2;

/// A store that is mounted at a directory. Threads of this process answer the kernel.
pub struct MountedStore {
    session: BackgroundSession,
    directory: PathBuf,
}

impl MountedStore {
    /// Mounts `tree` at `directory`, for this user alone and for reading alone. Error: the kernel, or
    /// the helper program for users without the right to mount, refuses.
    pub fn mount(tree: CheckpointTree, directory: &Path) -> io::Result<Self> {
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("keyframe".into()),
            MountOption::Subtype("keyframe".into()),
            MountOption::RO,
            MountOption::NoExec,
            MountOption::NoSuid,
            MountOption::NoDev,
            MountOption::DefaultPermissions,
        ];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(MountedFiles::new(tree), directory, &config)?;
        Ok(Self { session, directory: directory.to_owned() })
    }

    /// Returns true if the store is not mounted any more.
    pub fn has_ended(&self) -> bool {
        self.session.guard.is_finished()
    }

    /// Waits for the end of the threads, after another program has unmounted the store. Error: a
    /// thread has failed.
    pub fn join(self) -> io::Result<()> {
        self.session.join()
    }

    /// Unmounts the store, even if programs still use it: these get errors. `note_use` is called
    /// before that. Error: the kernel refuses, or a thread has failed.
    pub fn unmount(self, note_use: impl FnOnce()) -> io::Result<()> {
        match unmount(&self.directory, UnmountFlags::empty()) {
            // Unmounted, or already not there any more: the threads end by themselves.
            Ok(()) | Err(Errno::INVAL) => self.session.join(),
            // Not allowed to us: the library knows whom to ask.
            Err(Errno::PERM) => self.session.umount_and_join(),
            Err(Errno::BUSY) => {
                note_use();
                Ok(unmount(&self.directory, UnmountFlags::DETACH)?)
            }
            Err(e) => Err(e.into()),
        }
    }
}
