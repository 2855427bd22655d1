//! The messages between a primary and a standby, and their encoding.
//!
//! ```text
//!   version u8 │ kind u8 │ fields, little-endian, in the order of their declaration
//! ```
//!
//! The transport frames messages. The data of epochs travels outside messages: the driver sends it
//! with its session and its epoch.

use crate::wire::{DecodeError, put, put_optional, read_optional, read_version, unknown_value};
use crate::{Epoch, GroupId, NodeId, SessionId, Term};
use keyframe_bytes::ByteReader;

/// The version of the protocol. Both nodes must have the same.
pub const PROTOCOL_VERSION: u8 = 1;
/// The most bytes of a reason; a longer text is cut.
pub const REASON_BYTES_MAX: usize = 512;
/// The most bytes of an encoded message.
pub const MESSAGE_BYTES_MAX: usize = REASON_BYTES_MAX + 64;

/// The role of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeRole {
    /// The node runs the VM, or is about to.
    Primary,
    /// The node holds a copy of the VM, or asks for one.
    Standby,
}

/// The first message of both nodes on a path. A standby without a session repeats it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The sender's role.
    pub role: NodeRole,
    /// The VM that the sender protects.
    pub group: GroupId,
    /// The sender's node.
    pub node: NodeId,
    /// The sender's process: another number after each start.
    pub instance: u64,
    /// The newest term that the sender knows; 0 if it knows none.
    pub term: Term,
    /// A hash of the settings that must be the same on both nodes.
    pub digest: u64,
    /// The session to go on with.
    pub session: Option<SessionId>,
    /// A session that the standby has given up for good.
    pub left: Option<SessionId>,
    /// The newest epoch of `session` that arrived whole.
    pub complete: Option<Epoch>,
}

/// StandbyLossReason a node refuses its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRefusal {
    /// The peer protects another VM.
    WrongGroup,
    /// The settings differ.
    WrongConfig,
    /// The primary has a standby, or does not know yet whether its last one took over. Ask again.
    Busy,
    /// The VM runs in this later term already.
    StaleTerm(Term),
    /// Both nodes have the same role in the same term.
    SameRole,
}

/// A message between a primary and a standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// The first message on a path.
    Hello(Hello),
    /// The primary accepts the standby, or goes on with it.
    HelloAck {
        /// The primary's term.
        term: Term,
        /// The session.
        session: SessionId,
        /// The newest heartbeat so far: those up to it belong to the time before.
        sequence: u64,
    },
    /// The sender refuses its peer.
    Refused(PeerRefusal),
    /// The primary is alive.
    Heartbeat {
        /// The number of the heartbeat, counted over all paths.
        sequence: u64,
        /// When it was sent, by the primary's clock.
        sent_ns: u64,
        /// The primary's term.
        term: Term,
        /// The session; `None` if the primary runs alone.
        session: Option<SessionId>,
        /// Not 0 if output is held, so that the standby may take over. With a witness it is the
        /// generation of the pairing.
        pairing: u64,
    },
    /// The standby is alive, and leaves the VM to the primary for the detection time.
    HeartbeatAck {
        /// The heartbeat's number.
        sequence: u64,
        /// When the heartbeat was sent, by the primary's clock.
        sent_ns: u64,
        /// The heartbeat's session.
        session: SessionId,
        /// The pairing of the newest heartbeat that the standby knows.
        pairing: u64,
        /// The newest epoch of this session that the standby has applied.
        held: Option<Epoch>,
    },
    /// The standby has applied this epoch and all before it.
    EpochAck {
        /// The session of the epochs.
        session: SessionId,
        /// The newest epoch.
        epoch: Epoch,
    },
    /// The standby asks for a switch-over.
    RequestSwitchOver {
        /// The session.
        session: SessionId,
    },
    /// The primary has stopped its VM for a switch-over. It runs the VM again only with the right
    /// to run alone.
    HandOver {
        /// The session.
        session: SessionId,
        /// The last epoch.
        epoch: Epoch,
    },
    /// The sender has taken the VM over.
    TookOver {
        /// Its term.
        term: Term,
    },
    /// The standby can take no more epochs. The epoch that it holds is whole.
    Sick {
        /// The session.
        session: SessionId,
        /// The reason, for users.
        reason: String,
    },
    /// The VM has shut down; as the standby's answer: it will not take over.
    Bye {
        /// The session.
        session: SessionId,
    },
}

