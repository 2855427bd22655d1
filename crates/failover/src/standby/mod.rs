//! The standby: takes a VM's epochs in, and goes on with it where its primary cannot.
//!
//! ```text
//!   listener ─▶ Greeting: control ─▶ Machine ─▶ a QEMU that waits ─▶ Ready        data ─▶ streams        beat
//!   inbox ──▶ core ──▶ Apply: a thread of its own ─▶ image ─▶ Applied ─▶ core ─▶ acknowledged
//!                 └──▶ Activate: devices ─▶ QEMU runs ─▶ a primary's engine
//! ```
//!
//! Invariants: an epoch is complete when its devices and all of its streams have come; what is held
//! is whole, always; nothing that takes long is done by the thread that answers heartbeats.

mod admitting;
mod image;
mod ready;
mod streams;

use super::arbitration;
use super::frames::{EpochHead, Kind, MachineFrame, ReadyFrame, epoch_parts, text, unmarked};
use super::guard::now_ns;
use super::having;
use super::launch::{self, DISKS_SOCKET, Found, Home};
use super::links::{self, Addresses};
use super::primary::{self, Ending, PrimaryEngineEvent};
use super::settings::Setup;
use super::verify;
use super::witnessing::WitnessAnswer;
use crate::error::{Error, Result, with_fix};
use crate::event::{Event, EventSink};
use crate::notice_text::notice_text;
use admitting::{admit, bound};
use keyframe_link::{Channel, Input};
use keyframe_locks::IgnorePoison;
use keyframe_qemu::QemuIdentity;
use keyframe_replication::{
    Epoch, PeerMessage, PrimaryStart, StandbyAction, StandbyEvent, StandbyState, Term,
};
use keyframe_session::control::server::{Pending, SharedStatus};
use keyframe_session::control::{
    ReplicationRole, ReplicationState, ReplicationStatus, Request, Response,
};
use keyframe_session::interrupt;
use keyframe_session::run_dir::RunDir;
use keyframe_units::error_chain;
use ready::{IncomingEpoch, Ready, meta_of};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use streams::StreamEvent;

const LOOK_EVERY: Duration = Duration::from_millis(100);
const READ_WAIT: Duration = Duration::from_millis(200);
/// Behind the last epoch of the primary that was taken over from.
const EPOCH_GAP: u64 = 1 << 20;

/// What a standby is asked for.
#[derive(Clone)]
pub struct Wish {
    /// Where the primary connects.
    pub listen: SocketAddr,
    /// The folder of the terms and votes of this host.
    pub folder: PathBuf,
    /// The standby's name.
    pub name: String,
    /// Arguments added to QEMU's command line here.
    pub extra: Vec<OsString>,
    /// Whom to protect the VM by, once it runs here.
    pub peer: Option<Addresses>,
    /// The settings of this host.
    pub setup: Setup,
}

/// What wakes the thread.
enum StandbyEngineEvent {
    Control { number: u64, machine: Box<MachineFrame>, channel: Arc<Channel> },
    Beat { number: u64, channel: Arc<Channel> },
    Data { stream: usize, number: u64, channel: Box<Channel> },
    Received { path: u8, number: u64, message: PeerMessage },
    Epoch { number: u64, session: u64, epoch: Epoch, head: EpochHead, devices: Vec<u8> },
    Broken { path: u8, number: u64 },
    Stream(StreamEvent),
    Applied { epoch: Epoch, devices: Vec<u8>, result: Result<(), String> },
    Witness(WitnessAnswer),
    Fenced(bool),
}

/// Listens, and is a standby until the VM has run here to its end, or a signal comes. When the VM
/// has gone elsewhere again, it is a standby again.
pub fn run(wish: &Wish) -> Result<Ending> {
    let interrupted = interrupt::interruption_or_hangup()?;
    let _owned = image::own(&wish.folder)?;
    loop {
        match once(wish.clone(), &interrupted)? {
            Ending::Elsewhere => {}
            ending => return Ok(ending),
        }
    }
}

