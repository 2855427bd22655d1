//! The page tables of a process, read through `/proc/PID/pagemap`.
//!
//! ```text
//!   page table entry                       PAGEMAP_SCAN says            pagemap entry says
//!   a page, protected                      PRESENT                      present
//!   a page, written since                  PRESENT WRITTEN              present
//!   on swap, or in migration               SWAPPED (WRITTEN)            swap type < 31
//!   marker "protected, nothing here"       SWAPPED                      swap type 31, marker bit 0
//!   none, in an existing table             WRITTEN (some versions: only where nothing else is asked)
//!   no table, none of hugetlbfs (hole)     nothing (some versions: WRITTEN)
//! ```
//!
//! The last line is why a scan for WRITTEN alone is not enough where memory can be discarded: see
//! [`crate::write_tracker`].

use crate::abi::{self, PageRegion, ScanArg};
use crate::ranges::{between, push_joined};
use crate::{Process, Result};
use keyframe_units::{HostRange, PAGE_BYTES};
use rustix::fs::OFlags;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// The number of answers of one call. The next call asks for the rest.
const REGIONS_MAX: usize = 16 * 1024;
/// The largest page size.
const PAGE_BYTES_MAX: u64 = 1 << 30;
/// Pagemap entries per read.
const ENTRIES_MAX: usize = 8 * 1024;

const ENTRY_BYTES: usize = 8;
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAP: u64 = 1 << 62;
/// The kernel's `SWP_PTE_MARKER`, the last of the 32 swap types, and the marker of write
/// protection.
const MARKER_TYPE: u64 = 31;
const MARKER_UFFD_WP: u64 = 1;

/// The query of a scan: pages that have every category of `mask` (for those in `inverted`: that
/// lack it) and one of `any_of`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PagemapQuery {
    pub flags: u64,
    pub inverted: u64,
    pub mask: u64,
    pub any_of: u64,
    pub give: u64,
}

impl PagemapQuery {
    /// Finds written pages, empty entries included.
    pub const WRITTEN: Self =
        Self { flags: 0, inverted: 0, mask: abi::PAGE_WRITTEN, any_of: 0, give: abi::PAGE_WRITTEN };
    /// Finds written pages, and tells whether a page is present or on swap. Not every kernel
    /// reports all empty entries as written.
    pub const WRITTEN_AND_KIND: Self =
        Self { give: abi::PAGE_WRITTEN | abi::PAGE_PRESENT | abi::PAGE_SWAPPED, ..Self::WRITTEN };
    /// Finds pages that are not in memory, and tells whether there is an entry for them.
    pub const NOT_PRESENT: Self = Self {
        flags: 0,
        inverted: abi::PAGE_PRESENT,
        mask: abi::PAGE_PRESENT,
        any_of: 0,
        give: abi::PAGE_SWAPPED,
    };
    /// Finds the same as [`Self::NOT_PRESENT`], and pages of the file behind private memory, which
    /// the process did not write.
    pub const NOT_OWN: Self = Self {
        flags: 0,
        inverted: abi::PAGE_PRESENT,
        mask: 0,
        any_of: abi::PAGE_PRESENT | abi::PAGE_FILE,
        give: abi::PAGE_SWAPPED | abi::PAGE_FILE,
    };
    /// Finds pages that the process has, in memory or on swap, and that are no pages of a file.
    pub const OWN: Self = Self {
        flags: 0,
        inverted: abi::PAGE_FILE,
        mask: abi::PAGE_FILE,
        any_of: abi::PAGE_PRESENT | abi::PAGE_SWAPPED,
        give: abi::PAGE_PRESENT,
    };
    /// Finds pages with an entry, markers included, without the shared page of zeros.
    pub const ENTRY: Self = Self {
        flags: 0,
        inverted: abi::PAGE_PFNZERO,
        mask: abi::PAGE_PFNZERO,
        any_of: abi::PAGE_PRESENT | abi::PAGE_SWAPPED,
        give: abi::PAGE_PRESENT | abi::PAGE_SWAPPED,
    };

