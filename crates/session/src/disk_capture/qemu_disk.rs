//! Disks whose images QEMU opens itself.

use crate::error::DiskError;
use crate::machines::Member;
use keyframe_capture::BoxError;
use keyframe_disk::ImageFormat;
use keyframe_qemu::WritableNode;
use keyframe_store::DiskMeta;
use std::path::PathBuf;

/// One of them.
#[derive(Clone, Debug)]
pub struct QemuDisk {
    /// Whose it is: the number of the member.
    pub member: usize,
    /// As QEMU has it.
    pub node: WritableNode,
    /// What its checkpoints say of it.
    pub meta: DiskMeta,
    /// The image.
    pub image: PathBuf,
    /// Its format, where it is one that we read.
    pub format: Option<ImageFormat>,
    /// What is written is thrown away at the end: it is not in the image.
    pub temporary: bool,
    /// It is no file but an export, which QEMU alone reads.
    pub remote: bool,
    /// It is no part of checkpoints.
    pub left_out: bool,
}

/// Requires that each VM has the writable disks that it had, on the same nodes over the same
/// images. If another client plugged a disk in or put a snapshot above one, the captured disks would
/// not be those that the guest sees.
pub fn require_same(disks: &[QemuDisk], members: &mut [Member]) -> Result<(), BoxError> {
    for (number, member) in members.iter_mut().enumerate() {
        let nodes = member.vm.qemu()?.writable_nodes()?;
        let mut known = disks.iter().filter(|disk| disk.member == number).map(|disk| &disk.node);
        let same = |node: &WritableNode| {
            // A filter of QEMU's own, as of a job, stands above the node for a while.
            disks.iter().any(|d| {
                d.member == number && d.node.device == node.device && d.node.file == node.file
            })
        };
        if let Some(other) = nodes.iter().find(|node| !same(node)) {
            let name = if other.device.is_empty() { &other.node } else { &other.device };
            let (disk, file) = (name.clone(), other.file.clone());
            return Err(DiskError::Changed { disk, file }.into());
        }
        if let Some(gone) = known.find(|known| !nodes.iter().any(|node| node.file == known.file)) {
            let (disk, file) = (gone.device.clone(), gone.file.clone());
            return Err(DiskError::Unplugged { disk, file }.into());
        }
    }
    Ok(())
}
