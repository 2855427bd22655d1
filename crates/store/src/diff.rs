//! The differences between two checkpoints: pages, sectors and bytes, of each RAM block and each
//! disk.
//!
//! ```text
//!   RAM blocks, disks of one name ─▶ pages with different records, or zero in one ─▶ both contents, some at a time ─▶ counted
//! ```
//!
//! Invariants: contents are compared, not records, so a page that was stored twice is no
//! difference. Memory is that of the two maps and of a few MiB of pages. The content of an image
//! beneath a disk is not known here. A block that only one of the two checkpoints leaves to its
//! image is counted separately.

use crate::disks::{BlockContent, LoadedDisks};
use crate::{Error, LoadedCheckpoint, Result, Store};
use keyframe_store_format::meta::Meta;
use keyframe_units::{CheckpointId, PAGE_BYTES, Page, PageIndex, PageRange, ZERO_PAGE};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The most pages that are compared at a time: 4 MiB of each checkpoint.
const CHUNK_PAGES: usize = 1024;
/// The length of a sector, in bytes.
const SECTOR_BYTES: usize = 512;

/// The differences of a RAM block or a disk. A page of a disk is a block of 4096 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionDiff {
    /// The RAM block, or the disk.
    pub name: String,
    /// The number of pages that both have, which were compared.
    pub pages: u64,
    /// The number of pages whose content differs.
    pub changed_pages: u64,
    /// The number of changed pages that are zero in the first only.
    pub from_zero_pages: u64,
    /// The number of changed pages that are zero in the second only.
    pub to_zero_pages: u64,
    /// The number of sectors of 512 bytes whose content differs.
    pub changed_sectors: u64,
    /// The number of bytes whose value differs.
    pub changed_bytes: u64,
    /// The number of pages that only the first has, because the second is smaller or has no such
    /// block or disk.
    pub only_first_pages: u64,
    /// The number of pages that only the second has.
    pub only_second_pages: u64,
    /// The number of blocks of a disk that only one of the two leaves to the image beneath. They
    /// were not compared.
    pub unknown_pages: u64,
    /// True if the two have different images beneath. Blocks that both leave to the image were not
    /// compared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub other_image: bool,
}

/// The differences between two checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diff {
    /// The number of the first checkpoint.
    pub first: CheckpointId,
    /// The number of the second checkpoint.
    pub second: CheckpointId,
    /// The differences of the RAM blocks, in the order of the first checkpoint, then those that
    /// only the second has.
    pub ram: Vec<RegionDiff>,
    /// The differences of the disks, in the same order.
    pub disks: Vec<RegionDiff>,
    /// The sizes of the two device states, in bytes.
    pub device_bytes: [u64; 2],
    /// True if the device states are the same.
    pub same_devices: bool,
}

impl RegionDiff {
    fn named(name: &str) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Counts a page that both have.
    fn compare(&mut self, first: &Page, second: &Page) {
        if first == second {
            return;
        }
        self.changed_pages += 1;
        self.from_zero_pages += u64::from(*first == ZERO_PAGE);
        self.to_zero_pages += u64::from(*second == ZERO_PAGE);
        for (a, b) in first.chunks(SECTOR_BYTES).zip(second.chunks(SECTOR_BYTES)) {
            let bytes = a.iter().zip(b).filter(|(a, b)| a != b).count() as u64;
            self.changed_sectors += u64::from(bytes > 0);
            self.changed_bytes += bytes;
        }
    }
}

