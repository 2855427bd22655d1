//! Where the RAM of a replayed guest is, for plugins: in QEMU's numbers, and in files.
//!
//! ```text
//!   guest sees      0 ── node 0 ── 64 MiB ── node 1 ── 96 MiB         nodes in the order of their addresses
//!   QEMU 7.2 says   number of a byte = where its block is among all blocks (as they were made, each from a multiple of 256 KiB on)
//!                                    + where its node is among the nodes, counted twice so: block->offset + offset + mr->addr
//!   files           one for each backend
//! ```
//!
//! QEMU 7.2 adds the offset twice by mistake (plugins/api.c, `qemu_plugin_hwaddr_phys_addr`); QEMU
//! 10 tells guest-physical addresses. If backends are made in the order of their nodes, the numbers
//! of 7.2 are distinct all the same. If not, two bytes may have one number, and such a machine is
//! refused under 7.2. Memory modules (pc-dimm) are refused there as well, because their order among
//! the modules is not known from outside.

use crate::error::{AnalysisError, Result};
use keyframe_analysis::plugin::PluginInterface;
use keyframe_analysis::{RamFile, RamRange, ReplayRam};
use keyframe_qemu::restore::{RestoreSource, backends_as_made, ram_file};
use keyframe_units::{BlockKind, GuestRegion};

/// QEMU puts each block of RAM at a multiple of this, in bytes (`find_ram_offset`).
const BLOCK_ALIGNMENT: u64 = 256 << 10;

/// A memory backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Backend {
    /// The index of its block in the layout.
    block: usize,
    len_bytes: u64,
    /// The lowest address at which the guest sees a part of it.
    guest: u64,
}

/// Describes the RAM of a checkpoint's machine for the plugins of a QEMU with this `interface`.
/// `source` has the machine's command line and RAM layout; `map` tells where the guest sees its
/// RAM.
///
/// # Errors
///
/// The machine has too few or too many RAM backends, or, under QEMU 7.2, backends whose bytes the
/// plugins cannot tell apart.
pub fn guest_ram(
    source: &RestoreSource,
    map: &[GuestRegion],
    interface: PluginInterface,
) -> Result<ReplayRam> {
    let blocks = source.ram.blocks();
    let of_backends: Vec<usize> =
        (0..blocks.len()).filter(|&number| blocks[number].kind == BlockKind::Backend).collect();
    if of_backends.is_empty() || of_backends.len() > ReplayRam::FILES_MAX {
        let (count, max) = (of_backends.len(), ReplayRam::FILES_MAX);
        return Err(AnalysisError::RamBackends { count, max }.into());
    }
    let has_modules = || {
        let mut pairs = source.machine.user_command.windows(2);
        pairs.any(|pair| pair[0].trim_start_matches('-') == "device" && pair[1].contains("memdev"))
    };
    if interface == PluginInterface::V1 && of_backends.len() > 1 && has_modules() {
        return Err(AnalysisError::MemoryModules.into());
    }
    let made = backends_as_made(source)?;
    let made: Vec<Backend> = made
        .into_iter()
        .map(|block| {
            let seen = map.iter().filter(|region| region.block == blocks[block].name);
            let guest = seen.map(|region| region.start.0).min().unwrap_or(u64::MAX);
            Backend { block, len_bytes: blocks[block].total_bytes, guest }
        })
        .collect();
    let numbers = numbers(&made);
    let numbers = match interface {
        PluginInterface::V1 => numbers.ok_or(AnalysisError::RamBackendOrder)?,
        // Only files and ranges have to agree.
        PluginInterface::V4 | PluginInterface::V7 => numbers.unwrap_or_else(|| apart(&made)),
    };
    let number_of = |block: usize| {
        let found = made.iter().zip(&numbers).find(|(backend, _)| backend.block == block);
        found.map_or(0, |(_, &number)| number)
    };
    let files = (0..).zip(&of_backends);
    let files = files
        .map(|(order, &block)| RamFile { number: number_of(block), path: ram_file(order).into() });
    let ranges = map.iter().filter_map(|region| {
        let &block = of_backends.iter().find(|&&block| blocks[block].name == region.block)?;
        let number = number_of(block) + region.offset_bytes;
        Some(RamRange { guest: region.start, number, len_bytes: region.len_bytes })
    });
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_by_key(|range| range.guest.0);
    Ok(ReplayRam { files: files.collect(), ranges })
}

/// Returns the offset of each block among all blocks, in the order in which they are made.
fn apart(made: &[Backend]) -> Vec<u64> {
    let mut end = 0_u64;
    let begin = |backend: &Backend| {
        let begin = end.next_multiple_of(BLOCK_ALIGNMENT);
        end = begin + backend.len_bytes;
        begin
    };
    made.iter().map(begin).collect()
}

