//! Whether a replay's RAM and disks are those of a checkpoint, or of another replay.

mod disks;
mod ram;

pub use disks::{Side, differing_disks};
pub use ram::{differing, differing_vms};

/// Pages or blocks that are named one by one.
const NAMED_MAX: usize = 16;

/// Where two RAMs, or the disks of two VMs, differ.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    /// How many pages of RAM, or blocks of 4096 bytes of disks.
    pub count: u64,
    /// The first of them: RAM block or disk, offset in it in bytes.
    pub first: Vec<(String, u64)>,
}

impl Difference {
    fn add(&mut self, name: &str, offset_bytes: u64) {
        self.count += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push((name.to_owned(), offset_bytes));
        }
    }
}
