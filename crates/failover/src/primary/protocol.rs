//! The primary's protocol loop: gives events to the core and carries out what the core asks.
//!
//! Invariant: the actions of one event are carried out in their order, before the next event is
//! handed in. Nothing here waits for QEMU or the network.

use super::PrimaryEngineEvent;
use super::host::HostControl;
use crate::error::{Error, with_fix};
use crate::event::{FailoverEvent, SharedFailoverEventSink};
use crate::links::{self, LinkEvent, SharedMachineFrame};
use crate::notice_text::notice_text;
use crate::sending::{Link, SharedWire};
use crate::settings::HeldOutput;
use crate::vm::{MachineDescription, ProtectedVmEvent, VmAction};
use crate::witness::WitnessAnswer;
use keyframe_link::Channel;
use keyframe_locks::IgnorePoison;
use keyframe_replication::{
    Epoch, Notice, PeerMessage, Primary, PrimaryAction, PrimaryEvent, PrimaryState, RunPermit,
};
use keyframe_session::control::server::{Pending, SharedStatus};
use keyframe_session::control::{EngineRequest, EngineResponse, ReplicationRole};
use std::collections::{BTreeMap, VecDeque};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

/// The longest time from killing a VM to its end, in nanoseconds.
pub const END_TIMEOUT_NS: u64 = 10_000_000_000;

/// The time that a standby has to learn that the VM goes on without it, in nanoseconds.
const LEAVE_NS: u64 = 100_000_000;

/// A monotonic clock. It returns nanoseconds since an arbitrary instant.
pub type Clock = Box<dyn Fn() -> u64 + Send>;

/// The parts of the loop that drives the replication protocol on the primary.
pub struct ProtocolParts {
    /// The state machine of the protocol.
    pub core: Primary,
    /// The sender of actions for the VM's thread.
    pub vm: Sender<VmAction>,
    /// The actions on this host.
    pub host: Box<dyn HostControl>,
    /// The data connections to the standby.
    pub wire: SharedWire,
    /// The description of the machine that is sent to a standby.
    pub machine: SharedMachineFrame,
    /// True while the control connection is established. If it is set to false, another thread
    /// connects again.
    pub linked: Arc<AtomicBool>,
    /// The same for the second path.
    pub beating: Arc<AtomicBool>,
    /// The output that waits for the standby.
    pub hold_output: HeldOutput,
    /// The status that clients of the control socket see.
    pub status: SharedStatus,
    /// Receives the events of this host.
    pub events: SharedFailoverEventSink,
    /// Set when the user interrupts the command.
    pub interrupted: Arc<AtomicBool>,
    /// The clock of the state machine and the guard.
    pub clock: Clock,
}

/// The reason why the loop of the protocol ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The VM has ended.
    Vm {
        /// True if QEMU ended with an error and the user had not ended it.
        has_failed: bool,
    },
    /// Another host runs the VM in this term.
    Deposed { term: u64 },
    /// The VM did not end in time after it was killed.
    GivenUp,
}

/// The loop that drives the replication protocol on the primary.
pub struct Protocol {
    pub(super) core: Primary,
    vm: Sender<VmAction>,
    pub(super) host: Box<dyn HostControl>,
    wire: SharedWire,
    pub(super) link: Option<(u64, Arc<Link>)>,
    beat: Option<(u64, Arc<Channel>)>,
    machine: SharedMachineFrame,
    linked: Arc<AtomicBool>,
    beating: Arc<AtomicBool>,
    hold_output: HeldOutput,
    /// The gate's cut at each captured epoch.
    gates: BTreeMap<Epoch, u64>,
    acknowledged: Option<Epoch>,
    /// The VM was paused by its monitor, or may be.
    vm_stopped: bool,
    /// The newest permit of the core.
    permit: RunPermit,
    pub(super) status: SharedStatus,
    events: SharedFailoverEventSink,
    interrupted: Arc<AtomicBool>,
    clock: Clock,
    killed_at_ns: Option<u64>,
    exit: Option<ExitStatus>,
    end: Option<End>,
    /// The error of the last attempt to connect, already emitted as an event.
    trouble: Option<String>,
    /// The reason why the newest epoch failed, told already.
    pub(super) failed_epoch: Option<String>,
    /// A machine that standbys do not know yet.
    changed: Option<ChangedMachine>,
}

/// A machine that standbys are to be told.
struct ChangedMachine {
    machine: Box<MachineDescription>,
    /// Since when the VM has no standby.
    alone_since_ns: Option<u64>,
}

