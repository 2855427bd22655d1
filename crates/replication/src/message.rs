//! What a primary and a standby say to each other, and as which bytes.
//!
//! ```text
//!   version u8 │ kind u8 │ fields, little-endian, in the order of their declaration
//! ```
//!
//! Framing is the transport's. The bytes of epochs are no messages: the driver sends them beside,
//! with their session and epoch.

use crate::wire::{DecodeError, Reader, put, put_option};
use crate::{Epoch, GroupId, NodeId, Session, Term};

/// Both nodes must have the same.
pub const PROTOCOL_VERSION: u8 = 1;
/// Longer texts are cut.
pub const REASON_BYTES_MAX: usize = 512;
/// No message is longer.
pub const MESSAGE_BYTES_MAX: usize = REASON_BYTES_MAX + 64;

/// What a node is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs the VM, or wants to.
    Primary,
    /// Holds a copy, or wants one.
    Standby,
}

/// The first message on a path, from both sides; a standby without a session repeats it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// As what the sender comes.
    pub role: Role,
    /// The VM.
    pub group: GroupId,
    /// The sender.
    pub node: NodeId,
    /// The sender's process.
    pub instance: u64,
    /// The newest that the sender knows; 0: none.
    pub term: Term,
    /// Of the configuration that must be alike.
    pub digest: u64,
    /// The one that goes on.
    pub session: Option<Session>,
    /// A standby's session that it has given up: it does not go on.
    pub left: Option<Session>,
    /// The newest epoch of `session` that came whole.
    pub complete: Option<Epoch>,
}

/// Why a peer is not wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another VM.
    WrongGroup,
    /// The configurations differ.
    WrongConfig,
    /// There is a standby, or what it was is not decided yet: ask again.
    Busy,
    /// The VM runs in this later term.
    StaleTerm(Term),
    /// Both are primary, or both standby, in one term.
    SameRole,
}

/// What is said on a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// See [`Hello`].
    Hello(Hello),
    /// The primary takes the standby, or goes on with it.
    HelloAck {
        /// Whose term.
        term: Term,
        /// Of this standby with this primary.
        session: Session,
        /// Heartbeats up to this one are from before.
        sequence: u64,
    },
    /// The primary, or the standby, does not want the other.
    Refused(Refusal),
    /// The primary lives.
    Heartbeat {
        /// Counts heartbeats, over all paths.
        sequence: u64,
        /// The primary's clock.
        sent_ns: u64,
        /// The primary's term.
        term: Term,
        /// `None`: it runs alone.
        session: Option<Session>,
        /// Not 0: the output is held, so the standby may take over; with a witness, the generation
        /// of the pairing.
        pairing: u64,
    },
    /// The standby lives, and will leave the primary its VM for the detection time.
    HeartbeatAck {
        /// Of the heartbeat.
        sequence: u64,
        /// Of the heartbeat: the primary's clock.
        sent_ns: u64,
        /// Of the heartbeat.
        session: Session,
        /// The newest that the standby knows.
        pairing: u64,
        /// The newest epoch of this session that is applied.
        held: Option<Epoch>,
    },
    /// This epoch, and all before it, are on the standby.
    EpochAck {
        /// In which they came.
        session: Session,
        /// The newest.
        epoch: Epoch,
    },
    /// The standby asks for a switch-over.
    WantSwitchOver {
        /// Of both.
        session: Session,
    },
    /// The primary has stopped, this was its last epoch, and it will not run on unless by right.
    HandOver {
        /// Of both.
        session: Session,
        /// The last.
        epoch: Epoch,
    },
    /// The sender runs the VM, in this term.
    TookOver {
        /// Its own.
        term: Term,
    },
    /// The standby cannot take epochs any more; what it holds is whole.
    Sick {
        /// Of both.
        session: Session,
        /// For the user.
        reason: String,
    },
    /// The VM has ended; and the standby's answer, that it will not take over.
    Bye {
        /// Of both.
        session: Session,
    },
}

