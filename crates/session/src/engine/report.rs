//! How a run ended.

use std::process::ExitStatus;

/// How a run ended, and what it has achieved.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// What became of the VMs.
    pub end: RunEnd,
    /// Checkpoints that were sealed.
    pub sealed: u64,
    /// Checkpoints that failed.
    pub failed: u64,
    /// Checkpoints that were not what the audit copied in their pauses.
    pub audited_wrong: u64,
    /// True if the run took no more checkpoints from some moment on.
    pub given_up: bool,
}

/// What became of the VMs of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// They ended by themselves; of a group, this is the first failure, if one failed.
    VmEnded(ExitStatus),
    /// The run attached to them, and they run on without it.
    Detached,
    /// The run ended them.
    Killed,
    /// The run launched them, and they run on without it.
    Kept,
}

/// Whether a run did what it was to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Each checkpoint was sealed.
    Complete,
    /// Some checkpoints failed; later ones hold their pages.
    Incomplete,
    /// QEMU failed, an audit found a difference, or checkpoints became impossible.
    Failed,
}

impl RunReport {
    /// Whether the run did what it was to do.
    pub fn verdict(&self) -> Verdict {
        let has_vm_failed = matches!(self.end, RunEnd::VmEnded(exit) if !exit.success());
        if has_vm_failed || self.audited_wrong > 0 || self.given_up {
            Verdict::Failed
        } else if self.failed > 0 {
            Verdict::Incomplete
        } else {
            Verdict::Complete
        }
    }
}
