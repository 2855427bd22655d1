//! Which RAM blocks a VM has and where each begins in its linear page space.

use crate::{PAGE_BYTES, PageIndex, PageRange};
use serde::{Deserialize, Serialize};

/// How a block comes back at a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockKind {
    /// RAM behind a memory backend: handed to the new QEMU as a backend that already holds its
    /// pages.
    Backend,
    /// Video RAM, ROMs, firmware tables: given back inside the device stream.
    Stream,
}

/// One of QEMU's RAM blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// QEMU's name of the block (`pc.ram`, `0000:00:02.0/vga.vram`, `/rom@etc/acpi/tables`).
    pub name: String,
    /// How it is given back.
    pub kind: BlockKind,
    /// Bytes in use now; QEMU grows some ROM blocks while the guest runs.
    pub used_bytes: u64,
    /// Bytes reserved: the most that `used_bytes` can become. A multiple of the page size.
    pub total_bytes: u64,
}

/// Why a list of blocks is no layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// A block's size is zero or no multiple of the page size.
    Size {
        /// The block.
        name: String,
        /// Its size.
        total_bytes: u64,
    },
    /// A block uses more than it reserves.
    Used {
        /// The block.
        name: String,
    },
    /// Two blocks of one name.
    Duplicate {
        /// The name.
        name: String,
    },
    /// The sum of the sizes overflows the page space (2^40 pages).
    TooLarge,
}

impl std::fmt::Display for LayoutError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Size { name, total_bytes } => {
                write!(f, "RAM block {name}: {total_bytes} bytes is no whole number of pages")
            }
            Self::Used { name } => write!(f, "RAM block {name}: uses more bytes than it reserves"),
            Self::Duplicate { name } => write!(f, "RAM block {name} is listed twice"),
            Self::TooLarge => write!(f, "the RAM blocks together exceed 2^40 pages"),
        }
    }
}

impl std::error::Error for LayoutError {}

const PAGES_MAX: u64 = 1 << 40;

/// The RAM blocks of a VM, end to end. The order is that of the list; it fixes every [`PageIndex`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<RamBlock>", into = "Vec<RamBlock>")]
pub struct RamLayout {
    blocks: Vec<RamBlock>,
    /// First page of each block, and behind the last one the number of all pages.
    firsts: Vec<u64>,
}

impl RamLayout {
    /// Lays the blocks end to end.
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

    /// The blocks, in page order.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Pages of all blocks together.
    pub fn len_pages(&self) -> u64 {
        self.firsts[self.blocks.len()]
    }

    /// Bytes of all blocks together.
    pub fn len_bytes(&self) -> u64 {
        self.len_pages() * PAGE_BYTES as u64
    }

    /// The pages of block number `block`.
    pub fn pages_of(&self, block: usize) -> PageRange {
        PageRange::new(PageIndex(self.firsts[block]), self.firsts[block + 1] - self.firsts[block])
    }

    /// The number of the block that holds `page` and the page's offset in it, in pages.
    pub fn locate(&self, page: PageIndex) -> Option<(usize, u64)> {
        if page.0 >= self.len_pages() {
            return None;
        }
        let block = self.firsts.partition_point(|first| *first <= page.0) - 1;
        Some((block, page.0 - self.firsts[block]))
    }

    /// True where both describe the same page space: same blocks, kinds and reserved sizes in the
    /// same order (the bytes in use may differ).
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
