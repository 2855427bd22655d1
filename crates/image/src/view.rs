//! The memory that the guest sees at each physical address: extents of pages in rising order, with
//! holes between them.
//!
//! ```text
//!   map (at the start)    │ pc.ram │ pc.rom │ pc.bios │ pc.ram ....... │      │ pc.bios │
//!                         0      768 KiB         1 MiB                                4 GiB
//!   PAM (this instant)             RAM, ROM in parts
//! ```
//!
//! Invariant: extents do not overlap, and each lies in one RAM block.

use crate::{Error, Result};
use keyframe_qemu_stream::LowMemoryPart;
use keyframe_units::{
    BlockKind, GuestPhys, GuestRegion, PAGE_BYTES, PageIndex, PageRange, RamLayout,
};

const PAGE: u64 = PAGE_BYTES as u64;
const SHADOW_START: u64 = 0xc_0000;
/// From this address to 1 MiB the guest sees the end of the firmware. Below it lie the video card's
/// and other devices' memory.
const FIRMWARE_START: u64 = 0xe_0000;
const SHADOW_END: u64 = 0x10_0000;
/// RAM of up to this size lies at address 0 in one piece, on every supported machine.
const FLAT_BYTES_MAX: u64 = 0x8000_0000;

/// Consecutive pages at adjacent guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestExtent {
    /// The guest-physical address of the first page.
    pub start: GuestPhys,
    /// The pages.
    pub pages: PageRange,
    /// True for main RAM, false for ROM.
    pub is_ram: bool,
}

impl GuestExtent {
    /// Returns the first guest-physical address after the extent.
    pub fn end(self) -> GuestPhys {
        GuestPhys(self.start.0 + self.pages.len_bytes())
    }
}

/// The memory of a checkpoint as the guest sees it: which page is at which guest-physical address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestView {
    extents: Vec<GuestExtent>,
}

impl GuestView {
    /// Returns the view of a checkpoint with the RAM blocks `layout`. `map` gives their addresses.
    /// Below 1 MiB `shadows` says where the guest sees RAM and where ROM; `None` if it sees there
    /// what `map` says.
    ///
    /// Errors: [`Error::Map`] if these contradict each other.
    pub fn new(
        layout: &RamLayout,
        map: &[GuestRegion],
        shadows: Option<&[LowMemoryPart]>,
    ) -> Result<Self> {
        let mut extents = Vec::new();
        for region in map {
            extents.push(extent(layout, region)?);
        }
        if let Some(shadows) = shadows {
            let low = extents.iter().find(|e| e.is_ram && e.start.0 == 0).copied();
            extents = extents.into_iter().flat_map(without_shadow).collect();
            extents.extend(shadows.iter().filter_map(|s| shadow(layout, low, s)));
        }
        extents.sort_by_key(|e| e.start);
        if let Some(pair) = extents.windows(2).find(|w| w[0].end() > w[1].start) {
            return Err(Error::Map { problem: format!("two RAM blocks at {}", pair[1].start) });
        }
        Ok(Self { extents: merged(extents) })
    }

    /// Returns the guest map of a machine whose checkpoint does not have one. This is possible if
    /// the machine type is known and main RAM is one block of at most 2 GiB, so that it begins at
    /// address 0. `line` has the words of the VM's command line.
    ///
    /// Error: [`Error::NoMap`] for another machine, and for a command line with `max-ram-below-4g`.
    pub fn flat_map(
        layout: &RamLayout,
        machine_type: &str,
        line: &[String],
    ) -> Result<Vec<GuestRegion>> {
        let fail = |reason: String| Error::NoMap { reason };
        if !["pc", "q35", "microvm"].iter().any(|known| machine_type.contains(known)) {
            return Err(fail(format!("machine type {machine_type} is not known")));
        }
        if line.iter().any(|word| word.contains("max-ram-below-4g")) {
            return Err(fail("its line has max-ram-below-4g".into()));
        }
        let mut ram = layout.blocks().iter().filter(|b| b.kind == BlockKind::Backend);
        let (Some(main), None) = (ram.next(), ram.next()) else {
            return Err(fail("its RAM is in several blocks".into()));
        };
        if main.total_bytes > FLAT_BYTES_MAX {
            return Err(fail(format!(
                "its RAM of {} bytes may lie in two pieces",
                main.total_bytes
            )));
        }
        let region = |start: u64, block: &str, len_bytes: u64| GuestRegion {
            start: GuestPhys(start),
            len_bytes,
            block: block.into(),
            offset_bytes: 0,
        };
        let mut map = vec![region(0, &main.name, main.total_bytes)];
        let firmware =
            layout.blocks().iter().find(|b| b.name == "pc.bios" && b.total_bytes <= 16 << 20);
        map.extend(firmware.map(|b| region((4 << 30) - b.total_bytes, &b.name, b.total_bytes)));
        Ok(map)
    }