impl Store {
    /// Computes the differences between the checkpoints `first` and `second`, which may be of
    /// different VMs. Calls `progress` with the number of compared pages of RAM, and of all. Error:
    /// a checkpoint does not exist, or cannot be read.
    pub fn diff(
        &self,
        first: CheckpointId,
        second: CheckpointId,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Diff> {
        let (a, b) = (self.load(first)?, self.load(second)?);
        let ram = ram(&a, &b, progress)?;
        let disks = if a.meta.disks.is_empty() && b.meta.disks.is_empty() {
            Vec::new()
        } else {
            disks(&self.load_disks(first)?, &self.load_disks(second)?)?
        };
        let device_bytes = [a.device_state.len() as u64, b.device_state.len() as u64];
        let same_devices = a.device_state == b.device_state;
        Ok(Diff { first, second, ram, disks, device_bytes, same_devices })
    }
}

/// The regions of two checkpoints, by name.
fn regions(
    first: &[(&str, PageRange)],
    second: &[(&str, PageRange)],
) -> Vec<(RegionDiff, PageRange, PageRange)> {
    let none = PageRange::new(PageIndex(0), 0);
    let of = |all: &[(&str, PageRange)], name: &str| {
        all.iter().find(|(other, _)| *other == name).map_or(none, |(_, range)| *range)
    };
    let known: BTreeSet<&str> = first.iter().map(|(name, _)| *name).collect();
    let more = second.iter().map(|(name, _)| *name).filter(|name| !known.contains(name));
    let names = first.iter().map(|(name, _)| *name).chain(more);
    let region = |name: &str| {
        let (a, b) = (of(first, name), of(second, name));
        let pages = a.len_pages.min(b.len_pages);
        let (only_first_pages, only_second_pages) = (a.len_pages - pages, b.len_pages - pages);
        (RegionDiff { pages, only_first_pages, only_second_pages, ..RegionDiff::named(name) }, a, b)
    };
    names.map(region).collect()
}

fn ram(
    a: &LoadedCheckpoint,
    b: &LoadedCheckpoint,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<RegionDiff>> {
    let blocks = |meta: &'_ Meta| -> Vec<(String, PageRange)> {
        let named = meta.ram.blocks().iter().enumerate();
        named.map(|(at, block)| (block.name.clone(), meta.ram.pages_of(at))).collect()
    };
    let (first, second) = (blocks(&a.meta), blocks(&b.meta));
    let all = regions(&borrowed(&first), &borrowed(&second));
    let total_pages: u64 = all.iter().map(|(region, ..)| region.pages).sum();
    let mut done_pages = 0;
    let mut found = Vec::with_capacity(all.len());
    for (mut region, of_a, of_b) in all {
        let mut chunk = Vec::with_capacity(CHUNK_PAGES);
        for at in 0..region.pages {
            let pair = (PageIndex(of_a.first.0 + at), PageIndex(of_b.first.0 + at));
            if a.page_ref(pair.0) != b.page_ref(pair.1) {
                chunk.push(pair);
            }
            if chunk.len() == CHUNK_PAGES {
                compare(a, b, &mut chunk, &mut region)?;
                progress(done_pages + at, total_pages);
            }
        }
        compare(a, b, &mut chunk, &mut region)?;
        done_pages += region.pages;
        progress(done_pages, total_pages);
        found.push(region);
    }
    Ok(found)
}

fn borrowed(regions: &[(String, PageRange)]) -> Vec<(&str, PageRange)> {
    regions.iter().map(|(name, range)| (name.as_str(), *range)).collect()
}

/// Compares the contents of some pages, and empties the list.
fn compare(
    a: &LoadedCheckpoint,
    b: &LoadedCheckpoint,
    pairs: &mut Vec<(PageIndex, PageIndex)>,
    region: &mut RegionDiff,
) -> Result<()> {
    let first: Vec<PageIndex> = pairs.iter().map(|pair| pair.0).collect();
    let second: Vec<PageIndex> = pairs.iter().map(|pair| pair.1).collect();
    let mut held = BTreeMap::<PageIndex, Box<Page>>::new();
    a.read_some(&first, &mut |page, content| {
        held.insert(page, Box::new(*content));
        Ok::<_, Error>(())
    })?;
    let of: BTreeMap<PageIndex, PageIndex> = pairs.iter().map(|(a, b)| (*b, *a)).collect();
    let mut left: BTreeSet<PageIndex> = first.into_iter().collect();
    b.read_some(&second, &mut |page, content| {
        if let Some(other) = of.get(&page) {
            left.remove(other);
            region.compare(held.get(other).map_or(&ZERO_PAGE, |held| held), content);
        }
        Ok::<_, Error>(())
    })?;
    // Those that are zero in the second.
    for page in left {
        region.compare(held.get(&page).map_or(&ZERO_PAGE, |held| held), &ZERO_PAGE);
    }
    pairs.clear();
    Ok(())
}

fn disks(a: &LoadedDisks, b: &LoadedDisks) -> Result<Vec<RegionDiff>> {
    let blocks = |of: &LoadedDisks| -> Vec<(String, PageRange)> {
        let included = of.meta.disks.iter().enumerate().filter(|(_, disk)| !disk.left_out);
        included
            .filter_map(|(at, disk)| Some((disk.name.clone(), of.meta.blocks_of(at)?)))
            .collect()
    };
    let (first, second) = (blocks(a), blocks(b));
    let mut found = Vec::new();
    for (mut region, of_a, of_b) in regions(&borrowed(&first), &borrowed(&second)) {
        let base = |of: &LoadedDisks| {
            of.meta.disks.iter().find(|disk| disk.name == region.name).map(|disk| disk.base.clone())
        };
        region.other_image = region.pages > 0 && base(a) != base(b);
        let mut at = 0;
        // Only blocks that one of the two holds.
        while let Some(next) =
            next_known(a, of_a, at).into_iter().chain(next_known(b, of_b, at)).min()
        {
            if next >= region.pages {
                break;
            }
            compare_block(a, b, [of_a, of_b].map(|of| PageIndex(of.first.0 + next)), &mut region)?;
            at = next + 1;
        }
        found.push(region);
    }
    Ok(found)
}

/// The first block of a disk, at or after its block `at`, that was written.
fn next_known(of: &LoadedDisks, disk: PageRange, at: u64) -> Option<u64> {
    let next = of.next_block(PageIndex(disk.first.0.checked_add(at)?))?;
    (next < disk.end()).then(|| next.0 - disk.first.0)
}

fn compare_block(
    a: &LoadedDisks,
    b: &LoadedDisks,
    [in_a, in_b]: [PageIndex; 2],
    region: &mut RegionDiff,
) -> Result<()> {
    if a.record(in_a) == b.record(in_b) {
        return Ok(());
    }
    let (mut first, mut second) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    let known = [a.read_block(in_a, &mut first)?, b.read_block(in_b, &mut second)?];
    if known.contains(&BlockContent::Base) {
        region.unknown_pages += 1;
    } else {
        region.compare(&first, &second);
    }
    Ok(())
}
