//! The witness: a third host that lets at most one of two nodes run a VM alone.
//!
//! ```text
//!                    Paired(session)                        TakeOver(session)
//!   Solo(A, term) ──────────────────▶ Paired(A, B, term) ──────────────────▶ Solo(B, term + 1)
//!         ▲                                   │
//!         └──────────────  Solo  ─────────────┘              each change makes the next generation
//! ```
//!
//! The witness is a register per group with compare-and-swap: a request names the generation that
//! its sender has seen, and changes nothing at another generation. So a delayed request cannot undo
//! a later one. Each answer is the whole state, which tells a sender the result of all its requests
//! with older generations. Requests are idempotent: a repeated one gets the same answer.
//!
//! Invariants: the witness grants `TakeOver` only from the pairing that the request names, and only
//! once; the driver persists a state before it answers with it. Not here: times. A witness never
//! takes a right back, and does not know which node is alive.

use crate::wire::{DecodeError, put, read_version, unknown_value};
use crate::{GroupId, NodeId, PROTOCOL_VERSION, SessionId, Term};
use keyframe_bytes::ByteReader;
use std::collections::BTreeMap;

/// The largest number of groups that a witness serves.
pub const GROUPS_MAX: usize = 4096;
/// The version of the persisted state.
const STATE_VERSION: u8 = 1;

/// The rights of the owner and its standby to run the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerMode {
    /// The owner alone may run the VM.
    Solo,
    /// The owner may run the VM while its lease lasts; the standby may take it over.
    Paired {
        /// The standby.
        standby: NodeId,
        /// The session whose epochs the standby holds.
        session: SessionId,
    },
}

/// The state of a protected VM at the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupState {
    /// The number of changes of the state.
    pub generation: u64,
    /// The owner's term.
    pub term: Term,
    /// The node that runs the VM.
    pub owner: NodeId,
    /// Whether the owner runs the VM alone.
    pub mode: OwnerMode,
}

/// A request to the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WitnessRequest {
    /// The owner asks for the right to run alone. The witness takes an unknown group as new, with
    /// generation 0.
    Solo {
        /// The VM.
        group: GroupId,
        /// The asking node.
        node: NodeId,
        /// The asking node's term.
        term: Term,
        /// The generation that the asking node has seen.
        generation: u64,
    },
    /// The owner reports that a standby holds all output that clients saw, and may take over.
    Paired {
        /// The VM.
        group: GroupId,
        /// The asking node.
        node: NodeId,
        /// The asking node's term.
        term: Term,
        /// The generation that the asking node has seen.
        generation: u64,
        /// The node that may take over.
        standby: NodeId,
        /// The session whose epochs that node holds.
        session: SessionId,
    },
    /// The standby asks for the right to take over.
    TakeOver {
        /// The VM.
        group: GroupId,
        /// The asking node.
        node: NodeId,
        /// The term of the owner that it takes over from.
        term: Term,
        /// The generation of the pairing.
        generation: u64,
        /// The session of the pairing.
        session: SessionId,
    },
    /// The asking node reports that a user forced it to take over from the owner of `term` or of an
    /// earlier term.
    Forced {
        /// The VM.
        group: GroupId,
        /// The asking node.
        node: NodeId,
        /// The term of the owner that it took over from.
        term: Term,
    },
    /// A node asks for the group's state.
    State {
        /// The VM.
        group: GroupId,
    },
}

/// The witness's answer to a request: the state of the VM after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WitnessReply {
    /// The VM.
    pub group: GroupId,
    /// The state now; `None` if the witness does not know the group, or has no room for it.
    pub state: Option<GroupState>,
}

/// The state machine of a witness, with the state of all groups that it knows. It does no I/O.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Witness {
    groups: BTreeMap<GroupId, GroupState>,
}

impl Witness {
    /// Handles a request. Returns the answer, and true if the state has changed. If it has, the
    /// driver must persist it before it sends the answer.
    pub fn handle(&mut self, request: WitnessRequest) -> (WitnessReply, bool) {
        let group = request.group();
        let old = self.groups.get(&group).copied();
        let new =
            Self::decide(old, request).filter(|_| old.is_some() || self.groups.len() < GROUPS_MAX);
        if let Some(new) = new {
            self.groups.insert(group, new);
        }
        (WitnessReply { group, state: new.or(old) }, new.is_some())
    }

