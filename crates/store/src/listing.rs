//! Listing and naming the checkpoints of a store.

use crate::sealed::Sealed;
use crate::store::Store;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;
use std::collections::BTreeMap;

/// A checkpoint whose file cannot be read.
#[derive(Debug)]
pub struct UnreadableCheckpoint {
    /// Its number.
    pub id: CheckpointId,
    /// The reason.
    pub error: Error,
}

/// The list of a store's checkpoints.
#[derive(Debug, Default)]
pub struct Listing {
    /// The checkpoints that can be read, in rising order.
    pub sealed: Vec<Sealed>,
    /// The checkpoints whose file cannot be read.
    pub unreadable: Vec<UnreadableCheckpoint>,
}

impl Store {
    /// Returns all sealed checkpoints, in rising order. A damaged one hides no other: it is in
    /// [`Listing::unreadable`]. Error: a folder of the store cannot be listed.
    pub fn checkpoints(&self) -> Result<Listing> {
        let tags = self.tags_of_checkpoints()?;
        let mut listing = Listing::default();
        let ids = self.inner().checkpoint_ids()?;
        for (id, meta) in self.inner().read_metas(&ids) {
            match meta {
                Ok(meta) => {
                    let tags = tags.get(&id).cloned().unwrap_or_default();
                    listing.sealed.push(Sealed { id, meta, tags });
                }
                // Forgotten since the listing.
                Err(Error::UnknownCheckpoint { .. }) => {}
                Err(error) => listing.unreadable.push(UnreadableCheckpoint { id, error }),
            }
        }
        Ok(listing)
    }

    /// Returns the numbers of the sealed checkpoints, in rising order, without reading the
    /// checkpoints. Error: a folder of the store cannot be listed.
    pub fn ids(&self) -> Result<Vec<CheckpointId>> {
        self.inner().checkpoint_ids()
    }

    /// Returns the description and the tags of one sealed checkpoint. Error: it does not exist, or
    /// cannot be read.
    pub fn sealed(&self, id: CheckpointId) -> Result<Sealed> {
        let meta = self.inner().read_meta(id)?;
        let tags =
            self.tags()?.into_iter().filter(|(_, to)| *to == id).map(|(tag, _)| tag).collect();
        Ok(Sealed { id, meta, tags })
    }

    /// Returns the checkpoint that `name` names: a number, a tag or `latest`. Error: nothing has
    /// this name.
    pub fn resolve(&self, name: &str) -> Result<CheckpointId> {
        let ids = self.inner().checkpoint_ids()?;
        let newest = ids.last().copied();
        let unknown = || Error::UnknownCheckpoint { name: name.into(), newest };
        if name == layout::LATEST {
            return newest.ok_or_else(unknown);
        }
        let is_number = !name.is_empty() && name.bytes().all(|c| c.is_ascii_digit());
        let id = if is_number {
            name.parse().ok().map(CheckpointId)
        } else if layout::is_tag(name) {
            self.inner().read_tag(name)?
        } else {
            None
        };
        let id = id.ok_or_else(unknown)?;
        match ids.binary_search(&id) {
            Ok(_) => Ok(id),
            Err(_) if is_number => Err(unknown()),
            Err(_) => Err(Error::damaged(
                self.inner().backend.describe(&layout::tag(name)),
                format!("it points to checkpoint {id}, which is not in the store"),
            )),
        }
    }

    /// Returns all tags, with the checkpoints that they point to. Error: a folder of the store
    /// cannot be listed.
    pub fn tags(&self) -> Result<BTreeMap<String, CheckpointId>> {
        self.inner().read_tags()
    }

    /// Returns the tags of each checkpoint, in alphabetical order. Error: a folder of the store
    /// cannot be listed.
    pub fn tags_of_checkpoints(&self) -> Result<BTreeMap<CheckpointId, Vec<String>>> {
        let mut tags = BTreeMap::<_, Vec<_>>::new();
        for (tag, id) in self.tags()? {
            tags.entry(id).or_default().push(tag);
        }
        Ok(tags)
    }

    /// Returns the size of the packs that were not recompressed yet, in bytes. Leaves out the
    /// newest pack, which a writer may still write to. Error: a folder of the store cannot be
    /// listed.
    pub fn cold_bytes(&self) -> Result<u64> {
        let numbers = self.inner().pack_numbers()?;
        let mut cold_bytes = 0;
        for number in numbers.iter().rev().skip(1) {
            match self.inner().open_pack(*number) {
                Ok(pack) if !pack.is_dense() => cold_bytes += pack.file.len_bytes()?,
                // Removed since the listing, recompressed, or damaged.
                Ok(_) | Err(Error::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(cold_bytes)
    }
}
