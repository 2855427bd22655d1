//! The standby: receives epochs, holds the newest whole one, and takes over when it has the right.
//!
//! ```text
//!            HelloAck                silence, or a command          granted
//!   Alone ─────────────▶ Following ─────────────────────▶ Asking ───────────▶ Active
//!     ▲                      │ no epoch, no right            │ refused
//!     └──────────────────────┴───────────────────────────────┘  (the session is left for good)
//! ```
//!
//! The witness, the fence hook, a hand-over or a forced command grants the right to run the VM.
//!
//! Only a standby that follows answers heartbeats. So a standby that asks has not answered for the
//! detection time, and the primary's lease has ended. It may follow again as long as no request has
//! left this host; after that, the witness may have granted the request.
//!
//! With a witness, the standby asks at the generation of the pairing, which heartbeats carry; if
//! none did, it asks for the state first. With the fence hook alone, it may take over only if the
//! last heartbeat said that output is held (`pairing`).
//!
//! Invariants: an epoch is acknowledged after it is applied; `Activate` comes once, names the
//! newest applied epoch, and no `Apply` is open then. Not here: whether an epoch is whole; the
//! driver verifies that before it reports `EpochComplete`.

mod interface;
mod takeover;
#[cfg(test)]
mod tests;

use crate::{
    Arbitration, ConnectedPaths, Epoch, Hello, NodeRole, Notice, PeerMessage, PeerRefusal,
    ReplicationConfig, SessionId, Term, WitnessRequest,
};

pub use interface::{StandbyAction, StandbyEvent, StandbyState};

/// A standby that was sick greets again after this many detection times.
const SICK_WAIT_DETECTIONS: u64 = 10;

/// The phase of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Alone,
    Following,
    /// It answers no heartbeat, so that the primary's lease ends.
    Leaving,
    Asking,
    /// It has the right, and waits until the open `Apply` actions have ended.
    Granted {
        forced: bool,
    },
    Active,
}

/// The state machine of a standby. It does no I/O: it turns events into actions.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub struct Standby {
    config: ReplicationConfig,
    term: Term,
    phase: Phase,
    session: Option<SessionId>,
    /// The session that it gave up last.
    left: Option<SessionId>,
    paths: ConnectedPaths,
    now_ns: u64,
    /// The number of the newest heartbeat.
    sequence: u64,
    pairing: u64,
    /// When the newest message of the session arrived.
    heard_ns: u64,
    /// This node was stalled, and no message has arrived since.
    graced: bool,
    /// The newest applied epoch, of any session.
    held: Option<Epoch>,
    /// The newest epoch of this session that arrived whole.
    complete: Option<Epoch>,
    /// The newest epoch of this session that is applied.
    applied: Option<Epoch>,
    /// The number of epochs that are being applied.
    applying: u32,
    /// The reason why it can take no more epochs of this session, if it cannot.
    sick: Option<String>,
    hello_at_ns: u64,
    open_request: Option<WitnessRequest>,
    ask_at_ns: u64,
    /// A request that the witness may grant has left this host.
    sent: bool,
    /// The primary has handed the VM over.
    handed: bool,
    witness_silent: bool,
    /// The fence hook runs.
    fencing: bool,
    fence_at_ns: u64,
    fence_failed: u32,
    out: Vec<StandbyAction>,
}

impl Standby {
    /// Creates a standby that no primary has accepted yet. `term` is the newest that this host has
    /// seen, or 0. `held` is an epoch that the host holds from an earlier process, or `None`; the
    /// standby takes over with it only by force.
    pub fn new(config: ReplicationConfig, term: Term, held: Option<Epoch>) -> Self {
        Self {
            config,
            term,
            phase: Phase::Alone,
            session: None,
            left: None,
            paths: ConnectedPaths::default(),
            now_ns: 0,
            sequence: 0,
            pairing: 0,
            heard_ns: 0,
            graced: false,
            held,
            complete: None,
            applied: None,
            applying: 0,
            sick: None,
            hello_at_ns: 0,
            open_request: None,
            ask_at_ns: 0,
            sent: false,
            handed: false,
            witness_silent: false,
            fencing: false,
            fence_at_ns: 0,
            fence_failed: 0,
            out: Vec::new(),
        }
    }

