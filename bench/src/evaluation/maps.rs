//! The maps of checkpoints: the bytes that pages of RAM and blocks of disks take in them, and how
//! much of the disks has been written since the recording began.

use crate::Error;
use keyframe_store::Store;
use keyframe_store_format::identity::StoreId;
use keyframe_store_format::map_run::MapRun;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{CheckpointId, PAGE_BYTES};
use rustc_hash::FxHashSet;
use std::path::Path;

/// The map of one checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointMap {
    pub checkpoint: CheckpointId,
    /// The size that its file would have without blocks of disks.
    pub ram_bytes: f64,
    /// The rest of its file.
    pub disk_bytes: f64,
    /// The size of all blocks of disks that were written since the recording began.
    pub written_disk_bytes: f64,
}

/// Reads the maps of all checkpoints of the recording's `store`, in their order.
pub fn read(store: &Path) -> Result<Vec<CheckpointMap>, Error> {
    let failed = |e: keyframe_store::Error| Error::failed("read the checkpoints", e);
    let opened = Store::open(store).map_err(failed)?;
    let id = u128::from_str_radix(opened.id(), 16)
        .map_err(|e| Error::failed("read the id of the store", e))?;
    let id = StoreId(id.to_be_bytes());
    let mut written = FxHashSet::default();
    let listing = opened.checkpoints().map_err(failed)?;
    listing
        .sealed
        .iter()
        .map(|sealed| {
            let path = store.join(keyframe_store_backend::layout::map(sealed.id.0));
            let bytes =
                std::fs::read(&path).map_err(Error::io(format!("read {}", path.display())))?;
            let name = path.display().to_string();
            let map = MapRun::decode(&bytes, id, sealed.id.0, &name)
                .map_err(|e| Error::failed("read a map", e))?;
            let ram_pages = sealed.meta.ram.len_pages();
            for range in map.ranges().filter(|range| range.first.0 >= ram_pages) {
                written.extend(range.first.0..range.end().0);
            }
            let ram_bytes = ram_part(&map, ram_pages).encode(id).len().min(bytes.len()) as f64;
            Ok(CheckpointMap {
                checkpoint: sealed.id,
                ram_bytes,
                disk_bytes: bytes.len() as f64 - ram_bytes,
                written_disk_bytes: (written.len() * PAGE_BYTES) as f64,
            })
        })
        .collect()
}

/// Returns `map` without the blocks of disks, which come after `ram_pages` pages.
fn ram_part(map: &MapRun, ram_pages: u64) -> MapRun {
    let mut records = map.records().peekable();
    let pages = map.pages().take_while(|page| page.0 < ram_pages).map(|page| {
        let record = records.next_if(|(of, _)| *of == page);
        (page, record.map_or(PageRef::ZERO, |(_, to)| to))
    });
    MapRun::new(map.header, pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store_format::map_run::MapHeader;
    use keyframe_units::PageIndex;

    #[test]
    fn the_part_of_ram_keeps_its_pages_and_their_records() {
        let header = MapHeader { id: 1, parent: None, run: [0; 16], space_pages: 100 };
        let page = |page, to| (PageIndex(page), PageRef(to));
        let of_ram = [page(1, 0), page(2, 7), page(9, 8)];
        let all = [&of_ram[..], &[page(10, 9), page(11, 0)]].concat();
        let map = MapRun::new(header, all.into_iter());
        assert_eq!(ram_part(&map, 10), MapRun::new(header, of_ram.into_iter()));
        assert_eq!(ram_part(&map, 100), map);
    }
}
