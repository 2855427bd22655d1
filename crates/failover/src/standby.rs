//! The standby: receives a VM's epochs, and runs the VM when its primary fails.
//!
//! ```text
//!   listener ─▶ Greeting ─▶ control: Machine ─▶ a QEMU that waits ─▶ Ready
//!                   ├─────▶ data: streams
//!                   └─────▶ beat
//!   inbox ──▶ core ──▶ Apply: a thread of its own ─▶ image ─▶ Applied ─▶ core ─▶ acknowledged
//!                 └──▶ Activate: devices ─▶ QEMU runs ─▶ a primary's engine
//! ```
//!
//! Invariants: an epoch is complete when its device state and all of its streams have arrived; the
//! epoch that is held is always whole; the thread that answers heartbeats does nothing that takes
//! long.

mod actions;
mod admission;
mod control;
mod image;
mod prepared_vm;
mod streams;
mod takeover;

use super::frames::{EpochHead, MachineFrame};
use super::guard::now_ns;
use super::launch;
use super::links::StandbyAddresses;
use super::primary::{self, PrimaryEngineEvent, ProtectionEnding};
use super::settings::FailoverSetup;
use super::witness::WitnessAnswer;
use crate::error::{Error, Result, with_fix};
use crate::event::{FailoverEvent, FailoverEventSink};
use admission::{admit, bound};
use keyframe_link::Channel;
use keyframe_locks::IgnorePoison;
use keyframe_replication::{Epoch, PeerMessage, StandbyEvent, Term};
use keyframe_session::SessionOptions;
use keyframe_session::control::server::SharedStatus;
use keyframe_session::control::{OnExit, ReplicationRole};
use keyframe_session::interrupt;
use keyframe_session::launch::require_kernel;
use keyframe_session::run_dir::RunDir;
use prepared_vm::{IncomingEpoch, PreparedVm};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use streams::{StreamEvent, Streams};

const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The options of a standby.
#[derive(Clone)]
pub struct StandbyOptions {
    /// The address at which the standby accepts connections of a primary.
    pub listen: SocketAddr,
    /// The directory in which the standby keeps its lock file, its copies of the disks, and the
    /// overlays of the guest's writes.
    pub folder: PathBuf,
    /// The name of the standby, by which commands find it.
    pub name: String,
    /// Arguments that are added to QEMU's command line on this host.
    pub extra: Vec<OsString>,
    /// The addresses of the next standby, once the VM runs here. `None` for no standby.
    pub peer: Option<StandbyAddresses>,
    /// The settings of this host.
    pub setup: FailoverSetup,
}

/// An event of the standby's thread.
enum StandbyEngineEvent {
    Control { number: u64, machine: Box<MachineFrame>, channel: Arc<Channel> },
    Beat { number: u64, channel: Arc<Channel> },
    Data { stream: usize, number: u64, channel: Box<Channel> },
    Received { path: u8, number: u64, message: PeerMessage },
    Epoch { number: u64, session: u64, epoch: Epoch, head: EpochHead, devices: Vec<u8> },
    Broken { path: u8, number: u64 },
    Stream(StreamEvent),
    Applied { streams: Arc<Streams>, epoch: Epoch, devices: Vec<u8>, result: Result<(), String> },
    Witness(WitnessAnswer),
    Fenced(bool),
}

/// Runs a standby until the VM has run on this host to its end, or until a signal ends it. If the
/// VM moves to the other host, this host becomes its standby again. Returns how this host's part
/// ended.
///
/// Errors: the kernel lacks a feature; [`Error::Listen`] if this host cannot listen;
/// [`Error::DirectoryInUse`] or [`Error::Io`] if the directory cannot be used; another VM or
/// standby has the name; the VM cannot be started from its epoch.
pub fn run(options: &StandbyOptions) -> Result<ProtectionEnding> {
    let interrupted = interrupt::interruption_or_hangup()?;
    // It has to take checkpoints of the VM once that runs here.
    require_kernel(&SessionOptions::every(None, OnExit::Kill))?;
    let _owned = image::own(&options.folder)?;
    loop {
        match stand_by(options.clone(), &interrupted)? {
            ProtectionEnding::Elsewhere => {}
            ending => return Ok(ending),
        }
    }
}

