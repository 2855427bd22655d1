//! The primary: runs the VM while it has the right to, and lets output go when it may.
//!
//! ```text
//!           Hello            first epoch is there        one more is       granted (witness),
//!                            ▶ HoldOutput                there             armed (fencing), at once (manual)
//!   Solo ─────────▶ Syncing ──────────────────▶ Closing ────────▶ Pairing ──────────────────────▶ Protected ─┐
//!    ▲ ▲               │ lost                      │ lost            │ lease over, lost, sick         │        │ SwitchOver
//!    │ └───────────────┴───────────────────────────┘                 ▼                                ▼        ▼
//!    └───────────────────────────── the right ◀──────────────── asking (witness, fence, disarm) ◀──────── Handing
//!                                                                    │ a later term                            │
//!                                                                    └───────────────▶ Ended ◀─────────────────┘ TookOver
//! ```
//!
//! *Exposed*: somebody may let the standby take over. From then on the VM runs only while the lease
//! lasts, which answers of the standby renew; it ends when the primary knows that nobody can take
//! over any more. Asking goes on beside a lease that still holds, or holds again: the VM runs
//! meanwhile. Once the VM is handed over, no lease makes it run here.
//!
//! Invariants: `Guard` precedes what exposes the primary; what is held is released by an
//! acknowledgement or with the right to run alone; a primary that is deposed never releases what is
//! held. Each `AskWitness` is answered by one `Witness` or `WitnessLost`.

mod arbitration;
mod peer;
#[cfg(test)]
mod tests;

use crate::{
    Arbitration, Config, Epoch, Message, NodeId, Note, Paths, Session, Term, Why, WitnessReply,
    WitnessRequest,
};

/// How a node becomes primary. Each time the VM is there, and runs or is about to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The VM is protected first: nobody else knows of its group.
    First,
    /// The engine has died under [`Guard::Free`] and found its VM again.
    Attached {
        /// It had this term.
        term: Term,
    },
    /// A standby was activated.
    TakenOver {
        /// By `Activate`.
        term: Term,
        /// By a user who insisted: the witness does not know yet.
        forced: bool,
    },
}

/// What may be without the engine. A process beside it keeps to this should the engine die or
/// stall, and stops the VM else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// The VM runs alone by right: it may outlive the engine.
    Free,
    /// The VM may run until then, by this node's clock; it dies with the engine.
    Until(u64),
    /// The VM is not to run.
    Stopped,
}

/// What happens to a primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryEvent {
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
    /// The VM was captured, output after it belongs to the next epoch, and the data is on its way.
    Captured {
        /// Higher than all before.
        epoch: Epoch,
    },
    /// It was not.
    CaptureFailed,
    /// The VM stands: as it was told, or the guard did it.
    VmStopped,
    /// The VM runs.
    VmResumed,
    /// The hook's result: true where the other host is surely off.
    Fenced(bool),
    /// The user wants the standby to go on.
    SwitchOver,
    /// The user insists: the other node is off.
    GoSolo,
    /// The VM is no more, in good order.
    VmEnded,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryAction {
    /// Send this, if the path is still connected.
    Send {
        /// On which path.
        path: u8,
        /// What to say.
        message: Message,
    },
    /// Ask the witness; one question at a time.
    AskWitness(WitnessRequest),
    /// Tell the guard, before the outputs that follow.
    Guard(Guard),
    /// Pause the VM, then say `VmStopped`.
    StopVm,
    /// Let it run, unless the guard's time is over by now.
    ResumeVm,
    /// End the VM and drop what is held: another node runs it.
    KillVm,
    /// Hold all output from now on.
    HoldOutput,
    /// Let go what was produced up to the end of this epoch.
    Release {
        /// The newest on the standby.
        epoch: Epoch,
    },
    /// Let go what is held, and hold no more.
    ReleaseAll,
    /// Take an epoch with all of the VM, for this session. An earlier one that is not complete is
    /// void.
    BeginSync {
        /// For the data.
        session: Session,
    },
    /// Take an epoch now.
    Capture {
        /// With the VM stopped, after which it does not run here.
        last: bool,
    },
    /// Epochs after this one did not arrive: the next one holds what they held.
    Owe {
        /// The newest that came whole; `None`: none of this session.
        after: Option<Epoch>,
    },
    /// Whether the scheduler may take epochs.
    MayCapture(bool),
    /// Switch the standby's host off, then say `Fenced`.
    Fence,
    /// For the user.
    Note(Note),
    /// This primary is done.
    Ended {
        /// Another node runs the VM in this term: join it as a standby.
        deposed_by: Option<Term>,
    },
}

