//! The primary's engine: the protocol's thread, and all that it starts.
//!
//! ```text
//!   links, witness, fence hook, VM's thread, control socket ──▶ inbox ──▶ protocol
//!
//!   protocol ──▶ host: guard, gate, witness, fence hook
//!      ├───────▶ VM's thread: VmAction
//!      └───────▶ links: messages
//! ```
//!
//! [`protocol`] holds the loop's state and has no thread, socket or process of its own; this file
//! gives it events.

mod host;
mod protocol;
mod status;
#[cfg(test)]
mod tests;

use super::frames::MachineFrame;
use super::guard::now_ns;
use super::launch::EngineContext;
use super::links::{self, ConnectionFlags, LinkEvent, SharedMachineFrame, StandbyAddresses};
use super::sending::SharedWire;
use super::settings::FailoverSetup;
use super::vm::{Gate, ProtectedVmEvent, VmThread};
use super::witness::WitnessAnswer;
use crate::error::{Error, Result};
use crate::event::{FailoverEvent, SharedFailoverEventSink};
use host::QemuHost;
use keyframe_replication::{Primary, PrimaryStart, ReplicationConfig};
use keyframe_session::control::server::{self, Pending, SharedStatus};
use keyframe_session::run_dir::RunDir;
use protocol::{End, Protocol, ProtocolParts};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The longest wait for an event: the user's signal is a flag that must be looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The time in which the last messages leave this host.
const LAST_MESSAGES: Duration = Duration::from_millis(200);

/// An event that the primary's engine handles.
pub enum PrimaryEngineEvent {
    /// An event of a connection to the standby.
    Link(LinkEvent),
    /// An event of the thread that captures the VM.
    Vm(ProtectedVmEvent),
    /// An answer of the witness.
    Witness(WitnessAnswer),
    /// The fence hook has ended; true if it succeeded.
    Fenced(bool),
    /// A request of a client of the control socket.
    Request(Pending),
}

/// The inbox of an engine. Requests of its control socket arrive there too.
pub struct EngineInbox {
    /// The events.
    pub events: Receiver<PrimaryEngineEvent>,
    /// The sender of further events.
    pub sender: Sender<PrimaryEngineEvent>,
    /// The control socket. It is closed when this is dropped.
    pub socket: server::Socket,
}

/// The parts of a primary's engine.
pub struct PrimaryEngineParts {
    /// The VM's run directory, its status and its inbox.
    pub context: EngineContext,
    /// The settings of this host.
    pub setup: FailoverSetup,
    /// The settings of the replication that both hosts must share.
    pub config: ReplicationConfig,
    /// How this host became the primary.
    pub start: PrimaryStart,
    /// The description of the machine that is sent to a standby.
    pub machine: MachineFrame,
    /// The standby's addresses. `None` for a VM without a standby.
    pub addresses: Option<StandbyAddresses>,
    /// The VM and the objects that capture it.
    pub vm: super::vm::VmParts,
    /// The gate before its network.
    pub gate: Gate,
    /// The data connections to the standby.
    pub wire: SharedWire,
    /// The process id of QEMU.
    pub qemu: u32,
}

/// The engine of a primary, which protects a VM.
pub struct PrimaryEngine {
    protocol: Protocol,
    vm: VmThread,
    gate: Gate,
    inbox: EngineInbox,
    events: SharedFailoverEventSink,
    /// Ends the threads of the links.
    ends: Arc<AtomicBool>,
    _run_dir: RunDir,
}

/// The outcome of a host's part in the protection of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtectionEnding {
    /// The VM has ended, or the user ended it.
    Done,
    /// QEMU ended with an error.
    QemuFailed,
    /// The VM did not end in time and was given up.
    GivenUp,
    /// Another host runs the VM: this one may become its standby.
    Elsewhere,
}

