//! Making checkpoints durable, and finding those that power loss took.
//!
//! ```text
//!   each checkpoint    packs synced ─▶ map, synced ─▶ checkpoint, synced
//!   now and then       packs, map, checkpoint written; after some time: file system synced ─▶ `unsynced` moves on
//!
//!   unsynced         { "boot": the boot of the machine, "from": the first checkpoint that may not be durable,
//!                      "tried": a sync of them is at work, or has failed }
//!   unsynced.packs   { "boot": the same, "up_to": unfinished packs up to this number are not used, for the same reason }
//! ```
//!
//! What was written to the kernel survives the death of this process. If the machine went down
//! instead (its boot differs), the next writer reads all of the checkpoints from `from` on, and
//! moves those that are damaged to the quarantine: [`OpenStore::settle`].
//!
//! A failed sync may have lost its data, although the data can still be read from the page cache,
//! and although a second sync reports no error. So an attempt is marked before it is made. A
//! process that finds the mark during the same boot uses nothing that the attempt was for. Such
//! checkpoints stay marked until the next boot, when they can be read from the medium.
//!
//! Invariants: `unsynced` is durable before the first checkpoint that it names, and is removed only
//! after a sync. Packs are synced before they are closed, at any durability, because readers trust
//! their trailer.

use crate::durability_kind::Durability;
use crate::open_store::OpenStore;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

const UNSYNCED: &str = "unsynced";
const UNSYNCED_PACKS: &str = "unsynced.packs";
const UNSYNCED_BYTES_MAX: u64 = 4096;

#[derive(Serialize, Deserialize)]
struct Mark {
    boot: String,
    from: CheckpointId,
    /// A sync of these checkpoints began. It resets this when it succeeds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tried: bool,
}

#[derive(Serialize, Deserialize)]
struct PacksMark {
    boot: String,
    up_to: u32,
}

/// A checkpoint that power loss damaged, and that was moved to the quarantine.
#[derive(Clone, Debug)]
pub struct TornCheckpoint {
    /// Its number.
    pub id: CheckpointId,
    /// What is wrong with it.
    pub problem: String,
}

/// The times of syncs, for a writer that does not sync each checkpoint.
#[derive(Debug)]
pub struct Syncs {
    every: Option<Duration>,
    last: Instant,
}

impl Syncs {
    /// Creates the tracker for `durability`. Returns `None` if the writer syncs each checkpoint.
    pub fn of(durability: Durability) -> Option<Self> {
        let every = match durability {
            Durability::Checkpoint => return None,
            Durability::Every(every) => Some(every),
            Durability::Never => None,
        };
        Some(Self { every, last: Instant::now() })
    }

    /// Makes everything durable after the seal of checkpoint `id`, if the interval between syncs
    /// has passed. Errors: the sync failed; the mark cannot be written.
    pub fn sealed(&mut self, inner: &OpenStore, id: CheckpointId) -> Result<()> {
        if self.every.is_some_and(|every| self.last.elapsed() >= every) {
            self.last = Instant::now();
            inner.sync_and_mark(CheckpointId(id.0 + 1))?;
        }
        Ok(())
    }
}

impl OpenStore {
    /// Marks the checkpoints from `from` on as possibly not durable. Keeps an earlier mark if a
    /// sync failed. Errors: the mark cannot be read or written.
    pub fn put_mark(&self, from: CheckpointId) -> Result<()> {
        if self.in_doubt()?.is_some() {
            return Ok(());
        }
        self.write_mark(&Mark { boot: self.backend.boot_id()?, from, tried: false })
    }

    fn write_mark(&self, mark: &Mark) -> Result<()> {
        self.backend.put(UNSYNCED, serde_json::to_string(mark).unwrap_or_default().as_bytes())
    }

    /// The mark; `None` if all checkpoints are durable. A mark that power loss damaged covers all
    /// checkpoints and has no boot.
    fn mark(&self) -> Result<Option<Mark>> {
        let bytes = match self.backend.read(UNSYNCED, UNSYNCED_BYTES_MAX) {
            Err(e) if e.is_not_found() => return Ok(None),
            // Damaged by power loss.
            Err(Error::Damaged { .. }) => Vec::new(),
            other => other?,
        };
        let torn = Mark { boot: String::new(), from: CheckpointId(0), tried: false };
        Ok(Some(serde_json::from_slice(&bytes).unwrap_or(torn)))
    }

    /// Returns the first of the checkpoints that a failed sync may have lost. They can be read
    /// until the machine goes down. Returns `None` if there is none. Error: the mark cannot be
    /// read.
    pub fn in_doubt(&self) -> Result<Option<CheckpointId>> {
        match self.mark()? {
            Some(mark) if mark.tried && mark.boot == self.backend.boot_id()? => Ok(Some(mark.from)),
            _ => Ok(None),
        }
    }

