//! The thread that has the VM: it takes epochs when the policy says so, or the protocol does.
//!
//! ```text
//!   protocol ─VmAction─▶ Keeper: look ─▶ policy ─▶ capture ─▶ [encoder: WireSink] ─▶ standby
//!            ◀──VmEvent──                             │
//!                                                  gate: cut in the pause
//! ```
//!
//! Invariants: one epoch is in flight at most; pages of an epoch that the standby does not
//! acknowledge are owed to the next.
//!
//! It may wait for QEMU: nothing that has to be in time is done here (that is the protocol's
//! thread, and the guard).

mod syncing;

use super::busy::Busy;
pub use super::gated::Gate;
use super::gated::Gated;
use super::guard::now_ns;
use super::having::Having;
use super::sending::{EpochLabel, SentEpoch, SharedWire, WireSink};
use super::verify::{Checks, Verifier};
use crate::error::{Error, Result};
use crate::event::{Event, SharedEventSink};
use keyframe_capture::{EncodeError, EncodeReport, SettledReport};
use keyframe_net::{GateLook, GateRemote};
use keyframe_scheduling::replication::{
    AcknowledgedEpoch, CheckpointReason, ReplicationDecision, ReplicationScheduler, VmObservation,
};
use keyframe_session::control::Strategy;
use keyframe_session::encoder_thread::EncoderThread;
use keyframe_session::machines::Machines;
use keyframe_session::ram_capture::RamCapture;
use keyframe_units::{Epoch, PAGE_BYTES, error_chain};
use std::io::{ErrorKind, PipeReader, Read};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the VM's own doings are looked at, when nothing else wakes the thread.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// After a capture that failed.
const RETRY: Duration = Duration::from_millis(50);
/// How often the disks are asked what was written to them, in nanoseconds.
const DISK_LOOK_NS: u64 = 20_000_000;

/// An action that the primary asks of the VM's thread.
pub enum VmAction {
    /// Whether the policy may take epochs.
    MayCapture(bool),
    /// Take one now; with `last` the VM stands, and stays so.
    Capture { last: bool },
    /// Take a complete one for this session.
    Sync { session: u64 },
    /// What the standby of a session that begins has already.
    PageHashes { session: u64, first: u64, hashes: Vec<u8> },
    /// The standby has all up to this one.
    Acknowledged { epoch: Epoch },
    /// The standby has nothing after this one.
    Owe { after: Option<Epoch> },
    /// Pause the VM by its monitor.
    Stop,
    /// Let it run again.
    Resume,
    /// A packet is held, the first of its epoch.
    Packet,
    /// The encoder is done with an epoch.
    Report(Box<EncodeReport<SentEpoch>>),
    /// Give the VM back.
    End,
}

/// An event that the VM's thread reports to the primary.
pub enum VmEvent {
    /// This epoch is captured; what the guest has sent up to then has this number at the gate.
    Captured {
        epoch: Epoch,
        gate: Option<u64>,
        reason: &'static str,
    },
    CaptureFailed(Error),
    /// The VM is paused, as [`VmAction::Stop`] asked.
    Stopped,
    Resumed,
    /// QEMU has ended.
    Ended(ExitStatus),
    /// The standby has acknowledged an epoch.
    EpochDone(Box<EpochReport>),
}

