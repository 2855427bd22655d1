//! The primary's protocol thread: what the core says is done, at once; what takes time is others'
//! (`vm`, `links`).
//!
//! ```text
//!   links, witness, VM's thread, control socket ──▶ inbox ──▶ core ──▶ guard, gate, orders to the VM's thread, messages
//! ```
//!
//! Invariant: outputs are carried out in their order, before the next input is handed in. Nothing
//! here waits for QEMU or the network.

use super::arbitration;
use super::frames::MachineFrame;
use super::guard::{GuardRemote, now_ns};
use super::links::{self, Addresses, LinkEvent};
use super::sending::{Link, SharedWire};
use super::settings::Setup;
use super::vm::{EpochReport, Gate, VmAction, VmEvent, VmThread};
use super::witnessing::WitnessAnswer;
use crate::error::{Error, Result, with_fix};
use crate::event::Event;
use crate::notice_text::notice_text;
use keyframe_link::Channel;
use keyframe_locks::IgnorePoison;
use keyframe_net::GateRemote;
use keyframe_replication::{
    Epoch, Notice, PeerMessage, Primary, PrimaryAction, PrimaryEvent, PrimaryStart, PrimaryState,
    ReplicationConfig, RunPermit,
};
use keyframe_session::control::server::{self, Pending, SharedStatus};
use keyframe_session::control::{
    ReplicationRole, ReplicationState, ReplicationStatus, Request, Response,
};
use keyframe_session::run_dir::RunDir;
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long the last words may take to get out.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// How long the VM's thread may take to end a VM that is to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// What wakes the thread.
pub enum PrimaryEngineEvent {
    /// From a connection to the standby.
    Link(LinkEvent),
    /// From the thread that captures the VM.
    Vm(VmEvent),
    /// From the witness.
    Witness(WitnessAnswer),
    /// The fence hook has ended; true if it succeeded.
    Fenced(bool),
    /// From a client of the control socket.
    Request(Pending),
}

/// A protected VM, ready to run.
pub struct Parts {
    /// The VM's name.
    pub name: String,
    /// The run directory.
    pub run_dir: RunDir,
    /// The settings of this host.
    pub setup: Setup,
    /// The configuration that both hosts must share.
    pub config: ReplicationConfig,
    /// How this primary came to be.
    pub start: PrimaryStart,
    /// The machine, as a standby needs it.
    pub machine: MachineFrame,
    /// The standby's addresses; `None` for a VM without a standby.
    pub addresses: Option<Addresses>,
    /// The VM with all that captures it.
    pub vm: super::vm::Parts,
    /// The gate before its network.
    pub gate: Gate,
    /// The data connections to the standby.
    pub wire: SharedWire,
    /// QEMU's process.
    pub qemu: u32,
    /// The status that clients of the control socket see.
    pub status: SharedStatus,
    /// Set when the user wants an end.
    pub interrupted: Arc<AtomicBool>,
    /// Listens already, on behalf of whoever has been here before.
    pub inbox: Option<(Receiver<PrimaryEngineEvent>, Sender<PrimaryEngineEvent>, server::Socket)>,
}

/// The thread's own.
pub struct Engine {
    name: String,
    setup: Setup,
    core: Primary,
    vm: Option<VmThread>,
    gate: Gate,
    guard: GuardRemote,
    wire: SharedWire,
    qemu: OwnedFd,
    qemu_pid: u32,
    inbox: Receiver<PrimaryEngineEvent>,
    sender: Sender<PrimaryEngineEvent>,
    link: Option<(u64, Arc<Link>)>,
    beat: Option<(u64, Arc<Channel>)>,
    linked: Arc<AtomicBool>,
    beating: Arc<AtomicBool>,
    /// What each captured epoch is at the gate.
    gates: BTreeMap<Epoch, u64>,
    acknowledged: Option<Epoch>,
    vm_stopped: bool,
    status: SharedStatus,
    ends: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
    exit: Option<ExitStatus>,
    done: Option<Done>,
    /// The error of the last connect, told already.
    trouble: Option<String>,
    _socket: server::Socket,
    _run_dir: RunDir,
}

/// How a host's part in the protection of a VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The VM has ended, or the user ended it.
    Done,
    /// QEMU ended with an error.
    QemuFailed,
    /// The VM did not end in time and was given up.
    GivenUp,
    /// Another host runs the VM: this one may become its standby.
    Elsewhere,
}

