//! The disks of running VMs, and the methods by which they get into checkpoints.
//!
//! ```text
//!   served    the line names a server of ours; its overlay is cut                           run           served.rs
//!   cloned    QEMU has its image; the file is cloned in the pause (FICLONE)                 run, attach   clones.rs
//!   drives    another VMM has its file: cloned in the pause after the device state, or copied   run, attach   drives.rs
//!   fleeced   QEMU has its image; dirty bitmaps, what changed is read after the pause       run, attach   fleece.rs
//!
//!   engine    begin ─▶ before_stop ─▶ stop ─▶ cut ─▶ ... ─▶ settled ─▶ cont ─▶ resumed ─▶ captured ─▶ sealed | failed
//!   encoder                                     └─ the label's DiskCut ─▶ put ─▶ seal
//! ```
//!
//! Invariant: all disks of a session use the same method, and are cut while all of its VMs are
//! paused.
//!
//! The crate prints nothing: it returns [`DiskError`]s and sends [`DiskEvent`]s to the session's
//! sink. A capture gets the VMs of the session as `members`, in the order of the session.

mod cloned_drives;
mod clones;
mod copied_drives;
mod copy_before_write;
mod drives;
mod error;
mod event;
mod fleece;
mod image_clones;
pub mod method;
mod qemu_disk;
pub mod served;

pub use clones::ClonedDiskCapture;
pub use drives::DrivePlan;
pub use error::{CloneObstacle, DiskError, Result};
pub use event::{DiskEvent, DiskStep, SharedDiskEventSink, SharedError};
pub use fleece::FleecedDiskCapture;
pub use method::{DiskMethod, DiskOwner, ExcludedDisks};

use copy_before_write::CopiedCut;
use fleece::FleecedCut;
use image_clones::ClonedCut;
use keyframe_capture::BoxError;
use keyframe_qemu::Vm;
use keyframe_store::{CheckpointId, DiskMeta, Meta, Run, Store};
use keyframe_vm_disks::staged::StagedDisks;
use keyframe_vmm::Vmm;
use served::{BlockSink, ServedDiskCapture, ServedDiskReader};
use std::path::PathBuf;

/// The blocks of disks that a capture has cut, for the encoder.
#[derive(Clone)]
pub enum DiskCut {
    /// The epochs of overlays that Keyframe serves.
    Served(ServedDiskReader, served::ServedCut),
    /// The clones of images.
    Cloned(ClonedCut),
    /// What was written to the files of drives.
    Copied(CopiedCut),
    /// The exports of QEMU.
    Fleeced(FleecedCut),
}

impl std::fmt::Debug for DiskCut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Served(..) => "served",
            Self::Cloned(_) => "cloned",
            Self::Copied(_) => "copied",
            Self::Fleeced(_) => "fleeced",
        })
    }
}

impl DiskCut {
    /// Writes the cut blocks into the checkpoint in progress of `run`. Calls `fault` before each
    /// batch, for tests; its error fails the write. Errors: the blocks cannot be read; the store
    /// cannot be written.
    pub fn put(
        &self,
        run: &mut Run,
        fault: &mut dyn FnMut() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        match self {
            Self::Served(disks, cut) => disks.put(cut, run, fault),
            Self::Cloned(cut) => cut.put(run, fault),
            Self::Copied(cut) => cut.put(run, fault),
            Self::Fleeced(cut) => cut.put(run, fault),
        }
    }
}

impl DiskCut {
    /// Returns a cut of no disk.
    pub fn nothing() -> Self {
        Self::Cloned(ClonedCut::nothing())
    }
}

impl DiskCut {
    /// Writes the cut blocks of served disks to `sink`. Error: the blocks cannot be read; those of
    /// `sink`.
    pub fn put_into(&self, sink: &mut impl BlockSink) -> Result<(), BoxError> {
        match self {
            Self::Served(disks, cut) => disks.put(cut, sink, &mut || Ok(())),
            Self::Cloned(_) | Self::Copied(_) | Self::Fleeced(_) => {
                Err(DiskError::NotReplicable.into())
            }
        }
    }
}

/// The capture of a session's disks. The engine calls the methods in the order of the drawing
/// above.
pub trait DiskCapture: Send {
    /// Returns the metadata of the disks, for the run in the store.
    fn metas(&self) -> &[DiskMeta];

    /// Adds `disks`, which QEMU has opened and no checkpoint holds, after the captured ones.
    fn leave_out(&mut self, disks: Vec<DiskMeta>) {
        let _ = disks;
    }

    /// Returns true while the disks are not ready for another capture, which would wait.
    fn is_busy(&self) -> bool {
        false
    }

