//! When what a writer seals becomes durable: with each checkpoint, now and then, or when the kernel
//! likes.
//!
//! ```text
//!   each checkpoint    packs synced ─▶ map, synced ─▶ checkpoint, synced
//!   now and then       packs, map, checkpoint written; every so often: file system synced ─▶ `unsynced` moves on
//!
//!   unsynced         { "boot": which life of the machine, "from": the first checkpoint that may not be durable,
//!                      "tried": a sync of them is at work, or has failed }
//!   unsynced.packs   { "boot": the same, "up_to": unfinished packs up to this number are not relied on: as above }
//! ```
//!
//! What the kernel has been given survives the death of this process. Where the machine went down
//! instead (its boot is another one), the next writer reads the checkpoints from `from` on whole,
//! and sets those aside that are not: [`Inner::settle`].
//!
//! A sync that fails may have lost what it was for, although it can be read on and a second sync
//! says nothing. So an attempt is marked before it is made, and who finds that mark in the same
//! life of the machine relies on nothing that the attempt was for: such checkpoints stay marked
//! until the machine has come up anew, and can be read from the medium.
//!
//! Invariants: `unsynced` is durable before the first checkpoint that it vouches not for, and goes
//! only behind a sync. Packs are synced before they are closed, whatever the durability: their
//! trailer is trusted.

use crate::prune::packs;
use crate::store::Inner;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

const UNSYNCED: &str = "unsynced";
const UNSYNCED_PACKS: &str = "unsynced.packs";
const UNSYNCED_BYTES_MAX: u64 = 4096;

/// When checkpoints become durable. Where a store's place makes all durable at once (object
/// storage), it always is the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Before a seal returns.
    #[default]
    Checkpoint,
    /// With the first seal so long after the sync before; and at the end of the run.
    Every(Duration),
    /// When the kernel writes it; and at the end of the run.
    Never,
}

#[derive(Serialize, Deserialize)]
struct Mark {
    boot: String,
    from: CheckpointId,
    /// A sync of these was begun. Gone once it has succeeded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tried: bool,
}

#[derive(Serialize, Deserialize)]
struct PacksMark {
    boot: String,
    up_to: u32,
}

/// A checkpoint that power loss took, and that was set aside.
#[derive(Clone, Debug)]
pub struct TornCheckpoint {
    /// Its number.
    pub id: CheckpointId,
    /// What is wrong with it.
    pub problem: String,
}

/// The syncs of a writer whose checkpoints do not each wait for theirs.
#[derive(Debug)]
pub struct Syncs {
    every: Option<Duration>,
    last: Instant,
}

impl Syncs {
    /// `None` where each checkpoint is durable.
    pub fn of(durability: Durability) -> Option<Self> {
        let every = match durability {
            Durability::Checkpoint => return None,
            Durability::Every(every) => Some(every),
            Durability::Never => None,
        };
        Some(Self { every, last: Instant::now() })
    }

    /// Checkpoint `id` was sealed.
    pub fn sealed(&mut self, inner: &Inner, id: CheckpointId) -> Result<()> {
        if self.every.is_some_and(|every| self.last.elapsed() >= every) {
            self.last = Instant::now();
            inner.sync_and_mark(CheckpointId(id.0 + 1))?;
        }
        Ok(())
    }
}

impl Inner {
    /// From here on checkpoints from `from` on may not be durable; from an earlier one on, where a
    /// sync of that one failed.
    pub fn put_mark(&self, from: CheckpointId) -> Result<()> {
        if self.in_doubt()?.is_some() {
            return Ok(());
        }
        self.write_mark(&Mark { boot: self.backend.boot_id()?, from, tried: false })
    }

    fn write_mark(&self, mark: &Mark) -> Result<()> {
        self.backend.put(UNSYNCED, serde_json::to_string(mark).unwrap_or_default().as_bytes())
    }

    /// `None` where all is durable; what cannot be understood was torn by power loss, and has no
    /// boot.
    fn mark(&self) -> Result<Option<Mark>> {
        let bytes = match self.backend.read(UNSYNCED, UNSYNCED_BYTES_MAX) {
            Err(e) if e.is_not_found() => return Ok(None),
            // Torn itself: all are doubtful.
            Err(Error::Damaged { .. }) => Vec::new(),
            other => other?,
        };
        let torn = Mark { boot: String::new(), from: CheckpointId(0), tried: false };
        Ok(Some(serde_json::from_slice(&bytes).unwrap_or(torn)))
    }

    /// The first of the checkpoints that a failed sync may have lost, although they can be read
    /// until the machine goes down.
    pub fn in_doubt(&self) -> Result<Option<CheckpointId>> {
        match self.mark()? {
            Some(mark) if mark.tried && mark.boot == self.backend.boot_id()? => Ok(Some(mark.from)),
            _ => Ok(None),
        }
    }

    /// Has `sync` make durable what was written, marked before it is tried; false where an earlier
    /// attempt failed: then nobody can know.
    fn attempt(&self, sync: impl FnOnce() -> Result<()>) -> Result<bool> {
        let mark = self.mark()?;
        let is_known = mark.as_ref().is_none_or(|mark| !mark.tried);
        if let Some(mark) = mark.filter(|mark| !mark.tried) {
            self.write_mark(&Mark { tried: true, ..mark })?;
        }
        sync()?;
        Ok(is_known)
    }

