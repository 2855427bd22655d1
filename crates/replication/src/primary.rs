//! The primary: runs the VM while it has the right to, and releases output when the standby holds
//! it.
//!
//! ```text
//!          Hello           first epoch           next epoch           armed
//!   Solo ────────▶ Syncing ───────────▶ Closing ───────────▶ Pairing ───────▶ Protected
//!    ▲ ▲              │ lost               │ lost               │ lost     lost │  │ SwitchOver
//!    │ └──────────────┴────────────────────┘                    ▼               │  ▼
//!    └─────────────────── right granted ◀──────────────────── asking ◀──────────┴─ Handing
//!                                                               │ a later term       │ TookOver
//!                                                               └──────▶ Ended ◀─────┘
//! ```
//!
//! An epoch counts once the standby has acknowledged it. After the first one, output is held. The
//! witness arms the standby, or a heartbeat that it answers (fencing); without an arbiter it counts
//! as armed at once (manual). The standby is lost if the lease is over, if it or its data path is
//! silent, if epochs fail for too long, or if it reports that it is sick. An asking primary asks
//! the witness, runs the fence hook, or disarms the standby.
//!
//! A primary is *exposed* from the moment in which the standby may be allowed to take over. From
//! then on it runs its VM only while its lease lasts, which answers of the standby renew. The
//! exposure ends when the primary knows that the standby can no longer take over. Asking for the
//! right to run alone goes on while a lease still lasts, or lasts again: the VM runs meanwhile.
//! After a hand-over no lease lets the VM run on this node.
//!
//! Invariants: `SetRunPermit` precedes the actions that expose the primary; held output is released
//! by an acknowledgement or with the right to run alone; a deposed primary never releases it. Each
//! `AskWitness` gets one `Witness` or one `WitnessLost`.

mod arbitration;
mod interface;
mod peer;
#[cfg(test)]
mod tests;

use crate::{
    Arbitration, ConnectedPaths, Epoch, NodeId, Notice, PeerMessage, ReplicationConfig, SessionId,
    StandbyLossReason, Term, WitnessRequest,
};

pub use interface::{PrimaryAction, PrimaryEvent, PrimaryStart, PrimaryState, RunPermit};

/// The phase of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Solo,
    /// The session's first epoch, once it is captured.
    Syncing {
        first: Option<Epoch>,
    },
    /// The first epoch whose output is held from its begin, once it is captured.
    Closing {
        gate: Option<Epoch>,
    },
    Pairing,
    Protected,
    Handing(Handing),
    Ended,
}

/// The steps of a switch-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handing {
    /// The VM is being paused.
    Stopping,
    /// The last epoch, once it is captured.
    Last(Option<Epoch>),
    /// The standby was told to run the VM.
    Handed { epoch: Epoch, since_ns: u64 },
}

/// The standby of a session.
#[derive(Clone, Debug)]
struct Peer {
    node: NodeId,
    instance: u64,
    session: SessionId,
    heard_ns: u64,
    /// When the data path went down; `None` while it is up.
    no_data_ns: Option<u64>,
    captured: Option<Epoch>,
    acked: Option<Epoch>,
}

/// The request that the witness has not answered yet.
#[derive(Clone, Copy, Debug)]
struct OpenRequest {
    request: WitnessRequest,
    /// The exposure before it, for a request that was never sent.
    before: Exposure,
}

/// Whether, and by which requests, the standby may have been allowed to take over.
#[derive(Clone, Copy, Debug, Default)]
struct Exposure {
    /// The standby may be allowed to take over.
    is_exposed: bool,
    /// The newest generation at which this node asked for a pairing.
    paired_at: Option<u64>,
    /// This node has asked for the right to run alone, and has no answer.
    solo_sent: bool,
}

