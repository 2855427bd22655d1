//! Where a VM's RAM blocks lie in guest-physical space, as QEMU's monitor prints it.
//!
//! ```text
//!   FlatView #1
//!    AS "memory", root: system
//!     0000000000000000-000000000009ffff (prio 0, ram): pc.ram
//!     00000000000e0000-00000000000fffff (prio 0, rom): pc.bios @0000000000020000
//! ```
//!
//! The guest moves some of it while it runs: video RAM goes where it programs the card, and what it
//! sees between 768 KiB and 1 MiB is RAM or ROM as it programs the chip set. So only what stays is
//! kept: main RAM, and firmware below 1 MiB and under 4 GiB. What is seen below 1 MiB at the
//! instant of a checkpoint its device state tells.

use crate::MapError;
use keyframe_units::{BlockKind, GuestPhys, GuestRegion, PAGE_BYTES, RamLayout};

/// More regions than any machine has.
const REGIONS_MAX: usize = 4096;
const MIB: u64 = 1 << 20;
const GIB_4: u64 = 4 << 30;

/// A line of QEMU's list that describes RAM or ROM.
struct Row<'a> {
    start: u64,
    len_bytes: u64,
    name: &'a str,
    offset_bytes: u64,
}

/// Returns the regions of [`regions`], in which all blocks of main RAM must lie. Errors: those of
/// [`regions`]; a block of main RAM lies nowhere.
pub fn complete_regions(text: &str, layout: &RamLayout) -> Result<Vec<GuestRegion>, MapError> {
    let found = regions(text, layout)?;
    for block in layout.blocks().iter().filter(|b| b.kind == BlockKind::Backend) {
        if !found.iter().any(|r| r.block == block.name) {
            let problem = format!("RAM block {} is nowhere in it", block.name);
            return Err(MapError(problem));
        }
    }
    Ok(found)
}

/// Returns where main RAM and firmware of `layout` lie in the guest's physical address space, in rising
/// order. `text` is QEMU's answer to `info mtree -f`. Error: the answer contradicts itself.
pub fn regions(text: &str, layout: &RamLayout) -> Result<Vec<GuestRegion>, MapError> {
    let fail = MapError;
    let mut lines = text.lines().skip_while(|l| l.trim() != "AS \"memory\", root: system");
    if lines.next().is_none() {
        return Err(fail("it has no view of the space \"memory\"".into()));
    }
    let mut found = Vec::new();
    // The view ends with an empty line.
    for row in lines.take_while(|l| !l.trim().is_empty()).filter_map(parse) {
        let Some((kind, block)) = block_of(row.name, layout) else { continue };
        let end = row.start.saturating_add(row.len_bytes);
        if kind == BlockKind::Stream && end > MIB && end != GIB_4 {
            continue;
        }
        let region = GuestRegion {
            start: GuestPhys(row.start),
            len_bytes: row.len_bytes,
            block,
            offset_bytes: row.offset_bytes,
        };
        check(&region, kind, layout, &found)?;
        found.push(region);
        if found.len() > REGIONS_MAX {
            return Err(fail(format!("it has more than {REGIONS_MAX} regions")));
        }
    }
    Ok(found)
}

/// Parses a line `START-END (prio N, ram): NAME @OFFSET`. Under KVM the accelerator's name follows.
fn parse(line: &str) -> Option<Row<'_>> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (range, rest) = line.trim().split_once(" (prio ")?;
    let (first, last) = range.split_once('-')?;
    let (kind, name) = rest.split_once("): ")?;
    if !matches!(kind.split_once(", ")?.1, "ram" | "rom" | "nv-ram") {
        return None;
    }
    let (start, last) = (hex(first)?, hex(last)?);
    let len_bytes = last.checked_sub(start)?.checked_add(1)?;
    let name = name.strip_suffix(" KVM").unwrap_or(name);
    let (name, offset_bytes) = match name.rsplit_once(" @") {
        Some((name, offset)) => (name, hex(offset)?),
        None => (name, 0),
    };
    Some(Row { start, len_bytes, name, offset_bytes })
}

