//! Ends a rollback whose engine has died: for the watchdog.
//!
//! | last step that the engine told | RAM and devices | the watchdog | the VM is |
//! |---|---|---|---|
//! | none, `Prepares` | as they were | removes the image, sets settings back | as it was |
//! | `Resets` | reset | resets again, loads | the checkpoint |
//! | `Loads`; QEMU has the job | loaded when it ends | waits for it | the checkpoint |
//! | `Loads`; it has no job | as they were | removes the image: no load begins | as it was |
//! | `Loads`; it has no job | reset, or half loaded | loads | the checkpoint |
//! | `Loaded` | loaded | | the checkpoint |
//! | `Failed` | unknown | ends the VM | |
//!
//! If the VM is as it was, the watchdog also serves the former disks. If it is the checkpoint, the
//! watchdog serves the checkpoint's disks and compares all of RAM.
//!
//! The engine tells `Loaded` before it dismisses the job. So if QEMU has no job after `Loads`, the
//! engine's `snapshot-load` has not reached it. One that is still on its way fails without the
//! image.
//!
//! On the way back from a load that has failed, the goal is the checkpoint before the rollback, and
//! RAM and devices are not as they were. Until the engine has made the image of that checkpoint,
//! the watchdog cannot end such a rollback.
//!
//! Invariants:
//! 1. QEMU loads no image twice while the VM stands still, because a second load of the same state
//!    can crash it. The engine has left the flash chips out of the second image.
//! 2. The VM runs only as exactly the checkpoint, or as exactly what it was. While it is neither,
//!    no other engine attaches to it: this process is marked in QEMU as its engine.
//!
//! Left out: a VM that another client has resumed during the rollback.

use super::load_plan::LoadPlan;
use super::{FD_NAME, LOAD_TIMEOUT, LOOK_EVERY};
use super::{await_job, dismiss_job, find_job, remove_node, start_job};
use crate::{Error, Qmp, Result, statefile};
use keyframe_vmm::{RescuedVm, RollbackPlan, RollbackRescuer, RollbackStep};
use serde_json::json;
use std::time::{Duration, Instant};

/// What an engine has told of a rollback that is under way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ToldRollback {
    pub plan: RollbackPlan,
    /// The words of [`RollbackStep::Prepares`].
    load: Option<String>,
    was_reset: bool,
    stage: Stage,
}

/// How far the load had come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Unbegun,
    Resets,
    Loads,
    Loaded,
    Failed,
}

impl ToldRollback {
    /// A rollback by `plan` of which the engine has taken no step.
    pub fn new(plan: RollbackPlan) -> Self {
        Self { plan, ..Self::default() }
    }

    /// Notes the next step.
    pub fn note(&mut self, step: RollbackStep) {
        self.stage = match step {
            RollbackStep::Prepares(load) => {
                self.load = Some(load);
                Stage::Unbegun
            }
            RollbackStep::Resets => {
                self.was_reset = true;
                Stage::Resets
            }
            RollbackStep::Loads => Stage::Loads,
            RollbackStep::Loaded => Stage::Loaded,
            RollbackStep::Failed => Stage::Failed,
        };
    }

    /// Ends the rollback, so that the VM may run, and lets it run if it is to. Returns what the VM
    /// is. Errors: the VM is in an unknown state, and does not run; QEMU does not answer; those of
    /// `rescuer`.
    pub fn end(&self, qmp: &mut Qmp, rescuer: &mut dyn RollbackRescuer) -> Result<RescuedVm> {
        let load = self.load.as_deref().and_then(LoadPlan::parse);
        let patience = load.as_ref().map_or(LOAD_TIMEOUT, |load| load.patience);
        // QEMU answers nothing while it loads.
        let before = qmp.set_timeout(patience);
        let ended = statefile::mark_rescuer(qmp).and_then(|set| {
            let ended = self.end_marked(qmp, load.as_ref(), patience, rescuer);
            let _ = qmp.execute("remove-fd", Some(json!({ "fdset-id": set })));
            ended
        });
        qmp.set_timeout(before);
        ended
    }