/// How it ended.
enum Done {
    Vm,
    Deposed(u64),
}

impl Engine {
    /// The VM runs from here on.
    pub fn new(parts: Parts) -> Result<Self> {
        let (inbox, sender, socket) = match parts.inbox {
            Some(inbox) => inbox,
            None => listen(&parts.run_dir, &parts.status)?,
        };
        let guard = GuardRemote::spawn(parts.qemu)?;
        let qemu = keyframe_kernel::Process::open(parts.qemu)?;
        let qemu = rustix::io::dup(qemu.pidfd()).map_err(|e| Error::io("take hold of QEMU", e))?;
        let events = sender.clone();
        let vm = VmThread::start(parts.vm, move |event| {
            let _ = events.send(PrimaryEngineEvent::Vm(event));
        })?;
        let ends = Arc::new(AtomicBool::new(false));
        let (linked, beating) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        if let Some(addresses) = parts.addresses {
            let sent = sender.clone();
            let tell = move |from| {
                let _ = sent.send(PrimaryEngineEvent::Link(from));
            };
            let party = &parts.setup.party;
            links::start(party, addresses, &parts.machine, tell, (&linked, &beating), &ends)?;
        }
        Ok(Self {
            name: parts.name,
            setup: parts.setup,
            core: Primary::new(parts.config, parts.start),
            vm: Some(vm),
            gate: parts.gate,
            guard,
            wire: parts.wire,
            qemu,
            qemu_pid: parts.qemu,
            inbox,
            sender,
            link: None,
            beat: None,
            linked,
            beating,
            gates: BTreeMap::new(),
            acknowledged: None,
            vm_stopped: false,
            status: parts.status,
            ends,
            interrupted: parts.interrupted,
            exit: None,
            done: None,
            trouble: None,
            _socket: socket,
            _run_dir: parts.run_dir,
        })
    }

