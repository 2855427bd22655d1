//! The directories in a store that hold the overlays of a VM's disks.
//!
//! ```text
//!   STORE/disks/NAME.1/         one for each start of a VM with disks; NAME.2 for the next
//!     disks.json                its VM, and the image below each disk
//!     DISK/                     an overlay (docs/formats/disk-overlay.md)
//! ```
//! Invariant: the program removes an overlay directory only if the guest has written nothing to its
//! disks, or if the user asked for temporary writes. The user removes all others.

use crate::error::{Error, Result, StoreError};
use crate::vm_name::name_from;
use keyframe_disk::{DiskBlock, DiskSpec, Overlay};
use keyframe_store::{DiskMeta, Store};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const INFO: &str = "disks.json";
/// The beginning of the names of the folders beside them in which a run keeps scratch files while
/// QEMU uses them.
pub const SCRATCH_PREFIX: &str = ".fleece-";
/// The largest number of a directory that is tried.
const PLACES_MAX: u32 = 1 << 20;
/// The longest `disks.json` that is read, in bytes. With 64 disks it is far shorter.
const INFO_BYTES_MAX: u64 = 4 << 20;

/// The content of `disks.json`: the owner of the overlays in a directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OverlayInfo {
    /// The name of the VM, or of the group.
    pub vm: String,
    /// The time at which the VM was started.
    pub began: jiff::Timestamp,
    /// The checkpoint that the VM was restored from, whose blocks lie between overlay and image;
    /// `None` if it was not restored.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub checkpoint: Option<u64>,
    /// The description of each disk, and the directory of its overlay.
    pub disks: Vec<(DiskMeta, String)>,
}

impl OverlayInfo {
    /// Returns it with the overlays of `specs`.
    pub(crate) fn with_overlays(&self, specs: &[DiskSpec]) -> Self {
        let mut info = self.clone();
        for ((_, overlay), spec) in info.disks.iter_mut().zip(specs) {
            *overlay = spec.overlay.display().to_string();
        }
        info
    }
}

/// An overlay directory that this process has created.
#[derive(Debug)]
pub struct OverlayDirectory {
    path: PathBuf,
    /// A directory that was made for this one, outside the store.
    parent: Option<PathBuf>,
}

impl OverlayDirectory {
    /// Creates the next free directory of `vm`: in `work_dir`; without one, in `store`; if the
    /// store cannot be written, in a new directory in the user's runtime directory, or else in the
    /// directory for temporary files.
    ///
    /// Errors: [`Error::TooManyOverlays`] if `vm` has too many directories there, [`Error::Io`] if
    /// none can be created; the store is not a local directory.
    pub fn claim(store: &Store, vm: &str, work_dir: Option<&Path>) -> Result<Self> {
        if let Some(folder) = work_dir {
            return Self::claim_in(folder, vm);
        }
        let folder = store.local_folder().map_err(|e| StoreError::of(store, e))?;
        match Self::claim_in(&folder.join("disks"), vm) {
            Err(error) if error.is_read_only() => Self::claim_elsewhere(vm).map_err(|_| error),
            claimed => claimed,
        }
    }

    fn claim_elsewhere(vm: &str) -> Result<Self> {
        let mut maker = tempfile::Builder::new();
        maker.prefix("keyframe-overlays-");
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let made = runtime.map(|runtime| maker.tempdir_in(runtime)).filter(std::io::Result::is_ok);
        let made = made.unwrap_or_else(|| maker.tempdir());
        let folder =
            made.map_err(|e| Error::io("make a directory in", &std::env::temp_dir(), e))?.keep();
        let claimed = Self::claim_in(&folder, vm)?;
        Ok(Self { parent: Some(folder), ..claimed })
    }

    /// Returns true if the directory is neither in the store nor where the user wanted it.
    pub fn is_elsewhere(&self) -> bool {
        self.parent.is_some()
    }

    /// Creates the next free directory of `vm` in `folder`. Errors: [`Error::TooManyOverlays`] if
    /// `vm` has too many there, [`Error::Io`] if none can be created.
    pub fn claim_in(folder: &Path, vm: &str) -> Result<Self> {
        let make = |path: &Path, recursive| {
            std::fs::DirBuilder::new().mode(0o700).recursive(recursive).create(path)
        };
        make(folder, true).map_err(|e| Error::io("make", folder, e))?;
        for number in 1..PLACES_MAX {
            let path = folder.join(format!("{vm}.{number}"));
            match make(&path, false) {
                Ok(()) => return Ok(Self { path, parent: None }),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io("make", &path, e)),
            }
        }
        Err(Error::TooManyOverlays { folder: folder.to_owned(), vm: vm.to_owned() })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the directory of the overlay of disk number `index`, which has the name `name`. The
    /// directory need not exist.
    pub fn overlay(&self, index: usize, name: &str) -> PathBuf {
        self.path.join(format!("{index}-{}", name_from(name)))
    }