/// Where a primary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrimaryState {
    /// Runs alone.
    Solo,
    /// Runs alone; a standby gets the VM.
    Syncing,
    /// Output is held; one more epoch.
    Closing,
    /// The right to take over is being given to the standby.
    Pairing,
    /// A failure loses nothing.
    Protected,
    /// The VM stands until somebody answers.
    Stopped,
    /// The VM stands, its last epoch is on its way.
    SwitchingOver,
    /// The standby was told to go on.
    HandedOver,
    /// Done.
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Solo,
    Syncing { first: Option<Epoch> },
    Closing { gate: Option<Epoch> },
    Pairing,
    Protected,
    Handing(Handing),
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handing {
    Stopping,
    Last(Option<Epoch>),
    Handed { epoch: Epoch, since_ns: u64 },
}

/// The standby of a session.
#[derive(Clone, Debug)]
struct Peer {
    node: NodeId,
    instance: u64,
    session: Session,
    heard_ns: u64,
    /// Since when the data path is down.
    no_data_ns: Option<u64>,
    captured: Option<Epoch>,
    acked: Option<Epoch>,
}

/// The question that the witness has.
#[derive(Clone, Copy, Debug)]
struct Ask {
    request: WitnessRequest,
    /// What to go back to if it was never sent.
    before: Exposure,
}

/// What the witness may have been told.
#[derive(Clone, Copy, Debug, Default)]
struct Exposure {
    /// Somebody may let the standby take over.
    exposed: bool,
    /// The newest generation at which a pairing was asked for.
    paired_at: Option<u64>,
    /// It was asked for the right to run alone, and has not said.
    solo_sent: bool,
}

/// The state machine. See the module.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Primary {
    config: Config,
    term: Term,
    phase: Phase,
    peer: Option<Peer>,
    paths: Paths,
    now_ns: u64,
    sequence: u64,
    sessions: u64,
    heartbeat_at_ns: u64,
    lease_until_ns: u64,
    exposure: Exposure,
    /// As heartbeats say.
    pairing: u64,
    /// From this heartbeat on an answer with pairing 0 means that the standby has no right any
    /// more.
    disarm: Option<u64>,
    asking: Option<Why>,
    generation: u64,
    ask: Option<Ask>,
    ask_at_ns: u64,
    /// The witness does not know of this term yet.
    unrecorded: bool,
    /// The witness may not know that this node runs alone.
    unsettled: bool,
    witness_silent: bool,
    fencing: bool,
    fence_at_ns: u64,
    fence_failed: u32,
    running: bool,
    stops: u32,
    guard: Guard,
    holding: bool,
    may_capture: bool,
    vm_ended: bool,
    out: Vec<PrimaryAction>,
}

impl Primary {
    /// A primary that runs alone.
    pub fn new(config: Config, start: Start) -> Self {
        let (term, forced) = match start {
            Start::First => (Term::FIRST, false),
            Start::Attached { term } => (term, false),
            Start::TakenOver { term, forced } => (term, forced),
        };
        Self {
            config,
            term,
            phase: Phase::Solo,
            peer: None,
            paths: Paths::default(),
            now_ns: 0,
            sequence: 0,
            sessions: 0,
            heartbeat_at_ns: 0,
            lease_until_ns: 0,
            exposure: Exposure::default(),
            pairing: 0,
            disarm: None,
            asking: None,
            generation: 0,
            ask: None,
            ask_at_ns: 0,
            unrecorded: forced && config.arbitration == Arbitration::Witness,
            unsettled: false,
            witness_silent: false,
            fencing: false,
            fence_at_ns: 0,
            fence_failed: 0,
            running: true,
            stops: 0,
            guard: Guard::Free,
            holding: false,
            may_capture: false,
            vm_ended: false,
            out: Vec::new(),
        }
    }

