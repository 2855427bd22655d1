//! The files of a restored VM whose VMM opens them itself: copies of the checkpoint's.
//!
//! ```text
//!   .rootfs.ext4.keyframe-1a2b3c4d-web-17 ──clone, or copy──▶ DIR/NAME.1/0-rootfs ◀── the VM reads and writes
//! ```
//!
//! `DIR` is beside the first drive's file, because a file system clones within itself alone. A disk
//! that is whole in the store (of a bundle) is written from there. The copies are removed at the VM's
//! end, unless the user keeps them, or checkpoints were taken of them: the clones of those lie in the
//! same directory.

use crate::base_image::require_unchanged;
use crate::error::{Error, Result, StoreError};
use crate::overlay_directory::OverlayDirectory;
use crate::stored::StoredDisk;
use keyframe_disk::{ImageFormat, commit};
use keyframe_store::{DiskMeta, Meta, Store};
use keyframe_units::CheckpointId;
use keyframe_vmm::DriveFile;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The folder beside a drive's file in which restored VMs have theirs.
pub(crate) const FOLDER: &str = ".keyframe-drives";

/// Files of its own for each drive of a restored VM. If it is dropped, they are removed.
#[derive(Debug)]
pub struct DriveFiles {
    directory: OverlayDirectory,
    files: Vec<DriveFile>,
    /// True after [`Self::leave`].
    are_left: bool,
}

impl DriveFiles {
    /// Copies the drives of checkpoint `id` of `store`, described by `meta`, for a VM `name`: into a
    /// new directory in `work_dir`, or beside the first of them. Returns `None` if the VM can write
    /// to no drive.
    ///
    /// Errors: the file of a drive is missing or has changed since the checkpoint; those of
    /// [`OverlayDirectory::claim`]; a file cannot be read or written.
    pub fn make(
        store: &Store,
        (id, meta): (CheckpointId, &Meta),
        name: &str,
        work_dir: Option<&Path>,
    ) -> Result<Option<Self>> {
        let Some(first) = meta.disks.first() else { return Ok(None) };
        meta.disks.iter().try_for_each(|disk| require_unchanged(&disk.base))?;
        let beside =
            (!first.base.is_blank()).then(|| Path::new(&first.base.path).with_file_name(FOLDER));
        let directory = OverlayDirectory::claim(store, name, work_dir.or(beside.as_deref()))?;
        let mut made = Self { directory, files: Vec::new(), are_left: false };
        for (index, disk) in meta.disks.iter().enumerate() {
            let path = made.directory.overlay(index, &disk.name);
            let path = std::path::absolute(&path).map_err(|e| Error::io("resolve", &path, e))?;
            if disk.base.is_blank() {
                write_stored((store, id), index, &path)?;
            } else {
                copy(disk, &path)?;
            }
            made.files.push(DriveFile { name: disk.name.clone(), path });
        }
        Ok(Some(made))
    }

    /// Makes the value of `files` that are in `directory`.
    #[cfg(test)]
    pub(crate) fn of(directory: OverlayDirectory, files: Vec<DriveFile>) -> Self {
        Self { directory, files, are_left: false }
    }

    /// Returns the files.
    pub fn files(&self) -> &[DriveFile] {
        &self.files
    }

    /// Returns the directory of the files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the directory of the files if it outlives the VM, because checkpoints were taken of
    /// the VM.
    pub fn with_checkpoints(&self) -> Option<&Path> {
        self.has_clones().then(|| self.directory.path())
    }

    /// Leaves the files to a VM that runs on, or to the user. Returns their directory.
    pub fn leave(mut self) -> PathBuf {
        self.are_left = true;
        self.directory.path().to_owned()
    }

    /// True if the directory holds more than the files that were made in it. An unreadable one may.
    fn has_clones(&self) -> bool {
        let Ok(entries) = std::fs::read_dir(self.directory.path()) else { return true };
        entries.flatten().any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"."))
    }
}

impl Drop for DriveFiles {
    fn drop(&mut self) {
        if !self.are_left && !self.has_clones() {
            self.directory.remove();
            // It stays if another VM has files there.
            let folder = self.directory.path().parent().filter(|folder| folder.ends_with(FOLDER));
            let _ = folder.map(std::fs::remove_dir);
        }
    }
}

/// Writes disk number `index` of checkpoint `id`, which is whole in the store, to `path`.
fn write_stored((store, id): (&Store, CheckpointId), index: usize, path: &Path) -> Result<()> {
    let disks = Arc::new(store.load_disks(id).map_err(|e| StoreError::of(store, e))?);
    let Some(disk) = StoredDisk::of(disks, index) else { return Ok(()) };
    Ok(commit::to_file(&disk.open()?, path, ImageFormat::Raw, false, &mut |_| Ok(()))?)
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
