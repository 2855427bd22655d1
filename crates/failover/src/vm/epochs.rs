//! The loop of the VM's thread: takes epochs, and books or gives up each one.
//!
//! Invariants: one epoch is in flight at most; pages of an epoch that the standby does not
//! acknowledge are owed to the next.

use super::{
    CapturedEpoch, EpochReport, MachineDescription, ProtectedVm, ProtectedVmEvent, VmAction,
};
use crate::error::{Error, with_fix};
use crate::event::{FailoverEvent, SharedFailoverEventSink};
use crate::resync::RemotePageHashes;
use crate::sending::{SentEpoch, SharedWire};
use keyframe_capture::EncodeReport;
use keyframe_scheduling::replication::{
    AcknowledgedEpoch, EpochReason, ReplicationDecision, ReplicationScheduler, VmObservation,
};
use keyframe_units::{Epoch, PAGE_BYTES, error_chain};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// The time between two checks of the VM, if nothing else wakes the thread.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The wait after a capture that failed: the protocol asks for another at once.
const RETRY: Duration = Duration::from_millis(50);
/// The wait doubles with each further failure, up to this.
const RETRY_MAX: Duration = Duration::from_millis(800);
/// How often a VM that cannot be captured is looked at, in nanoseconds.
const RENEW_EVERY_NS: u64 = 1_000_000_000;

/// The parts of the loop that captures a VM into epochs.
pub struct LoopParts<V> {
    /// The VM.
    pub vm: V,
    /// The connections to the standby.
    pub wire: SharedWire,
    /// The policy that decides when epochs are taken.
    pub policy: Box<dyn ReplicationScheduler>,
    /// The number of the first epoch.
    pub first_epoch: Epoch,
    /// The function that receives the loop's events.
    pub events: Box<dyn Fn(ProtectedVmEvent) + Send>,
    /// Receives errors of captures.
    pub sink: SharedFailoverEventSink,
    /// A monotonic clock that returns nanoseconds.
    pub clock: Box<dyn Fn() -> u64 + Send>,
}

/// An epoch on its way.
struct InFlight {
    epoch: Epoch,
    /// The encoder's report. It counts once the standby has acknowledged the epoch.
    report: Option<EncodeReport<SentEpoch>>,
    acknowledged: bool,
    captured_ns: u64,
    reason: &'static str,
    /// The pause of the VM, in nanoseconds, if the policy suspended it before the capture: the
    /// capture itself then counts no pause.
    stood_ns: Option<u64>,
    seq: u64,
}

/// The loop that captures a VM into epochs.
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub struct VmLoop<V> {
    pub(super) vm: V,
    pub(super) wire: SharedWire,
    policy: Box<dyn ReplicationScheduler>,
    events: Box<dyn Fn(ProtectedVmEvent) + Send>,
    sink: SharedFailoverEventSink,
    clock: Box<dyn Fn() -> u64 + Send>,
    pub(super) next_epoch: Epoch,
    /// The policy may take epochs.
    may_capture: bool,
    in_flight: Option<InFlight>,
    /// When the capture of the newest epoch began.
    since_ns: u64,
    /// The time since which the policy keeps the VM suspended.
    suspended_at_ns: Option<u64>,
    /// An epoch was asked for while another was in flight.
    is_wanted: bool,
    /// A session that is to begin, and the pages that its standby holds.
    pub(super) wanted_session: Option<u64>,
    pub(super) remote: Option<(u64, RemotePageHashes)>,
    /// The reason why no capture can succeed now, and when that is looked at again.
    blocked: Option<Blocked>,
    /// The machine is not that of the session's standby: nothing is captured before the next
    /// session.
    pub(super) is_session_void: bool,
    /// The number of captures that have failed since the last one that did not.
    failures: u32,
    ended: bool,
}

/// The reason why no capture can succeed.
struct Blocked {
    /// The reason that was told.
    told: Option<String>,
    look_at_ns: u64,
}

