//! The encoding of messages: one kind byte, then the fields.

use super::{Hello, NodeRole, PROTOCOL_VERSION, PeerMessage, PeerRefusal, REASON_BYTES_MAX};
use crate::wire::{DecodeError, put, put_optional, read_optional, read_version, unknown_value};
use crate::{Epoch, GroupId, NodeId, SessionId, Term};
use keyframe_bytes::ByteReader;

impl PeerMessage {
    /// Appends the message's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(PROTOCOL_VERSION);
        match self {
            Self::Hello(hello) => encode_hello(hello, out),
            Self::HelloAck { term, session, sequence } => {
                out.push(2);
                put(out, &[term.0, session.0, *sequence]);
            }
            Self::Refused(refusal) => encode_refusal(*refusal, out),
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
                encode_reason(reason, out);
            }
            Self::Bye { session } => {
                out.push(11);
                put(out, &[session.0]);
            }
        }
    }

    /// Decodes one message, which must be all of `bytes`. Errors: [`DecodeError::Version`] if they
    /// are of another version of the protocol; another [`DecodeError`] if they are malformed.
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
                Self::Sick { session: SessionId(reader.u64_le()?), reason: decode_reason(reader)? }
            }
            11 => Self::Bye { session: SessionId(reader.u64_le()?) },
            value => return Err(unknown_value(reader, "kind", value)),
        })
    }
}

fn encode_hello(hello: &Hello, out: &mut Vec<u8>) {
    out.extend_from_slice(&[1, u8::from(hello.role == NodeRole::Standby)]);
    out.extend_from_slice(&hello.group.0.to_le_bytes());
    put(out, &[hello.node.0, hello.instance, hello.term.0, hello.digest]);
    put_optional(out, hello.session.map(|session| session.0));
    put_optional(out, hello.left.map(|session| session.0));
    put_optional(out, hello.complete.map(|epoch| epoch.0));
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

fn encode_refusal(refusal: PeerRefusal, out: &mut Vec<u8>) {
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

/// Appends a reason, cut at a character if it is longer than [`REASON_BYTES_MAX`].
fn encode_reason(reason: &str, out: &mut Vec<u8>) {
    let text = &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES_MAX)];
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text);
}

fn decode_reason(reader: &mut ByteReader<'_>) -> Result<String, DecodeError> {
    let len = usize::from(reader.u16_le()?);
    if len > REASON_BYTES_MAX {
        return Err(DecodeError::TooLong { field: "reason", len, max: REASON_BYTES_MAX });
    }
    let text = std::str::from_utf8(reader.take(len)?)
        .map_err(|_| DecodeError::NotUtf8 { field: "reason" })?;
    Ok(text.to_owned())
}
