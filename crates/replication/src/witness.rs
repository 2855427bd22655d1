//! The witness: a third host that lets at most one of two nodes run a VM alone.
//!
//! ```text
//!                    Paired(session)                        TakeOver(session)
//!   Solo(A, term) ──────────────────▶ Paired(A, B, term) ──────────────────▶ Solo(B, term + 1)
//!         ▲                                   │
//!         └──────────────  Solo  ─────────────┘              each change makes the next generation
//! ```
//!
//! It is a register per group with compare-and-swap: a request names the generation that its sender
//! has seen, and changes nothing at any other. So a request that was under way for long cannot undo
//! a later one, and an answer, which is always the whole state, is enough to know what became of
//! every request with an older generation. Whoever asks again learns the same: requests are
//! idempotent.
//!
//! Invariants: `TakeOver` is granted only from the pairing that it names, and once; a state that an
//! answer tells is one that the driver has persisted. Not here: times. A witness never takes a
//! right back, and never knows who lives.

use crate::wire::{DecodeError, Reader, put};
use crate::{GroupId, NodeId, PROTOCOL_VERSION, Session, Term};
use std::collections::BTreeMap;

/// A witness serves so many groups.
pub const GROUPS_MAX: usize = 4096;
/// Of what is persisted.
const STATE_VERSION: u8 = 1;

/// Who may run the VM, and who may take it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The owner alone.
    Solo,
    /// The owner while its lease lasts; the standby may take over.
    Paired {
        /// Who.
        standby: NodeId,
        /// With what it received in this session.
        session: Session,
    },
}

/// What the witness knows of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupState {
    /// Counts changes, from 1.
    pub generation: u64,
    /// Of the owner.
    pub term: Term,
    /// Who runs the VM.
    pub owner: NodeId,
    /// Whether alone.
    pub mode: Mode,
}

/// A question to the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WitnessRequest {
    /// The owner wants to run alone. A group that nobody knows is new (generation 0).
    Solo {
        /// The VM.
        group: GroupId,
        /// Who asks.
        node: NodeId,
        /// The asker's.
        term: Term,
        /// What the asker has seen.
        generation: u64,
    },
    /// The owner has a standby that holds all that clients saw.
    Paired {
        /// The VM.
        group: GroupId,
        /// Who asks.
        node: NodeId,
        /// The asker's.
        term: Term,
        /// What the asker has seen.
        generation: u64,
        /// Who may take over.
        standby: NodeId,
        /// With what it received in this session.
        session: Session,
    },
    /// The standby wants to take over.
    TakeOver {
        /// The VM.
        group: GroupId,
        /// Who asks.
        node: NodeId,
        /// Of the owner that it takes over from.
        term: Term,
        /// That of the pairing.
        generation: u64,
        /// Of the pairing.
        session: Session,
    },
    /// A user insisted: the asker has taken over from whoever had `term` or an earlier one.
    Forced {
        /// The VM.
        group: GroupId,
        /// Who asks.
        node: NodeId,
        /// Of the owner that it took over from.
        term: Term,
    },
    /// Who is it?
    State {
        /// The VM.
        group: GroupId,
    },
}

/// The answer: the state behind the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WitnessReply {
    /// The VM.
    pub group: GroupId,
    /// What holds now; `None`: nobody knows the group, or there is no room for it.
    pub state: Option<GroupState>,
}

/// All groups that one witness knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Witness {
    groups: BTreeMap<GroupId, GroupState>,
}

impl Witness {
    /// The answer, and whether the state has changed: then it is to be persisted before the answer
    /// goes out.
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

    /// What holds for a group.
    pub fn state(&self, group: GroupId) -> Option<GroupState> {
        self.groups.get(&group).copied()
    }

    /// All groups.
    pub fn groups(&self) -> impl Iterator<Item = (GroupId, GroupState)> {
        self.groups.iter().map(|(group, state)| (*group, *state))
    }

    /// Drops what is known of a group whose VM is no more.
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
                next(term, node, Mode::Solo)
            }
            WitnessRequest::Paired { node, term, generation, standby, session, .. }
                if generation == seen && owns(node, term) =>
            {
                next(term, node, Mode::Paired { standby, session })
            }
            WitnessRequest::TakeOver { node, term, generation, session, .. } => {
                let old = old?;
                let is_paired = old.mode == Mode::Paired { standby: node, session };
                (is_paired && old.term == term && generation == seen)
                    .then(|| next(term.next(), node, Mode::Solo))?
            }
            WitnessRequest::Forced { node, term, .. } if old.is_none_or(|old| old.term <= term) => {
                next(term.next(), node, Mode::Solo)
            }
            _ => None,
        }
    }

    /// What to persist.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(STATE_VERSION);
        out.extend_from_slice(&(self.groups.len() as u32).to_le_bytes());
        for (group, state) in &self.groups {
            out.extend_from_slice(&group.0.to_le_bytes());
            state.encode(out);
        }
    }

    /// What was persisted.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        match reader.u8()? {
            STATE_VERSION => {}
            version => return Err(DecodeError::Version(version)),
        }
        let len = reader.u32()? as usize;
        if len > GROUPS_MAX {
            return Err(DecodeError::Long { field: "groups", len, max: GROUPS_MAX });
        }
        let mut groups = BTreeMap::new();
        for _ in 0..len {
            groups.insert(GroupId(reader.u128()?), GroupState::decode(&mut reader)?);
        }
        reader.end()?;
        Ok(Self { groups })
    }
}

