//! The pages of a private file mapping that its process has written.

use crate::pagemap::{Pagemap, PagemapQuery};
use crate::{Error, Process, Result};
use keyframe_units::HostRange;

/// Returns the pages of `range` that `process` has copies of its own of, in rising order: in a
/// private mapping of a file, those that it wrote. Error: the kernel does not tell.
pub fn own_pages(process: &Process, range: HostRange) -> Result<Vec<HostRange>> {
    let mut found = Vec::new();
    let pagemap = Pagemap::open(process)?;
    let failed = |source| Error::ProcFile {
        pid: process.pid(),
        file: "pagemap".into(),
        operation: "scan",
        source,
    };
    pagemap
        .scan(PagemapQuery::OWN, range, &mut Pagemap::buffer(), |pages, _| found.push(pages))
        .map_err(failed)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::{HostVirt, PAGE_BYTES};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    #[test]
    fn written_pages_of_a_private_mapping_are_own_ones() {
        const PAGES: usize = 8;
        let file = memfd_create("own-pages", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, (PAGES * PAGE_BYTES) as u64).unwrap();
        let (read, write) = (ProtFlags::READ, ProtFlags::READ | ProtFlags::WRITE);
        let bytes = PAGES * PAGE_BYTES;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at =
            unsafe { mmap(std::ptr::null_mut(), bytes, read | write, MapFlags::PRIVATE, &file, 0) };
        let at = at.unwrap().cast::<u8>();
        for page in [1, 2, 6] {
            // SAFETY: within the mapping, which is writable.
            unsafe { at.wrapping_add(page * PAGE_BYTES).write_volatile(1) };
        }
        // SAFETY: within the mapping.
        assert_eq!(unsafe { at.wrapping_add(4 * PAGE_BYTES).read_volatile() }, 0);
        let process = Process::open(std::process::id()).unwrap();
        let range = HostRange { start: HostVirt(at as u64), len_bytes: bytes as u64 };
        let found = own_pages(&process, range).unwrap();
        let pages = |range: &HostRange| {
            let first = (range.start.0 - at as u64) / PAGE_BYTES as u64;
            first..first + range.len_bytes / PAGE_BYTES as u64
        };
        assert_eq!(found.iter().flat_map(pages).collect::<Vec<_>>(), [1, 2, 6]);
        // SAFETY: the mapping from above, which nothing uses any more.
        unsafe { munmap(at.cast(), bytes) }.unwrap();
    }
}
