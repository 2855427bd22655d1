//! Fills the memory of a VM from a checkpoint before the VM runs.
//!
//! ```text
//!   store ─▶ thread a core: piece of 16 MiB ─▶ run of neighbours, 256 KiB at most ─┬─▶ place    where no page is
//!                                                                                  └─▶ pwrite   where one is
//! ```
//!
//! A new memfd reads as zeros, so only nonzero pages are copied. QEMU has mapped the file already,
//! and may have touched pages during its start: those are overwritten. If the kernel cannot place
//! pages (`keyframe_kernel::memfd_filler`), all pages are written, by one thread at a time for each
//! file.

use super::RamSource;
use crate::{Error, Result};
use keyframe_kernel::memfd_filler::MemfdFiller;
use keyframe_ram_loading::{PageRun, check_within, pieces};
use keyframe_units::elapsed_ns;
use keyframe_units::{PAGE_BYTES, PageRange, RamBlock};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Pages that a thread takes at once: 16 MiB.
const PIECE_PAGES: u64 = 4096;
/// The largest number of filling threads; there is one for each core.
const THREADS_MAX: usize = 16;

/// The memory of a RAM block, to be filled for QEMU.
pub struct Memory {
    /// A memfd that is as long as the block, or the memory of QEMU's process.
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

    /// Returns true if the block is in memory of QEMU's process, and no file holds it.
    pub fn is_of_process(&self) -> bool {
        self.offset != 0
    }

    /// Returns the same memory with a descriptor of its own. Error: there are too many descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let Self { offset, block, pages, .. } = *self;
        Ok(Self { file: self.file.try_clone()?, offset, block, pages, name: self.name.clone() })
    }

    /// Makes the memory zeros, also what QEMU has written there. It is a memfd. Error: the kernel
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
}

/// A memory, and the filler that places pages in it. Without a filler they are written.
struct Target<'a> {
    memory: &'a Memory,
    fresh: Option<MemfdFiller>,
}

/// Copies the checkpoint's pages from `source` into `memories`, until all are copied or `cancelled`
/// is set. Returns the time that it took, in nanoseconds. Mappings of the memories in this process
/// may outlive the call by a moment. Errors: `source` cannot be read; the memories cannot be
/// written.
pub fn fill(memories: &[Memory], source: &dyn RamSource, cancelled: &AtomicBool) -> Result<u64> {
    let started = Instant::now();
    let placing = fill_all(memories.iter().map(Target::new).collect(), source, cancelled)?;
    let filled_ns = elapsed_ns(started);
    // Taking hundreds of thousands of pages out of our page tables is nothing that the VM should
    // wait for.
    let _ = std::thread::Builder::new().name("unmap-ram".into()).spawn(move || drop(placing));
    Ok(filled_ns)
}

/// Fills memory as [`fill`] does, but leaves no mapping in this process, because a mapped memory
/// cannot be sealed. Errors: those of [`fill`].
pub fn fill_and_unmap(
    memories: &[Memory],
    source: &dyn RamSource,
    cancelled: &AtomicBool,
) -> Result<()> {
    fill_all(memories.iter().map(Target::new).collect(), source, cancelled).map(drop)
}

/// Unmaps the mappings through which the pages were placed.
fn fill_all(
    targets: Vec<Target<'_>>,
    source: &dyn RamSource,
    cancelled: &AtomicBool,
) -> Result<Vec<MemfdFiller>> {
    copy(&targets, source, cancelled)?;
    Ok(targets.into_iter().filter_map(|target| target.fresh).collect())
}

