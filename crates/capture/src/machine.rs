//! The port to the VMM: one VM, or a group of VMs that a checkpoint holds at one instant.
//!
//! ```text
//!   prepare ─▶ hold ─▶ device state ─▶ look ─▶ release ─▶ finish
//!              └───────────── VM paused ──────────┘
//! ```
//!
//! The pause is one operation, [`Machine::pause`]: it holds the VM, lets the capture look at it,
//! and releases it. A machine with separate commands implements [`PauseSteps`] and calls
//! [`pause_in_steps`]; a VMM that pauses, saves its devices and resumes in one command implements
//! `pause` directly.
//!
//! Invariant: a held VM is released on every path, also if a step fails or panics.

use crate::checkpoint::CapturePhase;
use crate::error::{CaptureError, machine_error};
use crate::ports::BoxError;
use keyframe_units::{RamLayout, elapsed_ns};
use keyframe_vmm::{PauseVerdict, StopOutcome};
use std::time::{Instant, SystemTime};

/// The capture's work in a pause. The machine calls it while it pauses the VM.
pub trait PauseWork {
    /// Records that the pause has reached `phase`: `Stopping`, `Paused`, `DeviceState` or
    /// `Resumed`.
    fn reached(&mut self, phase: CapturePhase);

    /// Copies or freezes the last pages. The VM is paused and its device state is saved. Error: any
    /// of its steps failed; the pause then fails with the same error.
    fn look(&mut self) -> Result<(), CaptureError>;
}

/// The result of a pause: the device state, and the duration of each step in nanoseconds.
#[derive(Clone, Debug)]
pub struct PauseRecord {
    /// The wall clock just before the VM was paused.
    pub taken_at: SystemTime,
    /// The monotonic clock just before the VM was paused.
    pub paused_at: Instant,
    /// Whether the VM ran before the pause.
    pub stop: StopOutcome,
    /// The VMM's device state.
    pub device_state: Vec<u8>,
    /// The time from the request to stop until the VMM confirmed it.
    pub stop_ns: u64,
    /// The time of saving the device state.
    pub device_state_ns: u64,
    /// The time from the request to resume until the VMM confirmed it.
    pub resume_ns: u64,
    /// The duration of the whole pause.
    pub pause_ns: u64,
}

/// One VM, or a group of VMs that is paused together.
pub trait Machine: Send {
    /// Returns the RAM blocks as they are now, with the bytes that each uses. Error: the VMM does
    /// not answer.
    fn ram_layout(&mut self) -> Result<RamLayout, BoxError>;

    /// Holds the VM, saves its device state, calls `work.look()`, and releases the VM. Returns the
    /// device state and the times of the pause.
    ///
    /// # Errors
    ///
    /// Fails if a step or the look fails, or if the VM ran during the pause
    /// ([`CaptureError::Torn`]). The VM is released in every case.
    fn pause(&mut self, work: &mut dyn PauseWork) -> Result<PauseRecord, CaptureError>;

    /// Pauses the VM for `work` alone, without saving anything, and lets it run again if it ran.
    /// No input or output of the VM's devices is under way meanwhile. By default a machine cannot do
    /// that.
    ///
    /// # Errors
    ///
    /// Fails if the VM cannot be paused, if it does not run again, or if `work` fails.
    fn stand_still(
        &mut self,
        work: &mut dyn FnMut() -> Result<(), CaptureError>,
    ) -> Result<(), CaptureError> {
        let _ = work;
        let source = "this machine is paused for whole checkpoints alone".into();
        Err(CaptureError::Machine { operation: "pause the VM for a scan", source })
    }
}

