//! Disks whose images QEMU opens itself.

use crate::error::DiskError;
use keyframe_capture::BoxError;
use keyframe_disk::ImageFormat;
use keyframe_qemu::cmdline::{CommandLineError, Slice};
use keyframe_qemu::{Vm, WritableNode};
use keyframe_store::DiskMeta;
use keyframe_vmm::Vmm;
use std::path::PathBuf;

/// A disk whose image QEMU opens itself.
#[derive(Clone, Debug)]
pub struct QemuDisk {
    /// The number of the member that owns the disk.
    pub member: usize,
    /// QEMU's node of the disk.
    pub node: WritableNode,
    /// The description of the disk in checkpoints.
    pub meta: DiskMeta,
    /// Its other names on the command line.
    pub aliases: Vec<String>,
    /// The id of its device, and the name that libvirt gives it.
    pub device_names: Vec<String>,
    /// The reason why no server could open it, so that no restore could bring it back. `None` if a
    /// server can open it.
    pub refused: Option<CommandLineError>,
    /// The image.
    pub image: PathBuf,
    /// Its format; `None` if Keyframe does not read that format.
    pub format: Option<ImageFormat>,
    /// True if QEMU drops the writes at its end, so that they are not in the image.
    pub temporary: bool,
    /// True if it is an export that only QEMU reads, and not a file.
    pub remote: bool,
    /// The part of the image that the guest sees; `None` if it sees all of it.
    pub slice: Option<Slice>,
    /// True if checkpoints leave it out.
    pub left_out: bool,
}

impl QemuDisk {
    /// Returns the disk's name with the names of its device, for the user.
    pub fn all_names(&self) -> String {
        match &self.device_names[..] {
            [] => self.meta.name.clone(),
            others => format!("{} ({})", self.meta.name, others.join(", ")),
        }
    }
}

/// The properties of the captured disks at one time.
#[derive(Clone, Copy, Debug)]
pub struct DisksNow {
    /// True if any of them has internal snapshots.
    pub have_snapshots: bool,
}

/// The disks of a capture that has begun: the present ones and those that were unplugged since.
#[derive(Debug)]
pub struct QemuDisks {
    /// Those that the guests have now, in the order of the checkpoints' disks.
    pub present: Vec<QemuDisk>,
    /// Those that were unplugged. One that comes back is present again.
    unplugged: Vec<QemuDisk>,
    /// True if a disk has had direct I/O since the present run began, or before.
    have_direct_io: bool,
}

/// The changes that another client of QEMU has made to the disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskChanges {
    /// A disk is over another image, after an external snapshot, a mirror or a commit; or it was
    /// plugged in again with another node over its image.
    pub have_other_image: bool,
    /// A disk has another size.
    pub have_other_size: bool,
    /// A disk was unplugged or plugged in again, or has direct I/O for the first time: then RAM has
    /// to be scanned in pauses.
    have_come_or_gone: bool,
}

impl DiskChanges {
    /// Returns these changes together with `later` ones.
    #[must_use]
    pub fn and(self, later: Self) -> Self {
        Self {
            have_other_image: self.have_other_image || later.have_other_image,
            have_other_size: self.have_other_size || later.have_other_size,
            have_come_or_gone: self.have_come_or_gone || later.have_come_or_gone,
        }
    }

    /// Returns true if checkpoints of the present run could not describe the disks.
    pub fn need_new_run(self) -> bool {
        self.have_other_size || self.have_come_or_gone
    }

    /// Checks that the checkpoints of the present run can describe the disks. Error: another run
    /// has to begin, because of a disk that has come, gone or changed its size.
    pub fn require_same_run(self) -> Result<(), DiskError> {
        match (self.have_come_or_gone, self.have_other_size) {
            (true, _) => Err(DiskError::OtherDisks),
            (_, true) => Err(DiskError::OtherSize),
            (false, false) => Ok(()),
        }
    }
}

/// The rule whether a capture goes on with a disk that has got another image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherImages {
    /// Yes: after an external snapshot, a mirror or a commit, QEMU has the whole disk.
    Followed,
    /// No: the images before would have to stay as they are.
    Refused,
}