    /// Drops the record of the writes until now: the next cut holds only later writes. Error: the
    /// server of the disks, or QEMU, has failed; the capture then fails.
    fn begin_anew(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Returns whether [`DiskCapture::cut`] sends commands to the monitors of the paused VMs.
    fn cuts_by_monitor(&self) -> bool {
        false
    }

    /// Returns the number of bytes written since the last cut; `None` if it is unknown.
    fn written_bytes(&self) -> Option<u64> {
        None
    }

    /// Has the server answer the requests of the only guest on processor core `core`, if that is
    /// possible: see [`keyframe_disk::Disks::answer_on`]. Error: the server of the disks does not
    /// answer.
    fn answer_on(&self, core: u32) -> Result<(), BoxError> {
        let _ = core;
        Ok(())
    }

    /// Returns the reason why no process serves the disks, if one could not be started at once;
    /// `None` if the disks are served.
    fn outage(&self) -> Option<String> {
        None
    }

    /// Returns true if the guests' writes go to the store.
    fn are_in_store(&self) -> bool {
        false
    }

    /// Gives up the capture that is being read if the guests' next writes would fail for want of
    /// space. `is_stopped` tells that QEMU has stopped a guest for such a write. Returns true if
    /// the guest may have space now, because a capture's files are gone.
    fn relieve(&mut self, is_stopped: bool, members: &mut [&mut dyn Vmm]) -> bool {
        let _ = (is_stopped, members);
        false
    }

    /// Begins a capture, while the guests run. Error: the server of the disks, or QEMU, has failed;
    /// the capture then fails.
    fn begin(&mut self, members: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError>;

    /// Returns true while [`DiskCapture::begin`] fails because the disks have other sizes than in the
    /// present run, or one was unplugged. [`DiskCapture::metas`] has the present disks then.
    fn takes_new_run(&self) -> bool {
        false
    }

    /// Called when a run has begun with the present [`DiskCapture::metas`].
    fn began_run(&mut self) {}

    /// Prepares the cut, just before the VMs are paused. Error: the server of the disks, or QEMU,
    /// has failed; the capture then fails.
    fn before_stop(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Cuts the disks, while all VMs are paused. Error: the server of the disks, or QEMU, has
    /// failed; the capture then fails.
    fn cut(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError>;

    /// Completes the cut, just before the VMs run again. Error: the server of the disks, or QEMU,
    /// has failed; the capture then fails.
    fn settled(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called when the VMs run again, or after a capture that never paused them. Error: the server
    /// of the disks, or QEMU, has failed; the capture then fails.
    fn resumed(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        let _ = members;
        Ok(())
    }

    /// Called when the capture has ended: it has number `seq`, or failed if `seq` is `None`.
    fn captured(&mut self, seq: Option<u64>, members: &mut [&mut dyn Vmm]) {
        let _ = (seq, members);
    }

    /// Called when the checkpoint of capture `seq` is sealed.
    fn sealed(&mut self, seq: u64, members: &mut [&mut dyn Vmm]) {
        let _ = (seq, members);
    }

    /// Called when the checkpoints of the captures `lost` are lost: the next cut covers their
    /// blocks again.
    fn failed(&mut self, lost: &[u64], members: &mut [&mut dyn Vmm]) {
        let _ = (lost, members);
    }

    /// Opens the disks of checkpoint `id` beside those that are served, for a rollback to it.
    /// Errors: the checkpoint cannot be read; the server of the disks has failed.
    fn stage(&mut self, store: &Store, id: CheckpointId, meta: &Meta) -> Result<()> {
        let _ = (store, id, meta);
        Err(DiskError::OwnDisks)
    }

    /// Returns what another process needs to end a rollback to checkpoint `id`, before the disks
    /// are exchanged. `None` if no disks are staged.
    fn staged(&self, id: CheckpointId) -> Option<StagedDisks> {
        let _ = id;
        None
    }

    /// Exchanges the staged disks and the served ones. The VM is paused, and no request is in
    /// flight. Error: the server of the disks has failed.
    fn exchange(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Notes that the served disks come from checkpoint `id` from now on. Error: the description of
    /// the overlays cannot be written.
    fn came_from(&mut self, id: CheckpointId) -> Result<()> {
        let _ = id;
        Ok(())
    }

    /// Removes the staged disks, or those that they replaced. Error: the server of the disks has
    /// failed.
    fn dismiss(&mut self) -> Result<()> {
        Ok(())
    }

    /// Removes everything of the capture from the VMM, after the last checkpoint.
    fn detach(&mut self, members: &mut [&mut dyn Vmm]) {
        let _ = members;
    }

    /// Removes everything of the capture from VMs that were refused before their first checkpoint.
    fn undo(self: Box<Self>, vms: &mut [&mut Vm]) {
        let _ = vms;
    }

    /// Ends the capture after the VMs have ended. Returns the directory of the guests' writes, if
    /// they are not in the images. Error: the server of the disks does not end in good order.
    fn end(self: Box<Self>) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Leaves the disks to VMs that run on. Returns the directory of the guests' writes, if they
    /// are not in the images.
    fn keep(self: Box<Self>) -> Option<PathBuf> {
        None
    }
}

impl DiskCapture for ServedDiskCapture {
    fn metas(&self) -> &[DiskMeta] {
        Self::metas(self)
    }

    fn leave_out(&mut self, disks: Vec<DiskMeta>) {
        Self::leave_out(self, disks);
    }

    fn begin_anew(&mut self) -> Result<(), BoxError> {
        Self::begin_anew(self)
    }

    fn written_bytes(&self) -> Option<u64> {
        Self::written_bytes(self).ok()
    }

    fn answer_on(&self, core: u32) -> Result<(), BoxError> {
        Self::answer_on(self, core)
    }

    fn outage(&self) -> Option<String> {
        Self::outage(self)
    }

    fn are_in_store(&self) -> bool {
        true
    }

    fn begin(&mut self, _: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError> {
        Ok(DiskCut::Served(Self::for_sink(self), Self::begin(self)?))
    }

    fn before_stop(&mut self) -> Result<(), BoxError> {
        Self::before_stop(self)
    }

    fn cut(&mut self, _: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Self::cut(self)
    }

    fn settled(&mut self) -> Result<(), BoxError> {
        Self::settled(self)
    }

    fn resumed(&mut self, _: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Self::resumed(self);
        Ok(())
    }

    fn captured(&mut self, seq: Option<u64>, _: &mut [&mut dyn Vmm]) {
        Self::captured(self, seq);
    }

    fn sealed(&mut self, seq: u64, _: &mut [&mut dyn Vmm]) {
        Self::sealed(self, seq);
    }

    fn failed(&mut self, lost: &[u64], _: &mut [&mut dyn Vmm]) {
        Self::failed(self, lost);
    }

    fn stage(&mut self, store: &Store, id: CheckpointId, meta: &Meta) -> Result<()> {
        Self::stage(self, store, id, meta)
    }

    fn staged(&self, id: CheckpointId) -> Option<StagedDisks> {
        Self::staged(self, id)
    }

    fn exchange(&mut self) -> Result<(), BoxError> {
        Self::exchange(self)
    }

    fn came_from(&mut self, id: CheckpointId) -> Result<()> {
        Self::came_from(self, id)
    }

    fn dismiss(&mut self) -> Result<()> {
        Self::dismiss(self)
    }

    fn end(self: Box<Self>) -> Result<Option<PathBuf>> {
        Self::end(*self)
    }

    fn keep(self: Box<Self>) -> Option<PathBuf> {
        Self::keep(*self)
    }
}

impl DiskCapture for ClonedDiskCapture {
    fn metas(&self) -> &[DiskMeta] {
        Self::metas(self)
    }

    fn takes_new_run(&self) -> bool {
        Self::takes_new_run(self)
    }

    fn began_run(&mut self) {
        Self::began_run(self);
    }

    fn begin(&mut self, members: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError> {
        Self::begin(self, members).map(DiskCut::Cloned)
    }

    fn before_stop(&mut self) -> Result<(), BoxError> {
        self.clones().sync()
    }

    fn cut(&mut self, _: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        self.clones().cut()
    }

    fn resumed(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Self::require_same(self, members)
    }

    fn captured(&mut self, seq: Option<u64>, _: &mut [&mut dyn Vmm]) {
        self.clones().captured(seq);
    }

    fn sealed(&mut self, seq: u64, _: &mut [&mut dyn Vmm]) {
        self.clones().sealed(seq);
    }

    fn failed(&mut self, lost: &[u64], _: &mut [&mut dyn Vmm]) {
        self.clones().failed(lost);
    }
}

impl DiskCapture for FleecedDiskCapture {
    fn metas(&self) -> &[DiskMeta] {
        Self::metas(self)
    }

    fn is_busy(&self) -> bool {
        Self::is_busy(self)
    }

    fn cuts_by_monitor(&self) -> bool {
        true
    }

    fn relieve(&mut self, is_stopped: bool, members: &mut [&mut dyn Vmm]) -> bool {
        Self::relieve(self, is_stopped, members)
    }

    fn takes_new_run(&self) -> bool {
        Self::takes_new_run(self)
    }

    fn began_run(&mut self) {
        Self::began_run(self);
    }

    fn begin(&mut self, members: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError> {
        Self::begin(self, members).map(DiskCut::Fleeced)
    }

    fn cut(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Self::cut(self, members)
    }

    fn resumed(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Self::resumed(self, members)
    }

    fn captured(&mut self, seq: Option<u64>, members: &mut [&mut dyn Vmm]) {
        Self::captured(self, seq, members);
    }

    fn sealed(&mut self, seq: u64, members: &mut [&mut dyn Vmm]) {
        Self::sealed(self, seq, members);
    }

    fn failed(&mut self, lost: &[u64], members: &mut [&mut dyn Vmm]) {
        Self::failed(self, lost, members);
    }

    fn detach(&mut self, members: &mut [&mut dyn Vmm]) {
        Self::detach(self, members);
    }

    fn undo(self: Box<Self>, vms: &mut [&mut Vm]) {
        Self::undo(vms);
    }
}
