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
//! Left out: the backing files of a qcow2 image. QEMU does not allow writing to them either.

use crate::{Error, Result};
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

/// Holds the locks until it is dropped or the process ends.
#[derive(Debug)]
pub struct ImageLock {
    _file: File,
}

impl ImageLock {
    /// Locks the image at `path`. Error: another process writes it.
    pub fn take(path: &Path) -> Result<Self> {
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
        Ok(Self { _file: file })
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
    fn many_may_read_and_none_may_write() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let first = ImageLock::take(image.path()).unwrap();
        let second = ImageLock::take(image.path()).unwrap();
        // The locks that QEMU takes before it writes.
        let writer = File::open(image.path()).unwrap();
        let mut found = lock(libc::F_WRLCK, KEPT + WRITE);
        fcntl(&writer, FcntlArg::F_OFD_GETLK(&mut found)).unwrap();
        assert_eq!(i32::from(found.l_type), libc::F_RDLCK);
        drop((first, second));
        fcntl(&writer, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, USED + WRITE))).unwrap();
        assert!(matches!(ImageLock::take(image.path()), Err(Error::Refused { .. })));
        drop(writer);
        ImageLock::take(image.path()).unwrap();
    }
}
