//! The disks of a session, in whichever way they get into checkpoints.
//!
//! ```text
//!   served    the line names a server of ours; its overlay is cut                     run              disk_capture/served.rs
//!   cloned    QEMU has its image; the file is cloned in the pause (FICLONE)           run, attach      disk_capture/clones.rs
//!   fleeced   QEMU has its image; dirty bitmaps, what changed is read behind the pause  run, attach    disk_capture/fleece.rs
//!
//!   engine    begin ─▶ before_stop ─▶ stop ─▶ cut ─▶ ... ─▶ settled ─▶ cont ─▶ resumed ─▶ captured ─▶ sealed | failed
//!   encoder                                     └─ the label's DiskCut ─▶ put ─▶ seal
//! ```
//!
//! Invariant: all disks of a session go the same way, and are cut while all of its VMs stand still.

mod clones;
mod fleece;
pub mod method;
mod qemu_disk;
pub mod served;

pub use clones::ClonedDiskCapture;
pub use fleece::FleecedDiskCapture;
pub use method::{DiskMethod, ExcludedDisks};

use super::machines::Member;
use crate::error::{DiskError, Result, RollbackError};
use clones::ClonedCut;
use fleece::FleecedCut;
use keyframe_capture::BoxError;
use keyframe_qemu::Vm;
use keyframe_store::{CheckpointId, DiskMeta, Meta, Run, Store};
use served::{BlockSink, ServedDiskCapture, ServedDiskReader};
use std::path::PathBuf;

/// The engine's side.
pub enum DiskCapture {
    /// Served by a process of ours.
    Served(ServedDiskCapture),
    /// Image files that are cloned.
    Cloned(ClonedDiskCapture),
    /// Read through QEMU.
    Fleeced(FleecedDiskCapture),
}

/// What a capture has cut, for the encoder.
#[derive(Clone)]
pub enum DiskCut {
    /// Epochs of overlays.
    Served(ServedDiskReader, served::ServedCut),
    /// Clones of images.
    Cloned(ClonedCut),
    /// Exports of QEMU.
    Fleeced(FleecedCut),
}

impl std::fmt::Debug for DiskCut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Served(..) => "served",
            Self::Cloned(_) => "cloned",
            Self::Fleeced(_) => "fleeced",
        })
    }
}

impl DiskCut {
    /// Puts what was cut into the checkpoint in progress of `run`.
    pub fn put(
        &self,
        run: &mut Run,
        fault: &mut dyn FnMut() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        match self {
            Self::Served(disks, cut) => disks.put(cut, run, fault),
            Self::Cloned(cut) => cut.put(run, fault),
            Self::Fleeced(cut) => cut.put(run, fault),
        }
    }
}

impl DiskCut {
    /// Puts what was cut from served disks elsewhere than into a run.
    pub fn put_into(&self, sink: &mut impl BlockSink) -> Result<(), BoxError> {
        match self {
            Self::Served(disks, cut) => disks.put(cut, sink, &mut || Ok(())),
            Self::Cloned(_) | Self::Fleeced(_) => Err(DiskError::NotReplicable.into()),
        }
    }
}

impl DiskCapture {
    /// What is known of them.
    pub fn metas(&self) -> &[DiskMeta] {
        match self {
            Self::Served(disks) => disks.metas(),
            Self::Cloned(clones) => clones.metas(),
            Self::Fleeced(fleeces) => fleeces.metas(),
        }
    }

