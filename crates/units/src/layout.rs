//! The RAM blocks of a VM and their places in its linear page space.

use crate::{PAGE_BYTES, PageIndex, PageRange};
use serde::{Deserialize, Serialize};

/// The way in which a restore gives a RAM block back to the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockKind {
    /// Guest RAM. The new VMM process gets it as a memory backend that already holds the pages.
    Backend,
    /// Video RAM, ROMs and firmware tables. The new VMM process reads them from the device stream.
    Stream,
}

/// One RAM block of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// The VMM's name of the block, as `pc.ram`, `0000:00:02.0/vga.vram` or `/rom@etc/acpi/tables`.
    pub name: String,
    /// The way in which a restore gives the block back.
    pub kind: BlockKind,
    /// The bytes in use now. QEMU grows some ROM blocks while the guest runs.
    pub used_bytes: u64,
    /// The number of bytes reserved, a multiple of [`PAGE_BYTES`]. `used_bytes` never exceeds it.
    pub total_bytes: u64,
}

/// The reason why a list of RAM blocks is not a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// A block's reserved size is zero or not a multiple of [`PAGE_BYTES`].
    Size {
        /// The name of the block.
        name: String,
        /// The reserved size of the block in bytes.
        total_bytes: u64,
    },
    /// A block uses more bytes than it reserves.
    Used {
        /// The name of the block.
        name: String,
    },
    /// Two blocks have the same name.
    Duplicate {
        /// The name of both blocks.
        name: String,
    },
    /// All blocks together exceed 2^40 pages.
    TooLarge,
}

impl std::fmt::Display for LayoutError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Size { name, total_bytes } => {
                write!(
                    f,
                    "RAM block {name}: {total_bytes} bytes is not a multiple of the page size"
                )
            }
            Self::Used { name } => write!(f, "RAM block {name}: uses more bytes than it reserves"),
            Self::Duplicate { name } => write!(f, "RAM block {name} is listed twice"),
            Self::TooLarge => write!(f, "the RAM blocks together exceed 2^40 pages"),
        }
    }
}

impl std::error::Error for LayoutError {}

const PAGES_MAX: u64 = 1 << 40;

/// The RAM blocks of a VM, laid end to end in list order. The order defines every [`PageIndex`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<RamBlock>", into = "Vec<RamBlock>")]
pub struct RamLayout {
    blocks: Vec<RamBlock>,
    /// The first page of each block, then the number of all pages.
    firsts: Vec<u64>,
}

impl RamLayout {
    /// Creates the layout in which the blocks lie end to end. Error: [`LayoutError`] if a size or a
    /// name is invalid.
    pub fn new(blocks: Vec<RamBlock>) -> Result<Self, LayoutError> {
        let mut firsts = Vec::with_capacity(blocks.len() + 1);
        let mut next = 0u64;
        for (i, block) in blocks.iter().enumerate() {
            let name = || block.name.clone();
            if block.total_bytes == 0 || !block.total_bytes.is_multiple_of(PAGE_BYTES as u64) {
                return Err(LayoutError::Size { name: name(), total_bytes: block.total_bytes });
            }
            if block.used_bytes > block.total_bytes {
                return Err(LayoutError::Used { name: name() });
            }
            if blocks[..i].iter().any(|b| b.name == block.name) {
                return Err(LayoutError::Duplicate { name: name() });
            }
            firsts.push(next);
            next = next
                .checked_add(block.total_bytes / PAGE_BYTES as u64)
                .filter(|n| *n <= PAGES_MAX)
                .ok_or(LayoutError::TooLarge)?;
        }
        firsts.push(next);
        Ok(Self { blocks, firsts })
    }

    /// Returns the blocks in page order.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Returns the number of pages of all blocks.
    pub fn len_pages(&self) -> u64 {
        self.firsts[self.blocks.len()]
    }

    /// Returns the number of bytes of all blocks.
    pub fn len_bytes(&self) -> u64 {
        self.len_pages() * PAGE_BYTES as u64
    }

    /// Returns the pages of block number `block`. Panics if there is no such block.
    pub fn pages_of(&self, block: usize) -> PageRange {
        PageRange::new(PageIndex(self.firsts[block]), self.firsts[block + 1] - self.firsts[block])
    }

    /// Returns the number of the block that holds `page`, and the offset of the page in that block,
    /// in pages. Returns `None` if `page` lies outside the layout.
    pub fn locate(&self, page: PageIndex) -> Option<(usize, u64)> {
        if page.0 >= self.len_pages() {
            return None;
        }
        let block = self.firsts.partition_point(|first| *first <= page.0) - 1;
        Some((block, page.0 - self.firsts[block]))
    }

    /// Returns true if both layouts define the same page space: the same names, kinds and reserved
    /// sizes in the same order. The bytes in use may differ.
    pub fn same_space(&self, other: &Self) -> bool {
        let key = |b: &RamBlock| (b.kind, b.total_bytes);
        self.blocks.len() == other.blocks.len()
            && self
                .blocks
                .iter()
                .zip(&other.blocks)
                .all(|(a, b)| a.name == b.name && key(a) == key(b))
    }
}

impl TryFrom<Vec<RamBlock>> for RamLayout {
    type Error = LayoutError;
    fn try_from(blocks: Vec<RamBlock>) -> Result<Self, LayoutError> {
        Self::new(blocks)
    }
}

impl From<RamLayout> for Vec<RamBlock> {
    fn from(layout: RamLayout) -> Self {
        layout.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, pages: u64) -> RamBlock {
        let bytes = pages * PAGE_BYTES as u64;
        RamBlock {
            name: name.into(),
            kind: BlockKind::Stream,
            used_bytes: bytes,
            total_bytes: bytes,
        }
    }

    #[test]
    fn every_page_is_located_in_the_block_that_lists_it() {
        let layout = RamLayout::new(vec![block("a", 3), block("b", 1), block("c", 5)]).unwrap();
        assert_eq!(layout.len_pages(), 9);
        let located: Vec<_> = (0..10).map(|p| layout.locate(PageIndex(p))).collect();
        let expected = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)];
        assert_eq!(located[..9], expected.map(Some));
        assert_eq!(located[9], None);
    }

    #[test]
    fn impossible_blocks_are_refused() {
        let mut odd = block("a", 1);
        odd.total_bytes = 5000;
        assert!(matches!(RamLayout::new(vec![odd]), Err(LayoutError::Size { .. })));
        let mut over = block("a", 1);
        over.used_bytes = 5000;
        assert!(matches!(RamLayout::new(vec![over]), Err(LayoutError::Used { .. })));
        assert!(matches!(
            RamLayout::new(vec![block("a", 1), block("a", 2)]),
            Err(LayoutError::Duplicate { .. })
        ));
        assert_eq!(RamLayout::new(vec![block("a", PAGES_MAX + 1)]), Err(LayoutError::TooLarge));
    }
}