fn once(wish: Wish, interrupted: &Arc<AtomicBool>) -> Result<Ending> {
    let run_dir = RunDir::claim(&wish.name)?;
    let status = launch::first_status(&wish.name, 0, ReplicationRole::Standby);
    let (requests, request_sender, socket) = primary::listen(&run_dir, &status)?;
    let listener = bound(wish.listen)?;
    let address = listener.local_addr().map_err(|e| Error::io("listen", e))?;
    let (sender, inbox) = channel();
    let ends = Arc::new(AtomicBool::new(false));
    admit(listener, &wish.setup, &sender, &ends)?;
    wish.setup.events.failover_event(&Event::StandbyListens(address));
    if wish.peer.is_none() {
        wish.setup.events.failover_event(&Event::NoPeer);
    }
    let mut keeper = Keeper {
        wish,
        run_dir,
        status,
        sender,
        inbox,
        requests,
        ready: None,
        control: None,
        beat: None,
        ends: Arc::clone(&ends),
        activate: None,
        refusals: Refusals::default(),
    };
    let activated = keeper.until_active(interrupted);
    ends.store(true, Ordering::Relaxed);
    if let Some(activation) = activated? {
        return keeper.take_over((request_sender, socket), activation, interrupted);
    }
    keeper.dismiss();
    Ok(Ending::Done)
}

/// The right to run the VM from an epoch on, as the protocol's core granted it.
#[derive(Clone, Copy, Debug)]
struct Activation {
    epoch: Epoch,
    term: Term,
    /// A user forced it.
    forced: bool,
}

struct Keeper {
    wish: Wish,
    run_dir: RunDir,
    status: SharedStatus,
    sender: Sender<StandbyEngineEvent>,
    inbox: Receiver<StandbyEngineEvent>,
    /// The control socket's.
    requests: Receiver<PrimaryEngineEvent>,
    ready: Option<Ready>,
    control: Option<(u64, Arc<Channel>)>,
    beat: Option<(u64, Arc<Channel>)>,
    ends: Arc<AtomicBool>,
    activate: Option<Activation>,
    refusals: Refusals,
}

/// Says why somebody is refused: once, until it is for another reason or nobody was. Who is refused
/// tries again, some times a second.
#[derive(Default)]
struct Refusals(Mutex<Option<String>>);

impl Refusals {
    fn tell(&self, events: &dyn EventSink, error: Error, event: fn(Error) -> Event) {
        let mut said = self.0.lock().ignore_poison();
        let text = with_fix(&error);
        if said.as_ref() != Some(&text) {
            events.failover_event(&event(error));
            *said = Some(text);
        }
    }

    fn forget(&self) {
        *self.0.lock().ignore_poison() = None;
    }
}