/// An acknowledged epoch as it is shown to users.
#[derive(Clone, Debug, Default)]
pub struct EpochReport {
    pub acknowledged: Option<Epoch>,
    pub pages: u64,
    pub wire_bytes: u64,
    pub raw_bytes: u64,
    pub pause_ns: u64,
    pub transfer_ns: u64,
    pub epoch_ns: u64,
    /// Why it was taken.
    pub reason: &'static str,
    /// How long the VM has stood since it, suspended early.
    pub suspended_ns: u64,
    pub estimates: Vec<(&'static str, f64)>,
}

/// What the thread begins with.
pub struct Parts {
    pub machines: Machines,
    pub copying: RamCapture,
    pub gate: Gate,
    pub wire: SharedWire,
    pub policy: Box<dyn ReplicationScheduler>,
    /// RAM is compared with the standby's at each epoch.
    pub verify: bool,
    /// The socket of the disks' server, and the exports with their bytes.
    pub disks: Option<(PathBuf, Vec<(String, u64)>)>,
    /// The first epoch's number.
    pub first_epoch: Epoch,
    /// Is told what goes wrong.
    pub events: SharedEventSink,
}

/// The thread's handle.
pub struct VmThread {
    pub actions: Sender<VmAction>,
    thread: JoinHandle<Machines>,
}

impl VmThread {
    /// Starts it. The VM runs from here on, where it is to.
    pub fn start(parts: Parts, events: impl Fn(VmEvent) + Send + 'static) -> Result<Self> {
        let (actions, inbox) = channel();
        let reports = actions.clone();
        let space = parts.copying.layout.len_pages();
        let report = move |report| {
            let _ = reports.send(VmAction::Report(Box::new(report)));
        };
        let encoding =
            EncoderThread::start(WireSink(parts.wire.clone()), space, Box::new(|_| ()), report)?;
        if let Ok(Some(bell)) = parts.gate.ask(|gate| gate.bell()) {
            listen(bell, actions.clone())?;
        }
        let keeper = Keeper {
            gated: Gated { machines: parts.machines, gate: parts.gate, cut: None },
            copying: parts.copying,
            encoding,
            wire: parts.wire,
            policy: parts.policy,
            verify: parts.verify,
            verifier: Verifier::default(),
            disks: parts.disks,
            events: Box::new(events),
            sink: parts.events,
            inbox,
            next_epoch: parts.first_epoch,
            may_capture: false,
            in_flight: None,
            since_ns: now_ns(),
            suspended_at_ns: None,
            fresh: true,
            wanted: false,
            wanted_session: None,
            having: None,
            disk_bytes: 0,
            disk_looked_ns: 0,
            busy: Busy::default(),
            ended: false,
        };
        let thread = std::thread::Builder::new().name("vm".into()).spawn(move || keeper.run());
        let thread = thread.map_err(|e| Error::io("start the VM's thread", e))?;
        Ok(Self { actions, thread })
    }

