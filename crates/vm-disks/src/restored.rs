//! The disks of a checkpoint, for VMs that are restored from it and for a running VM that is rolled
//! back to it.
//!
//! ```text
//!   rollback:  stage ─▶ image, checkpoint's blocks, new overlay: open, not served
//!                exchange ─▶ served; the guest's connections stay    exchange again ─▶ as before
//!                              describe ─▶ disks.json names the checkpoint
//!                                dismiss ─▶ the disks that are not served are closed and removed
//! ```
//!
//! Invariant: only `dismiss` removes data that the guest has written.

use crate::base_image::require_unchanged;
use crate::error::{Error, Result, StoreError};
use crate::layer::LayerSource;
use crate::{DiskToServe, ServedDisks, specs};
use keyframe_store::{DiskMeta, Meta, Store};
use keyframe_units::CheckpointId;

/// Describes the disks of checkpoint `id`, ready to be served.
///
/// Errors: an image below a disk has changed since the checkpoint.
pub fn disks_of_checkpoint(
    store: &Store,
    id: CheckpointId,
    meta: &Meta,
) -> Result<Vec<DiskToServe>> {
    let path = store.absolute_path().map_err(|e| StoreError::of(store, e))?;
    let mut disks = Vec::with_capacity(meta.disks.len());
    for (disk, meta) in meta.disks.iter().enumerate() {
        require_unchanged(&meta.base)?;
        let source = LayerSource { store: path.clone(), checkpoint: id, disk };
        let layer = serde_json::to_string(&source)
            .map_err(|source| Error::Describe { object: "a layer", source })?;
        disks.push(DiskToServe { meta: meta.clone(), layer: Some(layer), temporary: false });
    }
    Ok(disks)
}

/// Checks that no disk was left out of checkpoint `id`.
///
/// Error: [`Error::DisksLeftOut`].
pub fn require_all(id: CheckpointId, meta: &Meta) -> Result<()> {
    let lacking: Vec<_> = meta.disks.iter().filter(|disk| disk.left_out).collect();
    if lacking.is_empty() {
        return Ok(());
    }
    let named: Vec<_> =
        lacking.iter().map(|disk| format!("{} ({})", disk.name, disk.base.path)).collect();
    Err(Error::DisksLeftOut { checkpoint: id, disks: named.join(", ") })
}

/// Returns whether two lists name the same disks, of the same sizes, over the same images.
pub fn are_same(these: &[DiskMeta], those: &[DiskMeta]) -> bool {
    let same = |(a, b): (&DiskMeta, &DiskMeta)| {
        (&a.name, a.disk_bytes, &a.base) == (&b.name, b.disk_bytes, &b.base)
    };
    these.len() == those.len() && these.iter().zip(those).all(same)
}

impl ServedDisks {
    /// Opens the disks of checkpoint `id` in the server, beside those that are served, without
    /// serving them. Errors: an image has changed since the checkpoint; a disk cannot be opened.
    pub fn stage(&mut self, store: &Store, id: CheckpointId, meta: &Meta) -> Result<()> {
        let disks = disks_of_checkpoint(store, id, meta)?;
        self.round += 1;
        let staged = specs(&self.directory, &disks, self.round)?;
        self.disks.stage(&staged).map_err(|e| {
            for spec in &staged {
                let _ = std::fs::remove_dir_all(&spec.overlay);
            }
            e.into()
        })
    }

    /// Writes to `disks.json` that the disks of checkpoint `id` are served. Error: the file cannot
    /// be written.
    pub fn describe(&mut self, id: CheckpointId) -> Result<()> {
        self.info.checkpoint = Some(id.0);
        for ((_, overlay), spec) in self.info.disks.iter_mut().zip(self.disks.specs()) {
            *overlay = spec.overlay.display().to_string();
        }
        self.directory.describe(&self.info)
    }

    /// Closes the disks that are open but not served, and removes their overlays. Error: the server
    /// does not answer.
    pub fn dismiss(&mut self) -> Result<()> {
        let dismissed = self.disks.dismiss()?;
        for spec in dismissed {
            // An overlay that is left over takes space and does no other harm.
            let _ = std::fs::remove_dir_all(&spec.overlay);
        }
        Ok(())
    }
}
