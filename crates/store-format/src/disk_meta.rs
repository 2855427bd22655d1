//! The disks in the description of a checkpoint.
//!
//! A checkpoint holds the blocks that were written to a disk since its run began. They lie above an
//! image that the checkpoint does not hold. So the description identifies that image well enough to
//! notice that another one has taken its place.

use crate::composed::PART_BYTES;
use crate::disk_map::SPACE_PAGES_MAX;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange};
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// A disk that the guest can write to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskMeta {
    /// Its id or node name on the VM's command line; in a group `MEMBER/NAME`.
    pub name: String,
    /// The size of the disk, in bytes.
    pub disk_bytes: u64,
    /// The image beneath it.
    pub base: BaseMeta,
    /// Blocks put into this checkpoint.
    pub counts: DiskCounts,
    /// True if the user left the disk out of the checkpoint. `base` then says where it was.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left_out: bool,
}

impl DiskMeta {
    /// Returns the number of the disk's blocks of 4096 bytes. The last one may be partial.
    pub fn blocks(&self) -> u64 {
        self.disk_bytes.div_ceil(PAGE_BYTES as u64)
    }
}

/// The image beneath a disk, as it was when the run began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseMeta {
    /// Its absolute path; empty if there is no image. Of a blank base: the image whose content the
    /// checkpoint holds, or empty.
    pub path: String,
    /// `raw`, `qcow2`, or `blank` for zeros up to the disk's size.
    pub format: String,
    /// The image itself, then its backing images.
    pub files: Vec<BaseFile>,
}

/// The format of a base without an image.
pub const BLANK: &str = "blank";

impl BaseMeta {
    /// Creates a base without an image: all zeros.
    pub fn blank() -> Self {
        Self { format: BLANK.into(), ..Self::default() }
    }

    /// Creates a base without an image, for a checkpoint that holds the whole content of the image
    /// `path`.
    pub fn of_whole_image(path: String) -> Self {
        Self { path, ..Self::blank() }
    }

    /// Returns true if the disk's blocks are those that the guest sees, although its command line
    /// shows the guest a part (`offset`, `size`) of an image.
    pub fn is_cut(&self) -> bool {
        self.is_blank() && self.path.is_empty()
    }

    /// Returns true if there is no image, and all is zero.
    pub fn is_blank(&self) -> bool {
        self.format == BLANK
    }
}

/// A file of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseFile {
    /// Its absolute path.
    pub path: String,
    /// Its length, in bytes.
    pub len_bytes: u64,
    /// The time of its last change, in seconds since 1970.
    pub modified_s: i64,
    /// The nanoseconds of that time.
    pub modified_ns: u32,
    /// The BLAKE3 hash of samples spread over its length, in hexadecimal.
    pub sample_blake3: String,
    /// The time at which its inode was last changed (`ctime`), as seconds and nanoseconds since
    /// 1970. No program can set it. `None` if it was not noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<(i64, u32)>,
}

/// Blocks of a disk in one checkpoint. `written_blocks` is the sum of the four counts after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounts {
    /// The number of blocks of 4096 bytes written since the previous checkpoint.
    pub written_blocks: u64,
    /// The number of written blocks that are zeros.
    pub zero_blocks: u64,
    /// The number of written blocks whose content the store held, from RAM or a disk.
    pub dedup_blocks: u64,
    /// The number of written blocks whose content is that of the previous checkpoint.
    pub unchanged_blocks: u64,
    /// The number of written blocks whose content was new to the store.
    pub stored_blocks: u64,
    /// The number of bytes appended to packs for the written blocks.
    pub stored_bytes: u64,
    /// The number of stored blocks that are made from parts that the store held.
    pub composed_blocks: u64,
    /// The sectors of the written blocks, by how each was stored.
    pub sectors: SectorCounts,
}

/// Sectors of 512 bytes of a disk, by how each was stored. Each written block adds eight.
///
/// `whole`: the store held the whole block. `part`: the store held the sector, and a composed
/// record refers to it. `disk` or `ram`: what brought the content into the store first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SectorCounts {
    /// The number of sectors that are all zeros: nothing is stored.
    pub zero_sectors: u64,
    /// The number of sectors in blocks that had this content at the previous checkpoint.
    pub unchanged_sectors: u64,
    /// The number of sectors that were stored.
    pub not_deduplicated_sectors: u64,
    /// The number of sectors in whole blocks that came from a disk.
    pub against_disk_whole_sectors: u64,
    /// The number of single sectors that came from a disk.
    pub against_disk_part_sectors: u64,
    /// The number of sectors in whole pages that came from RAM.
    pub against_ram_whole_sectors: u64,
    /// The number of single sectors that came from RAM.
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

/// A number of sectors, also in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SectorTotal {
    /// The number of sectors.
    pub sectors: u64,
    /// Their size in bytes: 512 for each.
    pub bytes: u64,
}

/// Numbers of sectors whose content was deduplicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DedupSectors {
    /// The sectors in blocks that the store held as a whole.
    pub whole: SectorTotal,
    /// The single sectors that the store held.
    pub parts: SectorTotal,
    /// The number of both together.
    pub sectors: u64,
    /// The size of both together, in bytes.
    pub bytes: u64,
}

/// The numbers of sectors of disks, by how each was stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SectorBreakdown {
    /// The sectors that are all zeros: nothing is stored.
    pub zero: SectorTotal,
    /// The sectors in blocks that had this content at the previous checkpoint.
    pub unchanged: SectorTotal,
    /// The sectors that were stored.
    pub not_deduplicated: SectorTotal,
    /// The sectors whose content a disk brought into the store.
    pub against_disk: DedupSectors,
    /// The sectors whose content RAM brought into the store.
    pub against_ram: DedupSectors,
}

impl From<u64> for SectorTotal {
    fn from(sectors: u64) -> Self {
        Self { sectors, bytes: sectors * PART_BYTES as u64 }
    }
}

impl SectorBreakdown {
    /// Computes the breakdown of `counts`.
    pub fn of(counts: &DiskCounts) -> Self {
        let c = &counts.sectors;
        let found = |whole: u64, parts: u64| {
            let SectorTotal { sectors, bytes } = SectorTotal::from(whole + parts);
            DedupSectors { whole: whole.into(), parts: parts.into(), sectors, bytes }
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

/// Returns the number of pages of RAM and blocks of all disks together; `None` if it exceeds
/// [`SPACE_PAGES_MAX`].
pub fn space_pages(ram_pages: u64, disks: &[DiskMeta]) -> Option<u64> {
    let add = |sum: u64, disk: &DiskMeta| {
        sum.checked_add(disk.blocks()).filter(|n| *n <= SPACE_PAGES_MAX)
    };
    disks.iter().try_fold(ram_pages, add)
}

/// Returns the numbers of the blocks of disk `index`, which follow the `ram_pages` pages of RAM;
/// `None` if there is no such disk.
pub fn blocks_of(ram_pages: u64, disks: &[DiskMeta], index: usize) -> Option<PageRange> {
    let first = space_pages(ram_pages, disks.get(..index)?)?;
    Some(PageRange::new(PageIndex(first), disks.get(index)?.blocks()))
}
