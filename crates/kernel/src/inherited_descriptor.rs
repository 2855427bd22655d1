//! A descriptor that this process has inherited, under a number that its parent knows.

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Returns a duplicate of the inherited descriptor `number`. The programs that this process starts
/// inherit neither of the two.
///
/// Call this before the process opens anything: a number that was not inherited may become that of
/// another file.
///
/// Error: no open descriptor has this number.
pub fn inherited_descriptor(number: u32) -> io::Result<OwnedFd> {
    let missing = || io::Error::from_raw_os_error(libc::EBADF);
    let raw = i32::try_from(number).map_err(|_| missing())?;
    let ourselves = pidfd_open(getpid(), PidfdFlags::empty())?;
    if ourselves.as_raw_fd() == raw {
        return Err(missing());
    }
    let duplicate = pidfd_getfd(&ourselves, raw, PidfdGetfdFlags::empty())?;
    // SAFETY: with CLOSE_RANGE_CLOEXEC the call closes nothing and reads no memory. It sets one flag
    // of one descriptor, which keeps the descriptor from programs that are executed later.
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, number, number, libc::CLOSE_RANGE_CLOEXEC) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(duplicate) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
    use std::io::{Read, Write};

    #[test]
    fn it_is_the_same_pipe_and_children_inherit_neither() {
        let (mut reader, writer) = io::pipe().unwrap();
        fcntl_setfd(&writer, FdFlags::empty()).unwrap();
        let number = u32::try_from(writer.as_raw_fd()).unwrap();
        let duplicate = inherited_descriptor(number).unwrap();
        assert_eq!(fcntl_getfd(&writer).unwrap(), FdFlags::CLOEXEC);
        assert_eq!(fcntl_getfd(&duplicate).unwrap(), FdFlags::CLOEXEC);
        drop(writer);
        std::fs::File::from(duplicate).write_all(b"ready").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ready");
    }

    #[test]
    fn a_number_without_a_descriptor_is_an_error() {
        for number in [100_000, u32::MAX] {
            let error = inherited_descriptor(number).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        }
    }
}