    /// Runs until the VM has ended, or runs elsewhere.
    pub fn run(mut self) -> Result<Ending> {
        self.handle(PrimaryEvent::Tick);
        self.show();
        let mut killed_at: Option<Instant> = None;
        while self.done.is_none() {
            if self.interrupted.load(Ordering::Relaxed) && killed_at.is_none() {
                killed_at = Some(Instant::now());
                self.kill();
            }
            // A VM that does not end is not waited for.
            if killed_at.is_some_and(|at| at.elapsed() > END_TIMEOUT) {
                break;
            }
            let until = Duration::from_nanos(self.core.deadline_ns().saturating_sub(now_ns()));
            match self.inbox.recv_timeout(until.min(LOOK_EVERY)) {
                Ok(event) => self.handle_event(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if now_ns() >= self.core.deadline_ns() {
                self.handle(PrimaryEvent::Tick);
            }
            self.show();
        }
        self.end()
    }

    fn tell(&self, event: &Event) {
        self.setup.events.failover_event(event);
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
                // Nothing goes out there before the core has heard what the standby has.
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
                    self.tell(&Event::ConnectFailed(error));
                    self.trouble = Some(text);
                }
            }
        }
    }

    fn handle_vm_event(&mut self, event: VmEvent) {
        match event {
            VmEvent::Captured { epoch, gate, reason } => {
                if let Some(gate) = gate {
                    self.gates.insert(epoch, gate);
                }
                self.update(|status| {
                    status.epoch = Some(epoch.0);
                    reason.clone_into(&mut status.reason);
                });
                self.handle(PrimaryEvent::Captured { epoch });
            }
            VmEvent::CaptureFailed(error) => {
                if self.core.state() != PrimaryState::Solo {
                    self.tell(&Event::EpochFailed(error));
                }
                self.handle(PrimaryEvent::CaptureFailed);
            }
            VmEvent::Stopped => {
                self.vm_stopped = true;
                if let Err(error) = self.guard.paused() {
                    self.tell(&Event::GuardFailed { error, restarts: false });
                }
                self.handle(PrimaryEvent::VmStopped);
            }
            VmEvent::Resumed => self.handle(PrimaryEvent::VmResumed),
            VmEvent::Ended(exit) => {
                self.exit = Some(exit);
                self.handle(PrimaryEvent::VmEnded);
            }
            VmEvent::EpochDone(report) => self.record_epoch(&report),
        }
    }

    fn record_epoch(&mut self, report: &EpochReport) {
        self.update(|status| {
            status.acknowledged = report.acknowledged.map(|epoch| epoch.0);
            status.epochs += 1;
            status.pages = report.pages;
            status.wire_bytes = report.wire_bytes;
            status.all_wire_bytes += report.wire_bytes;
            status.all_raw_bytes += report.raw_bytes;
            status.pause_ns = report.pause_ns;
            status.transfer_ns = report.transfer_ns;
            status.epoch_ns = report.epoch_ns;
            status.all_pages += report.pages;
            status.all_pause_ns += report.pause_ns;
            status.all_transfer_ns += report.transfer_ns;
            status.all_suspended_ns += report.suspended_ns;
            *status.reasons.entry(report.reason.to_owned()).or_default() += 1;
            status.estimates =
                report.estimates.iter().map(|(name, value)| ((*name).into(), *value)).collect();
        });
    }

    fn answer(&mut self, pending: &Pending) {
        let response = match pending.request {
            Request::FailOver { .. } => match self.core.state() {
                PrimaryState::Protected => {
                    self.handle(PrimaryEvent::SwitchOver);
                    Response::Done("the VM goes over to the standby".into())
                }
                _ => Response::Failed(
                    "the VM has no standby that holds all of it; wait until keyframe status says protected"
                        .into(),
                ),
            },
            Request::Stop { .. } => {
                self.interrupted.store(true, Ordering::Relaxed);
                Response::Stopping
            }
            _ => Response::Failed(
                "a protected VM's checkpoints go to its standby; that cannot be done here".into(),
            ),
        };
        let _ = pending.answer.send(response);
    }

    /// Hands an input to the core and does what it says; what that comes to is handed in behind it.
    fn handle(&mut self, input: PrimaryEvent) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let outputs = self.core.handle(now_ns(), input);
            self.settle_acknowledged();
            for output in outputs {
                if let Some(next) = self.act(output) {
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
        if let Some(vm) = &self.vm {
            let _ = vm.actions.send(action);
        }
    }

    fn act(&mut self, output: PrimaryAction) -> Option<PrimaryEvent> {
        match output {
            PrimaryAction::Send { path, message } => self.say(path, &message),
            PrimaryAction::AskWitness(request) => {
                arbitration::ask(&self.setup, request, &self.sender, PrimaryEngineEvent::Witness);
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
                    self.send_to_vm(VmAction::Resume);
                } else {
                    return Some(PrimaryEvent::VmResumed);
                }
            }
            PrimaryAction::KillVm => self.kill(),
            PrimaryAction::HoldOutput => self.gate_do(GateRemote::hold),
            PrimaryAction::Release { epoch } => {
                let released = self.gates.range(..=epoch).next_back().map(|(_, gate)| *gate);
                self.gates = self.gates.split_off(&epoch.next());
                if let Some(gate) = released {
                    self.gate_do(|remote| remote.release(gate));
                }
            }
            PrimaryAction::ReleaseAll => {
                self.gates.clear();
                self.gate_do(GateRemote::open);
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
                arbitration::fence(
                    &self.setup,
                    &self.name,
                    "primary",
                    &self.sender,
                    PrimaryEngineEvent::Fenced,
                );
            }
            PrimaryAction::Notify(notice) => self.notify(notice),
            PrimaryAction::Ended { deposed_by } => {
                self.done = Some(deposed_by.map_or(Done::Vm, |term| Done::Deposed(term.0)));
            }
        }
        None
    }

    fn connect_wire(&self) {
        self.wire.connect(self.link.as_ref().map(|(_, link)| Arc::clone(link)));
    }

    fn say(&self, path: u8, message: &PeerMessage) {
        let channel = match path {
            0 => self.link.as_ref().map(|(_, link)| &link.control),
            _ => self.beat.as_ref().map(|(_, channel)| channel),
        };
        if let Some(channel) = channel
            && !links::say(channel, message)
        {
            // Its reader tells that it is broken.
            channel.close();
        }
    }

    fn set_run_permit(&mut self, permit: RunPermit) {
        // While it hands over, the VM is paused by its monitor, and may answer there.
        let switching = self.core.state() == PrimaryState::SwitchingOver;
        if permit == RunPermit::Stopped && switching {
            return;
        }
        if let Err(error) = self.guard.set(permit) {
            self.tell(&Event::GuardFailed { error, restarts: true });
            match GuardRemote::spawn(self.qemu_pid) {
                Ok(mut fresh) => {
                    let set = fresh.set(permit);
                    self.guard = fresh;
                    if set.is_ok() {
                        return;
                    }
                }
                Err(error) => self.tell(&Event::GuardFailed { error, restarts: false }),
            }
            // Without a guard the VM has no right that anybody looks after.
            let _ = pidfd_send_signal(&self.qemu, Signal::STOP);
        }
    }

    fn gate_do(&self, ask: impl FnOnce(&mut GateRemote) -> keyframe_net::Result<()>) {
        if let Err(error) = self.gate.ask(ask) {
            // What is held stays held.
            self.tell(&Event::GateFailed(error));
        }
    }

    fn kill(&self) {
        let _ = pidfd_send_signal(&self.qemu, Signal::KILL);
    }

    fn notify(&mut self, notice: Notice) {
        let role = ReplicationRole::Primary;
        let text = notice_text(role, &notice);
        self.tell(&Event::Notice { role, notice });
        self.update(|status| status.note = text);
    }

    fn show(&mut self) {
        let state = self.core.state();
        let held = self.gate.ask(GateRemote::look).ok().flatten().unwrap_or_default();
        let (term, linked) = (self.core.term().0, self.link.is_some());
        let name = shown_state(state);
        self.update(|status| {
            status.state = name;
            status.term = term;
            status.connected = linked;
            status.held_packets = held.held_frames;
            status.held_bytes = held.held_bytes;
            status.passed_packets = held.passed_frames;
            status.dropped_packets = held.dropped_frames;
        });
    }

    fn update(&self, change: impl FnOnce(&mut ReplicationStatus)) {
        let mut status = self.status.lock().ignore_poison();
        change(status.replication.get_or_insert_default());
    }

    fn end(mut self) -> Result<Ending> {
        self.ends.store(true, Ordering::Relaxed);
        if let Some((_, link)) = &self.link {
            // What was said last is on its way.
            std::thread::sleep(LAST_WORDS);
            link.close();
        }
        if let Some((_, beat)) = &self.beat {
            beat.close();
        }
        if matches!(self.done, Some(Done::Deposed(_)) | None) {
            self.kill();
        }
        self.wire.connect(None);
        if let Some(vm) = self.vm.take() {
            let (vms, beside) = vm.end()?.into_vms();
            for (_, mut vm) in vms {
                let _ = vm.kill();
            }
            if let Some(disks) = beside.disks
                && let Some(place) = disks.end()?
            {
                self.setup.events.failover_event(&Event::WritesKept(place));
            }
        }
        self.gate.end();
        self.guard.end();
        match self.done {
            Some(Done::Deposed(term)) => {
                self.setup.events.failover_event(&Event::RunsElsewhere { term });
                Ok(Ending::Elsewhere)
            }
            Some(Done::Vm) => {
                let success = self.exit.is_none_or(|exit| exit.success());
                let stopped = self.interrupted.load(Ordering::Relaxed);
                Ok(if success || stopped { Ending::Done } else { Ending::QemuFailed })
            }
            None => Ok(Ending::GivenUp),
        }
    }
}

