//! The memory of a RAM block that a restore fills: a file, or memory of the VMM's process.

use crate::lazy::Place;
use crate::{Error, Result};
use keyframe_kernel::{Process, own_pages};
use keyframe_units::{
    BlockKind, HostRange, HostVirt, PAGE_BYTES, PageRange, RamBlock, RamLayout, ZERO_PAGE,
};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// The memory of a RAM block, to be filled for a VMM.
pub struct Memory {
    /// A memfd that is as long as the block, or the memory of the VMM's process.
    pub file: File,
    /// The offset of the block's first byte in `file`: 0 in a memfd, the block's address in a
    /// process.
    pub offset: u64,
    /// The block's number in the layout.
    pub block: usize,
    /// The block's pages in the layout.
    pub pages: PageRange,
    /// The block's name.
    pub name: String,
}

impl Memory {
    /// Creates zeroed memory for the RAM block `block`, which has number `number` and the pages
    /// `pages` of the page space. Error: the memory cannot be allocated.
    pub fn new(block: &RamBlock, number: usize, pages: PageRange) -> Result<Self> {
        Self::with_flags(block, number, pages, MemfdFlags::CLOEXEC)
    }

    /// Returns true if the block is in memory of the VMM's process, and no file holds it.
    pub fn is_of_process(&self) -> bool {
        self.offset != 0
    }

    /// Returns the same memory with a descriptor of its own. Error: there are too many descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let Self { offset, block, pages, .. } = *self;
        Ok(Self { file: self.file.try_clone()?, offset, block, pages, name: self.name.clone() })
    }

    /// Makes the memory zeros, also what the VMM has written there. It is a memfd. Error: the kernel
    /// cannot discard its pages.
    pub fn clear(&self) -> Result<()> {
        let operation = || format!("empty the memory of RAM block {}", self.name);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, 0, self.pages.len_bytes()).map_err(Error::io(operation()))?;
        let blocks = fstat(&self.file).map_err(Error::io(operation()))?.st_blocks;
        if blocks != 0 {
            let problem = format!("{blocks} blocks of it are still there");
            return Err(Error::io(operation())(io::Error::other(problem)));
        }
        Ok(())
    }

    /// Creates memory as [`Memory::new`] does, as a memfd with `flags`. Errors: those of
    /// [`Memory::new`].
    pub fn with_flags(
        block: &RamBlock,
        number: usize,
        pages: PageRange,
        flags: MemfdFlags,
    ) -> Result<Self> {
        let operation =
            format!("make {} bytes of memory for RAM block {}", block.total_bytes, block.name);
        let fd: OwnedFd = rustix::fs::memfd_create("keyframe-ram", flags)
            .map_err(Error::io(operation.clone()))?;
        rustix::fs::ftruncate(&fd, block.total_bytes).map_err(Error::io(operation))?;
        Ok(Self { file: fd.into(), offset: 0, block: number, pages, name: block.name.clone() })
    }

    /// Creates the memory of the backends of `layout`, as memfds with `flags`. Error: the memory
    /// cannot be allocated.
    pub fn of_backends(layout: &RamLayout, flags: MemfdFlags) -> Result<Vec<Self>> {
        let blocks = layout.blocks().iter().enumerate();
        let main = blocks.filter(|(_, block)| block.kind == BlockKind::Backend);
        main.map(|(number, block)| Self::with_flags(block, number, layout.pages_of(number), flags))
            .collect()
    }

    /// Makes the pages zeros that the VMM, process `pid`, has written as it started. The memory is
    /// that of its process. Returns the addresses of these pages. Errors: the kernel does not tell
    /// them; the memory cannot be written.
    pub fn zero_written(&self, pid: u32) -> Result<Vec<HostRange>> {
        let start = HostVirt(self.offset);
        let all = HostRange { start, len_bytes: self.pages.len_bytes() };
        let written = own_pages(&Process::open(pid)?, all)?;
        let failed = || Error::io(format!("write the memory of RAM block {}", self.name));
        for range in &written {
            for at in (range.start.0..range.end().0).step_by(PAGE_BYTES) {
                self.file.write_all_at(&ZERO_PAGE, at).map_err(failed())?;
            }
        }
        Ok(written)
    }

    /// Returns the place at which `process` has mapped this memory: the only mapping of that file.
    /// Error: the file is not mapped once, as a whole.
    pub(crate) fn place(&self, process: &Process) -> Result<Place> {
        if self.is_of_process() {
            let start = HostVirt(self.offset);
            let host = HostRange { start, len_bytes: self.pages.len_bytes() };
            return Ok(Place { name: self.name.clone(), pages: self.pages, host });
        }
        let stat = fstat(&self.file).map_err(Error::io("look at the VM's memory"))?;
        let maps = process.maps()?;
        let found: Vec<_> =
            maps.iter().filter(|m| m.inode == stat.st_ino && m.dev == stat.st_dev).collect();
        let name = self.name.clone();
        let len_bytes = self.pages.len_bytes();
        match found[..] {
            [mapping]
                if mapping.offset == 0
                    && mapping.shared
                    && mapping.range.len_bytes >= len_bytes =>
            {
                Ok(Place {
                    name,
                    pages: self.pages,
                    host: HostRange { start: mapping.range.start, len_bytes },
                })
            }
            _ => Err(Error::NotMapped {
                block: name,
                pid: process.pid(),
                problem: format!("its memory is mapped {} times, not once as a whole", found.len()),
            }),
        }
    }
}
