//! A rollback by a successor: for a VMM that loads a state only into a new process.
//!
//! ```text
//!   VM runs ──prepare──▶ rehearsed, RAM filled ── VM is paused, and kept in a checkpoint ──▶ ended ──start──▶ successor, paused
//!                │ fails: the VM is untouched            │ fails: runs on                            │ fails: prepare and start
//!                                                                                                    ▼ the kept checkpoint
//! ```
//!
//! The successor is where the VM was: the same API socket, standard streams, working directory,
//! network namespace and control group.

use crate::{DriveFile, RescuedVm, RestoreSource, Vmm, VmmError};
use keyframe_machine::{Lineage, RamSource};

/// A checkpoint that is to take the place of a VM.
pub struct SuccessorState<'a> {
    /// The machine and its RAM blocks.
    pub source: RestoreSource,
    /// The identity of the checkpoint.
    pub lineage: Lineage,
    /// The RAM.
    pub ram: &'a dyn RamSource,
    /// The state of all devices.
    pub device_state: &'a [u8],
    /// The file of each drive to which the guest can write.
    pub drives: Vec<DriveFile>,
}

/// The place of a running VM, which a restored one takes. Dropping it changes nothing.
pub trait Succession: Send {
    /// Prepares everything for `state` that does not need the VM's end, while the VM runs: its RAM,
    /// and with `rehearse` a trial of the load beside the VM. Error: the checkpoint cannot be loaded
    /// here; the VM is untouched.
    fn prepare(&mut self, state: &SuccessorState<'_>, rehearse: bool) -> Result<(), VmmError>;

    /// Ends the VM by force. Error: the VM does not end.
    fn end_predecessor(&mut self) -> Result<(), VmmError>;

    /// Starts the prepared `state` in the place of the VM that has ended. Returns it, paused. Error:
    /// the VMM cannot be started, or does not load the checkpoint; no process is left then.
    fn start(&mut self, state: &SuccessorState<'_>) -> Result<Box<dyn Vmm>, VmmError>;
}

/// Ends the succession of an engine that has died, in its place: the part that knows stores and disks.
/// The words are those of the [`crate::RollbackPlan`].
pub trait SuccessionRescuer {
    /// Starts the VM again in the place `succession`, whose VM has ended: as the checkpoint, or, if that
    /// one does not start, as it was. Returns the VM, paused, and what it is. Error: neither starts.
    fn succeed(
        &mut self,
        words: &str,
        succession: &mut dyn Succession,
    ) -> Result<(Box<dyn Vmm>, RescuedVm), VmmError>;

    /// Removes the files that no VM has, after a VM is in its place.
    fn tidy(&mut self, words: &str);

    /// Tells the user how the rescue ended: as `rescued`, or with an error; the VM has ended then.
    fn tell(&mut self, words: &str, rescued: Result<RescuedVm, &VmmError>);
}
