//! What a primary says to its standby, and makes of what that says.

use super::{Handing, Peer, Phase, Primary, PrimaryAction};
use crate::{Arbitration, Epoch, Hello, Message, Note, Refusal, Role, Session, Why};

/// The path of the data.
const DATA: u8 = 0;

impl Primary {
    pub(super) fn send(&mut self, path: u8, message: Message) {
        self.out.push(PrimaryAction::Send { path, message });
    }

    pub(super) fn send_all(&mut self, message: &Message) {
        for path in self.paths.up() {
            self.send(path, message.clone());
        }
    }

    pub(super) fn path_up(&mut self, path: u8) {
        if path >= self.config.paths {
            return;
        }
        self.path_down(path);
        self.paths.set(path, true);
        let hello = Hello {
            role: Role::Primary,
            group: self.config.group,
            node: self.config.node,
            instance: self.config.instance,
            term: self.term,
            digest: self.config.agreed(),
            session: self.session(),
            left: None,
            complete: None,
        };
        self.send(path, Message::Hello(hello));
        self.heartbeat_at_ns = self.now_ns;
    }

    pub(super) fn path_down(&mut self, path: u8) {
        self.paths.set(path, false);
        if let Some(peer) = self.peer.as_mut().filter(|_| path == DATA) {
            peer.no_data_ns.get_or_insert(self.now_ns);
        }
    }

    /// Says that this primary lives, when that is due.
    pub(super) fn heartbeat(&mut self) {
        if self.now_ns < self.heartbeat_at_ns {
            return;
        }
        self.heartbeat_at_ns = self.now_ns.saturating_add(self.config.heartbeat_ns);
        self.sequence += 1;
        let session = self.session();
        self.send_all(&Message::Heartbeat {
            sequence: self.sequence,
            sent_ns: self.now_ns,
            term: self.term,
            session,
            pairing: self.pairing,
        });
        let Some(session) = session else { return };
        if let Phase::Handing(Handing::Handed { epoch, .. }) = self.phase {
            self.send_all(&Message::HandOver { session, epoch });
        }
        if self.vm_ended {
            self.send_all(&Message::Bye { session });
        }
    }

    pub(super) fn hear(&mut self, path: u8, message: Message) {
        match message {
            Message::Hello(hello) => self.hello(path, hello),
            Message::HelloAck { term, .. }
            | Message::TookOver { term }
            | Message::Heartbeat { term, .. }
            | Message::Refused(Refusal::StaleTerm(term)) => {
                if term > self.term {
                    self.deposed(term);
                }
            }
            Message::Refused(refusal) => self.note(Note::Refused(refusal)),
            Message::HeartbeatAck { sequence, sent_ns, session, pairing, held } => {
                if self.hears(session) && sequence <= self.sequence && sent_ns <= self.now_ns {
                    self.answered(sequence, sent_ns, pairing, held);
                }
            }
            Message::EpochAck { session, epoch } => {
                if self.hears(session) {
                    self.acked(epoch);
                }
            }
            Message::WantSwitchOver { session } => {
                if self.hears(session) {
                    self.switch_over();
                }
            }
            Message::Sick { session, reason } => {
                if self.hears(session) {
                    self.lose(Why::Sick(reason));
                }
            }
            Message::Bye { session } => {
                if self.hears(session) && self.vm_ended {
                    self.finish();
                }
            }
            Message::HandOver { .. } => {}
        }
    }

    /// A sign of life, if it is of this session.
    fn hears(&mut self, session: Session) -> bool {
        let Some(peer) = self.peer.as_mut().filter(|peer| peer.session == session) else {
            return false;
        };
        peer.heard_ns = self.now_ns;
        true
    }

    fn answered(&mut self, sequence: u64, sent_ns: u64, pairing: u64, held: Option<Epoch>) {
        self.lease_until_ns = self.lease_until_ns.max(sent_ns.saturating_add(self.config.lease_ns));
        if let Some(epoch) = held {
            self.acked(epoch);
        }
        let fences = self.config.arbitration == Arbitration::Fencing;
        if fences && pairing != 0 && self.phase == Phase::Pairing && self.asking.is_none() {
            self.protected();
        }
        if pairing == 0
            && self.disarm.is_some_and(|from| from <= sequence)
            && let Some(why) = self.asking.clone()
        {
            self.become_solo(why);
        }
    }

    fn hello(&mut self, path: u8, hello: Hello) {
        let refusal = match hello {
            _ if hello.group != self.config.group => Refusal::WrongGroup,
            _ if hello.digest != self.config.agreed() => Refusal::WrongConfig,
            _ if hello.term > self.term => return self.deposed(hello.term),
            Hello { role: Role::Primary, term, .. } if term < self.term => {
                Refusal::StaleTerm(self.term)
            }
            Hello { role: Role::Primary, .. } => Refusal::SameRole,
            _ => return self.standby(path, &hello),
        };
        if matches!(refusal, Refusal::WrongGroup | Refusal::WrongConfig | Refusal::SameRole) {
            self.note(Note::Refused(refusal));
        }
        self.send(path, Message::Refused(refusal));
    }

    /// A standby greets: one that goes on, one that comes back, or a new one.
    fn standby(&mut self, path: u8, hello: &Hello) {
        if let Some(peer) = &self.peer {
            let same = peer.node == hello.node && peer.instance == hello.instance;
            if same && hello.left != Some(peer.session) {
                return self.go_on(path, hello);
            }
            if peer.node == hello.node {
                self.forsaken();
            }
        }
        if path != DATA {
            return;
        }
        let free =
            self.phase == Phase::Solo && !self.unsettled && !self.unrecorded && !self.vm_ended;
        if free {
            self.accept(hello);
        } else {
            self.send(path, Message::Refused(Refusal::Busy));
        }
    }

    /// The standby's process of this session is no more, or has given it up: it does not take over
    /// in it.
    fn forsaken(&mut self) {
        let handed = matches!(self.phase, Phase::Handing(Handing::Handed { .. }));
        if self.config.arbitration == Arbitration::Witness || handed {
            // It may have asked, and the witness may have granted it.
            self.lose(Why::Restarted);
        } else {
            self.become_solo(Why::Restarted);
        }
    }

    fn accept(&mut self, hello: &Hello) {
        self.sessions += 1;
        let session = Session(self.config.instance.wrapping_add(self.sessions).max(1));
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
        self.note(Note::Joined(hello.node));
        let (term, sequence) = (self.term, self.sequence);
        self.send(DATA, Message::HelloAck { term, session, sequence });
        self.out.push(PrimaryAction::BeginSync { session });
    }

    /// The session goes on; on a data path that is new, with what has not arrived.
    fn go_on(&mut self, path: u8, hello: &Hello) {
        let Some(peer) = &mut self.peer else { return };
        let session = peer.session;
        peer.heard_ns = self.now_ns;
        let anew = path == DATA && peer.no_data_ns.take().is_some();
        let (term, sequence) = (self.term, self.sequence);
        self.send(path, Message::HelloAck { term, session, sequence });
        if !anew {
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