    /// Handles `event` at the time `now_ns` of this node's monotonic clock, in nanoseconds. Returns
    /// the actions, which the driver must carry out in their order.
    pub fn handle(&mut self, now_ns: u64, event: StandbyEvent) -> Vec<StandbyAction> {
        self.grant_grace(now_ns.saturating_sub(self.now_ns));
        self.now_ns = self.now_ns.max(now_ns);
        match event {
            StandbyEvent::Tick => {}
            StandbyEvent::PathUp(path) if path >= self.config.paths => {}
            StandbyEvent::PathUp(path) => {
                self.paths.set(path, true);
                if path == 0 && self.session.is_some() {
                    self.out.push(StandbyAction::DiscardPartial);
                }
                if matches!(self.phase, Phase::Alone | Phase::Following) {
                    self.greet(path);
                }
            }
            StandbyEvent::PathDown(path) => self.paths.set(path, false),
            StandbyEvent::Peer { path, message } => self.handle_message(path, &message),
            StandbyEvent::Witness(reply) => self.handle_witness_reply(reply),
            StandbyEvent::WitnessLost { sent } => self.handle_witness_loss(sent),
            StandbyEvent::EpochComplete { session, epoch, after } => {
                self.handle_complete_epoch(session, epoch, after);
            }
            StandbyEvent::Applied { epoch } => self.handle_applied_epoch(epoch),
            StandbyEvent::ApplyFailed { reason } => self.handle_apply_failure(reason),
            StandbyEvent::DataFailed { reason } => self.take_no_more(reason),
            StandbyEvent::Fenced(off) => self.handle_fence_result(off),
            StandbyEvent::FailOver { force } => self.begin_fail_over(force),
            StandbyEvent::SwitchOver => {
                match self.session.filter(|_| self.phase == Phase::Following) {
                    Some(session) => self.broadcast(&PeerMessage::RequestSwitchOver { session }),
                    None => self.notify(Notice::CannotSwitchOver),
                }
            }
        }
        self.check_primary();
        self.take_next_step();
        std::mem::take(&mut self.out)
    }

    /// Returns the time of this node's clock, in nanoseconds, at which a `Tick` is due; `u64::MAX`
    /// if none is.
    pub fn deadline_ns(&self) -> u64 {
        let at = match self.phase {
            Phase::Alone if self.paths.any() => self.hello_at_ns,
            // Often enough to tell a silent primary from a stall of this node.
            Phase::Following | Phase::Leaving => {
                (self.heard_ns.saturating_add(self.config.detection_ns))
                    .min(self.now_ns.saturating_add(self.config.heartbeat_ns))
            }
            Phase::Asking if self.open_request.is_some() || self.fencing => u64::MAX,
            Phase::Asking if self.config.arbitration == Arbitration::Fencing => self.fence_at_ns,
            Phase::Asking => self.ask_at_ns,
            _ => u64::MAX,
        };
        if at <= self.now_ns { self.now_ns.saturating_add(self.config.heartbeat_ns) } else { at }
    }

    /// Returns the standby's state, as users see it.
    pub fn state(&self) -> StandbyState {
        match self.phase {
            Phase::Alone => StandbyState::Alone,
            Phase::Following if self.applied.is_none() => StandbyState::Joining,
            Phase::Following if self.pairing == 0 => StandbyState::Following,
            Phase::Following => StandbyState::Armed,
            Phase::Leaving | Phase::Asking | Phase::Granted { .. } => StandbyState::Asking,
            Phase::Active => StandbyState::Active,
        }
    }

    /// Returns the newest term that the standby knows. The driver keeps it for the next start.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Returns the session with a primary; `None` if there is none.
    pub fn session(&self) -> Option<SessionId> {
        self.session
    }

    /// Returns the newest applied epoch, of any session; `None` if there is none.
    pub fn held(&self) -> Option<Epoch> {
        self.held
    }

    fn notify(&mut self, notice: Notice) {
        self.out.push(StandbyAction::Notify(notice));
    }

    fn send(&mut self, path: u8, message: PeerMessage) {
        self.out.push(StandbyAction::Send { path, message });
    }

    fn broadcast(&mut self, message: &PeerMessage) {
        for path in self.paths.iter() {
            self.send(path, message.clone());
        }
    }

