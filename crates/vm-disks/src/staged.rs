//! The disks of a rollback, for the process that ends the rollback if the engine dies.
//!
//! ```text
//!   engine: ServedDisks::staged ──JSON──▶ watchdog
//!     engine dies ─▶ serve the right ones ─▶ tidy: describe, close, remove
//! ```
//!
//! Invariant: as for an engine, only the disks that are not served lose data.

use crate::ServedDisks;
use crate::error::{Error, Result};
use crate::overlay_directory::{OverlayInfo, write_info};
use keyframe_disk::DiskHeir;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One of the two sets of disks between which a rollback chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskSet {
    /// Those before the rollback.
    Former,
    /// Those of the checkpoint.
    Target,
}

/// The disks of a rollback.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StagedDisks {
    /// The socket of the process that serves them.
    socket: PathBuf,
    /// The directory of the overlays.
    directory: PathBuf,
    /// The content of its `disks.json` if the disks before the rollback are served.
    former: OverlayInfo,
    /// The content if those of the checkpoint are.
    target: OverlayInfo,
}

impl ServedDisks {
    /// Returns what another process needs to end a rollback to checkpoint `id`, before the disks
    /// are exchanged. `None` if no disks are staged.
    pub fn staged(&self, id: CheckpointId) -> Option<StagedDisks> {
        let staged = self.disks.staged_specs();
        let target = self.info.with_overlays(&staged);
        (!staged.is_empty()).then(|| StagedDisks {
            socket: self.disks.socket().to_owned(),
            directory: self.directory.path().to_owned(),
            former: self.info.with_overlays(self.disks.specs()),
            target: OverlayInfo { checkpoint: Some(id.0), ..target },
        })
    }
}

impl StagedDisks {
    fn info(&self, set: DiskSet) -> &OverlayInfo {
        match set {
            DiskSet::Former => &self.former,
            DiskSet::Target => &self.target,
        }
    }

    fn served(&self, heir: &DiskHeir) -> Result<DiskSet> {
        let served = heir.staging()?.served;
        let is = |set: &DiskSet| {
            let overlays = self.info(*set).disks.iter().map(|(_, overlay)| PathBuf::from(overlay));
            overlays.eq(served.iter().cloned())
        };
        let sets = [DiskSet::Former, DiskSet::Target];
        sets.into_iter().find(is).ok_or(Error::OtherDisksServed)
    }

    /// Serves the disks of `set`. The VM is paused. Error: the server does not answer, or serves
    /// other disks than those of this rollback.
    pub fn serve(&self, set: DiskSet) -> Result<()> {
        let heir = DiskHeir::connect(&self.socket)?;
        if self.served(&heir)? != set {
            heir.exchange()?;
        }
        Ok(())
    }

    /// Returns whether nothing was written to the disks that are served since they were opened or
    /// cut. Error: the server does not answer.
    pub fn are_unwritten(&self) -> Result<bool> {
        Ok(DiskHeir::connect(&self.socket)?.staging()?.written_bytes == 0)
    }

    /// Writes to `disks.json` which disks are served. Closes the others and removes their overlays.
    /// Error: the server does not answer; the file cannot be written.
    pub fn tidy(&self) -> Result<()> {
        let heir = DiskHeir::connect(&self.socket)?;
        let others = match self.served(&heir)? {
            DiskSet::Former => &self.target,
            DiskSet::Target => {
                write_info(&self.directory, &self.target)?;
                &self.former
            }
        };
        heir.dismiss()?;
        for (_, overlay) in &others.disks {
            // An overlay that is left over takes space and does no other harm.
            let _ = std::fs::remove_dir_all(overlay);
        }
        Ok(())
    }
}
