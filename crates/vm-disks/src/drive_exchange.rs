//! The drives of a VM that goes back to a checkpoint, where its VMM opens the files itself: a copy of
//! each file of the checkpoint changes places with the present file.
//!
//! ```text
//!   rootfs.ext4                         present ◀──exchange──▶ copy        one rename of each file
//!   .keyframe-drives/NAME.1/0-rootfs    copy    ◀──exchange──▶ present     removed with the value
//! ```
//!
//! A second exchange undoes the first one. The files keep their paths, so the VM's configuration stays
//! true.

use crate::drive_files::{DriveFiles, FOLDER};
use crate::error::{Error, Result};
use keyframe_store::{Meta, Store};
use keyframe_units::CheckpointId;
use keyframe_vmm::{DriveFile, WritableDrive};
use rustix::fs::{AtFlags, CWD, RenameFlags, StatxAttributes, StatxFlags, renameat_with, statx};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

/// Copies of a checkpoint's drives, and the present files. Dropping it removes the copies if they are
/// not in the VM's places, and the former files after [`DriveExchange::succeeded`]. Otherwise both stay.
#[derive(Debug)]
pub struct DriveExchange {
    copies: Option<DriveFiles>,
    /// The places of the VM's files, in the order of the copies.
    places: Vec<DriveFile>,
    /// True while the copies are in the places.
    is_exchanged: bool,
    /// True if nothing needs the files that are not in the places.
    is_done: bool,
}

impl DriveExchange {
    /// Copies the drives of checkpoint `id` of `store`, described by `meta`, for VM `name`, whose
    /// drives are `drives`. Nothing is exchanged yet.
    ///
    /// Errors: the checkpoint has other drives; the files cannot be exchanged; a file has several names;
    /// those of [`DriveFiles::make`].
    pub fn make(
        store: &Store,
        (id, meta): (CheckpointId, &Meta),
        name: &str,
        drives: &[WritableDrive],
    ) -> Result<Self> {
        let same = meta.disks.len() == drives.len()
            && meta.disks.iter().zip(drives).all(|(there, here)| {
                (&there.name, there.disk_bytes) == (&here.name, here.disk_bytes)
            });
        if !same {
            return Err(Error::OtherDrives(id));
        }
        let mut places = Vec::new();
        for WritableDrive { name, path, .. } in drives {
            // A link stays, and leads to the copy.
            let path = std::fs::canonicalize(path).map_err(|e| Error::io("resolve", path, e))?;
            places.push(DriveFile { name: name.clone(), path });
        }
        let Some(first) = places.first() else { return Ok(Self::over(None, places)) };
        let folder = first.path.with_file_name(FOLDER);
        let copies = DriveFiles::make(store, (id, meta), name, Some(&folder))?;
        let made = Self::over(copies, places);
        for (copy, place) in made.pairs() {
            let look =
                |path: &PathBuf| std::fs::metadata(path).map_err(|e| Error::io("look at", path, e));
            let (there, here) = (look(copy)?, look(place)?);
            if there.dev() != here.dev() {
                return Err(Error::SeveralFileSystems { copy: copy.clone(), place: place.clone() });
            }
            if here.nlink() > 1 {
                return Err(Error::SeveralLinks(place.clone()));
            }
            try_exchange(copy, place)?;
            std::fs::set_permissions(copy, here.permissions())
                .and_then(|()| chown(copy, Some(here.uid()), Some(here.gid())))
                .and_then(|()| File::open(copy)?.sync_all())
                .map_err(|e| Error::io("set the rights of", copy, e))?;
        }
        Ok(made)
    }

    fn over(copies: Option<DriveFiles>, places: Vec<DriveFile>) -> Self {
        Self { copies, places, is_exchanged: false, is_done: false }
    }

    fn pairs(&self) -> impl Iterator<Item = (&PathBuf, &PathBuf)> {
        let copies = self.copies.as_ref().map_or(&[][..], DriveFiles::files);
        copies.iter().map(|copy| &copy.path).zip(self.places.iter().map(|place| &place.path))
    }

    /// Returns a description with which another process finishes or undoes the exchange. Error: a copy
    /// cannot be looked at.
    pub fn described(&self) -> Result<Vec<ExchangedDrive>> {
        let name = self.places.iter().map(|place| place.name.clone());
        let described = |(name, (copy, place)): (String, (&PathBuf, &PathBuf))| {
            let found = std::fs::metadata(copy).map_err(|e| Error::io("look at", copy, e))?;
            let (copy, place) = (copy.clone(), place.clone());
            Ok(ExchangedDrive { name, copy, place, copy_inode: found.ino() })
        };
        name.zip(self.pairs()).map(described).collect()
    }

    /// Returns the files in the VM's places.
    pub fn places(&self) -> &[DriveFile] {
        &self.places
    }

    /// Returns true while the copies are in the VM's places.
    pub fn is_exchanged(&self) -> bool {
        self.is_exchanged
    }

    /// Declares that the VM runs with the files in its places.
    pub fn succeeded(&mut self) {
        self.is_done = true;
    }