    /// Grants the primary two heartbeats of grace after this node was stalled for `for_ns`:
    /// messages that arrived meanwhile are read before the primary counts as silent.
    fn grant_grace(&mut self, for_ns: u64) {
        let grace_ns = self.config.heartbeat_ns.saturating_mul(2);
        let long = for_ns > self.config.heartbeat_ns.saturating_mul(3);
        if self.phase == Phase::Following && long && !std::mem::replace(&mut self.graced, true) {
            let heard_ns = (self.now_ns.saturating_add(for_ns).saturating_add(grace_ns))
                .saturating_sub(self.config.detection_ns);
            self.heard_ns = self.heard_ns.max(heard_ns);
        }
    }

    fn greet(&mut self, path: u8) {
        let hello = Hello {
            role: NodeRole::Standby,
            group: self.config.group,
            node: self.config.node,
            instance: self.config.instance,
            term: self.term,
            digest: self.config.shared_digest(),
            session: self.session,
            left: self.left,
            complete: self.complete,
        };
        self.send(path, PeerMessage::Hello(hello));
        self.hello_at_ns = self.now_ns.saturating_add(self.config.retry_ns);
    }

    fn handle_message(&mut self, path: u8, message: &PeerMessage) {
        if self.phase == Phase::Active {
            // The former primary does not know of the takeover yet. The driver's new primary
            // handles everything else.
            if matches!(
                message,
                PeerMessage::Hello(_)
                    | PeerMessage::Heartbeat { .. }
                    | PeerMessage::HandOver { .. }
            ) {
                self.send(path, PeerMessage::TookOver { term: self.term });
            }
            return;
        }
        match *message {
            PeerMessage::Hello(ref hello) => self.handle_hello(path, hello),
            PeerMessage::HelloAck { term, session, sequence } => {
                self.handle_acceptance(path, term, session, sequence);
            }
            PeerMessage::Refused(refusal) if refusal != PeerRefusal::Busy => {
                self.notify(Notice::Refused(refusal));
            }
            PeerMessage::Heartbeat { sequence, sent_ns, term, session, pairing } => {
                if term < self.term {
                    self.send(path, PeerMessage::Refused(PeerRefusal::StaleTerm(self.term)));
                } else if session.is_some() && session == self.session {
                    self.answer_heartbeat(path, sequence, sent_ns, pairing);
                } else if self.phase == Phase::Following && sequence > self.sequence {
                    // The primary goes on without this session.
                    self.leave_session();
                }
            }
            PeerMessage::HandOver { session, epoch } => {
                let mine = self.session == Some(session) && self.applied >= Some(epoch);
                if mine && matches!(self.phase, Phase::Following | Phase::Leaving | Phase::Asking) {
                    self.handed = true;
                    self.begin_asking();
                }
            }
            PeerMessage::Bye { session } => {
                if self.session == Some(session) && self.phase == Phase::Following {
                    self.notify(Notice::VmEnded);
                    self.leave_session();
                }
                if self.left == Some(session) {
                    self.send(path, PeerMessage::Bye { session });
                }
            }
            PeerMessage::Refused(_)
            | PeerMessage::HeartbeatAck { .. }
            | PeerMessage::EpochAck { .. }
            | PeerMessage::RequestSwitchOver { .. }
            | PeerMessage::TookOver { .. }
            | PeerMessage::Sick { .. } => {}
        }
    }

    fn handle_hello(&mut self, path: u8, hello: &Hello) {
        let refusal = match *hello {
            _ if hello.group != self.config.group => PeerRefusal::WrongGroup,
            _ if hello.digest != self.config.shared_digest() => PeerRefusal::WrongConfig,
            Hello { role: NodeRole::Standby, .. } => PeerRefusal::SameRole,
            _ if hello.term < self.term => PeerRefusal::StaleTerm(self.term),
            _ => {
                // It answers this standby's own greeting; if that is overdue, greet again.
                if self.phase == Phase::Alone && self.now_ns >= self.hello_at_ns {
                    self.greet(path);
                }
                return;
            }
        };
        if matches!(refusal, PeerRefusal::WrongGroup | PeerRefusal::WrongConfig) {
            self.notify(Notice::Refused(refusal));
        }
        self.send(path, PeerMessage::Refused(refusal));
    }

