//! How a run ended.

use crate::control::{FailingCause, OnExit};
use keyframe_vmm::{GuestEnd, Vmm};
use std::fmt;
use std::process::ExitStatus;

/// The result of a run.
#[derive(Debug)]
pub struct RunReport {
    /// How the VMs of the run ended.
    pub end: RunEnd,
    /// How the guest ended or failed; `None` if it did neither.
    pub guest_end: Option<GuestEnd>,
    /// The number of checkpoints that were sealed.
    pub sealed: u64,
    /// The number of checkpoints that failed.
    pub failed: u64,
    /// The number of checkpoints that differ from the audit's copy of RAM.
    pub audited_wrong: u64,
    /// True if the run took no more checkpoints from some moment on.
    pub given_up: bool,
    /// The reason why the newest checkpoint is not sealed; `None` if it is.
    pub failing: Option<FailingCause>,
    /// The VM that has taken the place of the run's VM; present at [`RunEnd::Succeeded`].
    pub successor: Option<Successor>,
}

/// A VM that has taken the place of another one. Dropping it leaves the guest running.
pub struct Successor {
    pub(crate) vm: Box<dyn Vmm>,
    /// What is to happen to it, if the end of the run was asked for during the rollback.
    pub(crate) stop: Option<OnExit>,
}

impl fmt::Debug for Successor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Successor").field(&self.vm.pid()).finish()
    }
}

/// How the VMs of a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// The VMs ended. In a group this is the first failure, if one failed.
    VmEnded(ExitStatus),
    /// The run attached to them, and they run on without it.
    Detached,
    /// The run ended them.
    Killed,
    /// The run launched them, and they run on without it.
    Kept,
    /// Another VM has taken the place of the run's VM, which went back to a checkpoint.
    Succeeded,
}

/// The verdict on a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Each checkpoint was sealed.
    Complete,
    /// Some checkpoints failed; later ones hold their pages.
    Incomplete,
    /// The newest checkpoints are missing, because the store has no space.
    StoreFull,
    /// The guest panicked.
    GuestPanicked,
    /// The guest's watchdog expired.
    WatchdogExpired,
    /// QEMU failed, an audit found a difference, or checkpoints became impossible.
    Failed,
}

impl RunReport {
    /// Returns the verdict on the run.
    pub fn verdict(&self) -> Verdict {
        let has_vm_failed = matches!(self.end, RunEnd::VmEnded(exit) if !exit.success());
        if has_vm_failed || self.audited_wrong > 0 || self.given_up {
            return Verdict::Failed;
        }
        match self.guest_end {
            Some(GuestEnd::Panicked) => Verdict::GuestPanicked,
            Some(GuestEnd::WatchdogExpired) => Verdict::WatchdogExpired,
            _ if self.failing == Some(FailingCause::StoreFull) => Verdict::StoreFull,
            _ if self.failed > 0 => Verdict::Incomplete,
            _ => Verdict::Complete,
        }
    }
}
