//! The guarded pause of a VM.
//!
//! ```text
//!   one command      the VMM stops the VM, saves its devices, waits for the engine, and resumes the VM
//!   separate         stop ─▶ save the devices ─▶ resume, with other commands of the engine in between
//! ```
//!
//! In a pause by one command the VMM serves no other client. In a pause by separate commands it
//! does: if another client stops the VM between `stop` and `resume`, the VM cannot be told from one
//! that only the engine stopped, and `resume` undoes that client's command.

use crate::{
    RollbackPlan, RollbackStep, RollbackTarget, SavedPause, StopOutcome, TellStep, Vmm, VmmError,
};
use std::fs::File;
use std::time::Duration;

/// How long a VM may stand still without a sign of the engine: longer than a checkpoint takes to be
/// sealed.
const STANDSTILL_MAX: Duration = Duration::from_mins(10);

/// A process that resumes a VM if the engine that paused it dies or takes too long.
///
/// Dropping the value while it is armed counts as the engine's death.
pub trait PauseWatchdog: Send {
    /// Starts the watchdog's process if it does not run. Error: the process cannot be started.
    fn ensure(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Starts watching: unless [`PauseWatchdog::disarm`] follows within `limit`, the watchdog
    /// resumes the VM. Error: the watchdog has ended or does not answer.
    fn arm(&mut self, limit: Duration) -> Result<(), VmmError>;

    /// Starts watching before [`Vmm::pause_and_save`]: unless disarmed within `limit`, the watchdog
    /// ends the VMM's command. Error: the watchdog has ended or does not answer.
    fn arm_for_saved_pause(&mut self, limit: Duration) -> Result<(), VmmError>;

    /// Stops watching. Returns true if the watchdog has resumed the VM since it was armed. Error:
    /// the watchdog has ended or does not answer.
    fn disarm(&mut self) -> Result<bool, VmmError>;

    /// Forbids the VM to run until the watchdog is armed or disarmed: if the engine dies meanwhile,
    /// the watchdog ends the rollback by its plan, or ends the VM. Returns true if it has resumed
    /// the VM since it was armed. Error: the watchdog has ended or does not answer.
    fn forbid_running(&mut self) -> Result<bool, VmmError>;

    /// Tells the watchdog the plan of a rollback; with `None`, that the rollback has ended. Error:
    /// the watchdog has ended.
    fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<(), VmmError>;

    /// Tells the watchdog the step that the rollback takes next. Error: the watchdog has ended.
    fn note_step(&mut self, step: &RollbackStep) -> Result<(), VmmError>;

    /// Has the watchdog resume the VM now, and waits a moment for it.
    fn resume_now(&mut self);

    /// Disarms and ends the watchdog.
    fn end(self: Box<Self>);
}

/// The kind of commands by which a VM is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseForm {
    /// One command, if the VMM has one ([`Vmm::pause_and_save`]); otherwise separate commands.
    OneCommand,
    /// Separate commands, so that other commands fit in between.
    Separate,
}

/// Whether the VM stood still during a whole pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseVerdict {
    /// The VM did not run. The captured state is of one instant.
    Undisturbed,
    /// The watchdog or another client resumed the VM. The captured state is torn.
    RanMeanwhile,
}

/// A VM with the watchdog of its pauses.
///
/// [`WatchedVm::pause`] is the guarded form of a pause. Callers that must return between the steps
/// use [`WatchedVm::hold`], [`WatchedVm::release`] and [`WatchedVm::settle`] in this order.
pub struct WatchedVm<V: Vmm + ?Sized = dyn Vmm> {
    vm: Box<V>,
    watchdog: Box<dyn PauseWatchdog>,
    limit: Duration,
    form: PauseForm,
    /// Present between `hold` and `settle`.
    held: Option<HeldVm>,
    /// Present during a standstill: its own stop.
    standstill: Option<StopOutcome>,
}

/// A VM between `hold` and `settle`.
struct HeldVm {
    stop: StopOutcome,
    form: PauseForm,
    /// The device state, if the VM is held by one command and the state was not fetched yet.
    device_state: Option<Vec<u8>>,
}

impl HeldVm {
    fn by_separate_commands(stop: StopOutcome) -> Self {
        Self { stop, form: PauseForm::Separate, device_state: None }
    }
}

impl<V: Vmm + ?Sized> WatchedVm<V> {
    /// Guards the pauses of `vm`: `watchdog` ends each pause after `limit`.
    pub fn new(vm: Box<V>, watchdog: Box<dyn PauseWatchdog>, limit: Duration) -> Self {
        Self { vm, watchdog, limit, form: PauseForm::Separate, held: None, standstill: None }
    }