impl Protocol {
    /// Creates the loop from its parts.
    pub fn new(parts: ProtocolParts) -> Self {
        Self {
            core: parts.core,
            vm: parts.vm,
            host: parts.host,
            wire: parts.wire,
            link: None,
            beat: None,
            machine: parts.machine,
            linked: parts.linked,
            beating: parts.beating,
            hold_output: parts.hold_output,
            gates: BTreeMap::new(),
            acknowledged: None,
            vm_stopped: false,
            permit: RunPermit::Free,
            status: parts.status,
            events: parts.events,
            interrupted: parts.interrupted,
            clock: parts.clock,
            killed_at_ns: None,
            exit: None,
            end: None,
            trouble: None,
            failed_epoch: None,
            changed: None,
        }
    }

    /// Starts the state machine.
    pub fn begin(&mut self) {
        self.handle(PrimaryEvent::Tick);
        self.show();
        self.check_interrupt();
    }

    /// Returns the longest time until the next call of [`Self::step`] is due, if no event comes
    /// before.
    pub fn wait(&self) -> Duration {
        Duration::from_nanos(self.core.deadline_ns().saturating_sub((self.clock)()))
    }

    /// Handles `event`, if there is one, and all that is due now.
    pub fn step(&mut self, event: Option<PrimaryEngineEvent>) {
        if let Some(event) = event {
            self.handle_event(event);
        }
        if (self.clock)() >= self.core.deadline_ns() {
            self.handle(PrimaryEvent::Tick);
        }
        self.describe_changed_machine();
        self.show();
        self.check_interrupt();
    }

    /// Returns the reason why the loop has ended. Returns `None` while it runs.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns true if the standby is connected.
    pub fn is_linked(&self) -> bool {
        self.link.is_some()
    }

    /// Closes the connections to the standby.
    pub fn close_links(&mut self) {
        if let Some((_, link)) = &self.link {
            link.close();
        }
        if let Some((_, beat)) = &self.beat {
            beat.close();
        }
        self.wire.connect(None);
    }

    /// Kills QEMU.
    pub fn kill_vm(&mut self) {
        self.host.kill_vm();
    }

    /// Ends the guard. If the permit does not let the VM run freely, QEMU ends with it.
    pub fn end_guard(&mut self) {
        self.host.end_guard();
    }

    /// Kills the VM once if the user wants an end, and gives up if it does not end.
    fn check_interrupt(&mut self) {
        if self.end.is_some() || !self.interrupted.load(Ordering::Relaxed) {
            return;
        }
        let now_ns = (self.clock)();
        match self.killed_at_ns {
            None => {
                self.killed_at_ns = Some(now_ns);
                self.host.kill_vm();
            }
            Some(at_ns) if now_ns.saturating_sub(at_ns) > END_TIMEOUT_NS => {
                self.end = Some(End::GivenUp);
            }
            Some(_) => {}
        }
    }

    fn has_failed(&self) -> bool {
        let is_asked = self.interrupted.load(Ordering::Relaxed);
        !is_asked && self.exit.is_some_and(|exit| !exit.success())
    }

    fn tell(&self, event: &FailoverEvent) {
        self.events.failover_event(event);
    }

    fn handle_event(&mut self, event: PrimaryEngineEvent) {
        match event {
            PrimaryEngineEvent::Link(from) => self.handle_link_event(from),
            PrimaryEngineEvent::Vm(event) => self.handle_vm_event(event),
            PrimaryEngineEvent::Witness(WitnessAnswer::Answered(reply)) => {
                self.handle(PrimaryEvent::Witness(reply));
            }
            PrimaryEngineEvent::Witness(WitnessAnswer::Lost { sent }) => {
                self.handle(PrimaryEvent::WitnessLost { sent });
            }
            PrimaryEngineEvent::Fenced(off) => self.handle(PrimaryEvent::Fenced(off)),
            PrimaryEngineEvent::Request(pending) => self.answer(&pending),
        }
    }

    fn handle_link_event(&mut self, from: LinkEvent) {
        match from {
            LinkEvent::Connected(number, link) => {
                self.trouble = None;
                // The core opens the wire once it knows what the standby holds.
                self.link = Some((number, link));
                self.handle(PrimaryEvent::PathUp(0));
            }
            LinkEvent::BeatConnected(number, channel) => {
                self.beat = Some((number, channel));
                self.handle(PrimaryEvent::PathUp(1));
            }
            LinkEvent::Received { path, number, message } => {
                let current = match path {
                    0 => self.link.as_ref().map(|(number, _)| *number),
                    _ => self.beat.as_ref().map(|(number, _)| *number),
                };
                if current == Some(number) {
                    self.handle(PrimaryEvent::Peer { path, message });
                }
            }
            LinkEvent::PageHashes { number, session, first, hashes } => {
                if self.link.as_ref().is_some_and(|(known, _)| *known == number) {
                    self.send_to_vm(VmAction::PageHashes { session, first, hashes });
                }
            }
            LinkEvent::Broken { path: 0, number } => {
                if self.link.take_if(|(known, _)| *known == number).is_some() {
                    self.wire.connect(None);
                    self.linked.store(false, Ordering::Relaxed);
                    self.handle(PrimaryEvent::PathDown(0));
                }
            }
            LinkEvent::Broken { path, number } => {
                if self.beat.take_if(|(known, _)| *known == number).is_some() {
                    self.beating.store(false, Ordering::Relaxed);
                    self.handle(PrimaryEvent::PathDown(path));
                }
            }
            LinkEvent::ConnectFailed(error) => {
                let text = with_fix(&error);
                if self.trouble.as_ref() != Some(&text) {
                    self.tell(&FailoverEvent::ConnectFailed(error));
                    self.trouble = Some(text);
                }
            }
        }
    }

