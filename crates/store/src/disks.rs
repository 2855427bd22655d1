//! Reading the disks of a checkpoint.

use crate::hold::Held;
use crate::open_store::OpenStore;
use crate::store::Store;
use crate::{Error, Result};
use keyframe_store_format::checkpoint::CheckpointFile;
use keyframe_store_format::disk_map::DiskMap;
use keyframe_store_format::meta::Meta;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{CheckpointId, Page, PageIndex, PageRange};
use std::sync::Arc;

/// The content of a block of a disk in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockContent {
    /// The checkpoint holds nothing: the image beneath holds the block. The buffer is unchanged.
    Base,
    /// The block is zero. The buffer is unchanged.
    Zero,
    /// The content of the block, which is now in the buffer.
    Data,
}

/// The disks of a sealed checkpoint, with the map of their blocks in memory. Each block is read
/// from the store on request. Several threads may read at once.
#[derive(Debug)]
pub struct LoadedDisks {
    /// The number of the checkpoint.
    pub id: CheckpointId,
    /// The description of the checkpoint.
    pub meta: Meta,
    inner: Arc<OpenStore>,
    map: DiskMap,
    /// Keeps the packs open if a prune removes them.
    _held: Held,
}

impl Store {
    /// Returns the disks of checkpoint `id`, with the map of their blocks in memory. Error: the
    /// checkpoint does not exist, or its map cannot be read.
    pub fn load_disks(&self, id: CheckpointId) -> Result<LoadedDisks> {
        let inner = Arc::clone(self.inner());
        let CheckpointFile { meta, .. } = inner.read_checkpoint(id)?;
        let (_, map, held) = inner.hold_maps(id, &meta)?;
        Ok(LoadedDisks { id, meta, inner, map, _held: held })
    }
}

impl LoadedDisks {
    /// Reads a block, numbered as [`Meta::blocks_of`] does, into `into`. Error: its record cannot
    /// be read, or is damaged.
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

    /// The record of a block; `None` if the image holds the block. Blocks with the same record have
    /// the same content.
    pub(crate) fn record(&self, block: PageIndex) -> Option<PageRef> {
        self.map.get(block)
    }

    /// Calls `show` for all written blocks of a range, rising: one block and its record, or a range
    /// and [`PageRef::ZERO`].
    pub(crate) fn each(&self, range: PageRange, show: &mut dyn FnMut(PageRange, PageRef)) {
        self.map.each(range.first.0..range.end().0, show);
    }

    /// Returns the first block at or after `from` that was written; `None` if there is none.
    pub fn next_block(&self, from: PageIndex) -> Option<PageIndex> {
        self.map.next(from)
    }

    /// Returns the first block at or after `from` whose record differs from the one in `other`,
    /// another checkpoint of the same VM; `None` if there is none. The contents of such blocks may
    /// still be equal.
    pub fn next_differing(&self, other: &Self, mut from: PageIndex) -> Option<PageIndex> {
        loop {
            let next = self.next_block(from).into_iter().chain(other.next_block(from)).min()?;
            if self.record(next) != other.record(next) {
                return Some(next);
            }
            from = PageIndex(next.0.checked_add(1)?);
        }
    }

    /// Returns the number of written blocks of all disks.
    pub fn known_blocks(&self) -> u64 {
        self.map.known_blocks()
    }
}
