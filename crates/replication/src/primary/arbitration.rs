//! How a primary gets the right to run alone, and gives it up for a standby.
//!
//! ```text
//!   not exposed, or manual: at once
//!   witness: Solo ─▶ a state of this term, Solo, newer than every pairing that was asked for
//!   fencing: while the lease lasts, heartbeats with pairing 0 until one is answered so; then the hook
//! ```

use super::{Ask, Exposure, Handing, Phase, Primary, PrimaryAction};
use crate::{Arbitration, Mode, Note, Why, WitnessReply, WitnessRequest};

/// Fencing that failed is tried again after `retry_ns` times two to this at most.
const BACKOFF_MAX: u32 = 5;

impl Primary {
    /// What silence and time have come to.
    pub(super) fn watch(&mut self) {
        let Some(peer) = &self.peer else { return };
        let silent = self.now_ns.saturating_sub(peer.heard_ns) >= self.config.detection_ns;
        let no_data = peer
            .no_data_ns
            .is_some_and(|since| self.now_ns.saturating_sub(since) >= self.config.data_ns);
        if let Phase::Handing(Handing::Handed { since_ns, .. }) = self.phase {
            if self.now_ns.saturating_sub(since_ns) >= self.config.detection_ns {
                self.begin_asking(Why::HandOver);
            }
            return;
        }
        if self.asking == Some(Why::Silence)
            && self.has_lease()
            && !self.exposure.solo_sent
            && !self.fencing
        {
            self.asking = None;
        }
        let lost = if self.exposure.exposed { !self.has_lease() } else { silent };
        if lost {
            self.lose(Why::Silence);
        } else if no_data {
            self.lose(Why::NoData);
        }
    }

    /// The standby is of no use any more.
    pub(super) fn lose(&mut self, why: Why) {
        if matches!(self.phase, Phase::Handing(Handing::Handed { .. })) {
            self.begin_asking(Why::HandOver);
        } else if self.exposure.exposed {
            self.begin_asking(why);
        } else {
            self.become_solo(why);
        }
    }

    fn begin_asking(&mut self, why: Why) {
        // What silence began ends with it; what another reason began does not.
        if self.asking.as_ref().is_some_and(|old| *old != Why::Silence || why == Why::Silence) {
            return;
        }
        if matches!(self.phase, Phase::Handing(Handing::Stopping | Handing::Last(_))) {
            self.abort_switch_over();
        }
        if self.config.arbitration == Arbitration::Fencing
            && !matches!(why, Why::Silence | Why::HandOver)
        {
            self.pairing = 0;
            self.disarm = Some(self.sequence + 1);
            self.heartbeat_at_ns = self.now_ns;
        }
        self.note(Note::StandbyLost(why.clone()));
        self.asking = Some(why);
    }

    /// The right to run alone is there.
    pub(super) fn become_solo(&mut self, why: Why) {
        self.phase = Phase::Solo;
        self.peer = None;
        self.pairing = 0;
        self.disarm = None;
        self.asking = None;
        self.exposure = Exposure { exposed: false, solo_sent: false, ..self.exposure };
        self.lease_until_ns = 0;
        self.fence_failed = 0;
        self.heartbeat_at_ns = self.now_ns;
        self.note(Note::Unprotected(why));
        if self.vm_ended {
            self.finish();
        } else if std::mem::take(&mut self.holding) {
            self.out.push(PrimaryAction::ReleaseAll);
        }
    }

    /// From Pairing on, without a witness.
    pub(super) fn pair(&mut self) {
        if self.phase != Phase::Pairing {
            return;
        }
        match self.config.arbitration {
            Arbitration::Fencing
                if self.pairing == 0 && self.has_lease() && self.asking.is_none() =>
            {
                self.pairing = 1;
                self.exposure.exposed = true;
                self.heartbeat_at_ns = self.now_ns;
            }
            Arbitration::Witness | Arbitration::Fencing => {}
            Arbitration::Manual => {
                self.pairing = 1;
                self.protected();
            }
        }
    }

    pub(super) fn protected(&mut self) {
        self.phase = Phase::Protected;
        self.heartbeat_at_ns = self.now_ns;
        self.note(Note::Protected);
    }

    /// What the witness is to be asked.
    pub(super) fn question(&self) -> Option<WitnessRequest> {
        if self.config.arbitration != Arbitration::Witness {
            return None;
        }
        let (group, node, term) = (self.config.group, self.config.node, self.term);
        let generation = self.generation;
        if self.unrecorded {
            return Some(WitnessRequest::Forced {
                group,
                node,
                term: crate::Term(term.0.saturating_sub(1)),
            });
        }
        if self.asking.is_some() || self.unsettled {
            return Some(WitnessRequest::Solo { group, node, term, generation });
        }
        let peer =
            self.peer.as_ref().filter(|_| self.phase == Phase::Pairing && self.has_lease())?;
        let (standby, session) = (peer.node, peer.session);
        Some(WitnessRequest::Paired { group, node, term, generation, standby, session })
    }