    /// Takes what happened; what is to be done, in this order.
    pub fn handle(&mut self, now_ns: u64, input: PrimaryEvent) -> Vec<PrimaryAction> {
        self.now_ns = self.now_ns.max(now_ns);
        if self.phase == Phase::Ended {
            return Vec::new();
        }
        match input {
            PrimaryEvent::Tick | PrimaryEvent::VmResumed => {}
            PrimaryEvent::PathUp(path) => self.path_up(path),
            PrimaryEvent::PathDown(path) => self.path_down(path),
            PrimaryEvent::Peer { path, message } => self.hear(path, message),
            PrimaryEvent::Witness(reply) => self.witness(reply),
            PrimaryEvent::WitnessLost { sent } => self.witness_lost(sent),
            PrimaryEvent::Captured { epoch } => self.captured(epoch),
            PrimaryEvent::CaptureFailed => self.capture_failed(),
            PrimaryEvent::VmStopped => self.vm_stopped(),
            PrimaryEvent::Fenced(off) => self.fenced(off),
            PrimaryEvent::SwitchOver => self.switch_over(),
            PrimaryEvent::GoSolo => {
                self.unsettled = self.config.arbitration == Arbitration::Witness;
                self.become_solo(Why::Command);
            }
            PrimaryEvent::VmEnded => self.ended_in_order(),
        }
        let steps =
            [Self::watch, Self::pair, Self::ask, Self::fence, Self::heartbeat, Self::settle];
        for step in steps {
            if self.phase != Phase::Ended {
                step(self);
            }
        }
        std::mem::take(&mut self.out)
    }