impl<V: ProtectedVm> VmLoop<V> {
    /// Creates the loop from its parts.
    pub fn new(parts: LoopParts<V>) -> Self {
        let since_ns = (parts.clock)();
        let is_blocked = parts.vm.outdated().is_some();
        Self {
            vm: parts.vm,
            wire: parts.wire,
            policy: parts.policy,
            events: parts.events,
            sink: parts.sink,
            clock: parts.clock,
            next_epoch: parts.first_epoch,
            may_capture: false,
            in_flight: None,
            since_ns,
            suspended_at_ns: None,
            is_wanted: false,
            wanted_session: None,
            remote: None,
            blocked: is_blocked.then_some(Blocked { told: None, look_at_ns: since_ns }),
            is_session_void: false,
            failures: 0,
            ended: false,
        }
    }

    /// Runs until [`VmAction::End`] arrives or `inbox` closes, and returns the VM.
    pub fn run(mut self, inbox: &Receiver<VmAction>) -> V {
        let mut wait = LOOK_EVERY;
        loop {
            let action = match inbox.recv_timeout(wait) {
                Ok(VmAction::End) | Err(RecvTimeoutError::Disconnected) => return self.vm,
                Ok(action) => Some(action),
                Err(RecvTimeoutError::Timeout) => None,
            };
            wait = self.step(action);
        }
    }

    /// Handles `action`, if there is one, and looks at the VM. Returns the longest time until the
    /// next call is due, if no action comes before.
    pub fn step(&mut self, action: Option<VmAction>) -> Duration {
        if let Some(action) = action {
            self.handle_action(action);
        }
        self.poll_end();
        self.renew_if_due();
        self.look().min(LOOK_EVERY)
    }

    pub(super) fn tell(&self, event: ProtectedVmEvent) {
        (self.events)(event);
    }

    fn now_ns(&self) -> u64 {
        (self.clock)()
    }

    fn handle_action(&mut self, action: VmAction) {
        match action {
            VmAction::MayCapture(may) => {
                self.may_capture = may;
                if !may {
                    self.unsuspend();
                }
            }
            VmAction::Capture { last } => self.capture(EpochReason::Asked.name(), last),
            VmAction::Sync { session } => {
                self.give_up(None);
                self.wanted_session = Some(session);
                self.begin_wanted_session();
            }
            VmAction::PageHashes { session, first, hashes } => {
                self.take_page_hashes(session, first, &hashes);
            }
            VmAction::Acknowledged { epoch } => self.acknowledged(epoch),
            VmAction::Owe { after } => {
                self.give_up(after);
                self.wire.resume(self.next_epoch);
            }
            VmAction::Stop => {
                // From here on the protocol alone lets the VM run.
                (self.may_capture, self.suspended_at_ns) = (false, None);
                let event = match self.vm.pause() {
                    Ok(()) => ProtectedVmEvent::Stopped,
                    Err(error) => ProtectedVmEvent::StopFailed(error),
                };
                self.tell(event);
            }
            VmAction::Resume => {
                self.resume();
                self.tell(ProtectedVmEvent::Resumed);
            }
            VmAction::Report(report) => self.reported(*report),
            // The look that follows decides.
            VmAction::Packet | VmAction::End => {}
        }
    }

    fn resume(&mut self) {
        self.suspended_at_ns = None;
        self.vm.resume();
    }

    fn unsuspend(&mut self) {
        if self.suspended_at_ns.is_some() {
            self.resume();
        }
    }

    fn poll_end(&mut self) {
        if self.ended {
            return;
        }
        match self.vm.poll_end() {
            Ok(Some(exit)) => {
                self.ended = true;
                self.may_capture = false;
                self.tell(ProtectedVmEvent::Ended(exit));
            }
            Ok(None) => {}
            Err(error) => self.sink.failover_event(&FailoverEvent::LookFailed(error)),
        }
    }

