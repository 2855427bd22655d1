//! Checkpoints that are forgotten, with the clones of disk images that only they name.
//!
//! Invariants: a clone of an image is removed only after the checkpoints that name it are gone, and
//! only if the names in all other checkpoints are known.

use crate::clone_files::is_clone_of;
use crate::error::{Error, Result, StoreError};
use crate::overlay_directory::{self, OverlayInfo};
use keyframe_store::{CheckpointId, Listing, Sealed, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Returns the checkpoints that overlays of disks depend on, each with one such overlay directory.
///
/// Errors: an overlay directory does not tell which checkpoint it depends on.
pub fn checkpoints_under_overlays(store: &Store) -> Result<BTreeMap<CheckpointId, PathBuf>> {
    let folder = store.local_folder().map_err(|e| StoreError::of(store, e))?.join("disks");
    let directories = overlay_directory::all(store);
    let known: BTreeSet<&Path> = directories.iter().map(|(path, _)| path.as_path()).collect();
    let entries = match std::fs::read_dir(&folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        other => other.map_err(|e| Error::io("list", &folder, e))?,
    };
    let is_overlays = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        !name.starts_with(overlay_directory::SCRATCH_PREFIX)
    };
    for path in entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| !known.contains(path.as_path()) && is_overlays(path))
    {
        let holds = std::fs::read_dir(&path).is_ok_and(|mut inside| inside.next().is_some());
        // A directory may have been described since it was listed.
        if holds && overlay_directory::info(&path).is_none() {
            return Err(Error::OverlayUnreadable(path));
        }
    }
    let on = |(path, info): (PathBuf, OverlayInfo)| Some((CheckpointId(info.checkpoint?), path));
    Ok(overlay_directory::all(store).into_iter().filter_map(on).collect())
}

/// Finds the clones of images (copies by the file system that Keyframe made) that only checkpoints
/// of `forgotten` use. `listing` has the checkpoints of `store`. Returns their paths, and false. If
/// a checkpoint that cannot be read may use them too, returns no paths, and true.
pub fn clones_of(
    store: &Store,
    listing: &Listing,
    forgotten: &BTreeSet<CheckpointId>,
) -> (Vec<PathBuf>, bool) {
    let is_clone = |path: &&str| is_clone_of(path, store.id());
    let (gone, left): (Vec<_>, Vec<_>) =
        listing.sealed.iter().partition(|sealed| forgotten.contains(&sealed.id));
    let paths = |sealed: &[&Sealed]| {
        let bases = sealed.iter().flat_map(|sealed| &sealed.meta.disks).map(|disk| &disk.base);
        let all = bases.flat_map(|base| {
            std::iter::once(base.path.clone())
                .chain(base.files.iter().map(|file| file.path.clone()))
        });
        all.collect::<BTreeSet<String>>()
    };
    let left = paths(&left);
    let clones: Vec<_> = paths(&gone)
        .iter()
        .filter(|path| !left.contains(*path))
        .map(String::as_str)
        .filter(is_clone)
        .map(PathBuf::from)
        .collect();
    let hidden = listing.unreadable.iter().any(|one| !forgotten.contains(&one.id));
    if hidden && !clones.is_empty() { (Vec::new(), true) } else { (clones, false) }
}

/// Forgets checkpoints, and removes the clones of images that only they named. `warn` is called for
/// each clone that cannot be removed.
///
/// Errors: the store refuses, for example because a checkpoint is pinned.
pub fn forget(
    store: &Store,
    ids: &BTreeSet<CheckpointId>,
    warn: &mut dyn FnMut(&Path, &std::io::Error),
) -> Result<()> {
    let failure = |e| StoreError::of(store, e);
    // Checkpoints without disks have no clones: the other checkpoints need not be read.
    let has_disks =
        |id: &CheckpointId| store.sealed(*id).map_or(true, |s| !s.meta.disks.is_empty());
    let clones = if ids.iter().any(has_disks) {
        clones_of(store, &store.checkpoints().map_err(failure)?, ids).0
    } else {
        Vec::new()
    };
    store.forget(ids).map_err(failure)?;
    remove_clones(clones, warn);
    Ok(())
}

/// Removes clones and returns those that existed. `warn` is called for each that cannot be removed.
pub fn remove_clones(
    clones: Vec<PathBuf>,
    warn: &mut dyn FnMut(&Path, &std::io::Error),
) -> Vec<PathBuf> {
    let remove = |clone: &PathBuf| match std::fs::remove_file(clone) {
        Ok(()) => true,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
        Err(e) => {
            warn(clone, &e);
            false
        }
    };
    clones.into_iter().filter(remove).collect()
}
