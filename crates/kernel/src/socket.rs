//! The bytes sent through a socket that its peer has not read.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns the number of bytes that the kernel holds for data that `socket`, a unix stream socket,
/// sent and its peer has not read. The kernel counts its own overhead, so the number exceeds the
/// bytes sent; it is 0 exactly if the peer has read all.
///
/// Error: the kernel refuses for such a socket.
pub fn unread_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open for as long as it is borrowed; TIOCOUTQ (SIOCOUTQ) writes one
    // int to the pointer, which is to a live one.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(u64::from(bytes.unsigned_abs())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn is_zero_exactly_where_all_was_read() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(unread_bytes(ours.as_fd()).unwrap(), 0);
        ours.write_all(&[0; 3000]).unwrap();
        theirs.read_exact(&mut [0; 2999]).unwrap();
        assert!(unread_bytes(ours.as_fd()).unwrap() > 0);
        theirs.read_exact(&mut [0; 1]).unwrap();
        assert_eq!(unread_bytes(ours.as_fd()).unwrap(), 0);
        assert!(unread_bytes(std::fs::File::open("/dev/null").unwrap().as_fd()).is_err());
    }
}
