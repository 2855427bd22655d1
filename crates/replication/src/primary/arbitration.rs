//! How a primary obtains the right to run alone, and gives it up for a standby.
//!
//! ```text
//!   not exposed, or manual: at once
//!   witness: asks for Solo until the state is Solo in this term, newer than each requested pairing
//!   fencing: while the lease lasts, sends heartbeats with pairing 0 until the standby answers one
//!            with pairing 0; after the lease, runs the fence hook
//! ```

use super::{Exposure, Handing, OpenRequest, Phase, Primary, PrimaryAction};
use crate::{Arbitration, Notice, OwnerMode, StandbyLossReason, WitnessReply, WitnessRequest};

/// A failed fence hook is tried again after at most `retry_ns` times 2 to this power.
const BACKOFF_MAX: u32 = 5;

impl Primary {
    /// Checks whether the lease has ended, or whether the standby or its data path is lost.
    pub(super) fn check_losses(&mut self) {
        let Some(peer) = &self.peer else { return };
        let silent = self.now_ns.saturating_sub(peer.heard_ns) >= self.config.detection_ns;
        let no_data = peer
            .no_data_ns
            .is_some_and(|since| self.now_ns.saturating_sub(since) >= self.config.data_ns);
        if let Phase::Handing(Handing::Handed { since_ns, .. }) = self.phase {
            if self.now_ns.saturating_sub(since_ns) >= self.config.detection_ns {
                self.begin_asking(StandbyLossReason::HandOver);
            }
            return;
        }
        if self.asking == Some(StandbyLossReason::Silence)
            && self.has_lease()
            && !self.exposure.solo_sent
            && !self.fencing
        {
            self.asking = None;
        }
        let lost = if self.exposure.is_exposed { !self.has_lease() } else { silent };
        if lost {
            self.lose_standby(StandbyLossReason::Silence);
        } else if no_data {
            self.lose_standby(StandbyLossReason::NoData);
        } else if self.have_epochs_failed() {
            self.lose_standby(StandbyLossReason::FailedEpochs);
        }
    }

    /// True if output has been held for too long because no epoch succeeds.
    fn have_epochs_failed(&self) -> bool {
        let is_held =
            matches!(self.phase, Phase::Closing { .. } | Phase::Pairing | Phase::Protected);
        let too_long = |since| self.now_ns.saturating_sub(since) >= self.config.data_ns;
        is_held && self.failing_since_ns.is_some_and(too_long)
    }

    /// Gives the standby up: becomes solo at once, or asks for the right to.
    pub(super) fn lose_standby(&mut self, why: StandbyLossReason) {
        if matches!(self.phase, Phase::Handing(Handing::Handed { .. })) {
            self.begin_asking(StandbyLossReason::HandOver);
        } else if self.exposure.is_exposed {
            self.begin_asking(why);
        } else {
            self.become_solo(why);
        }
    }

    fn begin_asking(&mut self, why: StandbyLossReason) {
        // The standby's answer ends a question that silence began, and no other.
        if self.asking.as_ref().is_some_and(|old| {
            *old != StandbyLossReason::Silence || why == StandbyLossReason::Silence
        }) {
            return;
        }
        if matches!(self.phase, Phase::Handing(Handing::Stopping | Handing::Last(_))) {
            self.abort_switch_over();
        }
        if self.config.arbitration == Arbitration::Fencing
            && !matches!(why, StandbyLossReason::Silence | StandbyLossReason::HandOver)
        {
            self.pairing = 0;
            self.disarm_from = Some(self.sequence + 1);
            self.heartbeat_at_ns = self.now_ns;
        }
        self.notify(Notice::StandbyLost(why.clone()));
        self.asking = Some(why);
    }

    /// Runs the VM alone from now on, with the right to do so.
    pub(super) fn become_solo(&mut self, why: StandbyLossReason) {
        self.phase = Phase::Solo;
        self.peer = None;
        self.pairing = 0;
        self.disarm_from = None;
        self.asking = None;
        self.exposure = Exposure { is_exposed: false, solo_sent: false, ..self.exposure };
        self.lease_until_ns = 0;
        self.fence_failed = 0;
        self.failing_since_ns = None;
        self.heartbeat_at_ns = self.now_ns;
        self.notify(Notice::Unprotected(why));
        if self.vm_ended {
            self.finish();
        } else if std::mem::take(&mut self.holding) {
            self.out.push(PrimaryAction::ReleaseAll);
        }
    }

    /// Arms the standby in the phase Pairing, unless a witness does.
    pub(super) fn arm_standby(&mut self) {
        if self.phase != Phase::Pairing {
            return;
        }
        match self.config.arbitration {
            Arbitration::Fencing
                if self.pairing == 0 && self.has_lease() && self.asking.is_none() =>
            {
                self.pairing = 1;
                self.exposure.is_exposed = true;
                self.heartbeat_at_ns = self.now_ns;
            }
            Arbitration::Witness | Arbitration::Fencing => {}
            Arbitration::Manual => {
                self.pairing = 1;
                self.become_protected();
            }
        }
    }