impl Message {
    /// Appends its bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(PROTOCOL_VERSION);
        match self {
            Self::Hello(hello) => {
                out.extend_from_slice(&[1, u8::from(hello.role == Role::Standby)]);
                out.extend_from_slice(&hello.group.0.to_le_bytes());
                put(out, &[hello.node.0, hello.instance, hello.term.0, hello.digest]);
                put_option(out, hello.session.map(|session| session.0));
                put_option(out, hello.left.map(|session| session.0));
                put_option(out, hello.complete.map(|epoch| epoch.0));
            }
            Self::HelloAck { term, session, sequence } => {
                out.push(2);
                put(out, &[term.0, session.0, *sequence]);
            }
            Self::Refused(refusal) => {
                let (kind, term) = match refusal {
                    Refusal::WrongGroup => (0, 0),
                    Refusal::WrongConfig => (1, 0),
                    Refusal::Busy => (2, 0),
                    Refusal::StaleTerm(term) => (3, term.0),
                    Refusal::SameRole => (4, 0),
                };
                out.extend_from_slice(&[3, kind]);
                put(out, &[term]);
            }
            Self::Heartbeat { sequence, sent_ns, term, session, pairing } => {
                out.push(4);
                put(out, &[*sequence, *sent_ns, term.0, *pairing]);
                put_option(out, session.map(|session| session.0));
            }
            Self::HeartbeatAck { sequence, sent_ns, session, pairing, held } => {
                out.push(5);
                put(out, &[*sequence, *sent_ns, session.0, *pairing]);
                put_option(out, held.map(|epoch| epoch.0));
            }
            Self::EpochAck { session, epoch } => {
                out.push(6);
                put(out, &[session.0, epoch.0]);
            }
            Self::WantSwitchOver { session } => {
                out.push(7);
                put(out, &[session.0]);
            }
            Self::HandOver { session, epoch } => {
                out.push(8);
                put(out, &[session.0, epoch.0]);
            }
            Self::TookOver { term } => {
                out.push(9);
                put(out, &[term.0]);
            }
            Self::Sick { session, reason } => {
                out.push(10);
                put(out, &[session.0]);
                let text = &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES_MAX)];
                out.extend_from_slice(&(text.len() as u16).to_le_bytes());
                out.extend_from_slice(text);
            }
            Self::Bye { session } => {
                out.push(11);
                put(out, &[session.0]);
            }
        }
    }

    /// The message that `bytes` are, no more and no less.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        match reader.u8()? {
            PROTOCOL_VERSION => {}
            version => return Err(DecodeError::Version(version)),
        }
        let message = Self::fields(&mut reader)?;
        reader.end()?;
        Ok(message)
    }

    fn fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let kind = reader.u8()?;
        Ok(match kind {
            1 => Self::Hello(hello(reader)?),
            2 => Self::HelloAck {
                term: Term(reader.u64()?),
                session: Session(reader.u64()?),
                sequence: reader.u64()?,
            },
            3 => Self::Refused(refusal(reader)?),
            4 => Self::Heartbeat {
                sequence: reader.u64()?,
                sent_ns: reader.u64()?,
                term: Term(reader.u64()?),
                pairing: reader.u64()?,
                session: reader.option("session")?.map(Session),
            },
            5 => Self::HeartbeatAck {
                sequence: reader.u64()?,
                sent_ns: reader.u64()?,
                session: Session(reader.u64()?),
                pairing: reader.u64()?,
                held: reader.option("held epoch")?.map(Epoch),
            },
            6 => Self::EpochAck { session: Session(reader.u64()?), epoch: Epoch(reader.u64()?) },
            7 => Self::WantSwitchOver { session: Session(reader.u64()?) },
            8 => Self::HandOver { session: Session(reader.u64()?), epoch: Epoch(reader.u64()?) },
            9 => Self::TookOver { term: Term(reader.u64()?) },
            10 => {
                let session = Session(reader.u64()?);
                let len = usize::from(reader.u16()?);
                if len > REASON_BYTES_MAX {
                    return Err(DecodeError::Long { field: "reason", len, max: REASON_BYTES_MAX });
                }
                let text = std::str::from_utf8(reader.take(len)?)
                    .map_err(|_| DecodeError::Text("reason"))?;
                Self::Sick { session, reason: text.to_owned() }
            }
            11 => Self::Bye { session: Session(reader.u64()?) },
            value => return Err(reader.unknown("kind", value)),
        })
    }
}

fn hello(reader: &mut Reader<'_>) -> Result<Hello, DecodeError> {
    let role = match reader.u8()? {
        0 => Role::Primary,
        1 => Role::Standby,
        value => return Err(reader.unknown("role", value)),
    };
    Ok(Hello {
        role,
        group: GroupId(reader.u128()?),
        node: NodeId(reader.u64()?),
        instance: reader.u64()?,
        term: Term(reader.u64()?),
        digest: reader.u64()?,
        session: reader.option("session")?.map(Session),
        left: reader.option("session left")?.map(Session),
        complete: reader.option("complete epoch")?.map(Epoch),
    })
}

