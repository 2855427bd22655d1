//! The file system operations that the overlay needs, as a trait: tests simulate a crash at any of
//! them.

use crate::{Error, Result};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::{File, OpenOptions};
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A file of an overlay: a file of the file system, or a substitute in tests.
pub trait OverlayFile: Send + Sync {
    /// Fills `buf` from byte `offset` of the file on. Bytes past the end are zero. Error: the file
    /// cannot be read.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Reads as [`Self::read`] does, but returns `false` if that would wait for a device. Then the
    /// content of `buf` is undefined. Error: the file cannot be read.
    fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<bool> {
        self.read(offset, buf).map(|()| true)
    }
    /// Writes all of `buf` from byte `offset` of the file on. Error: the file cannot be written.
    fn write(&self, offset: u64, buf: &[u8]) -> Result<()>;
    /// Makes all written data durable. Error: the sync failed.
    fn sync(&self) -> Result<()>;
    /// Returns the length of the file in bytes. Error: the file cannot be queried.
    fn len_bytes(&self) -> Result<u64>;
    /// Truncates or extends the file to `len_bytes` bytes. Error: its length cannot be set.
    fn set_len(&self, len_bytes: u64) -> Result<()>;
}

/// The directory of an overlay: a directory of the file system, or a substitute in tests.
pub trait OverlayFolder: Send + Sync {
    /// Returns the path of the directory, for messages.
    fn name(&self) -> String;
    /// Opens the file `name` for reading and writing. Creates it if it does not exist. Error: it
    /// cannot be opened or created.
    fn open(&self, name: &str) -> Result<Arc<dyn OverlayFile>>;
    /// Renames the file `from` to `to`, which it replaces. The change is durable after
    /// [`Self::sync`]. Error: the file cannot be renamed.
    fn replace(&self, from: &str, to: &str) -> Result<()>;
    /// Makes the names of files in the directory durable. Error: the sync failed.
    fn sync(&self) -> Result<()>;
    /// Returns a number that differs for each boot of the machine, so that unsynced data of an
    /// earlier boot is not taken for complete. Error: the number cannot be read.
    fn boot_seed(&self) -> Result<u64>;
}

/// The rule whether written data must survive a crash of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// A sync makes the data durable.
    Durable,
    /// The data is discarded at the end, so a sync does nothing. Written data survives the process,
    /// because it is in the page cache.
    Temporary,
}

/// A real file.
struct RealFile {
    file: File,
    name: String,
    lasting: Lasting,
}

impl OverlayFile for RealFile {
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        read_or_zero(&self.file, offset, buf).map_err(Error::io(&self.name, "read"))
    }

    fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<bool> {
        read_now(&self.file, offset, buf).map_err(Error::io(&self.name, "read"))
    }

    fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.file.write_all_at(buf, offset).map_err(Error::io(&self.name, "write"))
    }

    fn sync(&self) -> Result<()> {
        match self.lasting {
            Lasting::Durable => self.file.sync_data().map_err(Error::io(&self.name, "sync")),
            Lasting::Temporary => Ok(()),
        }
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(Error::io(&self.name, "look at"))?.len())
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.file.set_len(len_bytes).map_err(Error::io(&self.name, "set the length of"))
    }
}

/// Fills `buf` from byte `offset` of the file on. Bytes past the end are zero. Error: the file
/// cannot be read.
pub fn read_or_zero(file: &File, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => {
                buf[done..].fill(0);
                return Ok(());
            }
            Ok(len) => done += len,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads as [`read_or_zero`] does if all bytes are in the page cache. Returns false if some are
/// not; then the kernel has begun to read them. If the file system cannot tell, reads and waits.
/// Error: the file cannot be read.
pub fn read_now(file: &File, offset: u64, buf: &mut [u8]) -> std::io::Result<bool> {
    let mut done = 0;
    while done < buf.len() {
        let part = &mut [IoSliceMut::new(&mut buf[done..])];
        match rustix::io::preadv2(file, part, offset + done as u64, ReadWriteFlags::NOWAIT) {
            Ok(0) => {
                buf[done..].fill(0);
                return Ok(true);
            }
            Ok(len) => done += len,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => {}
            // The file system does not support this query.
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                return read_or_zero(file, offset + done as u64, &mut buf[done..]).map(|()| true);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

/// Locks a file by `operation`. Tries for 0.2 s, because a child process of the holder may keep the
/// lock until it calls `exec`. Errors: `EWOULDBLOCK` if another process holds the lock; the file
/// cannot be locked.
pub fn flock(file: impl AsFd, operation: FlockOperation) -> rustix::io::Result<()> {
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(&file, operation) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_EVERY),
            other => return other,
        }
    }
    rustix::fs::flock(file, operation)
}

const LOCK_TRIES: u32 = 20;
const LOCK_EVERY: Duration = Duration::from_millis(10);

/// An overlay's directory in the file system. One process at a time can have it open.
pub struct RealFolder {
    path: PathBuf,
    folder: File,
    lasting: Lasting,
}

impl RealFolder {
    /// Opens and locks the directory at `path`. Creates it if it does not exist. Errors: it cannot
    /// be created; those of [`Self::open`].
    pub fn create(path: &Path, lasting: Lasting) -> Result<Self> {
        let name = path.display().to_string();
        let mut builder = std::fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(path).map_err(Error::io(&name, "make"))?;
        Self::open(path, lasting)
    }

    /// Opens and locks the existing directory at `path`. Errors: [`Error::Locked`] if another
    /// process has it open; it cannot be opened or locked.
    pub fn open(path: &Path, lasting: Lasting) -> Result<Self> {
        let name = path.display().to_string();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder =
            rustix::fs::open(path, flags, Mode::empty()).map_err(Error::io(&name, "open"))?;
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { path: path.into(), folder: folder.into(), lasting }),
            Err(Errno::WOULDBLOCK) => Err(Error::Locked { object: name }),
            Err(e) => Err(Error::io(name, "lock")(e)),
        }
    }
}

impl OverlayFolder for RealFolder {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn open(&self, name: &str) -> Result<Arc<dyn OverlayFile>> {
        let path = self.path.join(name);
        let name = path.display().to_string();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(Error::io(&name, "open"))?;
        Ok(Arc::new(RealFile { file, name, lasting: self.lasting }))
    }

    fn replace(&self, from: &str, to: &str) -> Result<()> {
        let name = self.path.join(to).display().to_string();
        std::fs::rename(self.path.join(from), self.path.join(to))
            .map_err(Error::io(name, "replace"))
    }

    fn sync(&self) -> Result<()> {
        match self.lasting {
            Lasting::Durable => self.folder.sync_all().map_err(Error::io(self.name(), "sync")),
            Lasting::Temporary => Ok(()),
        }
    }

    fn boot_seed(&self) -> Result<u64> {
        let boot = std::fs::read(BOOT_ID).map_err(Error::io(BOOT_ID, "read"))?;
        Ok(xxhash_rust::xxh3::xxh3_64(&boot))
    }
}

/// The kernel's random name of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_overlay_waits_for_no_medium() {
        // A device that cannot be synced fails if it is asked to sync.
        let file =
            |lasting| RealFolder::open(Path::new("/dev"), lasting).unwrap().open("null").unwrap();
        assert!(file(Lasting::Durable).sync().is_err());
        file(Lasting::Temporary).sync().unwrap();
    }
}