fn copy(targets: &[Target<'_>], source: &dyn RamSource, cancelled: &AtomicBool) -> Result<()> {
    let pieces: Vec<(&Target<'_>, PageRange)> = targets
        .iter()
        .flat_map(|t| pieces(t.memory.pages, PIECE_PAGES).map(move |p| (t, p)))
        .collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some((target, piece)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let filled = fill_piece(target, *piece, source, cancelled);
            if let Err(e) = filled {
                cancelled.store(true, Ordering::Relaxed);
                return Err(Error::io(format!("restore RAM block {}", target.memory.name))(e));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(2, usize::from).min(THREADS_MAX);
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut result = work();
        for helper in helpers {
            let other = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // The first to fail cancels the others; its error is the one to tell.
            if result.is_ok() || is_cancellation(&result) {
                result = if other.is_err() { other } else { result };
            }
        }
        result
    })
}

impl<'a> Target<'a> {
    fn new(memory: &'a Memory) -> Self {
        // Refused, it is a matter of speed.
        let fresh = || MemfdFiller::over(memory.file.as_fd(), memory.pages.len_bytes()).ok();
        let fresh = (!memory.is_of_process()).then(fresh).flatten();
        Self { memory, fresh }
    }

    /// Writes whole pages at `offset`.
    fn put(&self, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        let file = &self.memory.file;
        let Some(fresh) = &self.fresh else {
            return file.write_all_at(bytes, self.memory.offset + offset);
        };
        loop {
            let placed = fresh.place(offset, bytes).map_err(io::Error::other)?;
            offset += placed;
            bytes = bytes.get(placed as usize..).unwrap_or_default();
            let Some((there, behind)) = bytes.split_at_checked(PAGE_BYTES) else { return Ok(()) };
            file.write_all_at(there, offset)?;
            offset += PAGE_BYTES as u64;
            bytes = behind;
        }
    }
}

fn is_cancellation(result: &Result<()>) -> bool {
    matches!(result, Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::Interrupted)
}

fn fill_piece(
    target: &Target<'_>,
    piece: PageRange,
    source: &dyn RamSource,
    cancelled: &AtomicBool,
) -> io::Result<()> {
    let write = |offset: u64, bytes: &[u8]| target.put(offset, bytes);
    let mut run = PageRun::new(&write);
    source.read(piece, &mut |page, content| {
        if cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the restore was given up"));
        }
        check_within(page, piece)?;
        run.put((page.0 - target.memory.pages.first.0) * PAGE_BYTES as u64, content)
    })?;
    run.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::{BlockKind, Page, PageIndex};
    use proptest::prelude::*;

    /// Pages by number, told in the order of the list.
    struct Listed(Vec<(u64, u8)>);

    impl RamSource for Listed {
        fn read(
            &self,
            range: PageRange,
            sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
        ) -> io::Result<()> {
            let within = |page: u64| range.first.0 <= page && page < range.end().0;
            self.0
                .iter()
                .filter(|(p, _)| within(*p))
                .try_for_each(|(p, c)| sink(PageIndex(*p), &[*c; PAGE_BYTES]))
        }
    }

    fn memory(first: u64, len_pages: u64) -> Memory {
        let bytes = len_pages * PAGE_BYTES as u64;
        let block = RamBlock {
            name: "b".into(),
            kind: BlockKind::Backend,
            used_bytes: bytes,
            total_bytes: bytes,
        };
        Memory::new(&block, 0, PageRange::new(PageIndex(first), len_pages)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// Against the naive oracle: pages written one by one into a plain vector. Some pages are
        /// there before, as QEMU leaves them.
        #[test]
        fn memory_holds_the_sources_pages(
            mut pages in prop::collection::btree_map(0u64..200, 1u8.., 0..120),
            keys in prop::collection::vec(any::<u32>(), 120),
            there in prop::collection::vec(0u64..130, 0..6),
            placed in any::<bool>(),
        ) {
            let memories = [memory(0, 130), memory(130, 70)];
            let mut oracle = vec![0u8; 200 * PAGE_BYTES];
            for (page, content) in &pages {
                oracle[*page as usize * PAGE_BYTES..][..PAGE_BYTES].fill(*content);
            }
            for page in there.into_iter().filter(|page| pages.contains_key(page)) {
                memories[0].file.write_all_at(&[0xee; 100], page * PAGE_BYTES as u64 + 7).unwrap();
            }
            let mut order: Vec<_> = std::mem::take(&mut pages).into_iter().zip(keys).collect();
            order.sort_by_key(|(_, key)| *key);
            let source = Listed(order.into_iter().map(|(page, _)| page).collect());
            let mut targets: Vec<Target<'_>> = memories.iter().map(Target::new).collect();
            if !placed {
                for target in &mut targets {
                    target.fresh = None;
                }
            }
            fill_all(targets, &source, &AtomicBool::new(false)).unwrap();
            let mut image = vec![0u8; 200 * PAGE_BYTES];
            let (a, b) = image.split_at_mut(130 * PAGE_BYTES);
            memories[0].file.read_exact_at(a, 0).unwrap();
            memories[1].file.read_exact_at(b, 0).unwrap();
            prop_assert!(image == oracle);
        }
    }

    /// Where this fails, the tests of placing test writing.
    #[test]
    fn placing_is_to_be_had_here() {
        assert!(Target::new(&memory(0, 9)).fresh.is_some());
    }

    #[test]
    fn a_source_that_fails_or_answers_wrongly_fails_the_restore_by_name() {
        struct Broken(bool);
        impl RamSource for Broken {
            fn read(
                &self,
                range: PageRange,
                sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
            ) -> io::Result<()> {
                if self.0 {
                    sink(range.end(), &[1; PAGE_BYTES])
                } else {
                    Err(io::Error::other("the disk is broken"))
                }
            }
        }
        for (source, word) in [(Broken(true), "not among"), (Broken(false), "broken")] {
            let error = fill(&[memory(0, 9)], &source, &AtomicBool::new(false)).unwrap_err();
            let Error::Io { operation, source } = error else { panic!("{error}") };
            assert!(
                operation.contains("RAM block b") && source.to_string().contains(word),
                "{operation}: {source}"
            );
        }
    }
}