impl QemuDisks {
    /// Makes the value from the disks `present`, of which none was unplugged yet.
    pub fn new(present: Vec<QemuDisk>) -> Self {
        let have_direct_io = present.iter().any(|disk| disk.node.is_direct);
        Self { present, unplugged: Vec::new(), have_direct_io }
    }

    /// Returns the descriptions of the present disks.
    pub fn metas(&self) -> Vec<DiskMeta> {
        self.present.iter().map(|disk| disk.meta.clone()).collect()
    }

    /// Updates the disks whose VM has changed them: another client gave a disk another image or
    /// another size, unplugged it, or plugged it in again. Returns what has changed. A disk whose
    /// device was plugged in after the VM's start gets no other image: it may be another disk.
    ///
    /// Error: QEMU does not answer. Nothing has changed then.
    pub fn follow(
        &mut self,
        members: &mut [&mut dyn Vmm],
        images: OtherImages,
    ) -> Result<DiskChanges, BoxError> {
        // All questions come first: after a failed one nothing has changed, and the next look finds
        // the same changes.
        let mut looks = Vec::new();
        for (number, member) in members.iter_mut().enumerate() {
            looks.push(self.look(number, qemu(*member)?, images)?);
        }
        let mut changes = DiskChanges::default();
        for (number, (look, member)) in looks.iter().zip(members).enumerate() {
            let before = changes;
            changes.have_come_or_gone |= self.follow_places(number, &look.nodes);
            if !self.have_direct_io && look.has_direct_io {
                (self.have_direct_io, changes.have_come_or_gone) = (true, true);
            }
            for disk in self.present.iter_mut().filter(|disk| disk.member == number) {
                let is_new_node = look.replaced.contains(&disk.node.node);
                let again =
                    look.nodes.iter().find(|now| is_new_node && now.is_same_disk(&disk.node));
                let other = || other_state(&disk.node, &look.nodes, images);
                let Some(now) = again.or_else(other) else { continue };
                let is_same = now.is_same_disk(&disk.node);
                if !is_same && !look.from_start.contains(&now.node) {
                    continue;
                }
                let has_node = is_same && !is_new_node;
                changes.have_other_image |= !has_node;
                changes.have_other_size |= now.disk_bytes != disk.node.disk_bytes;
                // Under a filter of a job, the disk is still the node beneath it.
                let before = std::mem::replace(&mut disk.node, now.clone());
                if has_node {
                    (disk.node.node, disk.node.driver) = (before.node, before.driver);
                }
                disk.meta.disk_bytes = now.disk_bytes;
            }
            if changes != before {
                tell(qemu(*member)?, number, &self.present);
            }
        }
        Ok(changes)
    }

    /// Looks at the disks that VM `number` has now. Error: QEMU does not answer.
    fn look(&self, number: usize, vm: &mut Vm, images: OtherImages) -> Result<Look, BoxError> {
        let nodes = vm.writable_nodes()?;
        let own = || self.present.iter().filter(|disk| disk.member == number);
        let mut from_start = Vec::new();
        for now in own().filter_map(|disk| other_state(&disk.node, &nodes, images)) {
            if vm.is_from_start(now)? {
                from_start.push(now.node.clone());
            }
        }
        let mut replaced = Vec::new();
        for disk in own() {
            let other = nodes.iter().find(|now| is_on_other_node(&disk.node, now));
            // A filter of a job has another driver, and the disk's node is beneath it.
            let Some(now) = other else { continue };
            if now.driver == disk.node.driver || !vm.has_block_node(&disk.node.node)? {
                replaced.push(disk.node.node.clone());
            }
        }
        let is_known = |now: &WritableNode| {
            own().any(|disk| disk.node.node == now.node && disk.node.is_same_disk(now))
        };
        let mut has_direct_io = nodes.iter().any(|node| node.is_direct);
        // A node beneath an image can have it alone.
        if !self.have_direct_io && !has_direct_io && !nodes.iter().all(is_known) {
            has_direct_io = vm.pins_ram()?;
        }
        Ok(Look { nodes, from_start, replaced, has_direct_io })
    }

