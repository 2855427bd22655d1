//! How this kernel's `PAGEMAP_SCAN` reports pages that are not present, which differs between
//! versions.
//!
//! One scan of memory of our own shows it:
//!
//! ```text
//!   | touched | none ...           |  no page table          |
//!   |◀────── 2 MiB, one table ────▶|◀─────── 2 MiB ─────────▶|
//! ```
//!
//! Invariant: if the scan cannot be tried, the answer is the cautious one, which loses no page on
//! any version.

use crate::abi::{self, PageRegion};
use crate::pagemap::{Pagemap, PagemapQuery};
use crate::ranges::between;
use crate::{Process, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::OnceLock;

const TABLE_BYTES: u64 = 2 << 20;
/// Room for two tables, wherever the mapping begins.
const TRIED_BYTES: u64 = 3 * TABLE_BYTES;

/// How the kernel reports pages that are not present, in memory other than hugetlbfs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PagemapQuirks {
    /// True if an empty entry of a page table counts as written even if the query has further
    /// conditions.
    pub none_is_written: bool,
    /// True if memory without a page table counts as written.
    pub hole_is_written: bool,
}

impl PagemapQuirks {
    /// Returns the quirks of the running kernel, which the first call finds by trial.
    pub fn of_this_kernel() -> Self {
        static FOUND: OnceLock<PagemapQuirks> = OnceLock::new();
        *FOUND.get_or_init(|| try_out().unwrap_or_default())
    }
}

/// A userfaultfd of our own.
pub(crate) fn own_userfaultfd() -> io::Result<OwnedFd> {
    let flags = i64::from(libc::O_CLOEXEC | libc::O_NONBLOCK);
    // SAFETY: takes one number.
    let mut fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) {
        // SAFETY: takes one number.
        fd = unsafe {
            libc::syscall(libc::SYS_userfaultfd, flags | abi::UFFD_USER_MODE_ONLY.cast_signed())
        };
    }
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor, so it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Memory to try on; unmapped on drop.
struct Tried(u64);

impl Drop for Tried {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, made in `try_out`; nothing refers to it.
        let _ = unsafe { munmap(self.0 as *mut _, TRIED_BYTES as usize) };
    }
}

fn try_out() -> Result<PagemapQuirks> {
    let failed = |source| crate::Error::Tracker {
        pid: std::process::id(),
        operation: "try PAGEMAP_SCAN on our own memory",
        source,
    };
    let own = Process::open(std::process::id())?;
    let uffd = own_userfaultfd().map_err(failed)?;
    abi::uffd_api(uffd.as_fd(), abi::features_needed()).map_err(failed)?;
    let len = TRIED_BYTES as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: no address is given, so that no mapping of ours is replaced.
    let start = unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE) };
    let memory = Tried(start.map_err(|error| failed(error.into()))? as u64);
    // SAFETY: the mapping is ours, whole, and holds nothing yet; the advice changes no content.
    let _ = unsafe { madvise(memory.0 as *mut _, len, Advice::LinuxNoHugepage) };
    abi::uffd_register(uffd.as_fd(), memory.0, TRIED_BYTES).map_err(failed)?;
    let table = memory.0.next_multiple_of(TABLE_BYTES);
    // SAFETY: rounded up within the first of three tables' lengths, so mapped and writable; nothing
    // refers to it.
    unsafe { (table as *mut u8).write_volatile(1) };

    let (mut none_is_written, mut hole_is_written) = (false, false);
    let found = |range: keyframe_units::HostRange, categories| {
        let absent = categories & (abi::PAGE_PRESENT | abi::PAGE_SWAPPED) == 0;
        none_is_written |=
            absent && range.contains(between(table + TABLE_BYTES / 2, table + TABLE_BYTES));
        hole_is_written |=
            absent && range.contains(between(table + TABLE_BYTES, table + 3 * TABLE_BYTES / 2));
    };
    let mut buffer = [PageRegion::default(); 64];
    let tried = between(table, table + 2 * TABLE_BYTES);
    Pagemap::open(&own)?
        .scan(PagemapQuery::WRITTEN_AND_KIND, tried, &mut buffer, found)
        .map_err(failed)?;
    Ok(PagemapQuirks { none_is_written, hole_is_written })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test does not know the kernel's version. No version reports missing tables without
    /// reporting missing entries.
    #[test]
    fn trying_works_and_gives_a_combination_that_exists() {
        let quirks = try_out().unwrap();
        assert!(quirks.none_is_written || !quirks.hole_is_written, "{quirks:?}");
        assert_eq!(quirks, PagemapQuirks::of_this_kernel());
    }
}