impl Keeper {
    fn until_active(&mut self, interrupted: &AtomicBool) -> Result<Option<Activation>> {
        loop {
            if self.activate.is_some() {
                return Ok(self.activate.take());
            }
            if interrupted.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let deadline_ns =
                self.ready.as_ref().map_or(u64::MAX, |ready| ready.core.deadline_ns());
            let until = Duration::from_nanos(deadline_ns.saturating_sub(now_ns()));
            while let Ok(PrimaryEngineEvent::Request(pending)) = self.requests.try_recv() {
                self.answer(&pending, interrupted);
            }
            match self.inbox.recv_timeout(until.min(LOOK_EVERY)) {
                Ok(event) => self.handle_event(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
            if now_ns() >= deadline_ns {
                self.handle(StandbyEvent::Tick);
            }
            self.mind()?;
            self.show();
        }
    }

    /// A QEMU that waits and ends is of no use.
    fn mind(&mut self) -> Result<()> {
        let Some(ready) = &mut self.ready else { return Ok(()) };
        if let Some(exit) = ready.prepared.try_wait()? {
            self.wish.setup.events.failover_event(&Event::WaitingQemuEnded(exit));
            self.dismiss();
            if let Some((_, control)) = self.control.take() {
                control.close();
            }
        }
        Ok(())
    }

    fn handle_event(&mut self, event: StandbyEngineEvent) {
        match event {
            StandbyEngineEvent::Control { number, machine, channel } => {
                self.take_control(number, *machine, channel);
            }
            StandbyEngineEvent::Beat { number, channel } => {
                self.read(Arc::clone(&channel), 1, number);
                self.beat = Some((number, channel));
                self.handle(StandbyEvent::PathUp(1));
            }
            StandbyEngineEvent::Data { stream, number, channel } => {
                if let Some(ready) = &self.ready
                    && stream < ready.streams.len()
                {
                    let sender = self.sender.clone();
                    let tell = move |from| {
                        let _ = sender.send(StandbyEngineEvent::Stream(from));
                    };
                    ready.streams.read((stream, number), *channel, tell, Arc::clone(&self.ends));
                }
            }
            StandbyEngineEvent::Received { path, number, message } => {
                if self.current(path) == Some(number) {
                    self.handle(StandbyEvent::Peer { path, message });
                }
            }
            StandbyEngineEvent::Epoch { number, session, epoch, head, devices } => {
                if self.current(0) == Some(number)
                    && let Some(ready) = &mut self.ready
                {
                    ready.coming = Some(IncomingEpoch { session, epoch, head, devices });
                    self.complete();
                }
            }
            StandbyEngineEvent::Broken { path, number } => {
                if self.current(path) == Some(number) {
                    match path {
                        0 => self.control = None,
                        _ => self.beat = None,
                    }
                    self.handle(StandbyEvent::PathDown(path));
                }
            }
            StandbyEngineEvent::Stream(StreamEvent::Marked { stream, session, epoch }) => {
                if let Some(mark) =
                    self.ready.as_mut().and_then(|ready| ready.marks.get_mut(stream))
                {
                    *mark = Some((session, epoch));
                    self.complete();
                }
            }
            StandbyEngineEvent::Stream(StreamEvent::Failed(reason)) => {
                self.handle(StandbyEvent::ApplyFailed { reason });
            }
            StandbyEngineEvent::Applied { epoch, devices, result } => {
                if let Some(ready) = &mut self.ready {
                    ready.streams.applied();
                    ready.applying = ready.applying.saturating_sub(1);
                    if result.is_ok() {
                        ready.devices = Some(devices);
                    }
                }
                self.handle(match result {
                    Ok(()) => StandbyEvent::Applied { epoch },
                    Err(reason) => StandbyEvent::ApplyFailed { reason },
                });
                self.tell_what_is_here();
            }
            StandbyEngineEvent::Witness(WitnessAnswer::Answered(reply)) => {
                self.handle(StandbyEvent::Witness(reply));
            }
            StandbyEngineEvent::Witness(WitnessAnswer::Lost { sent }) => {
                self.handle(StandbyEvent::WitnessLost { sent });
            }
            StandbyEngineEvent::Fenced(off) => self.handle(StandbyEvent::Fenced(off)),
        }
    }

    fn current(&self, path: u8) -> Option<u64> {
        let of = if path == 0 { &self.control } else { &self.beat };
        of.as_ref().map(|(number, _)| *number)
    }

    fn answer(&mut self, pending: &Pending, interrupted: &AtomicBool) {
        let state = self.ready.as_ref().map(|ready| ready.core.state());
        let response = match pending.request {
            Request::FailOver { force: true }
                if self.ready.as_ref().is_some_and(|ready| ready.devices.is_some()) =>
            {
                self.handle(StandbyEvent::FailOver { force: true });
                Response::Done("this standby takes over".into())
            }
            Request::FailOver { force } => match state.filter(|_| !force) {
                Some(StandbyState::Armed | StandbyState::Following) if self.control.is_some() => {
                    self.handle(StandbyEvent::SwitchOver);
                    Response::Done("the primary is asked to let the VM go over".into())
                }
                Some(StandbyState::Armed | StandbyState::Following) => {
                    self.handle(StandbyEvent::FailOver { force: false });
                    Response::Done("who decides is asked whether this standby may take over".into())
                }
                _ if self.ready.as_ref().is_some_and(|ready| ready.devices.is_some()) => Response::Failed(
                    "the primary is silent, and nobody decides who takes over; where the other host is off for sure: keyframe failover --force"
                        .into(),
                ),
                _ => Response::Failed("this standby holds no whole epoch of a VM".into()),
            },
            Request::Stop { .. } => {
                interrupted.store(true, Ordering::Relaxed);
                Response::Stopping
            }
            _ => Response::Failed("this is a standby; that is for the host where the VM runs".into()),
        };
        let _ = pending.answer.send(response);
    }

    /// A primary has connected and said what machine it has.
    fn take_control(&mut self, number: u64, machine: MachineFrame, channel: Arc<Channel>) {
        let known = self.ready.as_ref().is_some_and(|ready| ready.machine == machine);
        let answer = if known { Ok(()) } else { self.get_ready(machine) };
        let is_ready = answer.is_ok();
        let frame = match answer {
            Ok(()) => {
                self.refusals.forget();
                ReadyFrame::Ready
            }
            Err(error) => {
                let (problem, fix) = (error_chain(&error), error.fix());
                self.refusals.tell(&*self.wish.setup.events, error, Event::PrimaryRefused);
                ReadyFrame::Refused { problem, fix }
            }
        };
        let sent = text(&frame).is_ok_and(|text| channel.send(Kind::Ready as u8, &[&text]).is_ok());
        if !is_ready || !sent {
            channel.close();
            return;
        }
        if let Some((_, old)) = self.control.take() {
            old.close();
            self.handle(StandbyEvent::PathDown(0));
        }
        if let Some(ready) = &mut self.ready {
            ready.streams.connected(number);
            ready.coming = None;
        }
        self.read(Arc::clone(&channel), 0, number);
        self.control = Some((number, channel));
        self.handle(StandbyEvent::PathUp(0));
    }

    /// Reads a connection until it breaks.
    fn read(&self, channel: Arc<Channel>, path: u8, number: u64) {
        let (sender, ends) = (self.sender.clone(), Arc::clone(&self.ends));
        let work = move || {
            let mut input = Input::default();
            while !ends.load(Ordering::Relaxed) {
                let frame = match channel.receive(&mut input, READ_WAIT) {
                    Ok(None) => continue,
                    Ok(Some(frame)) => frame,
                    Err(_) => break,
                };
                let said = match Kind::of(frame.kind) {
                    Some(Kind::Core) => PeerMessage::decode(&frame.payload)
                        .ok()
                        .map(|message| StandbyEngineEvent::Received { path, number, message }),
                    Some(Kind::Epoch) => {
                        unmarked(&frame.payload).and_then(|(session, epoch, rest)| {
                            let (head, devices) = epoch_parts(rest)?;
                            Some(StandbyEngineEvent::Epoch {
                                number,
                                session,
                                epoch: Epoch(epoch),
                                head,
                                devices: devices.to_vec(),
                            })
                        })
                    }
                    _ => None,
                };
                // Whoever cannot be understood is no primary.
                let Some(said) = said else { break };
                if sender.send(said).is_err() {
                    break;
                }
            }
            channel.close();
            let _ = sender.send(StandbyEngineEvent::Broken { path, number });
        };
        // Without a thread the path stays silent, and counts as lost.
        let _ = std::thread::Builder::new().name("link".into()).spawn(work);
    }

    /// Whether an epoch has come whole.
    fn complete(&mut self) {
        let Some(ready) = &self.ready else { return };
        let Some(IncomingEpoch { session, epoch, head, .. }) = &ready.coming else { return };
        let whole = ready.marks.iter().all(|mark| *mark == Some((*session, *epoch)));
        if whole {
            let (session, epoch) = (keyframe_replication::SessionId(*session), *epoch);
            let after = head.after;
            self.handle(StandbyEvent::EpochComplete { session, epoch, after });
        }
    }

    fn handle(&mut self, input: StandbyEvent) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let Some(ready) = &mut self.ready else { return };
            for output in ready.core.handle(now_ns(), input) {
                if let Some(next) = self.act(output) {
                    inputs.push_back(next);
                }
            }
        }
    }

