//! Finds the pages of a region that can hold anything but zeros.
//!
//! ```text
//!   shared               the data of the file          (SEEK_DATA, SEEK_HOLE)
//!   private, of a file   the data of the file, and the private copies
//!   private, anonymous   pages in memory or on swap    (PAGEMAP_SCAN, without the shared zero page)
//! ```
//!
//! An uncertain page counts as data: reporting too much is safe, reporting too little loses data.

use super::{GuestReader, Part};
use crate::maps::Mapping;
use crate::pagemap::{Pagemap, PagemapQuery};
use crate::ranges::{between, clip, push_joined, union};
use crate::{Error, Process, Result, abi};
use keyframe_locks::IgnorePoison;
use keyframe_units::{HostRange, PAGE_BYTES};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Stat, fstat, openat, seek, statat,
};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

/// The file of a mapping, opened again for reading.
#[derive(Debug)]
pub(super) struct File {
    fd: OwnedFd,
    /// Held while seeking, because `fd` has one offset.
    seeking: Mutex<()>,
}

impl File {
    /// Opens the file behind `mapping`: by `map_files`, or if that takes a capability that this
    /// process lacks, by a descriptor that the process has of the file. Returns `None` if there is
    /// no file, or if neither way works.
    pub fn open(process: &Process, mapping: &Mapping) -> Option<Self> {
        if mapping.inode == 0 {
            return None;
        }
        // Only a regular file can be opened without a side effect, and tells of its holes. The
        // device is no test where the name is the mapping's own: some filesystems show another one
        // in maps than in stat.
        let is_it = |stat: &Stat| {
            stat.st_ino == mapping.inode && FileType::from_raw_mode(stat.st_mode).is_file()
        };
        let opened = |fd: OwnedFd| {
            fstat(&fd).is_ok_and(|stat| is_it(&stat)).then(|| Self { fd, seeking: Mutex::new(()) })
        };
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        if let Some(file) = process.open_file(&mapping.map_file(), flags).ok().and_then(opened) {
            return Some(file);
        }
        let fds = process.open_file("fd", OFlags::RDONLY | OFlags::DIRECTORY).ok()?;
        for entry in Dir::read_from(&fds).ok()?.flatten() {
            let stat = statat(&fds, entry.file_name(), AtFlags::empty());
            if stat.is_ok_and(|stat| is_it(&stat) && stat.st_dev == mapping.dev) {
                let fd =
                    openat(&fds, entry.file_name(), flags | OFlags::CLOEXEC, Mode::empty()).ok();
                if let Some(file) = fd.and_then(opened) {
                    return Some(file);
                }
            }
        }
        None
    }

    /// The extents of bytes `from..to` that hold data, as offsets.
    fn data(&self, from: u64, to: u64) -> rustix::io::Result<Vec<(u64, u64)>> {
        let _one_at_a_time = self.seeking.lock().ignore_poison();
        let mut extents = Vec::new();
        let mut at = from;
        while at < to {
            let start = match seek(&self.fd, SeekFrom::Data(at)) {
                Ok(start) if start < to => start,
                // No data behind here.
                Ok(_) | Err(Errno::NXIO) => break,
                Err(error) => return Err(error),
            };
            // The file may have changed in between: an extent that is gone is not one, and each
            // step goes forward.
            let end = match seek(&self.fd, SeekFrom::Hole(start)) {
                Ok(end) => end.clamp(start + 1, to),
                Err(Errno::NXIO) => break,
                Err(error) => return Err(error),
            };
            extents.push((start, end));
            at = end;
        }
        Ok(extents)
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl GuestReader {
    /// Returns the pages of `range` that can hold anything but zeros, as rising, joined ranges. For
    /// shared and file memory this includes data of the file that is not in the process's page
    /// table. If the file cannot be opened or does not report its holes (hugetlbfs), all of `range`
    /// counts as data.
    ///
    /// Errors: `range` lies in no region; the page table or the file cannot be read.
    pub fn data_extents(&self, range: HostRange) -> Result<Vec<HostRange>> {
        let mut out: Vec<HostRange> = Vec::new();
        let mut buffer = Pagemap::buffer();
        for (part, piece) in self.pieces(range)? {
            let failed = |source| Error::Extents { pid: self.process.pid(), range: piece, source };
            let in_file = match &part.file {
                _ if part.mapping.is_private_anonymous() => Vec::new(),
                None => vec![piece],
                Some(file) => {
                    file_extents(file, part, piece).map_err(|source| failed(source.into()))?
                }
            };
            let own = if part.mapping.shared {
                Vec::new()
            } else {
                entries(&self.pagemap, piece, &mut buffer).map_err(failed)?
            };
            for extent in union(&[&in_file, &own]) {
                push_joined(&mut out, extent);
            }
        }
        Ok(out)
    }
}

/// Returns the parts of `piece` for which the file of `part` holds data, in whole pages.
fn file_extents(file: &File, part: &Part, piece: HostRange) -> rustix::io::Result<Vec<HostRange>> {
    let to_offset = |at: u64| part.mapping.offset.saturating_add(at - part.mapping.range.start.0);
    let to_address = |offset: u64| offset - part.mapping.offset + part.mapping.range.start.0;
    let page = PAGE_BYTES as u64;
    let mut out = Vec::new();
    for (start, end) in file.data(to_offset(piece.start.0), to_offset(piece.end().0))? {
        let (start, end) = (start / page * page, end.next_multiple_of(page));
        push_joined(&mut out, between(to_address(start.max(part.mapping.offset)), to_address(end)));
    }
    Ok(clip(&out, piece))
}

/// Pages of `piece` in memory or on swap.
fn entries(
    pagemap: &Pagemap,
    piece: HostRange,
    buffer: &mut [abi::PageRegion],
) -> io::Result<Vec<HostRange>> {
    let (mut present, mut swapped) = (Vec::new(), Vec::new());
    pagemap.scan(PagemapQuery::ENTRY, piece, buffer, |range, categories| {
        push_joined(
            if categories & abi::PAGE_PRESENT == 0 { &mut swapped } else { &mut present },
            range,
        );
    })?;
    let swapped = pagemap.entries(&swapped)?;
    Ok(union(&[&present, &swapped.held, &swapped.hidden]))
}