    /// Carries out the policy's decision. Returns the time until the next decision.
    fn look(&mut self) -> Duration {
        if !self.may_capture || self.ended || self.is_blocked() || self.is_session_void {
            return LOOK_EVERY;
        }
        let now_ns = self.now_ns();
        let observation = self.observation(now_ns);
        match self.policy.look(&observation) {
            ReplicationDecision::Wait { look_in_ns } => {
                if self.in_flight.is_none() {
                    self.unsuspend();
                }
                Duration::from_nanos(look_in_ns)
            }
            ReplicationDecision::Checkpoint(reason) => {
                // Counting the dirty pages took a part of the interval.
                self.capture_since(now_ns, reason.name(), false);
                Duration::ZERO
            }
            ReplicationDecision::Suspend => {
                match self.vm.pause() {
                    Ok(()) => self.suspended_at_ns = Some(now_ns),
                    // It may be paused nevertheless, and no capture would resume it.
                    Err(_) => self.resume(),
                }
                LOOK_EVERY
            }
        }
    }

    fn observation(&mut self, now_ns: u64) -> VmObservation {
        let activity = self.vm.observe(now_ns);
        VmObservation {
            now_ns,
            since_ns: self.since_ns,
            in_flight: self.in_flight.is_some(),
            dirty_pages: activity.dirty_pages,
            packets_held: activity.held.fresh_frames,
            oldest_packet_ns: activity.held.oldest_ns.map(|age| now_ns.saturating_sub(age)),
            disk_bytes_held: activity.disk_bytes,
            stopped: self.suspended_at_ns.is_some(),
            busy_ns: activity.busy_ns,
        }
    }

    /// Takes an epoch. With `last` the VM is paused and stays so; else an epoch that is in flight
    /// comes first.
    pub(super) fn capture(&mut self, reason: &'static str, last: bool) {
        self.capture_since(self.now_ns(), reason, last);
    }

    /// Takes an epoch, as [`Self::capture`], whose capture began at `begun_ns` with the look that
    /// decided it.
    fn capture_since(&mut self, begun_ns: u64, reason: &'static str, last: bool) {
        if self.ended || self.is_blocked() || self.is_session_void {
            return;
        }
        if self.in_flight.is_some() && !last {
            self.is_wanted = true;
            return;
        }
        let was_suspended = self.suspended_at_ns.take().is_some();
        let captured = self.vm.capture(self.next_epoch, reason);
        let event = captured.map(|captured| self.record_capture(captured, begun_ns, reason));
        if was_suspended && !last {
            self.resume();
            let stood_ns = self.now_ns().saturating_sub(begun_ns);
            if let Some(in_flight) = &mut self.in_flight {
                in_flight.stood_ns = Some(stood_ns);
            }
        }
        match event {
            Ok(event) => {
                self.failures = 0;
                self.tell(event);
            }
            Err(error) => self.capture_failed(error),
        }
    }

    /// Handles a capture that failed, or could not begin.
    pub(super) fn capture_failed(&mut self, error: Error) {
        if let Some(reason) = self.vm.outdated() {
            return self.block(&reason);
        }
        std::thread::sleep(RETRY.saturating_mul(1 << self.failures.min(4)).min(RETRY_MAX));
        self.failures += 1;
        self.tell(ProtectedVmEvent::CaptureFailed(error));
    }

