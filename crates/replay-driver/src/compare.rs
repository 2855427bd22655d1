//! Compares a replay's RAM and disks with a checkpoint, or with another replay.

mod disks;
mod ram;

pub use disks::{ComparedDisks, compare_disks};
pub use ram::{compare_ram, compare_ram_with_checkpoint};

/// How many differing pages or blocks are listed.
const LISTED_MAX: usize = 16;

/// The difference of two RAMs, or of the disks of two VMs.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    /// The number of pages of RAM, or of blocks of 4096 bytes of disks, that differ.
    pub count: u64,
    /// The first 16 of them: the RAM block's or disk's name, and the offset in it in bytes.
    pub first: Vec<(String, u64)>,
}

impl Difference {
    fn add(&mut self, name: &str, offset_bytes: u64) {
        self.count += 1;
        if self.first.len() < LISTED_MAX {
            self.first.push((name.to_owned(), offset_bytes));
        }
    }
}
