//! The guest's physical memory: where an access went, and what stands there.
//!
//! ```text
//!   interface 1   QEMU's number of the byte of RAM ── ranges ──▶ guest-physical       (main RAM is QEMU's first RAM)
//!   interface 4   guest-physical already
//!   guest-physical ── ranges ──▶ number ── files ──▶ byte of a RAM file
//! ```
//!
//! Ranges come as `ram=GUEST:NUMBER:LEN/GUEST:NUMBER:LEN...`, files as `ramfile=NUMBER:PATH`,
//! `ramfile1=NUMBER:PATH`... with the number of their first byte. What lies in no range (ROMs,
//! video memory) keeps QEMU's number, and cannot be read.

use crate::api::{MemoryInfo, Place, place};
use crate::arguments::number;
use crate::map::Map;
use std::fs::File;
use std::sync::atomic::Ordering;

/// A part of RAM that the guest sees at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    guest: u64,
    /// QEMU's of its first byte.
    number: u64,
    len: u64,
}

/// The names that arguments for files of RAM have, one for each backend: more are refused.
pub const FILE_ARGUMENTS: [&str; 8] =
    ["ramfile", "ramfile1", "ramfile2", "ramfile3", "ramfile4", "ramfile5", "ramfile6", "ramfile7"];

/// Set in the address of an access to a device.
pub const DEVICE: u64 = 1 << 63;
/// In place of an address that QEMU does not tell.
pub const UNKNOWN: u64 = u64::MAX;

/// Where RAM is.
pub struct Physical {
    ranges: Vec<Range>,
    /// Length of the first range if it has guest address and number 0, as it has in every machine
    /// we know: the way of nearly all accesses.
    plain: u64,
    /// Each with the number of its first byte.
    files: Vec<(u64, Map)>,
}

impl Physical {
    /// Of the argument `ram`, and those of the files where what stands in memory is needed.
    pub fn new(ranges: &str, files: &[String]) -> Result<Self, String> {
        let ranges = ranges
            .split('/')
            .filter(|text| !text.is_empty())
            .map(range)
            .collect::<Result<Vec<_>, _>>()?;
        let plain = ranges.first().filter(|r| r.guest == 0 && r.number == 0).map_or(0, |r| r.len);
        let files = files.iter().map(|text| map_file(text)).collect::<Result<_, _>>()?;
        Ok(Self { ranges, plain, files })
    }

    /// Where the access of the running memory callback went: guest-physical, with [`DEVICE`] or
    /// [`UNKNOWN`].
    #[inline]
    pub fn of_access(&self, info: MemoryInfo, vaddr: u64) -> u64 {
        match place(info, vaddr) {
            Place::Memory(at) if at < self.plain => at,
            Place::Memory(at) => self.guest(at),
            Place::Device(at) => at | DEVICE,
            Place::Unknown => UNKNOWN,
        }
    }

    #[cfg(keyframe_interface = "1")]
    fn guest(&self, at: u64) -> u64 {
        self.guest_of_number(at)
    }

    #[cfg(not(keyframe_interface = "1"))]
    fn guest(&self, at: u64) -> u64 {
        let _ = self;
        at
    }

    #[cfg_attr(
        not(any(test, keyframe_interface = "1")),
        expect(dead_code, reason = "of one interface")
    )]
    fn guest_of_number(&self, at: u64) -> u64 {
        let range = self.ranges.iter().find(|r| at.wrapping_sub(r.number) < r.len);
        range.map_or(at, |r| at - r.number + r.guest)
    }

    fn number_of_guest(&self, at: u64) -> Option<u64> {
        let range = self.ranges.iter().find(|r| at.wrapping_sub(r.guest) < r.len)?;
        Some(at - range.guest + range.number)
    }

    /// The `len` (8 at most) bytes at a guest-physical address, as a number; `None` where they are
    /// not RAM.
    pub fn read(&self, at: u64, len: u32) -> Option<u64> {
        let number = self.number_of_guest(at)?;
        let len = len.min(8) as usize;
        let bytes = self.files.iter().find_map(|(first, map)| {
            let offset = usize::try_from(number.checked_sub(*first)?).ok()?;
            map.bytes().get(offset..offset.checked_add(len)?)
        })?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0, |value, byte| value << 8 | u64::from(byte.load(Ordering::Relaxed))),
        )
    }
}

fn range(text: &str) -> Result<Range, String> {
    let mut parts = text.split(':').map(number);
    let mut next = || parts.next().flatten();
    match (next(), next(), next()) {
        (Some(guest), Some(number), Some(len))
            if guest.checked_add(len).is_some() && number.checked_add(len).is_some() =>
        {
            Ok(Range { guest, number, len })
        }
        _ => Err(format!("range of RAM {text:?} is not GUEST:NUMBER:LEN")),
    }
}

fn map_file(text: &str) -> Result<(u64, Map), String> {
    let parts = text.split_once(':').and_then(|(first, path)| Some((number(first)?, path)));
    let Some((first, path)) = parts else {
        return Err(format!("RAM file {text:?} is not NUMBER:PATH"));
    };
    let open = || {
        let file = File::open(path)?;
        let len = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        Map::shared(&file, len, false)
    };
    open().map(|map| (first, map)).map_err(|error| format!("RAM file {path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_above_a_hole_is_found_both_ways() {
        let physical = Physical::new("0:0:0x1000/0x10000:0x1000:0x2000", &[]).unwrap();
        assert_eq!(physical.guest_of_number(0xfff), 0xfff);
        assert_eq!(physical.guest_of_number(0x1000), 0x10000);
        assert_eq!(physical.guest_of_number(0x2fff), 0x11fff);
        assert_eq!(physical.guest_of_number(0x3000), 0x3000, "what is no RAM keeps its number");
        assert_eq!(physical.number_of_guest(0x11fff), Some(0x2fff));
        assert_eq!(physical.number_of_guest(0x1000), None);
        assert_eq!(physical.read(0, 8), None, "no file");
        for wrong in ["1:2", "a:b:c", "0:0xffffffffffffffff:2"] {
            assert!(Physical::new(wrong, &[]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_is_read_from_the_file_and_never_beyond_it() {
        let path = std::env::temp_dir().join(format!("keyframe-physical-{}", std::process::id()));
        std::fs::write(&path, (0..16).collect::<Vec<u8>>()).unwrap();
        // The ranges claim more than the file has.
        let files = [format!("0:{}", path.display()), format!("0x800:{}", path.display())];
        let physical = Physical::new("0:0:0x1000", &files).unwrap();
        assert!(Physical::new("0:0:0x1000", &[path.display().to_string()]).is_err(), "no number");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(physical.read(1, 4), Some(0x0403_0201));
        assert_eq!(physical.read(8, 8), Some(0x0f0e_0d0c_0b0a_0908));
        assert_eq!(physical.read(9, 8), None);
        assert_eq!(physical.read(0x1000, 1), None);
        assert_eq!(physical.read(0x801, 4), Some(0x0403_0201), "of the second file");
        assert_eq!(physical.read(0x7fc, 8), None, "across two files");
    }
}
