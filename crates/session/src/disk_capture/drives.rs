//! Drives whose files a VMM other than QEMU opens itself: the files are cloned in each pause
//! ([`super::image_clones`]).
//!
//! ```text
//!   begin: other drives? ─▶ stop ─▶ the VMM saves its devices ─▶ settled: FICLONE ─▶ cont ─▶ the same files?
//! ```
//!
//! A VMM may still carry out a request of the guest until it saves its devices, and the guest makes
//! none in the pause. So the files are cloned after the save.
//!
//! After a drive got another file, the next checkpoint is the first of another run.

use super::image_clones::{ImageClones, Source, objection};
use super::{DiskCapture, DiskCut};
use crate::error::{DiskError, Result};
use crate::event::SharedEventSink;
use crate::machines::Member;
use keyframe_capture::BoxError;
use keyframe_disk::ImageFormat;
use keyframe_store::{DiskMeta, Store};
use keyframe_vm_disks::base_image;
use keyframe_vmm::{AuditFinding, Severity, WritableDrive};

/// Captures the drives of a VM by cloning their files, for the engine's thread.
pub struct DriveCapture {
    drives: Vec<WritableDrive>,
    metas: Vec<DiskMeta>,
    /// True if the drives are others than those of the present run.
    have_changed: bool,
    clones: ImageClones,
}

impl DriveCapture {
    /// Prepares to clone `drives`, for which that is possible, for the checkpoints of `vm` in
    /// `store`. Removes the files that a killed engine has left. Error: a file cannot be read.
    pub fn new(
        store: &Store,
        vm: &str,
        drives: Vec<WritableDrive>,
        events: SharedEventSink,
    ) -> Result<Self> {
        let clones = ImageClones::new(store, vm, sources_of(&drives)?, events)?;
        Ok(Self { metas: metas_of(&drives)?, drives, have_changed: false, clones })
    }

    /// Checks that `drives` can be captured, by a clone of each. Errors: a file cannot be cloned; two
    /// drives have the same file, and a restored VM would have two.
    pub fn require_possible(drives: &[WritableDrive]) -> Result<()> {
        for (at, drive) in drives.iter().enumerate() {
            if let Some(twin) = drives[..at].iter().find(|one| one.identity == drive.identity) {
                let (first, second) = (twin.name.clone(), drive.name.clone());
                return Err(DiskError::SameFile { first, second }.into());
            }
            if let Some(why) = objection(&drive.path, Some(ImageFormat::Raw), false) {
                return Err(DiskError::DriveNotCloneable { name: drive.name.clone(), why }.into());
            }
        }
        Ok(())
    }

    /// Returns what the user should know before `drives` are captured: with clones of it, each block
    /// that the guest overwrites takes new space.
    pub fn warnings(drives: &[WritableDrive]) -> Vec<AuditFinding> {
        let is_narrow = |drive: &&WritableDrive| {
            let space = rustix::fs::statvfs(&drive.path);
            space
                .is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) < drive.disk_bytes)
        };
        let finding = |drive: &WritableDrive| AuditFinding {
            subject: format!("drive {}", drive.name),
            reason:
                "its file system has less free space than the drive is large; with clones of it, \
                     each block that the guest overwrites takes new space, and without space the \
                     guest's writes fail"
                    .into(),
            fix: "make space, or forget checkpoints in time (--keep-last, --keep-within)".into(),
            severity: Severity::Warning,
        };
        drives.iter().filter(is_narrow).map(finding).collect()
    }
}

impl DiskCapture for DriveCapture {
    fn metas(&self) -> &[DiskMeta] {
        &self.metas
    }

    fn takes_new_run(&self) -> bool {
        self.have_changed
    }

    fn began_run(&mut self) {
        self.have_changed = false;
    }

    fn begin(&mut self, members: &mut [Member]) -> Result<DiskCut, BoxError> {
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
    fn cut(&mut self, _: &mut [Member]) -> Result<(), BoxError> {
        Ok(())
    }

    fn settled(&mut self) -> Result<(), BoxError> {
        self.clones.cut()
    }

    /// The guest must still write to the same files.
    fn resumed(&mut self, members: &mut [Member]) -> Result<(), BoxError> {
        if drives_of(members)? == self.drives {
            Ok(())
        } else {
            Err(DiskError::DrivesChanged.into())
        }
    }

    fn captured(&mut self, seq: Option<u64>, _: &mut [Member]) {
        self.clones.captured(seq);
    }

    fn sealed(&mut self, seq: u64, _: &mut [Member]) {
        self.clones.sealed(seq);
    }

    fn failed(&mut self, lost: &[u64], _: &mut [Member]) {
        self.clones.failed(lost);
    }
}

fn drives_of(members: &mut [Member]) -> Result<Vec<WritableDrive>, BoxError> {
    let mut drives = Vec::new();
    for member in members {
        drives.append(&mut member.vm.vm_mut().writable_drives()?);
    }
    Ok(drives)
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
