//! What is in the file system, and the numbers of its inodes.
//!
//! ```text
//!   1                                       the root
//!   checkpoint << 24                        its directory
//!   checkpoint << 24 | member << 8          the directory of a group's member, counted from 1 on
//!   checkpoint << 24 | member << 8 | kind   files; those of the checkpoint have member 0
//!                                           disks: behind the kinds, by their number in the checkpoint
//!   1 << 63 | n                             the n-th link by name, in the order in which they were first seen
//! ```

use keyframe_units::CheckpointId;

/// The inode number of the root directory.
pub const ROOT: u64 = 1;
const LINK: u64 = 1 << 63;
const KIND_BITS: u32 = 8;
/// The largest number of disks of a checkpoint that are shown. Further disks have no inodes.
pub const DISKS_MAX: usize = 128;
const MEMBER_BITS: u32 = 16;

/// Identifies the directory of a checkpoint, or of a member of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeDirectory {
    /// The checkpoint.
    pub id: CheckpointId,
    /// The member of its group, counted from 1 on; 0 for the directory of the checkpoint itself.
    pub member: u16,
}

impl NodeDirectory {
    /// Returns the directory of checkpoint `id` itself.
    pub fn of(id: CheckpointId) -> Self {
        Self { id, member: 0 }
    }

    fn number(self) -> u64 {
        self.id.0 << (MEMBER_BITS + KIND_BITS) | u64::from(self.member) << KIND_BITS
    }
}

/// A kind of file in the directory of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountedFile {
    /// `info.json`
    Info,
    /// `device.state`
    Devices,
    /// `ram.raw`
    Raw,
    /// `ram.elf`
    Core,
    /// `screen.png`
    Screen,
}

impl MountedFile {
    /// All kinds of files of a checkpoint, in the order of listings. The inode number depends on
    /// the position of a kind, so new kinds must be added at the end.
    pub const ALL: [Self; 5] = [Self::Info, Self::Devices, Self::Raw, Self::Core, Self::Screen];

    /// Returns the file's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "info.json",
            Self::Devices => "device.state",
            Self::Raw => "ram.raw",
            Self::Core => "ram.elf",
            Self::Screen => "screen.png",
        }
    }
}

/// The object that an inode number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountNode {
    /// The root directory, which lists the checkpoints and the tags.
    Root,
    /// The directory of a checkpoint, or of a member of its group.
    Directory(NodeDirectory),
    /// A file in the directory of a checkpoint or member.
    File(NodeDirectory, MountedFile),
    /// A disk in the directory of a checkpoint or member, with the disk's number in the checkpoint.
    Disk(NodeDirectory, u8),
    /// The symbolic link with this number. Links lead from tags and from `latest` to checkpoints.
    Link(u64),
}

impl MountNode {
    /// Returns the inode number of this node.
    pub fn number(self) -> u64 {
        match self {
            Self::Root => ROOT,
            Self::Directory(place) => place.number(),
            Self::File(place, kind) => {
                let at = MountedFile::ALL.iter().position(|k| *k == kind).unwrap_or_default();
                place.number() | (at as u64 + 1)
            }
            Self::Disk(place, disk) => {
                place.number() | (MountedFile::ALL.len() as u64 + 1 + u64::from(disk))
            }
            Self::Link(n) => LINK | n,
        }
    }

    /// Returns the node with an inode number; `None` if no node has it.
    pub fn of(number: u64) -> Option<Self> {
        if number == ROOT {
            return Some(Self::Root);
        }
        if number & LINK != 0 {
            return Some(Self::Link(number & !LINK));
        }
        let id = CheckpointId(number >> (MEMBER_BITS + KIND_BITS));
        let place = NodeDirectory { id, member: (number >> KIND_BITS) as u16 };
        let kind = (number & ((1 << KIND_BITS) - 1)) as usize;
        match kind.checked_sub(1) {
            _ if id.0 == 0 => None,
            None => Some(Self::Directory(place)),
            Some(k) => match k.checked_sub(MountedFile::ALL.len()) {
                None => MountedFile::ALL.get(k).map(|kind| Self::File(place, *kind)),
                Some(disk) => Some(Self::Disk(place, disk as u8)).filter(|_| disk < DISKS_MAX),
            },
        }
    }

    /// Returns true if checkpoint `id` can be mounted: its number is not 0 and fits into inode
    /// numbers.
    pub fn has_inodes(id: CheckpointId) -> bool {
        id.0 > 0 && id.0 < 1 << (63 - MEMBER_BITS - KIND_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_for_one_thing_each() {
        let mut all = vec![MountNode::Root, MountNode::Link(0), MountNode::Link(9)];
        for member in [0, 1, 258, u16::MAX] {
            let place = NodeDirectory { id: CheckpointId(77), member };
            all.push(MountNode::Directory(place));
            all.extend(MountedFile::ALL.map(|k| MountNode::File(place, k)));
            all.extend([0, 1, DISKS_MAX as u8 - 1].map(|disk| MountNode::Disk(place, disk)));
        }
        for node in &all {
            assert_eq!(MountNode::of(node.number()), Some(*node));
        }
        assert_eq!([0, 2, 200, 77 << 24 | 0xf3].map(MountNode::of), [None; 4]);
    }
}