impl PrimaryEngine {
    /// Starts the guard, the VM's thread and the threads that connect to the standby. A guard that
    /// cannot be started is an event, not an error. Errors: there is no process with the id of
    /// QEMU; the control socket or a thread cannot be created.
    pub fn new(parts: PrimaryEngineParts) -> Result<Self> {
        let EngineContext { name, run_dir, status, interrupted, inbox } = parts.context;
        let inbox = match inbox {
            Some(inbox) => inbox,
            None => listen(&run_dir, &status)?,
        };
        let sender = inbox.sender.clone();
        let (setup, gate) = (parts.setup, parts.gate);
        let machine: SharedMachineFrame = Arc::new(Mutex::new(parts.machine));
        let host = QemuHost::new(parts.qemu, name, gate.clone(), setup.clone(), sender.clone())?;
        let events = sender.clone();
        let vm = VmThread::start(parts.vm, move |event| {
            let _ = events.send(PrimaryEngineEvent::Vm(event));
        })?;
        let flags = ConnectionFlags::default();
        if let Some(addresses) = parts.addresses {
            let tell = move |event| {
                let _ = sender.send(PrimaryEngineEvent::Link(event));
            };
            let party = &setup.party;
            links::start(party, addresses, &machine, tell, &flags)?;
        }
        let protocol = Protocol::new(ProtocolParts {
            core: Primary::new(parts.config, parts.start),
            vm: vm.actions.clone(),
            host: Box::new(host),
            wire: parts.wire,
            machine,
            linked: flags.linked,
            beating: flags.beating,
            hold_output: setup.hold_output,
            status,
            events: setup.events.clone(),
            interrupted,
            clock: Box::new(now_ns),
        });
        let events = setup.events;
        Ok(Self { protocol, vm, gate, inbox, events, ends: flags.ends, _run_dir: run_dir })
    }

    /// Runs the engine until the VM has ended or another host runs it, then ends all of its
    /// processes. Returns how this host's part ended. Errors: [`Error::VmThreadPanicked`];
    /// [`Error::Session`] if the disks cannot be closed.
    pub fn run(mut self) -> Result<ProtectionEnding> {
        self.protocol.begin();
        while self.protocol.end().is_none() {
            let event = match self.inbox.events.recv_timeout(self.protocol.wait().min(LOOK_EVERY)) {
                Ok(event) => Some(event),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            self.protocol.step(event);
        }
        self.finish()
    }

    fn finish(mut self) -> Result<ProtectionEnding> {
        self.ends.store(true, Ordering::Relaxed);
        if self.protocol.is_linked() {
            std::thread::sleep(LAST_MESSAGES);
        }
        self.protocol.close_links();
        let end = self.protocol.end().unwrap_or(End::GivenUp);
        if !matches!(end, End::Vm { .. }) {
            self.protocol.kill_vm();
        }
        let (vms, beside) = self.vm.end()?.into_vms();
        for (_, mut vm) in vms {
            let _ = vm.end();
        }
        if let Some(disks) = beside.disks
            && let Some(directory) = disks.end().map_err(keyframe_session::Error::from)?
        {
            self.events.failover_event(&FailoverEvent::WritesKept(directory));
        }
        self.gate.end();
        self.protocol.end_guard();
        Ok(match end {
            End::Deposed { term } => {
                self.events.failover_event(&FailoverEvent::RunsElsewhere { term });
                ProtectionEnding::Elsewhere
            }
            End::Vm { has_failed: false } => ProtectionEnding::Done,
            End::Vm { has_failed: true } => ProtectionEnding::QemuFailed,
            End::GivenUp => ProtectionEnding::GivenUp,
        })
    }
}

/// Creates an inbox, and a control socket in `run_dir` whose requests go to the inbox. Error: the
/// control socket cannot be created.
pub fn listen(run_dir: &RunDir, status: &SharedStatus) -> Result<EngineInbox> {
    let (sender, events) = channel();
    let requests = sender.clone();
    let deliver = move |pending| requests.send(PrimaryEngineEvent::Request(pending)).is_ok();
    let socket = server::listen(run_dir.path(), status, deliver)
        .map_err(|e| Error::file("listen in", run_dir.path(), e))?;
    Ok(EngineInbox { events, sender, socket })
}
