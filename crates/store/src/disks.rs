//! A checkpoint's disks: what it tells about them, and reading their blocks.
//!
//! A checkpoint holds the blocks that were written to a disk since its run began, above an image
//! that it does not hold. So it is worth as much as that image: what is told here is enough to see
//! that another is in its place.

use crate::checkpoint::CheckpointFile;
use crate::composed::PART_BYTES;
use crate::disk_map::{DiskMap, SPACE_PAGES_MAX};
use crate::hold::Held;
use crate::identity::PageRef;
use crate::meta::Meta;
use crate::store::Inner;
use crate::{Error, Result, Store};
use keyframe_units::{CheckpointId, PAGE_BYTES, Page, PageIndex, PageRange};
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;
use std::sync::Arc;

/// A disk that the guest can write to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskMeta {
    /// Its id or node name in the VM's line; in a group `MEMBER/NAME`.
    pub name: String,
    /// Bytes of the disk.
    pub disk_bytes: u64,
    /// The image beneath.
    pub base: BaseMeta,
    /// Blocks put into this checkpoint.
    pub counts: DiskCounts,
    /// It is no part of the checkpoint, as the user wanted it; `base` is then where it was.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left_out: bool,
}

impl DiskMeta {
    /// Its blocks: the last one may be a part of one.
    pub fn blocks(&self) -> u64 {
        self.disk_bytes.div_ceil(PAGE_BYTES as u64)
    }
}

/// The image beneath a disk, as it was when the run began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseMeta {
    /// Its absolute path; empty where there is none.
    pub path: String,
    /// `raw`, `qcow2`, or `blank`: no image, but zeros up to the disk's size.
    pub format: String,
    /// It and the images that it stands on: the first is the image itself.
    pub files: Vec<BaseFile>,
}

/// The format of a base that is no image.
pub const BLANK: &str = "blank";

impl BaseMeta {
    /// No image, but zeros.
    pub fn blank() -> Self {
        Self { format: BLANK.into(), ..Self::default() }
    }

    /// Whether it is no image, but zeros.
    pub fn is_blank(&self) -> bool {
        self.format == BLANK
    }
}

/// A file of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseFile {
    /// Its absolute path.
    pub path: String,
    /// Its length.
    pub len_bytes: u64,
    /// When it was changed last: seconds since 1970.
    pub modified_s: i64,
    /// And nanoseconds.
    pub modified_ns: u32,
    /// BLAKE3 of parts of it that are spread over its length, hexadecimal.
    pub sample_blake3: String,
}

/// Blocks of a disk in one checkpoint. `written_blocks` is the sum of the four counts that follow
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounts {
    /// Blocks written since the checkpoint before, of 4096 bytes each.
    pub written_blocks: u64,
    /// Of these: zeros.
    pub zero_blocks: u64,
    /// Of these: content that the store held already, of RAM or of a disk.
    pub dedup_blocks: u64,
    /// Of these: content that the block had already at the checkpoint before.
    pub unchanged_blocks: u64,
    /// Of these: content new to the store.
    pub stored_blocks: u64,
    /// Bytes appended to packs for them.
    pub stored_bytes: u64,
    /// Of the stored blocks: put together from parts that the store held already.
    pub composed_blocks: u64,
    /// What became of the sectors: eight for each block written.
    pub sectors: SectorCounts,
}

/// Sectors of 512 bytes of a disk, by what became of them. Each block written adds eight. `whole`:
/// as one of a block that the store held as a whole; `part`: alone, in a composed record. Whether
/// it is of a disk or of RAM is told by what brought the content into the store first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SectorCounts {
    /// All zeros: nothing is stored.
    pub zero_sectors: u64,
    /// In blocks that had this content already at the checkpoint before.
    pub unchanged_sectors: u64,
    /// Stored.
    pub not_deduplicated_sectors: u64,
    /// Found in blocks of disks.
    pub against_disk_whole_sectors: u64,
    /// Found in blocks of disks.
    pub against_disk_part_sectors: u64,
    /// Found in pages of RAM.
    pub against_ram_whole_sectors: u64,
    /// Found in pages of RAM.
    pub against_ram_part_sectors: u64,
}

impl AddAssign for SectorCounts {
    fn add_assign(&mut self, more: Self) {
        self.zero_sectors += more.zero_sectors;
        self.unchanged_sectors += more.unchanged_sectors;
        self.not_deduplicated_sectors += more.not_deduplicated_sectors;
        self.against_disk_whole_sectors += more.against_disk_whole_sectors;
        self.against_disk_part_sectors += more.against_disk_part_sectors;
        self.against_ram_whole_sectors += more.against_ram_whole_sectors;
        self.against_ram_part_sectors += more.against_ram_part_sectors;
    }
}

impl AddAssign for DiskCounts {
    fn add_assign(&mut self, more: Self) {
        self.written_blocks += more.written_blocks;
        self.zero_blocks += more.zero_blocks;
        self.dedup_blocks += more.dedup_blocks;
        self.unchanged_blocks += more.unchanged_blocks;
        self.stored_blocks += more.stored_blocks;
        self.stored_bytes += more.stored_bytes;
        self.composed_blocks += more.composed_blocks;
        self.sectors += more.sectors;
    }
}

/// Sectors, and bytes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sectors {
    /// How many.
    pub sectors: u64,
    /// 512 each.
    pub bytes: u64,
}

/// Sectors that the store held already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// In blocks found as a whole.
    pub whole: Sectors,
    /// Alone.
    pub parts: Sectors,
    /// Both.
    pub sectors: u64,
    /// Of both.
    pub bytes: u64,
}

