//! Drives whose files a VMM other than QEMU opens itself: the files are cloned in each pause
//! ([`crate::image_clones`]).
//!
//! ```text
//!   begin: other drives? ─▶ stop ─▶ the VMM saves its devices ─▶ settled: FICLONE ─▶ cont ─▶ the same files?
//! ```
//!
//! A VMM may still carry out a request of the guest until it saves its devices, and the guest makes
//! none in the pause. So the files are cloned after the save.
//!
//! After a drive got another file, the next checkpoint is the first of another run.

use crate::drives::{drives_of, require_same};
use crate::error::{DiskError, Result};
use crate::event::SharedDiskEventSink;
use crate::image_clones::{ImageClones, Source};
use crate::{DiskCapture, DiskCut};
use keyframe_capture::BoxError;
use keyframe_disk::ImageFormat;
use keyframe_store::{DiskMeta, Store};
use keyframe_vm_disks::base_image;
use keyframe_vmm::{Vmm, WritableDrive};

/// Captures the drives of a VM by cloning their files, for the engine's thread.
pub struct ClonedDriveCapture {
    drives: Vec<WritableDrive>,
    metas: Vec<DiskMeta>,
    /// True if the drives are others than those of the present run.
    have_changed: bool,
    clones: ImageClones,
}

impl ClonedDriveCapture {
    /// Prepares to clone `drives`, for which that is possible, for the checkpoints of `vm` in
    /// `store`. Removes the files that a killed engine has left. Error: a file cannot be read.
    pub fn new(
        store: &Store,
        vm: &str,
        drives: Vec<WritableDrive>,
        events: SharedDiskEventSink,
    ) -> Result<Self> {
        let clones = ImageClones::new(store, vm, sources_of(&drives)?, events)?;
        Ok(Self { metas: metas_of(&drives)?, drives, have_changed: false, clones })
    }
}

impl DiskCapture for ClonedDriveCapture {
    fn metas(&self) -> &[DiskMeta] {
        &self.metas
    }

    fn takes_new_run(&self) -> bool {
        self.have_changed
    }

    fn began_run(&mut self) {
        self.have_changed = false;
    }

    fn begin(&mut self, members: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError> {
        let now = drives_of(members)?;
        if now != self.drives {
            (self.metas, self.have_changed) = (metas_of(&now)?, true);
            self.clones.change_sources(sources_of(&now)?);
            self.drives = now;
        }
        if self.have_changed {
            return Err(DiskError::DrivesChanged.into());
        }
        self.clones.begin().map(DiskCut::Cloned)
    }

    fn before_stop(&mut self) -> Result<(), BoxError> {
        self.clones.sync()
    }

    /// Nothing yet: the VMM may still carry out a request of the guest.
    fn cut(&mut self, _: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Ok(())
    }

    fn settled(&mut self) -> Result<(), BoxError> {
        self.clones.cut()
    }

    /// The guest must still write to the same files.
    fn resumed(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        require_same(&self.drives, members)
    }

    fn captured(&mut self, seq: Option<u64>, _: &mut [&mut dyn Vmm]) {
        self.clones.captured(seq);
    }

    fn sealed(&mut self, seq: u64, _: &mut [&mut dyn Vmm]) {
        self.clones.sealed(seq);
    }

    fn failed(&mut self, lost: &[u64], _: &mut [&mut dyn Vmm]) {
        self.clones.failed(lost);
    }
}

fn metas_of(drives: &[WritableDrive]) -> Result<Vec<DiskMeta>> {
    let meta = |drive: &WritableDrive| {
        let base = base_image::describe(&drive.path, ImageFormat::Raw)?;
        let (name, disk_bytes) = (drive.name.clone(), drive.disk_bytes);
        Ok(DiskMeta { name, disk_bytes, base, ..DiskMeta::default() })
    };
    drives.iter().map(meta).collect()
}

fn sources_of(drives: &[WritableDrive]) -> Result<Vec<Source>> {
    let drives = drives.iter().enumerate();
    drives.map(|(number, drive)| Source::open(number, &drive.path, ImageFormat::Raw)).collect()
}