    fn end_marked(
        &self,
        qmp: &mut Qmp,
        load: Option<&LoadPlan>,
        patience: Duration,
        rescuer: &mut dyn RollbackRescuer,
    ) -> Result<RescuedVm> {
        if self.stage != Stage::Resets {
            require_still(qmp)?;
        }
        let rescued = self.settle_load(qmp, load, patience)?;
        remove_image(qmp)?;
        if let Some(load) = load {
            load.settings.resume(qmp)?;
        }
        if rescued == RescuedVm::AsItWas && !self.plan.is_intact {
            return Err(unknown("it was to go back to what it was, and no state was loaded"));
        }
        require_still(qmp)?;
        let words = &self.plan.words;
        let (done, runs) = match rescued {
            RescuedVm::RolledBack => (rescuer.complete(words), self.plan.runs),
            RescuedVm::AsItWas => (rescuer.undo(words), self.plan.ran),
        };
        done?;
        require_still(qmp)?;
        if runs {
            qmp.cont()?;
        }
        Ok(rescued)
    }

    /// Ends the load, or makes sure that none begins. Returns what RAM and devices are then. Error:
    /// they are in an unknown state.
    fn settle_load(
        &self,
        qmp: &mut Qmp,
        load: Option<&LoadPlan>,
        patience: Duration,
    ) -> Result<RescuedVm> {
        match self.stage {
            Stage::Unbegun => Ok(RescuedVm::AsItWas),
            Stage::Resets => {
                let known = load.and_then(|load| Some((load.reset.as_ref()?, &load.actions)));
                let (reset, actions) = known.ok_or_else(|| unknown("its reset is unknown"))?;
                qmp.stop()?;
                reset.carry_out(qmp, actions)?;
                start_job(qmp)?;
                await_job(qmp, patience).and_then(|()| dismiss_job(qmp))?;
                Ok(RescuedVm::RolledBack)
            }
            Stage::Loads => self.settle_job(qmp, patience),
            Stage::Loaded => {
                if find_job(qmp)?.is_some() {
                    dismiss_job(qmp)?;
                }
                Ok(RescuedVm::RolledBack)
            }
            Stage::Failed => Err(unknown("QEMU could not load the checkpoint")),
        }
    }

    /// Waits for QEMU's job. If there is none, begins it, or makes sure that none begins.
    fn settle_job(&self, qmp: &mut Qmp, patience: Duration) -> Result<RescuedVm> {
        let deadline = Instant::now() + patience;
        loop {
            match find_job(qmp)?.map(|job| job.ended) {
                Some(Some(ended)) => {
                    dismiss_job(qmp)?;
                    return match ended {
                        Ok(()) => Ok(RescuedVm::RolledBack),
                        Err(problem) => Err(unknown(&problem)),
                    };
                }
                Some(None) => {}
                // This machine cannot be put back as it was. The engine's command may still arrive:
                // QEMU refuses one of the two.
                None if self.was_reset || !self.plan.is_intact => unless_gone(start_job(qmp))?,
                // A job that has just begun uses the image, and is found next time.
                None => {
                    let removed = remove_node(qmp);
                    if removed.is_ok() && find_job(qmp)?.is_none() {
                        return Ok(RescuedVm::AsItWas);
                    }
                    unless_gone(removed)?;
                }
            }
            if Instant::now() >= deadline {
                return Err(unknown("QEMU does not end the load"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Ignores that QEMU refuses a command. Error: QEMU has ended, or does not answer.
fn unless_gone(done: Result<()>) -> Result<()> {
    done.or_else(|error| match error {
        Error::Gone { .. } | Error::Timeout { .. } => Err(error),
        _ => Ok(()),
    })
}

fn unknown(problem: &str) -> Error {
    Error::Rollback { problem: problem.into() }
}

/// Fails if the VM runs, and stops it then.
fn require_still(qmp: &mut Qmp) -> Result<()> {
    if qmp.status()?.is_running() {
        qmp.stop()?;
        return Err(unknown("another client has resumed it"));
    }
    Ok(())
}

/// Removes the image from QEMU, if it is there.
fn remove_image(qmp: &mut Qmp) -> Result<()> {
    unless_gone(remove_node(qmp))?;
    statefile::forget_marked(qmp, FD_NAME)
}