    /// Parts the disks of VM `member` into those that it has and those that it has not. Returns
    /// true if that differs from before. A disk that comes back has the same image.
    fn follow_places(&mut self, member: usize, nodes: &[WritableNode]) -> bool {
        let is_gone = |disk: &QemuDisk| {
            disk.member == member
                && !nodes.iter().any(|n| n.file == disk.node.file || n.is_in_same_place(&disk.node))
        };
        let back = |disk: &mut QemuDisk| {
            let node = nodes.iter().find(|node| node.is_same_disk(&disk.node));
            let node = node.filter(|_| disk.member == member)?;
            disk.node = node.clone();
            disk.meta.disk_bytes = node.disk_bytes;
            Some(())
        };
        let gone: Vec<_> = self.present.extract_if(.., |disk| is_gone(disk)).collect();
        let returned: Vec<_> = self.unplugged.extract_if(.., |disk| back(disk).is_some()).collect();
        let has_changed = !gone.is_empty() || !returned.is_empty();
        self.present.extend(returned);
        self.unplugged.extend(gone);
        has_changed
    }
}

/// Returns the VM as QEMU's own type. Error: [`DiskError::NotQemu`] if another VMM runs it.
pub fn qemu(member: &mut dyn Vmm) -> Result<&mut Vm, DiskError> {
    member.as_any_mut().downcast_mut().ok_or(DiskError::NotQemu)
}

/// Tells VM `number` which of `disks` belong to it, and which of these the user left out of
/// checkpoints.
pub fn tell(vm: &mut Vm, number: usize, disks: &[QemuDisk]) {
    let own = || disks.iter().filter(|disk| disk.member == number);
    vm.mind_disks(own().map(|disk| disk.node.clone()).collect());
    vm.leave_out_disks(own().filter(|disk| disk.left_out).map(|disk| disk.node.clone()).collect());
}

/// The disks that a VM has at one time.
struct Look {
    nodes: Vec<WritableNode>,
    /// The names of those nodes in another state than before whose devices were there at the VM's
    /// start.
    from_start: Vec<String>,
    /// The names of the nodes that disks had before. They were unplugged and plugged in again with
    /// other nodes.
    replaced: Vec<String>,
    has_direct_io: bool,
}

fn is_on_other_node(disk: &WritableNode, now: &WritableNode) -> bool {
    now.node != disk.node && now.is_same_disk(disk)
}

/// Returns the node of the disk `disk` among `nodes`, if it has another image that is followed, or
/// another size.
fn other_state<'a>(
    disk: &WritableNode,
    nodes: &'a [WritableNode],
    images: OtherImages,
) -> Option<&'a WritableNode> {
    match nodes.iter().find(|node| node.is_same_disk(disk)) {
        Some(same) => Some(same).filter(|now| now.disk_bytes != disk.disk_bytes),
        None if images == OtherImages::Refused => None,
        None => nodes.iter().find(|node| node.is_in_same_place(disk)),
    }
}

/// Checks that each VM has the writable disks that it had, on the same nodes over the same images.
/// If another client plugged a disk in or put a snapshot above one, the captured disks would not be
/// those that the guest sees. Returns the present state of the captured disks.
///
/// Errors: a VM has another disk, or lacks one; QEMU does not answer.
pub fn require_same(
    disks: &[QemuDisk],
    members: &mut [&mut dyn Vmm],
) -> Result<DisksNow, BoxError> {
    let mut have_snapshots = false;
    for (number, member) in members.iter_mut().enumerate() {
        let nodes = qemu(*member)?.writable_nodes()?;
        let captured = |node: &&WritableNode| {
            disks
                .iter()
                .any(|disk| disk.member == number && !disk.left_out && disk.node.node == node.node)
        };
        have_snapshots |= nodes.iter().filter(captured).any(|node| node.has_snapshots);
        let mut known = disks.iter().filter(|disk| disk.member == number).map(|disk| &disk.node);
        let same = |node: &WritableNode| {
            disks.iter().any(|d| d.member == number && d.node.is_same_disk(node))
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
    Ok(DisksNow { have_snapshots })
}