    /// Returns the state of a group; `None` if the witness does not know it.
    pub fn state(&self, group: GroupId) -> Option<GroupState> {
        self.groups.get(&group).copied()
    }

    /// Returns all groups with their states, in rising order of the groups' numbers.
    pub fn groups(&self) -> impl Iterator<Item = (GroupId, GroupState)> {
        self.groups.iter().map(|(group, state)| (*group, *state))
    }

    /// Drops the state of a group whose VM has ended. Returns false if the group is unknown.
    pub fn forget(&mut self, group: GroupId) -> bool {
        self.groups.remove(&group).is_some()
    }

    fn decide(old: Option<GroupState>, request: WitnessRequest) -> Option<GroupState> {
        let seen = old.map_or(0, |old| old.generation);
        let next = |term, owner, mode| {
            Some(GroupState { generation: seen.checked_add(1)?, term, owner, mode })
        };
        let owns = |node, term| old.is_none_or(|old| old.owner == node && old.term == term);
        match request {
            WitnessRequest::Solo { node, term, generation, .. }
                if generation == seen && owns(node, term) =>
            {
                next(term, node, OwnerMode::Solo)
            }
            WitnessRequest::Paired { node, term, generation, standby, session, .. }
                if generation == seen && owns(node, term) =>
            {
                next(term, node, OwnerMode::Paired { standby, session })
            }
            WitnessRequest::TakeOver { node, term, generation, session, .. } => {
                let old = old?;
                let is_paired = old.mode == OwnerMode::Paired { standby: node, session };
                (is_paired && old.term == term && generation == seen)
                    .then(|| next(term.next(), node, OwnerMode::Solo))?
            }
            WitnessRequest::Forced { node, term, .. } if old.is_none_or(|old| old.term <= term) => {
                next(term.next(), node, OwnerMode::Solo)
            }
            _ => None,
        }
    }

    /// Appends the state's bytes to `out`, for persisting.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(STATE_VERSION);
        out.extend_from_slice(&(self.groups.len() as u32).to_le_bytes());
        for (group, state) in &self.groups {
            out.extend_from_slice(&group.0.to_le_bytes());
            state.encode(out);
        }
    }

    /// Decodes a persisted state, which must be all of `bytes`. Errors: [`DecodeError::Version`] if
    /// they are of another version; [`DecodeError::TooLong`] for more than [`GROUPS_MAX`] groups;
    /// another [`DecodeError`] if they are malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = ByteReader::new(bytes);
        read_version(&mut reader, STATE_VERSION)?;
        let len = reader.u32_le()? as usize;
        if len > GROUPS_MAX {
            return Err(DecodeError::TooLong { field: "groups", len, max: GROUPS_MAX });
        }
        let mut groups = BTreeMap::new();
        for _ in 0..len {
            groups.insert(GroupId(reader.u128_le()?), GroupState::decode(&mut reader)?);
        }
        reader.expect_end()?;
        Ok(Self { groups })
    }
}

impl GroupState {
    fn encode(&self, out: &mut Vec<u8>) {
        put(out, &[self.generation, self.term.0, self.owner.0]);
        match self.mode {
            OwnerMode::Solo => out.push(0),
            OwnerMode::Paired { standby, session } => {
                out.push(1);
                put(out, &[standby.0, session.0]);
            }
        }
    }

    fn decode(reader: &mut ByteReader<'_>) -> Result<Self, DecodeError> {
        let (generation, term, owner) =
            (reader.u64_le()?, Term(reader.u64_le()?), NodeId(reader.u64_le()?));
        let mode = match reader.u8()? {
            0 => OwnerMode::Solo,
            1 => OwnerMode::Paired {
                standby: NodeId(reader.u64_le()?),
                session: SessionId(reader.u64_le()?),
            },
            value => return Err(unknown_value(reader, "mode", value)),
        };
        Ok(Self { generation, term, owner, mode })
    }
}