fn shown_state(state: PrimaryState) -> ReplicationState {
    match state {
        PrimaryState::Solo => ReplicationState::Unprotected,
        PrimaryState::Syncing => ReplicationState::Syncing,
        PrimaryState::Closing => ReplicationState::Closing,
        PrimaryState::Pairing => ReplicationState::Pairing,
        PrimaryState::Protected => ReplicationState::Protected,
        PrimaryState::Stopped => ReplicationState::Stopped,
        PrimaryState::SwitchingOver => ReplicationState::SwitchingOver,
        PrimaryState::HandedOver => ReplicationState::HandedOver,
        PrimaryState::Ended => ReplicationState::Ended,
    }
}

/// An inbox, and a control socket that delivers to it.
pub fn listen(
    run_dir: &RunDir,
    status: &SharedStatus,
) -> Result<(Receiver<PrimaryEngineEvent>, Sender<PrimaryEngineEvent>, server::Socket)> {
    let (sender, inbox) = channel();
    let requests = sender.clone();
    let deliver = move |pending| requests.send(PrimaryEngineEvent::Request(pending)).is_ok();
    let socket = server::listen(run_dir.path(), status, deliver)
        .map_err(|e| Error::file("listen in", run_dir.path(), e))?;
    Ok((inbox, sender, socket))
}