fn refusal(reader: &mut Reader<'_>) -> Result<Refusal, DecodeError> {
    let kind = reader.u8()?;
    let refusal = match kind {
        0 => Refusal::WrongGroup,
        1 => Refusal::WrongConfig,
        2 => Refusal::Busy,
        3 => return Ok(Refusal::StaleTerm(Term(reader.u64()?))),
        4 => Refusal::SameRole,
        value => return Err(reader.unknown("refusal", value)),
    };
    reader.u64()?;
    Ok(refusal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::option;
    use proptest::prelude::*;

    fn message() -> impl Strategy<Value = Message> {
        let n = any::<u64>;
        let session = || any::<u64>().prop_map(Session);
        let hello = (
            any::<bool>(),
            any::<u128>(),
            (n(), n(), n(), n()),
            option::of(n()),
            option::of(n()),
            option::of(n()),
        );
        let hello = hello.prop_map(
            |(standby, group, (node, instance, term, digest), session, left, complete)| {
                Message::Hello(Hello {
                    role: if standby { Role::Standby } else { Role::Primary },
                    group: GroupId(group),
                    node: NodeId(node),
                    instance,
                    term: Term(term),
                    digest,
                    session: session.map(Session),
                    left: left.map(Session),
                    complete: complete.map(Epoch),
                })
            },
        );
        let refusal = prop_oneof![
            Just(Refusal::WrongGroup),
            Just(Refusal::WrongConfig),
            Just(Refusal::Busy),
            Just(Refusal::SameRole),
            n().prop_map(|term| Refusal::StaleTerm(Term(term))),
        ];
        prop_oneof![
            hello,
            (n(), session(), n()).prop_map(|(term, session, sequence)| Message::HelloAck {
                term: Term(term),
                session,
                sequence
            }),
            refusal.prop_map(Message::Refused),
            (n(), n(), n(), option::of(session()), n()).prop_map(
                |(sequence, sent_ns, term, session, pairing)| {
                    Message::Heartbeat { sequence, sent_ns, term: Term(term), session, pairing }
                }
            ),
            (n(), n(), session(), n(), option::of(n())).prop_map(
                |(sequence, sent_ns, session, pairing, held)| {
                    Message::HeartbeatAck {
                        sequence,
                        sent_ns,
                        session,
                        pairing,
                        held: held.map(Epoch),
                    }
                }
            ),
            (session(), n())
                .prop_map(|(session, epoch)| Message::EpochAck { session, epoch: Epoch(epoch) }),
            session().prop_map(|session| Message::WantSwitchOver { session }),
            (session(), n())
                .prop_map(|(session, epoch)| Message::HandOver { session, epoch: Epoch(epoch) }),
            n().prop_map(|term| Message::TookOver { term: Term(term) }),
            (session(), ".{0,100}").prop_map(|(session, reason)| Message::Sick { session, reason }),
            session().prop_map(|session| Message::Bye { session }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(message in message(), cut in any::<prop::sample::Index>()) {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            prop_assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            prop_assert_eq!(Message::decode(&bytes), Ok(message));
            let short = &bytes[..cut.index(bytes.len())];
            prop_assert!(Message::decode(short).is_err());
            bytes.push(0);
            prop_assert_eq!(Message::decode(&bytes), Err(DecodeError::Trailing(1)));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100), kind in 0..13u8) {
            let _ = Message::decode(&bytes);
            let _ = Message::decode(&[&[PROTOCOL_VERSION, kind][..], &bytes].concat());
        }

        #[test]
        fn a_byte_that_changes_never_panics(message in message(), at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = Message::decode(&bytes);
        }
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let reason = "ä".repeat(400);
        let mut bytes = Vec::new();
        Message::Sick { session: Session(1), reason: format!("a{reason}") }.encode(&mut bytes);
        let Ok(Message::Sick { reason, .. }) = Message::decode(&bytes) else { panic!() };
        assert_eq!(reason.len(), 511);
    }

    #[test]
    fn another_version_is_told() {
        assert_eq!(Message::decode(&[9, 1]), Err(DecodeError::Version(9)));
    }
}
