//! The loop: checkpoints when due, requests and the encoder's reports when they come, and an
//! orderly end.
//!
//! A due checkpoint is captured while earlier ones are still being encoded, if there is memory for
//! its pages, so intervals stay uniform. If memory is short, the checkpoint waits and is late.

mod changes;
mod disk_outage;
mod ending;
mod first_status;
mod guest_end;
mod inputs;
mod lost_log;
mod lost_place;
mod outcome;
mod ready;
mod report;
mod requests;
mod rollback;
mod stepping;
mod succession;
#[cfg(test)]
mod tests;
mod warnings;

use first_status::first_status;
pub use report::{RunEnd, RunReport, Successor, Verdict};
pub use stepping::{ReplaySteps, Step};

use super::SessionOptions;
use super::audit::Audit;
use super::budget::BudgetKeeper;
use super::cycle_observer::CycleObserver;
use super::encoder_thread::EncoderThread;
use super::event::{self, Event, SessionStart, tell_failed};
use super::flight_recorder::FlightRecorder;
use super::launch::PreparedSession;
use super::machines::Machines;
use super::memory_limits;
use super::ram_capture::RamCapture;
use super::recompressor::Recompressor;
use super::store_sink::{CheckpointLabel, CheckpointReason, MachineDescriptions, StoreSink};
use crate::control::server::{self, Pending, SharedStatus};
use crate::control::{
    CaptureState, EncoderState, EngineRequest, EngineResponse, EngineStatus, FailingCause, OnExit,
    RollbackPhases, Strategy,
};
use crate::error::{CheckpointError, CheckpointFailure, Error, NotCaptured, Result, with_fix};
use crate::run_dir::RunDir;
use inputs::{EncoderObserver, EngineInputs};
use keyframe_capture::{CaptureError, CapturePhase, EncodeReport, SettledReport};
use keyframe_inspect::entry::Entry;
use keyframe_scheduling::Cadence;
use keyframe_store::{CheckpointId, Sealed, Store, Writer};
use keyframe_units::{duration_ns, elapsed_ns};
use keyframe_vmm::Vmm;
use std::collections::{BTreeMap, VecDeque};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The interval at which the engine checks whether a VM has ended or was paused, if nothing else
/// wakes it.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How often a capture is tried while the machine's user changes the machine. Three are needed if a
/// disk was unplugged: a new run begins, and then the command line follows.
const CAPTURES_MAX: u32 = 5;

const NO_STANDBY: &str = "this VM has no standby: start it with keyframe protect";

/// A message to the engine's loop.
pub enum EngineMessage {
    /// A request of a client of the control socket.
    Request(Pending),
    /// A report of the encoder.
    Report(Box<EncodeReport<Sealed>>),
}

/// The recipient of a capture's outcome.
enum Taker {
    /// A client of the control socket.
    Client(Sender<EngineResponse>),
    /// The engine itself.
    Engine(Sender<Result<CheckpointId, CheckpointFailure>>),
}

/// What a try to capture a checkpoint has led to.
enum Captured {
    /// A checkpoint with this number, which is not sealed yet.
    Checkpoint(u64),
    /// A new run, because the disks differ from those of the present one.
    NewRun,
}

/// How a run ended.
enum End {
    /// The VM ended by itself.
    Vm(ExitStatus),
    /// Enough checkpoints, a signal, or `keyframe stop`.
    Asked(OnExit),
    /// This VM has taken the place of the one that was put back to a checkpoint.
    Succeeded(Box<dyn Vmm>),
}

/// A run that cannot go on.
struct BrokenRun {
    error: Error,
    /// False if the guests of launched VMs have not run.
    has_begun: bool,
}

