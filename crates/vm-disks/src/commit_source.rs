//! A disk that a commit writes to an image: its layers over the image on which its VM ran.
//!
//! ```text
//!   overlay of a VM that has ended ─┐
//!   blocks of a checkpoint ─────────┼─▶ a new image, or the image itself (lowest layer first)
//!   image ──────────────────────────┘
//! ```
//!
//! Invariant: the layers never go over another image than theirs. If a commit into the image was
//! interrupted, only that same commit goes on.

use crate::base_image::require_unchanged;
use crate::dependents::ImageDependents;
use crate::error::{Error, Result, StoreError};
use crate::moved_images;
use crate::overlay_directory::{self, OverlayInfo};
use crate::stored::StoredDisk;
use keyframe_disk::commit::{self, Amount, InPlace, ProgressCallback};
use keyframe_disk::{Base, Below, Disk, ImageFormat, Layer, Overlay, Readable};
use keyframe_qemu::cmdline::MovedFile;
use keyframe_store::{DiskMeta, Store};
use keyframe_store_keys::KeyArg;
use keyframe_units::CheckpointId;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The source of a commit: the layers of a disk over its image.
pub struct CommitSource {
    /// The name of the source in messages, and in the mark of an interrupted commit: one line.
    pub name: String,
    /// The image below the layers.
    pub base: PathBuf,
    /// The format of that image.
    pub format: ImageFormat,
    /// The size of the disk in bytes.
    pub disk_bytes: u64,
    /// The checkpoint's description of the disk; `None` if no checkpoint records the image.
    pub known: Option<DiskMeta>,
    /// The paths of the image: that in checkpoints, and `base` if it has moved.
    paths: Vec<PathBuf>,
    layer: Option<Box<dyn Layer>>,
    overlay: Option<(Overlay, PathBuf)>,
    /// The store that may have dependents of the image.
    store: Option<Store>,
}

impl CommitSource {
    /// Opens disk `name` of checkpoint `id` in `store`; `None` for its only disk. `moved` are
    /// images that have moved since the checkpoint.
    ///
    /// Errors: the store cannot be read, the checkpoint holds no such disk, the image has changed,
    /// or those of [`moved_images::apply`].
    pub fn of_checkpoint(
        store: Store,
        id: CheckpointId,
        name: Option<&str>,
        moved: &[MovedFile],
    ) -> Result<Self> {
        let mut disks = store.load_disks(id).map_err(|e| StoreError::of(&store, e))?;
        let named = disks.meta.disks.clone();
        moved_images::apply(moved, &mut disks.meta)?;
        let disk = StoredDisk::choose(Arc::new(disks), None, name)?;
        let meta = disk.meta().clone();
        // The store's path may change until an interrupted commit goes on, its id does not.
        let name = format!("disk {} of checkpoint {id} of store {}", meta.name, store.id());
        let named = named.iter().find(|disk| disk.name == meta.name);
        let mut paths: Vec<_> =
            named.map(|disk| disk.base.path.clone().into()).into_iter().collect();
        paths.push(disk.image());
        paths.dedup();
        let source = Self {
            name: one_line(&name),
            paths,
            base: disk.image(),
            format: disk.format()?,
            layer: Some(disk.layer()?),
            overlay: None,
            disk_bytes: meta.disk_bytes,
            known: Some(meta),
            store: Some(store),
        };
        source.require_base()?;
        Ok(source)
    }

    /// Opens the writes in the overlay in `dir`, over the image `base` and the checkpoint from
    /// which its VM was restored.
    ///
    /// Errors: the overlay or the checkpoint cannot be read; [`Error::OverlayWithoutStore`] if the
    /// store of that checkpoint cannot be opened; [`Error::OverlayNotDescribed`] if its description
    /// does not name this overlay; the image has changed.
    pub fn of_overlay(dir: &Path, base: &Path, format: ImageFormat) -> Result<Self> {
        let overlay = Overlay::open(dir)?;
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let mut source = Self {
            name: one_line(&format!("overlay {}", dir.display())),
            base: base.to_owned(),
            paths: vec![base.to_owned()],
            format,
            layer: None,
            disk_bytes: overlay.disk_bytes(),
            overlay: Some((overlay, dir.clone())),
            store: None,
            known: None,
        };
        let Some((path, info)) = overlay_directory::of_overlay(&dir) else { return Ok(source) };
        match (KeyArg::from_environment().open(&path), info.checkpoint) {
            (Err(error), Some(id)) => {
                return Err(Error::OverlayWithoutStore {
                    overlay: source.name,
                    checkpoint: CheckpointId(id),
                    source: error,
                });
            }
            (Ok(store), Some(id)) => {
                source.add_checkpoint(&store, CheckpointId(id), &info, &dir)?;
                source.store = Some(store);
            }
            (store, None) => source.store = store.ok(),
        }
        source.require_base()?;
        Ok(source)
    }

    /// Puts the blocks of checkpoint `id` below the overlay in `dir`.
    fn add_checkpoint(
        &mut self,
        store: &Store,
        id: CheckpointId,
        info: &OverlayInfo,
        dir: &Path,
    ) -> Result<()> {
        let is_own =
            |(_, overlay): &&(DiskMeta, String)| Path::new(overlay).file_name() == dir.file_name();
        let own = info.disks.iter().find(is_own);
        let (own, _) = own.ok_or_else(|| Error::OverlayNotDescribed(self.name.clone()))?;
        let disks = store.load_disks(id).map_err(|e| StoreError::of(store, e))?;
        let disk = StoredDisk::choose(Arc::new(disks), None, Some(&own.name))?;
        self.layer = Some(disk.layer()?);
        let is_named = disk.image().canonicalize().ok() == self.base.canonicalize().ok();
        self.known = is_named.then(|| disk.meta().clone());
        Ok(())
    }