    fn act(&mut self, output: StandbyAction) -> Option<StandbyEvent> {
        match output {
            StandbyAction::Send { path, message } => {
                let of = if path == 0 { &self.control } else { &self.beat };
                if let Some((_, channel)) = of
                    && !links::say(channel, &message)
                {
                    // Its reader tells that it is broken.
                    channel.close();
                }
            }
            StandbyAction::AskWitness(request) => {
                arbitration::ask(
                    &self.wish.setup,
                    request,
                    &self.sender,
                    StandbyEngineEvent::Witness,
                );
            }
            StandbyAction::Receive { session } => {
                let ready = self.ready.as_mut()?;
                ready.streams.receive(session.0);
                (ready.devices, ready.coming) = (None, None);
                ready.marks.fill(None);
                ready.having = Some(session.0);
                self.tell_what_is_here();
            }
            StandbyAction::Apply { epoch } => return self.apply(epoch),
            StandbyAction::Reject { .. } | StandbyAction::DiscardPartial => {
                let ready = self.ready.as_mut()?;
                ready.streams.discard();
                ready.coming = None;
                ready.marks.fill(None);
            }
            StandbyAction::Fence => {
                let name =
                    self.ready.as_ref().map(|ready| ready.machine.name.clone()).unwrap_or_default();
                arbitration::fence(
                    &self.wish.setup,
                    &name,
                    "standby",
                    &self.sender,
                    StandbyEngineEvent::Fenced,
                );
            }
            StandbyAction::Activate { epoch, term, forced } => {
                self.activate = Some(Activation { epoch, term, forced });
            }
            StandbyAction::Notify(note) => {
                let role = ReplicationRole::Standby;
                let text = notice_text(role, &note);
                let event = Event::Notice { role, notice: note };
                self.wish.setup.events.failover_event(&event);
                self.update(|status| status.note = text);
            }
        }
        None
    }