/// The steps of a pause, for a machine that has a command for each.
pub trait PauseSteps: Send {
    /// Does the work that need not be done in the pause, while the VM still runs.
    /// [`PauseSteps::finish_pause`] undoes it. If this method or [`PauseSteps::hold`] fails, the
    /// implementation undoes it at once.
    fn prepare_pause(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Arms a watchdog that resumes the VM if this process dies or exceeds the longest pause, then
    /// pauses the VM. Returns whether the VM ran before. Error: the watchdog or the VMM does not
    /// answer; the VM is then as it was before.
    fn hold(&mut self) -> Result<StopOutcome, BoxError>;

    /// Returns the state of all devices. Saving it may write guest memory. It may be empty until
    /// [`PauseSteps::complete_device_state`]. Error: the VMM refuses or does not answer.
    fn save_device_state(&mut self) -> Result<Vec<u8>, BoxError>;

    /// Adds to `device_state`, the result of [`PauseSteps::save_device_state`], what the VMM does
    /// not save itself or gives after the pause. Called after the pause, if the VM did not run in it.
    fn complete_device_state(&mut self, device_state: &mut Vec<u8>) {
        let _ = device_state;
    }

    /// Lets the VM run again if `stop`, the result of [`PauseSteps::hold`], says that it ran.
    /// Error: the VMM does not answer; the watchdog then resumes the VM.
    fn release(&mut self, stop: StopOutcome) -> Result<(), BoxError>;

    /// Disarms the watchdog after the pause. Returns whether the VM ran during the pause. Error:
    /// the watchdog does not answer.
    fn finish_pause(&mut self, stop: StopOutcome) -> Result<PauseVerdict, BoxError>;
}

/// Carries out [`Machine::pause`] by the steps of `machine`. Returns its result. Errors: those of
/// [`Machine::pause`].
pub fn pause_in_steps<M: PauseSteps + ?Sized>(
    machine: &mut M,
    work: &mut dyn PauseWork,
) -> Result<PauseRecord, CaptureError> {
    machine.prepare_pause().map_err(machine_error("prepare the pause"))?;
    work.reached(CapturePhase::Stopping);
    let (taken_at, paused_at) = (SystemTime::now(), Instant::now());
    let mut held = HeldMachine::hold(machine).map_err(machine_error("pause the VM"))?;
    let stop_ns = elapsed_ns(paused_at);
    let looked = held.look(work);
    let releasing = Instant::now();
    let released = held.release();
    let resume_ns = elapsed_ns(releasing);
    let pause_ns = elapsed_ns(paused_at);
    work.reached(CapturePhase::Resumed);
    let stop = held.stop;
    let outcome = held.finish();
    let (mut device_state, device_state_ns) = looked?;
    released.map_err(machine_error("resume the VM"))?;
    match outcome.map_err(machine_error("find out whether the VM ran in the pause"))? {
        PauseVerdict::RanMeanwhile => return Err(CaptureError::Torn),
        PauseVerdict::Undisturbed => {}
    }
    machine.complete_device_state(&mut device_state);
    if device_state.is_empty() {
        return Err(machine_error("save the device state")("it is empty".into()));
    }
    Ok(PauseRecord {
        taken_at,
        paused_at,
        stop,
        device_state,
        stop_ns,
        device_state_ns,
        resume_ns,
        pause_ns,
    })
}

/// A machine whose VM is held. Dropping it releases the VM.
struct HeldMachine<'a, M: PauseSteps + ?Sized> {
    machine: &'a mut M,
    stop: StopOutcome,
    is_released: bool,
    is_finished: bool,
}

impl<'a, M: PauseSteps + ?Sized> HeldMachine<'a, M> {
    fn hold(machine: &'a mut M) -> Result<Self, BoxError> {
        let stop = machine.hold()?;
        Ok(Self { machine, stop, is_released: false, is_finished: false })
    }

    /// Saves the device state, then looks; returns the state and how long saving it took, in ns.
    /// In this order, since saving a device may write guest memory.
    fn look(&mut self, work: &mut dyn PauseWork) -> Result<(Vec<u8>, u64), CaptureError> {
        work.reached(CapturePhase::Paused);
        let saving = Instant::now();
        let saved = self.machine.save_device_state();
        let device_state = saved.map_err(machine_error("save the device state"))?;
        let device_state_ns = elapsed_ns(saving);
        work.reached(CapturePhase::DeviceState);
        work.look()?;
        Ok((device_state, device_state_ns))
    }

    fn release(&mut self) -> Result<(), BoxError> {
        self.is_released = true;
        self.machine.release(self.stop)
    }

    /// Disarms the watchdog, also after a failed release.
    fn finish(mut self) -> Result<PauseVerdict, BoxError> {
        self.is_finished = true;
        self.machine.finish_pause(self.stop)
    }
}

impl<M: PauseSteps + ?Sized> Drop for HeldMachine<'_, M> {
    fn drop(&mut self) {
        // The step that left early has its own error.
        if !self.is_released {
            let _ = self.machine.release(self.stop);
        }
        if !self.is_finished {
            let _ = self.machine.finish_pause(self.stop);
        }
    }
}

#[cfg(test)]
mod tests;