    /// Marks the attempt, then calls `sync`. False if an earlier attempt failed, so that the result
    /// of this one means nothing.
    fn attempt(&self, sync: impl FnOnce() -> Result<()>) -> Result<bool> {
        let mark = self.mark()?;
        let is_known = mark.as_ref().is_none_or(|mark| !mark.tried);
        if let Some(mark) = mark.filter(|mark| !mark.tried) {
            self.write_mark(&Mark { tried: true, ..mark })?;
        }
        sync()?;
        Ok(is_known)
    }

    /// Makes everything durable, and then writes the mark that checkpoints from `from` on may be
    /// lost by power loss. Errors: the sync failed; the mark cannot be written.
    pub fn sync_and_mark(&self, from: CheckpointId) -> Result<()> {
        if self.attempt(|| self.backend.sync_all())? {
            self.write_mark(&Mark { boot: self.backend.boot_id()?, from, tried: false })?;
        }
        Ok(())
    }

    /// Makes everything durable, and then removes the mark of unsynced checkpoints. Errors: the
    /// sync failed; the mark cannot be removed.
    pub fn sync_and_unmark(&self) -> Result<()> {
        if self.attempt(|| self.backend.sync_all())? {
            self.backend.remove(UNSYNCED)
        } else {
            Ok(())
        }
    }

    /// Prepares the store for the next writer. If the machine went down before everything was
    /// durable, moves damaged checkpoints to the quarantine, and returns them. Errors: files cannot
    /// be read, moved or synced.
    pub fn settle(&self) -> Result<Vec<TornCheckpoint>> {
        let Some(mark) = self.mark()? else { return Ok(Vec::new()) };
        let boot = self.backend.boot_id()?;
        if mark.boot == boot {
            if mark.tried {
                // The failed sync was also for records in unfinished packs.
                self.put_packs_mark(self.newest_pack()?)?;
                self.backend.sync_all()?;
            } else {
                self.rely_on_packs(|| self.sync_and_unmark())?;
            }
            return Ok(Vec::new());
        }
        let torn = self.set_torn_aside(mark.from)?;
        // The checkpoints were read from the medium, so failed syncs of the previous boot do not
        // matter.
        self.write_mark(&Mark { boot, tried: false, ..mark })?;
        self.sync_and_unmark()?;
        Ok(torn)
    }

    /// Returns the number of the last pack whose unfinished records may be lost: unfinished packs
    /// up to it are not used. Returns 0 if there is none. Error: the mark cannot be read.
    pub fn doubted_packs(&self) -> Result<u32> {
        let bytes = match self.backend.read(UNSYNCED_PACKS, UNSYNCED_BYTES_MAX) {
            Err(e) if e.is_not_found() => return Ok(0),
            // Damaged by power loss, so written during an earlier boot.
            Err(Error::Damaged { .. }) => return Ok(0),
            other => other?,
        };
        let boot = self.backend.boot_id()?;
        let mark = serde_json::from_slice::<PacksMark>(&bytes).ok();
        Ok(mark.filter(|mark| mark.boot == boot).map_or(0, |mark| mark.up_to))
    }

    /// Calls `sync`, which makes unfinished packs durable. If it fails, no process uses these packs
    /// during this boot. Errors: that of `sync`; the mark cannot be written.
    pub fn rely_on_packs(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = self.doubted_packs()?;
        let newest = self.newest_pack()?;
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

    /// Calls `sync`, which makes a pack durable with records of checkpoints that did not wait for a
    /// sync. If it fails, no process uses the pack or relies on these checkpoints during this boot.
    /// Errors: that of `sync`; the mark cannot be written.
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
                // Another process may have forgotten it since the listing.
                Ok(()) | Err(Error::UnknownCheckpoint { .. }) => {}
                // A read error does not show that the checkpoint is damaged.
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
            // Moved to the quarantine above, or lost without a trace.
            let is_lost = |to: &CheckpointId| *to >= from && left.binary_search(to).is_err();
            if matches!(&to, Ok(Some(to)) if is_lost(to))
                || matches!(to, Err(Error::Damaged { .. }))
            {
                self.set_aside(&layout::tag(&tag))?;
            }
        }
        Ok(torn)
    }

    /// Reads all files and records of a checkpoint.
    fn read_whole(&self, id: CheckpointId) -> Result<()> {
        let meta = self.read_checkpoint(id)?.meta;
        // A prune that began before may still replace maps and remove packs.
        let (ram, disks, _held) = self.hold_maps(id, &meta)?;
        let mut wanted: Vec<_> =
            ram.iter().map(|(_, to)| to).chain(disks.records()).map(|to| (to, ())).collect();
        wanted.sort_unstable();
        wanted.dedup();
        self.read_pages(&wanted, &mut |(), _| Ok(()))
    }
}
