//! Memory that is shared with another process: the board, and the guest's RAM. This module makes the
//! plugin's only system calls.
//!
//! `mmap`, `munmap` and `syscall` are declared by hand: std links the C library anyway, and a
//! dependency would need cargo to build the plugin. All accesses to shared memory are atomic, so
//! that concurrent changes by the other side are never undefined behaviour.

use std::ffi::{c_int, c_long, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::time::Duration;

const PROT_READ: c_int = 1;
const PROT_WRITE: c_int = 2;
const MAP_SHARED: c_int = 1;
const MAP_FIXED: c_int = 0x10;
const SYS_FUTEX: c_long = 202;
const FUTEX_WAIT: c_int = 0;
const FUTEX_WAKE: c_int = 1;

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        len: usize,
        protection: c_int,
        flags: c_int,
        fd: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(at: *mut c_void, len: usize) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
}

/// A shared mapping of a file, in whole words.
pub struct SharedMap {
    base: *mut c_void,
    len_bytes: usize,
    fd: std::os::fd::OwnedFd,
}

// SAFETY: the mapping is memory of the process, not of a thread, and lasts until drop.
unsafe impl Send for SharedMap {}
// SAFETY: it is only read and written by atomic operations.
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// Maps the first `len_bytes` bytes of `file`. The file must be and stay at least that long.
    pub fn shared(file: &File, len_bytes: usize, writable: bool) -> std::io::Result<Self> {
        let protection = if writable { PROT_READ | PROT_WRITE } else { PROT_READ };
        let fd = file.try_clone()?.into();
        // SAFETY: the kernel chooses the place, so no memory of ours is replaced; the descriptor is
        // open.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len_bytes, protection, MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base.addr() == usize::MAX {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self { base, len_bytes, fd })
    }

    /// The memory as words of 8 bytes.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has `len_bytes`, begins at a page, and lives as long as `self`;
        // AtomicU64 may be shared with a process that writes it atomically.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len_bytes / 8) }
    }

    /// The memory as bytes.
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: as for `words`, in bytes.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len_bytes) }
    }

    /// The lower half of a word.
    pub fn half(&self, word: usize) -> &AtomicU32 {
        let whole = &self.words()[word];
        // SAFETY: it is the first half of a word that lives as long as `self`, and aligned to more
        // than it needs; the board uses such a word by this half alone.
        unsafe { &*std::ptr::from_ref(whole).cast::<AtomicU32>() }
    }

    /// Sleeps while the lower half of a word is 1, at most for `limit`.
    pub fn sleep(&self, word: usize, limit: Duration) {
        let limit = Timespec {
            seconds: limit.as_secs() as i64,
            nanoseconds: i64::from(limit.subsec_nanos()),
        };
        let flag = std::ptr::from_ref(self.half(word));
        // SAFETY: futex(2) reads the aligned 4 bytes at `flag` and the time limit; both live until
        // it returns. Any result is fine: the caller looks again.
        unsafe { syscall(SYS_FUTEX, flag, FUTEX_WAIT, 1_u32, &raw const limit) };
    }

    /// Wakes one thread that sleeps on `flag`.
    pub fn wake(flag: &AtomicU32) {
        // SAFETY: FUTEX_WAKE uses `flag` only as a name.
        unsafe { syscall(SYS_FUTEX, std::ptr::from_ref(flag), FUTEX_WAKE, 1_u32) };
    }

    /// Maps the page of the file at `offset_bytes` over the page of memory at `at`, so that both are
    /// one.
    ///
    /// # Safety
    /// `at` is the start of a page of memory that the caller may write. Nothing unmaps or moves
    /// it, or relies on it to be private.
    #[cfg_attr(
        not(any(keyframe_interface = "4", keyframe_interface = "7")),
        expect(dead_code, reason = "of one interface")
    )]
    pub unsafe fn put_page(&self, offset_bytes: usize, at: *mut u8) -> std::io::Result<()> {
        assert!(
            at.addr().is_multiple_of(4096) && offset_bytes + 4096 <= self.len_bytes,
            "a page of the file"
        );
        let fd = self.fd.as_raw_fd();
        // SAFETY: exactly the page that the caller vouches for is replaced by a page of the open
        // file.
        let placed = unsafe {
            mmap(
                at.cast(),
                4096,
                PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_FIXED,
                fd,
                offset_bytes as i64,
            )
        };
        if placed.addr() == usize::MAX { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: it is ours, and no reference into it outlives `self`.
        unsafe { munmap(self.base, self.len_bytes) };
    }
}
