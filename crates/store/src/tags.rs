//! Tags: names for checkpoints. A user may move them.
//!
//! A pin is the tag `pin.NUMBER` of the checkpoint with that number. No retention rule removes a
//! pinned checkpoint ([`crate::Retention`]), and [`Store::forget`] refuses it.
//!
//! Tags need no lock, because each is one file that is written as a whole. Invariant: no tag points
//! to a forgotten checkpoint. After it has set a tag, a process looks whether the checkpoint still
//! exists, and removes the tag if not. A process that forgets a checkpoint removes its tags first.

use crate::open_store::OpenStore;
use crate::store::Store;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_store_format::tag::{self as format, TAG_BYTES_MAX};
use keyframe_units::CheckpointId;
use std::collections::BTreeMap;

impl OpenStore {
    /// Returns the checkpoint that a tag points to. Returns `None` if the tag does not exist.
    /// Errors: the tag's file is damaged; the backend fails.
    pub fn read_tag(&self, tag: &str) -> Result<Option<CheckpointId>> {
        let name = layout::tag(tag);
        match self.backend.read(&name, TAG_BYTES_MAX) {
            Err(e) if e.is_not_found() => Ok(None),
            Err(e) => Err(e),
            Ok(bytes) => format::decode(self.config.id, tag, &bytes).map(Some).ok_or_else(|| {
                Error::damaged(self.backend.describe(&name), "it is not what was written there")
            }),
        }
    }

    /// Returns the names of all tags, readable or not. Ignores files whose name cannot be that of a
    /// tag. Error: the backend fails.
    pub fn tag_names(&self) -> Result<Vec<String>> {
        let listed = self.backend.list(layout::TAGS)?;
        Ok(listed.into_iter().filter(|name| layout::is_tag(name)).collect())
    }

    /// Returns all tags, with the checkpoints that they point to. Errors: those of
    /// [`Self::read_tag`].
    pub fn read_tags(&self) -> Result<BTreeMap<String, CheckpointId>> {
        let mut tags = BTreeMap::new();
        for tag in self.tag_names()? {
            if let Some(id) = self.read_tag(&tag)? {
                tags.insert(tag, id);
            }
        }
        Ok(tags)
    }

    /// Makes a tag point to checkpoint `id`, which must exist. Error: the backend fails.
    pub fn write_tag(&self, tag: &str, id: CheckpointId) -> Result<()> {
        self.backend.put(&layout::tag(tag), format::encode(self.config.id, tag, id).as_bytes())
    }
}

impl Store {
    /// Makes a new or existing tag point to checkpoint `id`. Returns the checkpoint that the tag
    /// pointed to before, or `None` for a new tag. Works while a run or a prune is at work.
    ///
    /// Errors: [`Error::InvalidTag`] if `tag` cannot be the name of a tag (see [`check_tag`]);
    /// [`Error::UnknownCheckpoint`] if there is no such checkpoint; the tag cannot be written.
    pub fn set_tag(&self, tag: &str, id: CheckpointId) -> Result<Option<CheckpointId>> {
        check_tag(tag)?;
        // A damaged tag can be set again.
        let before = self.inner().read_tag(tag).unwrap_or_default();
        self.point(tag, id)?;
        Ok(before)
    }

    /// Removes a tag. Returns the checkpoint that it pointed to, or `None` if the tag is damaged.
    ///
    /// Errors: [`Error::InvalidTag`] if `tag` cannot be the name of a tag; [`Error::UnknownTag`] if
    /// there is no such tag; it cannot be removed.
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

    /// Pins a checkpoint: no retention rule removes it until [`Self::unpin`]. Error: the checkpoint
    /// does not exist, or the tag cannot be written.
    pub fn pin(&self, id: CheckpointId) -> Result<()> {
        self.point(&layout::pin(id), id)
    }

    /// Removes a pin. Returns false if there was none. Error: the pin cannot be removed.
    pub fn unpin(&self, id: CheckpointId) -> Result<bool> {
        let tag = layout::pin(id);
        // A damaged pin is removed too.
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
        // Another process may have forgotten the checkpoint meanwhile.
        let ids = inner.checkpoint_ids()?;
        if ids.binary_search(&id).is_err() {
            inner.backend.remove(&layout::tag(tag))?;
            return Err(unknown(ids.last().copied()));
        }
        Ok(())
    }
}

/// Checks that a user can give the name `text` to a tag. A tag has 1 to 64 letters, digits, dots,
/// dashes or underscores. It is not only digits or only dots, is not `latest`, and does not begin
/// with `pin.`. Error: [`Error::InvalidTag`].
pub fn check_tag(text: &str) -> Result<()> {
    if layout::is_tag(text) && !text.starts_with(layout::PIN_PREFIX) {
        Ok(())
    } else {
        Err(Error::InvalidTag { tag: text.into() })
    }
}
