//! Tags: names that point to checkpoints and may be moved.
//!
//! `tags/NAME` holds one line: the number in decimal, a space, and the first 16 hexadecimal digits of
//! `BLAKE3("keyframe tag STORE-ID NAME NUMBER")`, so that neither a flipped bit nor a copied or renamed file passes.

use crate::bytes::to_hex;
use crate::config::StoreId;
use crate::store::Inner;
use crate::{Error, Result, names};
use keyframe_units::CheckpointId;
use std::collections::BTreeMap;

const TAG_BYTES_MAX: u64 = 256;

fn encode(store: StoreId, tag: &str, id: CheckpointId) -> String {
    let hash = blake3::hash(format!("keyframe tag {} {tag} {id}", to_hex(&store.0)).as_bytes());
    format!("{id} {}\n", &hash.to_hex()[..16])
}

fn decode(store: StoreId, tag: &str, bytes: &[u8]) -> Option<CheckpointId> {
    let text = std::str::from_utf8(bytes).ok()?;
    let id = CheckpointId(text.split(' ').next()?.parse().ok()?);
    (encode(store, tag, id) == text).then_some(id)
}

impl Inner {
    /// The checkpoint that a tag points to; `None` where there is no such tag.
    pub fn read_tag(&self, tag: &str) -> Result<Option<CheckpointId>> {
        let name = names::tag(tag);
        match self.backend.read(&name, TAG_BYTES_MAX) {
            Err(e) if e.is_not_found() => Ok(None),
            Err(e) => Err(e),
            Ok(bytes) => decode(self.config.id, tag, &bytes).map(Some).ok_or_else(|| {
                Error::damaged(self.backend.describe(&name), "it is not what was written there")
            }),
        }
    }

    /// All tags. Files with other names than tags can have are left alone.
    pub fn read_tags(&self) -> Result<BTreeMap<String, CheckpointId>> {
        let mut tags = BTreeMap::new();
        for tag in self.backend.list(names::TAGS)?.into_iter().filter(|name| names::is_tag(name)) {
            if let Some(id) = self.read_tag(&tag)? {
                tags.insert(tag, id);
            }
        }
        Ok(tags)
    }

    /// Points a tag to a checkpoint, which must be there.
    pub fn write_tag(&self, tag: &str, id: CheckpointId) -> Result<()> {
        names::check_tag(tag)?;
        self.backend.put(&names::tag(tag), encode(self.config.id, tag, id).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STORE: StoreId = StoreId([1; 16]);

    #[test]
    fn every_flipped_bit_and_every_renamed_file_is_noticed() {
        let bytes = encode(STORE, "a", CheckpointId(12)).into_bytes();
        assert_eq!(decode(STORE, "a", &bytes), Some(CheckpointId(12)));
        assert_eq!(decode(STORE, "b", &bytes), None);
        assert_eq!(decode(StoreId([2; 16]), "a", &bytes), None);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(STORE, "a", &flipped), None, "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            prop_assert_eq!(decode(STORE, "a", &bytes), None);
        }
    }
}