    fn handle_vm_event(&mut self, event: ProtectedVmEvent) {
        match event {
            ProtectedVmEvent::Captured { epoch, gate, reason } => {
                if let Some(gate) = gate {
                    self.gates.insert(epoch, gate);
                }
                self.update(|status| {
                    status.epoch = Some(epoch.0);
                    reason.clone_into(&mut status.reason);
                });
                self.handle(PrimaryEvent::Captured { epoch });
            }
            ProtectedVmEvent::CaptureFailed(error) => {
                self.tell_failed_epoch(error);
                self.handle(PrimaryEvent::CaptureFailed);
            }
            ProtectedVmEvent::CaptureBlocked { reason } => {
                self.handle(PrimaryEvent::CaptureBlocked(reason));
            }
            ProtectedVmEvent::CaptureUnblocked(None) => self.handle(PrimaryEvent::CaptureUnblocked),
            ProtectedVmEvent::CaptureUnblocked(Some(machine)) => {
                self.changed = Some(ChangedMachine { machine, alone_since_ns: None });
            }
            ProtectedVmEvent::Stopped => {
                self.vm_stopped = true;
                self.host.vm_paused();
                self.handle(PrimaryEvent::VmStopped);
            }
            ProtectedVmEvent::StopFailed(error) => {
                self.tell_failed_epoch(error);
                // The guard is not told, so that it still stops the VM in time.
                self.vm_stopped = true;
                self.handle(PrimaryEvent::VmStopFailed);
            }
            ProtectedVmEvent::Resumed => self.handle(PrimaryEvent::VmResumed),
            ProtectedVmEvent::Ended(exit) => {
                self.exit = Some(exit);
                self.handle(PrimaryEvent::VmEnded);
            }
            ProtectedVmEvent::EpochDone(report) => self.record_epoch(&report),
        }
    }

    /// Tells why an epoch failed, unless that was told or the VM has no standby.
    fn tell_failed_epoch(&mut self, error: Error) {
        let text = with_fix(&error);
        if self.core.state() != PrimaryState::Solo && self.failed_epoch.as_ref() != Some(&text) {
            self.tell(&FailoverEvent::EpochFailed(error));
            self.update(|status| status.note = format!("an epoch failed: {text}"));
            self.failed_epoch = Some(text);
        }
    }

