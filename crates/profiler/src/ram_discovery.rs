//! Finds the guest RAM of a running QEMU without its monitor: the mappings of exactly the sizes
//! that its command line names.
//!
//! QEMU maps each RAM block on its own, between guard pages. If the number of writable mappings of
//! a size differs from the number of blocks of that size, the search fails, and the user has to
//! name QEMU's monitor.

use super::command_line;
use crate::error::{Error, Result};
use keyframe_kernel::{Mapping, Process};
use keyframe_units::HostRange;
use keyframe_units::human_bytes;
use std::path::Path;

/// The longest command line that is read, in bytes.
const LINE_BYTES_MAX: usize = 4 << 20;

/// The RAM of a QEMU, found without its monitor.
pub struct DiscoveredRam {
    /// Where its guest RAM is mapped.
    pub ranges: Vec<HostRange>,
    /// The number of its virtual CPUs, if the command line tells.
    pub vcpus: Option<u32>,
}

/// Finds the guest RAM of `process`, and returns its ranges and the number of virtual CPUs.
///
/// Errors: [`Error::NotQemu`] if the process is no QEMU; [`Error::UnclearCommandLine`] if a part of
/// its command line cannot be read; [`Error::UnclearMappings`] if the mappings do not match the
/// sizes on the command line; [`Error::Ended`] if the process has ended; files in `/proc` cannot be
/// read.
pub fn find(process: &Process) -> Result<DiscoveredRam> {
    let pid = process.pid();
    let words = words(pid)?;
    let said = words.split_first().map_or(Err(String::new()), |(_, rest)| command_line::read(rest));
    let said = said.map_err(|part| Error::UnclearCommandLine { pid, part })?;
    let maps = process.maps()?;
    if !process.is_alive() {
        return Err(Error::Ended(pid));
    }
    Ok(DiscoveredRam { ranges: choose(pid, &said.ram_bytes, &maps)?, vcpus: said.vcpus })
}

/// Returns the command line of `pid`, which must be a QEMU.
fn words(pid: u32) -> Result<Vec<String>> {
    let path = format!("/proc/{pid}/cmdline");
    let bytes = std::fs::read(&path).map_err(|e| Error::io(format!("read {path}"), e))?;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LINE_BYTES_MAX)]);
    let words: Vec<String> = text.trim_end_matches('\0').split('\0').map(str::to_owned).collect();
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let is_qemu = |path: &Path| {
        path.file_name()
            .is_some_and(|n| ["qemu", "kvm"].iter().any(|word| n.to_string_lossy().contains(word)))
    };
    if !is_qemu(&program) && !is_qemu(Path::new(words.first().map_or("", String::as_str))) {
        return Err(Error::NotQemu { pid, program });
    }
    Ok(words)
}

/// Returns the mappings of exactly these sizes.
fn choose(pid: u32, sizes: &[u64], maps: &[Mapping]) -> Result<Vec<HostRange>> {
    let mut ranges: Vec<HostRange> = Vec::new();
    for size in sizes {
        let fits = |m: &&Mapping| m.readable && m.writable && m.range.len_bytes == *size;
        let found: Vec<HostRange> = maps.iter().filter(fits).map(|m| m.range).collect();
        let wanted = sizes.iter().filter(|s| *s == size).count();
        if found.len() != wanted {
            return Err(Error::UnclearMappings {
                pid,
                named: wanted,
                size: human_bytes(*size),
                mapped: found.len(),
            });
        }
        ranges.extend(found);
    }
    ranges.sort_by_key(|r| r.start);
    ranges.dedup();
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::HostVirt;

    fn mapping(start: u64, len_bytes: u64, writable: bool) -> Mapping {
        Mapping {
            range: HostRange { start: HostVirt(start), len_bytes },
            readable: true,
            writable,
            shared: false,
            offset: 0,
            inode: 0,
            dev: 0,
            path: String::new(),
            page_bytes: 4096,
        }
    }

    #[test]
    fn ram_is_taken_only_where_it_is_beyond_doubt() {
        let maps = [
            mapping(0x1000, 0x10000, true),
            mapping(0x20000, 0x8000, true),
            mapping(0x30000, 0x8000, false),
            mapping(0x40000, 0x10000, true),
        ];
        let chosen = |sizes: &[u64]| {
            choose(7, sizes, &maps).map(|r| r.iter().map(|r| r.start.0).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&[0x8000]).unwrap(), [0x20000]);
        assert_eq!(chosen(&[0x10000, 0x8000, 0x10000]).unwrap(), [0x1000, 0x20000, 0x40000]);
        for sizes in [&[0x10000][..], &[0x8000, 0x8000], &[0x4000]] {
            let failure = chosen(sizes).unwrap_err();
            assert!(failure.to_string().contains("process 7"), "{failure}");
            assert!(failure.fix().unwrap().contains("--qmp"), "{failure}");
        }
    }

    #[test]
    fn a_process_that_is_no_qemu_is_named() {
        let us = Process::open(std::process::id()).unwrap();
        let failure = find(&us).err().unwrap();
        assert!(failure.to_string().contains("is no QEMU"), "{failure}");
    }
}