fn stand_by(options: StandbyOptions, interrupted: &Arc<AtomicBool>) -> Result<ProtectionEnding> {
    let run_dir = RunDir::claim(&options.name)?;
    let status = launch::first_status(&options.name, 0, ReplicationRole::Standby);
    let requests = primary::listen(&run_dir, &status)?;
    let listener = bound(options.listen)?;
    let address = listener.local_addr().map_err(|e| Error::io("listen", e))?;
    let (sender, inbox) = channel();
    let ends = Arc::new(AtomicBool::new(false));
    admit(listener, &options.setup, &sender, &ends)?;
    options.setup.events.failover_event(&FailoverEvent::StandbyListens(address));
    if options.peer.is_none() {
        options.setup.events.failover_event(&FailoverEvent::NoPeer);
    }
    let mut engine = StandbyEngine {
        options,
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
    let activated = engine.until_active(interrupted);
    ends.store(true, Ordering::Relaxed);
    if let Some(activation) = activated? {
        return engine.take_over(activation, interrupted);
    }
    engine.discard();
    Ok(ProtectionEnding::Done)
}

/// The right to run the VM from an epoch on, as the protocol's core granted it.
#[derive(Clone, Copy, Debug)]
struct Activation {
    epoch: Epoch,
    term: Term,
    /// A user forced it.
    forced: bool,
}

struct StandbyEngine {
    options: StandbyOptions,
    run_dir: RunDir,
    status: SharedStatus,
    sender: Sender<StandbyEngineEvent>,
    inbox: Receiver<StandbyEngineEvent>,
    /// The inbox of the control socket, which the primary's engine gets after a takeover.
    requests: primary::EngineInbox,
    ready: Option<PreparedVm>,
    control: Option<(u64, Arc<Channel>)>,
    beat: Option<(u64, Arc<Channel>)>,
    ends: Arc<AtomicBool>,
    activate: Option<Activation>,
    refusals: Refusals,
}

/// Tells an error of a refused peer once, until the error changes or a peer is accepted. A refused
/// peer tries again several times a second.
#[derive(Default)]
struct Refusals(Mutex<Option<String>>);

impl Refusals {
    fn tell(
        &self,
        events: &dyn FailoverEventSink,
        error: Error,
        event: fn(Error) -> FailoverEvent,
    ) {
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

impl StandbyEngine {
    fn until_active(&mut self, interrupted: &AtomicBool) -> Result<Option<Activation>> {
        loop {
            // The pages of an epoch that is being applied are part of the VM.
            let is_applying = self.ready.as_ref().is_some_and(|ready| ready.applying > 0);
            if self.activate.is_some() && !is_applying {
                return Ok(self.activate.take());
            }
            if interrupted.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let deadline_ns =
                self.ready.as_ref().map_or(u64::MAX, |ready| ready.core.deadline_ns());
            let until = Duration::from_nanos(deadline_ns.saturating_sub(now_ns()));
            while let Ok(PrimaryEngineEvent::Request(pending)) = self.requests.events.try_recv() {
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
            self.check_waiting_qemu()?;
            self.show();
        }
    }

    /// Discards a waiting QEMU that has ended. Error: its process cannot be queried.
    fn check_waiting_qemu(&mut self) -> Result<()> {
        let Some(ready) = &mut self.ready else { return Ok(()) };
        if let Some(exit) = ready.prepared.try_wait()? {
            self.options.setup.events.failover_event(&FailoverEvent::WaitingQemuEnded(exit));
            self.discard();
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
                self.read_stream(stream, number, *channel);
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
                    self.close_path(path);
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
                self.handle(StandbyEvent::DataFailed { reason });
            }
            StandbyEngineEvent::Applied { streams, epoch, devices, result } => {
                // An epoch of a machine that was discarded says nothing about this one.
                let is_own = |ready: &PreparedVm| Arc::ptr_eq(&ready.streams, &streams);
                if self.ready.as_ref().is_some_and(is_own) {
                    self.finish_epoch(epoch, devices, result);
                }
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

    /// Reads the epochs' pages that arrive on a stream, in a thread. Without a QEMU that waits, the
    /// connection ends.
    fn read_stream(&self, stream: usize, number: u64, channel: Channel) {
        let Some(ready) = &self.ready else { return };
        if stream >= ready.streams.len() {
            return;
        }
        let sender = self.sender.clone();
        let tell = move |event| {
            let _ = sender.send(StandbyEngineEvent::Stream(event));
        };
        ready.streams.read((stream, number), channel, tell, Arc::clone(&self.ends));
    }

    /// Drops a path's connection, which has failed.
    fn close_path(&mut self, path: u8) {
        match path {
            0 => self.control = None,
            _ => self.beat = None,
        }
        self.handle(StandbyEvent::PathDown(path));
    }

    /// Takes the result of applying an epoch. If it is applied, `devices` is its device state.
    fn finish_epoch(&mut self, epoch: Epoch, devices: Vec<u8>, result: Result<(), String>) {
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
        self.send_page_hashes();
    }

    /// The number of a path's connection; `None` if it has none. Path 0 is the control connection.
    fn current(&self, path: u8) -> Option<u64> {
        let of = if path == 0 { &self.control } else { &self.beat };
        of.as_ref().map(|(number, _)| *number)
    }
}