/// The engine of a run: takes the checkpoints of its VMs, and answers requests.
pub struct Engine<'a> {
    store: &'a Store,
    name: String,
    run_dir: RunDir,
    machines: Machines,
    copying: RamCapture,
    /// `None` only at the end, and between two runs.
    encoding: Option<EncoderThread<StoreSink>>,
    writer: Writer,
    /// The flight recorder, if the run forgets old checkpoints.
    recorder: Option<FlightRecorder>,
    recompressor: Option<Recompressor>,
    meta: MachineDescriptions,
    options: SessionOptions,
    watch: CycleObserver,
    status: SharedStatus,
    inbox: Receiver<EngineMessage>,
    inbox_sender: Sender<EngineMessage>,
    /// Requests that came while the engine waited for a seal, the first one first. They come before
    /// those in the inbox.
    postponed: VecDeque<Pending>,
    /// The clients that wait for captures to be sealed, by capture.
    takers: BTreeMap<u64, Taker>,
    /// Pages of the newest checkpoint.
    last_pages: u64,
    /// The newest checkpoint that was sealed.
    newest: Option<CheckpointId>,
    /// The machines, if they were changed since the run's begin.
    followed: Option<Arc<MachineDescriptions>>,
    /// The checkpoint that the VM was rolled back to and the number of that rollback, until a
    /// sealed checkpoint records it.
    came_from: Option<(CheckpointId, u64)>,
    rollbacks: u64,
    /// The target of the last rollback: RAM equalled it when the cycle began to watch.
    equaled: Option<CheckpointId>,
    /// The times of a rollback so far, while its VM stands. A capture then leaves the thread's
    /// priority as it is.
    rollback_phases: Option<RollbackPhases>,
    interrupted: Arc<AtomicBool>,
    encoder_observer: EncoderObserver,
    /// The longest time until a checkpoint of a rollback is sealed.
    seal_timeout: Duration,
    _socket: server::Socket,
    born: Instant,
    cadence: Option<Cadence>,
    tuning: Option<BudgetKeeper>,
    sealed: u64,
    failed: u64,
    audited_wrong: u64,
    /// When the session told that it is ready.
    ready_since: Option<Instant>,
    /// The reason why no checkpoint is sealed at present.
    failing: Option<FailingCause>,
    /// True if no more checkpoints can be taken.
    given_up: bool,
    /// A monitor is lost, so the engine does not know whether its VM runs.
    is_blind: bool,
    /// The VMs are paused because no process serves their disks.
    waits_for_disks: bool,
    /// When the engine looked last whether a stopped VM has space for its writes again.
    space_looked_at: Option<Instant>,
    sealed_at: Option<Instant>,
    warnings: warnings::Warnings,
    said_log_lost: Option<Instant>,
}

impl<'a> Engine<'a> {
    /// Creates an engine over a VM that is ready to run. Errors: the run cannot be begun in the
    /// store; a thread cannot be started.
    pub fn new(store: &'a Store, parts: PreparedSession, options: SessionOptions) -> Result<Self> {
        let inputs = EngineInputs::of_process(&options)?;
        // All that the VM needs has been started: it does not inherit this.
        let volunteered = memory_limits::volunteer_as_victim();
        tell_failed(&*options.events, event::Step::VolunteerAsVictim, volunteered);
        Self::assemble(store, parts, options, inputs)
    }

    fn assemble(
        store: &'a Store,
        parts: PreparedSession,
        options: SessionOptions,
        inputs: EngineInputs,
    ) -> Result<Self> {
        let EngineInputs { interrupted, encoder_observer } = inputs;
        let status = Arc::new(Mutex::new(first_status(store, &parts, &options)));
        let (inbox_sender, inbox) = channel();
        let requests = inbox_sender.clone();
        let deliver = move |pending| requests.send(EngineMessage::Request(pending)).is_ok();
        let socket = server::listen(parts.run_dir.path(), &status, deliver)
            .map_err(|e| Error::file("listen in", parts.run_dir.path(), e))?;
        let audit = match &options.audit {
            Some(dir) => Some(Audit::new(dir.clone()).map_err(|e| Error::file("make", dir, e))?),
            None => None,
        };
        let space_pages = parts.copying.layout.len_pages();
        let observer = Arc::clone(&encoder_observer);
        let encoding =
            encode(parts.sink, space_pages, inbox_sender.clone(), Arc::clone(&status), observer)?;
        let recorder = FlightRecorder::start(store, &parts.name, &options, &status)?;
        let recompressor = Recompressor::start(store, &options, &status)?;
        Ok(Self {
            store,
            recorder,
            recompressor,
            name: parts.name,
            run_dir: parts.run_dir,
            machines: parts.machines,
            copying: parts.copying,
            encoding: Some(encoding),
            writer: parts.writer,
            meta: parts.meta,
            watch: CycleObserver::new(Arc::clone(&status), options.fault.clone(), audit),
            status,
            inbox,
            inbox_sender,
            postponed: VecDeque::new(),
            takers: BTreeMap::new(),
            last_pages: 0,
            newest: None,
            followed: None,
            came_from: None,
            rollbacks: 0,
            equaled: None,
            rollback_phases: None,
            interrupted,
            encoder_observer,
            seal_timeout: rollback::SEAL_TIMEOUT,
            _socket: socket,
            born: Instant::now(),
            cadence: options.interval.map(|i| Cadence::new(duration_ns(i), 0)),
            tuning: BudgetKeeper::new(&options)?,
            sealed: 0,
            failed: 0,
            audited_wrong: 0,
            ready_since: None,
            failing: None,
            given_up: false,
            is_blind: false,
            waits_for_disks: false,
            space_looked_at: None,
            sealed_at: None,
            warnings: warnings::Warnings::default(),
            said_log_lost: None,
            options,
        })
    }