impl WitnessRequest {
    /// Returns the VM of the request.
    pub fn group(&self) -> GroupId {
        match self {
            Self::Solo { group, .. }
            | Self::Paired { group, .. }
            | Self::TakeOver { group, .. }
            | Self::Forced { group, .. }
            | Self::State { group } => *group,
        }
    }

    /// Appends the request's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let kind = match self {
            Self::Solo { .. } => 1,
            Self::Paired { .. } => 2,
            Self::TakeOver { .. } => 3,
            Self::Forced { .. } => 4,
            Self::State { .. } => 5,
        };
        out.extend_from_slice(&[PROTOCOL_VERSION, kind]);
        out.extend_from_slice(&self.group().0.to_le_bytes());
        match *self {
            Self::Solo { node, term, generation, .. } => put(out, &[node.0, term.0, generation]),
            Self::Paired { node, term, generation, standby, session, .. } => {
                put(out, &[node.0, term.0, generation, standby.0, session.0]);
            }
            Self::TakeOver { node, term, generation, session, .. } => {
                put(out, &[node.0, term.0, generation, session.0]);
            }
            Self::Forced { node, term, .. } => put(out, &[node.0, term.0]),
            Self::State { .. } => {}
        }
    }

    /// Decodes one request, which must be all of `bytes`. Errors: [`DecodeError::Version`] if they
    /// are of another version of the protocol; another [`DecodeError`] if they are malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = ByteReader::new(bytes);
        read_version(&mut reader, PROTOCOL_VERSION)?;
        let kind = reader.u8()?;
        if !(1..=5).contains(&kind) {
            return Err(unknown_value(&reader, "kind", kind));
        }
        let group = GroupId(reader.u128_le()?);
        let mut number = || reader.u64_le();
        let request = match kind {
            1 => Self::Solo {
                group,
                node: NodeId(number()?),
                term: Term(number()?),
                generation: number()?,
            },
            2 => Self::Paired {
                group,
                node: NodeId(number()?),
                term: Term(number()?),
                generation: number()?,
                standby: NodeId(number()?),
                session: SessionId(number()?),
            },
            3 => Self::TakeOver {
                group,
                node: NodeId(number()?),
                term: Term(number()?),
                generation: number()?,
                session: SessionId(number()?),
            },
            4 => Self::Forced { group, node: NodeId(number()?), term: Term(number()?) },
            _ => Self::State { group },
        };
        reader.expect_end()?;
        Ok(request)
    }
}

