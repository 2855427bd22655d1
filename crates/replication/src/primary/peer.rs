//! The messages that a primary exchanges with its standby.

use super::{Handing, Peer, Phase, Primary, PrimaryAction};
use crate::{
    Arbitration, Epoch, Hello, NodeRole, Notice, PeerMessage, PeerRefusal, SessionId,
    StandbyLossReason,
};

/// The path that carries data.
const DATA_PATH: u8 = 0;

impl Primary {
    pub(super) fn send(&mut self, path: u8, message: PeerMessage) {
        self.out.push(PrimaryAction::Send { path, message });
    }

    pub(super) fn broadcast(&mut self, message: &PeerMessage) {
        for path in self.paths.iter() {
            self.send(path, message.clone());
        }
    }

    pub(super) fn connect_path(&mut self, path: u8) {
        if path >= self.config.paths {
            return;
        }
        self.disconnect_path(path);
        self.paths.set(path, true);
        let hello = Hello {
            role: NodeRole::Primary,
            group: self.config.group,
            node: self.config.node,
            instance: self.config.instance,
            term: self.term,
            digest: self.config.shared_digest(),
            session: self.session(),
            left: None,
            complete: None,
        };
        self.send(path, PeerMessage::Hello(hello));
        self.heartbeat_at_ns = self.now_ns;
    }

    pub(super) fn disconnect_path(&mut self, path: u8) {
        self.paths.set(path, false);
        if let Some(peer) = self.peer.as_mut().filter(|_| path == DATA_PATH) {
            peer.no_data_ns.get_or_insert(self.now_ns);
        }
    }

    /// Sends a heartbeat if one is due.
    pub(super) fn send_heartbeat(&mut self) {
        if self.now_ns < self.heartbeat_at_ns {
            return;
        }
        self.heartbeat_at_ns = self.now_ns.saturating_add(self.config.heartbeat_ns);
        self.sequence += 1;
        let session = self.session();
        self.broadcast(&PeerMessage::Heartbeat {
            sequence: self.sequence,
            sent_ns: self.now_ns,
            term: self.term,
            session,
            pairing: self.pairing,
        });
        let Some(session) = session else { return };
        if let Phase::Handing(Handing::Handed { epoch, .. }) = self.phase {
            self.broadcast(&PeerMessage::HandOver { session, epoch });
        }
        if self.vm_ended {
            self.broadcast(&PeerMessage::Bye { session });
        }
    }

    pub(super) fn handle_message(&mut self, path: u8, message: PeerMessage) {
        match message {
            PeerMessage::Hello(hello) => self.handle_hello(path, hello),
            PeerMessage::HelloAck { term, .. }
            | PeerMessage::TookOver { term }
            | PeerMessage::Heartbeat { term, .. }
            | PeerMessage::Refused(PeerRefusal::StaleTerm(term)) => {
                if term > self.term {
                    self.end_as_deposed(term);
                }
            }
            PeerMessage::Refused(refusal) => self.notify(Notice::Refused(refusal)),
            PeerMessage::HeartbeatAck { sequence, sent_ns, session, pairing, held } => {
                if self.record_sign_of_life(session)
                    && sequence <= self.sequence
                    && sent_ns <= self.now_ns
                {
                    self.handle_heartbeat_answer(sequence, sent_ns, pairing, held);
                }
            }
            PeerMessage::EpochAck { session, epoch } => {
                if self.record_sign_of_life(session) {
                    self.handle_acknowledgement(epoch);
                }
            }
            PeerMessage::RequestSwitchOver { session } => {
                if self.record_sign_of_life(session) {
                    self.begin_switch_over();
                }
            }
            PeerMessage::Sick { session, reason } => {
                if self.record_sign_of_life(session) {
                    self.lose_standby(StandbyLossReason::Sick(reason));
                }
            }
            PeerMessage::Bye { session } => {
                if self.record_sign_of_life(session) && self.vm_ended {
                    self.finish();
                }
            }
            PeerMessage::HandOver { .. } => {}
        }
    }

    /// Records a sign of life of the standby. Returns false if it is of another session.
    fn record_sign_of_life(&mut self, session: SessionId) -> bool {
        let Some(peer) = self.peer.as_mut().filter(|peer| peer.session == session) else {
            return false;
        };
        peer.heard_ns = self.now_ns;
        true
    }

    /// Renews the lease by a heartbeat's answer, and confirms that the standby is armed or
    /// disarmed.
    fn handle_heartbeat_answer(
        &mut self,
        sequence: u64,
        sent_ns: u64,
        pairing: u64,
        held: Option<Epoch>,
    ) {
        self.lease_until_ns = self.lease_until_ns.max(sent_ns.saturating_add(self.config.lease_ns));
        if let Some(epoch) = held {
            self.handle_acknowledgement(epoch);
        }
        let fences = self.config.arbitration == Arbitration::Fencing;
        if fences && pairing != 0 && self.phase == Phase::Pairing && self.asking.is_none() {
            self.become_protected();
        }
        if pairing == 0
            && self.disarm_from.is_some_and(|from| from <= sequence)
            && let Some(why) = self.asking.clone()
        {
            self.become_solo(why);
        }
    }

