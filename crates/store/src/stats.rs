//! The contents of a store, in numbers.

mod growth;
mod sharing;

pub use growth::{CheckpointGrowth, Growth, HourGrowth};
pub use sharing::{ImageSharing, Sharing};

use crate::{DiskCounts, Result, SectorBreakdown, Store};
use keyframe_store_backend::layout;
use keyframe_units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The contents of a store. Page and byte counts are sums of the [`crate::Counts`] of checkpoints,
/// measured when each was taken. File sizes are those on disk now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// The number of sealed checkpoints that can be read; the sums are over these.
    pub checkpoints: u64,
    /// The number of checkpoints whose file cannot be read.
    pub unreadable: u64,
    /// The number of distinct runs that they belong to.
    pub runs: u64,
    /// The sum of the RAM sizes of all checkpoints: the size of full copies.
    pub raw_bytes: u64,
    /// The size of all pages put into checkpoints, in bytes: that of copies of only the changes.
    pub dirty_bytes: u64,
    /// The number of put pages that are all zeros.
    pub zero_pages: u64,
    /// The number of put pages whose content the store already held.
    pub dedup_pages: u64,
    /// The number of deduplicated pages whose content a disk brought into the store.
    pub dedup_disk_pages: u64,
    /// The number of put pages whose content the page held already.
    pub unchanged_pages: u64,
    /// The number of put pages whose content was new to the store.
    pub stored_pages: u64,
    /// The number of bytes appended to packs for the checkpoints.
    pub stored_bytes: u64,
    /// The size of all blocks of disks put into checkpoints, in bytes.
    pub disk_dirty_bytes: u64,
    /// The number of bytes appended to packs for these blocks.
    pub disk_stored_bytes: u64,
    /// The sectors of the blocks, by how each was stored.
    pub disk_sectors: SectorBreakdown,
    /// The size of all packs in bytes, indexes and unreferenced records included.
    pub pack_bytes: u64,
    /// The size of all map files in bytes.
    pub map_bytes: u64,
    /// The size of all device states as stored (within the checkpoint files), in bytes.
    pub device_bytes: u64,
    /// The size of all checkpoint files in bytes.
    pub checkpoint_file_bytes: u64,
    /// The size of packs, maps, checkpoints and tags together, in bytes.
    pub total_bytes: u64,
    /// The number of put pages that are not zero, divided by the number of stored pages; absent if
    /// none was stored.
    pub dedup_ratio: Option<f64>,
    /// The size of the stored pages, uncompressed, divided by the number of bytes appended to
    /// packs; absent if none was stored.
    pub compression_ratio: Option<f64>,
    /// `raw_bytes` divided by `total_bytes`; absent if the store is empty.
    pub reduction_ratio: Option<f64>,
}

impl Store {
    /// Returns the counts and sizes of the contents of the store. Error: a file of the store cannot
    /// be read.
    pub fn stats(&self) -> Result<Stats> {
        let listing = self.checkpoints()?;
        let mut stats = Stats { unreadable: listing.unreadable.len() as u64, ..Stats::default() };
        let (mut runs, mut disks) = (BTreeSet::new(), DiskCounts::default());
        for sealed in &listing.sealed {
            let (meta, counts) = (&sealed.meta, &sealed.meta.counts);
            stats.checkpoints += 1;
            stats.raw_bytes += meta.ram.len_bytes();
            stats.dirty_bytes += counts.dirty_pages * PAGE_BYTES as u64;
            stats.zero_pages += counts.zero_pages;
            stats.dedup_pages += counts.dedup_pages;
            stats.dedup_disk_pages += counts.dedup_disk_pages;
            stats.unchanged_pages += counts.unchanged_pages;
            stats.stored_pages += counts.stored_pages;
            stats.stored_bytes += counts.stored_bytes;
            stats.device_bytes += counts.device_bytes;
            meta.disks.iter().for_each(|disk| disks += disk.counts);
            runs.insert(&sealed.meta.run);
        }
        stats.disk_dirty_bytes = disks.written_blocks * PAGE_BYTES as u64;
        stats.disk_stored_bytes = disks.stored_bytes;
        stats.disk_sectors = SectorBreakdown::of(&disks);
        stats.runs = runs.len() as u64;
        let inner = self.inner();
        stats.pack_bytes = inner.folder_bytes(layout::PACKS)?;
        stats.map_bytes = inner.folder_bytes(layout::MAPS)?;
        stats.checkpoint_file_bytes = inner.folder_bytes(layout::CHECKPOINTS)?;
        stats.total_bytes = stats.pack_bytes
            + stats.map_bytes
            + stats.checkpoint_file_bytes
            + inner.folder_bytes(layout::TAGS)?;
        let ratio = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        let nonzero_pages = stats.dirty_bytes / PAGE_BYTES as u64 - stats.zero_pages;
        stats.dedup_ratio = ratio(nonzero_pages, stats.stored_pages);
        stats.compression_ratio = ratio(stats.stored_pages * PAGE_BYTES as u64, stats.stored_bytes);
        stats.reduction_ratio = ratio(stats.raw_bytes, stats.total_bytes);
        Ok(stats)
    }
}