impl GroupState {
    fn encode(&self, out: &mut Vec<u8>) {
        put(out, &[self.generation, self.term.0, self.owner.0]);
        match self.mode {
            Mode::Solo => out.push(0),
            Mode::Paired { standby, session } => {
                out.push(1);
                put(out, &[standby.0, session.0]);
            }
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (generation, term, owner) = (reader.u64()?, Term(reader.u64()?), NodeId(reader.u64()?));
        let mode = match reader.u8()? {
            0 => Mode::Solo,
            1 => Mode::Paired { standby: NodeId(reader.u64()?), session: Session(reader.u64()?) },
            value => return Err(reader.unknown("mode", value)),
        };
        Ok(Self { generation, term, owner, mode })
    }
}

impl WitnessRequest {
    /// Whose VM.
    pub fn group(&self) -> GroupId {
        match self {
            Self::Solo { group, .. }
            | Self::Paired { group, .. }
            | Self::TakeOver { group, .. }
            | Self::Forced { group, .. }
            | Self::State { group } => *group,
        }
    }

    /// Appends its bytes.
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

    /// The request that `bytes` are.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        match reader.u8()? {
            PROTOCOL_VERSION => {}
            version => return Err(DecodeError::Version(version)),
        }
        let kind = reader.u8()?;
        if !(1..=5).contains(&kind) {
            return Err(reader.unknown("kind", kind));
        }
        let group = GroupId(reader.u128()?);
        let mut number = || reader.u64();
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
                session: Session(number()?),
            },
            3 => Self::TakeOver {
                group,
                node: NodeId(number()?),
                term: Term(number()?),
                generation: number()?,
                session: Session(number()?),
            },
            4 => Self::Forced { group, node: NodeId(number()?), term: Term(number()?) },
            _ => Self::State { group },
        };
        reader.end()?;
        Ok(request)
    }
}

impl WitnessReply {
    /// Appends its bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(PROTOCOL_VERSION);
        out.extend_from_slice(&self.group.0.to_le_bytes());
        out.push(u8::from(self.state.is_some()));
        if let Some(state) = self.state {
            state.encode(out);
        }
    }

    /// The reply that `bytes` are.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        match reader.u8()? {
            PROTOCOL_VERSION => {}
            version => return Err(DecodeError::Version(version)),
        }
        let group = GroupId(reader.u128()?);
        let state = match reader.u8()? {
            0 => None,
            1 => Some(GroupState::decode(&mut reader)?),
            value => return Err(reader.unknown("state", value)),
        };
        reader.end()?;
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
    const S: Session = Session(9);

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
    fn the_first_that_asks_is_alone() {
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
    fn a_pairing_that_was_under_way_for_long_undoes_nothing() {
        let mut witness = Witness::default();
        witness.handle(solo(A, 1, 0));
        assert!(witness.handle(solo(A, 1, 1)).1);
        assert!(!witness.handle(paired(1, 1)).1);
        assert!(!witness.handle(take_over(1, 1)).1);
        assert_eq!(witness.state(GROUP).unwrap().mode, Mode::Solo);
    }

    #[test]
    fn who_insists_gets_a_later_term_only() {
        let mut witness = Witness::default();
        witness.handle(solo(A, 3, 0));
        let forced = |term| WitnessRequest::Forced { group: GROUP, node: B, term: Term(term) };
        assert!(!witness.handle(forced(2)).1);
        assert!(witness.handle(forced(3)).1);
        assert!(!witness.handle(solo(A, 3, 2)).1);
        assert_eq!(witness.state(GROUP).unwrap().term, Term(4));
    }

    #[test]
    fn there_is_room_for_so_many_groups() {
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
        fn what_is_encoded_is_decoded(
            kind in 0..5u8, group in any::<u128>(), n in any::<[u64; 5]>(), has in any::<bool>(), cut in any::<prop::sample::Index>(),
        ) {
            let (group, node, term, generation) = (GroupId(group), NodeId(n[0]), Term(n[1]), n[2]);
            let (standby, session) = (NodeId(n[3]), Session(n[4]));
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
            let mode = if kind > 2 { Mode::Solo } else { Mode::Paired { standby, session } };
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
