//! Measures the cost of write protection on memory of this process.

use crate::abi::{self, PageRegion};
use crate::pagemap::{Pagemap, PagemapQuery};
use crate::pagemap_quirks::own_userfaultfd;
use crate::ranges::between;
use crate::{Error, Process, Result};
use keyframe_units::PAGE_BYTES;
use keyframe_units::elapsed_ns;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::os::fd::AsFd;
use std::ptr::null_mut;
use std::time::Instant;

const PAGES: usize = 2048;
const LEN: usize = PAGES * PAGE_BYTES;

/// Memory to write to; unmapped on drop.
struct Memory(*mut u8);

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, made in `first_write_ns`; nothing refers to it.
        let _ = unsafe { munmap(self.0.cast(), LEN) };
    }
}

/// Measures the cost of the first write to a page under asynchronous write protection, and returns
/// it in nanoseconds: the best of some rounds, because other processes only add to it. About 1000.
/// Error: the kernel cannot protect memory in that way.
pub fn first_write_ns() -> Result<u64> {
    let pid = std::process::id();
    let failed = |source| Error::Tracker {
        pid,
        operation: "measure a first write on our own memory",
        source,
    };
    let pagemap = Pagemap::open(&Process::open(pid)?)?;
    let uffd = own_userfaultfd().map_err(failed)?;
    abi::uffd_api(uffd.as_fd(), abi::features_needed()).map_err(failed)?;
    // SAFETY: no address is given, so that no mapping of ours is replaced.
    let start = unsafe {
        mmap_anonymous(null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let memory = Memory(start.map_err(|error| failed(error.into()))?.cast());
    // SAFETY: the mapping is ours, whole, and holds nothing yet; the advice changes no content.
    let _ = unsafe { madvise(memory.0.cast(), LEN, Advice::LinuxNoHugepage) };
    let write = || {
        for page in 0..PAGES {
            let at = memory.0.wrapping_add(page * PAGE_BYTES);
            // SAFETY: within the mapping, which is writable and to which nothing refers.
            unsafe { at.write_volatile(1) };
        }
    };
    write();
    let range = between(memory.0 as u64, memory.0 as u64 + LEN as u64);
    abi::uffd_register(uffd.as_fd(), range.start.0, range.len_bytes).map_err(failed)?;
    let mut buffer = [PageRegion::default(); 16];
    let mut best_ns = u64::MAX;
    for _ in 0..5 {
        pagemap
            .scan(PagemapQuery::WRITTEN.protecting(), range, &mut buffer, |_, _| {})
            .map_err(failed)?;
        let began = Instant::now();
        write();
        best_ns = best_ns.min(elapsed_ns(began));
    }
    Ok((best_ns / PAGES as u64).max(1))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_first_write_costs_something() {
        // A page fault cannot be as cheap as a store; a wrong measurement (nothing was protected)
        // would be.
        assert!(super::first_write_ns().unwrap() > 20);
    }
}
