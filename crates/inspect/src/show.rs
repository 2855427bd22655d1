//! A checkpoint as `show --json` prints it.

use crate::entry::Entry;
use keyframe_store::{MachineMeta, MemberMeta, Sealed};
use keyframe_units::RamBlock;
use keyframe_vm_disks::base_image;
use serde::Serialize;

/// The output of `keyframe show --json`: the entry of `keyframe list`, the RAM blocks and the VM's
/// definition.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    entry: Entry,
    ram: &'a [RamBlock],
    machine: &'a MachineMeta,
    /// The VMs of a group.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    members: &'a [MemberMeta],
    map_chain: &'a [u64],
}

/// Makes the entry of a checkpoint, and notes in it which of its disks cannot be read now.
pub fn entry(sealed: &Sealed) -> Entry {
    let mut entry = Entry::of(sealed);
    for (shown, disk) in entry.disks.iter_mut().zip(&sealed.meta.disks) {
        shown.unreadable =
            base_image::require_unchanged(&disk.base).err().map(|why| why.to_string());
    }
    entry
}

/// Returns the value that `keyframe show --json` prints for a checkpoint.
pub fn shown(sealed: &Sealed) -> impl Serialize + '_ {
    Shown {
        entry: entry(sealed),
        ram: sealed.meta.ram.blocks(),
        machine: &sealed.meta.machine,
        members: &sealed.meta.members,
        map_chain: &sealed.meta.map_chain,
    }
}