    /// Tells the primary of a session that begins what need not be sent; not while that still
    /// changes.
    fn tell_what_is_here(&mut self) {
        let Some((_, control)) = &self.control else { return };
        let Some(ready) = self.ready.as_mut().filter(|ready| ready.applying == 0) else { return };
        let Some(session) = ready.having.take() else { return };
        let (image, channel, blank) = (Arc::clone(&ready.image), Arc::clone(control), ready.blank);
        let work = move || {
            if !having::tell(&*image, image.len_pages(), blank, session, &channel) {
                channel.close();
            }
        };
        if std::thread::Builder::new().name("having".into()).spawn(work).is_err() {
            control.close();
        }
    }

    /// Makes an epoch that has come whole what is held, beside the heartbeats.
    fn apply(&mut self, epoch: Epoch) -> Option<StandbyEvent> {
        let failed = |reason: &str| Some(StandbyEvent::ApplyFailed { reason: reason.into() });
        let ready = self.ready.as_mut()?;
        let Some(IncomingEpoch { session, head, devices, .. }) =
            ready.coming.take_if(|incoming| incoming.epoch == epoch)
        else {
            return failed("what came of it was dropped");
        };
        let Some(pages) = ready.streams.take(session, epoch) else {
            return failed("what came of it was dropped");
        };
        let (image, sender, checks) =
            (Arc::clone(&ready.image), self.sender.clone(), head.checks.clone());
        let ram_pages = ready.machine.ram.len_pages();
        let work = move || {
            let applied = image.apply(&pages).map_err(|e| format!("write what is held: {e}"));
            let result = applied.and_then(|()| match &*checks {
                [] => Ok(()),
                checks => verify::compare(&*image, ram_pages, checks),
            });
            let _ = sender.send(StandbyEngineEvent::Applied { epoch, devices, result });
        };
        if std::thread::Builder::new().name("apply".into()).spawn(work).is_err() {
            return failed("no thread is to be had");
        }
        (ready.applying, ready.blank) = (ready.applying + 1, false);
        self.update(|status| {
            status.reason.clone_from(&head.reason);
            status.pages = head.pages;
            status.wire_bytes = head.wire_bytes;
            status.all_wire_bytes += head.wire_bytes;
            status.all_raw_bytes += head.pages * keyframe_units::PAGE_BYTES as u64;
            status.epochs += 1;
            status.epoch = Some(epoch.0);
        });
        None
    }

