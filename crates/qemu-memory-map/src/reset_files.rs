//! The pages of RAM that a reset of the machine overwrites.
//!
//! QEMU keeps the files that it has put into the guest's RAM at the start: the kernel of `-kernel`
//! if that is an ELF file, an Arm guest's kernel, initial RAM disk and device tree, the files of
//! `-device loader`. Each reset writes them again. Meanwhile the guest has used a part of these
//! pages for other purposes, such as the rings of a virtio device. `snapshot-load` resets the machine
//! before it loads a state. A virtio device then reads the indices of its rings from RAM, and is broken
//! for good if they contradict its own. So the pages must come with the state, before the devices.
//!
//! ```text
//!   info roms       addr=0000000001000000 size=0x1826710 mem=ram name="vmlinux ELF program header segment 0"
//!   info mtree -f   0000000000100000-000000000fffffff (prio 0, ram): pc.ram @0000000000100000
//! ```
//!
//! A file with `mem=rom` is written once, at the start. One with `fw=` is not in RAM. One without an
//! address is a RAM block of its own, which no device uses.

use keyframe_units::{GuestRegion, PAGE_BYTES, PageIndex, RamLayout};

/// A part of a RAM block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPart {
    block: String,
    first_page: u64,
    /// The number of pages, at least one.
    len_pages: u64,
}

/// A file that each reset writes into the guest's physical memory.
#[derive(Debug, PartialEq, Eq)]
pub struct ResetFile {
    /// Its first address.
    start: u64,
    /// The first address after it.
    end: u64,
}

/// Returns the files that each reset writes into RAM. `list` is QEMU's answer to `info roms`. `None` if it
/// is not understood.
pub fn files(list: &str) -> Option<Vec<ResetFile>> {
    let of_addresses = list.lines().map(str::trim).filter_map(|line| line.strip_prefix("addr="));
    let mut found = Vec::new();
    for line in of_addresses {
        let mut words = line.split(' ');
        let start = u64::from_str_radix(words.next()?, 16).ok()?;
        let size = words.next()?.strip_prefix("size=0x")?;
        let end = start.checked_add(u64::from_str_radix(size, 16).ok()?)?;
        match words.next()? {
            "mem=ram" if start < end => found.push(ResetFile { start, end }),
            "mem=ram" | "mem=rom" => {}
            _ => return None,
        }
    }
    Some(found)
}

/// Returns the parts of RAM blocks that `files` lie in, as `regions` places the blocks.
pub fn parts(files: &[ResetFile], regions: &[GuestRegion]) -> Vec<BlockPart> {
    let page = PAGE_BYTES as u64;
    let part = |file: &ResetFile, region: &GuestRegion| {
        let start = file.start.max(region.start.0);
        let end = file.end.min(region.start.0.saturating_add(region.len_bytes));
        let offset = |address: u64| address - region.start.0 + region.offset_bytes;
        (start < end).then(|| {
            let (first_page, end_page) = (offset(start) / page, offset(end).div_ceil(page));
            let block = region.block.clone();
            BlockPart { block, first_page, len_pages: end_page - first_page }
        })
    };
    files.iter().flat_map(|file| regions.iter().filter_map(|region| part(file, region))).collect()
}

/// Returns the pages of `parts` that `layout` has, in ascending order.
pub fn pages(parts: &[BlockPart], layout: &RamLayout) -> Vec<PageIndex> {
    let mut found = Vec::new();
    for part in parts {
        let Some(number) = layout.blocks().iter().position(|block| block.name == part.block) else {
            continue;
        };
        let block = layout.pages_of(number);
        let end = part.first_page.saturating_add(part.len_pages).min(block.len_pages);
        found.extend((part.first_page..end).map(|page| PageIndex(block.first.0 + page)));
    }
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::{BlockKind, GuestPhys};
    use proptest::prelude::*;

    const LIST: &str = "fw=genroms/pvh.bin size=0x000600 name=\"pvh.bin\"\r
addr=0000000000001800 size=0x001000 mem=ram name=\"vm linux ELF program header segment 0\"\r
addr=0000000000009000 size=0x000000 mem=ram name=\"nothing\"\r
addr=0000000000003fff size=0x000003 mem=ram name=\"over a gap\"\r
addr=00000000fffc0000 size=0x040000 mem=rom name=\"bios-256k.bin\"\r
/rom@etc/acpi/tables size=0x200000 name=\"etc/acpi/tables\"\r
";

    fn region(start: u64, len_bytes: u64, block: &str, offset_bytes: u64) -> GuestRegion {
        GuestRegion { start: GuestPhys(start), len_bytes, block: block.into(), offset_bytes }
    }

    fn layout() -> RamLayout {
        crate::layout_of(&[
            ("pc.bios", BlockKind::Stream, 2 * PAGE_BYTES),
            ("pc.ram", BlockKind::Backend, 8 * PAGE_BYTES),
        ])
    }

    #[test]
    fn the_files_in_ram_are_found_in_their_blocks() {
        let files = files(LIST).unwrap();
        assert_eq!(files[0], ResetFile { start: 0x1800, end: 0x2800 });
        assert_eq!(files.len(), 2);
        let regions = [region(0, 0x4000, "pc.ram", 0), region(0x4000, 0x1_0000, "pc.ram", 0x6000)];
        let parts = parts(&files, &regions);
        let found = pages(&parts, &layout());
        // Pages 0 and 1 are the firmware's.
        assert_eq!(found, [1, 2, 3, 6].map(|page| PageIndex(2 + page)));
        let gone = [BlockPart { block: "dimm".into(), first_page: 0, len_pages: 1 }];
        assert!(pages(&gone, &layout()).is_empty());
    }

    #[test]
    fn a_list_of_another_form_is_not_understood() {
        for (from, to) in [
            ("mem=ram name=\"vm", "mem=other name=\"vm"),
            ("size=0x001000", "size=4096"),
            ("addr=0000000000001800", "addr=none"),
            ("addr=0000000000001800 size=0x001000", "addr=ffffffffffffffff size=0x001000"),
            (" size=0x001000 mem=ram name=\"vm linux ELF program header segment 0\"", ""),
        ] {
            let text = LIST.replace(from, to);
            assert_ne!(text, LIST);
            assert_eq!(files(&text), None, "{text}");
        }
        assert_eq!(files(""), Some(Vec::new()));
    }

    proptest! {
        #[test]
        fn no_list_panics(
            tail in "[ 0-9a-f=xmre\n]{0,80}",
            start in any::<u64>(),
            len_bytes in any::<u64>(),
            offset in any::<u32>(),
        ) {
            let _ = files(&format!("addr={tail}"));
            let files = [ResetFile { start: start / 2, end: start }];
            let regions = [region(start / 4, len_bytes, "pc.ram", u64::from(offset))];
            let _ = parts(&files, &regions);
            let part = BlockPart { block: "pc.ram".into(), first_page: start, len_pages: len_bytes };
            let _ = pages(&[part], &layout());
        }
    }
}
