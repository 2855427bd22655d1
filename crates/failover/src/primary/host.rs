//! What the protocol's loop does to its host: the guard of the VM, QEMU's process, the gate before
//! the network, the witness and the fence hook.

use super::PrimaryEngineEvent;
use crate::arbitration;
use crate::error::{Error, Result};
use crate::event::FailoverEvent;
use crate::guard::GuardRemote;
use crate::settings::FailoverSetup;
use crate::vm::Gate;
use keyframe_net::{GateRemote, GateStatus};
use keyframe_replication::{RunPermit, WitnessRequest};
use rustix::process::{Signal, pidfd_send_signal};
use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

/// The actions of the replication protocol on the primary's host. No method waits for QEMU or the
/// network; answers come as events. Failures are reported to the host's event sink.
pub trait HostControl: Send {
    /// Sets what the guard lets the VM do. If the permit does not let the VM run, the VM is stopped
    /// when this returns.
    fn set_run_permit(&mut self, permit: RunPermit);
    /// Tells the guard that the VM is paused by a command of its monitor, so that the guard lets
    /// QEMU's process run on and answer.
    fn vm_paused(&mut self);
    /// Kills QEMU.
    fn kill_vm(&mut self);
    /// Holds the VM's network output from now on.
    fn hold_output(&mut self);
    /// Releases the held output up to the gate's cut with number `cut`.
    fn release_output(&mut self, cut: u64);
    /// Releases all held output, and holds no more.
    fn open_gate(&mut self);
    /// Returns the number and size of the packets that the gate holds.
    fn gate_status(&mut self) -> GateStatus;
    /// Sends `request` to the witness. The answer comes as an event.
    fn ask_witness(&mut self, request: WitnessRequest);
    /// Runs the fence hook. Its result comes as an event.
    fn fence(&mut self);
    /// Ends the guard. If the permit does not let the VM run freely, QEMU ends with it.
    fn end_guard(&mut self);
}

/// The primary's host, on which QEMU runs the VM.
pub struct QemuHost {
    name: String,
    setup: FailoverSetup,
    gate: Gate,
    guard: Option<GuardRemote>,
    qemu: OwnedFd,
    qemu_pid: u32,
    sender: Sender<PrimaryEngineEvent>,
}

impl QemuHost {
    /// Creates the host of VM `name`, which the QEMU with the process id `qemu_pid` runs, and
    /// starts its guard. Events go to `sender`. A guard that cannot be started is reported to the
    /// event sink and started again later. Error: there is no process with this id.
    pub fn new(
        qemu_pid: u32,
        name: String,
        gate: Gate,
        setup: FailoverSetup,
        sender: Sender<PrimaryEngineEvent>,
    ) -> Result<Self> {
        let guard = match GuardRemote::spawn(qemu_pid) {
            Ok(guard) => Some(guard),
            Err(error) => {
                // The VM is free at first. Another guard is started as soon as it is not.
                setup.events.failover_event(&FailoverEvent::GuardFailed { error, restarts: false });
                None
            }
        };
        let process = keyframe_kernel::Process::open(qemu_pid)?;
        let qemu = rustix::io::dup(process.pidfd());
        let qemu = qemu.map_err(|e| Error::io("take hold of QEMU", e))?;
        Ok(Self { name, setup, gate, guard, qemu, qemu_pid, sender })
    }

    fn tell(&self, event: &FailoverEvent) {
        self.setup.events.failover_event(event);
    }

    fn ask_gate(&self, ask: impl FnOnce(&mut GateRemote) -> keyframe_net::Result<()>) {
        if let Err(error) = self.gate.ask(ask) {
            // What is held stays held.
            self.tell(&FailoverEvent::GateFailed(error));
        }
    }

    fn ask_guard(&mut self, ask: impl FnOnce(&mut GuardRemote) -> Result<()>) -> Result<()> {
        self.guard.as_mut().map_or(Err(Error::GuardEnded), ask)
    }
}

impl HostControl for QemuHost {
    fn set_run_permit(&mut self, permit: RunPermit) {
        let Err(error) = self.ask_guard(|guard| guard.set(permit)) else { return };
        self.tell(&FailoverEvent::GuardFailed { error, restarts: true });
        match GuardRemote::spawn(self.qemu_pid) {
            Ok(mut fresh) => {
                let set = fresh.set(permit);
                self.guard = Some(fresh);
                if set.is_ok() {
                    return;
                }
            }
            Err(error) => self.tell(&FailoverEvent::GuardFailed { error, restarts: false }),
        }
        // No guard enforces the permit: the VM must not run.
        let _ = pidfd_send_signal(&self.qemu, Signal::STOP);
    }

    fn vm_paused(&mut self) {
        if let Err(error) = self.ask_guard(GuardRemote::paused) {
            self.tell(&FailoverEvent::GuardFailed { error, restarts: false });
        }
    }

    fn kill_vm(&mut self) {
        let _ = pidfd_send_signal(&self.qemu, Signal::KILL);
    }

    fn hold_output(&mut self) {
        self.ask_gate(GateRemote::hold);
    }

    fn release_output(&mut self, cut: u64) {
        self.ask_gate(|remote| remote.release(cut));
    }

    fn open_gate(&mut self) {
        self.ask_gate(GateRemote::open);
    }

    fn gate_status(&mut self) -> GateStatus {
        self.gate.ask(GateRemote::status).ok().flatten().unwrap_or_default()
    }

    fn ask_witness(&mut self, request: WitnessRequest) {
        arbitration::ask(&self.setup, request, &self.sender, PrimaryEngineEvent::Witness);
    }

    fn fence(&mut self) {
        let fenced = PrimaryEngineEvent::Fenced;
        arbitration::fence(&self.setup, &self.name, "primary", &self.sender, fenced);
    }

    fn end_guard(&mut self) {
        if let Some(guard) = self.guard.take() {
            guard.end();
        }
    }
}
