//! A checkpoint's disks: what it tells about them, and reading their blocks.
//!
//! A checkpoint holds the blocks that were written to a disk since its run began, above an image that it does not hold.
//! So it is worth as much as that image: what is told here is enough to see that another is in its place.

use crate::checkpoint::CheckpointFile;
use crate::disk_map::{DiskMap, SPACE_PAGES_MAX};
use crate::identity::PageRef;
use crate::meta::Meta;
use crate::store::Inner;
use crate::{Error, Result, Store};
use keyframe_units::{CheckpointId, PAGE_BYTES, Page, PageIndex, PageRange};
use serde::{Deserialize, Serialize};
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

/// Blocks of a disk in one checkpoint. `written_blocks` is the sum of the four counts that follow it.
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
    let add = |sum: u64, disk: &DiskMeta| sum.checked_add(disk.blocks()).filter(|n| *n <= SPACE_PAGES_MAX);
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

/// The disks of a sealed checkpoint, with the map of their blocks in memory. Blocks are read from the store as they are
/// asked for; several threads may do so at once.
#[derive(Debug)]
pub struct LoadedDisks {
    /// The checkpoint.
    pub id: CheckpointId,
    /// What it tells about itself.
    pub meta: Meta,
    inner: Arc<Inner>,
    map: DiskMap,
}

impl Store {
    /// Reads what a checkpoint knows of its disks.
    pub fn load_disks(&self, id: CheckpointId) -> Result<LoadedDisks> {
        let inner = Arc::clone(self.inner());
        let CheckpointFile { meta, .. } = inner.read_checkpoint(id)?;
        let map = inner.read_maps(&meta)?.1;
        Ok(LoadedDisks { id, meta, inner, map })
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

    /// The first block, at or behind `from`, of which something is known.
    pub fn next_block(&self, from: PageIndex) -> Option<PageIndex> {
        self.map.next(from)
    }

    /// Blocks of all disks of which something is known.
    pub fn known_blocks(&self) -> u64 {
        self.map.known_blocks()
    }
}
