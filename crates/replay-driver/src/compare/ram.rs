//! Whether a replay's RAM is a checkpoint's: all of it, page by page.

use super::Difference;
use keyframe_failure::Failure;
use keyframe_kernel::{Process, read_memory};
use keyframe_qemu::restore::Restored;
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, RamLayout};

/// Pages that are compared at once: 8 MiB.
const BATCH_PAGES: u64 = 2048;
/// Compares the RAM of a VM that stands with that of `loaded`.
pub fn differing(
    restored: &mut Restored,
    loaded: &LoadedCheckpoint,
) -> Result<Difference, Failure> {
    compare(restored, &loaded.meta.ram, &mut |part, expected| {
        let read = loaded.read_pages(part, &mut |page: PageIndex, content: &Page| {
            let at = (page.0 - part.first.0) as usize * PAGE_BYTES;
            expected[at..at + PAGE_BYTES].copy_from_slice(content);
            Ok::<_, keyframe_store::Error>(())
        });
        read.map_err(|e| Failure::new(keyframe_failure::chain(&e)))
    })
}

/// Compares the RAM of two VMs that stand.
pub fn differing_vms(
    one: &mut Restored,
    other: &mut Restored,
    layout: &RamLayout,
) -> Result<Difference, Failure> {
    let blocks = other.vm().ram_blocks().map_err(|e| Failure::qemu(&e))?;
    let process = Process::open(other.pid()).map_err(|e| Failure::kernel(&e))?;
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
        let at = at.ok_or_else(|| Failure::new("the two replays have not the same RAM blocks"))?;
        read_memory(&process, at, expected).map_err(|e| Failure::kernel(&e))
    })
}

type Expected<'a> = &'a mut dyn FnMut(PageRange, &mut [u8]) -> Result<(), Failure>;

fn compare(
    restored: &mut Restored,
    layout: &RamLayout,
    expect: Expected<'_>,
) -> Result<Difference, Failure> {
    let blocks = restored.vm().ram_blocks().map_err(|e| Failure::qemu(&e))?;
    let process = Process::open(restored.pid()).map_err(|e| Failure::kernel(&e))?;
    let mut difference = Difference::default();
    for (number, wanted) in layout.blocks().iter().enumerate() {
        let Some(found) = blocks.iter().find(|b| b.block.name == wanted.name) else {
            return Err(Failure::new(format!("the replay has no RAM block {}", wanted.name)));
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
            let at =
                at.ok_or_else(|| Failure::new(format!("RAM block {} lies nowhere", wanted.name)))?;
            read_memory(&process, at, &mut actual).map_err(|e| Failure::kernel(&e))?;
            let pairs = expected.chunks_exact(PAGE_BYTES).zip(actual.chunks_exact(PAGE_BYTES));
            for (offset, _) in (done..).zip(pairs).filter(|(_, (a, b))| a != b) {
                difference.add(&wanted.name, offset * PAGE_BYTES as u64);
            }
            done += part.len_pages;
        }
    }
    Ok(difference)
}
