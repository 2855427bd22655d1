//! A read-only mapping of our own of memory that the process has mapped shared.
//!
//! Copying from it is the fastest way to read a VM's RAM. Touching a page behind the end of the
//! file would kill us (SIGBUS), so only memory is taken whose file cannot get shorter: a memfd
//! sealed by `F_SEAL_SHRINK`, as QEMU makes it. Huge pages are left out: touching one that is not
//! allocated fails the same way when the pool is empty.

use super::data_extents::File;
use crate::maps::Mapping;
use keyframe_units::{HostRange, PAGE_BYTES};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// The same bytes as `range` of the process.
#[derive(Debug)]
pub(super) struct SharedMapping {
    range: HostRange,
    start: NonNull<u8>,
}

// SAFETY: the mapping is only ever read, and unmapped once, by `drop`.
unsafe impl Send for SharedMapping {}
// SAFETY: the same.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `range`, a part of `mapping`, whose file is `file`. Returns `None` if that is not
    /// possible or not safe.
    pub fn open(file: &File, mapping: &Mapping, range: HostRange) -> Option<Self> {
        if !mapping.shared || mapping.page_bytes != PAGE_BYTES as u64 {
            return None;
        }
        let seals = fcntl_get_seals(file.as_fd()).ok()?;
        if !seals.contains(SealFlags::SHRINK) {
            return None;
        }
        let offset =
            mapping.offset.checked_add(range.start.0.checked_sub(mapping.range.start.0)?)?;
        let end = offset.checked_add(range.len_bytes)?;
        if u64::try_from(fstat(file.as_fd()).ok()?.st_size).ok()? < end {
            return None;
        }
        let (len, offset) = (usize::try_from(range.len_bytes).ok()?, i64::try_from(offset).ok()?);
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: no address is given, so that no mapping of ours is replaced; the descriptor is
        // open over the call; length and offset were checked against a file that cannot shrink.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, offset)
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        Some(Self { range, start: NonNull::new(start.cast())? })
    }

    /// Copies `piece`, a part of this window's range, to `dst`, which is as long.
    pub fn copy(&self, piece: HostRange, dst: &mut [u8]) {
        assert!(
            self.range.contains(piece) && piece.len_bytes == dst.len() as u64,
            "{piece:?} of {:?}",
            self.range
        );
        // SAFETY: `piece` begins in the mapping (just asserted), so the result is in bounds of the
        // same mapping.
        let from =
            unsafe { self.start.as_ptr().add((piece.start.0 - self.range.start.0) as usize) };
        // SAFETY: `from` is readable for `dst.len()` bytes (just asserted; the file cannot shrink),
        // `dst` is writable for as many, both are aligned for bytes; they do not overlap, as `dst`
        // is borrowed mutably and the window is never handed out. No reference to the window is
        // made: the other process writes to it at any time.
        unsafe { std::ptr::copy_nonoverlapping(from, dst.as_mut_ptr(), dst.len()) };
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, made in `open`; no pointer into it outlives a call of
        // `copy`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.range.len_bytes as usize) };
    }
}
