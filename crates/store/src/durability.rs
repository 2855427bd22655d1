//! When what a writer seals becomes durable: with each checkpoint, now and then, or when the kernel likes.
//!
//! ```text
//!   each checkpoint    packs synced ─▶ map, synced ─▶ checkpoint, synced
//!   now and then       packs, map, checkpoint written; every so often: file system synced ─▶ `unsynced` moves on
//!
//!   unsynced   { "boot": which life of the machine, "from": the first checkpoint that may not be durable }
//! ```
//!
//! What the kernel has been given survives the death of this process. Where the machine went down instead (its boot is another
//! one), the next writer reads the checkpoints from `from` on whole, and sets those aside that are not: [`Inner::settle`].
//!
//! Invariants: `unsynced` is durable before the first checkpoint that it vouches not for, and goes only behind a sync. Packs are
//! synced before they are closed, whatever the durability: their trailer is trusted.

use crate::store::Inner;
use crate::{Error, Result, names};
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

const UNSYNCED: &str = "unsynced";
const UNSYNCED_BYTES_MAX: u64 = 4096;

/// When checkpoints become durable. Where a store's place makes all durable at once (object storage), it always is the first.
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
            inner.backend.sync_all()?;
            inner.put_mark(CheckpointId(id.0 + 1))?;
            self.last = Instant::now();
        }
        Ok(())
    }
}

impl Inner {
    /// From here on checkpoints from `from` on may not be durable.
    pub fn put_mark(&self, from: CheckpointId) -> Result<()> {
        let mark = Mark { boot: self.backend.boot()?, from };
        let text = serde_json::to_string(&mark).unwrap_or_default();
        self.backend.put(UNSYNCED, text.as_bytes())
    }

    /// All that was written is durable, and nothing else will be.
    pub fn sync_and_unmark(&self) -> Result<()> {
        self.backend.sync_all()?;
        self.backend.remove(UNSYNCED)
    }

    /// For the next writer: where the machine went down before all was durable, sets what is torn aside.
    pub fn settle(&self) -> Result<Vec<TornCheckpoint>> {
        let bytes = match self.backend.read(UNSYNCED, UNSYNCED_BYTES_MAX) {
            Err(e) if e.is_not_found() => return Ok(Vec::new()),
            // Torn itself: all are doubtful.
            Err(Error::Damaged { .. }) => Vec::new(),
            other => other?,
        };
        let mark: Option<Mark> = serde_json::from_slice(&bytes).ok();
        let torn = match mark {
            Some(mark) if mark.boot == self.backend.boot()? => Vec::new(),
            mark => self.set_torn_aside(mark.map_or(CheckpointId(0), |mark| mark.from))?,
        };
        self.sync_and_unmark()?;
        Ok(torn)
    }

    fn set_torn_aside(&self, from: CheckpointId) -> Result<Vec<TornCheckpoint>> {
        let mut torn = Vec::new();
        for id in self.checkpoint_ids()?.into_iter().filter(|id| *id >= from) {
            match self.read_whole(id) {
                Ok(()) => {}
                // What the medium does not give now may be there all the same.
                Err(error @ (Error::LaterVersion { .. } | Error::Io { .. })) => return Err(error),
                Err(error) => torn.push(TornCheckpoint { id, problem: error.to_string() }),
            }
        }
        for TornCheckpoint { id, .. } in &torn {
            self.set_aside(&names::checkpoint(*id))?;
        }
        for id in self.map_ids()?.into_iter().filter(|id| *id >= from.0) {
            if matches!(self.read_map(id), Err(Error::Damaged { .. })) {
                self.set_aside(&names::map(id))?;
            }
        }
        let left = self.checkpoint_ids()?;
        for tag in self.tag_names()? {
            let to = self.read_tag(&tag);
            // Set aside, or gone without a trace.
            let is_lost = |to: &CheckpointId| *to >= from && left.binary_search(to).is_err();
            if matches!(&to, Ok(Some(to)) if is_lost(to)) || matches!(to, Err(Error::Damaged { .. })) {
                self.set_aside(&names::tag(&tag))?;
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
