//! The VM with the gate before its network, as the capture's machine: what the guest has sent is
//! cut into epochs as it is paused.

use crate::error::Error;
use keyframe_capture::machine::pause_in_steps;
use keyframe_capture::{
    BoxError, CaptureError, Machine, PauseRecord, PauseSteps, PauseVerdict, PauseWork, StopOutcome,
};
use keyframe_locks::IgnorePoison;
use keyframe_net::GateRemote;
use keyframe_qemu::{MachineChange, MachineShape};
use keyframe_session::machines::Machines;
use keyframe_units::RamLayout;
use std::sync::{Arc, Mutex};

/// The gate before the VM's network. It does nothing if the VM has no network. Clones share one
/// gate.
#[derive(Clone)]
pub struct Gate(Arc<Mutex<Option<GateRemote>>>);

impl Gate {
    /// Creates a handle to the gate's process `remote`: `None` for a VM without a network.
    pub fn new(remote: Option<GateRemote>) -> Self {
        Self(Arc::new(Mutex::new(remote)))
    }

    /// Calls `ask` with the gate's process and returns its result. Returns `None` if the VM has no
    /// network, or if [`Self::end`] was called. Error: that of `ask`.
    pub fn ask<T>(
        &self,
        ask: impl FnOnce(&mut GateRemote) -> keyframe_net::Result<T>,
    ) -> Result<Option<T>, BoxError> {
        let mut remote = self.0.lock().ignore_poison();
        Ok(remote.as_mut().map(ask).transpose()?)
    }

    /// Ends the gate's process.
    pub fn end(&self) {
        let remote = self.0.lock().ignore_poison().take();
        if let Some(remote) = remote {
            remote.end();
        }
    }
}

/// The VM together with its gate, as a [`Machine`](keyframe_capture::machine::Machine): each pause
/// also cuts the gate's queue.
pub struct GatedMachines {
    /// The VM.
    pub machines: Machines,
    /// The gate before its network.
    pub gate: Gate,
    /// The number of the gate's cut at the newest pause. `None` if the VM has no network.
    pub cut: Option<u64>,
    /// The devices and media that the standby's machine has; `None` before the first capture.
    pub expected: Option<MachineShape>,
    /// The differences between the machine and `expected` that the newest check found.
    pub changes: Vec<MachineChange>,
}

impl GatedMachines {
    /// Compares the machine's devices and media with those of the standby's machine. Errors:
    /// [`Error::MachineChanged`]; the VMM does not describe the machine.
    pub fn check_shape(&mut self) -> Result<(), BoxError> {
        let Some(expected) = &self.expected else { return Ok(()) };
        let Some(member) = self.machines.members_mut().first_mut() else { return Ok(()) };
        self.changes = member.vm.qemu()?.shape()?.changes_since(expected);
        match &self.changes[..] {
            [] => Ok(()),
            changes => Err(Error::MachineChanged { changes: changes.to_vec() }.into()),
        }
    }
}

impl Machine for GatedMachines {
    /// The cycle asks after each pause, before the epoch is sealed: no epoch of a changed machine
    /// gets to a standby that could not load it. Errors: those of [`Self::check_shape`]; the VMM
    /// does not describe its RAM.
    fn ram_layout(&mut self) -> Result<RamLayout, BoxError> {
        self.check_shape()?;
        self.machines.ram_layout()
    }

    fn pause(&mut self, work: &mut dyn PauseWork) -> Result<PauseRecord, CaptureError> {
        pause_in_steps(self, work)
    }
}

impl PauseSteps for GatedMachines {
    fn prepare_pause(&mut self) -> Result<(), BoxError> {
        self.machines.prepare_pause()
    }

    fn hold(&mut self) -> Result<StopOutcome, BoxError> {
        let stopped = self.machines.hold()?;
        match self.gate.ask(GateRemote::cut) {
            Ok(cut) => {
                self.cut = cut;
                Ok(stopped)
            }
            Err(error) => {
                let _ = self.machines.release(stopped);
                let _ = self.machines.finish_pause(stopped);
                Err(error)
            }
        }
    }

    fn save_device_state(&mut self) -> Result<Vec<u8>, BoxError> {
        self.machines.save_device_state()
    }

    fn complete_device_state(&mut self, device_state: &mut Vec<u8>) {
        self.machines.complete_device_state(device_state);
    }

    fn release(&mut self, stopped: StopOutcome) -> Result<(), BoxError> {
        self.machines.release(stopped)
    }

    fn finish_pause(&mut self, stopped: StopOutcome) -> Result<PauseVerdict, BoxError> {
        self.machines.finish_pause(stopped)
    }
}
