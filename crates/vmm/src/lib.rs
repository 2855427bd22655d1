//! What Keyframe asks of a virtual machine monitor (VMM): traits and plain values, no driver.
//!
//! ```text
//!   session, failover, replay, restore, ...
//!          │ dyn Vmm         │ dyn Restorer        │ Capabilities
//!          ▼                 ▼                     ▼
//!   ┌─ a driver (crate `qemu`, later `firecracker`) ─┐
//!   │ one running VM      │ starts a VM from         │ abilities of this VMM, with
//!   │                     │ a checkpoint             │ reason and fix for each missing one
//!   └─────────────────────────────────────────────────┘
//! ```
//!
//! A pause is one guarded operation on a [`WatchedVm`]:
//!
//! ```text
//!   arm the watchdog ─▶ hold ─▶ look: device state, dirty pages, RAM ─▶ release ─▶ settle
//!                        │                                               │          └ disarm; did the VM run meanwhile?
//!                        └ fails: the VM runs again                      └ fails: the watchdog resumes the VM
//! ```
//!
//! Invariants:
//! 1. A VM that Keyframe paused runs again, whichever step fails; [`Pause`] releases it when it is
//!    dropped.
//! 2. A VM that another client had paused stays paused.
//! 3. A VM that ran during a pause is reported as [`PauseVerdict::RanMeanwhile`].
//!
//! Tracking dirty pages and reading RAM is not part of these traits: that works on the VMM's
//! process from outside and is the same for each VMM (crate `kernel`).

mod audit;
mod capabilities;
mod error;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod pause;
mod restore;
mod resumer;
mod rollback_rescue;
mod succession;
mod vm;

pub use audit::{AuditFinding, Severity};
pub use capabilities::{Ability, Capabilities, Support, Unsupported};
pub use error::{VmmError, VmmErrorKind};
pub use keyframe_machine::{HostBlock, Lineage, MachineSpec, RamSource, VmmKind};
pub use pause::{Pause, PauseForm, PauseVerdict, PauseWatchdog, WatchedVm};
pub use restore::{
    CloneRequest, DriveFile, LazyLoading, PlanOptions, Residency, RestorePlan, RestoreRam,
    RestoreSource, RestoredVm, Restorer, RollbackTarget, SharedRamSource, TapChoice,
};
pub use resumer::Resumer;
pub use rollback_rescue::{
    NoRescuer, RescuedVm, RollbackPlan, RollbackRescuer, RollbackStep, TellStep,
};
pub use succession::{Succession, SuccessionRescuer, SuccessorState};
pub use vm::{
    ForeignOperation, GuestEnd, RunState, SavedPause, StopOutcome, VmEvent, VmExit, VmOrigin, Vmm,
    WritableDrive,
};
