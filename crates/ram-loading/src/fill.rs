//! Fills the memory of a VM from a checkpoint before the VM runs.
//!
//! ```text
//!   store ─▶ thread a core: piece of 16 MiB ─▶ run of neighbours, 256 KiB at most ─┬─▶ place    where no page is
//!                                                                                  └─▶ pwrite   where one is
//! ```
//!
//! A new memfd reads as zeros, so only nonzero pages are copied. The VMM has mapped the file already,
//! and may have touched pages during its start: those are overwritten. If the kernel cannot place
//! pages (`keyframe_kernel::memfd_filler`), all pages are written, by one thread at a time for each
//! file.

use crate::memory::Memory;
use crate::page_run::{PageRun, check_within, pieces};
use crate::{Error, Result};
use keyframe_kernel::memfd_filler::MemfdFiller;
use keyframe_machine::RamSource;
use keyframe_units::elapsed_ns;
use keyframe_units::{PAGE_BYTES, PageRange, RamLayout};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Pages that a thread takes at once: 16 MiB.
const PIECE_PAGES: u64 = 4096;
/// The largest number of filling threads; there is one for each core.
const THREADS_MAX: usize = 16;

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
fn fill_and_unmap(
    memories: &[Memory],
    source: &dyn RamSource,
    cancelled: &AtomicBool,
) -> Result<()> {
    fill_all(memories.iter().map(Target::new).collect(), source, cancelled).map(drop)
}

/// Fills new memory for the backends of `layout` from `source`, and seals it: from then on no process
/// can write it. Ends early if `cancelled` is set. Errors: those of [`fill`]; the memory cannot be
/// allocated or sealed.
pub fn fill_sealed(
    layout: &RamLayout,
    source: &dyn RamSource,
    cancelled: &AtomicBool,
) -> Result<Vec<Memory>> {
    let memories = Memory::of_backends(layout, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fill_and_unmap(&memories, source, cancelled)?;
    for memory in &memories {
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&memory.file, seals)
            .map_err(Error::io(format!("seal the memory of RAM block {}", memory.name)))?;
    }
    Ok(memories)
}

/// Copies the pages into the memories of `targets`. Returns the mappings through which they were
/// placed.
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
    use keyframe_units::{BlockKind, Page, PageIndex, RamBlock};
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
