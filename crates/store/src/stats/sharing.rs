//! Shared records: within an image, across checkpoints, across VMs, between RAM and disks.
//!
//! ```text
//!   all checkpoints ─▶ live records ───────────────────────▶ unique, against the sum of all images
//!   newest checkpoint of each VM ─▶ records of RAM, of disks ─▶ more than once in it? in another VM's? on a disk?
//! ```
//!
//! Reads every map once, and the newest image of each VM whole. Memory: eight bytes for each live
//! record, some forty for each page of those images.

use crate::pack_shape::PackShape;
use crate::prune::Live;
use crate::{Result, Store};
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{CheckpointId, PAGE_BYTES};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The content that the newest checkpoint of a VM shares with other VMs and disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSharing {
    /// The VM.
    pub vm: String,
    /// Its newest checkpoint.
    pub checkpoint: CheckpointId,
    /// The number of pages of RAM that are not zero.
    pub ram_pages: u64,
    /// The number of distinct contents among these pages.
    pub ram_unique_pages: u64,
    /// The number of distinct contents that are also in the newest checkpoint of another VM, in RAM
    /// or on a disk.
    pub with_other_vms_pages: u64,
    /// The number of distinct contents that are also on a disk of this VM, as a whole block.
    pub with_disks_pages: u64,
    /// The number of blocks of its disks that the store holds and that are not zero.
    pub disk_blocks: u64,
    /// The number of distinct contents among these blocks.
    pub disk_unique_blocks: u64,
}

/// The content that the checkpoints of a store share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sharing {
    /// The size of the RAM of all checkpoints, each counted whole, in bytes.
    pub raw_bytes: u64,
    /// The size of the distinct contents that some checkpoint needs, uncompressed, in bytes.
    pub unique_bytes: u64,
    /// The size of these contents in the packs, compressed, in bytes.
    pub unique_stored_bytes: u64,
    /// The number of bytes in packs that no checkpoint needs. A prune frees them.
    pub unused_bytes: u64,
    /// What the newest checkpoint of each VM shares.
    pub images: Vec<ImageSharing>,
}

impl Store {
    /// Returns the amount of content that checkpoints share. Error: [`crate::Error::Unreadable`] if
    /// the records that a checkpoint needs are not known.
    pub fn sharing(&self) -> Result<Sharing> {
        let inner = self.inner();
        let mut sharing = Sharing::default();
        let mut newest = BTreeMap::<String, CheckpointId>::new();
        for sealed in self.checkpoints()?.sealed {
            sharing.raw_bytes += sealed.meta.ram.len_bytes();
            newest.insert(sealed.meta.vm, sealed.id);
        }
        let mut live = Live::find(inner)?;
        let numbers = inner.pack_numbers()?;
        for number in &numbers {
            if let Some(shape) = PackShape::of(inner, *number)? {
                live.close(inner, &shape)?;
            }
        }
        live.settle();
        for number in numbers {
            let wanted = live.offsets(number);
            sharing.unique_bytes += (wanted.len() * PAGE_BYTES) as u64;
            if let Some(shape) = PackShape::of(inner, number)? {
                let usage = shape.usage(wanted);
                sharing.unique_stored_bytes += usage.live_bytes;
                sharing.unused_bytes += usage.unused_bytes();
            }
        }
        sharing.images = self.images(newest)?;
        Ok(sharing)
    }

    fn images(&self, newest: BTreeMap<String, CheckpointId>) -> Result<Vec<ImageSharing>> {
        let mut images = Vec::with_capacity(newest.len());
        let mut sets = Vec::with_capacity(newest.len());
        // The number of images with each record.
        let mut owners = FxHashMap::<PageRef, u32>::default();
        for (vm, checkpoint) in newest {
            let meta = self.inner().read_checkpoint(checkpoint)?.meta;
            let (ram, disks, _held) = self.inner().hold_maps(checkpoint, &meta)?;
            let ram: Vec<PageRef> = ram.iter().map(|(_, to)| to).collect();
            let disks: Vec<PageRef> = disks.records().collect();
            let (ram_pages, disk_blocks) = (ram.len() as u64, disks.len() as u64);
            let ram: FxHashSet<PageRef> = ram.into_iter().collect();
            let disks: FxHashSet<PageRef> = disks.into_iter().collect();
            for record in ram.union(&disks) {
                *owners.entry(*record).or_default() += 1;
            }
            images.push(ImageSharing {
                vm,
                checkpoint,
                ram_pages,
                ram_unique_pages: ram.len() as u64,
                with_disks_pages: ram.intersection(&disks).count() as u64,
                disk_blocks,
                disk_unique_blocks: disks.len() as u64,
                with_other_vms_pages: 0,
            });
            sets.push(ram);
        }
        for (image, ram) in images.iter_mut().zip(sets) {
            let shared = |record: &&PageRef| owners.get(*record).is_some_and(|owners| *owners > 1);
            image.with_other_vms_pages = ram.iter().filter(shared).count() as u64;
        }
        Ok(images)
    }
}