/// The state machine of a primary. It does no I/O: it turns events into actions.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub struct Primary {
    config: ReplicationConfig,
    term: Term,
    phase: Phase,
    peer: Option<Peer>,
    paths: ConnectedPaths,
    now_ns: u64,
    /// The number of the newest heartbeat.
    sequence: u64,
    /// The number of sessions so far.
    sessions: u64,
    heartbeat_at_ns: u64,
    lease_until_ns: u64,
    exposure: Exposure,
    /// The pairing that heartbeats carry.
    pairing: u64,
    /// The first heartbeat that disarms the standby: an answer to it or to a later one with pairing
    /// 0 means that the standby can no longer take over.
    disarm_from: Option<u64>,
    /// The reason why this node asks for the right to run alone, if it does.
    asking: Option<StandbyLossReason>,
    /// The newest generation of the witness' state that this node has seen.
    generation: u64,
    open_request: Option<OpenRequest>,
    ask_at_ns: u64,
    /// The witness does not know this term yet.
    unrecorded: bool,
    /// The witness may not know that this node runs alone.
    unsettled: bool,
    witness_silent: bool,
    /// The fence hook runs.
    fencing: bool,
    fence_at_ns: u64,
    /// The number of times that the fence hook has failed.
    fence_failed: u32,
    running: bool,
    /// `StopVm` actions without their `VmStopped` or `VmStopFailed` event.
    pending_stops: u32,
    permit: RunPermit,
    /// Output is held.
    holding: bool,
    may_capture: bool,
    vm_ended: bool,
    /// No capture can succeed.
    capture_blocked: bool,
    /// When the first of the failed captures began that no acknowledged epoch has followed.
    failing_since_ns: Option<u64>,
    out: Vec<PrimaryAction>,
}

impl Primary {
    /// Creates a primary that runs its VM alone. `start` tells how the node became primary.
    pub fn new(config: ReplicationConfig, start: PrimaryStart) -> Self {
        let (term, forced) = match start {
            PrimaryStart::First => (Term::FIRST, false),
            PrimaryStart::Attached { term } => (term, false),
            PrimaryStart::TakenOver { term, forced } => (term, forced),
        };
        Self {
            config,
            term,
            phase: Phase::Solo,
            peer: None,
            paths: ConnectedPaths::default(),
            now_ns: 0,
            sequence: 0,
            sessions: 0,
            heartbeat_at_ns: 0,
            lease_until_ns: 0,
            exposure: Exposure::default(),
            pairing: 0,
            disarm_from: None,
            asking: None,
            generation: 0,
            open_request: None,
            ask_at_ns: 0,
            unrecorded: forced && config.arbitration == Arbitration::Witness,
            unsettled: false,
            witness_silent: false,
            fencing: false,
            fence_at_ns: 0,
            fence_failed: 0,
            running: true,
            pending_stops: 0,
            permit: RunPermit::Free,
            holding: false,
            may_capture: false,
            vm_ended: false,
            capture_blocked: false,
            failing_since_ns: None,
            out: Vec::new(),
        }
    }

    /// Handles `event` at the time `now_ns` of this node's monotonic clock, in nanoseconds. Returns
    /// the actions, which the driver must carry out in their order. Returns none once the primary
    /// has ended.
    pub fn handle(&mut self, now_ns: u64, event: PrimaryEvent) -> Vec<PrimaryAction> {
        self.now_ns = self.now_ns.max(now_ns);
        if self.phase == Phase::Ended {
            return Vec::new();
        }
        match event {
            PrimaryEvent::Tick | PrimaryEvent::VmResumed => {}
            PrimaryEvent::PathUp(path) => self.connect_path(path),
            PrimaryEvent::PathDown(path) => self.disconnect_path(path),
            PrimaryEvent::Peer { path, message } => self.handle_message(path, message),
            PrimaryEvent::Witness(reply) => self.handle_witness_reply(reply),
            PrimaryEvent::WitnessLost { sent } => self.handle_witness_loss(sent),
            PrimaryEvent::Captured { epoch } => self.record_capture(epoch),
            PrimaryEvent::CaptureFailed => {
                self.failing_since_ns.get_or_insert(self.now_ns);
                self.retry_capture();
            }
            PrimaryEvent::CaptureBlocked(reason) => self.block_capture(reason),
            PrimaryEvent::CaptureUnblocked => self.capture_blocked = false,
            PrimaryEvent::VmStopped => self.handle_vm_stop(),
            PrimaryEvent::VmStopFailed => self.handle_failed_stop(),
            PrimaryEvent::Fenced(off) => self.handle_fence_result(off),
            PrimaryEvent::SwitchOver => self.begin_switch_over(),
            PrimaryEvent::GoSolo => {
                self.unsettled = self.config.arbitration == Arbitration::Witness;
                self.become_solo(StandbyLossReason::Command);
            }
            PrimaryEvent::VmEnded => self.handle_vm_end(),
        }
        let steps = [
            Self::check_losses,
            Self::arm_standby,
            Self::ask_witness,
            Self::start_fencing,
            Self::send_heartbeat,
            Self::update_vm_state,
        ];
        for step in steps {
            if self.phase != Phase::Ended {
                step(self);
            }
        }
        std::mem::take(&mut self.out)
    }