    /// Exchanges the files. No process may write to them. Error: a file cannot be renamed, or the names
    /// cannot be written to disk; the files are as they were.
    pub fn exchange(&mut self) -> Result<()> {
        self.rename_all()?;
        // The former files may be removed soon, and the names must be on disk before.
        if let Err(error) = self.sync_folders() {
            self.rename_all()?;
            return Err(error);
        }
        Ok(())
    }

    /// Renames all files or none, and notes where they are.
    fn rename_all(&mut self) -> Result<()> {
        for (number, (copy, place)) in self.pairs().enumerate() {
            if let Err(error) = exchange(copy, place) {
                for (copy, place) in self.pairs().take(number) {
                    let _ = exchange(copy, place);
                }
                return Err(Error::io("exchange", place, error));
            }
        }
        self.is_exchanged = !self.is_exchanged;
        Ok(())
    }

    fn sync_folders(&self) -> Result<()> {
        let folders = self.pairs().flat_map(|(copy, place)| [copy.parent(), place.parent()]);
        folders.flatten().try_for_each(|folder| {
            let synced = File::open(folder).and_then(|folder| folder.sync_all());
            synced.map_err(|e| Error::io("sync", folder, e))
        })
    }
}

impl Drop for DriveExchange {
    fn drop(&mut self) {
        if self.is_exchanged
            && !self.is_done
            && let Some(copies) = self.copies.take()
        {
            // They hold what the guest wrote last.
            copies.leave();
        }
    }
}

/// Exchanges two empty files beside `copy` and `place`, as the two are to be exchanged later. Error: that
/// is not possible.
fn try_exchange(copy: &Path, place: &Path) -> Result<()> {
    let look = |e: rustix::io::Errno| Error::io("look at", place, e.into());
    let found = statx(CWD, place, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty()).map_err(look)?;
    let failed = |e: std::io::Error| Error::io("try to exchange files beside", place, e);
    if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Err(failed(rustix::io::Errno::BUSY.into()));
    }
    let probe = |beside: &Path| {
        let folder = beside.parent().unwrap_or(Path::new("/"));
        tempfile::Builder::new().prefix(".keyframe-probe-").tempfile_in(folder).map_err(failed)
    };
    let (one, other) = (probe(copy)?, probe(place)?);
    exchange(one.path(), other.path()).map_err(failed)
}

/// Exchanges the files `one` and `other` in one step.
fn exchange(one: &Path, other: &Path) -> std::io::Result<()> {
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

/// A drive of a [`DriveExchange`], for another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExchangedDrive {
    /// The name of the drive.
    pub name: String,
    /// Where the copy was made.
    pub copy: PathBuf,
    /// The place of the VM's file.
    pub place: PathBuf,
    /// The inode of the copy, by which it is known in either place.
    pub copy_inode: u64,
}

impl ExchangedDrive {
    /// Puts the copy (`is_copy`), or else the former file, into the VM's place. No process may write to
    /// them. Error: a file cannot be looked at or renamed.
    pub fn put(&self, is_copy: bool) -> Result<()> {
        let found =
            std::fs::metadata(&self.place).map_err(|e| Error::io("look at", &self.place, e))?;
        if (found.ino() == self.copy_inode) == is_copy {
            return Ok(());
        }
        exchange(&self.copy, &self.place).map_err(|e| Error::io("exchange", &self.place, e))
    }

    /// Removes the file that is not in the VM's place, and its directory if that is empty then.
    pub fn tidy(&self) {
        let _ = std::fs::remove_file(&self.copy);
        for folder in self.copy.ancestors().skip(1).take(2) {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlay_directory::OverlayDirectory;
    use std::fs::{read_to_string, write};

    #[test]
    fn files_change_places_and_back_and_those_that_are_left_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| DriveFile { name: name.into(), path: dir.path().join(name) };
        let places = vec![place("a"), place("b")];
        for file in &places {
            write(&file.path, "now").unwrap();
        }
        let folder = OverlayDirectory::claim_in(&dir.path().join(FOLDER), "web").unwrap();
        let own = folder.path().to_owned();
        let copies = places.iter().enumerate().map(|(number, file)| {
            let path = folder.overlay(number, &file.name);
            write(&path, "then").unwrap();
            DriveFile { name: file.name.clone(), path }
        });
        let copies = copies.collect();
        let mut exchange = DriveExchange::over(Some(DriveFiles::of(folder, copies)), places);
        let content = || ["a", "b"].map(|name| read_to_string(dir.path().join(name)).unwrap());
        exchange.exchange().unwrap();
        assert_eq!(content(), ["then", "then"]);
        exchange.exchange().unwrap();
        assert_eq!(content(), ["now", "now"]);
        // Another process carries on.
        let described = exchange.described().unwrap();
        for is_copy in [true, true, false] {
            for drive in &described {
                drive.put(is_copy).unwrap();
            }
            assert_eq!(content(), if is_copy { ["then", "then"] } else { ["now", "now"] });
        }
        try_exchange(&own.join("0-a"), &dir.path().join("a")).unwrap();
        // One cannot be exchanged: none is.
        std::fs::remove_file(own.join("1-b")).unwrap();
        exchange.exchange().unwrap_err();
        assert_eq!(content(), ["now", "now"]);
        drop(exchange);
        assert_eq!(content(), ["now", "now"]);
        assert!(!own.exists());
    }
}