    fn handle_acceptance(&mut self, path: u8, term: Term, session: SessionId, sequence: u64) {
        if term < self.term || !matches!(self.phase, Phase::Alone | Phase::Following) {
            return;
        }
        if self.session == Some(session) {
            self.heard_ns = self.now_ns;
            self.sequence = self.sequence.max(sequence);
            return;
        }
        // On another path an acceptance may be an old one that comes late.
        if self.left == Some(session) || path != 0 {
            return;
        }
        self.reset_session();
        self.term = term;
        self.session = Some(session);
        self.sequence = sequence;
        self.heard_ns = self.now_ns;
        self.phase = Phase::Following;
        self.out.extend([StandbyAction::DiscardPartial, StandbyAction::Receive { session }]);
    }

    fn answer_heartbeat(&mut self, path: u8, sequence: u64, sent_ns: u64, pairing: u64) {
        if self.phase != Phase::Following {
            // It may follow again only if no request that may be granted has left this host.
            let asks =
                self.sent || matches!(self.open_request, Some(WitnessRequest::TakeOver { .. }));
            if self.phase != Phase::Asking || asks || self.fencing || self.handed {
                return;
            }
            self.phase = Phase::Following;
        }
        self.heard_ns = self.now_ns;
        self.graced = false;
        if sequence > self.sequence {
            self.sequence = sequence;
            self.pairing = pairing;
        }
        let Some(session) = self.session else { return };
        let (pairing, held) = (self.pairing, self.applied);
        self.send(path, PeerMessage::HeartbeatAck { sequence, sent_ns, session, pairing, held });
        if let Some(reason) = self.sick.clone() {
            self.send(path, PeerMessage::Sick { session, reason });
        }
    }

    fn handle_complete_epoch(&mut self, session: SessionId, epoch: Epoch, after: Option<Epoch>) {
        // Also while it asks: it may follow again, and later epochs build on this one.
        let follows = matches!(self.phase, Phase::Following | Phase::Leaving | Phase::Asking);
        let follows = follows && after <= self.complete;
        if follows
            && self.session == Some(session)
            && self.sick.is_none()
            && self.complete < Some(epoch)
        {
            self.complete = Some(epoch);
            self.applying += 1;
            self.out.push(StandbyAction::Apply { epoch });
        } else {
            self.out.push(StandbyAction::Reject { epoch });
        }
    }

    fn handle_applied_epoch(&mut self, epoch: Epoch) {
        // Also for a session that was left meanwhile: the host holds the epoch.
        self.held = Some(epoch);
        self.applying = self.applying.saturating_sub(1);
        if self.complete.is_none_or(|complete| complete < epoch) {
            return;
        }
        self.applied = Some(epoch);
        if let Some(session) = self.session.filter(|_| self.phase == Phase::Following) {
            self.broadcast(&PeerMessage::EpochAck { session, epoch });
        }
    }

    fn handle_apply_failure(&mut self, reason: String) {
        self.complete = self.applied;
        self.applying = 0;
        self.take_no_more(reason);
    }

    /// Takes no more epochs of this session, for `reason`. Open `Apply` actions go on.
    fn take_no_more(&mut self, reason: String) {
        self.notify(Notice::ApplyFailed(reason.clone()));
        self.out.push(StandbyAction::DiscardPartial);
        if let Some(session) = self.session {
            self.broadcast(&PeerMessage::Sick { session, reason: reason.clone() });
            self.sick = Some(reason);
        }
    }

    /// Gives the session up for good.
    fn leave_session(&mut self) {
        let was_sick = self.sick.is_some();
        self.left = self.session.or(self.left);
        self.reset_session();
        self.phase = Phase::Alone;
        self.out.push(StandbyAction::DiscardPartial);
        let wait_ns = if was_sick {
            self.config.detection_ns.saturating_mul(SICK_WAIT_DETECTIONS)
        } else {
            0
        };
        self.hello_at_ns = self.now_ns.saturating_add(wait_ns);
    }

    fn reset_session(&mut self) {
        self.session = None;
        self.pairing = 0;
        self.complete = None;
        self.applied = None;
        self.sick = None;
        self.sent = false;
        self.handed = false;
        self.fence_failed = 0;
    }
}
