//! The drives whose files a VMM other than QEMU opens itself, and how they get into checkpoints.
//!
//! | the file is on | method | |
//! |---|---|---|
//! | btrfs, XFS | cloned in each pause | `cloned_drives.rs` |
//! | another file system, or in a jail; Linux 6.14 | what was written is read after each pause | `copied_drives.rs` |
//! | something else | refused | |
//!
//! All drives of a VM use the same method.

use crate::cloned_drives::ClonedDriveCapture;
use crate::copied_drives::CopiedDriveCapture;
use crate::copy_before_write::CopyBeforeWrite;
use crate::error::{CloneObstacle, DiskError, Result};
use crate::event::{DiskEvent, SharedDiskEventSink};
use crate::image_clones::objection;
use crate::{DiskCapture, DiskMethod};
use keyframe_capture::BoxError;
use keyframe_disk::ImageFormat;
use keyframe_store::Store;
use keyframe_vmm::{AuditFinding, Severity, Vmm, WritableDrive};
use std::path::Path;

/// How some drives are captured.
pub enum DrivePlan {
    /// There are none.
    None,
    /// Their files are cloned.
    Cloned,
    /// Writes to their files are recorded. The VMM opens the files after this was made, or anew.
    Copied(CopyBeforeWrite),
}

impl DrivePlan {
    /// Chooses the method for `drives`, and begins to record writes if it needs that. Errors: a file
    /// can neither be cloned nor its writes be recorded, or `method` permits only clones; two drives
    /// have the same file, and a restored VM would have two.
    pub fn of(drives: &[WritableDrive], method: DiskMethod) -> Result<Self> {
        for (at, drive) in drives.iter().enumerate() {
            if let Some(twin) = drives[..at].iter().find(|one| one.identity == drive.identity) {
                let (first, second) = (twin.name.clone(), drive.name.clone());
                return Err(DiskError::SameFile { first, second });
            }
        }
        let obstacle = drives.iter().find_map(|drive| {
            let why = if drive.is_in_jail {
                CloneObstacle::InJail(drive.path.clone())
            } else {
                objection(&drive.path, Some(ImageFormat::Raw), false)?
            };
            Some((drive.name.clone(), why))
        });
        match obstacle {
            None if drives.is_empty() => Ok(Self::None),
            None => Ok(Self::Cloned),
            Some((name, why)) if method == DiskMethod::Reflink => {
                Err(DiskError::DriveNotCloneable { name, why })
            }
            Some((name, why)) => match record_writes(drives) {
                Ok(copies) => Ok(Self::Copied(copies)),
                Err(other) => Err(DiskError::DriveNotCaptured { name, why, other: other.into() }),
            },
        }
    }

    /// Makes the capture of `drives` of `vm`, for which this was made, for checkpoints in `store`.
    /// `None` if there are no drives. Errors: a file cannot be read; the VMM, which had opened the
    /// files before, does not open them anew.
    pub fn capture(
        self,
        (store, name): (&Store, &str),
        (vm, were_open): (&mut dyn Vmm, bool),
        drives: Vec<WritableDrive>,
        events: SharedDiskEventSink,
    ) -> Result<Option<Box<dyn DiskCapture>>> {
        match self {
            Self::None => Ok(None),
            Self::Cloned => {
                for warning in warnings(&drives) {
                    events.event(&DiskEvent::AuditWarning(warning));
                }
                let capture = ClonedDriveCapture::new(store, name, drives, events)?;
                Ok(Some(Box::new(capture)))
            }
            Self::Copied(copies) => {
                if were_open {
                    vm.reopen_drives(&drives)?;
                }
                Ok(Some(Box::new(CopiedDriveCapture::new(copies, drives))))
            }
        }
    }
}

/// Begins to record the writes to `drives`. Error: the kernel does not report them.
pub(crate) fn record_writes(drives: &[WritableDrive]) -> Result<CopyBeforeWrite, DiskError> {
    let paths: Vec<(&Path, u64)> =
        drives.iter().map(|drive| (&*drive.path, drive.disk_bytes)).collect();
    CopyBeforeWrite::over(&paths)
}

/// Returns the drives of the VMs now. Error: a VMM does not answer.
pub(crate) fn drives_of(members: &mut [&mut dyn Vmm]) -> Result<Vec<WritableDrive>, BoxError> {
    let mut drives = Vec::new();
    for member in members {
        drives.append(&mut member.writable_drives()?);
    }
    Ok(drives)
}

/// Checks that the VMs have `drives` still. Error: they have others; a VMM does not answer.
pub(crate) fn require_same(
    drives: &[WritableDrive],
    members: &mut [&mut dyn Vmm],
) -> Result<(), BoxError> {
    if drives_of(members)? == drives { Ok(()) } else { Err(DiskError::DrivesChanged.into()) }
}

/// Returns what the user should know before `drives` are cloned: with clones of it, each block
/// that the guest overwrites takes new space.
fn warnings(drives: &[WritableDrive]) -> Vec<AuditFinding> {
    let is_narrow = |drive: &&WritableDrive| {
        let space = rustix::fs::statvfs(&drive.path);
        space.is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) < drive.disk_bytes)
    };
    let finding = |drive: &WritableDrive| AuditFinding {
        subject: format!("drive {}", drive.name),
        reason: "its file system has less free space than the drive is large; with clones of it, \
                 each block that the guest overwrites takes new space, and without space the \
                 guest's writes fail"
            .into(),
        fix: "make space, or forget checkpoints in time (--keep-last, --keep-within)".into(),
        severity: Severity::Warning,
    };
    drives.iter().filter(is_narrow).map(finding).collect()
}
