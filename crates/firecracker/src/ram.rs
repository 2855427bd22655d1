//! Where the guest's RAM is in Firecracker's process.
//!
//! ```text
//!   guest-physical   0 ........ 3328 MiB │ devices │ 4 GiB ........
//!                    first region                    second region, of a guest with more RAM
//! ```
//!
//! Each region is one private mapping of exactly its size, without a file; of a VM that was loaded
//! from a file, the file's. A file of RAM holds the regions one after the other.

use crate::{Error, Result};
use keyframe_kernel::{Mapping, Process};
use keyframe_machine::HostBlock;
use keyframe_units::{BlockKind, GuestPhys, GuestRegion, PAGE_BYTES, RamBlock};

/// Where the addresses of devices begin: RAM beyond is above 4 GiB.
const DEVICES_START: u64 = 3328 << 20;
const HIGH_START: u64 = 4 << 30;
const MIB: u64 = 1 << 20;

/// A region of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its name as a RAM block.
    pub name: &'static str,
    /// The guest-physical address of its first byte.
    pub start: u64,
    /// Its length.
    pub len_bytes: u64,
}

/// Returns the regions of a guest with `mem_size_mib` MiB of RAM.
pub fn regions(mem_size_mib: u64) -> Vec<Region> {
    let all = mem_size_mib.saturating_mul(MIB);
    let low = Region { name: "ram", start: 0, len_bytes: all.min(DEVICES_START) };
    let high = all.checked_sub(DEVICES_START).filter(|bytes| *bytes > 0);
    let high = high.map(|len_bytes| Region { name: "ram-high", start: HIGH_START, len_bytes });
    std::iter::once(low).chain(high).collect()
}

/// Returns the regions as parts of the guest's physical memory.
pub fn guest_map(mem_size_mib: u64) -> Vec<GuestRegion> {
    let of = |region: Region| GuestRegion {
        start: GuestPhys(region.start),
        len_bytes: region.len_bytes,
        block: region.name.into(),
        offset_bytes: 0,
    };
    regions(mem_size_mib).into_iter().map(of).collect()
}

/// Returns the RAM block of `region`.
pub fn block(region: &Region) -> RamBlock {
    let (used_bytes, total_bytes) = (region.len_bytes, region.len_bytes);
    RamBlock { name: region.name.into(), kind: BlockKind::Backend, used_bytes, total_bytes }
}

/// Finds the RAM of a guest with `mem_size_mib` MiB in `process`. Error: [`Error::Ram`] unless
/// there is exactly one mapping for each region.
pub fn find(process: &Process, mem_size_mib: u64) -> Result<Vec<HostBlock>> {
    find_in(&process.maps()?, mem_size_mib)
        .map_err(|problem| Error::Ram { pid: process.pid(), problem })
}

fn find_in(maps: &[Mapping], mem_size_mib: u64) -> Result<Vec<HostBlock>, String> {
    regions(mem_size_mib)
        .iter()
        .map(|region| {
            let is_it = |mapping: &&Mapping| {
                mapping.range.len_bytes == region.len_bytes
                    && mapping.readable
                    && mapping.writable
                    && !mapping.shared
                    && mapping.page_bytes == PAGE_BYTES as u64
            };
            let found: Vec<&Mapping> = maps.iter().filter(is_it).collect();
            match found[..] {
                [mapping] => Ok(HostBlock { block: block(region), host: mapping.range.start }),
                _ => Err(format!(
                    "{} private mappings have the {} bytes of its region at {:#x}, not one",
                    found.len(),
                    region.len_bytes,
                    region.start
                )),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::{HostRange, HostVirt};

    fn mapping(start: u64, mib: u64) -> Mapping {
        Mapping {
            range: HostRange { start: HostVirt(start), len_bytes: mib * MIB },
            readable: true,
            writable: true,
            shared: false,
            offset: 0,
            inode: 0,
            dev: 0,
            path: String::new(),
            page_bytes: PAGE_BYTES as u64,
        }
    }

    #[test]
    fn ram_beyond_the_devices_is_a_region_of_its_own() {
        assert_eq!(regions(128).len(), 1);
        assert_eq!(regions(3328).len(), 1);
        let large = regions(5000);
        assert_eq!((large[0].len_bytes, large[1].start), (DEVICES_START, HIGH_START));
        assert_eq!(large[0].len_bytes + large[1].len_bytes, 5000 * MIB);
    }

    #[test]
    fn ram_is_found_where_one_mapping_has_its_size() {
        let maps = [mapping(1 << 30, 2), mapping(2 << 30, 128), mapping(3 << 30, 64)];
        let found = find_in(&maps, 128).unwrap();
        assert_eq!((found.len(), found[0].host), (1, HostVirt(2 << 30)));
        assert!(find_in(&maps, 256).unwrap_err().starts_with("0 private"));
        let twice = [mapping(1 << 30, 128), mapping(2 << 30, 128)];
        assert!(find_in(&twice, 128).unwrap_err().starts_with("2 private"));
        let shared = [Mapping { shared: true, ..mapping(1 << 30, 128) }];
        assert!(find_in(&shared, 128).is_err(), "another process may write it");
        let huge = [Mapping { page_bytes: 2 << 20, ..mapping(1 << 30, 128) }];
        assert!(find_in(&huge, 128).is_err());
    }
}
