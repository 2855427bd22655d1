//! Messages, encoded and decoded.

use super::*;
use crate::wire::DecodeError;
use keyframe_bytes::ReadError;
use proptest::option;
use proptest::prelude::*;

fn hello() -> impl Strategy<Value = Hello> {
    let n = any::<u64>;
    let sessions = (option::of(n()), option::of(n()), option::of(n()));
    let fields = (any::<bool>(), any::<u128>(), (n(), n(), n(), n()), sessions);
    fields.prop_map(
        |(standby, group, (node, instance, term, digest), (session, left, complete))| Hello {
            role: if standby { NodeRole::Standby } else { NodeRole::Primary },
            group: GroupId(group),
            node: NodeId(node),
            instance,
            term: Term(term),
            digest,
            session: session.map(SessionId),
            left: left.map(SessionId),
            complete: complete.map(Epoch),
        },
    )
}

fn refusal() -> impl Strategy<Value = PeerRefusal> {
    prop_oneof![
        Just(PeerRefusal::WrongGroup),
        Just(PeerRefusal::WrongConfig),
        Just(PeerRefusal::Busy),
        Just(PeerRefusal::SameRole),
        any::<u64>().prop_map(|term| PeerRefusal::StaleTerm(Term(term))),
    ]
}

fn message() -> impl Strategy<Value = PeerMessage> {
    let n = any::<u64>;
    let session = || any::<u64>().prop_map(SessionId);
    prop_oneof![
        hello().prop_map(PeerMessage::Hello),
        (n(), session(), n()).prop_map(|(term, session, sequence)| PeerMessage::HelloAck {
            term: Term(term),
            session,
            sequence
        }),
        refusal().prop_map(PeerMessage::Refused),
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
        (session(), n())
            .prop_map(|(session, epoch)| PeerMessage::EpochAck { session, epoch: Epoch(epoch) }),
        session().prop_map(|session| PeerMessage::RequestSwitchOver { session }),
        (session(), n())
            .prop_map(|(session, epoch)| PeerMessage::HandOver { session, epoch: Epoch(epoch) }),
        n().prop_map(|term| PeerMessage::TookOver { term: Term(term) }),
        (session(), ".{0,100}").prop_map(|(session, reason)| PeerMessage::Sick { session, reason }),
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
    PeerMessage::Sick { session: SessionId(1), reason: format!("a{reason}") }.encode(&mut bytes);
    let Ok(PeerMessage::Sick { reason, .. }) = PeerMessage::decode(&bytes) else { panic!() };
    assert_eq!(reason.len(), 511);
}

#[test]
fn another_version_is_an_error() {
    assert_eq!(PeerMessage::decode(&[9, 1]), Err(DecodeError::Version { version: 9, known: 1 }));
}