impl PeerMessage {
    /// Appends the message's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(PROTOCOL_VERSION);
        match self {
            Self::Hello(hello) => {
                out.extend_from_slice(&[1, u8::from(hello.role == NodeRole::Standby)]);
                out.extend_from_slice(&hello.group.0.to_le_bytes());
                put(out, &[hello.node.0, hello.instance, hello.term.0, hello.digest]);
                put_optional(out, hello.session.map(|session| session.0));
                put_optional(out, hello.left.map(|session| session.0));
                put_optional(out, hello.complete.map(|epoch| epoch.0));
            }
            Self::HelloAck { term, session, sequence } => {
                out.push(2);
                put(out, &[term.0, session.0, *sequence]);
            }
            Self::Refused(refusal) => {
                let (kind, term) = match refusal {
                    PeerRefusal::WrongGroup => (0, 0),
                    PeerRefusal::WrongConfig => (1, 0),
                    PeerRefusal::Busy => (2, 0),
                    PeerRefusal::StaleTerm(term) => (3, term.0),
                    PeerRefusal::SameRole => (4, 0),
                };
                out.extend_from_slice(&[3, kind]);
                put(out, &[term]);
            }
            Self::Heartbeat { sequence, sent_ns, term, session, pairing } => {
                out.push(4);
                put(out, &[*sequence, *sent_ns, term.0, *pairing]);
                put_optional(out, session.map(|session| session.0));
            }
            Self::HeartbeatAck { sequence, sent_ns, session, pairing, held } => {
                out.push(5);
                put(out, &[*sequence, *sent_ns, session.0, *pairing]);
                put_optional(out, held.map(|epoch| epoch.0));
            }
            Self::EpochAck { session, epoch } => {
                out.push(6);
                put(out, &[session.0, epoch.0]);
            }
            Self::RequestSwitchOver { session } => {
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

    /// Decodes one message, which must be all of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = ByteReader::new(bytes);
        read_version(&mut reader, PROTOCOL_VERSION)?;
        let message = Self::decode_fields(&mut reader)?;
        reader.expect_end()?;
        Ok(message)
    }

    fn decode_fields(reader: &mut ByteReader<'_>) -> Result<Self, DecodeError> {
        let kind = reader.u8()?;
        Ok(match kind {
            1 => Self::Hello(decode_hello(reader)?),
            2 => Self::HelloAck {
                term: Term(reader.u64_le()?),
                session: SessionId(reader.u64_le()?),
                sequence: reader.u64_le()?,
            },
            3 => Self::Refused(decode_refusal(reader)?),
            4 => Self::Heartbeat {
                sequence: reader.u64_le()?,
                sent_ns: reader.u64_le()?,
                term: Term(reader.u64_le()?),
                pairing: reader.u64_le()?,
                session: read_optional(reader, "session")?.map(SessionId),
            },
            5 => Self::HeartbeatAck {
                sequence: reader.u64_le()?,
                sent_ns: reader.u64_le()?,
                session: SessionId(reader.u64_le()?),
                pairing: reader.u64_le()?,
                held: read_optional(reader, "held epoch")?.map(Epoch),
            },
            6 => Self::EpochAck {
                session: SessionId(reader.u64_le()?),
                epoch: Epoch(reader.u64_le()?),
            },
            7 => Self::RequestSwitchOver { session: SessionId(reader.u64_le()?) },
            8 => Self::HandOver {
                session: SessionId(reader.u64_le()?),
                epoch: Epoch(reader.u64_le()?),
            },
            9 => Self::TookOver { term: Term(reader.u64_le()?) },
            10 => {
                let session = SessionId(reader.u64_le()?);
                let len = usize::from(reader.u16_le()?);
                if len > REASON_BYTES_MAX {
                    return Err(DecodeError::TooLong {
                        field: "reason",
                        len,
                        max: REASON_BYTES_MAX,
                    });
                }
                let text = std::str::from_utf8(reader.take(len)?)
                    .map_err(|_| DecodeError::NotUtf8 { field: "reason" })?;
                Self::Sick { session, reason: text.to_owned() }
            }
            11 => Self::Bye { session: SessionId(reader.u64_le()?) },
            value => return Err(unknown_value(reader, "kind", value)),
        })
    }
}

fn decode_hello(reader: &mut ByteReader<'_>) -> Result<Hello, DecodeError> {
    let role = match reader.u8()? {
        0 => NodeRole::Primary,
        1 => NodeRole::Standby,
        value => return Err(unknown_value(reader, "role", value)),
    };
    Ok(Hello {
        role,
        group: GroupId(reader.u128_le()?),
        node: NodeId(reader.u64_le()?),
        instance: reader.u64_le()?,
        term: Term(reader.u64_le()?),
        digest: reader.u64_le()?,
        session: read_optional(reader, "session")?.map(SessionId),
        left: read_optional(reader, "session left")?.map(SessionId),
        complete: read_optional(reader, "complete epoch")?.map(Epoch),
    })
}

fn decode_refusal(reader: &mut ByteReader<'_>) -> Result<PeerRefusal, DecodeError> {
    let kind = reader.u8()?;
    let refusal = match kind {
        0 => PeerRefusal::WrongGroup,
        1 => PeerRefusal::WrongConfig,
        2 => PeerRefusal::Busy,
        3 => return Ok(PeerRefusal::StaleTerm(Term(reader.u64_le()?))),
        4 => PeerRefusal::SameRole,
        value => return Err(unknown_value(reader, "refusal", value)),
    };
    reader.u64_le()?;
    Ok(refusal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_bytes::ReadError;
    use proptest::option;
    use proptest::prelude::*;

    fn message() -> impl Strategy<Value = PeerMessage> {
        let n = any::<u64>;
        let session = || any::<u64>().prop_map(SessionId);
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
                PeerMessage::Hello(Hello {
                    role: if standby { NodeRole::Standby } else { NodeRole::Primary },
                    group: GroupId(group),
                    node: NodeId(node),
                    instance,
                    term: Term(term),
                    digest,
                    session: session.map(SessionId),
                    left: left.map(SessionId),
                    complete: complete.map(Epoch),
                })
            },
        );
        let refusal = prop_oneof![
            Just(PeerRefusal::WrongGroup),
            Just(PeerRefusal::WrongConfig),
            Just(PeerRefusal::Busy),
            Just(PeerRefusal::SameRole),
            n().prop_map(|term| PeerRefusal::StaleTerm(Term(term))),
        ];
        prop_oneof![
            hello,
            (n(), session(), n()).prop_map(|(term, session, sequence)| PeerMessage::HelloAck {
                term: Term(term),
                session,
                sequence
            }),
            refusal.prop_map(PeerMessage::Refused),
            (n(), n(), n(), option::of(session()), n()).prop_map(
                |(sequence, sent_ns, term, session, pairing)| {
                    PeerMessage::Heartbeat { sequence, sent_ns, term: Term(term), session, pairing }
                }
            ),
            (n(), n(), session(), n(), option::of(n())).prop_map(
                |(sequence, sent_ns, session, pairing, held)| {
                    PeerMessage::HeartbeatAck {
                        sequence,
                        sent_ns,
                        session,
                        pairing,
                        held: held.map(Epoch),
                    }
                }
            ),
            (session(), n()).prop_map(|(session, epoch)| PeerMessage::EpochAck {
                session,
                epoch: Epoch(epoch)
            }),
            session().prop_map(|session| PeerMessage::RequestSwitchOver { session }),
            (session(), n()).prop_map(|(session, epoch)| PeerMessage::HandOver {
                session,
                epoch: Epoch(epoch)
            }),
            n().prop_map(|term| PeerMessage::TookOver { term: Term(term) }),
            (session(), ".{0,100}")
                .prop_map(|(session, reason)| PeerMessage::Sick { session, reason }),
            session().prop_map(|session| PeerMessage::Bye { session }),
        ]
    }