    /// Writes the description `disks.json` into the directory. Errors: [`Error::Describe`] if it
    /// cannot be written as JSON, [`Error::Io`] if the file cannot be written.
    pub fn describe(&self, info: &OverlayInfo) -> Result<()> {
        write_info(&self.path, info)
    }

    /// Removes the directory and all overlays in it.
    pub fn remove(&self) {
        // A directory that is left over takes space and does no other harm.
        let _ = std::fs::remove_dir_all(&self.path);
        if let Some(parent) = &self.parent {
            let _ = std::fs::remove_dir(parent);
        }
    }
}

/// Writes the description `disks.json` into `directory`. Errors: those of
/// [`OverlayDirectory::describe`].
pub(crate) fn write_info(directory: &Path, info: &OverlayInfo) -> Result<()> {
    let text = serde_json::to_vec_pretty(info)
        .map_err(|source| Error::Describe { object: INFO, source })?;
    let path = directory.join(INFO);
    std::fs::write(&path, text).map_err(|e| Error::io("write", &path, e))
}

/// Reads the description of the overlay directory at `path`; `None` if there is no readable one.
pub fn info(path: &Path) -> Option<OverlayInfo> {
    let file = path.join(INFO);
    let known = std::fs::metadata(&file).ok().filter(|meta| meta.len() <= INFO_BYTES_MAX)?;
    let text = std::fs::read(file).ok().filter(|_| known.is_file())?;
    serde_json::from_slice(&text).ok()
}

/// Returns the store that holds the overlay in `directory`, and the description of its overlay
/// directory. `None` if the overlay is in no overlay directory.
pub fn of_overlay(directory: &Path) -> Option<(PathBuf, OverlayInfo)> {
    let place = directory.parent()?;
    Some((keyframe_store::store_of_folder(place.parent()?.parent()?), info(place)?))
}

/// Returns the overlays directly within `directory`, in the order of their names; none if `directory`
/// is itself an overlay, or cannot be read.
pub fn overlays_within(directory: &Path) -> Vec<PathBuf> {
    let is_overlay = |path: &Path| path.join("journal").is_file();
    if is_overlay(directory) {
        return Vec::new();
    }
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut overlays: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| is_overlay(path)).collect();
    overlays.sort();
    overlays
}

/// Returns all overlay directories of a store, sorted by path.
pub fn all(store: &Store) -> Vec<(PathBuf, OverlayInfo)> {
    let Ok(folder) = store.local_folder() else { return Vec::new() };
    let Ok(folder) = std::fs::read_dir(folder.join("disks")) else { return Vec::new() };
    let mut found: Vec<_> =
        folder.flatten().filter_map(|entry| Some((entry.path(), info(&entry.path())?))).collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// Returns whether a process uses the overlay in `directory`: a VM that runs, or a command that
/// reads it.
pub fn is_in_use(directory: &Path) -> bool {
    let locked = |overlay: File| flock(&overlay, FlockOperation::NonBlockingLockShared).is_err();
    File::open(directory).is_ok_and(locked)
}

/// The overlay with the writes of an earlier VM to an image.
#[derive(Clone, Debug)]
pub struct LeftOverlay {
    /// The image.
    pub base: String,
    /// The directory of the overlay.
    pub directory: PathBuf,
    /// The VM.
    pub vm: String,
    /// The time at which the VM was started.
    pub began: jiff::Timestamp,
}

/// Returns false if there is no overlay in `directory`, or an empty one: a commit into the image leaves
/// that. An overlay that cannot be read now, because its VM runs, counts as one with writes.
fn has_writes(directory: &Path) -> bool {
    match Overlay::open(directory) {
        Ok(overlay) => overlay.next(DiskBlock(0)).is_some(),
        Err(keyframe_disk::Error::Refused { .. }) => false,
        Err(_) => true,
    }
}

/// Returns the newest overlay with writes over each of the images `bases`; none for an image without
/// one.
pub fn newest_over(store: &Store, bases: &[&str]) -> Vec<LeftOverlay> {
    let mut overlays: Vec<LeftOverlay> = Vec::new();
    for (place, info) in all(store) {
        for (disk, directory) in info.disks {
            // The store may have been moved since the path was written.
            let directory = place.join(Path::new(&directory).file_name().unwrap_or_default());
            let directory = std::path::absolute(&directory).unwrap_or(directory);
            let (base, vm) = (disk.base.path, info.vm.clone());
            overlays.push(LeftOverlay { base, directory, vm, began: info.began });
        }
    }
    overlays.sort_by_key(|overlay| Reverse(overlay.began));
    // An overlay is opened only if none that is newer has writes.
    let newest = |base: &&str| {
        overlays
            .iter()
            .find(|overlay| overlay.base == *base && has_writes(&overlay.directory))
            .cloned()
    };
    bases.iter().filter_map(newest).collect()
}
