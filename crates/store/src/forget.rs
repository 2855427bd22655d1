//! Forgetting checkpoints. They are not found any more; the next prune frees the space that only
//! they needed.
//!
//! ```text
//!   its tags ─▶ its seal ─▶ its working set          (maps and records stay: others may need them, `prune` knows)
//! ```
//!
//! Invariants: no tag outlives its checkpoint, so a crash in between leaves no tag without a
//! checkpoint. Numbers are not used again: the maps stay for that. A writer and readers are not
//! disturbed. A run builds upon its newest checkpoint only, which is not forgotten while it is at
//! work. A reader that has loaded a checkpoint does not need its seal. Power loss may bring
//! back what a killed forget has removed, until a prune has synced the removal.

use crate::open_store::OpenStore;
use crate::{Error, Result, Store};
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long a forget waits for a seal at work, and how often it looks.
const SEAL_WAIT: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 2000 });
const SEAL_POLL: Duration = Duration::from_millis(5);

impl Store {
    /// Forgets checkpoints, with their tags and working sets. Ignores numbers that do not exist.
    ///
    /// Errors: [`Error::InUse`] if the newest of a run at work is among them; [`Error::Pinned`] if
    /// one is pinned. Then none is forgotten.
    pub fn forget(&self, ids: &BTreeSet<CheckpointId>) -> Result<()> {
        let pinned =
            self.tags()?.into_iter().find(|(tag, id)| ids.contains(id) && *tag == layout::pin(*id));
        match pinned {
            Some((_, id)) => Err(Error::Pinned { id }),
            None => self.forget_even_pinned(ids),
        }
    }

    /// Forgets checkpoints as [`Self::forget`] does, and pinned ones too. Errors: those of
    /// [`Self::forget`], without [`Error::Pinned`].
    pub fn forget_even_pinned(&self, ids: &BTreeSet<CheckpointId>) -> Result<()> {
        let inner = self.inner();
        let newest = inner.checkpoint_ids()?.last().copied().unwrap_or(CheckpointId(0));
        let deadline = Instant::now() + SEAL_WAIT;
        loop {
            let writers = inner.other_writers()?;
            let in_use = ids.iter().find_map(|id| Some((*id, writers.user_of(*id, newest)?)));
            let Some((id, user)) = in_use else { break };
            // After the seal, another checkpoint is the newest.
            if !user.is_sealing || Instant::now() >= deadline {
                return Err(Error::InUse { id, holder: user.description });
            }
            std::thread::sleep(SEAL_POLL);
        }
        inner.remove_checkpoints(ids)
    }
}

impl OpenStore {
    /// Removes the checkpoints `ids` with their tags and working sets. Errors: tags cannot be read;
    /// files cannot be removed.
    pub fn remove_checkpoints(&self, ids: &BTreeSet<CheckpointId>) -> Result<()> {
        let tags = self.read_tags()?.into_iter().filter(|(_, id)| ids.contains(id));
        let tags: Vec<String> = tags.map(|(tag, _)| layout::tag(&tag)).collect();
        // Removes also files that do not exist: power loss could bring back those that a killed
        // forget, or one with a failed sync, has removed.
        self.backend.remove_all(layout::TAGS, &tags)?;
        let named =
            |of: fn(CheckpointId) -> String| ids.iter().map(|id| of(*id)).collect::<Vec<_>>();
        self.backend.remove_all(layout::CHECKPOINTS, &named(layout::checkpoint))?;
        self.backend.remove_all(layout::WORKSETS, &named(layout::workset))
    }

    /// Makes all earlier forgets durable. Otherwise power loss could bring back a sealed checkpoint
    /// whose records a prune then removes. Error: the removal cannot be made durable.
    pub fn settle_forgotten(&self) -> Result<()> {
        // No checkpoint has this number.
        self.backend.remove_all(layout::CHECKPOINTS, &[layout::checkpoint(CheckpointId(0))])
    }
}