    /// When a `Tick` is due at the latest; `u64::MAX`: never.
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
        if self.exposure.exposed && self.running {
            at = at.min(self.lease_until_ns);
        }
        if self.ask.is_none() && self.question().is_some() {
            at = at.min(self.ask_at_ns);
        }
        if self.wants_fence() && !self.fencing {
            at = at.min(self.fence_at_ns);
        }
        // What is due already has been looked at, and waits for something else.
        if at <= self.now_ns { self.now_ns.saturating_add(self.config.heartbeat_ns) } else { at }
    }

    /// Where it is.
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

    /// In which it runs the VM.
    pub fn term(&self) -> Term {
        self.term
    }

    /// What there is with a standby.
    pub fn session(&self) -> Option<Session> {
        self.peer.as_ref().map(|peer| peer.session)
    }

    /// The newest epoch of this session that the standby holds.
    pub fn acknowledged(&self) -> Option<Epoch> {
        self.peer.as_ref().and_then(|peer| peer.acked)
    }

    fn note(&mut self, note: Note) {
        self.out.push(PrimaryAction::Note(note));
    }

    fn has_lease(&self) -> bool {
        self.now_ns < self.lease_until_ns
    }

    fn may_run(&self) -> bool {
        match self.phase {
            Phase::Ended | Phase::Handing(_) => false,
            _ => !self.exposure.exposed || self.has_lease(),
        }
    }

    /// What follows from the state: the guard first, then whether the VM runs, and whether it is
    /// captured.
    fn settle(&mut self) {
        let guard = match () {
            () if !self.may_run() => Guard::Stopped,
            () if self.exposure.exposed => Guard::Until(self.lease_until_ns),
            () => Guard::Free,
        };
        if guard != self.guard {
            self.guard = guard;
            self.out.insert(0, PrimaryAction::Guard(guard));
        }
        let run = self.may_run();
        if run != self.running {
            self.running = run;
            if run {
                self.out.push(PrimaryAction::ResumeVm);
                if matches!(self.phase, Phase::Pairing | Phase::Protected) {
                    self.note(Note::Resumed);
                }
            } else {
                self.out.push(PrimaryAction::StopVm);
                self.stops += 1;
                if !matches!(self.phase, Phase::Handing(_)) {
                    self.note(Note::Stopped);
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

    fn vm_stopped(&mut self) {
        self.stops = self.stops.saturating_sub(1);
        if self.stops > 0 {
            return;
        }
        if self.phase == Phase::Handing(Handing::Stopping) {
            self.phase = Phase::Handing(Handing::Last(None));
            self.out.push(PrimaryAction::Capture { last: true });
        } else if self.running && self.may_run() {
            // The guard was faster than the standby's answer.
            self.out.push(PrimaryAction::ResumeVm);
        }
    }

    fn captured(&mut self, epoch: Epoch) {
        let Some(peer) = &mut self.peer else { return };
        peer.captured = Some(epoch);
        match &mut self.phase {
            Phase::Syncing { first: at @ None }
            | Phase::Closing { gate: at @ None }
            | Phase::Handing(Handing::Last(at @ None)) => *at = Some(epoch),
            _ => {}
        }
    }

    fn capture_failed(&mut self) {
        match (self.phase, self.session()) {
            (Phase::Syncing { first: None }, Some(session)) => {
                self.out.push(PrimaryAction::BeginSync { session });
            }
            (Phase::Closing { gate: None }, _) => {
                self.out.push(PrimaryAction::Capture { last: false })
            }
            (Phase::Handing(Handing::Last(None)), _) => self.abort_switch_over(),
            _ => {}
        }
    }

    /// The standby holds `epoch` and all before it.
    fn acked(&mut self, epoch: Epoch) {
        let Some(peer) = &mut self.peer else { return };
        if peer.captured < Some(epoch) || peer.acked >= Some(epoch) {
            return;
        }
        peer.acked = Some(epoch);
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
                self.send_all(&Message::HandOver { session, epoch: last });
            }
            _ => {}
        }
    }

    fn switch_over(&mut self) {
        let data = self.peer.as_ref().is_some_and(|peer| peer.no_data_ns.is_none());
        if self.phase == Phase::Protected
            && self.asking.is_none()
            && self.running
            && data
            && !self.vm_ended
        {
            self.phase = Phase::Handing(Handing::Stopping);
        } else if !matches!(self.phase, Phase::Handing(_)) {
            self.note(Note::CannotSwitchOver);
        }
    }

    fn abort_switch_over(&mut self) {
        self.phase = Phase::Protected;
        self.note(Note::SwitchOverFailed);
    }

    fn ended_in_order(&mut self) {
        self.vm_ended = true;
        self.note(Note::VmEnded);
        match self.peer.as_ref().map(|peer| peer.session) {
            Some(session) => {
                self.send_all(&Message::Bye { session });
                if !self.holding {
                    self.finish();
                }
            }
            None => self.finish(),
        }
    }

    /// Nothing can be taken over any more, and the VM is no more.
    fn finish(&mut self) {
        self.phase = Phase::Ended;
        if std::mem::take(&mut self.holding) {
            self.out.push(PrimaryAction::ReleaseAll);
        }
        self.out.push(PrimaryAction::Ended { deposed_by: None });
    }

    /// Another node runs the VM, by right.
    fn deposed(&mut self, term: Term) {
        if self.phase == Phase::Ended {
            return;
        }
        self.phase = Phase::Ended;
        self.peer = None;
        self.out.extend([
            PrimaryAction::Guard(Guard::Stopped),
            PrimaryAction::KillVm,
            PrimaryAction::Note(Note::Deposed(term)),
            PrimaryAction::Ended { deposed_by: Some(term) },
        ]);
    }
}
