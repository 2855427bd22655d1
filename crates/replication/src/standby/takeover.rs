//! How a standby finds that the primary is lost, and obtains the right to run the VM.
//!
//! ```text
//!   witness   the generation of the pairing ─▶ TakeOver ─▶ the next term, owned by this node
//!   fencing   armed ─▶ the fence hook; at once if the VM was handed over
//!   manual    a user forces it; at once if the VM was handed over
//! ```

use super::{Phase, Standby, StandbyAction};
use crate::{Arbitration, Notice, OwnerMode, PeerMessage, WitnessReply, WitnessRequest};

/// A failed fence hook is tried again after at most `retry_ns` times 2 to this power.
const BACKOFF_MAX: u32 = 5;

impl Standby {
    /// Asks for the right to run the VM from now on.
    pub(super) fn begin_asking(&mut self) {
        if self.phase != Phase::Asking {
            self.phase = Phase::Asking;
            self.ask_at_ns = self.now_ns;
            self.fence_at_ns = self.now_ns;
        }
    }

    /// Checks whether the primary has been silent for the detection time.
    pub(super) fn check_primary(&mut self) {
        if !matches!(self.phase, Phase::Following | Phase::Leaving)
            || self.now_ns.saturating_sub(self.heard_ns) < self.config.detection_ns
        {
            return;
        }
        let (held, complete) = (self.applied.or(self.held), self.pairing != 0);
        self.notify(Notice::PrimaryLost { held, complete });
        if self.may_ask() {
            self.begin_asking();
        } else {
            self.leave_session();
        }
    }

    /// Whether it can obtain the right without a user who forces it.
    fn may_ask(&self) -> bool {
        match self.config.arbitration {
            Arbitration::Witness => self.applied.is_some(),
            Arbitration::Fencing => self.applied.is_some() && self.pairing != 0,
            Arbitration::Manual => false,
        }
    }

    pub(super) fn begin_fail_over(&mut self, force: bool) {
        match self.phase {
            Phase::Active | Phase::Granted { .. } => {}
            _ if self.held.is_none() => self.notify(Notice::NothingHeld),
            _ if force => self.phase = Phase::Granted { forced: true },
            // The newest lease counts from the arrival of its heartbeat.
            Phase::Following if self.may_ask() => self.phase = Phase::Leaving,
            Phase::Leaving | Phase::Asking => {}
            _ => self.notify(Notice::NeedsForce),
        }
    }

    /// Greets, asks, fences or activates, as the phase calls for.
    pub(super) fn take_next_step(&mut self) {
        if self.phase == Phase::Alone && self.now_ns >= self.hello_at_ns {
            for path in self.paths.iter() {
                self.greet(path);
            }
        }
        if self.phase == Phase::Asking {
            match self.config.arbitration {
                Arbitration::Witness => self.ask_witness(),
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
        self.broadcast(&PeerMessage::TookOver { term });
        self.out.push(StandbyAction::Activate { epoch, term, forced });
    }

    fn ask_witness(&mut self) {
        let Some(session) =
            self.session.filter(|_| self.open_request.is_none() && self.now_ns >= self.ask_at_ns)
        else {
            return;
        };
        let (group, node, term) = (self.config.group, self.config.node, self.term);
        let request = match self.pairing {
            0 => WitnessRequest::State { group },
            generation => WitnessRequest::TakeOver { group, node, term, generation, session },
        };
        self.open_request = Some(request);
        self.out.push(StandbyAction::AskWitness(request));
    }

    pub(super) fn handle_witness_loss(&mut self, sent: bool) {
        let Some(request) = self.open_request.take() else { return };
        self.sent |= sent && matches!(request, WitnessRequest::TakeOver { .. });
        self.ask_at_ns = self.now_ns.saturating_add(self.config.retry_ns);
        if !std::mem::replace(&mut self.witness_silent, true) {
            self.notify(Notice::WitnessUnreachable);
        }
    }

    pub(super) fn handle_witness_reply(&mut self, reply: WitnessReply) {
        if self.open_request.is_none() || reply.group != self.config.group {
            return;
        }
        self.open_request = None;
        self.witness_silent = false;
        if self.phase != Phase::Asking {
            return;
        }
        let me = self.config.node;
        let mine = self.session.map(|session| OwnerMode::Paired { standby: me, session });
        match reply.state {
            Some(state)
                if state.owner == me
                    && state.term == self.term.next()
                    && state.mode == OwnerMode::Solo =>
            {
                self.phase = Phase::Granted { forced: false };
            }
            Some(state) if Some(state.mode) == mine && state.term == self.term => {
                // The pairing with this session: only its generation was missing.
                let known = self.pairing == state.generation;
                self.pairing = state.generation;
                let wait_ns = if known { self.config.retry_ns } else { 0 };
                self.ask_at_ns = self.now_ns.saturating_add(wait_ns);
            }
            _ => {
                self.notify(Notice::TakeOverRefused);
                self.leave_session();
            }
        }
    }

    pub(super) fn handle_fence_result(&mut self, off: bool) {
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
            self.notify(Notice::FenceFailed(self.fence_failed));
        }
    }
}
