//! The standby: takes epochs, holds the newest whole one, and takes over when it has the right.
//!
//! ```text
//!            HelloAck                silence, or a command           granted: witness, fence hook, hand-over, force
//!   Alone ─────────────▶ Following ───────────────────────▶ Asking ────────────────────────────────────────▶ Active
//!     ▲                      │ no epoch, no right              │ refused
//!     └──────────────────────┴─────────────────────────────────┘  (the session is left for good)
//! ```
//!
//! Only who follows answers heartbeats, so a standby that asks has said nothing for the detection
//! time, and the primary's lease is over. It may go back to following as long as no question has
//! left this host: else somebody may have granted it.
//!
//! With a witness, the standby asks at the generation of the pairing, which heartbeats tell it; if
//! none did, it asks for the state first. With the fence hook and nothing else, it may take over
//! only if the last heartbeat said that output is held (`pairing`).
//!
//! Invariants: an epoch is acknowledged once it is applied; `Activate` comes once, names the newest
//! applied epoch, and no `Apply` is open then. Not here: whether an epoch is whole; that is for the
//! driver to verify before `EpochComplete`.

mod taking_over;
#[cfg(test)]
mod tests;

use crate::{
    Arbitration, Config, Epoch, Hello, Message, Note, Paths, Refusal, Role, Session, Term,
    WitnessReply, WitnessRequest,
};

/// After it was sick, a standby comes back after the detection time times this.
const SICK_WAIT: u64 = 10;

/// What happens to a standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StandbyEvent {
    /// Time has passed.
    Tick,
    /// A path is connected, or connected anew.
    PathUp(u8),
    /// It is not any more.
    PathDown(u8),
    /// A message of the peer.
    Peer {
        /// On this path.
        path: u8,
        /// What it says.
        message: Message,
    },
    /// The witness' answer to the question that is open.
    Witness(WitnessReply),
    /// There will be none.
    WitnessLost {
        /// False where the question has never left this host.
        sent: bool,
    },
    /// An epoch of this session is whole and verified, in the buffer.
    EpochComplete {
        /// In which it came.
        session: Session,
        /// Higher than all before it.
        epoch: Epoch,
        /// The epoch that it builds upon; `None`: it holds all of the VM.
        after: Option<Epoch>,
    },
    /// It is now what this node holds.
    Applied {
        /// Which.
        epoch: Epoch,
    },
    /// It is not, and what was held before still is. Nor is any that was to be applied behind it.
    ApplyFailed {
        /// For the user.
        reason: String,
    },
    /// The hook's result: true where the other host is surely off.
    Fenced(bool),
    /// The user wants this node to take over, though nothing was seen to fail.
    FailOver {
        /// The user vouches that the primary is off.
        force: bool,
    },
    /// The user wants the VM to move here.
    SwitchOver,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StandbyAction {
    /// Send this, if the path is still connected.
    Send {
        /// On which path.
        path: u8,
        /// What to say.
        message: Message,
    },
    /// Ask the witness; one question at a time.
    AskWitness(WitnessRequest),
    /// Take data of this session from now on.
    Receive {
        /// Only of this one.
        session: Session,
    },
    /// Make this epoch what the node holds, wholly or not at all.
    Apply {
        /// Which.
        epoch: Epoch,
    },
    /// Drop this whole epoch: one that it builds upon did not come, or its session is over.
    Reject {
        /// Which.
        epoch: Epoch,
    },
    /// Drop what came of epochs that are not complete, and those that are not to be applied.
    DiscardPartial,
    /// Switch the primary's host off, then say `Fenced`.
    Fence,
    /// Start the VM as it was at the end of this epoch, and be its primary.
    Activate {
        /// What this node holds.
        epoch: Epoch,
        /// The new one.
        term: Term,
        /// Not by right: a user insisted.
        forced: bool,
    },
    /// For the user.
    Note(Note),
}

