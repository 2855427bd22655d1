//! The files of a restored VM whose VMM opens them itself: copies of the checkpoint's.
//!
//! ```text
//!   .rootfs.ext4.keyframe-1a2b3c4d-web-17 ──clone, or copy──▶ DIR/NAME.1/0-rootfs ◀── the VM reads and writes
//! ```
//!
//! `DIR` is beside the first drive's file, because a file system clones within itself alone. The
//! copies are removed at the VM's end unless the user keeps them.

use crate::base_image::require_unchanged;
use crate::error::{Error, Result};
use crate::overlay_directory::OverlayDirectory;
use keyframe_store::{DiskMeta, Meta};
use keyframe_vmm::DriveFile;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The folder beside a drive's file in which restored VMs have theirs.
const FOLDER: &str = ".keyframe-drives";

/// Files of its own for each drive of a restored VM. If it is dropped, they are removed.
#[derive(Debug)]
pub struct DriveFiles {
    /// `None` only after [`Self::leave`].
    directory: Option<OverlayDirectory>,
    files: Vec<DriveFile>,
}

impl DriveFiles {
    /// Copies the drives of the checkpoint `meta` for a VM `name`, into a new directory in
    /// `work_dir`, or beside the first of them. Returns `None` if the VM can write to no drive.
    ///
    /// Errors: the file of a drive is missing or has changed since the checkpoint; those of
    /// [`OverlayDirectory::claim_in`]; a file cannot be written.
    pub fn make(meta: &Meta, name: &str, work_dir: Option<&Path>) -> Result<Option<Self>> {
        let Some(first) = meta.disks.first() else { return Ok(None) };
        meta.disks.iter().try_for_each(|disk| require_unchanged(&disk.base))?;
        let beside = Path::new(&first.base.path).with_file_name(FOLDER);
        let directory = OverlayDirectory::claim_in(work_dir.unwrap_or(&beside), name)?;
        let mut made = Self { directory: None, files: Vec::new() };
        for (index, disk) in meta.disks.iter().enumerate() {
            let path = directory.overlay(index, &disk.name);
            let path = std::path::absolute(&path).map_err(|e| Error::io("resolve", &path, e))?;
            if let Err(error) = copy(disk, &path) {
                remove(&directory);
                return Err(error);
            }
            made.files.push(DriveFile { name: disk.name.clone(), path });
        }
        made.directory = Some(directory);
        Ok(Some(made))
    }

    /// Returns the files.
    pub fn files(&self) -> &[DriveFile] {
        &self.files
    }

    /// Leaves the files to a VM that runs on, or to the user. Returns their directory.
    pub fn leave(mut self) -> Option<PathBuf> {
        self.directory.take().map(|directory| directory.path().to_owned())
    }
}

impl Drop for DriveFiles {
    fn drop(&mut self) {
        if let Some(directory) = &self.directory {
            remove(directory);
        }
    }
}

fn remove(directory: &OverlayDirectory) {
    directory.remove();
    // It stays if another VM has files there.
    let folder = directory.path().parent().filter(|folder| folder.ends_with(FOLDER));
    let _ = folder.map(std::fs::remove_dir);
}

fn copy(disk: &DiskMeta, path: &Path) -> Result<()> {
    let image = Path::new(&disk.base.path);
    let mut from = File::open(image).map_err(|e| Error::io("open", image, e))?;
    let make = File::options().write(true).create_new(true).mode(0o600).open(path);
    let mut to = make.map_err(|e| Error::io("make", path, e))?;
    if rustix::fs::ioctl_ficlone(&to, &from).is_ok() {
        return Ok(());
    }
    std::io::copy(&mut from, &mut to).map_err(|e| Error::io("write", path, e))?;
    Ok(())
}
