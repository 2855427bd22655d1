//! The disks of a checkpoint: for VMs that come to life from it, and for one that goes back to it
//! while it runs.
//!
//! ```text
//!   rollback:   stage ─▶ image, blocks of the checkpoint, fresh overlay: open beside what is served
//!                 exchange ─▶ served in its place; the guest's connections stay      exchange again ─▶ as before
//!                               describe ─▶ disks.json says so
//!                                 dismiss ─▶ what is not served is closed and removed
//! ```
//!
//! Invariant: what the guest has written is removed only by `dismiss`.

use super::layer::Source;
use super::{Served, Wanted, base, specs};
use keyframe_failure::{Failure, chain};
use keyframe_store::{DiskMeta, Meta, Store};
use keyframe_units::CheckpointId;

/// The disks of checkpoint `id`, where the images beneath are still what they were.
pub fn wanted(store: &Store, id: CheckpointId, meta: &Meta) -> Result<Vec<Wanted>, Failure> {
    let path = store.absolute_path().map_err(|e| Failure::store(&e, store.path()))?;
    let mut wanted = Vec::with_capacity(meta.disks.len());
    for (disk, kept) in meta.disks.iter().enumerate() {
        base::require_unchanged(&kept.base)?;
        let source = Source { store: path.clone(), checkpoint: id, disk };
        let layer = serde_json::to_string(&source).map_err(|e| Failure::new(e.to_string()))?;
        wanted.push(Wanted { meta: kept.clone(), layer: Some(layer), temporary: false });
    }
    Ok(wanted)
}

/// Refuses a checkpoint that lacks disks.
pub fn require_all(id: CheckpointId, meta: &Meta) -> Result<(), Failure> {
    let lacking: Vec<_> = meta.disks.iter().filter(|disk| disk.left_out).collect();
    if lacking.is_empty() {
        return Ok(());
    }
    let named: Vec<_> =
        lacking.iter().map(|disk| format!("{} ({})", disk.name, disk.base.path)).collect();
    Err(Failure::new(format!(
        "checkpoint {id} lacks disks, which were left out of it: {}",
        named.join(", ")
    )))
}

/// Whether two lists are the same disks over the same images.
pub fn are_same(these: &[DiskMeta], those: &[DiskMeta]) -> bool {
    let same = |(a, b): (&DiskMeta, &DiskMeta)| {
        (&a.name, a.disk_bytes, &a.base) == (&b.name, b.disk_bytes, &b.base)
    };
    these.len() == those.len() && these.iter().zip(those).all(same)
}

impl Served {
    /// Opens the disks of checkpoint `id` beside those that are served.
    pub fn stage(&mut self, store: &Store, id: CheckpointId, meta: &Meta) -> Result<(), Failure> {
        let wanted = wanted(store, id, meta)?;
        self.round += 1;
        let staged = specs(&self.place, &wanted, self.round)?;
        self.disks.stage(&staged).map_err(|e| {
            for spec in &staged {
                let _ = std::fs::remove_dir_all(&spec.overlay);
            }
            Failure::new(chain(&e))
        })
    }

    /// Says what is served now: the disks of checkpoint `id`, and what has been written to them
    /// since.
    pub fn describe(&mut self, id: CheckpointId) -> Result<(), Failure> {
        self.info.checkpoint = Some(id.0);
        for ((_, overlay), spec) in self.info.disks.iter_mut().zip(self.disks.specs()) {
            *overlay = spec.overlay.display().to_string();
        }
        self.place.describe(&self.info)
    }

    /// Closes and removes what is open beside.
    pub fn dismiss(&mut self) -> Result<(), Failure> {
        let dismissed = self.disks.dismiss().map_err(|e| Failure::new(chain(&e)))?;
        for spec in dismissed {
            // What cannot be removed harms nobody.
            let _ = std::fs::remove_dir_all(&spec.overlay);
        }
        Ok(())
    }
}
