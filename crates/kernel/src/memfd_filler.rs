//! Fills the empty pages of a memfd, from several threads at once.
//!
//! ```text
//!   memfd   | present | empty | empty | ...        place: the kernel takes a page and copies into it
//!     └─ mapped here, registered for missing pages, never touched
//! ```
//!
//! `UFFDIO_COPY` places a page without a lock and without filling it with zeros first. A write to a
//! mapping takes one page fault each and zero-fills the page; `pwrite` holds the file's lock, so
//! threads wait for each other.
//!
//! Invariants: a present page is never written; this process never touches a page of the mapping.
//!
//! Absent: writing pages that are present. The caller writes those to the file.

use crate::pagemap_quirks::own_userfaultfd;
use crate::{Error, Result, abi};
use keyframe_units::PAGE_BYTES;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

/// How often in a row the kernel may ask to try again before that is an error.
const AGAIN_MAX: u32 = 10_000;

/// An address range of this process that maps a file in memory. Dropping it unmaps the range.
#[derive(Debug)]
struct Span {
    /// The first address. It is never used as a pointer: this module neither reads nor writes the
    /// range.
    start: u64,
    len_bytes: u64,
}

impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, made in `MemfdFiller::over`; nothing refers to it.
        let _ = unsafe { munmap(self.start as *mut _, self.len_bytes as usize) };
    }
}

/// Fills empty pages of a memfd, and never overwrites pages that are present. Several threads may
/// use one filler.
#[derive(Debug)]
pub struct MemfdFiller {
    // Before the descriptor: no thread is left that could wait in it.
    span: Span,
    uffd: OwnedFd,
}

impl MemfdFiller {
    /// Prepares the first `len_bytes` bytes of a memfd, a multiple of the page size.
    ///
    /// Errors: this process may not use userfaultfd; the kernel lacks the feature; no memory. The
    /// caller can then fill the file by writing to it.
    pub fn over(file: BorrowedFd<'_>, len_bytes: u64) -> Result<Self> {
        let failed = |source: io::Error| refused("map a file in memory", source);
        if len_bytes == 0 || !len_bytes.is_multiple_of(PAGE_BYTES as u64) {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let uffd = own_userfaultfd().map_err(failed)?;
        abi::uffd_api(uffd.as_fd(), abi::FEATURE_MISSING_SHMEM).map_err(failed)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is given, so that no mapping of ours is replaced; the descriptor is
        // open over the call.
        let start =
            unsafe { mmap(null_mut(), len_bytes as usize, access, MapFlags::SHARED, file, 0) };
        let span = Span { start: start.map_err(|e| failed(e.into()))? as u64, len_bytes };
        abi::uffd_register_missing(uffd.as_fd(), span.start, len_bytes).map_err(failed)?;
        Ok(Self { span, uffd })
    }

    /// Places `content`, whole pages, at byte `offset` of the file. Returns the number of bytes
    /// before the first page that was present already; equal to the length of `content` if there
    /// was none.
    ///
    /// Errors: `content` reaches beyond the end; no memory.
    pub fn place(&self, offset: u64, content: &[u8]) -> Result<u64> {
        let len_bytes = content.len() as u64;
        let failed = |source| refused("place pages in a file in memory", source);
        if offset.checked_add(len_bytes).is_none_or(|end| end > self.span.len_bytes) {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let (mut done, mut again) = (0, 0);
        while done < len_bytes {
            let rest = content.get(done as usize..).unwrap_or_default();
            match abi::uffd_copy(self.uffd.as_fd(), self.span.start + offset + done, rest) {
                Ok(0) => {}
                Ok(placed) => {
                    done += placed;
                    again = 0;
                    continue;
                }
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => return Ok(done),
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => return Err(failed(error)),
            }
            again += 1;
            if again > AGAIN_MAX {
                return Err(failed(io::ErrorKind::TimedOut.into()));
            }
            std::thread::yield_now();
        }
        Ok(done)
    }
}

fn refused(operation: &'static str, source: io::Error) -> Error {
    Error::Tracker { pid: std::process::id(), operation, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    const PAGES: u64 = 40;

    fn file() -> File {
        let fd = memfd_create("keyframe-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, PAGES * PAGE_BYTES as u64).unwrap();
        fd.into()
    }

    fn byte(page: u64) -> u8 {
        page as u8 + 1
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]
        /// Against the naive oracle: a page is placed where none was, and what was there stays.
        #[test]
        fn pages_are_placed_where_there_are_none(there in prop::collection::btree_set(0..PAGES, 0..8), runs in prop::collection::vec((0..PAGES, 1..12_u64), 1..8)) {
            let (file, page_bytes) = (file(), PAGE_BYTES as u64);
            let mut oracle = vec![0_u8; PAGES as usize];
            for page in &there {
                file.write_all_at(&[200; PAGE_BYTES], page * page_bytes).unwrap();
                oracle[*page as usize] = 200;
            }
            let memory = MemfdFiller::over(file.as_fd(), PAGES * page_bytes).unwrap();
            for (first, len) in runs {
                let len = len.min(PAGES - first);
                let content: Vec<u8> = (first..first + len).flat_map(|page| [byte(page); PAGE_BYTES]).collect();
                let free = (first..first + len).take_while(|page| oracle[*page as usize] == 0).count() as u64;
                prop_assert_eq!(memory.place(first * page_bytes, &content).unwrap(), free * page_bytes);
                (first..first + free).for_each(|page| oracle[page as usize] = byte(page));
            }
            drop(memory);
            let mut image = vec![0; PAGES as usize * PAGE_BYTES];
            file.read_exact_at(&mut image, 0).unwrap();
            let expected: Vec<u8> = oracle.iter().flat_map(|byte| [*byte; PAGE_BYTES]).collect();
            prop_assert!(image == expected);
        }
    }

    #[test]
    fn what_is_no_whole_page_or_beyond_the_end_is_an_error() {
        let len_bytes = PAGES * PAGE_BYTES as u64;
        let file = file();
        assert!(MemfdFiller::over(file.as_fd(), 0).is_err());
        assert!(MemfdFiller::over(file.as_fd(), 100).is_err());
        let memory = MemfdFiller::over(file.as_fd(), len_bytes).unwrap();
        for offset in [len_bytes, len_bytes - PAGE_BYTES as u64, u64::MAX - 4095] {
            assert!(memory.place(offset, &[1; 2 * PAGE_BYTES]).is_err(), "{offset}");
        }
        assert!(memory.place(1, &[1; PAGE_BYTES]).is_err(), "not a whole page's place");
    }
}