    /// Returns the extents, sorted by guest-physical address.
    pub fn extents(&self) -> &[GuestExtent] {
        &self.extents
    }

    /// Returns the first guest-physical address after main RAM; 0 if there is none.
    pub fn ram_end(&self) -> GuestPhys {
        self.extents.iter().rev().find(|e| e.is_ram).map_or(GuestPhys(0), |e| e.end())
    }
}

fn extent(layout: &RamLayout, region: &GuestRegion) -> Result<GuestExtent> {
    let fail =
        |problem: &str| Error::Map { problem: format!("RAM block {} {problem}", region.block) };
    let number = layout.blocks().iter().position(|b| b.name == region.block);
    let number = number.ok_or_else(|| fail("does not exist"))?;
    let within = region.offset_bytes.checked_add(region.len_bytes);
    let pages = layout.pages_of(number);
    let fits = within.is_some_and(|end| end <= pages.len_bytes())
        && region.start.0.checked_add(region.len_bytes).is_some_and(|end| end < 1 << 52)
        && [region.start.0, region.len_bytes, region.offset_bytes]
            .iter()
            .all(|n| n.is_multiple_of(PAGE));
    if !fits {
        return Err(fail(&format!(
            "does not have {} bytes for {}",
            region.len_bytes, region.start
        )));
    }
    let first = PageIndex(pages.first.0 + region.offset_bytes / PAGE);
    let is_ram = layout.blocks().get(number).is_some_and(|b| b.kind == BlockKind::Backend);
    Ok(GuestExtent {
        start: region.start,
        pages: PageRange::new(first, region.len_bytes / PAGE),
        is_ram,
    })
}

/// The parts of an extent below and above the addresses that shadows describe.
fn without_shadow(extent: GuestExtent) -> impl Iterator<Item = GuestExtent> {
    let below = part(extent, extent.start.0, extent.end().0.min(SHADOW_START));
    let above = part(extent, extent.start.0.max(SHADOW_END), extent.end().0);
    below.into_iter().chain(above)
}

/// The part of an extent from `start` to `end`, which lie in it; `None` if it is empty.
fn part(extent: GuestExtent, start: u64, end: u64) -> Option<GuestExtent> {
    let len_pages = end.checked_sub(start)? / PAGE;
    let first = PageIndex(extent.pages.first.0 + (start - extent.start.0) / PAGE);
    (len_pages > 0).then_some(GuestExtent {
        start: GuestPhys(start),
        pages: PageRange::new(first, len_pages),
        ..extent
    })
}

/// The RAM under `shadow`, or the ROM that the guest sees there.
fn shadow(
    layout: &RamLayout,
    low: Option<GuestExtent>,
    shadow: &LowMemoryPart,
) -> Option<GuestExtent> {
    let (start, end) = (shadow.start.0, shadow.start.0 + shadow.len_bytes);
    if shadow.is_ram {
        let low = low?;
        // The map ends main RAM at the first ROM. The RAM block continues under the ROM.
        let (number, offset) = layout.locate(low.pages.first)?;
        let whole = PageRange::new(low.pages.first, layout.pages_of(number).len_pages - offset);
        return part(GuestExtent { pages: whole, ..low }, start, end)
            .filter(|e| e.end().0 <= whole.len_bytes());
    }
    let rom = |name: &str| {
        layout.blocks().iter().position(|b| b.name == name).map(|n| layout.pages_of(n))
    };
    let (pages, origin) = if start < FIRMWARE_START {
        (rom("pc.rom")?, SHADOW_START)
    } else {
        let pages = rom("pc.bios")?;
        let shown = pages.len_pages.min((SHADOW_END - FIRMWARE_START) / PAGE);
        (PageRange::new(PageIndex(pages.end().0 - shown), shown), SHADOW_END - shown * PAGE)
    };
    let whole = GuestExtent { start: GuestPhys(origin), pages, is_ram: false };
    part(whole, start.max(origin), end.min(whole.end().0))
}