impl WitnessReply {
    /// Appends the reply's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(PROTOCOL_VERSION);
        out.extend_from_slice(&self.group.0.to_le_bytes());
        out.push(u8::from(self.state.is_some()));
        if let Some(state) = self.state {
            state.encode(out);
        }
    }

    /// Decodes one reply, which must be all of `bytes`. Errors: [`DecodeError::Version`] if they
    /// are of another version of the protocol; another [`DecodeError`] if they are malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = ByteReader::new(bytes);
        read_version(&mut reader, PROTOCOL_VERSION)?;
        let group = GroupId(reader.u128_le()?);
        let state = match reader.u8()? {
            0 => None,
            1 => Some(GroupState::decode(&mut reader)?),
            value => return Err(unknown_value(&reader, "state", value)),
        };
        reader.expect_end()?;
        Ok(Self { group, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GROUP: GroupId = GroupId(7);
    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const S: SessionId = SessionId(9);

    fn solo(node: NodeId, term: u64, generation: u64) -> WitnessRequest {
        WitnessRequest::Solo { group: GROUP, node, term: Term(term), generation }
    }

    fn paired(term: u64, generation: u64) -> WitnessRequest {
        WitnessRequest::Paired {
            group: GROUP,
            node: A,
            term: Term(term),
            generation,
            standby: B,
            session: S,
        }
    }

    fn take_over(term: u64, generation: u64) -> WitnessRequest {
        WitnessRequest::TakeOver { group: GROUP, node: B, term: Term(term), generation, session: S }
    }

    #[test]
    fn only_the_first_of_two_nodes_that_ask_gets_the_right() {
        for primary_first in [true, false] {
            let mut witness = Witness::default();
            assert!(witness.handle(paired(1, 0)).1);
            let both = [solo(A, 1, 1), take_over(1, 1)];
            let (first, second) = if primary_first { (0, 1) } else { (1, 0) };
            let (granted, changed) = witness.handle(both[first]);
            assert!(changed);
            assert_eq!(granted.state.unwrap().owner, if primary_first { A } else { B });
            assert_eq!(witness.handle(both[second]), (granted, false));
            assert_eq!(witness.handle(both[first]), (granted, false));
        }
    }

    #[test]
    fn a_delayed_pairing_undoes_nothing() {
        let mut witness = Witness::default();
        witness.handle(solo(A, 1, 0));
        assert!(witness.handle(solo(A, 1, 1)).1);
        assert!(!witness.handle(paired(1, 1)).1);
        assert!(!witness.handle(take_over(1, 1)).1);
        assert_eq!(witness.state(GROUP).unwrap().mode, OwnerMode::Solo);
    }

    #[test]
    fn a_forced_takeover_needs_the_newest_term() {
        let mut witness = Witness::default();
        witness.handle(solo(A, 3, 0));
        let forced = |term| WitnessRequest::Forced { group: GROUP, node: B, term: Term(term) };
        assert!(!witness.handle(forced(2)).1);
        assert!(witness.handle(forced(3)).1);
        assert!(!witness.handle(solo(A, 3, 2)).1);
        assert_eq!(witness.state(GROUP).unwrap().term, Term(4));
    }

    #[test]
    fn a_witness_refuses_a_group_too_many() {
        let mut witness = Witness::default();
        for group in 0..=GROUPS_MAX as u128 {
            let group = GroupId(group);
            let request = WitnessRequest::Solo { group, node: A, term: Term(1), generation: 0 };
            let (reply, changed) = witness.handle(request);
            assert_eq!(changed, group.0 < GROUPS_MAX as u128);
            assert_eq!(reply.state.is_some(), changed);
        }
        let mut bytes = Vec::new();
        witness.encode(&mut bytes);
        assert_eq!(Witness::decode(&bytes), Ok(witness));
    }

    proptest! {
        #[test]
        fn encoded_requests_and_replies_are_decoded_again(
            kind in 0..5u8, group in any::<u128>(), n in any::<[u64; 5]>(), has in any::<bool>(), cut in any::<prop::sample::Index>(),
        ) {
            let (group, node, term, generation) = (GroupId(group), NodeId(n[0]), Term(n[1]), n[2]);
            let (standby, session) = (NodeId(n[3]), SessionId(n[4]));
            let request = match kind {
                0 => WitnessRequest::Solo { group, node, term, generation },
                1 => WitnessRequest::Paired { group, node, term, generation, standby, session },
                2 => WitnessRequest::TakeOver { group, node, term, generation, session },
                3 => WitnessRequest::Forced { group, node, term },
                _ => WitnessRequest::State { group },
            };
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            prop_assert_eq!(WitnessRequest::decode(&bytes), Ok(request));
            prop_assert!(WitnessRequest::decode(&bytes[..cut.index(bytes.len())]).is_err());
            let mode = if kind > 2 { OwnerMode::Solo } else { OwnerMode::Paired { standby, session } };
            let reply = WitnessReply { group, state: has.then_some(GroupState { generation, term, owner: node, mode }) };
            bytes.clear();
            reply.encode(&mut bytes);
            prop_assert_eq!(WitnessReply::decode(&bytes), Ok(reply));
            prop_assert!(WitnessReply::decode(&bytes[..cut.index(bytes.len())]).is_err());
        }

        #[test]
        fn any_bytes_are_something_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..120), kind in 0..7u8) {
            let _ = WitnessRequest::decode(&[&[PROTOCOL_VERSION, kind][..], &bytes].concat());
            let _ = WitnessReply::decode(&[&[PROTOCOL_VERSION][..], &bytes].concat());
            let _ = Witness::decode(&[&[STATE_VERSION][..], &bytes].concat());
        }
    }
}
