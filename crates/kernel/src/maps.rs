//! The mappings of a process, with their page sizes.
//!
//! ```text
//!   7f0a40000000-7f0a80000000 rw-s 00000000 00:01 1033   /memfd:pc.ram (deleted)
//!   start        end          perms offset  dev   inode  path
//! ```
//!
//! `/proc/PID/maps` does not state page sizes. A file on hugetlbfs has pages of that filesystem's
//! block size (`statfs` through `map_files`, once for each device). If `map_files` is not
//! permitted, `KernelPageSize` of `/proc/PID/smaps` gives the size.

use crate::{Error, Process, Result};
use keyframe_units::{HostRange, HostVirt, PAGE_BYTES};
use rustix::fs::{OFlags, fstatfs};
use std::collections::HashMap;

const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// One mapping of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The address range.
    pub range: HostRange,
    /// True if the process may read it.
    pub readable: bool,
    /// True if the process may write it.
    pub writable: bool,
    /// True for `MAP_SHARED`: writes reach the file. False for a private mapping, copied on write.
    pub shared: bool,
    /// The offset of the first byte in the file, in bytes.
    pub offset: u64,
    /// The file's inode on `dev`, or 0 for anonymous memory.
    pub inode: u64,
    /// The file's device, as in `st_dev`.
    pub dev: u64,
    /// The file's path as the kernel prints it, or `[heap]`, `[vdso]` and the like. Empty for
    /// anonymous memory. A newline reads `\012`; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// The page size in bytes: 4096, or 2 MiB or 1 GiB on hugetlbfs. Transparent huge pages do not
    /// count.
    pub page_bytes: u64,
}

impl Mapping {
    /// Returns true for private memory without a file. A page that is not present there reads as
    /// zeros.
    pub fn is_private_anonymous(&self) -> bool {
        !self.shared && (self.inode == 0 || self.is_anonymous_hugetlb())
    }

    /// `MAP_ANONYMOUS | MAP_HUGETLB`: the kernel puts a nameless file behind it.
    fn is_anonymous_hugetlb(&self) -> bool {
        self.path.starts_with("/anon_hugepage") && self.page_bytes > PAGE_BYTES as u64
    }

    /// Returns its name under `/proc/PID/map_files`.
    pub(crate) fn map_file(&self) -> String {
        format!("map_files/{:x}-{:x}", self.range.start.0, self.range.end().0)
    }
}

/// The mappings of `process`, by rising address.
pub(crate) fn read(process: &Process) -> Result<Vec<Mapping>> {
    let mut mappings = read_without_page_sizes(process)?;
    fill_page_sizes(process, &mut mappings)?;
    Ok(mappings)
}

/// The same, with `page_bytes` not looked up.
fn read_without_page_sizes(process: &Process) -> Result<Vec<Mapping>> {
    Ok(read_lines(process)?.into_iter().map(|(mapping, _)| mapping).collect())
}

/// Reads the executable mappings in rising order, without their `page_bytes`.
pub(crate) fn read_code(process: &Process) -> Result<Vec<Mapping>> {
    let lines = read_lines(process)?.into_iter();
    Ok(lines.filter_map(|(mapping, executable)| executable.then_some(mapping)).collect())
}

/// Reads all mappings, each with true if it is executable.
fn read_lines(process: &Process) -> Result<Vec<(Mapping, bool)>> {
    let bytes = process.read_file("maps")?;
    let mut mappings = Vec::new();
    for (index, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
        mappings.push(parse_line(line).ok_or_else(|| Error::MapsLine {
            pid: process.pid(),
            line_number: index + 1,
            line: line.chars().take(200).collect(),
        })?);
    }
    // A process on its way out has no mappings left, which must not read as an answer.
    if mappings.is_empty() {
        return Err(Error::Gone { pid: process.pid(), operation: "read maps" });
    }
    process.ensure_alive("read maps")?;
    Ok(mappings)
}

fn parse_line(line: &str) -> Option<(Mapping, bool)> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut rest = line;
    let mut field = || {
        rest = rest.trim_start_matches(' ');
        let (head, tail) = rest.split_once(' ').unwrap_or((rest, ""));
        rest = tail;
        (!head.is_empty()).then_some(head)
    };
    let (start, end) = field()?.split_once('-')?;
    let perms = field()?.as_bytes();
    let offset = hex(field()?)?;
    let (major, minor) = field()?.split_once(':')?;
    let inode = field()?.parse().ok()?;
    let path = rest.trim_start_matches(' ').to_owned();
    let (start, end) = (hex(start)?, hex(end)?);
    let dev =
        rustix::fs::makedev(u32::try_from(hex(major)?).ok()?, u32::try_from(hex(minor)?).ok()?);
    let &[read, write, execute, share] = perms else { return None };
    let range =
        HostRange { start: HostVirt(start), len_bytes: end.checked_sub(start).filter(|n| *n > 0)? };
    let mapping = Mapping {
        range,
        readable: read == b'r',
        writable: write == b'w',
        shared: share == b's',
        offset,
        inode,
        dev,
        path,
        page_bytes: PAGE_BYTES as u64,
    };
    Some((mapping, execute == b'x'))
}