    /// Returns the same VM, paused by the commands of `form`.
    #[must_use]
    pub fn with_form(self, form: PauseForm) -> Self {
        Self { form, ..self }
    }

    /// Returns the kind of commands of the next pause.
    pub fn form(&self) -> PauseForm {
        self.form
    }

    /// Sets the kind of commands of later pauses.
    pub fn set_form(&mut self, form: PauseForm) {
        self.form = form;
    }

    /// Returns the VM without its watchdog.
    pub fn vm(&self) -> &V {
        &self.vm
    }

    /// Returns the VM without its watchdog.
    pub fn vm_mut(&mut self) -> &mut V {
        &mut self.vm
    }

    /// Ends the watchdog and returns the VM.
    pub fn into_vm(self) -> Box<V> {
        self.watchdog.end();
        self.vm
    }

    /// Makes the VMM stand still when the guest ends ([`Vmm::hold_end`]), with a watchdog that
    /// undoes it if this process dies. Returns false if the VMM cannot. Error: the watchdog or the
    /// VMM does not answer.
    pub fn hold_end(&mut self) -> Result<bool, VmmError> {
        self.watchdog.ensure()?;
        self.vm.hold_end()
    }

    /// Pauses the VM, and returns a guard. The pause ends when the guard is released or dropped.
    /// Error: the watchdog or the VMM does not answer. The VM is then as it was.
    pub fn pause(&mut self) -> Result<Pause<'_, V>, VmmError> {
        self.hold()?;
        Ok(Pause { watched: self })
    }

    /// Pauses the VM with the watchdog armed. Returns whether the VM ran before. During a
    /// standstill the VM is paused already, and the watchdog stays as it is.
    ///
    /// Error: the VMM or the watchdog does not answer; the VM runs again then.
    pub fn hold(&mut self) -> Result<StopOutcome, VmmError> {
        let held = if self.standstill.is_some() {
            HeldVm::by_separate_commands(StopOutcome::AlreadyPaused)
        } else {
            let saved = match self.form {
                PauseForm::OneCommand => self.pause_and_save()?,
                PauseForm::Separate => None,
            };
            if let Some(SavedPause { stop, device_state }) = saved {
                let device_state = Some(device_state);
                HeldVm { stop, form: PauseForm::OneCommand, device_state }
            } else {
                self.require_no_operation()?;
                HeldVm::by_separate_commands(self.stop_watched(self.limit)?)
            }
        };
        let stop = held.stop;
        self.held = Some(held);
        Ok(stop)
    }

    /// Fails if separate commands would take the place of the one command while another client
    /// migrates or dumps the VM. For a VM that is always paused by separate commands, the caller
    /// asks before the pause.
    fn require_no_operation(&mut self) -> Result<(), VmmError> {
        if self.form == PauseForm::OneCommand && self.vm.foreign_operation()?.is_some() {
            return Err(VmmError::new(
                crate::VmmErrorKind::Other,
                "another client migrates or dumps the VM; checkpoints go on when that is over",
                None,
            ));
        }
        Ok(())
    }

    /// Returns the state of all devices of the held VM. Error: the VMM refuses or does not answer.
    pub fn save_devices(&mut self) -> Result<Vec<u8>, VmmError> {
        match self.held.as_mut().and_then(|held| held.device_state.take()) {
            Some(device_state) => Ok(device_state),
            None => self.vm.save_devices(),
        }
    }

    /// Resumes the VM if [`WatchedVm::hold`] stopped it. If the monitor fails, the watchdog and a
    /// new connection resume it instead, and the error is returned.
    pub fn release(&mut self) -> Result<(), VmmError> {
        match &self.held {
            Some(HeldVm { form: PauseForm::OneCommand, .. }) => {
                self.vm.end_saved_pause().inspect_err(|_| self.watchdog.resume_now())
            }
            Some(HeldVm { stop: StopOutcome::Stopped, .. }) => {
                self.resume_or_rescue(V::resume_after_stop)
            }
            _ => Ok(()),
        }
    }

    /// Disarms the watchdog after [`WatchedVm::release`]. Returns whether the VM ran during the
    /// pause. Error: the VMM or the watchdog does not answer.
    pub fn settle(&mut self) -> Result<PauseVerdict, VmmError> {
        let is_armed = self.held.take().is_some_and(|held| {
            held.form == PauseForm::OneCommand || held.stop == StopOutcome::Stopped
        });
        let fired = if is_armed { self.watchdog.disarm() } else { Ok(false) };
        // Also if the watchdog has failed: the VMM's answers may be due.
        let ran = self.vm.ran_meanwhile();
        Ok(if fired? || ran? { PauseVerdict::RanMeanwhile } else { PauseVerdict::Undisturbed })
    }

    /// Gives up a pause whose look failed: releases and settles it, and ignores errors.
    pub fn abandon_hold(&mut self) {
        if self.held.is_some() {
            let _ = self.release();
            let _ = self.settle();
        }
    }

    /// Returns true during a standstill.
    pub fn is_in_standstill(&self) -> bool {
        self.standstill.is_some()
    }

    /// Pauses the VM until [`WatchedVm::end_standstill`], so that several checkpoints can be taken
    /// of one instant. A standstill has no other within it ([`WatchedVm::is_in_standstill`]).
    /// Returns true if the VM ran. If the engine dies, the watchdog resumes the VM. Error: the VMM
    /// or the watchdog does not answer; the VM runs again then.
    pub fn begin_standstill(&mut self) -> Result<bool, VmmError> {
        let outcome = self.stop_watched(self.limit)?;
        self.standstill = Some(outcome);
        if outcome == StopOutcome::Stopped
            && let Err(error) = self.watchdog.arm(STANDSTILL_MAX)
        {
            let _ = self.end_standstill();
            return Err(error);
        }
        Ok(outcome == StopOutcome::Stopped)
    }

    /// Pauses the VM for a look at it, until [`WatchedVm::end_look`], in which other pauses of the
    /// engine are no pauses of their own. Error: the VMM or the watchdog does not answer; the VM
    /// runs again then.
    pub fn begin_look(&mut self) -> Result<(), VmmError> {
        self.standstill = Some(self.stop_watched(self.limit)?);
        Ok(())
    }

    /// Ends the look: resumes the VM if it ran before and nothing else has changed its run state.
    /// Returns whether the watchdog resumed it meanwhile. Error: the VMM or the watchdog does not
    /// answer.
    pub fn end_look(&mut self) -> Result<PauseVerdict, VmmError> {
        if self.standstill.take() != Some(StopOutcome::Stopped) {
            return Ok(PauseVerdict::Undisturbed);
        }
        let resumed = self.resume_or_rescue(V::resume_after_stop);
        let fired = self.watchdog.disarm();
        resumed?;
        Ok(if fired? { PauseVerdict::RanMeanwhile } else { PauseVerdict::Undisturbed })
    }

    /// Tells the watchdog the plan of a rollback; with `None`, that the rollback has ended. Error:
    /// the watchdog has ended.
    pub fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<(), VmmError> {
        self.watchdog.plan_rollback(plan)
    }

    /// Waits until the watchdog has carried out what it was told. This disarms it, so it must not be
    /// called in a pause. Error: the watchdog has ended or does not answer.
    pub fn await_watchdog(&mut self) -> Result<(), VmmError> {
        self.watchdog.disarm().map(drop)
    }

    /// Tells the watchdog the step that a rollback takes next. Error: the watchdog has ended.
    pub fn note_step(&mut self, step: &RollbackStep) -> Result<(), VmmError> {
        self.watchdog.note_step(step)
    }

    /// Declares that the VM has ended and its successor is complete: the watchdog has nothing to do any
    /// more. If it cannot be told, it finds the VM gone.
    pub fn is_succeeded(&mut self) {
        self.standstill = None;
        let _ = self.watchdog.disarm();
        let _ = self.watchdog.plan_rollback(None);
    }

    /// Puts the paused VM back to `target` ([`Vmm::roll_back`]). Tells the watchdog each step
    /// before the VMM takes it, and then calls `told`. Errors: those of [`Vmm::roll_back`]; the
    /// watchdog has ended.
    pub fn roll_back(
        &mut self,
        target: &RollbackTarget<'_>,
        scratch: File,
        told: &mut dyn FnMut(),
    ) -> Result<(), VmmError> {
        let watchdog = &mut self.watchdog;
        let tell: TellStep<'_> = &mut |step| {
            watchdog.note_step(&step)?;
            told();
            Ok(())
        };
        self.vm.roll_back(target, scratch, tell)
    }

    /// Declares that the VM's state is about to be replaced. Until [`WatchedVm::allow_running`] the
    /// VM must not run: if the engine dies, the watchdog ends the rollback by its plan, or the VM.
    ///
    /// Errors: the watchdog has resumed the VM because the standstill took too long; the watchdog
    /// does not answer.
    pub fn forbid_running(&mut self) -> Result<(), VmmError> {
        self.vm.note_pause(false);
        if self.watchdog.forbid_running()? {
            let _ = self.watchdog.disarm()?;
            return Err(VmmError::new(
                crate::VmmErrorKind::Other,
                "the watchdog resumed the VM because the rollback took too long",
                None,
            ));
        }
        Ok(())
    }

    /// Declares that the VM's state is complete again and may run. Error: the VMM or the watchdog
    /// does not answer.
    pub fn allow_running(&mut self) -> Result<(), VmmError> {
        match self.standstill {
            Some(StopOutcome::Stopped) => {
                self.watchdog.arm(STANDSTILL_MAX)?;
                self.vm.note_pause(true);
                Ok(())
            }
            _ => self.watchdog.disarm().map(drop),
        }
    }

    /// Declares that the VM stands still by itself from now on: [`WatchedVm::end_standstill`] does not
    /// resume it.
    pub fn remain_still(&mut self) {
        self.vm.note_pause(false);
        self.standstill = self.standstill.map(|_| StopOutcome::AlreadyPaused);
    }

    /// Ends the standstill: resumes the VM if it ran before. Returns whether the watchdog resumed it
    /// meanwhile. Error: the VMM or the watchdog does not answer.
    pub fn end_standstill(&mut self) -> Result<PauseVerdict, VmmError> {
        if self.standstill.take() != Some(StopOutcome::Stopped) {
            return Ok(PauseVerdict::Undisturbed);
        }
        self.resume_or_rescue(V::resume)?;
        // A watchdog that has ended cannot tell. The next pause reports it; the VM runs.
        let fired = self.watchdog.disarm().unwrap_or(true);
        Ok(if fired { PauseVerdict::RanMeanwhile } else { PauseVerdict::Undisturbed })
    }

    /// Pauses the VM by one command. `None` if its VMM cannot do so; the VM is as it was.
    fn pause_and_save(&mut self) -> Result<Option<SavedPause>, VmmError> {
        self.watchdog.arm_for_saved_pause(self.limit)?;
        // After an error the watchdog stays armed, because the command may still be on its way.
        let saved = self.vm.pause_and_save().inspect_err(|_| self.watchdog.resume_now())?;
        if saved.is_none() {
            let _ = self.watchdog.disarm()?;
        }
        Ok(saved)
    }

    fn stop_watched(&mut self, limit: Duration) -> Result<StopOutcome, VmmError> {
        self.watchdog.arm(limit)?;
        match self.vm.stop() {
            Ok(StopOutcome::Stopped) => {
                // Not before: a note of a VM that its user paused would be wrong.
                self.vm.note_pause(true);
                Ok(StopOutcome::Stopped)
            }
            Ok(StopOutcome::AlreadyPaused) => {
                // The client that paused the VM resumes it: the watchdog must not.
                let _ = self.watchdog.disarm()?;
                Ok(StopOutcome::AlreadyPaused)
            }
            Err(error) => {
                // The request may have taken effect although its answer was lost.
                if self.vm.resume().is_ok() {
                    let _ = self.watchdog.disarm()?;
                } else {
                    // The watchdog stays armed because the request may still be on its way.
                    self.rescue();
                }
                Err(error)
            }
        }
    }

    /// Ends the VM's pause by the command `resume`, or without the monitor if that fails.
    fn resume_or_rescue(
        &mut self,
        resume: fn(&mut V) -> Result<(), VmmError>,
    ) -> Result<(), VmmError> {
        resume(&mut self.vm).inspect_err(|_| self.rescue())?;
        self.vm.note_pause(false);
        Ok(())
    }

    /// Resumes the VM although its monitor does not answer.
    fn rescue(&mut self) {
        self.watchdog.resume_now();
        self.vm.resume_by_new_connection();
        self.vm.note_pause(false);
    }
}

