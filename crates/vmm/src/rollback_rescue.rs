//! What a process that outlives the engine needs to end a rollback in the engine's place.
//!
//! ```text
//!   engine ── plan, steps ──▶ watchdog         engine dies:
//!                             driver           the VMM's part: the load, settings, the run state
//!                             RollbackRescuer  the rest: disks, RAM compared with the checkpoint
//! ```

use crate::{VmmError, VmmErrorKind};

/// What a rollback is to reach, for a process that ends it if the engine dies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RollbackPlan {
    /// Whether the VM is to run if it is put back as it was.
    pub ran: bool,
    /// Whether the VM is to run once it is the checkpoint.
    pub runs: bool,
    /// True if RAM and devices are as they were before the rollback. False if an earlier load has
    /// changed them.
    pub is_intact: bool,
    /// What the [`RollbackRescuer`] needs, in its own words, without a line break.
    pub words: String,
}

/// A step of a rollback. The engine tells it before the VMM carries it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RollbackStep {
    /// The VMM's settings are about to change. The text is in the driver's own words, without a
    /// line break: how to set them back, and what the load needs.
    Prepares(String),
    /// The machine is about to be reset before the load: it cannot be put back as it was.
    Resets,
    /// The engine is about to order the VMM to load the state.
    Loads,
    /// The VMM has loaded the state.
    Loaded,
    /// The VMM has failed to load the state: the machine is in an unknown state.
    Failed,
}

/// Tells a step to the process that ends the rollback if the engine dies. Error: that process has
/// ended.
pub type TellStep<'a> = &'a mut dyn FnMut(RollbackStep) -> Result<(), VmmError>;

/// What a VM is after another process has ended the rollback of a dead engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RescuedVm {
    /// The VM is as it was before the rollback.
    AsItWas,
    /// The VM is the checkpoint.
    RolledBack,
}

/// Does the part of a rescue that is the same for each VMM: disks and RAM. The words are those of
/// the [`RollbackPlan`].
pub trait RollbackRescuer {
    /// Serves the disks that were served before the rollback. RAM and devices are as they were.
    /// Error: the disks cannot be exchanged.
    fn undo(&mut self, words: &str) -> Result<(), VmmError>;

    /// Serves the disks of the checkpoint, and makes all of RAM equal to it. The VM is paused, and
    /// its devices are those of the checkpoint. Error: the disks cannot be exchanged; RAM cannot be
    /// read, written or compared.
    fn complete(&mut self, words: &str) -> Result<(), VmmError>;

    /// Removes the disks that are not served, after the VM is whole again. What cannot be removed
    /// stays.
    fn tidy(&mut self, words: &str);

    /// Tells the user how the rescue ended: as `rescued`, or with an error, after which the
    /// watchdog ends the VM.
    fn tell(&mut self, words: &str, rescued: Result<RescuedVm, &VmmError>);
}

/// The rescuer of a program that rolls no VM back.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoRescuer;

impl NoRescuer {
    fn refuse() -> Result<(), VmmError> {
        Err(VmmError::new(VmmErrorKind::Other, "this program cannot end a rollback", None))
    }
}

impl RollbackRescuer for NoRescuer {
    fn undo(&mut self, _: &str) -> Result<(), VmmError> {
        Self::refuse()
    }

    fn complete(&mut self, _: &str) -> Result<(), VmmError> {
        Self::refuse()
    }

    fn tidy(&mut self, _: &str) {}

    fn tell(&mut self, _: &str, _: Result<RescuedVm, &VmmError>) {}
}
