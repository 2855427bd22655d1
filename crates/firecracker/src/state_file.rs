//! The file to which Firecracker writes its device state, and how it is made to write no RAM.
//!
//! ```text
//!   same namespaces, same user      memfd of Keyframe's, named /proc/KEYFRAME/fd/N   nothing touches a disk
//!   another root, namespace, user   a file in Firecracker's root, removed at the end
//! ```
//!
//! `PUT /snapshot/create` writes the devices to the first file, then RAM to the second. The path of
//! the second names a directory that cannot exist. The request then fails after the devices were
//! written. If a version behaves in another way, RAM is written to a memfd that is thrown away:
//! exact, but the pause is as long as Firecracker's own snapshot.

use crate::api::Api;
use crate::open_drives::identity;
use crate::process::{Credentials, owner};
use crate::{Error, Result};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A path below a directory that no process can make: the kernel makes all entries of `/proc/self`.
pub const NO_MEMORY: &str = "/proc/self/keyframe-saves-no-memory/memory";
/// What Firecracker answers to it, after it has written the devices.
const NOT_OPENED: &str = "on the memory backing file: No such file or directory";
/// The longest device state. Firecracker's own limit is lower.
const STATE_BYTES_MAX: u64 = 64 << 20;
/// How the files in roots of Firecracker begin.
const NAME: &str = "keyframe-device-state";
/// With these bytes begins a device state of an x86-64 VM.
const MAGIC: [u8; 8] = 0x0710_1984_8664_0000_u64.to_le_bytes();

/// How Firecracker is made to save its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveMethod {
    /// It cannot open the file for the RAM.
    WithoutMemory,
    /// It writes the RAM to a memfd, which is thrown away.
    WithMemory,
}

/// The file for the device state.
#[derive(Debug)]
pub struct StateFile {
    file: File,
    /// The path as Firecracker names it.
    theirs: PathBuf,
    /// The path to remove at the end; `None` for a memfd.
    ours: Option<PathBuf>,
    method: SaveMethod,
}

impl StateFile {
    /// Makes a file that the Firecracker of process `pid` can write. Error: there is no place for
    /// it.
    pub fn create(pid: u32) -> Result<Self> {
        if may_open_ours(pid)? { Self::in_memory() } else { Self::in_root(pid) }
    }

    fn in_memory() -> Result<Self> {
        let file = memfd("keyframe-device-state")?;
        let theirs = path_of(&file);
        Ok(Self { file, theirs, ours: None, method: SaveMethod::WithoutMemory })
    }

    /// A file in the root of process `pid`, which may be another one than this process's.
    fn in_root(pid: u32) -> Result<Self> {
        let (ours, theirs) = path_in_root(pid, std::process::id());
        let operation = || format!("make the file {} for the device state", ours.display());
        remove_left(&ours, pid);
        // One of an earlier process with the number of this one.
        let _ = std::fs::remove_file(&ours);
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&ours, flags, Mode::RUSR | Mode::WUSR)
            .map_err(Error::io(operation()))?;
        let (uid, gid) = owner(pid)?;
        let made = Self {
            file: file.into(),
            theirs,
            ours: Some(ours.clone()),
            method: SaveMethod::WithoutMemory,
        };
        std::os::unix::fs::fchown(&made.file, Some(uid), Some(gid))
            .map_err(Error::io(operation()))?;
        Ok(made)
    }

    /// Has all later saves done by `method`.
    pub fn set_method(&mut self, method: SaveMethod) {
        self.method = method;
    }

    /// Returns how the devices are saved.
    pub fn method(&self) -> SaveMethod {
        self.method
    }

    /// Has the paused Firecracker of `api` save its devices. `may_write_memory` is false if a write
    /// of all RAM would disturb the user's own snapshots. Returns the device state. Errors:
    /// Firecracker refuses or does not answer; it wrote no whole state.
    pub fn save(&mut self, api: &mut Api, may_write_memory: bool) -> Result<Vec<u8>> {
        self.file.set_len(0).map_err(Error::io("empty the file for the device state"))?;
        if self.method == SaveMethod::WithoutMemory {
            match api.save(&self.theirs, Path::new(NO_MEMORY)) {
                Err(Error::Refused { message, .. }) if message.contains(NOT_OPENED) => {
                    return self.read();
                }
                Err(Error::Refused { message, .. }) if !may_write_memory => {
                    return Err(Error::DeviceState {
                        problem: format!(
                            "this version does not save devices without RAM ({message}), and a \
                             save with RAM would clear the dirty pages of the user's own snapshots"
                        ),
                    });
                }
                Err(Error::Refused { .. }) => self.method = SaveMethod::WithMemory,
                Err(error) => return Err(error),
                Ok(()) => {
                    return Err(Error::DeviceState {
                        problem: format!("it has written RAM to {NO_MEMORY}, which cannot be"),
                    });
                }
            }
        }
        let memory = memfd("keyframe-thrown-away")?;
        if self.ours.is_some() {
            return Err(Error::DeviceState {
                problem: "this version does not save devices without RAM, and cannot reach memory \
                          of Keyframe's to put the RAM in"
                    .into(),
            });
        }
        api.save(&self.theirs, &path_of(&memory))?;
        self.read()
    }

    fn read(&self) -> Result<Vec<u8>> {
        let operation = "read the device state";
        let len = self.file.metadata().map_err(Error::io(operation))?.size();
        if len > STATE_BYTES_MAX {
            return Err(Error::DeviceState { problem: format!("it is {len} bytes long") });
        }
        let mut state = vec![0; usize::try_from(len).unwrap_or(0)];
        self.file.read_exact_at(&mut state, 0).map_err(Error::io(operation))?;
        check(&state)?;
        Ok(state)
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        if let Some(ours) = &self.ours {
            let _ = std::fs::remove_file(ours);
        }
    }
}