    /// Returns this query with protection: the scan protects each reported page in the same step.
    /// The scan fails if the kernel cannot.
    pub const fn protecting(self) -> Self {
        Self { flags: abi::SCAN_WP_MATCHING | abi::SCAN_CHECK_WPASYNC, ..self }
    }
}

/// An open pagemap of a process.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: OwnedFd,
    maps: OwnedFd,
}

impl Pagemap {
    /// Opens the files `pagemap` and `maps` of `process` in `/proc`. Error: a file cannot be
    /// opened.
    pub fn open(process: &Process) -> Result<Self> {
        let open = |name| process.open_file(name, OFlags::RDONLY);
        Ok(Self { file: open("pagemap")?, maps: open("maps")? })
    }

    /// Returns a buffer for [`Self::scan`].
    pub fn buffer() -> Vec<PageRegion> {
        vec![PageRegion::default(); REGIONS_MAX]
    }

    /// Scans `range` with `query`. Calls `each` with each range of pages in the answer and its
    /// categories, in rising order. `buffer` is scratch space. Returns the number of system calls.
    /// Error: that of a call; pages may then be protected that were not passed to `each`.
    pub fn scan(
        &self,
        query: PagemapQuery,
        range: HostRange,
        buffer: &mut [PageRegion],
        mut each: impl FnMut(HostRange, u64),
    ) -> io::Result<u64> {
        let (mut start, end) = (range.start.0, range.end().0);
        let mut calls = 0;
        while start < end {
            let arg = ScanArg {
                flags: query.flags,
                start,
                end,
                category_inverted: query.inverted,
                category_mask: query.mask,
                category_anyof_mask: query.any_of,
                return_mask: query.give,
                ..ScanArg::default()
            };
            let (count, walk_end) = abi::pagemap_scan(self.file.as_fd(), arg, buffer)?;
            // The walk end that comes back can be a stale one: the place where the kernel's own
            // small buffer was last full, although the walk went on to the end and reported what it
            // found (and protected) behind it. Going back there would report addresses that do not
            // rise; going on behind the last answer misses nothing.
            let mut walk_end = walk_end;
            for region in buffer.iter().take(count) {
                if region.start < start || region.end > end || region.end <= region.start {
                    return Err(io::Error::other(format!(
                        "the kernel's answer {:#x}-{:#x} is not in order within {start:#x}-{end:#x}",
                        region.start, region.end
                    )));
                }
                each(between(region.start, region.end), region.categories);
                start = region.end;
                walk_end = walk_end.max(region.end);
            }
            calls += 1;
            // The kernel gives up without an error on pages of a size that it cannot protect.
            if walk_end < start || (count == 0 && walk_end == start) || walk_end > end {
                return Err(io::Error::other(format!(
                    "the kernel's walk ended at {walk_end:#x}, begun at {start:#x}"
                )));
            }
            start = walk_end;
        }
        Ok(calls)
    }