    /// True if no capture can succeed now.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked.is_some()
    }

    /// Gives up the session with the standby for `reason`, and begins to capture the VM anew.
    fn block(&mut self, reason: &str) {
        self.give_up(None);
        self.unsuspend();
        self.wanted_session = None;
        self.blocked = Some(Blocked { told: None, look_at_ns: self.now_ns() });
        match self.vm.renew() {
            Ok(machine) => {
                self.tell(ProtectedVmEvent::CaptureBlocked {
                    reason: format!("{reason}; a standby gets the whole VM as it is now"),
                });
                self.unblock(machine);
            }
            Err(error) => self.stay_blocked(&error),
        }
    }

    fn renew_if_due(&mut self) {
        let now_ns = self.now_ns();
        if self.ended || self.blocked.as_ref().is_none_or(|blocked| blocked.look_at_ns > now_ns) {
            return;
        }
        match self.vm.renew() {
            Ok(machine) => self.unblock(machine),
            Err(error) => self.stay_blocked(&error),
        }
    }

    fn unblock(&mut self, machine: Option<MachineDescription>) {
        self.blocked = None;
        if machine.is_some() {
            // Its standby has another machine.
            (self.wanted_session, self.remote, self.is_session_void) = (None, None, true);
        }
        self.tell(ProtectedVmEvent::CaptureUnblocked(machine.map(Box::new)));
        self.begin_wanted_session();
    }

    /// Tells why no capture can succeed, unless that was told.
    fn stay_blocked(&mut self, error: &Error) {
        let (reason, look_at_ns) = (with_fix(error), self.now_ns() + RENEW_EVERY_NS);
        let told = self.blocked.take().and_then(|blocked| blocked.told);
        if told.as_ref() != Some(&reason) {
            self.tell(ProtectedVmEvent::CaptureBlocked { reason: reason.clone() });
        }
        self.blocked = Some(Blocked { told: Some(reason), look_at_ns });
    }

    fn record_capture(
        &mut self,
        captured: CapturedEpoch,
        begun_ns: u64,
        reason: &'static str,
    ) -> ProtectedVmEvent {
        let epoch = self.next_epoch;
        self.next_epoch = epoch.next();
        let captured_ns = self.now_ns();
        self.since_ns = begun_ns;
        let (report, acknowledged, stood_ns, seq) = (None, false, None, captured.seq);
        self.in_flight =
            Some(InFlight { epoch, report, acknowledged, captured_ns, reason, stood_ns, seq });
        ProtectedVmEvent::Captured { epoch, gate: captured.gate, reason }
    }

    fn reported(&mut self, report: EncodeReport<SentEpoch>) {
        if let Err(error) = &report.outcome {
            let problem = error_chain(error);
            if self.vm.settle(report) {
                return;
            }
            self.in_flight = None;
            // If the connection broke, the protocol learns it from its reader.
            self.tell(ProtectedVmEvent::CaptureFailed(Error::NotSent(problem)));
            return;
        }
        match &mut self.in_flight {
            Some(in_flight) if report.seq == Some(in_flight.seq) => in_flight.report = Some(report),
            _ => {
                self.vm.settle(report);
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

    /// Books the epoch in flight once it is sent and acknowledged.
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
        self.remote = None;
        self.vm.settle(report);
        let now_ns = self.now_ns();
        let acked = AcknowledgedEpoch {
            pages: sent.sent.pages,
            wire_bytes: sent.sent.bytes,
            pause_ns: stood_ns.unwrap_or(sent.pause_ns),
            transfer_ns: now_ns.saturating_sub(captured_ns),
            epoch_ns: sent.interval_ns,
        };
        // If the VM is suspended, the look that follows resumes it or captures it as it is.
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
            suspended_ns: self.suspended_at_ns.map_or(0, |at_ns| now_ns.saturating_sub(at_ns)),
            estimates: self.policy.describe(),
        };
        self.tell(ProtectedVmEvent::EpochDone(Box::new(report)));
        if std::mem::take(&mut self.is_wanted) {
            self.capture(EpochReason::Asked.name(), false);
        }
    }

    /// Gives up the epoch in flight, unless the standby has it: it has all up to `after`.
    fn give_up(&mut self, after: Option<Epoch>) {
        self.is_wanted = false;
        let Some(in_flight) = self.in_flight.take() else { return };
        if after.is_some_and(|after| in_flight.epoch <= after) {
            self.in_flight = Some(InFlight { acknowledged: true, ..in_flight });
            self.finish();
            return;
        }
        self.vm.give_up(in_flight.seq, in_flight.report);
        self.unsuspend();
    }
}