    fn handle_hello(&mut self, path: u8, hello: Hello) {
        let refusal = match hello {
            _ if hello.group != self.config.group => PeerRefusal::WrongGroup,
            _ if hello.digest != self.config.shared_digest() => PeerRefusal::WrongConfig,
            _ if hello.term > self.term => return self.end_as_deposed(hello.term),
            Hello { role: NodeRole::Primary, term, .. } if term < self.term => {
                PeerRefusal::StaleTerm(self.term)
            }
            Hello { role: NodeRole::Primary, .. } => PeerRefusal::SameRole,
            _ => return self.greet_standby(path, &hello),
        };
        if matches!(
            refusal,
            PeerRefusal::WrongGroup | PeerRefusal::WrongConfig | PeerRefusal::SameRole
        ) {
            self.notify(Notice::Refused(refusal));
        }
        self.send(path, PeerMessage::Refused(refusal));
    }

    /// Handles the greeting of a standby that goes on, comes back, or is new.
    fn greet_standby(&mut self, path: u8, hello: &Hello) {
        if let Some(peer) = &self.peer {
            let same = peer.node == hello.node && peer.instance == hello.instance;
            if same && hello.left != Some(peer.session) {
                return self.resume_session(path, hello);
            }
            if peer.node == hello.node {
                self.end_session_of_lost_standby();
            }
        }
        if path != DATA_PATH {
            return;
        }
        let free = self.phase == Phase::Solo
            && !self.unsettled
            && !self.unrecorded
            && !self.vm_ended
            && !self.capture_blocked;
        if free {
            self.accept_standby(hello);
        } else {
            self.send(path, PeerMessage::Refused(PeerRefusal::Busy));
        }
    }

    /// Ends the session of a standby whose process has restarted or has given the session up.
    fn end_session_of_lost_standby(&mut self) {
        let handed = matches!(self.phase, Phase::Handing(Handing::Handed { .. }));
        if self.config.arbitration == Arbitration::Witness || handed {
            // It may have asked the witness, which may have let it take over.
            self.lose_standby(StandbyLossReason::Restarted);
        } else {
            self.become_solo(StandbyLossReason::Restarted);
        }
    }

    /// Begins a session with a standby.
    fn accept_standby(&mut self, hello: &Hello) {
        self.sessions += 1;
        let session = SessionId(self.config.instance.wrapping_add(self.sessions).max(1));
        self.peer = Some(Peer {
            node: hello.node,
            instance: hello.instance,
            session,
            heard_ns: self.now_ns,
            no_data_ns: None,
            captured: None,
            acked: None,
        });
        self.phase = Phase::Syncing { first: None };
        self.lease_until_ns = 0;
        self.heartbeat_at_ns = self.now_ns;
        self.notify(Notice::Joined(hello.node));
        let (term, sequence) = (self.term, self.sequence);
        self.send(DATA_PATH, PeerMessage::HelloAck { term, session, sequence });
        self.out.push(PrimaryAction::BeginSync { session });
    }

    /// Goes on with the session; on a new data path, with the epochs that have not arrived.
    fn resume_session(&mut self, path: u8, hello: &Hello) {
        let Some(peer) = &mut self.peer else { return };
        let session = peer.session;
        peer.heard_ns = self.now_ns;
        let is_new_path = path == DATA_PATH && peer.no_data_ns.take().is_some();
        let (term, sequence) = (self.term, self.sequence);
        self.send(path, PeerMessage::HelloAck { term, session, sequence });
        if !is_new_path {
            return;
        }
        let after = hello.complete.filter(|_| hello.session == Some(session));
        match &mut self.phase {
            Phase::Syncing { first } if after.is_none() || *first > after => {
                *first = None;
                self.out.push(PrimaryAction::BeginSync { session });
            }
            Phase::Handing(Handing::Last(last @ Some(_))) if *last > after => {
                *last = None;
                self.out
                    .extend([PrimaryAction::Owe { after }, PrimaryAction::Capture { last: true }]);
            }
            Phase::Syncing { .. }
            | Phase::Closing { .. }
            | Phase::Pairing
            | Phase::Protected
            | Phase::Handing(Handing::Stopping | Handing::Last(None)) => {
                self.out.push(PrimaryAction::Owe { after });
                if !matches!(self.phase, Phase::Handing(_) | Phase::Syncing { .. }) {
                    self.out.push(PrimaryAction::Capture { last: false });
                }
            }
            _ => {}
        }
    }
}
