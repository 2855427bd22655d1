//! Compares a replay's RAM, disks, processors and devices with a checkpoint, or with another replay.

mod devices;
mod disks;
mod ram;

pub use devices::{DeviceDifference, DifferingDevice, compare_devices, device_state};
pub use disks::{ComparedDisks, compare_disks};
pub use ram::{compare_ram, compare_ram_with_checkpoint};

use serde::Serialize;

/// How many differing pages or blocks are listed.
const LISTED_MAX: usize = 16;

/// A page of RAM or a block of a disk that differs. In JSON it is the pair `[region, offset_bytes]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "(String, u64)")]
pub struct DifferencePlace {
    /// The name of the RAM block or of the disk.
    pub region: String,
    /// The offset in it, in bytes.
    pub offset_bytes: u64,
}

impl From<DifferencePlace> for (String, u64) {
    fn from(place: DifferencePlace) -> Self {
        (place.region, place.offset_bytes)
    }
}

/// The difference of two RAMs, or of the disks of two VMs.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    /// The number of pages of RAM, or of blocks of 4096 bytes of disks, that differ.
    pub count: u64,
    /// The first 16 of them.
    pub first: Vec<DifferencePlace>,
}

impl Difference {
    fn add(&mut self, region: &str, offset_bytes: u64) {
        self.count += 1;
        if self.first.len() < LISTED_MAX {
            self.first.push(DifferencePlace { region: region.to_owned(), offset_bytes });
        }
    }
}