/// Returns true if process `pid` can open files of this process by their descriptors. Error: it has
/// ended.
pub fn may_open_ours(pid: u32) -> Result<bool> {
    Ok(Credentials::of(pid)?.may_open_files_of(&Credentials::of(std::process::id())?))
}

/// The path of a file for process `pid` in its root, which may be another one than this process's:
/// as this process names it, and as that one does. `engine` is the process that makes it.
fn path_in_root(pid: u32, engine: u32) -> (PathBuf, PathBuf) {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    // In another mount namespace the link leads to `/` whatever directory that is.
    let is_same = identity(&root).is_some_and(|there| identity(Path::new("/")) == Some(there));
    let directory = if is_same { std::env::temp_dir() } else { PathBuf::from("/") };
    let theirs = directory.join(format!("{NAME}-{pid}-{engine}"));
    (root.join(theirs.strip_prefix("/").unwrap_or(&theirs)), theirs)
}

/// Removes the files beside `ours` that killed engines have left for process `pid`.
fn remove_left(ours: &Path, pid: u32) {
    let begin = format!("{NAME}-{pid}-");
    let entries = ours.parent().and_then(|directory| std::fs::read_dir(directory).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name();
        let engine = name.to_str().and_then(|name| name.strip_prefix(&begin)?.parse::<u32>().ok());
        if engine.is_some_and(|engine| !Path::new(&format!("/proc/{engine}")).exists()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Checks that `state` begins as a device state does. Firecracker checks its sum as it loads it.
/// Error: it is none.
pub fn check(state: &[u8]) -> Result<()> {
    let problem = match state.get(..MAGIC.len()) {
        None => format!("it has {} bytes", state.len()),
        Some(begin) if begin != MAGIC => "it does not begin as one".into(),
        Some(_) => return Ok(()),
    };
    Err(Error::DeviceState { problem })
}

/// An empty file in memory.
pub fn memfd(name: &str) -> Result<File> {
    let made: Result<OwnedFd, _> =
        memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    Ok(made
        .map_err(|e| Error::io(format!("make the file {name} in memory"))(io::Error::from(e)))?
        .into())
}

/// The path by which another process of this user opens `file`, as long as this process has it.
pub fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_state_is_refused() {
        for bad in [&b""[..], b"short", b"not a state at all"] {
            assert!(matches!(check(bad), Err(Error::DeviceState { .. })), "{bad:?}");
        }
        assert!(check(&[&MAGIC[..], b"rest"].concat()).is_ok());
    }

    #[test]
    fn the_file_is_in_memory_for_a_process_like_this_one() {
        let state = StateFile::create(std::process::id()).unwrap();
        assert!(state.ours.is_none());
        std::fs::write(&state.theirs, MAGIC).unwrap();
        assert_eq!(state.read().unwrap(), MAGIC);
        let other = StateFile::in_root(std::process::id()).unwrap();
        let path = other.ours.clone().unwrap();
        assert!(path.exists());
        // A killed engine's. No process has the greatest number.
        let left = path_in_root(std::process::id(), u32::MAX).0;
        std::fs::write(&left, "left").unwrap();
        remove_left(&left, std::process::id());
        assert!(path.exists() && !left.exists());
        drop(other);
        assert!(!path.exists());
    }
}