/// Where a standby is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyState {
    /// No primary has taken it.
    Alone,
    /// The first epoch is on its way.
    Joining,
    /// It holds an epoch of this session.
    Following,
    /// It may take over as soon as the primary falls silent.
    Armed,
    /// It wants to take over.
    Asking,
    /// It runs the VM.
    Active,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Alone,
    Following,
    /// Silent on purpose, until the primary's lease is over.
    Leaving,
    Asking,
    /// Waits for what is being applied.
    Granted {
        forced: bool,
    },
    Active,
}

/// The state machine. See the module.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Standby {
    config: Config,
    term: Term,
    phase: Phase,
    session: Option<Session>,
    left: Option<Session>,
    paths: Paths,
    now_ns: u64,
    /// The newest heartbeat.
    sequence: u64,
    pairing: u64,
    heard_ns: u64,
    /// It was stalled, and has heard nothing since.
    graced: bool,
    held: Option<Epoch>,
    /// Of this session: that came whole, and that are applied.
    complete: Option<Epoch>,
    applied: Option<Epoch>,
    /// So many are being applied.
    applying: u32,
    sick: Option<String>,
    hello_at_ns: u64,
    ask: Option<WitnessRequest>,
    ask_at_ns: u64,
    /// A question that may be granted has left this host.
    sent: bool,
    /// The primary has given the VM away.
    handed: bool,
    witness_silent: bool,
    fencing: bool,
    fence_at_ns: u64,
    fence_failed: u32,
    out: Vec<StandbyAction>,
}