    /// Ends it and gives the VM back.
    pub fn end(self) -> Result<Machines> {
        let _ = self.actions.send(VmAction::End);
        self.thread.join().map_err(|_| Error::VmThreadPanicked)
    }
}

/// Has the VM looked at as soon as it has sent something: else a packet would wait for the next
/// look by the clock.
fn listen(mut bell: PipeReader, actions: Sender<VmAction>) -> Result<()> {
    let listen = move || {
        let mut rings = [0; 64];
        loop {
            match bell.read(&mut rings) {
                // It ends with the gate.
                Ok(0) => break,
                Ok(_) if actions.send(VmAction::Packet).is_err() => break,
                Err(e) if e.kind() != ErrorKind::Interrupted => break,
                Ok(_) | Err(_) => {}
            }
        }
    };
    let thread = std::thread::Builder::new().name("bell".into()).spawn(listen);
    thread.map(drop).map_err(|e| Error::io("start a thread", e))
}

/// An epoch on its way.
struct InFlight {
    epoch: Epoch,
    /// What the encoder said of it; its seal is believed once the standby acknowledges.
    report: Option<EncodeReport<SentEpoch>>,
    acknowledged: bool,
    captured_ns: u64,
    reason: &'static str,
    /// How long the VM stood for it, where it was suspended already, which the capture takes for no
    /// pause of its own.
    stood_ns: Option<u64>,
    seq: u64,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Keeper {
    gated: Gated,
    copying: RamCapture,
    encoding: EncoderThread<WireSink>,
    wire: SharedWire,
    policy: Box<dyn ReplicationScheduler>,
    verify: bool,
    verifier: Verifier,
    disks: Option<(PathBuf, Vec<(String, u64)>)>,
    events: Box<dyn Fn(VmEvent) + Send>,
    sink: SharedEventSink,
    inbox: Receiver<VmAction>,
    next_epoch: Epoch,
    may_capture: bool,
    in_flight: Option<InFlight>,
    since_ns: u64,
    /// Since when the policy has it standing.
    suspended_at_ns: Option<u64>,
    /// Nothing was captured yet.
    fresh: bool,
    /// An epoch was asked for while one was on its way.
    wanted: bool,
    /// A session that is to begin, and what its standby has.
    wanted_session: Option<u64>,
    having: Option<(u64, Having)>,
    disk_bytes: u64,
    disk_looked_ns: u64,
    busy: Busy,
    ended: bool,
}

impl Keeper {
    fn run(mut self) -> Machines {
        let mut wait = LOOK_EVERY;
        loop {
            match self.inbox.recv_timeout(wait) {
                Ok(VmAction::End) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(action) => self.handle_action(action),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.mind();
            wait = self.look().min(LOOK_EVERY);
        }
        self.copying.strategies.untrack();
        self.copying.cycle.untrack();
        let _ = self.encoding.finish();
        self.gated.machines
    }

    fn tell(&self, event: VmEvent) {
        (self.events)(event);
    }

    fn handle_action(&mut self, action: VmAction) {
        match action {
            VmAction::MayCapture(may) => {
                self.may_capture = may;
                if !may {
                    self.unsuspend();
                }
            }
            VmAction::Capture { last } => self.capture(CheckpointReason::Asked.name(), last),
            VmAction::Sync { session } => {
                self.give_up(None);
                self.wanted_session = Some(session);
                self.begin();
            }
            VmAction::PageHashes { session, first, hashes } => self.have(session, first, &hashes),
            VmAction::Acknowledged { epoch } => self.acknowledged(epoch),
            VmAction::Owe { after } => {
                self.give_up(after);
                self.wire.resume(self.next_epoch);
            }
            VmAction::Stop => {
                let stopped = self
                    .gated
                    .machines
                    .members_mut()
                    .iter_mut()
                    .try_for_each(|member| member.machine.vm.qmp().stop().map(drop));
                if let Err(error) = stopped {
                    self.tell(VmEvent::CaptureFailed(Error::vm("pause the VM", error)));
                }
                self.tell(VmEvent::Stopped);
            }
            VmAction::Resume => {
                self.cont();
                self.tell(VmEvent::Resumed);
            }
            VmAction::Report(report) => self.reported(*report),
            // What to do is decided at the look that follows.
            VmAction::Packet | VmAction::End => {}
        }
    }

    fn cont(&mut self) {
        self.suspended_at_ns = None;
        for member in self.gated.machines.members_mut() {
            if let Err(error) = member.machine.vm.qmp().cont() {
                let error = Error::vm("let the VM run", error);
                self.sink.failover_event(&Event::ResumeFailed(error));
            }
        }
    }

    fn unsuspend(&mut self) {
        if self.suspended_at_ns.is_some() {
            self.cont();
        }
    }

    /// What QEMU has been up to.
    fn mind(&mut self) {
        if self.ended {
            return;
        }
        self.gated.machines.look();
        match self.gated.machines.try_wait() {
            Ok(Some(exit)) => {
                self.ended = true;
                self.may_capture = false;
                self.tell(VmEvent::Ended(exit));
            }
            Ok(None) => {}
            Err(error) => self.sink.failover_event(&Event::LookFailed(error.into())),
        }
    }

    /// What the policy wants; how long nothing is to be done.
    fn look(&mut self) -> Duration {
        if !self.may_capture || self.ended {
            return LOOK_EVERY;
        }
        let held = self.gated.gate.ask(GateRemote::look).ok().flatten().unwrap_or_default();
        let now_ns = now_ns();
        let look = self.seen(now_ns, held);
        match self.policy.look(&look) {
            ReplicationDecision::Wait { look_in_ns } => {
                if self.in_flight.is_none() {
                    self.unsuspend();
                }
                Duration::from_nanos(look_in_ns)
            }
            ReplicationDecision::Checkpoint(reason) => {
                self.capture(reason.name(), false);
                Duration::ZERO
            }
            ReplicationDecision::Suspend => {
                let stopped = self
                    .gated
                    .machines
                    .members_mut()
                    .iter_mut()
                    .try_for_each(|member| member.machine.vm.qmp().stop().map(drop));
                self.suspended_at_ns = stopped.is_ok().then_some(now_ns);
                LOOK_EVERY
            }
        }
    }

    /// What the guest has written to its disks since the newest epoch; asked for now and then.
    fn disk_bytes(&mut self, now_ns: u64) -> u64 {
        if now_ns.saturating_sub(self.disk_looked_ns) > DISK_LOOK_NS
            && let Some((storage, _)) = self.gated.machines.storage()
        {
            self.disk_looked_ns = now_ns;
            self.disk_bytes = storage.written_bytes().unwrap_or(0);
        }
        self.disk_bytes
    }

    fn seen(&mut self, now_ns: u64, held: GateLook) -> VmObservation {
        let dirty_pages = self.copying.cycle.estimate_pages().unwrap_or(0);
        VmObservation {
            now_ns,
            since_ns: self.since_ns,
            in_flight: self.in_flight.is_some(),
            dirty_pages,
            packets_held: held.fresh_frames,
            oldest_packet_ns: held.oldest_ns.map(|age| now_ns.saturating_sub(age)),
            disk_bytes_held: self.disk_bytes(now_ns),
            stopped: self.suspended_at_ns.is_some(),
            busy_ns: self.busy.ns(&mut self.gated.machines),
        }
    }

    fn capture(&mut self, reason: &'static str, last: bool) {
        if self.ended {
            return;
        }
        if self.in_flight.is_some() && !last {
            // It follows as soon as that has come.
            self.wanted = true;
            return;
        }
        let was_suspended = self.suspended_at_ns.take().is_some();
        let begun_ns = now_ns();
        let result = self.captured(reason);
        if was_suspended && !last {
            self.cont();
            if let Some(in_flight) = &mut self.in_flight {
                in_flight.stood_ns = Some(now_ns().saturating_sub(begun_ns));
            }
        }
        match result {
            Ok(event) => self.tell(event),
            Err(error) => {
                // It is asked for again at once.
                std::thread::sleep(RETRY);
                self.tell(VmEvent::CaptureFailed(error));
            }
        }
    }

    fn captured(&mut self, reason: &'static str) -> Result<VmEvent> {
        let cut = self.gated.machines.storage().map(|(disks, vms)| disks.begin(vms)).transpose();
        let cut = cut.map_err(|e| Error::vm("prepare the VM's disks", e))?;
        let epoch = self.next_epoch;
        let checks = self.verify.then(Checks::default);
        self.verifier.checks.clone_from(&checks);
        let label = EpochLabel { epoch, reason, cut, checks };
        let strategy = self.copying.strategies.get(Strategy::Auto)?;
        let captured = self.copying.cycle.capture(
            &mut self.gated,
            &mut self.verifier,
            strategy,
            self.encoding.queue(),
            label,
        );
        keyframe_kernel::priority::lower_current_thread();
        let seq = captured.as_ref().ok().copied();
        if let Some((disks, vms)) = self.gated.machines.storage() {
            disks.captured(seq, vms);
        }
        let seq = captured?;
        self.fresh = false;
        self.next_epoch = self.next_epoch.next();
        let captured_ns = now_ns();
        self.since_ns = captured_ns;
        self.disk_bytes = 0;
        let (report, acknowledged, stood_ns) = (None, false, None);
        self.in_flight =
            Some(InFlight { epoch, report, acknowledged, captured_ns, reason, stood_ns, seq });
        Ok(VmEvent::Captured { epoch, gate: self.gated.cut, reason })
    }

    fn reported(&mut self, report: EncodeReport<SentEpoch>) {
        let failed = report.outcome.as_ref().err().map(|error| error_chain(error));
        if let Some(problem) = failed {
            if self.settle(report) {
                return;
            }
            self.in_flight = None;
            // Where the connection broke, the protocol hears of it by itself.
            self.tell(VmEvent::CaptureFailed(Error::NotSent(problem)));
            return;
        }
        match &mut self.in_flight {
            Some(in_flight) if report.seq == Some(in_flight.seq) => in_flight.report = Some(report),
            _ => {
                self.settle(report);
            }
        }
        self.finish();
    }

    fn acknowledged(&mut self, epoch: Epoch) {
        if let Some(in_flight) =
            self.in_flight.as_mut().filter(|in_flight| in_flight.epoch <= epoch)
        {
            in_flight.acknowledged = true;
        }
        self.finish();
    }

    /// An epoch that is sent and acknowledged is done.
    fn finish(&mut self) {
        let done = self
            .in_flight
            .take_if(|in_flight| in_flight.acknowledged && in_flight.report.is_some());
        let Some(InFlight { epoch, report: Some(report), captured_ns, reason, stood_ns, .. }) =
            done
        else {
            return;
        };
        let sent = report.outcome.as_ref().ok().copied().unwrap_or_default();
        self.wire.acknowledged(epoch);
        self.having = None;
        self.settle(report);
        let acked = AcknowledgedEpoch {
            pages: sent.sent.pages,
            wire_bytes: sent.sent.bytes,
            pause_ns: stood_ns.unwrap_or(sent.pause_ns),
            transfer_ns: now_ns().saturating_sub(captured_ns),
            epoch_ns: sent.interval_ns,
        };
        // Where it was suspended, the look that follows has it run again, or checkpoints it as it
        // stands.
        self.policy.acknowledged(&acked);
        let report = EpochReport {
            acknowledged: Some(epoch),
            pages: acked.pages,
            wire_bytes: acked.wire_bytes,
            raw_bytes: acked.pages * PAGE_BYTES as u64,
            pause_ns: acked.pause_ns,
            transfer_ns: acked.transfer_ns,
            epoch_ns: acked.epoch_ns,
            reason,
            suspended_ns: self.suspended_at_ns.map_or(0, |at_ns| now_ns().saturating_sub(at_ns)),
            estimates: self.policy.describe(),
        };
        self.tell(VmEvent::EpochDone(Box::new(report)));
        if std::mem::take(&mut self.wanted) {
            self.capture(CheckpointReason::Asked.name(), false);
        }
    }

    /// Whatever is on its way beyond `after` does not arrive.
    fn give_up(&mut self, after: Option<Epoch>) {
        self.wanted = false;
        let Some(in_flight) = self.in_flight.take() else { return };
        if after.is_some_and(|after| in_flight.epoch <= after) {
            self.in_flight = Some(InFlight { acknowledged: true, ..in_flight });
            self.finish();
            return;
        }
        let report = in_flight
            .report
            .map(|report| EncodeReport { outcome: Err(EncodeError::Behind), ..report });
        match report {
            Some(report) => {
                self.settle(report);
            }
            // The encoder's own report has yet to come: what it says is stale then.
            None => self.copying.cycle.give_back(),
        }
        if let Some((disks, vms)) = self.gated.machines.storage() {
            disks.failed(&[in_flight.seq], vms);
        }
        self.unsuspend();
    }

    /// True where it is of an epoch that was given up.
    fn settle(&mut self, report: EncodeReport<SentEpoch>) -> bool {
        match self.copying.cycle.settle(report) {
            SettledReport::Sealed { seq, .. } => {
                if let Some((disks, vms)) = self.gated.machines.storage() {
                    disks.sealed(seq, vms);
                }
            }
            SettledReport::Failed { lost, .. } => {
                if let Some((disks, vms)) = self.gated.machines.storage() {
                    disks.failed(&lost, vms);
                }
            }
            SettledReport::Stale => return true,
        }
        false
    }
}