/// The block that a region's name stands for: the list leaves out the device that a block's name
/// begins with.
fn block_of(name: &str, layout: &RamLayout) -> Option<(BlockKind, String)> {
    let exact = layout.blocks().iter().find(|b| b.name == name);
    let block = exact.or_else(|| {
        layout
            .blocks()
            .iter()
            .find(|b| b.name.strip_suffix(name).is_some_and(|device| device.ends_with('/')))
    });
    block.map(|b| (b.kind, b.name.clone()))
}

fn check(
    region: &GuestRegion,
    kind: BlockKind,
    layout: &RamLayout,
    before: &[GuestRegion],
) -> Result<(), MapError> {
    let page = PAGE_BYTES as u64;
    let total =
        layout.blocks().iter().find(|b| b.name == region.block).map_or(0, |b| b.total_bytes);
    let sane = region.start.0.is_multiple_of(page)
        && region.len_bytes.is_multiple_of(page)
        && region.offset_bytes.is_multiple_of(page)
        && region.offset_bytes.checked_add(region.len_bytes).is_some_and(|end| end <= total)
        && before.last().is_none_or(|b| b.start.0 + b.len_bytes <= region.start.0);
    if sane {
        return Ok(());
    }
    let what = if kind == BlockKind::Backend { "RAM" } else { "ROM" };
    Err(MapError(format!(
        "{what} block {} at {}, {} bytes from {:#x} on, does not fit",
        region.block, region.start, region.len_bytes, region.offset_bytes
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VIEW: &str = "FlatView #0\r
 AS \"I/O\", root: io\r
  0000000000000000-0000000000000fff (prio 0, ram): pc.ram\r
\r
FlatView #1\r
 AS \"memory\", root: system\r
 AS \"cpu-memory-0\", root: system\r
 Root memory region: system\r
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM\r
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem\r
  00000000000e0000-00000000000fffff (prio 0, rom): pc.bios @0000000000020000\r
  0000000000100000-00000000001fffff (prio 0, ram): pc.ram @0000000000100000 KVM\r
  00000000fd000000-00000000fd00ffff (prio 1, ram): vga.vram\r
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios\r
  0000000100000000-00000001000fffff (prio 0, nv-ram): pc.ram @0000000000200000\r
\r
FlatView #2\r
  0000000000000000-0000000000000fff (prio 0, ram): pc.bios\r
";

    fn layout() -> RamLayout {
        crate::layout_of(&[
            ("pc.ram", BlockKind::Backend, 3 << 20),
            ("pc.bios", BlockKind::Stream, 256 << 10),
            ("0000:00:02.0/vga.vram", BlockKind::Stream, 64 << 10),
        ])
    }

    #[test]
    fn main_ram_and_firmware_are_kept_and_what_the_guest_moves_is_not() {
        let found = regions(VIEW, &layout()).unwrap();
        let all: Vec<_> =
            found.iter().map(|r| (r.start.0, r.len_bytes, &*r.block, r.offset_bytes)).collect();
        let expected = [
            (0, 0xa_0000, "pc.ram", 0),
            (0xe_0000, 0x2_0000, "pc.bios", 0x2_0000),
            (0x10_0000, 0x10_0000, "pc.ram", 0x10_0000),
            (0xfffc_0000, 0x4_0000, "pc.bios", 0),
            (0x1_0000_0000, 0x10_0000, "pc.ram", 0x20_0000),
        ];
        assert_eq!(all, expected);
        assert_eq!(block_of("vga.vram", &layout()).unwrap().1, "0000:00:02.0/vga.vram");
        assert!(block_of("ram", &layout()).is_none());
    }

    #[test]
    fn a_list_that_makes_no_sense_is_refused() {
        for (from, to) in [
            ("AS \"memory\"", "AS \"other\""),
            ("pc.ram", "another"),
            ("@0000000000200000", "@0000000000300000"),
            ("00000000001fffff", "00000000001ffffe"),
        ] {
            assert!(complete_regions(&VIEW.replace(from, to), &layout()).is_err(), "{from}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(tail in "[ 0-9a-f\\-(prio,amou)):@\n]{0,200}") {
            let _ = regions(&format!("AS \"memory\", root: system\n{tail}"), &layout());
            let _ = regions(&VIEW.replace("pc.ram", &tail), &layout());
        }
    }
}