impl Standby {
    /// A standby that no primary has taken yet. `term`: the newest that this host has seen, or 0.
    /// `held`: an epoch that the host has from before; it is taken over only by force.
    pub fn new(config: Config, term: Term, held: Option<Epoch>) -> Self {
        Self {
            config,
            term,
            phase: Phase::Alone,
            session: None,
            left: None,
            paths: Paths::default(),
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
            ask: None,
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

    /// Takes what happened; what is to be done, in this order.
    pub fn handle(&mut self, now_ns: u64, input: StandbyEvent) -> Vec<StandbyAction> {
        self.stalled(now_ns.saturating_sub(self.now_ns));
        self.now_ns = self.now_ns.max(now_ns);
        match input {
            StandbyEvent::Tick => {}
            StandbyEvent::PathUp(path) if path >= self.config.paths => {}
            StandbyEvent::PathUp(path) => {
                self.paths.set(path, true);
                if path == 0 && self.session.is_some() {
                    self.out.push(StandbyAction::DiscardPartial);
                }
                if matches!(self.phase, Phase::Alone | Phase::Following) {
                    self.hello(path);
                }
            }
            StandbyEvent::PathDown(path) => self.paths.set(path, false),
            StandbyEvent::Peer { path, message } => self.hear(path, &message),
            StandbyEvent::Witness(reply) => self.witness(reply),
            StandbyEvent::WitnessLost { sent } => self.witness_lost(sent),
            StandbyEvent::EpochComplete { session, epoch, after } => {
                self.complete(session, epoch, after)
            }
            StandbyEvent::Applied { epoch } => self.applied(epoch),
            StandbyEvent::ApplyFailed { reason } => self.apply_failed(reason),
            StandbyEvent::Fenced(off) => self.fenced(off),
            StandbyEvent::FailOver { force } => self.fail_over(force),
            StandbyEvent::SwitchOver => {
                match self.session.filter(|_| self.phase == Phase::Following) {
                    Some(session) => self.send_all(&Message::WantSwitchOver { session }),
                    None => self.note(Note::CannotSwitchOver),
                }
            }
        }
        self.watch();
        self.act();
        std::mem::take(&mut self.out)
    }

    /// When a `Tick` is due at the latest; `u64::MAX`: never.
    pub fn deadline_ns(&self) -> u64 {
        let at = match self.phase {
            Phase::Alone if self.paths.any() => self.hello_at_ns,
            // Often enough to tell a silent primary from an own stall.
            Phase::Following | Phase::Leaving => {
                (self.heard_ns.saturating_add(self.config.detection_ns))
                    .min(self.now_ns.saturating_add(self.config.heartbeat_ns))
            }
            Phase::Asking if self.ask.is_some() || self.fencing => u64::MAX,
            Phase::Asking if self.config.arbitration == Arbitration::Fencing => self.fence_at_ns,
            Phase::Asking => self.ask_at_ns,
            _ => u64::MAX,
        };
        if at <= self.now_ns { self.now_ns.saturating_add(self.config.heartbeat_ns) } else { at }
    }

    /// Where it is.
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

    /// The newest that it knows; to be kept for the next start.
    pub fn term(&self) -> Term {
        self.term
    }

    /// What there is with a primary.
    pub fn session(&self) -> Option<Session> {
        self.session
    }

    /// The newest epoch that is applied.
    pub fn held(&self) -> Option<Epoch> {
        self.held
    }

    fn note(&mut self, note: Note) {
        self.out.push(StandbyAction::Note(note));
    }

    fn send(&mut self, path: u8, message: Message) {
        self.out.push(StandbyAction::Send { path, message });
    }

    fn send_all(&mut self, message: &Message) {
        for path in self.paths.up() {
            self.send(path, message.clone());
        }
    }

    /// A standby that was stalled itself has heard nothing of a primary that did speak: it reads
    /// first, then judges.
    fn stalled(&mut self, for_ns: u64) {
        let grace_ns = self.config.heartbeat_ns.saturating_mul(2);
        let long = for_ns > self.config.heartbeat_ns.saturating_mul(3);
        if self.phase == Phase::Following && long && !std::mem::replace(&mut self.graced, true) {
            let heard_ns = (self.now_ns.saturating_add(for_ns).saturating_add(grace_ns))
                .saturating_sub(self.config.detection_ns);
            self.heard_ns = self.heard_ns.max(heard_ns);
        }
    }

    fn hello(&mut self, path: u8) {
        let hello = Hello {
            role: Role::Standby,
            group: self.config.group,
            node: self.config.node,
            instance: self.config.instance,
            term: self.term,
            digest: self.config.agreed(),
            session: self.session,
            left: self.left,
            complete: self.complete,
        };
        self.send(path, Message::Hello(hello));
        self.hello_at_ns = self.now_ns.saturating_add(self.config.retry_ns);
    }

    fn hear(&mut self, path: u8, message: &Message) {
        if self.phase == Phase::Active {
            // Whoever speaks as primary does not know yet. The driver's new primary says the rest.
            if matches!(
                message,
                Message::Hello(_) | Message::Heartbeat { .. } | Message::HandOver { .. }
            ) {
                self.send(path, Message::TookOver { term: self.term });
            }
            return;
        }
        match *message {
            Message::Hello(ref hello) => self.greeted(path, hello),
            Message::HelloAck { term, session, sequence } => {
                self.accepted(path, term, session, sequence)
            }
            Message::Refused(refusal) if refusal != Refusal::Busy => {
                self.note(Note::Refused(refusal))
            }
            Message::Heartbeat { sequence, sent_ns, term, session, pairing } => {
                if term < self.term {
                    self.send(path, Message::Refused(Refusal::StaleTerm(self.term)));
                } else if session.is_some() && session == self.session {
                    self.answer(path, sequence, sent_ns, pairing);
                } else if self.phase == Phase::Following && sequence > self.sequence {
                    // The primary goes on without this session.
                    self.leave();
                }
            }
            Message::HandOver { session, epoch } => {
                let mine = self.session == Some(session) && self.applied >= Some(epoch);
                if mine && matches!(self.phase, Phase::Following | Phase::Leaving | Phase::Asking) {
                    self.handed = true;
                    self.want();
                }
            }
            Message::Bye { session } => {
                if self.session == Some(session) && self.phase == Phase::Following {
                    self.note(Note::VmEnded);
                    self.leave();
                }
                if self.left == Some(session) {
                    self.send(path, Message::Bye { session });
                }
            }
            Message::Refused(_)
            | Message::HeartbeatAck { .. }
            | Message::EpochAck { .. }
            | Message::WantSwitchOver { .. }
            | Message::TookOver { .. }
            | Message::Sick { .. } => {}
        }
    }

    fn greeted(&mut self, path: u8, hello: &Hello) {
        let refusal = match *hello {
            _ if hello.group != self.config.group => Refusal::WrongGroup,
            _ if hello.digest != self.config.agreed() => Refusal::WrongConfig,
            Hello { role: Role::Standby, .. } => Refusal::SameRole,
            _ if hello.term < self.term => Refusal::StaleTerm(self.term),
            _ => {
                // It answers the standby's own, which goes out with the path, or again now.
                if self.phase == Phase::Alone && self.now_ns >= self.hello_at_ns {
                    self.hello(path);
                }
                return;
            }
        };
        if matches!(refusal, Refusal::WrongGroup | Refusal::WrongConfig) {
            self.note(Note::Refused(refusal));
        }
        self.send(path, Message::Refused(refusal));
    }

    fn accepted(&mut self, path: u8, term: Term, session: Session, sequence: u64) {
        if term < self.term || !matches!(self.phase, Phase::Alone | Phase::Following) {
            return;
        }
        if self.session == Some(session) {
            self.heard_ns = self.now_ns;
            self.sequence = self.sequence.max(sequence);
            return;
        }
        // On the other paths old ones may come late.
        if self.left == Some(session) || path != 0 {
            return;
        }
        self.forget();
        self.term = term;
        self.session = Some(session);
        self.sequence = sequence;
        self.heard_ns = self.now_ns;
        self.phase = Phase::Following;
        self.out.extend([StandbyAction::DiscardPartial, StandbyAction::Receive { session }]);
    }

    fn answer(&mut self, path: u8, sequence: u64, sent_ns: u64, pairing: u64) {
        if self.phase != Phase::Following {
            // Nothing that may be granted has gone out: the primary may have its VM back.
            let asks = self.sent || matches!(self.ask, Some(WitnessRequest::TakeOver { .. }));
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
        self.send(path, Message::HeartbeatAck { sequence, sent_ns, session, pairing, held });
        if let Some(reason) = self.sick.clone() {
            self.send(path, Message::Sick { session, reason });
        }
    }

    fn complete(&mut self, session: Session, epoch: Epoch, after: Option<Epoch>) {
        // Also while it asks: it may go back to following, and later epochs build upon this one.
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

    fn applied(&mut self, epoch: Epoch) {
        // Even of a session that was left meanwhile: it is what the host holds.
        self.held = Some(epoch);
        self.applying = self.applying.saturating_sub(1);
        if self.complete.is_none_or(|complete| complete < epoch) {
            return;
        }
        self.applied = Some(epoch);
        if let Some(session) = self.session.filter(|_| self.phase == Phase::Following) {
            self.send_all(&Message::EpochAck { session, epoch });
        }
    }

    fn apply_failed(&mut self, reason: String) {
        self.note(Note::ApplyFailed(reason.clone()));
        self.complete = self.applied;
        self.applying = 0;
        self.out.push(StandbyAction::DiscardPartial);
        if let Some(session) = self.session {
            self.send_all(&Message::Sick { session, reason: reason.clone() });
            self.sick = Some(reason);
        }
    }

    /// Gives the session up, for good.
    fn leave(&mut self) {
        let was_sick = self.sick.is_some();
        self.left = self.session.or(self.left);
        self.forget();
        self.phase = Phase::Alone;
        self.out.push(StandbyAction::DiscardPartial);
        let wait_ns = if was_sick { self.config.detection_ns.saturating_mul(SICK_WAIT) } else { 0 };
        self.hello_at_ns = self.now_ns.saturating_add(wait_ns);
    }

    fn forget(&mut self) {
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