    /// Once the standby of the machine before has left, has the next connection describe the
    /// changed machine.
    fn describe_changed_machine(&mut self) {
        let now_ns = (self.clock)();
        let has_session = self.core.session().is_some();
        let Some(changed) = &mut self.changed else { return };
        if has_session {
            changed.alone_since_ns = None;
            return;
        }
        let since_ns = *changed.alone_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) < LEAVE_NS {
            return;
        }
        if let Some(ChangedMachine { machine, .. }) = self.changed.take() {
            let mut frame = self.machine.lock().ignore_poison();
            (frame.spec, frame.ram) = (machine.spec, machine.ram);
        }
        if let Some((_, link)) = self.link.take() {
            link.close();
            self.wire.connect(None);
            self.handle(PrimaryEvent::PathDown(0));
            self.linked.store(false, Ordering::Relaxed);
        }
        self.handle(PrimaryEvent::CaptureUnblocked);
    }

    fn answer(&mut self, pending: &Pending) {
        let response = match pending.request {
            EngineRequest::FailOver { .. } => match self.core.state() {
                PrimaryState::Protected => {
                    self.handle(PrimaryEvent::SwitchOver);
                    EngineResponse::Done("the VM goes over to the standby".into())
                }
                _ => EngineResponse::Failed(
                    "the VM has no standby that holds all of it; wait until keyframe status says protected"
                        .into(),
                ),
            },
            EngineRequest::Stop { .. } => {
                self.interrupted.store(true, Ordering::Relaxed);
                EngineResponse::Stopping
            }
            _ => EngineResponse::Failed(
                "a protected VM's checkpoints go to its standby; that cannot be done here".into(),
            ),
        };
        let _ = pending.answer.send(response);
    }

    /// Passes `input` to the core and carries out the core's actions. Then passes the inputs that
    /// follow from them.
    fn handle(&mut self, input: PrimaryEvent) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let outputs = self.core.handle((self.clock)(), input);
            self.settle_acknowledged();
            for output in outputs {
                if let Some(next) = self.carry_out(output) {
                    inputs.push_back(next);
                }
            }
        }
    }

    fn settle_acknowledged(&mut self) {
        let acknowledged = self.core.acknowledged();
        if acknowledged != self.acknowledged {
            self.acknowledged = acknowledged;
            if let Some(epoch) = acknowledged {
                self.send_to_vm(VmAction::Acknowledged { epoch });
            }
        }
    }

    fn send_to_vm(&self, action: VmAction) {
        let _ = self.vm.send(action);
    }

    fn carry_out(&mut self, output: PrimaryAction) -> Option<PrimaryEvent> {
        match output {
            PrimaryAction::Send { path, message } => self.send(path, &message),
            PrimaryAction::AskWitness(request) => {
                self.host.ask_witness(request);
            }
            PrimaryAction::SetRunPermit(permit) => self.set_run_permit(permit),
            PrimaryAction::StopVm => {
                if self.core.state() == PrimaryState::SwitchingOver {
                    // It has to go on answering: its last epoch is yet to be taken.
                    self.send_to_vm(VmAction::Stop);
                } else {
                    return Some(PrimaryEvent::VmStopped);
                }
            }
            PrimaryAction::ResumeVm => {
                if std::mem::take(&mut self.vm_stopped) {
                    // The guard may know the VM as paused, and would let it run without a limit.
                    self.host.set_run_permit(self.permit);
                    self.send_to_vm(VmAction::Resume);
                } else {
                    return Some(PrimaryEvent::VmResumed);
                }
            }
            PrimaryAction::KillVm => self.host.kill_vm(),
            PrimaryAction::HoldOutput => match self.hold_output {
                HeldOutput::Net => self.host.hold_output(),
                HeldOutput::None => self.tell(&FailoverEvent::OutputNotHeld),
            },
            PrimaryAction::Release { epoch } => {
                let released = self.gates.range(..=epoch).next_back().map(|(_, gate)| *gate);
                self.gates = self.gates.split_off(&epoch.next());
                if let Some(gate) = released {
                    self.host.release_output(gate);
                }
            }
            PrimaryAction::ReleaseAll => {
                self.gates.clear();
                self.host.open_gate();
            }
            PrimaryAction::BeginSync { session } => {
                self.connect_wire();
                self.send_to_vm(VmAction::Sync { session: session.0 });
            }
            PrimaryAction::Capture { last } => self.send_to_vm(VmAction::Capture { last }),
            PrimaryAction::Owe { after } => {
                self.connect_wire();
                self.send_to_vm(VmAction::Owe { after });
            }
            PrimaryAction::MayCapture(may) => self.send_to_vm(VmAction::MayCapture(may)),
            PrimaryAction::Fence => {
                self.host.fence();
            }
            PrimaryAction::Notify(notice) => self.notify(notice),
            PrimaryAction::Ended { deposed_by } => {
                self.end = Some(match deposed_by {
                    Some(term) => End::Deposed { term: term.0 },
                    None => End::Vm { has_failed: self.has_failed() },
                });
            }
        }
        None
    }

    fn connect_wire(&self) {
        self.wire.connect(self.link.as_ref().map(|(_, link)| Arc::clone(link)));
    }

    fn send(&self, path: u8, message: &PeerMessage) {
        let channel = match path {
            0 => self.link.as_ref().map(|(_, link)| &link.control),
            _ => self.beat.as_ref().map(|(_, channel)| channel),
        };
        if let Some(channel) = channel
            && !links::send_message(channel, message)
        {
            // Its reader thread reports the break.
            channel.close();
        }
    }

    fn set_run_permit(&mut self, permit: RunPermit) {
        self.permit = permit;
        // During a switch-over the VM is paused by its monitor and must go on answering there.
        let is_switching = self.core.state() == PrimaryState::SwitchingOver;
        if permit != RunPermit::Stopped || !is_switching {
            self.host.set_run_permit(permit);
        }
    }

    fn notify(&mut self, notice: Notice) {
        let role = ReplicationRole::Primary;
        let text = notice_text(role, &notice);
        self.tell(&FailoverEvent::Notice { role, notice });
        self.update(|status| status.note = text);
    }
}
