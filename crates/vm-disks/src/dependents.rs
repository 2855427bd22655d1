//! What depends on an image, and would be lost or broken by a write to it.
//!
//! | dependent | effect of a write to the image |
//! |---|---|
//! | a VM that runs | its guest would see its disk change |
//! | writes that a VM left | they would lie over another image |
//! | a checkpoint | its disk would lie over another image: restores refuse it from then on |
//!
//! Left out: other stores, and VMs that Keyframe did not start. While such a VM runs, the locks of
//! its image show it (`keyframe_disk`).

use crate::error::{Error, Result, StoreError};
use crate::overlay_directory as overlays;
use keyframe_store::{BaseMeta, Store};
use keyframe_units::CheckpointId;
use serde::Serialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What depends on an image, directly or through images whose backing file it is.
#[derive(Debug, Default, Serialize)]
pub struct ImageDependents {
    /// The names of VMs that run over the image.
    pub running: Vec<String>,
    /// The overlay directories with the writes of VMs that have ended.
    pub left: Vec<PathBuf>,
    /// The checkpoints with disks over the image.
    pub checkpoints: Vec<CheckpointId>,
    /// The checkpoints that cannot be read, and may have disks over the image.
    pub unreadable: Vec<CheckpointId>,
}

impl ImageDependents {
    /// Finds the dependents in `store` of the image with these `paths`, its present one and older
    /// ones. Ignores the overlay directory `own`, if one is given. Error: the store cannot be read.
    pub fn on(paths: &[PathBuf], store: &Store, own: Option<&Path>) -> Result<Self> {
        let wanted = paths.iter().map(|path| resolved(path)).collect();
        let mut images = Images { wanted, known: HashMap::new() };
        let mut dependents = Self::default();
        let own = own.map(resolved);
        for (path, info) in overlays::all(store) {
            let mut over = info.disks.iter().filter(|(disk, overlay)| {
                own.as_deref() != Some(&*resolved(Path::new(overlay))) && images.holds(&disk.base)
            });
            let overlays: Vec<&str> = over.by_ref().map(|(_, overlay)| overlay.as_str()).collect();
            if overlays.iter().any(|overlay| overlays::is_in_use(Path::new(overlay))) {
                dependents.running.push(info.vm);
            } else if !overlays.is_empty() {
                dependents.left.push(path);
            }
        }
        let listing = store.checkpoints().map_err(|e| StoreError::of(store, e))?;
        for sealed in &listing.sealed {
            if sealed.meta.disks.iter().any(|disk| images.holds(&disk.base)) {
                dependents.checkpoints.push(sealed.id);
            }
        }
        dependents.unreadable = listing.unreadable.iter().map(|one| one.id).collect();
        Ok(dependents)
    }

    /// Checks that no VM runs over `image`. Error: [`Error::ImageInUse`].
    pub fn require_stopped(&self, image: &Path) -> Result<()> {
        if self.running.is_empty() {
            return Ok(());
        }
        Err(Error::ImageInUse { image: image.to_owned(), vms: self.running.join(", ") })
    }

    /// Returns the losses that a write to the image would cause, one sentence for each kind.
    pub fn losses(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.checkpoints.is_empty() {
            lines.push(format!(
                "Checkpoints whose disks need it can no longer be restored, and their disks not \
                 read: {}.",
                ranges(&self.checkpoints)
            ));
        }
        if !self.unreadable.is_empty() {
            lines.push(format!(
                "Checkpoints that cannot be read may need it too: {}.",
                ranges(&self.unreadable)
            ));
        }
        for place in &self.left {
            lines.push(format!(
                "Writes of a VM over it can no longer be used: {}.",
                place.display()
            ));
        }
        lines
    }
}

/// Finds out which images are the wanted one, by any path.
struct Images {
    wanted: Vec<PathBuf>,
    known: HashMap<String, bool>,
}

impl Images {
    fn holds(&mut self, base: &BaseMeta) -> bool {
        let Self { wanted, known } = self;
        let own = Some(&base.path).filter(|_| !base.is_blank());
        base.files.iter().map(|file| &file.path).chain(own).any(|path| {
            if let Some(is) = known.get(path) {
                return *is;
            }
            let is = wanted.contains(&resolved(Path::new(path)));
            known.insert(path.clone(), is);
            is
        })
    }
}

/// The path without symbolic links, if the file exists.
fn resolved(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Formats rising numbers as ranges: `1-4, 7`.
fn ranges(ids: &[CheckpointId]) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for id in ids {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == id.0 => *last = id.0,
            _ => runs.push((id.0, id.0)),
        }
    }
    let text = |(first, last): &(u64, u64)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store::BaseFile;

    #[test]
    fn an_image_is_found_by_any_of_its_names_and_beneath_others() {
        let dir = tempfile::tempdir().unwrap();
        let (image, link) = (dir.path().join("a.img"), dir.path().join("link.img"));
        std::fs::write(&image, "x").unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let base = |paths: &[&Path]| {
            let file =
                |path: &&Path| BaseFile { path: path.display().to_string(), ..BaseFile::default() };
            BaseMeta {
                path: paths[0].display().to_string(),
                files: paths.iter().map(file).collect(),
                ..BaseMeta::default()
            }
        };
        let mut images = Images { wanted: vec![resolved(&image)], known: HashMap::new() };
        assert!(images.holds(&base(&[&image])) && images.holds(&base(&[&link])));
        assert!(images.holds(&base(&[Path::new("/other.qcow2"), &link])));
        assert!(!images.holds(&base(&[Path::new("/other.qcow2")])));
    }

    #[test]
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10].map(CheckpointId)), "1-3, 7, 9-10");
        assert_eq!(ranges(&[]), "");
    }
}