    /// Runs the VM to its end, or until the run is ended. Returns the result of the run. Errors:
    /// the failure that ended the run; a failed teardown. In either case everything is released.
    pub fn run(mut self) -> Result<RunReport> {
        self.tell(&Event::Started(self.greeting()));
        self.tell_growth();
        if let Err(error) = self.begin() {
            return self.finish(Err(BrokenRun { error, has_begun: false }));
        }
        let end = self.until_end().map_err(|error| BrokenRun { error, has_begun: true });
        if matches!(end, Ok(End::Asked(OnExit::Kill))) && self.options.recorded.is_some() {
            self.capture_recording_end();
        }
        self.finish(end)
    }

    /// Lets the VMs run.
    fn begin(&mut self) -> Result<()> {
        if self.options.recorded.is_some() {
            // A replay begins with a checkpoint.
            self.capture(CheckpointReason::Begin, None, None)?;
        }
        self.machines.start()?;
        self.machines.hold_ends();
        Ok(())
    }

    /// Takes the checkpoint at which the last interval of a recording ends.
    fn capture_recording_end(&mut self) {
        let paused = self
            .machines
            .members_mut()
            .iter_mut()
            .try_for_each(|m| m.vm.begin_standstill().map(drop));
        match paused {
            // A failure has been told as an event.
            Ok(()) if self.takes_checkpoints() => {
                drop(self.capture(CheckpointReason::End, None, None));
            }
            Ok(()) => {}
            Err(error) => self.tell(&Event::NoFinalCheckpoint { error: error.into() }),
        }
    }