    /// All that was written is durable, but for what comes from `from` on.
    pub fn sync_and_mark(&self, from: CheckpointId) -> Result<()> {
        if self.attempt(|| self.backend.sync_all())? {
            self.write_mark(&Mark { boot: self.backend.boot_id()?, from, tried: false })?;
        }
        Ok(())
    }

    /// All that was written is durable, and nothing else will be.
    pub fn sync_and_unmark(&self) -> Result<()> {
        if self.attempt(|| self.backend.sync_all())? {
            self.backend.remove(UNSYNCED)
        } else {
            Ok(())
        }
    }

    /// For the next writer: where the machine went down before all was durable, sets what is torn
    /// aside.
    pub fn settle(&self) -> Result<Vec<TornCheckpoint>> {
        let Some(mark) = self.mark()? else { return Ok(Vec::new()) };
        let boot = self.backend.boot_id()?;
        if mark.boot == boot {
            if mark.tried {
                // What the sync that failed was for lies in unfinished packs, too.
                self.put_packs_mark(packs::newest(self)?)?;
                self.backend.sync_all()?;
            } else {
                self.rely_on_packs(|| self.sync_and_unmark())?;
            }
            return Ok(Vec::new());
        }
        let torn = self.set_torn_aside(mark.from)?;
        // What was read came from the medium: whatever failed in the life before this one matters
        // no more.
        self.write_mark(&Mark { boot, tried: false, ..mark })?;
        self.sync_and_unmark()?;
        Ok(torn)
    }

    /// Up to which number unfinished packs are not relied on.
    pub fn doubted_packs(&self) -> Result<u32> {
        let bytes = match self.backend.read(UNSYNCED_PACKS, UNSYNCED_BYTES_MAX) {
            Err(e) if e.is_not_found() => return Ok(0),
            // Torn by power loss, in an earlier life then.
            Err(Error::Damaged { .. }) => return Ok(0),
            other => other?,
        };
        let boot = self.backend.boot_id()?;
        let mark = serde_json::from_slice::<PacksMark>(&bytes).ok();
        Ok(mark.filter(|mark| mark.boot == boot).map_or(0, |mark| mark.up_to))
    }

    /// Has `sync` make durable what is in unfinished packs. Where that fails, nobody relies on
    /// these any more in this life of the machine.
    pub fn rely_on_packs(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = self.doubted_packs()?;
        let newest = packs::newest(self)?;
        if newest <= before {
            return sync();
        }
        self.put_packs_mark(newest)?;
        sync()?;
        if before == 0 { self.backend.remove(UNSYNCED_PACKS) } else { self.put_packs_mark(before) }
    }

    fn put_packs_mark(&self, up_to: u32) -> Result<()> {
        let mark = PacksMark { boot: self.backend.boot_id()?, up_to };
        self.backend
            .put(UNSYNCED_PACKS, serde_json::to_string(&mark).unwrap_or_default().as_bytes())
    }

    /// Has `sync` make durable what checkpoints have in a pack that did not wait for it. Where that
    /// fails, neither they nor the pack are relied on in this life of the machine.
    pub fn sync_sealed(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        self.rely_on_packs(|| {
            let before = self.mark()?;
            match (self.attempt(sync)?, before) {
                (true, Some(before)) => self.write_mark(&before),
                _ => Ok(()),
            }
        })
    }

    fn set_torn_aside(&self, from: CheckpointId) -> Result<Vec<TornCheckpoint>> {
        let mut torn = Vec::new();
        for id in self.checkpoint_ids()?.into_iter().filter(|id| *id >= from) {
            match self.read_whole(id) {
                Ok(()) => {}
                // What the medium does not give now may be there all the same.
                Err(error @ (Error::OtherVersion { .. } | Error::Io { .. })) => return Err(error),
                Err(error) => torn.push(TornCheckpoint { id, problem: error.to_string() }),
            }
        }
        for TornCheckpoint { id, .. } in &torn {
            self.set_aside(&layout::checkpoint(*id))?;
        }
        for id in self.map_ids()?.into_iter().filter(|id| *id >= from.0) {
            if matches!(self.read_map(id), Err(Error::Damaged { .. })) {
                self.set_aside(&layout::map(id))?;
            }
        }
        let left = self.checkpoint_ids()?;
        for tag in self.tag_names()? {
            let to = self.read_tag(&tag);
            // Set aside, or gone without a trace.
            let is_lost = |to: &CheckpointId| *to >= from && left.binary_search(to).is_err();
            if matches!(&to, Ok(Some(to)) if is_lost(to))
                || matches!(to, Err(Error::Damaged { .. }))
            {
                self.set_aside(&layout::tag(&tag))?;
            }
        }
        Ok(torn)
    }

    /// Reads all of a checkpoint.
    fn read_whole(&self, id: CheckpointId) -> Result<()> {
        let meta = self.read_checkpoint(id)?.meta;
        let (ram, disks) = self.read_maps(&meta)?;
        let mut wanted: Vec<_> =
            ram.iter().map(|(_, to)| to).chain(disks.records()).map(|to| (to, ())).collect();
        wanted.sort_unstable();
        wanted.dedup();
        self.read_pages(&wanted, &mut |(), _| Ok(()))
    }
}
