//! Page-aligned scratch memory that is populated before it is used.
//!
//! Copying into fresh memory takes one page fault every 4 KiB, inside the pause. This buffer is
//! populated when it is made, with huge pages if the kernel has them.

use crate::{Error, Result};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Anonymous memory of fixed length, zeros at first, unmapped on drop.
#[derive(Debug)]
pub struct PrefaultedBuffer {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the buffer is plain memory, and no other value has a pointer to it, as with a `Vec<u8>`.
unsafe impl Send for PrefaultedBuffer {}
// SAFETY: a shared arena can only be read.
unsafe impl Sync for PrefaultedBuffer {}

impl PrefaultedBuffer {
    /// Allocates and populates `len_bytes` bytes of zeros. Error: the kernel refuses the memory.
    pub fn new(len_bytes: usize) -> Result<Self> {
        let failed = |operation, source| Error::PrefaultedBuffer {
            len_bytes: len_bytes as u64,
            operation,
            source,
        };
        if len_bytes == 0 {
            return Ok(Self { start: NonNull::dangling(), len_bytes });
        }
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: no address is given, so that no mapping of ours is replaced; anonymous memory
        // needs no descriptor.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(failed("mmap", io::Error::last_os_error()));
        }
        let start = NonNull::new(start.cast())
            .ok_or_else(|| failed("mmap", io::ErrorKind::AddrInUse.into()))?;
        let arena = Self { start, len_bytes };
        // Huge pages are a matter of speed: refused, small ones do.
        let _ = arena.advise(libc::MADV_HUGEPAGE);
        match arena.advise(libc::MADV_POPULATE_WRITE) {
            // Linux before 5.14 populates on first use.
            Err(source) if source.raw_os_error() != Some(libc::EINVAL) => {
                Err(failed("populate", source))
            }
            _ => Ok(arena),
        }
    }

    fn advise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: the range is the arena's own mapping, whole; neither advice used changes its
        // content.
        let code = unsafe { libc::madvise(self.start.as_ptr().cast(), self.len_bytes, advice) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` is `len_bytes` bytes of initialised memory (the kernel's zeros, or
        // dangling for none), less than isize::MAX as mmap gave them, mapped while `self` lives,
        // and not written while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }

    /// Returns the bytes for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`; and `self` is borrowed mutably, so that this is the only way
        // to the bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl Deref for PrefaultedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl DerefMut for PrefaultedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl Drop for PrefaultedBuffer {
    fn drop(&mut self) {
        if self.len_bytes > 0 {
            // SAFETY: the mapping is ours, whole, made in `new`; no reference to it can outlive
            // `self`.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_zero_aligned_writable_and_as_long_as_asked() {
        for len in [0, 1, 4096, 5000, (4 << 20) + 17] {
            let mut arena = PrefaultedBuffer::new(len).unwrap();
            assert_eq!(arena.len(), len);
            assert!(arena.iter().all(|byte| *byte == 0));
            if let Some(last) = arena.last_mut() {
                *last = 7;
                assert_eq!(arena.as_ptr() as usize % 4096, 0);
                assert_eq!(arena.iter().position(|byte| *byte != 0), Some(len - 1));
            }
        }
    }

    #[test]
    fn more_memory_than_there_is_gives_an_error() {
        let error = PrefaultedBuffer::new(usize::MAX / 4).unwrap_err();
        assert!(error.to_string().contains("mmap") && error.fix().is_some(), "{error}");
    }
}
