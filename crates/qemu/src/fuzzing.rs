//! Entry points for the fuzzers in `fuzz/`. They take any bytes and must neither panic nor allocate
//! memory out of proportion to their input. They are not part of the interface.

use crate::qmp::fuzzing::{event, libvirt, received};
use std::io::Write;
use std::os::unix::net::UnixStream;

/// Bytes that a socket buffers at once.
const SOCKET_BYTES_MAX: usize = 64 << 10;

/// Reads `bytes` as the output of a monitor.
pub fn monitor(bytes: &[u8]) {
    let bytes = bytes.get(..SOCKET_BYTES_MAX).unwrap_or(bytes);
    let Ok((mut theirs, ours)) = UnixStream::pair() else { return };
    if theirs.write_all(bytes).is_err() || ours.set_nonblocking(true).is_err() {
        return;
    }
    drop(theirs);
    received(ours.into(), &mut event);
    libvirt(&String::from_utf8_lossy(bytes));
}
