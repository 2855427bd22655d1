//! The guarded pause of a VM.

use crate::{StopOutcome, Vmm, VmmError};
use std::time::Duration;

/// How long a VM may stand still without a sign of the engine: longer than a checkpoint takes to be
/// sealed.
const STANDSTILL_MAX: Duration = Duration::from_mins(10);

/// A process that resumes a VM if the engine that paused it dies or takes too long.
///
/// Dropping the value while it is armed counts as the engine's death.
pub trait PauseWatchdog: Send {
    /// Starts watching: unless [`PauseWatchdog::disarm`] follows within `limit`, the watchdog
    /// resumes the VM.
    fn arm(&mut self, limit: Duration) -> Result<(), VmmError>;

    /// Stops watching. True if the watchdog has resumed the VM since it was armed.
    fn disarm(&mut self) -> Result<bool, VmmError>;

    /// Forbids the VM to run until the next call of another method: if the engine dies meanwhile,
    /// the watchdog ends the VM. True if it has resumed the VM since it was armed.
    fn forbid_running(&mut self) -> Result<bool, VmmError>;

    /// Has the watchdog resume the VM now, and waits a moment for it.
    fn resume_now(&mut self);

    /// Disarms and ends the watchdog.
    fn end(self: Box<Self>);
}

/// Whether the VM stood still during a whole pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseVerdict {
    /// It did not run. The captured state is of one instant.
    Undisturbed,
    /// The watchdog or another client resumed it. The captured state is torn.
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
    /// Present between `hold` and `settle`.
    held: Option<StopOutcome>,
    /// Present during a standstill: its own stop.
    standstill: Option<StopOutcome>,
}

impl<V: Vmm + ?Sized> WatchedVm<V> {
    /// Guards the pauses of `vm`: `watchdog` ends each pause after `limit`.
    pub fn new(vm: Box<V>, watchdog: Box<dyn PauseWatchdog>, limit: Duration) -> Self {
        Self { vm, watchdog, limit, held: None, standstill: None }
    }

    /// The VM.
    pub fn vm(&self) -> &V {
        &self.vm
    }

    /// The VM.
    pub fn vm_mut(&mut self) -> &mut V {
        &mut self.vm
    }

    /// Ends the watchdog and returns the VM.
    pub fn into_vm(self) -> Box<V> {
        self.watchdog.end();
        self.vm
    }

    /// Pauses the VM. The pause ends when the guard is released or dropped.
    pub fn pause(&mut self) -> Result<Pause<'_, V>, VmmError> {
        self.hold()?;
        Ok(Pause { watched: self })
    }

    /// Pauses the VM with the watchdog armed. If that fails, the VM runs again.
    ///
    /// During a standstill the VM is paused already, and the watchdog stays as it is.
    pub fn hold(&mut self) -> Result<StopOutcome, VmmError> {
        let outcome = if self.standstill.is_some() {
            StopOutcome::AlreadyPaused
        } else {
            self.stop_watched(self.limit)?
        };
        self.held = Some(outcome);
        Ok(outcome)
    }

    /// Resumes the VM if [`WatchedVm::hold`] stopped it. If the monitor fails, the watchdog and a new
    /// connection resume it instead, and the error is returned.
    pub fn release(&mut self) -> Result<(), VmmError> {
        match self.held {
            Some(StopOutcome::Stopped) => self.resume_or_rescue(),
            _ => Ok(()),
        }
    }

    /// Disarms the watchdog after [`WatchedVm::release`], and tells whether the VM ran during the
    /// pause.
    pub fn settle(&mut self) -> Result<PauseVerdict, VmmError> {
        let fired = match self.held.take() {
            Some(StopOutcome::Stopped) => self.watchdog.disarm()?,
            _ => false,
        };
        let resumed_by_other = self.vm.ran_meanwhile()?;
        Ok(if fired || resumed_by_other {
            PauseVerdict::RanMeanwhile
        } else {
            PauseVerdict::Undisturbed
        })
    }

    /// Gives up a pause whose look failed: releases and settles it, and ignores errors.
    pub fn abandon_hold(&mut self) {
        if self.held.is_some() {
            let _ = self.release();
            let _ = self.settle();
        }
    }

    /// Pauses the VM until [`WatchedVm::end_standstill`], so that several checkpoints can be taken
    /// of one instant. True if the VM ran. If the engine dies, the watchdog resumes the VM. If this
    /// method fails, the VM runs again.
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

    /// Declares that the VM's state is about to be replaced. Until [`WatchedVm::allow_running`] the
    /// VM must not run: if the engine dies, the watchdog ends it.
    ///
    /// Fails if the watchdog has resumed the VM because the standstill took too long.
    pub fn forbid_running(&mut self) -> Result<(), VmmError> {
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

    /// Declares that the VM's state is complete again and may run.
    pub fn allow_running(&mut self) -> Result<(), VmmError> {
        match self.standstill {
            Some(StopOutcome::Stopped) => self.watchdog.arm(STANDSTILL_MAX),
            _ => self.watchdog.disarm().map(drop),
        }
    }

    /// Ends the standstill: resumes the VM if it ran before.
    pub fn end_standstill(&mut self) -> Result<(), VmmError> {
        if self.standstill.take() != Some(StopOutcome::Stopped) {
            return Ok(());
        }
        self.resume_or_rescue()?;
        // If the watchdog has ended, the next pause reports it; the VM runs.
        let _ = self.watchdog.disarm();
        Ok(())
    }

    fn stop_watched(&mut self, limit: Duration) -> Result<StopOutcome, VmmError> {
        self.watchdog.arm(limit)?;
        match self.vm.stop() {
            Ok(StopOutcome::Stopped) => Ok(StopOutcome::Stopped),
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

    fn resume_or_rescue(&mut self) -> Result<(), VmmError> {
        self.vm.resume().inspect_err(|_| self.rescue())
    }

    /// Resumes the VM although its monitor does not answer.
    fn rescue(&mut self) {
        self.watchdog.resume_now();
        self.vm.resume_by_new_connection();
    }
}

/// A paused VM. Dropping the guard ends the pause.
#[must_use]
pub struct Pause<'a, V: Vmm + ?Sized = dyn Vmm> {
    watched: &'a mut WatchedVm<V>,
}

impl<V: Vmm + ?Sized> Pause<'_, V> {
    /// True if the VM ran before the pause.
    pub fn was_running(&self) -> bool {
        self.watched.held == Some(StopOutcome::Stopped)
    }

    /// The paused VM.
    pub fn vm(&mut self) -> &mut V {
        &mut self.watched.vm
    }

    /// The state of all devices.
    pub fn save_devices(&mut self) -> Result<Vec<u8>, VmmError> {
        self.watched.vm.save_devices()
    }

    /// Ends the pause, and tells whether the VM ran during it.
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