/// Joins extents that are adjacent both in the guest and in the checkpoint.
fn merged(extents: Vec<GuestExtent>) -> Vec<GuestExtent> {
    let mut all: Vec<GuestExtent> = Vec::with_capacity(extents.len());
    for extent in extents {
        match all.last_mut() {
            Some(last)
                if last.end() == extent.start
                    && last.pages.end() == extent.pages.first
                    && last.is_ram == extent.is_ram =>
            {
                last.pages.len_pages += extent.pages.len_pages;
            }
            _ => all.push(extent),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::RamBlock;
    use proptest::prelude::*;

    const KIB: u64 = 1 << 10;

    fn layout() -> RamLayout {
        let block = |name: &str, kind, bytes| RamBlock {
            name: name.into(),
            kind,
            used_bytes: bytes,
            total_bytes: bytes,
        };
        RamLayout::new(vec![
            block("pc.ram", BlockKind::Backend, 2048 * KIB),
            block("pc.bios", BlockKind::Stream, 256 * KIB),
            block("pc.rom", BlockKind::Stream, 128 * KIB),
        ])
        .unwrap()
    }

    fn region(start: u64, len_bytes: u64, block: &str, offset_bytes: u64) -> GuestRegion {
        GuestRegion { start: GuestPhys(start), len_bytes, block: block.into(), offset_bytes }
    }

    fn at_start() -> Vec<GuestRegion> {
        vec![
            region(0, 768 * KIB, "pc.ram", 0),
            region(768 * KIB, 128 * KIB, "pc.rom", 0),
            region(896 * KIB, 128 * KIB, "pc.bios", 128 * KIB),
            region(1024 * KIB, 1024 * KIB, "pc.ram", 1024 * KIB),
        ]
    }

    fn shadows(is_ram: impl Fn(u64) -> bool) -> Vec<LowMemoryPart> {
        (0..16)
            .map(|k| LowMemoryPart {
                start: GuestPhys(SHADOW_START + k * 0x4000),
                len_bytes: 0x4000,
                is_ram: is_ram(k),
            })
            .collect()
    }

    /// The page at an address, naively.
    fn seen(view: &GuestView, address: u64) -> Option<u64> {
        let hit = view.extents().iter().find(|e| e.start.0 <= address && address < e.end().0)?;
        Some(hit.pages.first.0 + (address - hit.start.0) / PAGE)
    }

    proptest! {
        #[test]
        fn each_part_below_1_mib_is_ram_or_rom_as_the_chip_set_says(bits in any::<u16>()) {
            let view = GuestView::new(&layout(), &at_start(), Some(&shadows(|k| bits >> k & 1 != 0))).unwrap();
            for page in 0..512u64 {
                let address = page * PAGE;
                let in_rom = |address: u64| {
                    if address < FIRMWARE_START { 512 + 64 + (address - SHADOW_START) / PAGE } else { 512 + 32 + (address - FIRMWARE_START) / PAGE }
                };
                let shadowed = (SHADOW_START..SHADOW_END).contains(&address);
                let rom = shadowed && bits >> ((address - SHADOW_START) / 0x4000) & 1 == 0;
                prop_assert_eq!(seen(&view, address), Some(if rom { in_rom(address) } else { page }));
            }
            prop_assert_eq!(view.ram_end(), GuestPhys(2048 * KIB));
        }
    }

    #[test]
    fn all_ram_below_1_mib_is_one_extent() {
        let view = GuestView::new(&layout(), &at_start(), Some(&shadows(|_| true))).unwrap();
        assert_eq!(view.extents().len(), 1);
    }

    #[test]
    fn maps_that_do_not_fit_are_refused() {
        for bad in [
            region(0, 4096, "other", 0),
            region(0, 4096 * KIB, "pc.ram", 0),
            region(100, 4096, "pc.ram", 0),
            region(0, 4096, "pc.ram", u64::MAX - 4095),
            region(u64::MAX - 4095, 4096, "pc.ram", 0),
        ] {
            assert!(matches!(GuestView::new(&layout(), &[bad], None), Err(Error::Map { .. })));
        }
        let twice = [region(0, 8192, "pc.ram", 0), region(4096, 4096, "pc.bios", 0)];
        assert!(GuestView::new(&layout(), &twice, None).is_err());
    }

    #[test]
    fn only_a_certain_map_is_worked_out() {
        let line = ["qemu".to_owned(), "-m".into()];
        let map = GuestView::flat_map(&layout(), "pc-i440fx-7.2", &line).unwrap();
        assert_eq!(map[0], region(0, 2048 * KIB, "pc.ram", 0));
        assert!(
            GuestView::flat_map(&layout(), "isapc", &["-machine pc,max-ram-below-4g=1G".into()])
                .is_err()
        );
        assert!(GuestView::flat_map(&layout(), "virt", &line).is_err());
    }
}