    fn show(&mut self) {
        let Some(ready) = &self.ready else { return };
        let state = match ready.core.state() {
            StandbyState::Alone => ReplicationState::Waiting,
            StandbyState::Joining => ReplicationState::Syncing,
            StandbyState::Following => ReplicationState::Following,
            StandbyState::Armed => ReplicationState::ReadyToTakeOver,
            StandbyState::Asking => ReplicationState::Asking,
            StandbyState::Active => ReplicationState::Active,
        };
        let (held, term) = (ready.core.held().map(|epoch| epoch.0), ready.core.term().0);
        let (vm, qemu, connected) =
            (ready.machine.name.clone(), ready.prepared.pid(), self.control.is_some());
        if let Ok(mut status) = self.status.lock() {
            status.qemu_pid = qemu;
        }
        self.update(|status| {
            status.state = state;
            (status.acknowledged, status.term, status.connected) = (held, term, connected);
            status.protects = Some(vm);
        });
    }

    fn update(&self, change: impl FnOnce(&mut ReplicationStatus)) {
        let mut status = self.status.lock().ignore_poison();
        change(status.replication.get_or_insert_default());
    }

    /// The VM goes on here.
    fn take_over(
        mut self,
        (sender, socket): (Sender<PrimaryEngineEvent>, keyframe_session::control::server::Socket),
        Activation { epoch, term, forced }: Activation,
        interrupted: &Arc<AtomicBool>,
    ) -> Result<Ending> {
        let ready = self.ready.take().ok_or(Error::NothingHeld)?;
        let devices = ready.devices.as_ref().ok_or(Error::NothingHeld)?;
        let restored = match ready.prepared.activate(&*ready.image, devices) {
            Ok(restored) => restored,
            Err(error) => {
                ready.gate.end();
                return Err(error.into());
            }
        };
        let (ready_ns, mut vm) = (restored.ready_ns(), restored.into_vm());
        self.wish.setup.events.failover_event(&Event::TookOver {
            vm: ready.machine.name.clone(),
            epoch,
            ready_ns,
        });
        self.update(|status| {
            *status = ReplicationStatus {
                role: ReplicationRole::Primary,
                protects: Some(ready.machine.name.clone()),
                took_over_ns: Some(ready_ns),
                acknowledged: None,
                ..ReplicationStatus::default()
            };
        });
        if let Err(error) = self.run_dir.runs(&ready.machine.name) {
            self.wish.setup.events.failover_event(&Event::NameNotKept(error.into()));
        }
        if let Some((_, channel)) = &self.control {
            links::say(channel, &PeerMessage::TookOver { term });
        }
        if ready.served.is_some() {
            vm.mind_server(self.run_dir.path().join(DISKS_SOCKET));
        }
        let identity = QemuIdentity {
            path: PathBuf::from(&ready.machine.qemu_path),
            version: ready.machine.qemu_version.clone(),
            blake3: ready.machine.qemu_blake3.clone(),
        };
        let found = Found {
            vm,
            identity,
            machine: Some(meta_of(&ready.machine)),
            directory: PathBuf::from(&ready.machine.working_directory),
            served: ready.served,
            gate: ready.gate,
        };
        let home = Home {
            name: ready.machine.name.clone(),
            run_dir: self.run_dir,
            status: self.status,
            interrupted: Arc::clone(interrupted),
            inbox: Some((self.requests, sender, socket)),
        };
        let start = (PrimaryStart::TakenOver { term, forced }, Epoch(epoch.0 + EPOCH_GAP));
        let engine =
            launch::engine(found, home, self.wish.setup, ready.config, start, self.wish.peer)?;
        engine.run()
    }
}