    pub(super) fn become_protected(&mut self) {
        self.phase = Phase::Protected;
        self.heartbeat_at_ns = self.now_ns;
        self.notify(Notice::Protected);
    }

    /// The request for the witness that the state calls for, if any.
    pub(super) fn next_request(&self) -> Option<WitnessRequest> {
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

    /// Sends the next request to the witness if it is due and no other is open.
    pub(super) fn ask_witness(&mut self) {
        if self.open_request.is_some() || self.now_ns < self.ask_at_ns {
            return;
        }
        let Some(request) = self.next_request() else { return };
        self.open_request = Some(OpenRequest { request, before: self.exposure });
        match request {
            WitnessRequest::Paired { generation, .. } => {
                self.exposure.is_exposed = true;
                self.exposure.paired_at = Some(generation);
            }
            WitnessRequest::Solo { .. } => self.exposure.solo_sent = true,
            _ => {}
        }
        self.out.push(PrimaryAction::AskWitness(request));
    }

    /// Handles a request that gets no answer. One that was never sent is taken back.
    pub(super) fn handle_witness_loss(&mut self, sent: bool) {
        let Some(ask) = self.open_request.take() else { return };
        self.ask_at_ns = self.now_ns.saturating_add(self.config.retry_ns);
        if !std::mem::replace(&mut self.witness_silent, true) {
            self.notify(Notice::WitnessUnreachable);
        }
        if !sent {
            match ask.request {
                // The exposure of another session has ended with that session.
                WitnessRequest::Paired { session, .. } if self.session() == Some(session) => {
                    self.exposure.is_exposed = ask.before.is_exposed;
                    self.exposure.paired_at = ask.before.paired_at;
                }
                WitnessRequest::Solo { .. } => self.exposure.solo_sent = ask.before.solo_sent,
                _ => {}
            }
        }
    }

    pub(super) fn handle_witness_reply(&mut self, reply: WitnessReply) {
        let Some(ask) = self.open_request.filter(|_| reply.group == self.config.group) else {
            return;
        };
        self.open_request = None;
        self.witness_silent = false;
        let seen = self.generation;
        let state = reply.state.filter(|state| state.generation >= seen);
        let Some(state) = state else {
            // The witness does not know the group: it is new, there is no room, or it lost its
            // state.
            if reply.state.is_none() {
                self.generation = 0;
            }
            self.ask_at_ns = self.now_ns.saturating_add(if seen == self.generation {
                self.config.retry_ns
            } else {
                0
            });
            self.notify(Notice::WitnessRefused);
            return;
        };
        self.generation = state.generation;
        self.ask_at_ns = self.now_ns.saturating_add(if state.generation == seen {
            self.config.retry_ns
        } else {
            0
        });
        if state.term > self.term || (state.term == self.term && state.owner != self.config.node) {
            return self.end_as_deposed(state.term);
        }
        self.unrecorded = state.term < self.term;
        if self.unrecorded || matches!(ask.request, WitnessRequest::Forced { .. }) {
            return;
        }
        let resolved = self.exposure.paired_at.is_none_or(|at| state.generation > at);
        match state.mode {
            OwnerMode::Solo if resolved => {
                self.unsettled = false;
                if let Some(why) = self.asking.clone() {
                    self.become_solo(why);
                } else if self.phase == Phase::Pairing {
                    // The request for a pairing named an old generation.
                    self.exposure = Exposure::default();
                }
            }
            OwnerMode::Paired { session, .. }
                if Some(session) == self.session() && self.phase == Phase::Pairing =>
            {
                self.pairing = state.generation;
                self.become_protected();
            }
            _ => {}
        }
    }

    pub(super) fn needs_fence(&self) -> bool {
        self.config.arbitration == Arbitration::Fencing
            && self.asking.as_ref().is_some_and(|why| *why != StandbyLossReason::HandOver)
            && !self.has_lease()
    }

    pub(super) fn start_fencing(&mut self) {
        if self.needs_fence() && !self.fencing && self.now_ns >= self.fence_at_ns {
            self.fencing = true;
            self.out.push(PrimaryAction::Fence);
        }
    }

    /// Handles the end of the fence hook: `off` is true if the other host is certainly off.
    pub(super) fn handle_fence_result(&mut self, off: bool) {
        if !std::mem::take(&mut self.fencing) {
            return;
        }
        if !off {
            let wait_ns =
                self.config.retry_ns.saturating_mul(1 << self.fence_failed.min(BACKOFF_MAX));
            self.fence_at_ns = self.now_ns.saturating_add(wait_ns);
            self.fence_failed = self.fence_failed.saturating_add(1);
            self.notify(Notice::FenceFailed(self.fence_failed));
        } else if let Some(why) =
            self.asking.clone().filter(|why| *why != StandbyLossReason::HandOver)
        {
            self.become_solo(why);
        } else if !matches!(self.phase, Phase::Handing(Handing::Handed { .. })) {
            self.lose_standby(StandbyLossReason::Silence);
        }
    }
}
