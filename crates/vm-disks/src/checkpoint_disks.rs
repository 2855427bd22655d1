//! The disks of a checkpoint, served to a VM that is restored or branched from it.

use crate::error::Result;
use crate::overlay_directory::OverlayDirectory;
use crate::{ServedDisks, restored, serve_in};
use keyframe_qemu::DiskServer;
use keyframe_store::{Meta, Store};
use keyframe_units::CheckpointId;
use std::path::{Path, PathBuf};

/// A checkpoint's disks with an overlay for what the VM writes, in a process of their own. If it is
/// dropped, what was written is removed.
pub struct CheckpointDisks {
    /// `None` only after [`Self::end`] or [`Self::leave`].
    served: Option<ServedDisks>,
    socket: PathBuf,
}

impl CheckpointDisks {
    /// Serves the disks of checkpoint `id`, described by `meta`, at `socket` for a VM `name`. Their
    /// overlays are in `work_dir`, or at the place that [`OverlayDirectory::claim`] chooses. Returns
    /// `None` if the VM has no disk that Keyframe serves.
    ///
    /// Errors: those of [`restored::disks_of_checkpoint`], [`OverlayDirectory::claim`] and
    /// [`serve_in`].
    pub fn serve(
        store: &Store,
        (id, meta): (CheckpointId, &Meta),
        name: &str,
        work_dir: Option<&Path>,
        socket: PathBuf,
    ) -> Result<Option<Self>> {
        let wanted = restored::disks_of_checkpoint(store, id, meta)?;
        if wanted.is_empty() {
            return Ok(None);
        }
        let overlays = OverlayDirectory::claim(store, name, work_dir)?;
        let served = serve_in(overlays, name, Some(id.0), wanted, &socket)?;
        Ok(Some(Self { served: Some(served), socket }))
    }

    /// Returns the directory of the overlays if it is neither in the store nor where the user wanted
    /// it.
    pub fn elsewhere(&self) -> Option<&Path> {
        let directory = self.served.as_ref().map(|served| &served.directory);
        directory.filter(|directory| directory.is_elsewhere()).map(OverlayDirectory::path)
    }

    /// Returns the directory of what the VM writes to its disks.
    pub fn directory(&self) -> Option<&Path> {
        self.served.as_ref().map(|served| served.directory.path())
    }

    /// Returns the server of the disks, for the command line of the VM whose disks have names with
    /// the prefix `prefix`. Error: a command line of the checkpoint cannot be parsed.
    pub fn server(&self, meta: &Meta, prefix: &str) -> Result<DiskServer> {
        restored::server(meta, self.socket.clone(), prefix)
    }

    /// Ends the server after the VM's end. Returns the directory of what the VM has written, if `keep`
    /// is true and it has written something. Error: the server does not answer, or does not end.
    pub fn end(mut self, keep: bool) -> Result<Option<PathBuf>> {
        self.served.take().map_or(Ok(None), |served| served.end(keep))
    }

    /// Lets the server run on with its VM. Returns the directory of what the VM writes.
    pub fn leave(mut self) -> Option<PathBuf> {
        self.served.take().map(|served| served.directory.path().to_owned())
    }
}

impl Drop for CheckpointDisks {
    fn drop(&mut self) {
        // It is dropped here only after another error, and the caller reports that one.
        let _ = self.served.take().map(|served| served.end(false));
    }
}
