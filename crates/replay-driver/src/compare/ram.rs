//! Compares the RAM of a paused VM, page by page.

use super::Difference;
use crate::error::{Error, Result};
use keyframe_kernel::{Process, read_memory};
use keyframe_qemu::restore::Restored;
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, RamLayout};

/// Pages that are compared at once: 8 MiB.
const BATCH_PAGES: u64 = 2048;

/// Compares the RAM of a paused VM with the RAM in the checkpoint `loaded`.
///
/// # Errors
///
/// [`Error::NotComparable`] if the VM lacks a RAM block of the checkpoint; other errors if QEMU's
/// memory or the checkpoint's pages cannot be read.
pub fn compare_ram_with_checkpoint(
    restored: &mut Restored,
    loaded: &LoadedCheckpoint,
) -> Result<Difference> {
    compare(restored, &loaded.meta.ram, &mut |part, expected| {
        let read = loaded.read_pages(part, &mut |page: PageIndex, content: &Page| {
            let at = (page.0 - part.first.0) as usize * PAGE_BYTES;
            expected[at..at + PAGE_BYTES].copy_from_slice(content);
            Ok::<_, keyframe_store::Error>(())
        });
        read.map_err(Error::CheckpointPages)
    })
}

/// Compares the RAM of two paused VMs, which have the RAM blocks of `layout`.
///
/// # Errors
///
/// [`Error::NotComparable`] if one of them lacks a RAM block; other errors if QEMU's memory cannot
/// be read.
pub fn compare_ram(
    one: &mut Restored,
    other: &mut Restored,
    layout: &RamLayout,
) -> Result<Difference> {
    let blocks = other.vm().ram_blocks()?;
    let process = Process::open(other.pid())?;
    compare(one, layout, &mut |part, expected| {
        let number = (0..layout.blocks().len()).find(|n| {
            let range = layout.pages_of(*n);
            part.first.0 >= range.first.0 && part.first.0 < range.first.0 + range.len_pages
        });
        let block = number.and_then(|n| Some((n, layout.blocks().get(n)?)));
        let found = block.and_then(|(n, wanted)| {
            Some((n, blocks.iter().find(|b| b.block.name == wanted.name)?))
        });
        let at = found.and_then(|(n, b)| {
            b.host.checked_add((part.first.0 - layout.pages_of(n).first.0) * PAGE_BYTES as u64)
        });
        let at = at.ok_or_else(|| {
            Error::NotComparable("the two replays have not the same RAM blocks".into())
        })?;
        Ok(read_memory(&process, at, expected)?)
    })
}

/// Fills a buffer with the pages that are expected in a range.
type Expected<'a> = &'a mut dyn FnMut(PageRange, &mut [u8]) -> Result<()>;

/// Compares the RAM of a paused VM with what `expect` fills in.
fn compare(
    restored: &mut Restored,
    layout: &RamLayout,
    expect: Expected<'_>,
) -> Result<Difference> {
    let blocks = restored.vm().ram_blocks()?;
    let process = Process::open(restored.pid())?;
    let mut difference = Difference::default();
    for (number, wanted) in layout.blocks().iter().enumerate() {
        let Some(found) = blocks.iter().find(|b| b.block.name == wanted.name) else {
            let text = format!("the replay has no RAM block {}", wanted.name);
            return Err(Error::NotComparable(text));
        };
        let range = layout.pages_of(number);
        let mut done = 0;
        while done < range.len_pages {
            let part = PageRange::new(
                PageIndex(range.first.0 + done),
                BATCH_PAGES.min(range.len_pages - done),
            );
            let mut expected = vec![0; part.len_bytes() as usize];
            expect(part, &mut expected)?;
            let mut actual = vec![0; expected.len()];
            let at = found.host.checked_add(done * PAGE_BYTES as u64);
            let at = at.ok_or_else(|| {
                Error::NotComparable(format!("RAM block {} has no address", wanted.name))
            })?;
            read_memory(&process, at, &mut actual)?;
            let pairs = expected.chunks_exact(PAGE_BYTES).zip(actual.chunks_exact(PAGE_BYTES));
            for (offset, _) in (done..).zip(pairs).filter(|(_, (a, b))| a != b) {
                difference.add(&wanted.name, offset * PAGE_BYTES as u64);
            }
            done += part.len_pages;
        }
    }
    Ok(difference)
}