/// A paused VM. Dropping the guard ends the pause.
#[must_use]
pub struct Pause<'a, V: Vmm + ?Sized = dyn Vmm> {
    watched: &'a mut WatchedVm<V>,
}

impl<V: Vmm + ?Sized> Pause<'_, V> {
    /// Returns true if the VM ran before the pause.
    pub fn was_running(&self) -> bool {
        self.watched.held.as_ref().is_some_and(|held| held.stop == StopOutcome::Stopped)
    }

    /// Returns the paused VM.
    pub fn vm(&mut self) -> &mut V {
        &mut self.watched.vm
    }

    /// Returns the state of all devices. Error: the VMM refuses or does not answer.
    pub fn save_devices(&mut self) -> Result<Vec<u8>, VmmError> {
        self.watched.save_devices()
    }

    /// Ends the pause. Returns whether the VM ran during it. Error: the VMM or the watchdog does
    /// not answer.
    pub fn release(self) -> Result<PauseVerdict, VmmError> {
        let released = self.watched.release();
        let verdict = self.watched.settle();
        released.and(verdict)
    }
}

impl<V: Vmm + ?Sized> Drop for Pause<'_, V> {
    fn drop(&mut self) {
        self.watched.abandon_hold();
    }
}

#[cfg(test)]
mod tests;
