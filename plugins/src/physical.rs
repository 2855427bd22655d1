//! The guest's physical memory: where an access went, and what stands there.
//!
//! ```text
//!   interface 1   QEMU's number of the byte of RAM ── ranges ──▶ guest-physical       (pc.ram is QEMU's first RAM)
//!   interface 4   guest-physical already
//!   guest-physical ── ranges ──▶ byte of the RAM file
//! ```
//!
//! Ranges come as `ram=GUEST:OFFSET:LEN/GUEST:OFFSET:LEN...`. What lies in none of them (ROMs, video memory) keeps QEMU's number,
//! and cannot be read.

use crate::api::{MemoryInfo, Place, place};
use crate::arguments::number;
use crate::map::Map;
use std::fs::File;
use std::sync::atomic::Ordering;

/// A part of RAM that the guest sees at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    guest: u64,
    offset: u64,
    len: u64,
}

/// Set in the address of an access to a device.
pub const DEVICE: u64 = 1 << 63;
/// In place of an address that QEMU does not tell.
pub const UNKNOWN: u64 = u64::MAX;

/// Where RAM is.
pub struct Physical {
    ranges: Vec<Range>,
    /// Length of the first range if it has guest address and offset 0, as it has in every machine we know: the way of
    /// nearly all accesses.
    plain: u64,
    file: Option<Map>,
}

impl Physical {
    /// Of the argument `ram`, and the RAM file where what stands in memory is needed.
    pub fn new(ranges: &str, file: Option<&str>) -> Result<Self, String> {
        let ranges =
            ranges.split('/').filter(|text| !text.is_empty()).map(range).collect::<Result<Vec<_>, _>>()?;
        let plain = ranges.first().filter(|r| r.guest == 0 && r.offset == 0).map_or(0, |r| r.len);
        let file = file.map(map_file).transpose()?;
        Ok(Self { ranges, plain, file })
    }

    /// Where the access of the running memory callback went: guest-physical, with [`DEVICE`] or [`UNKNOWN`].
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
        self.guest_of_offset(at)
    }

    #[cfg(not(keyframe_interface = "1"))]
    fn guest(&self, at: u64) -> u64 {
        let _ = self;
        at
    }

    #[cfg_attr(not(any(test, keyframe_interface = "1")), expect(dead_code, reason = "of one interface"))]
    fn guest_of_offset(&self, at: u64) -> u64 {
        let range = self.ranges.iter().find(|r| at.wrapping_sub(r.offset) < r.len);
        range.map_or(at, |r| at - r.offset + r.guest)
    }

    fn offset_of_guest(&self, at: u64) -> Option<u64> {
        let range = self.ranges.iter().find(|r| at.wrapping_sub(r.guest) < r.len)?;
        Some(at - range.guest + range.offset)
    }

    /// The `len` (8 at most) bytes at a guest-physical address, as a number; `None` where they are not RAM.
    pub fn read(&self, at: u64, len: u32) -> Option<u64> {
        let offset = usize::try_from(self.offset_of_guest(at)?).ok()?;
        let len = len.min(8) as usize;
        let bytes = self.file.as_ref()?.bytes().get(offset..offset.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(byte.load(Ordering::Relaxed))))
    }
}

fn range(text: &str) -> Result<Range, String> {
    let mut parts = text.split(':').map(number);
    let mut next = || parts.next().flatten();
    match (next(), next(), next()) {
        (Some(guest), Some(offset), Some(len))
            if guest.checked_add(len).is_some() && offset.checked_add(len).is_some() =>
        {
            Ok(Range { guest, offset, len })
        }
        _ => Err(format!("range of RAM {text:?} is not GUEST:OFFSET:LEN")),
    }
}

fn map_file(path: &str) -> Result<Map, String> {
    let open = || {
        let file = File::open(path)?;
        let len = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        Map::shared(&file, len, false)
    };
    open().map_err(|error| format!("RAM file {path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_above_a_hole_is_found_both_ways() {
        let physical = Physical::new("0:0:0x1000/0x10000:0x1000:0x2000", None).unwrap();
        assert_eq!(physical.guest_of_offset(0xfff), 0xfff);
        assert_eq!(physical.guest_of_offset(0x1000), 0x10000);
        assert_eq!(physical.guest_of_offset(0x2fff), 0x11fff);
        assert_eq!(physical.guest_of_offset(0x3000), 0x3000, "what is no RAM keeps its number");
        assert_eq!(physical.offset_of_guest(0x11fff), Some(0x2fff));
        assert_eq!(physical.offset_of_guest(0x1000), None);
        assert_eq!(physical.read(0, 8), None, "no file");
        for wrong in ["1:2", "a:b:c", "0:0xffffffffffffffff:2"] {
            assert!(Physical::new(wrong, None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_is_read_from_the_file_and_never_beyond_it() {
        let path = std::env::temp_dir().join(format!("keyframe-physical-{}", std::process::id()));
        std::fs::write(&path, (0..16).collect::<Vec<u8>>()).unwrap();
        // The ranges claim more than the file has.
        let physical = Physical::new("0:0:0x1000", path.to_str()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(physical.read(1, 4), Some(0x0403_0201));
        assert_eq!(physical.read(8, 8), Some(0x0f0e_0d0c_0b0a_0908));
        assert_eq!(physical.read(9, 8), None);
        assert_eq!(physical.read(0x1000, 1), None);
    }
}