    /// Returns the time of this node's clock, in nanoseconds, at which a `Tick` is due; `u64::MAX`
    /// if none is.
    pub fn deadline_ns(&self) -> u64 {
        if self.phase == Phase::Ended {
            return u64::MAX;
        }
        let mut at =
            if self.paths.any() || self.peer.is_some() { self.heartbeat_at_ns } else { u64::MAX };
        if let Some(peer) = &self.peer {
            at = at.min(
                peer.no_data_ns.map_or(u64::MAX, |since| since.saturating_add(self.config.data_ns)),
            );
            at = at.min(peer.heard_ns.saturating_add(self.config.detection_ns));
        }
        if self.exposure.is_exposed && self.running {
            at = at.min(self.lease_until_ns);
        }
        if self.open_request.is_none() && self.next_request().is_some() {
            at = at.min(self.ask_at_ns);
        }
        if self.needs_fence() && !self.fencing {
            at = at.min(self.fence_at_ns);
        }
        // An action that is due already waits for another event.
        if at <= self.now_ns { self.now_ns.saturating_add(self.config.heartbeat_ns) } else { at }
    }

    /// Returns the primary's state, as users see it.
    pub fn state(&self) -> PrimaryState {
        match self.phase {
            Phase::Ended => PrimaryState::Ended,
            Phase::Handing(Handing::Handed { .. }) => PrimaryState::HandedOver,
            Phase::Handing(_) => PrimaryState::SwitchingOver,
            _ if !self.running => PrimaryState::Stopped,
            Phase::Solo => PrimaryState::Solo,
            Phase::Syncing { .. } => PrimaryState::Syncing,
            Phase::Closing { .. } => PrimaryState::Closing,
            Phase::Pairing => PrimaryState::Pairing,
            Phase::Protected => PrimaryState::Protected,
        }
    }

    /// Returns true if this node asks for the right to run the VM without its standby.
    pub fn is_leaving_standby(&self) -> bool {
        self.asking.is_some()
    }

    /// Returns the term in which this node runs the VM.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Returns the session with a standby; `None` if there is none.
    pub fn session(&self) -> Option<SessionId> {
        self.peer.as_ref().map(|peer| peer.session)
    }

    /// Returns the newest epoch of this session that the standby has acknowledged; `None` before
    /// the first one, and without a session.
    pub fn acknowledged(&self) -> Option<Epoch> {
        self.peer.as_ref().and_then(|peer| peer.acked)
    }

    fn notify(&mut self, notice: Notice) {
        self.out.push(PrimaryAction::Notify(notice));
    }

    fn has_lease(&self) -> bool {
        self.now_ns < self.lease_until_ns
    }

    fn may_run(&self) -> bool {
        match self.phase {
            Phase::Ended | Phase::Handing(_) => false,
            _ => !self.exposure.is_exposed || self.has_lease(),
        }
    }

    /// Sets the run permit, then whether the VM runs, then whether it may be captured.
    fn update_vm_state(&mut self) {
        let permit = match () {
            () if !self.may_run() => RunPermit::Stopped,
            () if self.exposure.is_exposed => RunPermit::Until(self.lease_until_ns),
            () => RunPermit::Free,
        };
        if permit != self.permit {
            self.permit = permit;
            self.out.insert(0, PrimaryAction::SetRunPermit(permit));
        }
        let run = self.may_run();
        if run != self.running {
            self.running = run;
            if run {
                self.out.push(PrimaryAction::ResumeVm);
                if matches!(self.phase, Phase::Pairing | Phase::Protected) {
                    self.notify(Notice::Resumed);
                }
            } else {
                self.out.push(PrimaryAction::StopVm);
                self.pending_stops += 1;
                if !matches!(self.phase, Phase::Handing(_)) {
                    self.notify(Notice::Stopped);
                }
            }
        }
        let data = self.peer.as_ref().is_some_and(|peer| peer.no_data_ns.is_none());
        let phase = matches!(self.phase, Phase::Closing { .. } | Phase::Pairing | Phase::Protected);
        let may = data && phase && !self.vm_ended;
        if may != self.may_capture {
            self.may_capture = may;
            self.out.push(PrimaryAction::MayCapture(may));
        }
    }

    fn handle_vm_stop(&mut self) {
        self.pending_stops = self.pending_stops.saturating_sub(1);
        if self.pending_stops > 0 {
            return;
        }
        if self.phase == Phase::Handing(Handing::Stopping) {
            self.phase = Phase::Handing(Handing::Last(None));
            self.out.push(PrimaryAction::Capture { last: true });
        } else if self.running && self.may_run() {
            // The guard has stopped the VM just before the standby's answer renewed the lease.
            self.out.push(PrimaryAction::ResumeVm);
        }
    }

