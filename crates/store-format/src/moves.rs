//! The file `moves`: the packs that a prune removes, and the new places of their records.
//!
//! ```text
//!   moves       magic "KF:MOV\r\n", version, then (see [`crate::envelope`])
//!                12 16 store id     28 16 generation, random     44  8 packs     52  8 moved records
//!                60 .. a varint each: packs, rising; then for each moved record, rising: zigzag(from - from before),
//!                      zigzag(to - to before)                    end-32 32 BLAKE3
//! ```

use crate::envelope;
use crate::error::{FormatError, Result};
use crate::identity::StoreId;
use crate::page_ref::PageRef;
use keyframe_bytes::ByteReader;
use keyframe_bytes::varint::{apply_zigzag, put_varint, zigzag_delta};
use keyframe_pages::bytes::Problem;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

const MAGIC: envelope::Magic = *b"KF:MOV\r\n";
/// The offset of the generation in the file of moves, in bytes.
pub const GENERATION_AT: u64 = 28;
/// The longest file that is read, in bytes: more than the moves of all records of the largest pack.
pub const MOVES_BYTES_MAX: u64 = 1 << 30;

/// The random id of one set of moves.
pub type Generation = [u8; 16];

/// The packs that a prune removes, and the new places of their live records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// The id of these moves.
    pub generation: Generation,
    /// The numbers of the packs that the prune removes.
    pub victims: BTreeSet<u32>,
    /// The new place of each moved record. Also of derived records in other packs that refer to
    /// moved ones.
    pub to: FxHashMap<PageRef, PageRef>,
}

/// The place of a record after a prune: the same, a new one, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MovedPlace {
    /// The former place.
    Same,
    /// A new place.
    Moved(PageRef),
    /// The record has no place: it is removed with its pack.
    Gone,
}

impl Moves {
    /// Returns the place of a record after the prune.
    pub fn place(&self, of: PageRef) -> MovedPlace {
        match self.to.get(&of) {
            Some(to) => MovedPlace::Moved(*to),
            None if self.victims.contains(&of.pack()) => MovedPlace::Gone,
            None => MovedPlace::Same,
        }
    }

    /// Encodes the file of moves.
    pub fn encode(&self, store: StoreId) -> Vec<u8> {
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

    /// Parses the file of moves. `object` names it in errors.
    ///
    /// Errors: [`FormatError::Damaged`](crate::FormatError::Damaged) if the bytes are not those of
    /// such a file of this store, [`FormatError::OtherVersion`](crate::FormatError::OtherVersion)
    /// for another version of the format.
    pub fn decode(bytes: &[u8], store: StoreId, object: &str) -> Result<Self> {
        let content = envelope::open(bytes, MAGIC, object)?;
        Self::decode_content(content, store)
            .map_err(|problem| FormatError::damaged(object, problem))
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
            return Err("has bytes after its end".into());
        }
        Ok(moves)
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
