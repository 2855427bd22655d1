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
/// network; answers of the witness and of the fence hook come as events. A method may wait for up
/// to 5 s for the guard or the gate. Failures are reported to the host's event sink.
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
        let guard = match GuardRemote::spawn(qemu_pid, RunPermit::Free) {
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

    /// Sends `signal` to QEMU. If QEMU has ended, the VM's thread tells.
    fn signal_qemu(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.qemu, signal);
    }

    /// Ends the guard, which does not answer, and starts another with the permit `permit`. While no
    /// guard enforces a permit that may end, QEMU is stopped.
    fn replace_guard(&mut self, permit: RunPermit) -> Result<()> {
        let needs_guard = permit != RunPermit::Free;
        if needs_guard {
            self.signal_qemu(Signal::STOP);
        }
        if let Some(old) = self.guard.take() {
            old.kill();
        }
        if needs_guard {
            // The old guard may have let it run again.
            self.signal_qemu(Signal::STOP);
        }
        match GuardRemote::spawn(self.qemu_pid, permit) {
            Ok(fresh) => {
                self.guard = Some(fresh);
                Ok(())
            }
            Err(error) => {
                // The old guard may have stopped a VM that may run without a guard now, and the new
                // one may have let a VM run that may not.
                self.signal_qemu(if needs_guard { Signal::STOP } else { Signal::CONT });
                Err(error)
            }
        }
    }
}

impl HostControl for QemuHost {
    fn set_run_permit(&mut self, permit: RunPermit) {
        let Err(error) = self.ask_guard(|guard| guard.set(permit)) else { return };
        self.tell(&FailoverEvent::GuardFailed { error, restarts: true });
        if let Err(error) = self.replace_guard(permit) {
            self.tell(&FailoverEvent::GuardFailed { error, restarts: false });
        }
    }

    fn vm_paused(&mut self) {
        if let Err(error) = self.ask_guard(GuardRemote::paused) {
            self.tell(&FailoverEvent::GuardFailed { error, restarts: false });
        }
    }

    fn kill_vm(&mut self) {
        self.signal_qemu(Signal::KILL);
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