    /// True where the disks are not ready for another capture yet: it would wait.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Fleeced(fleeces) if fleeces.is_busy())
    }

    /// What was written until now is taken as known: the next cut holds what is written from here
    /// on.
    pub fn begin_anew(&mut self) -> Result<(), BoxError> {
        match self {
            Self::Served(disks) => disks.begin_anew(),
            Self::Cloned(_) | Self::Fleeced(_) => Ok(()),
        }
    }

    /// Bytes written since the last cut, where that is known.
    pub fn written_bytes(&self) -> Option<u64> {
        match self {
            Self::Served(disks) => disks.written_bytes().ok(),
            Self::Cloned(_) | Self::Fleeced(_) => None,
        }
    }

    /// Requests of the one guest are answered on `core`, where it can be had: see
    /// [`keyframe_disk::Disks::answer_on`].
    pub fn answer_on(&self, core: u32) -> Result<(), BoxError> {
        match self {
            Self::Served(disks) => disks.answer_on(core),
            Self::Cloned(_) | Self::Fleeced(_) => Ok(()),
        }
    }

    /// A capture begins, while the guests run.
    pub fn begin(&mut self, members: &mut [Member]) -> Result<DiskCut, BoxError> {
        match self {
            Self::Served(disks) => Ok(DiskCut::Served(disks.for_sink(), disks.begin()?)),
            Self::Cloned(clones) => Ok(DiskCut::Cloned(clones.begin(members)?)),
            Self::Fleeced(fleeces) => Ok(DiskCut::Fleeced(fleeces.begin(members)?)),
        }
    }

    /// Just before the VMs are stopped.
    pub fn before_stop(&mut self) -> Result<(), BoxError> {
        match self {
            Self::Served(disks) => disks.before_stop(),
            Self::Cloned(clones) => clones.sync(),
            Self::Fleeced(_) => Ok(()),
        }
    }

    /// The VMs stand still.
    pub fn cut(&mut self, members: &mut [Member]) -> Result<(), BoxError> {
        match self {
            Self::Served(disks) => disks.cut(),
            Self::Cloned(clones) => clones.cut(),
            Self::Fleeced(fleeces) => fleeces.cut(members),
        }
    }

    /// They are about to run.
    pub fn settled(&mut self) -> Result<(), BoxError> {
        match self {
            Self::Served(disks) => disks.settled(),
            Self::Cloned(_) | Self::Fleeced(_) => Ok(()),
        }
    }

    /// They run again, or were never stopped.
    pub fn resumed(&mut self, members: &mut [Member]) -> Result<(), BoxError> {
        match self {
            Self::Served(disks) => {
                disks.resumed();
                Ok(())
            }
            Self::Cloned(clones) => clones.require_same(members),
            Self::Fleeced(fleeces) => fleeces.resumed(members),
        }
    }

    /// The capture came to an end: it has number `seq`, or failed.
    pub fn captured(&mut self, seq: Option<u64>, members: &mut [Member]) {
        match self {
            Self::Served(disks) => disks.captured(seq),
            Self::Cloned(clones) => clones.captured(seq),
            Self::Fleeced(fleeces) => fleeces.captured(seq, members),
        }
    }

    /// The checkpoint of capture `seq` is sealed.
    pub fn sealed(&mut self, seq: u64, members: &mut [Member]) {
        match self {
            Self::Served(disks) => disks.sealed(seq),
            Self::Cloned(clones) => clones.sealed(seq),
            Self::Fleeced(fleeces) => fleeces.sealed(seq, members),
        }
    }

    /// The checkpoints of these captures are lost.
    pub fn failed(&mut self, lost: &[u64], members: &mut [Member]) {
        match self {
            Self::Served(disks) => disks.failed(lost),
            Self::Cloned(clones) => clones.failed(lost),
            Self::Fleeced(fleeces) => fleeces.failed(lost, members),
        }
    }

    /// Opens the disks of checkpoint `id` beside those that are served, which the VM is to go back
    /// to.
    pub fn stage(&mut self, store: &Store, id: CheckpointId, meta: &Meta) -> Result<()> {
        match self {
            Self::Served(disks) => disks.stage(store, id, meta),
            Self::Cloned(_) | Self::Fleeced(_) => Err(RollbackError::OwnDisks.into()),
        }
    }

    /// Serves those in place of what is served, or the other way. The VM stands, and nothing is in
    /// flight.
    pub fn exchange(&mut self) -> Result<(), BoxError> {
        match self {
            Self::Served(disks) => disks.exchange(),
            Self::Cloned(_) | Self::Fleeced(_) => Ok(()),
        }
    }

    /// What is served from now on comes from checkpoint `id`.
    pub fn came_from(&mut self, id: CheckpointId) -> Result<()> {
        match self {
            Self::Served(disks) => disks.came_from(id),
            Self::Cloned(_) | Self::Fleeced(_) => Ok(()),
        }
    }

    /// Removes what is not served.
    pub fn dismiss(&mut self) -> Result<()> {
        match self {
            Self::Served(disks) => disks.dismiss(),
            Self::Cloned(_) | Self::Fleeced(_) => Ok(()),
        }
    }

    /// No more checkpoints are taken: QEMU is left without a trace of ours.
    pub fn detach(&mut self, members: &mut [Member]) {
        if let Self::Fleeced(fleeces) = self {
            fleeces.detach(members);
        }
    }

    /// The VMs were refused before their first checkpoint.
    pub fn undo(self, vms: &mut [&mut Vm]) {
        if let Self::Fleeced(_) = self {
            FleecedDiskCapture::undo(vms);
        }
    }

    /// The VMs have ended. Tells where what they have written lies, if that is beside their images.
    pub fn end(self) -> Result<Option<PathBuf>> {
        match self {
            Self::Served(disks) => disks.end(),
            Self::Cloned(_) | Self::Fleeced(_) => Ok(None),
        }
    }

    /// The VMs run on. Tells the same.
    pub fn keep(self) -> Option<PathBuf> {
        match self {
            Self::Served(disks) => disks.keep(),
            Self::Cloned(_) | Self::Fleeced(_) => None,
        }
    }
}
