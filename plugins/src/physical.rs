//! The guest's physical memory: the target of an access, and the contents of RAM.
//!
//! ```text
//!   interface 1   QEMU's ram_addr_t ── ranges ──▶ guest-physical address      (main RAM comes first)
//!   interface 4   guest-physical address
//!   guest-physical address ── ranges ──▶ ram_addr_t ── files ──▶ byte of a RAM file
//! ```
//!
//! Ranges are given as `ram=GUEST:NUMBER:LEN/GUEST:NUMBER:LEN...`, files as `ramfile=NUMBER:PATH`,
//! `ramfile1=NUMBER:PATH`... with the number of their first byte. Memory outside of all ranges
//! (ROMs, video memory) keeps QEMU's number and cannot be read.

use crate::api::{AccessTarget, MemoryInfo, access_target};
use crate::arguments::number;
use crate::shared_map::SharedMap;
use std::fs::File;
use std::sync::atomic::Ordering;

/// A contiguous range of RAM in the guest's physical address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    guest: u64,
    /// QEMU's number of the first byte.
    number: u64,
    len: u64,
}

/// The names of the arguments for RAM files, one for each backend. More backends are refused.
pub const FILE_ARGUMENTS: [&str; 8] =
    ["ramfile", "ramfile1", "ramfile2", "ramfile3", "ramfile4", "ramfile5", "ramfile6", "ramfile7"];

/// Set in the address of an access to a device.
pub const DEVICE: u64 = 1 << 63;
/// The address of an access whose target QEMU does not tell.
pub const UNKNOWN: u64 = u64::MAX;

/// The guest's physical memory.
pub struct Physical {
    ranges: Vec<Range>,
    /// The length of the first range if it begins at guest address 0 and number 0, as in all known
    /// machines: nearly all accesses go there.
    plain: u64,
    /// The RAM files, each with the number of its first byte.
    files: Vec<(u64, SharedMap)>,
}

impl Physical {
    /// Parses the argument `ram`, and the arguments of RAM files if contents are needed.
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

    /// The target of the access for which the running memory callback was called: guest-physical,
    /// with [`DEVICE`] for a device, or [`UNKNOWN`].
    #[inline]
    pub fn of_access(&self, info: MemoryInfo, vaddr: u64) -> u64 {
        match access_target(info, vaddr) {
            AccessTarget::Memory(at) if at < self.plain => at,
            AccessTarget::Memory(at) => self.guest(at),
            AccessTarget::Device(at) => at | DEVICE,
            AccessTarget::Unknown => UNKNOWN,
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

    /// Reads `len` bytes (at most 8) at a guest-physical address as a number; `None` if they are not
    /// RAM.
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

fn map_file(text: &str) -> Result<(u64, SharedMap), String> {
    let parts = text.split_once(':').and_then(|(first, path)| Some((number(first)?, path)));
    let Some((first, path)) = parts else {
        return Err(format!("RAM file {text:?} is not NUMBER:PATH"));
    };
    let open = || {
        let file = File::open(path)?;
        let len = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        SharedMap::shared(&file, len, false)
    };
    open().map(|map| (first, map)).map_err(|error| format!("RAM file {path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_above_a_hole_is_translated_both_ways() {
        let physical = Physical::new("0:0:0x1000/0x10000:0x1000:0x2000", &[]).unwrap();
        assert_eq!(physical.guest_of_number(0xfff), 0xfff);
        assert_eq!(physical.guest_of_number(0x1000), 0x10000);
        assert_eq!(physical.guest_of_number(0x2fff), 0x11fff);
        assert_eq!(physical.guest_of_number(0x3000), 0x3000, "other memory keeps its number");
        assert_eq!(physical.number_of_guest(0x11fff), Some(0x2fff));
        assert_eq!(physical.number_of_guest(0x1000), None);
        assert_eq!(physical.read(0, 8), None, "no file");
        for wrong in ["1:2", "a:b:c", "0:0xffffffffffffffff:2"] {
            assert!(Physical::new(wrong, &[]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_is_read_from_the_file_but_not_beyond_it() {
        let path = std::env::temp_dir().join(format!("keyframe-physical-{}", std::process::id()));
        std::fs::write(&path, (0..16).collect::<Vec<u8>>()).unwrap();
        // The ranges are longer than the file.
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