    /// Refuses another image than the one that the blocks lie over. After an interrupted commit the
    /// image has changed: then only its backing files are checked.
    fn require_base(&self) -> Result<()> {
        let Some(DiskMeta { base: known, .. }) = &self.known else { return Ok(()) };
        if !self.was_interrupted() {
            return require_unchanged(known);
        }
        let mut beneath = known.clone();
        beneath.files.drain(..beneath.files.len().min(1));
        require_unchanged(&beneath)
    }

    /// Returns true if this commit was interrupted before. Then its blocks are written again.
    pub fn was_interrupted(&self) -> bool {
        commit::interrupted(&self.base).is_some_and(|source| source == self.name)
    }

    /// The layers, lowest first.
    fn layers(&self) -> impl Iterator<Item = &dyn Layer> {
        let overlay = self.overlay.as_ref().map(|(overlay, _)| overlay as &dyn Layer);
        self.layer.as_deref().into_iter().map(|layer| layer as &dyn Layer).chain(overlay)
    }

    /// Returns the amount of data in all layers: the bytes of data and those of zeros. Error: a
    /// layer cannot be read.
    pub fn amount(&self) -> Result<Amount> {
        self.layers().try_fold(Amount::default(), |sum, layer| {
            let one = commit::measure(layer)?;
            let data_bytes = sum.data_bytes + one.data_bytes;
            Ok(Amount { data_bytes, zero_bytes: sum.zero_bytes + one.zero_bytes })
        })
    }

    /// Returns what depends on the image, apart from this overlay; `None` if the source has no
    /// store. Error: the store cannot be read.
    pub fn dependents(&self) -> Result<Option<ImageDependents>> {
        let own = self.overlay.as_ref().map(|(_, dir)| dir.as_path());
        self.store.as_ref().map(|store| ImageDependents::on(&self.paths, store, own)).transpose()
    }

    /// Returns true if the checkpoint holds all blocks of the disk: it has no image below.
    pub fn is_whole(&self) -> bool {
        self.known.as_ref().is_some_and(|disk| disk.base.is_blank())
    }

    /// Opens the disk for reading.
    ///
    /// Errors: the image cannot be opened; [`Error::OtherImage`] if the image has another size than
    /// the disk.
    pub fn open(self) -> Result<Box<dyn Readable>> {
        let base = if self.is_whole() {
            Base::blank(self.disk_bytes)?
        } else {
            Base::open(&self.base, self.format)?
        };
        if base.disk_bytes() != self.disk_bytes {
            return Err(Error::OtherImage {
                path: self.base,
                image_bytes: base.disk_bytes(),
                commit: self.name,
                disk_bytes: self.disk_bytes,
            });
        }
        Ok(match self.overlay {
            Some((overlay, _)) => Box::new(Disk::new(overlay, base, self.layer)),
            None => Box::new(Below::new(base, self.layer)),
        })
    }

    /// Writes all layers into `image` and syncs it. Calls `progress` with the number of bytes done.
    ///
    /// Errors: a layer cannot be read, the image cannot be written, or `progress` fails.
    pub fn write_into(
        &self,
        image: &InPlace,
        progress: ProgressCallback<'_>,
    ) -> keyframe_disk::Result<()> {
        let mut before = 0;
        for layer in self.layers() {
            let mut told = |done| progress(before + done);
            let done = image.write(layer, self.disk_bytes, &mut told)?;
            before += done.data_bytes + done.zero_bytes;
        }
        image.finish()
    }

    /// Empties the overlay, if there is one, after its blocks have been written. Error: the overlay
    /// cannot be written.
    pub fn clear_overlay(self) -> Result<()> {
        Ok(self.overlay.map_or(Ok(()), |(overlay, _)| overlay.clear())?)
    }
}

/// Replaces control characters by `?`, for a mark, which is one line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_disk::Lasting;

    #[test]
    fn an_overlay_outside_of_a_store_is_written_over_the_named_image() {
        let dir = tempfile::tempdir().unwrap();
        let (overlay, base) = (dir.path().join("overlay"), dir.path().join("a.img"));
        std::fs::write(&base, vec![1u8; 1 << 20]).unwrap();
        drop(Overlay::create(&overlay, 1 << 20, Lasting::Durable).unwrap());
        let open = || CommitSource::of_overlay(&overlay, &base, ImageFormat::Raw).unwrap();
        let source = open();
        assert!(source.name.starts_with("overlay /") && !source.is_whole());
        assert_eq!((source.disk_bytes, source.amount().unwrap().data_bytes), (1 << 20, 0));
        assert!(source.dependents().unwrap().is_none() && !source.was_interrupted());
        assert_eq!(source.open().unwrap().disk_bytes(), 1 << 20);
        std::fs::write(&base, [1u8; 4096]).unwrap();
        let refusal = open().open().err().unwrap();
        assert!(matches!(refusal, Error::OtherImage { image_bytes: 4096, .. }), "{refusal}");
    }

    #[test]
    fn a_name_is_one_line() {
        assert_eq!(one_line("disk a\nb of\t7"), "disk a?b of?7");
    }
}