    pub(super) fn ask(&mut self) {
        if self.ask.is_some() || self.now_ns < self.ask_at_ns {
            return;
        }
        let Some(request) = self.question() else { return };
        self.ask = Some(Ask { request, before: self.exposure });
        match request {
            WitnessRequest::Paired { generation, .. } => {
                self.exposure.exposed = true;
                self.exposure.paired_at = Some(generation);
            }
            WitnessRequest::Solo { .. } => self.exposure.solo_sent = true,
            _ => {}
        }
        self.out.push(PrimaryAction::AskWitness(request));
    }

    pub(super) fn witness_lost(&mut self, sent: bool) {
        let Some(ask) = self.ask.take() else { return };
        self.ask_at_ns = self.now_ns.saturating_add(self.config.retry_ns);
        if !std::mem::replace(&mut self.witness_silent, true) {
            self.note(Note::WitnessUnreachable);
        }
        if !sent {
            match ask.request {
                // A session that has gone meanwhile has taken its exposure with it.
                WitnessRequest::Paired { session, .. } if self.session() == Some(session) => {
                    self.exposure.exposed = ask.before.exposed;
                    self.exposure.paired_at = ask.before.paired_at;
                }
                WitnessRequest::Solo { .. } => self.exposure.solo_sent = ask.before.solo_sent,
                _ => {}
            }
        }
    }

    pub(super) fn witness(&mut self, reply: WitnessReply) {
        let Some(ask) = self.ask.filter(|_| reply.group == self.config.group) else { return };
        self.ask = None;
        self.witness_silent = false;
        let seen = self.generation;
        let state = reply.state.filter(|state| state.generation >= seen);
        let Some(state) = state else {
            // Nobody there knows the group: new, no room, or the witness has lost its memory.
            if reply.state.is_none() {
                self.generation = 0;
            }
            self.ask_at_ns = self.now_ns.saturating_add(if seen == self.generation {
                self.config.retry_ns
            } else {
                0
            });
            self.note(Note::WitnessRefused);
            return;
        };
        self.generation = state.generation;
        self.ask_at_ns = self.now_ns.saturating_add(if state.generation == seen {
            self.config.retry_ns
        } else {
            0
        });
        if state.term > self.term || (state.term == self.term && state.owner != self.config.node) {
            return self.deposed(state.term);
        }
        self.unrecorded = state.term < self.term;
        if self.unrecorded || matches!(ask.request, WitnessRequest::Forced { .. }) {
            return;
        }
        let resolved = self.exposure.paired_at.is_none_or(|at| state.generation > at);
        match state.mode {
            Mode::Solo if resolved => {
                self.unsettled = false;
                if let Some(why) = self.asking.clone() {
                    self.become_solo(why);
                } else if self.phase == Phase::Pairing {
                    // The pairing was asked for with an old generation.
                    self.exposure = Exposure::default();
                }
            }
            Mode::Paired { session, .. }
                if Some(session) == self.session() && self.phase == Phase::Pairing =>
            {
                self.pairing = state.generation;
                self.protected();
            }
            _ => {}
        }
    }

    pub(super) fn wants_fence(&self) -> bool {
        self.config.arbitration == Arbitration::Fencing
            && self.asking.as_ref().is_some_and(|why| *why != Why::HandOver)
            && !self.has_lease()
    }

    pub(super) fn fence(&mut self) {
        if self.wants_fence() && !self.fencing && self.now_ns >= self.fence_at_ns {
            self.fencing = true;
            self.out.push(PrimaryAction::Fence);
        }
    }

    pub(super) fn fenced(&mut self, off: bool) {
        if !std::mem::take(&mut self.fencing) {
            return;
        }
        if !off {
            let wait_ns =
                self.config.retry_ns.saturating_mul(1 << self.fence_failed.min(BACKOFF_MAX));
            self.fence_at_ns = self.now_ns.saturating_add(wait_ns);
            self.fence_failed = self.fence_failed.saturating_add(1);
            self.note(Note::FenceFailed(self.fence_failed));
        } else if let Some(why) = self.asking.clone().filter(|why| *why != Why::HandOver) {
            self.become_solo(why);
        } else if !matches!(self.phase, Phase::Handing(Handing::Handed { .. })) {
            self.lose(Why::Silence);
        }
    }
}