    /// Ends a switch-over whose VM could not be paused.
    fn handle_failed_stop(&mut self) {
        self.pending_stops = self.pending_stops.saturating_sub(1);
        if self.pending_stops > 0 {
            return;
        }
        if self.phase == Phase::Handing(Handing::Stopping) {
            self.abort_switch_over();
        } else if self.running && self.may_run() {
            // It may be paused nevertheless.
            self.out.push(PrimaryAction::ResumeVm);
        }
    }

    fn record_capture(&mut self, epoch: Epoch) {
        let Some(peer) = &mut self.peer else { return };
        peer.captured = Some(epoch);
        match &mut self.phase {
            Phase::Syncing { first: at @ None }
            | Phase::Closing { gate: at @ None }
            | Phase::Handing(Handing::Last(at @ None)) => *at = Some(epoch),
            _ => {}
        }
    }

    fn retry_capture(&mut self) {
        match (self.phase, self.session()) {
            (Phase::Syncing { first: None }, Some(session)) => {
                self.out.push(PrimaryAction::BeginSync { session });
            }
            (Phase::Closing { gate: None }, _) => {
                self.out.push(PrimaryAction::Capture { last: false });
            }
            (Phase::Handing(Handing::Last(None)), _) => self.abort_switch_over(),
            _ => {}
        }
    }

    /// Handles the acknowledgement of `epoch` and all epochs before it.
    fn handle_acknowledgement(&mut self, epoch: Epoch) {
        let Some(peer) = &mut self.peer else { return };
        if peer.captured < Some(epoch) || peer.acked >= Some(epoch) {
            return;
        }
        peer.acked = Some(epoch);
        self.failing_since_ns = None;
        let session = peer.session;
        if self.holding {
            self.out.push(PrimaryAction::Release { epoch });
        }
        match self.phase {
            Phase::Syncing { first: Some(first) } if first <= epoch => {
                self.phase = Phase::Closing { gate: None };
                self.holding = true;
                self.out
                    .extend([PrimaryAction::HoldOutput, PrimaryAction::Capture { last: false }]);
            }
            Phase::Closing { gate: Some(gate) } if gate <= epoch => self.phase = Phase::Pairing,
            Phase::Handing(Handing::Last(Some(last))) if last <= epoch => {
                self.phase = Phase::Handing(Handing::Handed { epoch: last, since_ns: self.now_ns });
                self.broadcast(&PeerMessage::HandOver { session, epoch: last });
            }
            _ => {}
        }
    }

    /// Gives the standby up, because it would get no further epoch.
    fn block_capture(&mut self, reason: String) {
        self.capture_blocked = true;
        let why = StandbyLossReason::NotCapturable(reason);
        match &self.peer {
            Some(_) => self.lose_standby(why),
            None => self.notify(Notice::Unprotected(why)),
        }
    }

    fn begin_switch_over(&mut self) {
        let data = self.peer.as_ref().is_some_and(|peer| peer.no_data_ns.is_none());
        if self.phase == Phase::Protected
            && self.asking.is_none()
            && self.running
            && data
            && !self.vm_ended
        {
            self.phase = Phase::Handing(Handing::Stopping);
        } else if !matches!(self.phase, Phase::Handing(_)) {
            self.notify(Notice::CannotSwitchOver);
        }
    }

    fn abort_switch_over(&mut self) {
        self.phase = Phase::Protected;
        self.notify(Notice::SwitchOverFailed);
    }

    /// The VM has shut down in good order.
    fn handle_vm_end(&mut self) {
        self.vm_ended = true;
        self.notify(Notice::VmEnded);
        match self.peer.as_ref().map(|peer| peer.session) {
            Some(session) => {
                self.broadcast(&PeerMessage::Bye { session });
                if !self.holding {
                    self.finish();
                }
            }
            None => self.finish(),
        }
    }

    /// Ends the primary of a VM that has ended and that the standby can no longer take over.
    fn finish(&mut self) {
        self.phase = Phase::Ended;
        if std::mem::take(&mut self.holding) {
            self.out.push(PrimaryAction::ReleaseAll);
        }
        self.out.push(PrimaryAction::Ended { deposed_by: None });
    }

    /// Ends the primary because another node has the right to run the VM.
    fn end_as_deposed(&mut self, term: Term) {
        if self.phase == Phase::Ended {
            return;
        }
        self.phase = Phase::Ended;
        self.peer = None;
        self.out.extend([
            PrimaryAction::SetRunPermit(RunPermit::Stopped),
            PrimaryAction::KillVm,
            PrimaryAction::Notify(Notice::Deposed(term)),
            PrimaryAction::Ended { deposed_by: Some(term) },
        ]);
    }
}
