//! What is in the file system, and the numbers of its inodes.
//!
//! ```text
//!   1                        the root
//!   checkpoint << 8          its directory
//!   checkpoint << 8 | kind   its files
//!   1 << 63 | n              the n-th link by name, in the order in which they were first seen
//! ```

use keyframe_units::CheckpointId;

/// The root's inode.
pub const ROOT: u64 = 1;
const LINK: u64 = 1 << 63;
const KIND_BITS: u32 = 8;

/// A file of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `info.json`
    Info,
    /// `device.state`
    Devices,
    /// `ram.raw`
    Raw,
    /// `ram.elf`
    Core,
}

impl Kind {
    /// All kinds, in the order of listings. The place in it is the inode's low part, so new ones go behind.
    pub const ALL: [Self; 4] = [Self::Info, Self::Devices, Self::Raw, Self::Core];

    /// The file's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "info.json",
            Self::Devices => "device.state",
            Self::Raw => "ram.raw",
            Self::Core => "ram.elf",
        }
    }
}

/// What an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// The directory of all.
    Root,
    /// A checkpoint.
    Checkpoint(CheckpointId),
    /// A file of a checkpoint.
    File(CheckpointId, Kind),
    /// A link, by its number.
    Link(u64),
}

impl Node {
    /// The inode's number.
    pub fn number(self) -> u64 {
        match self {
            Self::Root => ROOT,
            Self::Checkpoint(id) => id.0 << KIND_BITS,
            Self::File(id, kind) => {
                let place = Kind::ALL.iter().position(|k| *k == kind).unwrap_or_default();
                id.0 << KIND_BITS | (place as u64 + 1)
            }
            Self::Link(n) => LINK | n,
        }
    }

    /// What a number stands for.
    pub fn of(number: u64) -> Option<Self> {
        if number == ROOT {
            return Some(Self::Root);
        }
        if number & LINK != 0 {
            return Some(Self::Link(number & !LINK));
        }
        let id = CheckpointId(number >> KIND_BITS);
        let place = (number & ((1 << KIND_BITS) - 1)) as usize;
        match place.checked_sub(1) {
            _ if id.0 == 0 => None,
            None => Some(Self::Checkpoint(id)),
            Some(k) => Kind::ALL.get(k).map(|kind| Self::File(id, *kind)),
        }
    }

    /// True for a checkpoint's number that has inodes.
    pub fn has_inodes(id: CheckpointId) -> bool {
        id.0 > 0 && id.0 < 1 << (63 - KIND_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_for_one_thing_each() {
        let id = CheckpointId(77);
        let mut all = vec![Node::Root, Node::Checkpoint(id), Node::Link(0), Node::Link(9)];
        all.extend(Kind::ALL.map(|k| Node::File(id, k)));
        for node in &all {
            assert_eq!(Node::of(node.number()), Some(*node));
        }
        assert_eq!([0, 2, 200, 77 << 8 | 0x63].map(Node::of), [None; 4]);
    }
}