/// Returns QEMU 7.2's number of each backend's first byte, in the order in which the backends are
/// made; `None` if two bytes have one number.
fn numbers(made: &[Backend]) -> Option<Vec<u64>> {
    let before = |backend: &Backend| -> u64 {
        made.iter().filter(|other| other.guest < backend.guest).map(|other| other.len_bytes).sum()
    };
    let numbers: Vec<u64> =
        made.iter().zip(apart(made)).map(|(backend, begin)| begin + before(backend)).collect();
    let mut sorted: Vec<_> = numbers.iter().zip(made).collect();
    sorted.sort_by_key(|(number, _)| **number);
    let are_apart = sorted.windows(2).all(|pair| pair[0].0 + pair[0].1.len_bytes <= *pair[1].0);
    are_apart.then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store::MachineMeta;
    use keyframe_units::{GuestPhys, RamBlock, RamLayout};

    const MIB: u64 = 1 << 20;

    fn source(line: &str, blocks: &[(&str, u64)]) -> RestoreSource {
        let block = |&(name, len_bytes): &(&str, u64)| RamBlock {
            name: name.into(),
            kind: if name == "pc.bios" { BlockKind::Stream } else { BlockKind::Backend },
            used_bytes: len_bytes,
            total_bytes: len_bytes,
        };
        let machine = MachineMeta {
            user_command: line.split(' ').map(str::to_owned).collect(),
            ..MachineMeta::default()
        };
        let ram = RamLayout::new(blocks.iter().map(block).collect()).unwrap();
        RestoreSource { machine, ram }
    }

    fn region(block: &str, start: u64, offset_bytes: u64, len_bytes: u64) -> GuestRegion {
        GuestRegion { start: GuestPhys(start), len_bytes, block: block.into(), offset_bytes }
    }

    fn ranges(ram: &ReplayRam) -> Vec<(u64, u64, u64)> {
        ram.ranges.iter().map(|range| (range.guest.0, range.number, range.len_bytes)).collect()
    }

    #[test]
    fn ram_of_one_backend_keeps_its_offsets() {
        let source = source("qemu -m 4G", &[("pc.bios", MIB), ("pc.ram", 4096 * MIB)]);
        let map = [
            region("pc.ram", 0, 0, 2048 * MIB),
            region("pc.bios", 4095 * MIB, 0, MIB),
            region("pc.ram", 4096 * MIB, 2048 * MIB, 2048 * MIB),
        ];
        for interface in [PluginInterface::V1, PluginInterface::V4] {
            let ram = guest_ram(&source, &map, interface).unwrap();
            assert_eq!(ram.files, [RamFile { number: 0, path: ram_file(0).into() }]);
            let both = [(0, 0, 2048 * MIB), (4096 * MIB, 2048 * MIB, 2048 * MIB)];
            assert_eq!(ranges(&ram), both);
        }
    }

    #[test]
    fn nodes_have_a_file_each_and_the_numbers_that_qemu_gives_them() {
        let line = "qemu -object memory-backend-ram,id=a,size=64M -object memory-backend-ram,id=b,size=96M";
        // QEMU lists the largest first.
        let source = source(line, &[("/objects/b", 96 * MIB), ("/objects/a", 64 * MIB)]);
        let map =
            [region("/objects/a", 0, 0, 64 * MIB), region("/objects/b", 64 * MIB, 0, 96 * MIB)];
        let ram = guest_ram(&source, &map, PluginInterface::V1).unwrap();
        assert_eq!(ranges(&ram), [(0, 0, 64 * MIB), (64 * MIB, 128 * MIB, 96 * MIB)]);
        let files: Vec<_> = ram.files.iter().map(|file| file.number).collect();
        assert_eq!(files, [128 * MIB, 0], "in the layout's order");
        // The other way round both nodes would begin at 96 MiB.
        let map =
            [region("/objects/b", 0, 0, 96 * MIB), region("/objects/a", 96 * MIB, 0, 64 * MIB)];
        let refused = guest_ram(&source, &map, PluginInterface::V1).unwrap_err();
        assert!(refused.to_string().contains("order"), "{refused}");
        let ram = guest_ram(&source, &map, PluginInterface::V4).unwrap();
        assert_eq!(ranges(&ram), [(0, 64 * MIB, 96 * MIB), (96 * MIB, 0, 64 * MIB)]);
    }

    #[test]
    fn modules_and_too_many_backends_are_refused() {
        let line = "qemu -object memory-backend-ram,id=d,size=64M -device pc-dimm,memdev=d";
        let with_module = source(line, &[("pc.ram", 64 * MIB), ("/objects/d", 64 * MIB)]);
        let map = [region("pc.ram", 0, 0, 64 * MIB), region("/objects/d", 4096 * MIB, 0, 64 * MIB)];
        assert!(
            guest_ram(&with_module, &map, PluginInterface::V1)
                .unwrap_err()
                .to_string()
                .contains("modules")
        );
        assert_eq!(
            guest_ram(&with_module, &map, PluginInterface::V4).unwrap().ranges[1].guest.0,
            4096 * MIB
        );
        let names: Vec<String> = (0..9).map(|n| format!("/objects/n{n}")).collect();
        let blocks: Vec<_> = names.iter().map(|name| (name.as_str(), MIB)).collect();
        let many = source("qemu", &blocks);
        assert!(
            guest_ram(&many, &[], PluginInterface::V4)
                .unwrap_err()
                .to_string()
                .contains("9 RAM backends")
        );
    }
}
