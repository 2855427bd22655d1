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
    /// Sealed checkpoints that can be read; the sums are over these.
    pub checkpoints: u64,
    /// Checkpoints whose file cannot be read.
    pub unreadable: u64,
    /// Distinct runs that they belong to.
    pub runs: u64,
    /// The sum of the RAM sizes of all checkpoints: the size of full copies.
    pub raw_bytes: u64,
    /// Pages put into checkpoints, in bytes: the size of copies of only the changes.
    pub dirty_bytes: u64,
    /// Of the pages put: all zeros.
    pub zero_pages: u64,
    /// Of the pages put: content that the store already held.
    pub dedup_pages: u64,
    /// Of these: content that a disk brought into the store.
    pub dedup_disk_pages: u64,
    /// Of the pages put: content that the page held already.
    pub unchanged_pages: u64,
    /// Of the pages put: content new to the store.
    pub stored_pages: u64,
    /// Bytes appended to packs for the checkpoints.
    pub stored_bytes: u64,
    /// Blocks of disks put into checkpoints, in bytes.
    pub disk_dirty_bytes: u64,
    /// Bytes appended to packs for them.
    pub disk_stored_bytes: u64,
    /// The sectors of the blocks, by how each was stored.
    pub disk_sectors: SectorBreakdown,
    /// Size of all packs, indexes and unreferenced records included.
    pub pack_bytes: u64,
    /// Size of all map files.
    pub map_bytes: u64,
    /// Device states as stored (within the checkpoint files).
    pub device_bytes: u64,
    /// Size of all checkpoint files.
    pub checkpoint_file_bytes: u64,
    /// Size of packs, maps, checkpoints and tags together.
    pub total_bytes: u64,
    /// Pages put that are not zero, per page stored; absent if none was stored.
    pub dedup_ratio: Option<f64>,
    /// Bytes of the stored pages, uncompressed, per byte appended to packs; absent if none was
    /// stored.
    pub compression_ratio: Option<f64>,
    /// `raw_bytes` per byte of `total_bytes`; absent if the store is empty.
    pub reduction_ratio: Option<f64>,
}

impl Store {
    /// Counts what the store holds. Error: a file of the store cannot be read.
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
