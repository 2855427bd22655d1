//! How a standby finds the primary lost, and gets the right to run the VM.
//!
//! ```text
//!   witness: the generation of the pairing ─▶ TakeOver ─▶ a state of the next term, owned by this node
//!   fencing: armed ─▶ the hook          handed over: at once          manual: a user insists
//! ```

use super::{Phase, Standby, StandbyAction};
use crate::{Arbitration, Message, Mode, Note, WitnessReply, WitnessRequest};

/// Fencing that failed is tried again after `retry_ns` times two to this at most.
const BACKOFF_MAX: u32 = 5;

impl Standby {
    /// Wants the VM, from now on.
    pub(super) fn want(&mut self) {
        if self.phase != Phase::Asking {
            self.phase = Phase::Asking;
            self.ask_at_ns = self.now_ns;
            self.fence_at_ns = self.now_ns;
        }
    }

    pub(super) fn watch(&mut self) {
        if !matches!(self.phase, Phase::Following | Phase::Leaving)
            || self.now_ns.saturating_sub(self.heard_ns) < self.config.detection_ns
        {
            return;
        }
        let (held, complete) = (self.applied.or(self.held), self.pairing != 0);
        self.note(Note::PrimaryLost { held, complete });
        if self.may_ask() {
            self.want();
        } else {
            self.leave();
        }
    }

    /// Whether it can get the right without a user who insists.
    fn may_ask(&self) -> bool {
        match self.config.arbitration {
            Arbitration::Witness => self.applied.is_some(),
            Arbitration::Fencing => self.applied.is_some() && self.pairing != 0,
            Arbitration::Manual => false,
        }
    }

    pub(super) fn fail_over(&mut self, force: bool) {
        match self.phase {
            Phase::Active | Phase::Granted { .. } => {}
            _ if self.held.is_none() => self.note(Note::NothingHeld),
            _ if force => self.phase = Phase::Granted { forced: true },
            // The lease that was given last counts from when its heartbeat was heard.
            Phase::Following if self.may_ask() => self.phase = Phase::Leaving,
            Phase::Leaving | Phase::Asking => {}
            _ => self.note(Note::NeedsForce),
        }
    }

    /// What follows from the state.
    pub(super) fn act(&mut self) {
        if self.phase == Phase::Alone && self.now_ns >= self.hello_at_ns {
            for path in self.paths.up() {
                self.hello(path);
            }
        }
        if self.phase == Phase::Asking {
            match self.config.arbitration {
                Arbitration::Witness => self.ask(),
                _ if self.handed => self.phase = Phase::Granted { forced: false },
                Arbitration::Fencing if !self.fencing && self.now_ns >= self.fence_at_ns => {
                    self.fencing = true;
                    self.out.push(StandbyAction::Fence);
                }
                _ => {}
            }
        }
        if let Phase::Granted { forced } = self.phase
            && self.applying == 0
        {
            self.activate(forced);
        }
    }

    fn activate(&mut self, forced: bool) {
        let Some(epoch) = self.held else { return };
        self.phase = Phase::Active;
        self.term = self.term.next();
        let term = self.term;
        self.send_all(&Message::TookOver { term });
        self.out.push(StandbyAction::Activate { epoch, term, forced });
    }

    fn ask(&mut self) {
        let Some(session) =
            self.session.filter(|_| self.ask.is_none() && self.now_ns >= self.ask_at_ns)
        else {
            return;
        };
        let (group, node, term) = (self.config.group, self.config.node, self.term);
        let request = match self.pairing {
            0 => WitnessRequest::State { group },
            generation => WitnessRequest::TakeOver { group, node, term, generation, session },
        };
        self.ask = Some(request);
        self.out.push(StandbyAction::AskWitness(request));
    }

    pub(super) fn witness_lost(&mut self, sent: bool) {
        let Some(request) = self.ask.take() else { return };
        self.sent |= sent && matches!(request, WitnessRequest::TakeOver { .. });
        self.ask_at_ns = self.now_ns.saturating_add(self.config.retry_ns);
        if !std::mem::replace(&mut self.witness_silent, true) {
            self.note(Note::WitnessUnreachable);
        }
    }

    pub(super) fn witness(&mut self, reply: WitnessReply) {
        if self.ask.is_none() || reply.group != self.config.group {
            return;
        }
        self.ask = None;
        self.witness_silent = false;
        if self.phase != Phase::Asking {
            return;
        }
        let me = self.config.node;
        let mine = self.session.map(|session| Mode::Paired { standby: me, session });
        match reply.state {
            Some(state)
                if state.owner == me
                    && state.term == self.term.next()
                    && state.mode == Mode::Solo =>
            {
                self.phase = Phase::Granted { forced: false };
            }
            Some(state) if Some(state.mode) == mine && state.term == self.term => {
                // Paired with what it holds: the generation is what was missing.
                let known = self.pairing == state.generation;
                self.pairing = state.generation;
                let wait_ns = if known { self.config.retry_ns } else { 0 };
                self.ask_at_ns = self.now_ns.saturating_add(wait_ns);
            }
            _ => {
                self.note(Note::TakeOverRefused);
                self.leave();
            }
        }
    }

    pub(super) fn fenced(&mut self, off: bool) {
        if !std::mem::take(&mut self.fencing) || self.phase != Phase::Asking {
            return;
        }
        if off {
            self.phase = Phase::Granted { forced: false };
        } else {
            let wait_ns =
                self.config.retry_ns.saturating_mul(1 << self.fence_failed.min(BACKOFF_MAX));
            self.fence_at_ns = self.now_ns.saturating_add(wait_ns);
            self.fence_failed = self.fence_failed.saturating_add(1);
            self.note(Note::FenceFailed(self.fence_failed));
        }
    }
}