    fn until_end(&mut self) -> Result<End> {
        loop {
            if let Some(exit) = self.machines.try_wait()? {
                return Ok(End::Vm(exit));
            }
            self.check_lost_members();
            self.tell_ready();
            if self.options.count.is_some_and(|count| self.sealed >= count)
                || self.interrupted.load(Ordering::Relaxed)
                || self.has_nothing_to_do()
            {
                return Ok(End::Asked(self.options.on_exit));
            }
            self.look();
            if self.capture_guest_end() {
                continue;
            }
            if let Some(pending) = self.postponed.pop_front() {
                if let Some(end) = self.answer(pending) {
                    return Ok(end);
                }
                continue;
            }
            // Requests and reports come first: if checkpoints take longer than the interval, one is
            // always due.
            match self.inbox.recv_timeout(self.patience()) {
                Ok(EngineMessage::Request(pending)) => {
                    if let Some(end) = self.answer(pending) {
                        return Ok(end);
                    }
                }
                Ok(EngineMessage::Report(report)) => self.settle(*report),
                Err(RecvTimeoutError::Timeout) if self.is_due() && self.may_capture() => {
                    // A failure has been told as an event.
                    let _ = self.capture(CheckpointReason::Interval, None, None);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// True if no more checkpoints can be taken and the run need not wait for the VM's end: the run
    /// attached to the VM, or `--count` was to end it. A run watches any other launched VM to its
    /// end.
    fn has_nothing_to_do(&self) -> bool {
        let ends = self.machines.is_attached() || self.options.count.is_some();
        self.given_up && ends && self.copying.cycle.in_flight() == 0
    }

    /// Whether a checkpoint is due. A paused VM needs none: it has not changed.
    fn is_due(&self) -> bool {
        let due = self.cadence.as_ref().is_some_and(|c| c.due_ns() <= elapsed_ns(self.born));
        due && self.machines.run() && self.takes_checkpoints()
    }

    /// Whether a checkpoint may begin while others are being encoded.
    fn may_capture(&self) -> bool {
        let in_flight = self.copying.cycle.in_flight();
        if in_flight == 0 {
            return true;
        }
        if self.machines.disks.as_ref().is_some_and(|disks| disks.is_busy()) {
            return false;
        }
        // An audit keeps a whole copy of RAM for the checkpoint that it compares; and --count is
        // exact.
        let enough = self.options.count.is_some_and(|count| self.sealed + in_flight >= count);
        let pool = self.copying.cycle.pool();
        let wanted = (self.last_pages + self.last_pages / 2 + 8192).min(pool.capacity_pages() / 2);
        self.watch.audit.is_none() && !enough && pool.free_pages() >= wanted
    }

    fn patience(&self) -> Duration {
        match &self.cadence {
            Some(cadence) if self.machines.run() && self.takes_checkpoints() => {
                let due =
                    Duration::from_nanos(cadence.due_ns().saturating_sub(elapsed_ns(self.born)));
                // A due checkpoint that may not begin waits for a report.
                if due.is_zero() && !self.may_capture() { LOOK_EVERY } else { due.min(LOOK_EVERY) }
            }
            _ => LOOK_EVERY,
        }
    }

    /// Drains monitor events and updates the run state.
    fn look(&mut self) {
        self.machines.look();
        self.look_at_disks();
        self.look_for_space();
        self.look_at_log();
        self.update_state();
    }

    /// Ends the checkpoints of a group that has lost a member.
    fn check_lost_members(&mut self) {
        if !self.given_up
            && let Some(name) = self.machines.lost()
        {
            let text = format!("VM {name} has ended{}", outcome::NO_MORE);
            self.tell(&Event::MemberLost { vm: name.to_owned() });
            self.update(|status| status.last_error = Some(text));
            self.given_up = true;
        }
    }

    /// Captures one checkpoint; its seal is reported later. The capture is tried again if its pause
    /// had too little memory, and if the machine was changed: with a command line that makes the
    /// changed machine, or in a new run.
    fn capture(
        &mut self,
        reason: CheckpointReason,
        tag: Option<&str>,
        strategy: Option<Strategy>,
    ) -> Result<u64, NotCaptured> {
        // An audit has one copy of RAM: that of the checkpoint that it has still to compare.
        if self.watch.audit.is_some() {
            let _ = self.await_idle();
        }
        let now_ns = elapsed_ns(self.born);
        let is_first = self.sealed == 0 && self.copying.cycle.in_flight() == 0;
        let backlog_ns = match (&mut self.cadence, reason) {
            (Some(cadence), CheckpointReason::Interval) => cadence.start(now_ns),
            (Some(cadence), _) => {
                cadence.restart(now_ns);
                0
            }
            (None, _) => 0,
        };
        self.regain_place()?;
        for _ in 0..CAPTURES_MAX {
            if let Some(shortage) = self.copying.memory.limit(self.copying.cycle.pool()) {
                self.tell(&Event::MemoryShort(shortage));
            }
            let label = CheckpointLabel {
                reason,
                backlog_ns,
                tag: tag.map(str::to_owned),
                ..CheckpointLabel::default()
            };
            match self.capture_labelled(label, strategy)? {
                Ok(Captured::Checkpoint(seq)) => {
                    // While the first one copied all of RAM, none was missed.
                    if let Some(cadence) = self.cadence.as_mut().filter(|_| is_first) {
                        cadence.restart(elapsed_ns(self.born));
                    }
                    return Ok(seq);
                }
                Ok(Captured::NewRun) => {}
                // The VM ran meanwhile, so the next try has another label and another cut of the
                // disks.
                Err(_) if self.copying.cycle.wants_another_try() => {}
                Err(CaptureError::OtherRam) if !self.machines.any_has_ended() => {
                    self.follow_ram()?;
                }
                Err(_) if self.machines.are_changed() => self.follow_machine()?,
                Err(error) => return Err(self.capture_failed(error)),
            }
        }
        Err(self.failed(CheckpointError::KeepsChanging, 1, false).into())
    }

    /// Tries to capture one checkpoint. `Err` inside: the cycle's error, which is not told yet.
    fn capture_labelled(
        &mut self,
        label: CheckpointLabel,
        strategy: Option<Strategy>,
    ) -> Result<Result<Captured, CaptureError>, NotCaptured> {
        let cut =
            match self.machines.storage().map(|(disks, mut vms)| disks.begin(&mut vms)).transpose()
            {
                Ok(cut) => cut,
                Err(error) => return self.follow_disks(error).map(|()| Ok(Captured::NewRun)),
            };
        let copying = &mut self.copying;
        let strategy = copying.strategies.get(strategy.unwrap_or(self.options.strategy));
        let strategy = strategy.map_err(|e| CheckpointError::Strategy(Box::new(e)))?;
        let position = self.machines.mark();
        let (parent, machines) = (self.came_from, self.followed.clone());
        let backlog_ns = label.backlog_ns;
        let label = CheckpointLabel { cut, parent, position, machines, ..label };
        let encoding = self.encoding.as_mut().ok_or(CheckpointError::Ending)?;
        let result = copying.cycle.capture(
            &mut self.machines,
            &mut self.watch,
            strategy,
            encoding.queue(),
            label,
        );
        if self.rollback_phases.is_none() {
            keyframe_kernel::priority::lower_current_thread();
        }
        if let Some((disks, mut vms)) = self.machines.storage() {
            disks.captured(result.as_ref().ok().copied(), &mut vms);
        }
        let queued = self.copying.cycle.in_flight();
        self.update(|status| {
            status.phase = CaptureState::Idle;
            status.backlog_ns = backlog_ns;
            status.queued = queued;
        });
        if let Ok(seq) = &result {
            self.machines.hold_ends();
            if let Some(audit) = &mut self.watch.audit {
                audit.captured(*seq);
            }
        }
        Ok(result.map(Captured::Checkpoint))
    }

    fn greeting(&self) -> SessionStart {
        let members = self.machines.members().iter();
        SessionStart {
            name: self.name.clone(),
            vmm: self.machines.vmm(),
            is_group: self.machines.is_group(),
            is_replay: self.options.recorded.as_ref().is_some_and(|r| r.machine.is_some()),
            interval: self.options.interval,
            store: self.store.path().to_owned(),
            vms: members.map(|m| (m.name.clone(), m.vm.pid())).collect(),
            attach_stopped_ns: self.copying.stopped_ns.filter(|_| self.machines.is_attached()),
        }
    }

    /// Tells how far the store may grow.
    fn tell_growth(&self) {
        let bound = match (&self.recorder, self.options.count) {
            // A recording lasts as long as its user wants.
            _ if self.options.recorded.is_some() => return,
            (Some(_), _) => self.options.keep_within,
            (None, Some(_)) => return,
            (None, None) => None,
        };
        let (store, free_bytes) = (self.store.path().to_owned(), self.store.free_bytes());
        self.tell(&Event::StoreGrows { store, free_bytes, keep_within: bound });
    }

    fn tell(&self, event: &Event) {
        self.options.events.event(event);
    }

    fn update(&self, change: impl FnOnce(&mut EngineStatus)) {
        if let Ok(mut status) = self.status.lock() {
            status.last_age_ns = self.sealed_at.map(elapsed_ns);
            change(&mut status);
        }
    }
}

/// Starts an encoder that feeds `sink` and reports to `inbox`.
fn encode(
    sink: StoreSink,
    space_pages: u64,
    inbox: Sender<EngineMessage>,
    status: SharedStatus,
    observer: EncoderObserver,
) -> Result<EncoderThread<StoreSink>> {
    let watch = move |phase: CapturePhase| {
        if let Ok(mut status) = status.lock() {
            status.encoder = EncoderState::of(phase);
        }
        observer(phase);
    };
    let report = move |report| {
        // The engine may have ended already; the checkpoint is sealed all the same.
        let _ = inbox.send(EngineMessage::Report(Box::new(report)));
    };
    EncoderThread::start(sink, space_pages, Box::new(watch), report)
}
