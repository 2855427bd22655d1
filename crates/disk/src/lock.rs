//! Locks an image against writers while it is served, with the byte locks that QEMU uses.
//!
//! ```text
//!   byte 100 + p   a process uses permission p: 0 read, 1 write, 3 resize
//!   byte 200 + p   a process does not let others use permission p
//! ```
//!
//! QEMU locks these bytes for reading (open file description locks), and checks whether another
//! process has locked bytes that contradict its own. Keyframe reads a served image; no other
//! process may write or resize it, but others may read it.
//!
//! The same locks are taken on the backing files and on the data files of the image.

use crate::chain::image_files;
use crate::{Error, ImageFormat, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, flock};
use std::fs::File;
use std::path::Path;

const USED: i64 = 100;
const KEPT: i64 = 200;
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Locks on the files of an image, which keep QEMU's programs from writing it. They are held until
/// this is dropped or the process ends.
#[derive(Debug)]
pub struct ImageLock {
    _files: Vec<File>,
}

impl ImageLock {
    /// Locks the image at `path`, its backing files and its data files against writers.
    ///
    /// Errors: [`Error::Refused`] if another process has one of them open for writing;
    /// [`Error::Io`] if one cannot be opened or locked; those of [`image_files`].
    pub fn take(path: &Path, format: ImageFormat) -> Result<Self> {
        let files = image_files(path, format)?;
        let files = files.iter().map(|file| Self::lock_one(file)).collect::<Result<_>>()?;
        Ok(Self { _files: files })
    }

    fn lock_one(path: &Path) -> Result<File> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(Error::io(&name, "open"))?;
        let failed = |e: Errno| Error::io(&name, "lock")(std::io::Error::from(e));
        for byte in [USED + READ, KEPT + WRITE, KEPT + RESIZE] {
            fcntl(&file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, byte))).map_err(failed)?;
        }
        for byte in [USED + WRITE, USED + RESIZE, KEPT + READ] {
            let mut found = lock(libc::F_WRLCK, byte);
            fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found)).map_err(failed)?;
            if i32::from(found.l_type) != libc::F_UNLCK {
                return Err(Error::refused(
                    name,
                    "another process (a VM, qemu-img or qemu-nbd) has it open for writing",
                    "stop that process first, or run on a copy of the image",
                ));
            }
        }
        Ok(file)
    }
}

fn lock(kind: i32, byte: i64) -> flock {
    flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backing_file_is_locked_too() {
        let dir = tempfile::tempdir().unwrap();
        let (top, base) = (dir.path().join("top"), dir.path().join("base"));
        let mut header = vec![0u8; 512];
        header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        header[8..16].copy_from_slice(&400u64.to_be_bytes());
        header[16..20].copy_from_slice(&4u32.to_be_bytes());
        header[100..104].copy_from_slice(&104u32.to_be_bytes());
        header[400..404].copy_from_slice(b"base");
        std::fs::write(&top, header).unwrap();
        std::fs::write(&base, [0; 512]).unwrap();
        let lock = ImageLock::take(&top, ImageFormat::Qcow2).unwrap();
        let writer = File::open(&base).unwrap();
        let mut found = self::lock(libc::F_WRLCK, KEPT + WRITE);
        fcntl(&writer, FcntlArg::F_OFD_GETLK(&mut found)).unwrap();
        assert_eq!(i32::from(found.l_type), libc::F_RDLCK);
        drop(lock);
        fcntl(&writer, FcntlArg::F_OFD_SETLK(&self::lock(libc::F_RDLCK, USED + WRITE))).unwrap();
        assert!(ImageLock::take(&top, ImageFormat::Qcow2).is_err());
    }

    #[test]
    fn many_may_read_and_none_may_write() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let first = ImageLock::take(image.path(), ImageFormat::Raw).unwrap();
        let second = ImageLock::take(image.path(), ImageFormat::Raw).unwrap();
        // The locks that QEMU takes before it writes.
        let writer = File::open(image.path()).unwrap();
        let mut found = lock(libc::F_WRLCK, KEPT + WRITE);
        fcntl(&writer, FcntlArg::F_OFD_GETLK(&mut found)).unwrap();
        assert_eq!(i32::from(found.l_type), libc::F_RDLCK);
        drop((first, second));
        fcntl(&writer, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, USED + WRITE))).unwrap();
        assert!(matches!(
            ImageLock::take(image.path(), ImageFormat::Raw),
            Err(Error::Refused { .. })
        ));
        drop(writer);
        ImageLock::take(image.path(), ImageFormat::Raw).unwrap();
    }
}
