//! A descriptor that this process has inherited, under a number that its parent knows.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Takes the inherited descriptor `number`. The programs that this process starts do not inherit it.
///
/// Call this once, and before the process opens anything: a number that was not inherited may become
/// that of another file, which this would take.
///
/// Error: no open descriptor has this number, or it is one of the standard streams.
pub fn take_inherited_descriptor(number: u32) -> io::Result<OwnedFd> {
    let missing = || io::Error::from_raw_os_error(libc::EBADF);
    let raw = i32::try_from(number).map_err(|_| missing())?;
    if raw <= libc::STDERR_FILENO {
        return Err(missing());
    }
    // SAFETY: the call reads no memory. It sets one flag of one descriptor, which keeps the
    // descriptor from programs that are executed later, and fails if the descriptor is not open.
    if unsafe { libc::fcntl(raw, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open. This process has it from its parent, so no value in it owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::IntoRawFd;

    #[test]
    fn it_is_closed_with_the_value_and_children_do_not_inherit_it() {
        let (mut reader, writer) = io::pipe().unwrap();
        fcntl_setfd(&writer, FdFlags::empty()).unwrap();
        let number = u32::try_from(writer.into_raw_fd()).unwrap();
        let mut taken = File::from(take_inherited_descriptor(number).unwrap());
        assert_eq!(fcntl_getfd(&taken).unwrap(), FdFlags::CLOEXEC);
        taken.write_all(b"ready").unwrap();
        drop(taken);
        // It ends only if no descriptor of the pipe's other end is open.
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ready");
    }

    #[test]
    fn a_number_without_a_descriptor_is_an_error() {
        for number in [0, 2, 100_000, u32::MAX] {
            let error = take_inherited_descriptor(number).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        }
    }
}
