//! The port to the VMM: one VM, or a group of VMs that a checkpoint holds at one instant.
//!
//! ```text
//!   prepare ─▶ hold ─▶ device state ─▶ look ─▶ release ─▶ finish
//!              └───────────── VM paused ──────────┘
//! ```
//!
//! The pause is one operation, [`Machine::pause`]: it holds the VM, lets the capture look at it,
//! and releases it. A VMM with separate commands implements the steps and takes the provided
//! method; a VMM that pauses, saves its devices and resumes in one command overrides it.
//!
//! Invariant: a held VM is released on every path, also if a step fails or panics.

use crate::checkpoint::{CapturePhase, nanoseconds};
use crate::error::{CaptureError, machine_error};
use crate::ports::BoxError;
use keyframe_units::RamLayout;
use std::time::{Instant, SystemTime};

/// What stopping the VM found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// The VM ran and is now paused by this call.
    ByUs,
    /// The VM was paused before; it must stay paused.
    Already,
}

/// What resuming the VM found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// The VM stayed paused for the whole pause and runs again.
    ByUs,
    /// The watchdog or another monitor client resumed the VM during the pause, so the copied
    /// pages are not of one instant.
    ByOther,
}

/// The capture's part in a pause. The machine calls it while it pauses the VM.
pub trait PauseWork {
    /// The pause has reached `phase`: `Stopping`, `Paused`, `DeviceState` or `Resumed`.
    fn reached(&mut self, phase: CapturePhase);

    /// Copies or freezes the last pages. The VM is paused and its device state is saved.
    fn look(&mut self) -> Result<(), CaptureError>;
}

/// A pause that has ended: its device state and how long each part took, in nanoseconds.
#[derive(Clone, Debug)]
pub struct PauseRecord {
    /// The wall clock just before the VM was paused.
    pub taken_at: SystemTime,
    /// The monotonic clock just before the VM was paused.
    pub paused_at: Instant,
    /// Whether the VM ran before the pause.
    pub stopped: Stopped,
    /// The VMM's device state.
    pub device_state: Vec<u8>,
    /// From the request to stop until the VMM confirmed it.
    pub stop_ns: u64,
    /// Saving the device state.
    pub device_state_ns: u64,
    /// From the request to resume until the VMM confirmed it.
    pub resume_ns: u64,
    /// The whole pause.
    pub pause_ns: u64,
}

/// Controls the VM.
pub trait Machine: Send {
    /// Returns the RAM blocks as they are now, with the bytes that each uses.
    fn ram(&mut self) -> Result<RamLayout, BoxError>;

    /// Prepares a pause while the VM still runs: everything that need not be done in the pause.
    /// [`Machine::resumed`] undoes it. If this method or [`Machine::stop`] fails, the
    /// implementation undoes it at once.
    fn before_stop(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Pauses the VM. Before, it arms a watchdog that resumes the VM if this process dies or
    /// exceeds the longest pause. After an error the VM is as it was.
    fn stop(&mut self) -> Result<Stopped, BoxError>;

    /// Returns the state of all devices. Saving it may write guest memory.
    fn save_devices(&mut self) -> Result<Vec<u8>, BoxError>;

    /// Ends the pause. `stopped` is the answer of [`Machine::stop`]: a VM that was paused before
    /// stays paused.
    fn resume(&mut self, stopped: Stopped) -> Result<(), BoxError>;

    /// Disarms the watchdog after the pause, and tells whether the VM ran during it.
    fn resumed(&mut self, stopped: Stopped) -> Result<Resumed, BoxError>;

    /// Holds the VM, saves its device state, calls `work.look()`, and releases the VM.
    ///
    /// # Errors
    ///
    /// If any step or the look fails, or if the VM ran during the pause
    /// ([`CaptureError::Torn`]). The VM is released in every case.
    fn pause(&mut self, work: &mut dyn PauseWork) -> Result<PauseRecord, CaptureError> {
        pause_in_steps(self, work)
    }
}

/// The pause of a machine that stops, saves its devices and resumes by separate commands.
fn pause_in_steps<M: Machine + ?Sized>(
    machine: &mut M,
    work: &mut dyn PauseWork,
) -> Result<PauseRecord, CaptureError> {
    machine.before_stop().map_err(machine_error("prepare the pause"))?;
    work.reached(CapturePhase::Stopping);
    let (taken_at, paused_at) = (SystemTime::now(), Instant::now());
    let mut held = HeldMachine::hold(machine).map_err(machine_error("pause the VM"))?;
    let stop_ns = nanoseconds(paused_at.elapsed());
    let looked = held.look(work);
    let resuming = Instant::now();
    let resumed = held.resume();
    let resume_ns = nanoseconds(resuming.elapsed());
    let pause_ns = nanoseconds(paused_at.elapsed());
    work.reached(CapturePhase::Resumed);
    let stopped = held.stopped;
    let resumed_by = held.finish();
    let (device_state, device_state_ns) = looked?;
    resumed.map_err(machine_error("resume the VM"))?;
    if resumed_by.map_err(machine_error("find out who resumed the VM"))? == Resumed::ByOther {
        return Err(CaptureError::Torn);
    }
    Ok(PauseRecord {
        taken_at,
        paused_at,
        stopped,
        device_state,
        stop_ns,
        device_state_ns,
        resume_ns,
        pause_ns,
    })
}

/// A machine whose VM is held. Dropping it releases the VM.
struct HeldMachine<'a, M: Machine + ?Sized> {
    machine: &'a mut M,
    stopped: Stopped,
    is_resumed: bool,
    is_finished: bool,
}

impl<'a, M: Machine + ?Sized> HeldMachine<'a, M> {
    fn hold(machine: &'a mut M) -> Result<Self, BoxError> {
        let stopped = machine.stop()?;
        Ok(Self { machine, stopped, is_resumed: false, is_finished: false })
    }

    /// Saves the device state, then looks; returns the state and how long saving it took, in ns.
    /// In this order, since saving a device may write guest memory.
    fn look(&mut self, work: &mut dyn PauseWork) -> Result<(Vec<u8>, u64), CaptureError> {
        work.reached(CapturePhase::Paused);
        let saving = Instant::now();
        let saved = self.machine.save_devices();
        let device_state = saved.map_err(machine_error("save the device state"))?;
        let device_state_ns = nanoseconds(saving.elapsed());
        work.reached(CapturePhase::DeviceState);
        work.look()?;
        Ok((device_state, device_state_ns))
    }

    fn resume(&mut self) -> Result<(), BoxError> {
        self.is_resumed = true;
        self.machine.resume(self.stopped)
    }

    /// Disarms the watchdog, also after a failed resume.
    fn finish(mut self) -> Result<Resumed, BoxError> {
        self.is_finished = true;
        self.machine.resumed(self.stopped)
    }
}

impl<M: Machine + ?Sized> Drop for HeldMachine<'_, M> {
    fn drop(&mut self) {
        // The step that left early has told its own error.
        if !self.is_resumed {
            let _ = self.machine.resume(self.stopped);
        }
        if !self.is_finished {
            let _ = self.machine.resumed(self.stopped);
        }
    }
}

#[cfg(test)]
mod tests;
