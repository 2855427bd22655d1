//! QEMU's memory, as far as finding its RAM blocks needs: what is mapped, and reading it.
//!
//! Reading guest RAM fast, tracking, and a pid that cannot be reused are the kernel crate's job;
//! this reads a few MiB of QEMU's own heap once, through files of `/proc`.

use crate::{Error, Result};
use keyframe_units::{HostRange, HostVirt};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// A memory mapping of QEMU's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The address range.
    pub range: HostRange,
    /// Private, readable and writable.
    pub private_data: bool,
    /// The path of the mapped file; empty for anonymous memory.
    pub path: String,
}

/// All memory mappings of QEMU's process, by rising address.
#[derive(Default)]
pub struct Maps(Vec<Mapping>);

impl Maps {
    /// Returns the mappings.
    pub fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.0.iter()
    }

    /// Returns true if every byte of `range` is mapped.
    pub fn covers(&self, range: HostRange) -> bool {
        let mut at = range.start;
        for mapping in &self.0 {
            if mapping.range.start <= at && at < mapping.range.end() {
                at = mapping.range.end();
            }
        }
        range.len_bytes > 0 && range.start.checked_add(range.len_bytes).is_some_and(|end| at >= end)
    }
}

/// A QEMU process.
pub struct QemuProcess {
    pid: u32,
}

impl QemuProcess {
    /// Makes a handle of the process `pid`, without looking for the process.
    pub fn new(pid: u32) -> Self {
        Self { pid }
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Reads the process's memory mappings from `/proc/PID/maps`. Error: [`Error::Io`] if the file
    /// cannot be read.
    pub fn maps(&self) -> Result<Maps> {
        let path = format!("/proc/{}/maps", self.pid);
        let bytes = std::fs::read(&path).map_err(Error::io(format!("read {path}")))?;
        Ok(Maps(String::from_utf8_lossy(&bytes).lines().filter_map(parse_line).collect()))
    }

    /// Reads the bytes at `range` of the process's memory. Error: [`Error::Io`] if this user may
    /// not read it, or if a part of `range` is not mapped.
    pub fn read(&self, range: HostRange) -> Result<Vec<u8>> {
        let path = format!("/proc/{}/mem", self.pid);
        let operation = || format!("read {} bytes at {} of {path}", range.len_bytes, range.start);
        let len = usize::try_from(range.len_bytes).map_err(|_| {
            Error::io(operation())(std::io::Error::from(std::io::ErrorKind::OutOfMemory))
        })?;
        let mut bytes = vec![0; len];
        File::open(&path)
            .and_then(|memory| memory.read_exact_at(&mut bytes, range.start.0))
            .map_err(Error::io(operation()))?;
        Ok(bytes)
    }
}

/// `start-end perms offset dev inode path`; `None` for a line that is none.
fn parse_line(line: &str) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        let trimmed = rest.trim_start_matches(' ');
        let (word, left) = trimmed.split_once(' ').unwrap_or((trimmed, ""));
        rest = left;
        word
    };
    let (range, perms) = (field(), field());
    let (_offset, _dev, _inode) = (field(), field(), field());
    let (start, end) = range.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    Some(Mapping {
        range: HostRange { start: HostVirt(start), len_bytes: end.checked_sub(start)? },
        private_data: perms.starts_with("rw") && perms.ends_with('p'),
        path: rest.trim_start_matches(' ').to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps(text: &str) -> Maps {
        Maps(text.lines().filter_map(parse_line).collect())
    }

    #[test]
    fn a_range_is_covered_across_neighbouring_mappings_but_not_across_a_gap() {
        let maps = maps(
            "1000-3000 rw-p 00000000 00:00 0 \n3000-4000 r--p 00000000 00:01 7   /a b (deleted)\n5000-6000 rw-p 0 00:00 0 [heap]",
        );
        let range = |start, len_bytes| HostRange { start: HostVirt(start), len_bytes };
        assert!(maps.covers(range(0x1000, 0x3000)) && maps.covers(range(0x2000, 0x1800)));
        assert!(!maps.covers(range(0x3000, 0x2001)) && !maps.covers(range(0x800, 0x1000)));
        assert!(!maps.covers(range(0x1000, 0)) && !maps.covers(range(u64::MAX, 2)));
        let found: Vec<_> = maps.iter().map(|m| (m.path.as_str(), m.private_data)).collect();
        assert_eq!(found, [("", true), ("/a b (deleted)", false), ("[heap]", true)]);
    }

    #[test]
    fn our_own_memory_is_read() {
        let secret = b"a string on the heap".to_vec();
        let process = QemuProcess::new(std::process::id());
        let start = HostVirt(secret.as_ptr() as u64);
        let range = HostRange { start, len_bytes: secret.len() as u64 };
        assert!(process.maps().unwrap().covers(range));
        assert_eq!(process.read(range).unwrap(), secret);
        let error = process.read(HostRange { start: HostVirt(8), len_bytes: 8 }).unwrap_err();
        assert!(error.to_string().contains("0x8"), "{error}");
    }
}