    proptest! {
        #[test]
        fn an_encoded_message_is_decoded_again(message in message(), cut in any::<prop::sample::Index>()) {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            prop_assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            prop_assert_eq!(PeerMessage::decode(&bytes), Ok(message));
            let short = &bytes[..cut.index(bytes.len())];
            prop_assert!(PeerMessage::decode(short).is_err());
            let at = bytes.len();
            bytes.push(0);
            prop_assert_eq!(PeerMessage::decode(&bytes), Err(DecodeError::Read(ReadError::Trailing { at, len: 1 })));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100), kind in 0..13u8) {
            let _ = PeerMessage::decode(&bytes);
            let _ = PeerMessage::decode(&[&[PROTOCOL_VERSION, kind][..], &bytes].concat());
        }

        #[test]
        fn a_byte_that_changes_never_panics(message in message(), at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = PeerMessage::decode(&bytes);
        }
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let reason = "ä".repeat(400);
        let mut bytes = Vec::new();
        PeerMessage::Sick { session: SessionId(1), reason: format!("a{reason}") }
            .encode(&mut bytes);
        let Ok(PeerMessage::Sick { reason, .. }) = PeerMessage::decode(&bytes) else { panic!() };
        assert_eq!(reason.len(), 511);
    }

    #[test]
    fn another_version_is_an_error() {
        assert_eq!(
            PeerMessage::decode(&[9, 1]),
            Err(DecodeError::Version { version: 9, known: 1 })
        );
    }
}
