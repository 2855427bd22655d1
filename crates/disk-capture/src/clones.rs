//! Disks of QEMU whose image files are cloned in each pause ([`crate::image_clones`]).
//!
//! ```text
//!   begin: other disks? ─▶ stop (QEMU drains and flushes) ─▶ FICLONE ─▶ cont ─▶ still the same images?
//! ```
//!
//! After a disk's size was changed, and if a disk was unplugged or plugged in again, the next
//! checkpoint is the first of another run.

use crate::error::{DiskError, Result};
use crate::event::SharedDiskEventSink;
use crate::image_clones::{ClonedCut, ImageClones, Source};
use crate::qemu_disk::{DiskChanges, OtherImages, QemuDisk, QemuDisks, require_same};
use keyframe_capture::BoxError;
use keyframe_store::{DiskMeta, Store};
use keyframe_vmm::Vmm;

/// Captures disks by cloning their image files in the pause, for the engine's thread. The encoder
/// takes the clones through a [`ClonedCut`].
pub struct ClonedDiskCapture {
    disks: QemuDisks,
    metas: Vec<DiskMeta>,
    /// What another client has changed of the disks and the present run does not have.
    changes: DiskChanges,
    /// True if the disks have changed since the images were opened.
    are_sources_old: bool,
    clones: ImageClones,
}

impl ClonedDiskCapture {
    /// Prepares to clone `disks` for the checkpoints of `vm` in `store`. Removes the files that a
    /// killed engine has left. Error: a file cannot be made, or QEMU does not answer.
    pub fn new(
        store: &Store,
        vm: &str,
        disks: Vec<QemuDisk>,
        events: SharedDiskEventSink,
    ) -> Result<Self> {
        let clones = ImageClones::new(store, vm, sources_of(&disks)?, events)?;
        let disks = QemuDisks::new(disks);
        let metas = disks.metas();
        let changes = DiskChanges::default();
        Ok(Self { disks, metas, changes, are_sources_old: false, clones })
    }

    /// Returns the descriptions of the disks.
    pub fn metas(&self) -> &[DiskMeta] {
        &self.metas
    }

    /// Returns the clones.
    pub(crate) fn clones(&mut self) -> &mut ImageClones {
        &mut self.clones
    }

    /// Begins a capture. Errors: the disks have changed, so that another run has to begin; QEMU does
    /// not answer; those of [`ImageClones::begin`].
    pub fn begin(&mut self, members: &mut [&mut dyn Vmm]) -> Result<ClonedCut, BoxError> {
        self.follow(members)?;
        require_same(&self.disks.present, members)?;
        self.clones.begin()
    }

    /// Follows disks of other sizes, or unplugged ones. Error: another run has to begin; QEMU does
    /// not answer.
    fn follow(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        let changes = self.disks.follow(members, OtherImages::Refused)?;
        if changes != DiskChanges::default() {
            self.changes = self.changes.and(changes);
            self.metas = self.disks.metas();
            self.are_sources_old = true;
        }
        if self.are_sources_old {
            self.clones.change_sources(sources_of(&self.disks.present)?);
            self.are_sources_old = false;
        }
        Ok(self.changes.require_same_run()?)
    }

    /// Returns true while the disks need another run.
    pub fn takes_new_run(&self) -> bool {
        self.changes.need_new_run()
    }

    /// Records that a run has begun with the present disks.
    pub fn began_run(&mut self) {
        self.changes = DiskChanges::default();
    }

    /// Checks that the guests still write to the same images. Error: an image was exchanged, or
    /// QEMU does not answer.
    pub fn require_same(&self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        require_same(&self.disks.present, members).map(drop)
    }
}

fn sources_of(disks: &[QemuDisk]) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for (number, disk) in disks.iter().enumerate().filter(|(_, disk)| !disk.left_out) {
        let format = disk.format.ok_or_else(|| DiskError::UnknownFormat(disk.meta.name.clone()))?;
        sources.push(Source::open(number, &disk.image, format)?);
    }
    Ok(sources)
}