    /// Scans as [`Self::scan`] does, with two threads that each use one of the buffers. Returns the
    /// number of system calls. Errors: those of [`Self::scan`].
    pub fn scan_by_two(
        &self,
        query: PagemapQuery,
        range: HostRange,
        [first, second]: [&mut [PageRegion]; 2],
        mut each: impl FnMut(HostRange, u64),
    ) -> io::Result<u64> {
        // No page is cut in two, whatever its size.
        let middle = (range.start.0 + range.len_bytes / 2) / PAGE_BYTES_MAX * PAGE_BYTES_MAX;
        let middle = middle.max(range.start.0);
        let (lower, upper) = (between(range.start.0, middle), between(middle, range.end().0));
        let mut above = Vec::new();
        let (below, scanned) = std::thread::scope(|scope| {
            let helper = scope
                .spawn(|| self.scan(query, upper, second, |range, kind| above.push((range, kind))));
            let below = self.scan(query, lower, first, &mut each);
            (below, helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let calls = below? + scanned?;
        for (range, kind) in above {
            each(range, kind);
        }
        Ok(calls)
    }

    /// Checks that all of `range` is mapped, because a scan skips other parts silently. Linux
    /// before 6.11 does not tell; then this succeeds. Error: a part is not mapped.
    pub fn ensure_mapped(&self, range: HostRange) -> io::Result<()> {
        let mut at = range.start.0;
        while at < range.end().0 {
            match abi::mapping_end(self.maps.as_fd(), at) {
                Ok(Some(end)) if end > at => at = end,
                Ok(_) => {
                    return Err(io::Error::new(
                        io::ErrorKind::NotFound,
                        format!("not mapped at {at:#x}"),
                    ));
                }
                Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the states of the pages in the ranges of `list`, by their page table entries. Error:
    /// the pagemap cannot be read.
    pub fn entries(&self, list: &[HostRange]) -> io::Result<Entries> {
        let mut out = Entries::default();
        let mut bytes = vec![0; ENTRIES_MAX * ENTRY_BYTES];
        for range in list {
            let (mut page, end) =
                (range.start.0 / PAGE_BYTES as u64, range.end().0 / PAGE_BYTES as u64);
            while page < end {
                let want = usize::try_from(end - page).unwrap_or(usize::MAX).min(ENTRIES_MAX)
                    * ENTRY_BYTES;
                let part = bytes.get_mut(..want).unwrap_or_default();
                let got = rustix::io::pread(&self.file, &mut *part, page * ENTRY_BYTES as u64)?;
                if got < ENTRY_BYTES {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
                }
                let (entries, _) = part.get(..got).unwrap_or_default().as_chunks::<ENTRY_BYTES>();
                for entry in entries {
                    let list = match holds(u64::from_ne_bytes(*entry)) {
                        Holds::Nothing => &mut out.bare,
                        Holds::Hidden => &mut out.hidden,
                        Holds::Page => &mut out.held,
                    };
                    push_joined(
                        list,
                        between(page * PAGE_BYTES as u64, (page + 1) * PAGE_BYTES as u64),
                    );
                    page += 1;
                }
            }
        }
        Ok(out)
    }
}

/// Pages by what their entries hold.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    /// The pages without content: no entry, or a marker of write protection.
    pub bare: Vec<HostRange>,
    /// The pages whose entries this process may not see without `CAP_SYS_ADMIN`: on swap, in
    /// migration, or a marker.
    pub hidden: Vec<HostRange>,
    /// The pages with content: in memory, on swap or in migration.
    pub held: Vec<HostRange>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    Nothing,
    Hidden,
    Page,
}

/// Returns the kind of a pagemap entry. For hugetlbfs pages the kernel reports a marker as an empty
/// entry.
fn holds(entry: u64) -> Holds {
    let (kind, offset) = (entry & 0x1f, (entry >> 5) & ((1 << 50) - 1));
    match entry & (ENTRY_PRESENT | ENTRY_SWAP) {
        0 => Holds::Nothing,
        ENTRY_SWAP if kind == MARKER_TYPE && offset == MARKER_UFFD_WP => Holds::Nothing,
        // Offset 0 of a swap device is its header, never a page: the kernel shows zeros instead of
        // what is there.
        ENTRY_SWAP if kind == 0 && offset == 0 => Holds::Hidden,
        _ => Holds::Page,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_entry_without_a_page_holds_nothing() {
        let marker = ENTRY_SWAP | 1 << 57 | MARKER_TYPE | MARKER_UFFD_WP << 5;
        let (guard, poisoned) =
            (ENTRY_SWAP | MARKER_TYPE | 4 << 5, ENTRY_SWAP | MARKER_TYPE | 2 << 5);
        for (entry, expected) in [
            (0, Holds::Nothing),
            (1 << 57, Holds::Nothing),
            (marker, Holds::Nothing),
            (ENTRY_PRESENT | 1 << 57 | 0x1234, Holds::Page),
            (ENTRY_PRESENT, Holds::Page),
            (ENTRY_SWAP | 0x20, Holds::Page),
            (ENTRY_SWAP | 0x1e | 1 << 5, Holds::Page),
            (ENTRY_SWAP | 1 << 57, Holds::Hidden),
            (guard, Holds::Page),
            (poisoned, Holds::Page),
        ] {
            assert_eq!(holds(entry), expected, "{entry:#x}");
        }
    }
}
