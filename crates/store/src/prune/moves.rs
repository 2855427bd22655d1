//! What prune tells a writer at work: which packs go, and where their live records are now.
//!
//! ```text
//!   prune    moves put ─────────────▶ waits ─────────────▶ maps rewritten ─▶ packs removed ─▶ moves removed
//!   writer             next seal: follows, moves.seen put ──▲       nothing that it knows is in those packs any more
//!
//!   moves       magic "KF:MOV\r\n", version, then (see the envelope)
//!                12 16 store id     28 16 generation, random     44  8 packs     52  8 moved records
//!                60 .. a varint each: packs, rising; then for each moved record, rising: zigzag(from - from before),
//!                      zigzag(to - to before)                    end-32 32 BLAKE3
//!   moves.seen  the generation that a writer has followed, hexadecimal
//! ```
//!
//! Invariants: who becomes the writer while `moves` is there uses none of those packs. Any of the
//! two files may be left by a crash and harms nobody: the next prune removes them, and a writer
//! that followed needs none of these packs.

use crate::config::StoreId;
use crate::identity::PageRef;
use crate::store::Inner;
use crate::{Error, Result, envelope};
use keyframe_bytes::ByteReader;
use keyframe_bytes::hex::to_hex;
use keyframe_bytes::varint::{apply_zigzag, put_varint, zigzag_delta};
use keyframe_pages::bytes::Problem;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

const MAGIC: envelope::Magic = *b"KF:MOV\r\n";
const MOVES: &str = "moves";
const SEEN: &str = "moves.seen";
/// Where the generation is.
const GENERATION_AT: u64 = 28;
/// Records that move at once, where they are of more than one pack.
pub const RECORDS_MAX: usize = 2 << 20;
/// Above what all records of the largest pack that a writer makes take; what is beyond is refused
/// before it is read.
const BYTES_MAX: u64 = 1 << 30;

/// Tells one set of moves from another.
pub type Generation = [u8; 16];

/// Packs that go, and where their live records are now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    pub generation: Generation,
    pub victims: BTreeSet<u32>,
    /// Also of composed records elsewhere that refer to moved ones.
    pub to: FxHashMap<PageRef, PageRef>,
}

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Where it was.
    Same,
    /// Here.
    Moved(PageRef),
    /// It goes with its pack.
    Gone,
}

impl Moves {
    pub fn place(&self, of: PageRef) -> Place {
        match self.to.get(&of) {
            Some(to) => Place::Moved(*to),
            None if self.victims.contains(&of.pack()) => Place::Gone,
            None => Place::Same,
        }
    }

    fn encode(&self, store: StoreId) -> Vec<u8> {
        let mut out = envelope::begin(MAGIC);
        out.extend_from_slice(&store.0);
        out.extend_from_slice(&self.generation);
        for number in [self.victims.len() as u64, self.to.len() as u64] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        self.victims.iter().for_each(|victim| put_varint(&mut out, u64::from(*victim)));
        let mut all: Vec<_> = self.to.iter().collect();
        all.sort_unstable();
        let mut before = (0, 0);
        for (from, to) in all {
            put_varint(&mut out, zigzag_delta(before.0, from.0));
            put_varint(&mut out, zigzag_delta(before.1, to.0));
            before = (from.0, to.0);
        }
        envelope::finish(out)
    }

    pub fn decode(bytes: &[u8], store: StoreId, object: &str) -> Result<Self> {
        let content = envelope::open(bytes, MAGIC, object)?;
        Self::decode_content(content, store).map_err(|problem| Error::damaged(object, problem))
    }

    fn decode_content(content: &[u8], store: StoreId) -> Result<Self, Problem> {
        let mut reader = ByteReader::new(content);
        if reader.array()? != store.0 {
            return Err("belongs to another store".into());
        }
        let generation = reader.array()?;
        let (victims, records) = (reader.u64_le()?, reader.u64_le()?);
        let mut moves = Self { generation, ..Self::default() };
        for _ in 0..victims {
            moves.victims.insert(u32::try_from(reader.varint()?).map_err(|e| e.to_string())?);
        }
        let mut before = (0, 0);
        for _ in 0..records {
            before = (
                apply_zigzag(before.0, reader.varint()?),
                apply_zigzag(before.1, reader.varint()?),
            );
            moves.to.insert(PageRef(before.0), PageRef(before.1));
        }
        if !reader.is_empty() {
            return Err("has bytes behind its end".into());
        }
        Ok(moves)
    }
}

impl Inner {
    /// Tells writers.
    pub fn put_moves(&self, moves: &Moves) -> Result<()> {
        self.backend.put(MOVES, &moves.encode(self.config.id))
    }

    /// No packs go any more.
    pub fn remove_moves(&self) -> Result<()> {
        self.backend.remove(MOVES)?;
        self.backend.remove(SEEN)
    }

    /// What prune tells, unless it is of the generation `seen`.
    pub fn moves(&self, seen: Option<Generation>) -> Result<Option<Moves>> {
        let file = match self.backend.open(MOVES) {
            Err(e) if e.is_not_found() => return Ok(None),
            other => other?,
        };
        let mut generation = Generation::default();
        file.read_at(GENERATION_AT, &mut generation)?;
        if seen == Some(generation) {
            return Ok(None);
        }
        match self.backend.read(MOVES, BYTES_MAX) {
            Err(e) if e.is_not_found() => Ok(None),
            other => {
                Moves::decode(&other?, self.config.id, &self.backend.describe(MOVES)).map(Some)
            }
        }
    }

    /// A writer has followed: it refers to nothing in those packs.
    pub fn put_seen(&self, generation: Generation) -> Result<()> {
        self.backend.put(SEEN, to_hex(&generation).as_bytes())
    }

    /// Whether a writer has said so.
    pub fn is_seen(&self, generation: Generation) -> Result<bool> {
        match self.backend.read(SEEN, 64) {
            Err(e) if e.is_not_found() => Ok(false),
            other => Ok(other? == to_hex(&generation).as_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STORE: StoreId = StoreId([4; 16]);

    proptest! {
        #[test]
        fn moves_come_back(
            victims in prop::collection::btree_set(1u32..1 << 24, 0..20), to in prop::collection::hash_map(any::<u64>(), any::<u64>(), 0..50),
        ) {
            let to = to.into_iter().map(|(from, to)| (PageRef(from), PageRef(to))).collect();
            let moves = Moves { generation: [7; 16], victims, to };
            let bytes = moves.encode(STORE);
            prop_assert_eq!(&bytes[GENERATION_AT as usize..][..16], [7; 16]);
            prop_assert_eq!(Moves::decode(&bytes, STORE, "m").unwrap(), moves);
            prop_assert!(Moves::decode(&bytes, StoreId([5; 16]), "m").is_err());
        }

        #[test]
        fn arbitrary_content_never_panics(victims in 0u64..9, records in any::<u64>(), tail in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut content = STORE.0.to_vec();
            content.extend_from_slice(&[1; 16]);
            content.extend_from_slice(&victims.to_le_bytes());
            content.extend_from_slice(&records.to_le_bytes());
            content.extend_from_slice(&tail);
            let _ = Moves::decode_content(&content, STORE);
        }
    }
}
