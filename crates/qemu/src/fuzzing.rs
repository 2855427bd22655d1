//! Doors for the fuzzers in `fuzz/`: each gives bytes to the readers of what QEMU, libvirt or a
//! store says.
//!
//! Not part of the interface. Each takes any bytes, and must neither panic nor take memory out of
//! proportion to them.

use crate::Accelerator;
use crate::qmp::fuzzing::{event, libvirt, received};
use crate::stream::{Incoming, check, convert, cpu_registers, display, shadowed, written_by};
use keyframe_units::PAGE_BYTES;
use std::io::Write;
use std::os::unix::net::UnixStream;

/// What a socket holds at once.
const SOCKET_BYTES_MAX: usize = 64 << 10;

/// A device state, as a store has it.
pub fn device_state(state: &[u8]) {
    let is_one = check(state).is_ok();
    for to in [Accelerator::Kvm, Accelerator::Tcg] {
        if let (true, Ok(converted)) = (is_one, convert(state, to)) {
            assert!(check(&converted).is_ok(), "what was converted is no device state any more");
        }
    }
    let _ = (written_by(state), cpu_registers(state), shadowed(state), display(state));
}

/// A migration stream, as a user has it.
pub fn migration(bytes: &[u8]) {
    let Ok(incoming) = Incoming::begin(bytes) else { return };
    let blocks: Vec<u64> = incoming.blocks().iter().map(|block| block.used_bytes).collect();
    let found = incoming.finish(&mut |block, offset, _| {
        assert!(offset + PAGE_BYTES as u64 <= blocks[block], "a page outside of its block");
        Ok(())
    });
    if let Ok(state) = found {
        device_state(&state);
    }
}

/// What a monitor sends.
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