/// What deduplication did for disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Breakdown {
    /// All zeros: nothing is stored.
    pub zero: Sectors,
    /// What the block had already at the checkpoint before.
    pub unchanged: Sectors,
    /// Stored.
    pub not_deduplicated: Sectors,
    /// What a disk had brought into the store.
    pub against_disk: Found,
    /// What RAM had brought into the store.
    pub against_ram: Found,
}

impl From<u64> for Sectors {
    fn from(sectors: u64) -> Self {
        Self { sectors, bytes: sectors * PART_BYTES as u64 }
    }
}

impl Breakdown {
    /// Of what was counted.
    pub fn of(counts: &DiskCounts) -> Self {
        let c = &counts.sectors;
        let found = |whole: u64, parts: u64| {
            let Sectors { sectors, bytes } = Sectors::from(whole + parts);
            Found { whole: whole.into(), parts: parts.into(), sectors, bytes }
        };
        let against_disk = found(c.against_disk_whole_sectors, c.against_disk_part_sectors);
        let against_ram = found(c.against_ram_whole_sectors, c.against_ram_part_sectors);
        Self {
            zero: c.zero_sectors.into(),
            unchanged: c.unchanged_sectors.into(),
            not_deduplicated: c.not_deduplicated_sectors.into(),
            against_disk,
            against_ram,
        }
    }
}

impl Meta {
    /// Pages of RAM and blocks of disks together; `None` where they are more than can be numbered.
    pub fn space_pages(&self) -> Option<u64> {
        space_pages(self.ram.len_pages(), &self.disks)
    }

    /// The numbers that the blocks of disk `index` have, behind the pages of RAM.
    pub fn blocks_of(&self, index: usize) -> Option<PageRange> {
        blocks_of(self.ram.len_pages(), &self.disks, index)
    }
}

pub(crate) fn space_pages(ram_pages: u64, disks: &[DiskMeta]) -> Option<u64> {
    let add = |sum: u64, disk: &DiskMeta| {
        sum.checked_add(disk.blocks()).filter(|n| *n <= SPACE_PAGES_MAX)
    };
    disks.iter().try_fold(ram_pages, add)
}

pub(crate) fn blocks_of(ram_pages: u64, disks: &[DiskMeta], index: usize) -> Option<PageRange> {
    let first = space_pages(ram_pages, disks.get(..index)?)?;
    Some(PageRange::new(PageIndex(first), disks.get(index)?.blocks()))
}

/// What a checkpoint knows of a block of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockContent {
    /// Nothing: it is as the image has it. The buffer is as it was.
    Base,
    /// It is zero. The buffer is as it was.
    Zero,
    /// Its content was put into the buffer.
    Data,
}

/// The disks of a sealed checkpoint, with the map of their blocks in memory. Blocks are read from
/// the store as they are asked for; several threads may do so at once.
#[derive(Debug)]
pub struct LoadedDisks {
    /// The checkpoint.
    pub id: CheckpointId,
    /// What it tells about itself.
    pub meta: Meta,
    inner: Arc<Inner>,
    map: DiskMap,
    /// Whatever a prune removes.
    _held: Held,
}

impl Store {
    /// Reads what a checkpoint knows of its disks.
    pub fn load_disks(&self, id: CheckpointId) -> Result<LoadedDisks> {
        let inner = Arc::clone(self.inner());
        let CheckpointFile { meta, .. } = inner.read_checkpoint(id)?;
        let (_, map, held) = inner.hold_maps(id, &meta)?;
        Ok(LoadedDisks { id, meta, inner, map, _held: held })
    }
}

impl LoadedDisks {
    /// Reads a block, numbered as [`Meta::blocks_of`] does.
    pub fn read_block(&self, block: PageIndex, into: &mut Page) -> Result<BlockContent> {
        match self.map.get(block) {
            None => Ok(BlockContent::Base),
            Some(PageRef::ZERO) => Ok(BlockContent::Zero),
            Some(record) => {
                self.inner.read_pages(&[(record, block)], &mut |_, content| {
                    *into = *content;
                    Ok::<_, Error>(())
                })?;
                Ok(BlockContent::Data)
            }
        }
    }

    /// Where a block is; `None`: nothing is known of it. Two of one record hold the same.
    pub(crate) fn record(&self, block: PageIndex) -> Option<PageRef> {
        self.map.get(block)
    }

    /// Shows all that is known of a range of blocks, rising: a record, or blocks that are zero.
    pub(crate) fn each(&self, range: PageRange, show: &mut dyn FnMut(PageRange, PageRef)) {
        self.map.each(range.first.0..range.end().0, show);
    }

    /// The first block, at or behind `from`, of which something is known.
    pub fn next_block(&self, from: PageIndex) -> Option<PageIndex> {
        self.map.next(from)
    }

    /// The first block, at or behind `from`, for which this and `other`, of the same VM, do not
    /// name one record: it may hold something else.
    pub fn next_differing(&self, other: &Self, mut from: PageIndex) -> Option<PageIndex> {
        loop {
            let next = self.next_block(from).into_iter().chain(other.next_block(from)).min()?;
            if self.record(next) != other.record(next) {
                return Some(next);
            }
            from = PageIndex(next.0.checked_add(1)?);
        }
    }

    /// Blocks of all disks of which something is known.
    pub fn known_blocks(&self) -> u64 {
        self.map.known_blocks()
    }
}
