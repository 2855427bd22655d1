//! Forgetting checkpoints: they are not found any more; what they alone needed goes with the next
//! prune.
//!
//! ```text
//!   tags of it ─▶ its seal ─▶ its working set          (maps and records stay: others may need them, `prune` knows)
//! ```
//!
//! Invariants: a tag never outlives its checkpoint, so that a crash in between leaves no tag that
//! points to nothing. Numbers are not used again: maps stay for that. A writer at work and readers
//! do not mind: a run builds upon the newest checkpoint alone, which is not forgotten while the
//! store is locked, and who has loaded a checkpoint needs its seal no more. What a forget that was
//! killed has removed may come back with the next power loss, unless a prune has made sure of it.

use crate::store::Inner;
use crate::{Error, Result, Store};
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;
use std::collections::BTreeSet;

impl Store {
    /// Forgets checkpoints, with their tags and working sets; those that are not there are none.
    ///
    /// Errors: [`Error::InUse`] where the newest of the store is among them and a writer is at
    /// work; [`Error::Pinned`] where one is pinned. Then none is forgotten.
    pub fn forget(&self, ids: &BTreeSet<CheckpointId>) -> Result<()> {
        let pinned =
            self.tags()?.into_iter().find(|(tag, id)| ids.contains(id) && *tag == layout::pin(*id));
        match pinned {
            Some((_, id)) => Err(Error::Pinned { id }),
            None => self.forget_even_pinned(ids),
        }
    }

    /// The same, and pinned ones too.
    pub fn forget_even_pinned(&self, ids: &BTreeSet<CheckpointId>) -> Result<()> {
        let inner = self.inner();
        let newest = inner.checkpoint_ids()?.last().copied();
        if let Some(newest) = newest.filter(|newest| ids.contains(newest))
            && let Some(holder) = inner.lock_holder()?
        {
            return Err(Error::InUse { id: newest, holder });
        }
        let tags = self.tags()?.into_iter().filter(|(_, id)| ids.contains(id));
        let tags: Vec<String> = tags.map(|(tag, _)| layout::tag(&tag)).collect();
        // Also where there is none: a forget that died, or whose sync failed, has removed some that
        // power loss would bring back.
        inner.backend.remove_all(layout::TAGS, &tags)?;
        let named =
            |of: fn(CheckpointId) -> String| ids.iter().map(|id| of(*id)).collect::<Vec<_>>();
        inner.backend.remove_all(layout::CHECKPOINTS, &named(layout::checkpoint))?;
        inner.backend.remove_all(layout::WORKSETS, &named(layout::workset))
    }
}

impl Inner {
    /// Makes durable what was forgotten so far, by whomever: a seal that power loss brought back
    /// would need what is pruned.
    pub fn settle_forgotten(&self) -> Result<()> {
        // No checkpoint has this number.
        self.backend.remove_all(layout::CHECKPOINTS, &[layout::checkpoint(CheckpointId(0))])
    }
}
