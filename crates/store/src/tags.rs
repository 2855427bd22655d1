//! Tags: names that point to checkpoints and may be moved.
//!
//! `tags/NAME` holds one line: the number in decimal, a space, and the first 16 hexadecimal digits
//! of `BLAKE3("keyframe tag STORE-ID NAME NUMBER")`, so that neither a flipped bit nor a copied or
//! renamed file passes.
//!
//! A pin is the tag `pin.NUMBER` of the checkpoint of that number: no rule takes it
//! ([`crate::Retention`]), nor does [`Store::forget`] unless it is told to.
//!
//! Invariant: who sets a tag looks afterwards whether the checkpoint is still there, and takes the
//! tag back where it is not; who forgets removes tags before the checkpoint. Tags need no lock:
//! each is put whole.

use crate::config::StoreId;
use crate::store::Inner;
use crate::{Error, Result, Sealed, Store};
use keyframe_bytes::hex::to_hex;
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;
use std::collections::BTreeMap;

const TAG_BYTES_MAX: u64 = 256;

fn encode(store: StoreId, tag: &str, id: CheckpointId) -> String {
    let hash = blake3::hash(format!("keyframe tag {} {tag} {id}", to_hex(&store.0)).as_bytes());
    format!("{id} {}\n", &hash.to_hex()[..16])
}

pub fn decode(store: StoreId, tag: &str, bytes: &[u8]) -> Option<CheckpointId> {
    let text = std::str::from_utf8(bytes).ok()?;
    let id = CheckpointId(text.split(' ').next()?.parse().ok()?);
    (encode(store, tag, id) == text).then_some(id)
}

impl Inner {
    /// The checkpoint that a tag points to; `None` where there is no such tag.
    pub fn read_tag(&self, tag: &str) -> Result<Option<CheckpointId>> {
        let name = layout::tag(tag);
        match self.backend.read(&name, TAG_BYTES_MAX) {
            Err(e) if e.is_not_found() => Ok(None),
            Err(e) => Err(e),
            Ok(bytes) => decode(self.config.id, tag, &bytes).map(Some).ok_or_else(|| {
                Error::damaged(self.backend.describe(&name), "it is not what was written there")
            }),
        }
    }

    /// Names of all tags, readable or not. Files with other names than tags can have are left
    /// alone.
    pub fn tag_names(&self) -> Result<Vec<String>> {
        let listed = self.backend.list(layout::TAGS)?;
        Ok(listed.into_iter().filter(|name| layout::is_tag(name)).collect())
    }

    /// All tags.
    pub fn read_tags(&self) -> Result<BTreeMap<String, CheckpointId>> {
        let mut tags = BTreeMap::new();
        for tag in self.tag_names()? {
            if let Some(id) = self.read_tag(&tag)? {
                tags.insert(tag, id);
            }
        }
        Ok(tags)
    }

    /// Points a tag to a checkpoint, which must be there.
    pub fn write_tag(&self, tag: &str, id: CheckpointId) -> Result<()> {
        self.backend.put(&layout::tag(tag), encode(self.config.id, tag, id).as_bytes())
    }
}

impl Store {
    /// Points a tag, new or old, to a checkpoint; returns what it pointed to before. Beside a
    /// writer and a prune.
    ///
    /// Errors: [`Error::InvalidTag`], [`Error::UnknownCheckpoint`].
    pub fn set_tag(&self, tag: &str, id: CheckpointId) -> Result<Option<CheckpointId>> {
        check_tag(tag)?;
        // A damaged tag can be set anew.
        let before = self.inner().read_tag(tag).unwrap_or_default();
        self.point(tag, id)?;
        Ok(before)
    }

    /// Removes a tag; returns what it pointed to, where that can be read.
    ///
    /// Error: [`Error::UnknownTag`].
    pub fn remove_tag(&self, tag: &str) -> Result<Option<CheckpointId>> {
        check_tag(tag)?;
        let before = match self.inner().read_tag(tag) {
            Ok(None) => return Err(Error::UnknownTag { tag: tag.into() }),
            Ok(before) => before,
            Err(Error::Damaged { .. }) => None,
            Err(error) => return Err(error),
        };
        self.inner().backend.remove(&layout::tag(tag))?;
        Ok(before)
    }

    /// Keeps a checkpoint whatever rules say, until it is unpinned.
    pub fn pin(&self, id: CheckpointId) -> Result<()> {
        self.point(&layout::pin(id), id)
    }

    /// Takes a pin away; false where there was none.
    pub fn unpin(&self, id: CheckpointId) -> Result<bool> {
        let tag = layout::pin(id);
        // A damaged one too.
        let was = !matches!(self.inner().read_tag(&tag), Ok(None));
        self.inner().backend.remove(&layout::tag(&tag))?;
        Ok(was)
    }

    fn point(&self, tag: &str, id: CheckpointId) -> Result<()> {
        let inner = self.inner();
        let unknown = |newest| Error::UnknownCheckpoint { name: id.to_string(), newest };
        let ids = inner.checkpoint_ids()?;
        if ids.binary_search(&id).is_err() {
            return Err(unknown(ids.last().copied()));
        }
        inner.write_tag(tag, id)?;
        // Forgotten in this moment.
        let ids = inner.checkpoint_ids()?;
        if ids.binary_search(&id).is_err() {
            inner.backend.remove(&layout::tag(tag))?;
            return Err(unknown(ids.last().copied()));
        }
        Ok(())
    }
}

impl Sealed {
    /// No rule takes it.
    pub fn is_pinned(&self) -> bool {
        self.tags.contains(&layout::pin(self.id))
    }

    /// Of all tags of checkpoint `id`: those that the user gave, and whether it is pinned.
    pub fn split_tags(id: CheckpointId, tags: &[String]) -> (Vec<String>, bool) {
        let pin = layout::pin(id);
        (tags.iter().filter(|tag| **tag != pin).cloned().collect(), tags.contains(&pin))
    }

    /// The tags that the user gave.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        let pin = layout::pin(self.id);
        self.tags.iter().filter(move |tag| **tag != pin)
    }
}

/// Refuses what a user cannot choose as a tag ([`Error::InvalidTag`]): 1 to 64 letters, digits,
/// dots, dashes or underscores, not digits or dots alone, not `latest`, not beginning with `pin.`.
pub fn check_tag(text: &str) -> Result<()> {
    if layout::is_tag(text) && !text.starts_with(layout::PIN_PREFIX) {
        Ok(())
    } else {
        Err(Error::InvalidTag { tag: text.into() })
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
