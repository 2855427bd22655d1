//! Which machines a checkpoint can go on in.

use super::machine::same_blocks;
use super::*;
use keyframe_units::{PageIndex, RamBlock, RamLayout};

fn layout(blocks: &[(&str, BlockKind, u64)]) -> RamLayout {
    let block = |(name, kind, pages): &(&str, BlockKind, u64)| RamBlock {
        name: (*name).into(),
        kind: *kind,
        used_bytes: 4096,
        total_bytes: pages * 4096,
    };
    RamLayout::new(blocks.iter().map(block).collect()).unwrap()
}

#[test]
fn a_machine_with_other_blocks_is_a_different_machine() {
    use BlockKind::{Backend, Stream};
    let ours = layout(&[("pc.ram", Backend, 8), ("pc.bios", Stream, 2)]);
    same_blocks(&ours, &layout(&[("pc.bios", Stream, 2), ("pc.ram", Backend, 8)])).unwrap();
    for other in [
        layout(&[("pc.ram", Backend, 8)]),
        layout(&[("pc.ram", Backend, 8), ("pc.bios", Stream, 1)]),
        layout(&[("pc.ram", Backend, 8), ("pc.bios", Backend, 2)]),
        layout(&[("pc.ram", Backend, 8), ("pc.bios", Stream, 2), ("vga.vram", Stream, 1)]),
    ] {
        assert!(matches!(same_blocks(&ours, &other), Err(Error::DifferentMachine { .. })));
    }
}

#[test]
fn pages_are_given_rising_whatever_the_sources_order() {
    struct Falling;
    impl RamSource for Falling {
        fn read(
            &self,
            range: PageRange,
            sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
        ) -> io::Result<()> {
            let mut pages: Vec<_> = range.iter().filter(|p| p.0 % 3 == 0).collect();
            pages.reverse();
            pages.into_iter().try_for_each(|p| sink(p, &[p.0 as u8 | 1; PAGE_BYTES]))
        }
    }
    let mut seen = Vec::new();
    let range = PageRange::new(PageIndex(100), 2 * 1024 + 5);
    read_ascending(&Falling, range, &mut |offset, page| {
        assert_eq!(page[0], (offset / 4096 + 100) as u8 | 1);
        seen.push(offset / 4096 + 100);
        Ok(())
    })
    .unwrap();
    let expected: Vec<u64> = range.iter().map(|p| p.0).filter(|p| p % 3 == 0).collect();
    assert_eq!(seen, expected);
}
