//! Where the overlays of a VM's disks lie in a store.
//!
//! ```text
//!   STORE/disks/NAME.1/         one for each start of a VM with disks; NAME.2 for the next
//!     disks.json                whose it is, and the image beneath each disk
//!     DISK/                     an overlay (docs/formats/disk-overlay.md)
//! ```
//!
//! Invariant: what a guest has written to a disk stays until somebody says what is to become of it;
//! only a place that nothing was written to, or whose writes were not to last, is removed.

use crate::vm_name::name_from;
use keyframe_failure::Failure;
use keyframe_store::{DiskMeta, Store};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const INFO: &str = "disks.json";
/// More than anybody leaves behind.
const PLACES_MAX: u32 = 1 << 20;
/// Far above what the description of 64 disks takes.
const INFO_BYTES_MAX: u64 = 4 << 20;

/// What is said of a place.
#[derive(Debug, Serialize, Deserialize)]
pub struct Info {
    /// The VM, or the group.
    pub vm: String,
    /// When it was started.
    pub began: jiff::Timestamp,
    /// The checkpoint that it was restored from: its blocks lie between overlay and image.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub checkpoint: Option<u64>,
    /// The disks and the directories of their overlays.
    pub disks: Vec<(DiskMeta, String)>,
}

/// A place of its own.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
}

impl Place {
    /// Makes the next free one of `vm`.
    pub fn claim(store: &Store, vm: &str) -> Result<Self, Failure> {
        let folder = store.local_folder().map_err(|e| Failure::store(&e, store.path()))?;
        Self::claim_in(&folder.join("disks"), vm)
    }

    /// The same in any folder.
    pub fn claim_in(folder: &Path, vm: &str) -> Result<Self, Failure> {
        let make = |path: &Path, recursive| {
            std::fs::DirBuilder::new().mode(0o700).recursive(recursive).create(path)
        };
        make(folder, true).map_err(|e| failed("make", folder, &e))?;
        for number in 1..PLACES_MAX {
            let path = folder.join(format!("{vm}.{number}"));
            match make(&path, false) {
                Ok(()) => return Ok(Self { path }),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed("make", &path, &e)),
            }
        }
        Err(Failure::new(format!("{}: too many places of VM {vm}", folder.display()))
            .fix("remove old ones"))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the overlay of disk number `index`.
    pub fn overlay(&self, index: usize, name: &str) -> PathBuf {
        self.path.join(format!("{index}-{}", name_from(name)))
    }

    /// Says whose it is.
    pub fn describe(&self, info: &Info) -> Result<(), Failure> {
        let text =
            serde_json::to_vec_pretty(info).map_err(|e| Failure::new(format!("{INFO}: {e}")))?;
        std::fs::write(self.path.join(INFO), text)
            .map_err(|e| failed("write", &self.path.join(INFO), &e))
    }

    /// Removes it with all that it holds.
    pub fn remove(&self) {
        // What cannot be removed harms nobody.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn failed(operation: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("{operation} {}: {error}", path.display()))
}

/// What is said of the place at `path`, if it is one.
pub fn info(path: &Path) -> Option<Info> {
    let file = path.join(INFO);
    let known = std::fs::metadata(&file).ok().filter(|meta| meta.len() <= INFO_BYTES_MAX)?;
    let text = std::fs::read(file).ok().filter(|_| known.is_file())?;
    serde_json::from_slice(&text).ok()
}

/// What is said of the place in which the overlay in `directory` lies, and where its store would
/// be. None where it is in no place.
pub fn of_overlay(directory: &Path) -> Option<(PathBuf, Info)> {
    let place = directory.parent()?;
    Some((keyframe_store::store_of_folder(place.parent()?.parent()?), info(place)?))
}

/// All places of a store.
pub fn all(store: &Store) -> Vec<(PathBuf, Info)> {
    let Ok(folder) = store.local_folder() else { return Vec::new() };
    let Ok(folder) = std::fs::read_dir(folder.join("disks")) else { return Vec::new() };
    let mut found: Vec<_> =
        folder.flatten().filter_map(|entry| Some((entry.path(), info(&entry.path())?))).collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// True while the overlay in `directory` is in use: by a VM that runs, or by somebody who reads it.
pub fn is_in_use(directory: &Path) -> bool {
    let locked = |overlay: File| flock(&overlay, FlockOperation::NonBlockingLockShared).is_err();
    File::open(directory).is_ok_and(locked)
}

/// The places that hold writes to one of the images `bases`, with the image.
pub fn left_over(store: &Store, bases: &[&str]) -> Vec<(PathBuf, Info, String)> {
    let mut found = Vec::new();
    for (path, info) in all(store) {
        let base = info
            .disks
            .iter()
            .map(|(disk, _)| &disk.base.path)
            .find(|p| bases.contains(&p.as_str()));
        if let Some(base) = base.cloned() {
            found.push((path, info, base));
        }
    }
    found
}