/// Sets `page_bytes` of mappings of hugetlbfs files.
fn fill_page_sizes(process: &Process, mappings: &mut [Mapping]) -> Result<()> {
    let mut by_device: HashMap<u64, u64> = HashMap::new();
    let mut unknown = false;
    for mapping in mappings.iter_mut().filter(|m| m.inode != 0) {
        if let Some(page_bytes) = by_device.get(&mapping.dev) {
            mapping.page_bytes = *page_bytes;
            continue;
        }
        // O_PATH does not touch a device that happens to be mapped.
        match process.open_file(&mapping.map_file(), OFlags::PATH) {
            Ok(file) => {
                let page_bytes = match fstatfs(&file) {
                    Ok(fs) if fs.f_type == HUGETLBFS_MAGIC => {
                        u64::try_from(fs.f_bsize).unwrap_or(0)
                    }
                    _ => PAGE_BYTES as u64,
                };
                let page_bytes =
                    if page_bytes.is_power_of_two() { page_bytes } else { PAGE_BYTES as u64 };
                by_device.insert(mapping.dev, page_bytes);
                mapping.page_bytes = page_bytes;
            }
            Err(_) => unknown = true,
        }
    }
    if unknown {
        fill_from_smaps(process, mappings)?;
    }
    Ok(())
}

/// The slow way: `smaps` walks the page tables, but needs no capability beyond the right to trace.
fn fill_from_smaps(process: &Process, mappings: &mut [Mapping]) -> Result<()> {
    let bytes = process.read_file("smaps")?;
    let mut sizes = HashMap::new();
    let mut current = None;
    for line in String::from_utf8_lossy(&bytes).lines() {
        if let Some(kib) = line.strip_prefix("KernelPageSize:") {
            let kib = kib.trim().strip_suffix("kB").and_then(|n| n.trim().parse::<u64>().ok());
            if let (Some(start), Some(kib)) = (current, kib) {
                sizes.insert(start, kib.saturating_mul(1024));
            }
        } else if let Some((mapping, _)) = parse_line(line) {
            current = Some(mapping.range.start.0);
        }
    }
    for mapping in mappings {
        if let Some(size) = sizes.get(&mapping.range.start.0).filter(|n| n.is_power_of_two()) {
            mapping.page_bytes = *size;
        }
    }
    Ok(())
}

/// The mappings that cover `range`, without a gap; otherwise the first address that none covers.
pub(crate) fn covering(
    mappings: &[Mapping],
    range: HostRange,
) -> std::result::Result<&[Mapping], HostVirt> {
    let first = mappings.partition_point(|m| m.range.end() <= range.start);
    let mut at = range.start;
    for (count, mapping) in mappings[first..].iter().enumerate() {
        if mapping.range.start > at {
            return Err(at);
        }
        at = mapping.range.end();
        if at >= range.end() {
            return Ok(&mappings[first..=first + count]);
        }
    }
    Err(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_field_by_field() {
        let line = "7f0a40000000-7f0a80000000 rw-s 00001000 fe:01 1033                       /memfd:pc.ram x (deleted)";
        let (mapping, executable) = parse_line(line).unwrap();
        assert!(!executable);
        assert_eq!(
            mapping.range,
            HostRange { start: HostVirt(0x7f0a_4000_0000), len_bytes: 1 << 30 }
        );
        assert!(mapping.readable && mapping.writable && mapping.shared);
        assert_eq!((mapping.offset, mapping.inode), (0x1000, 1033));
        assert_eq!((rustix::fs::major(mapping.dev), rustix::fs::minor(mapping.dev)), (0xfe, 1));
        assert_eq!(mapping.path, "/memfd:pc.ram x (deleted)");
        let (anonymous, executable) = parse_line("1000-2000 --xp 00000000 00:00 0 ").unwrap();
        assert!(executable);
        assert!(
            anonymous.is_private_anonymous() && !anonymous.readable && anonymous.path.is_empty()
        );
    }

    #[test]
    fn what_is_not_a_mapping_is_refused() {
        for line in [
            "",
            "1000-2000",
            "2000-1000 rw-p 0 0:0 0",
            "1000-1000 rw-p 0 0:0 0",
            "x-2 rw-p 0 0:0 0",
            "1-2 rw 0 0:0 0",
        ] {
            assert_eq!(parse_line(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_range_is_covered_by_neighbours_only_without_a_gap() {
        let map = |line: &str| parse_line(line).unwrap().0;
        let maps = [
            map("1000-2000 rw-p 0 0:0 0"),
            map("2000-3000 rw-p 0 0:0 0"),
            map("4000-5000 rw-p 0 0:0 0"),
        ];
        let range = |start, end: u64| HostRange { start: HostVirt(start), len_bytes: end - start };
        assert_eq!(covering(&maps, range(0x1800, 0x2800)).unwrap().len(), 2);
        assert_eq!(covering(&maps, range(0x2000, 0x3000)).unwrap().len(), 1);
        assert_eq!(covering(&maps, range(0x2000, 0x5000)), Err(HostVirt(0x3000)));
        assert_eq!(covering(&maps, range(0x800, 0x1000)), Err(HostVirt(0x800)));
        assert_eq!(covering(&maps, range(0x4000, 0x6000)), Err(HostVirt(0x5000)));
    }
}
