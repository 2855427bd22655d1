//! Making checkpoints durable, and finding those that power loss took.
//!
//! ```text
//!   each checkpoint    packs synced ─▶ map, synced ─▶ checkpoint, synced
//!   now and then       packs, map, checkpoint written; after some time: file system synced ─▶ `unsynced` moves on
//!
//!   writers/NN.unsynced   { "boot": the boot of the machine, "from": the first checkpoint that may not be durable,
//!                           "tried": a sync of them is at work, or has failed }
//!   writers/NN.packs      { "boot": the same, "up_to": unfinished packs up to this number are not used, for the same reason }
//!   unsynced, unsynced.packs   the same marks of writers that have ended; a writer that starts moves them here
//! ```
//!
//! Each writer has its own marks, so it needs no other one to change them. A writer that starts
//! moves the marks of those that have ended, while no other one starts ([`OpenStore::settle`]).
//!
//! What was written to the kernel survives the death of this process. If the machine went down
//! instead (its boot differs), the next writer reads all of the checkpoints from `from` on, and
//! moves those that are damaged to the quarantine: [`OpenStore::settle`].
//!
//! A failed sync may have lost its data, although the data can still be read from the page cache,
//! and although a second sync reports no error to a process that begins after the failure. A
//! process that began before gets the error, too: a writer opens the medium when it starts. So an
//! attempt is marked before it is made. A
//! process that finds the mark during the same boot uses nothing that the attempt was for. Such
//! checkpoints stay marked until the next boot, when they can be read from the medium.
//!
//! Invariants: `unsynced` is durable before the first checkpoint that it names, and is removed only
//! after a sync. Packs are synced before they are closed, at any durability, because readers trust
//! their trailer.

use crate::durability_kind::Durability;
use crate::open_store::OpenStore;
use crate::{Error, Result};
use keyframe_store_backend::layout::{self, UNSYNCED, UNSYNCED_PACKS};
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// The endings of the names of a writer's marks, after that of its slot.
const OF_SLOT: &str = layout::MARK_ENDINGS[0];
const PACKS_OF_SLOT: &str = layout::MARK_ENDINGS[1];
const UNSYNCED_BYTES_MAX: u64 = 4096;
/// How long a writer that starts waits for a sync that another one makes, and how often it looks.
const ATTEMPT_WAIT: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(10) };
const ATTEMPT_POLL: Duration = Duration::from_millis(50);

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

impl From<(u64, String)> for TornCheckpoint {
    fn from((id, problem): (u64, String)) -> Self {
        Self { id: CheckpointId(id), problem }
    }
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
    /// has passed. Returns true if everything is durable. Errors: the sync failed; the mark cannot
    /// be written.
    pub fn sealed(&mut self, inner: &OpenStore, id: CheckpointId) -> Result<bool> {
        if self.every.is_none_or(|every| self.last.elapsed() < every) {
            return Ok(false);
        }
        self.last = Instant::now();
        inner.sync_and_mark(CheckpointId(id.0 + 1))
    }
}

impl OpenStore {
    /// The names of the marks of this process: of its slot if it is one of several writers.
    fn own_mark(&self) -> String {
        self.own_number().map_or(UNSYNCED.into(), |number| layout::writer(number) + OF_SLOT)
    }

    fn own_packs_mark(&self) -> String {
        let of_slot = |number| layout::writer(number) + PACKS_OF_SLOT;
        self.own_number().map_or(UNSYNCED_PACKS.into(), of_slot)
    }

    fn own_number(&self) -> Option<u32> {
        self.own_slot.as_ref().and_then(|own| own.number())
    }

    /// The names of the marks of all slots with this ending, with the number of each slot.
    fn marks_of_slots(&self, ending: &str) -> Result<Vec<(u32, String)>> {
        let number = |file: &String| layout::parse_writer(file.strip_suffix(ending)?);
        let named = |file: &String| Some((number(file)?, format!("{}/{file}", layout::WRITERS)));
        Ok(self.backend.list(layout::WRITERS)?.iter().filter_map(named).collect())
    }

    /// Marks the checkpoints from `from` on as possibly not durable. Keeps an earlier mark if a
    /// sync failed. Errors: the mark cannot be read or written.
    pub fn put_mark(&self, from: CheckpointId) -> Result<()> {
        let boot = self.backend.boot_id()?;
        let name = self.own_mark();
        match self.mark(&name)? {
            Some(mark) if mark.tried && mark.boot == boot => Ok(()),
            _ => self.write_mark(&name, &Mark { boot, from, tried: false }),
        }
    }

    fn write_mark(&self, name: &str, mark: &Mark) -> Result<()> {
        self.backend.put(name, serde_json::to_string(mark).unwrap_or_default().as_bytes())
    }

    /// The mark in the file `name`; `None` if there is none. A mark that power loss damaged covers
    /// all checkpoints and has no boot.
    fn mark(&self, name: &str) -> Result<Option<Mark>> {
        let bytes = match self.backend.read(name, UNSYNCED_BYTES_MAX) {
            Err(e) if e.is_not_found() => return Ok(None),
            // Damaged by power loss.
            Err(Error::Damaged { .. }) => Vec::new(),
            other => other?,
        };
        let torn = Mark { boot: String::new(), from: CheckpointId(0), tried: false };
        Ok(Some(serde_json::from_slice(&bytes).unwrap_or(torn)))
    }

    /// Returns the first of the checkpoints that a failed sync may have lost. They can be read
    /// until the machine goes down. Returns `None` if there is none. Error: a mark cannot be read.
    pub fn in_doubt(&self) -> Result<Option<CheckpointId>> {
        let boot = self.backend.boot_id()?;
        let of_slots = self.marks_of_slots(OF_SLOT)?.into_iter().map(|(_, name)| name);
        let mut first = None;
        for name in of_slots.chain([UNSYNCED.to_owned()]) {
            let mark = self.mark(&name)?.filter(|mark| mark.tried && mark.boot == boot);
            first = first.into_iter().chain(mark.map(|mark| mark.from)).min();
        }
        Ok(first)
    }

    /// Marks the attempt in the file `name`, then calls `sync`. False if an earlier attempt failed,
    /// so that the result of this one means nothing.
    fn attempt(&self, name: &str, sync: impl FnOnce() -> Result<()>) -> Result<bool> {
        let mark = self.mark(name)?;
        let is_known = mark.as_ref().is_none_or(|mark| !mark.tried);
        if let Some(mark) = mark.filter(|mark| !mark.tried) {
            self.write_mark(name, &Mark { tried: true, ..mark })?;
        }
        sync()?;
        Ok(is_known)
    }

    /// Makes everything durable, and then writes the mark that checkpoints from `from` on may be
    /// lost by power loss. Returns true if everything is durable, false if an earlier attempt has
    /// failed. Errors: the sync failed; the mark cannot be written.
    pub fn sync_and_mark(&self, from: CheckpointId) -> Result<bool> {
        let name = self.own_mark();
        let is_known = self.attempt(&name, || self.backend.sync_all())?;
        if is_known {
            let boot = self.backend.boot_id()?;
            self.write_mark(&name, &Mark { boot, from, tried: false })?;
        }
        Ok(is_known)
    }

    /// Makes everything durable, and then removes the mark of unsynced checkpoints. Errors: the
    /// sync failed; the mark cannot be removed.
    pub fn sync_and_unmark(&self) -> Result<()> {
        self.sync_and_remove(&self.own_mark())
    }

    fn sync_and_remove(&self, mark: &str) -> Result<()> {
        if self.attempt(mark, || self.backend.sync_all())? {
            self.backend.remove(mark)
        } else {
            Ok(())
        }
    }

    /// Prepares the store for the next writer, which has its slot, while no other one starts. If
    /// the machine went down before everything was durable, moves damaged checkpoints to the
    /// quarantine, and returns them. Errors: files cannot be read, moved or synced.
    pub fn settle(&self) -> Result<Vec<TornCheckpoint>> {
        let boot = self.backend.boot_id()?;
        self.take_packs_marks(&boot)?;
        let of_dead = self.marks_of_dead(OF_SLOT)?;
        let mut marks = Vec::new();
        for name in of_dead.iter().map(String::as_str).chain([UNSYNCED]) {
            marks.extend(self.mark(name)?);
        }
        let Some(from) = marks.iter().map(|mark| mark.from).min() else { return Ok(Vec::new()) };
        let of_earlier = marks.iter().filter(|mark| mark.boot != boot).map(|mark| mark.from);
        let mut torn = Vec::new();
        if let Some(from) = of_earlier.min() {
            // They were read from the medium, so failed syncs of that boot do not matter.
            torn = self.set_torn_aside(from)?;
        }
        let mut tried = marks.iter().any(|mark| mark.tried && mark.boot == boot);
        if !of_dead.is_empty() || marks.iter().any(|mark| mark.boot != boot) {
            self.write_mark(UNSYNCED, &Mark { boot: boot.clone(), from, tried })?;
            self.backend.remove_all(layout::WRITERS, &of_dead)?;
        }
        if !tried && self.is_tried_by_living()? {
            // Its sync may have failed and lost what these checkpoints need. A sync of this process,
            // which has just begun, would not say so.
            self.write_mark(UNSYNCED, &Mark { boot, from, tried: true })?;
            tried = true;
        }
        if tried {
            // The failed sync was also for records in unfinished packs.
            self.put_packs_mark(UNSYNCED_PACKS, self.newest_pack()?)?;
            self.backend.sync_all()?;
        } else {
            self.rely_on_packs(|| self.sync_and_remove(UNSYNCED))?;
        }
        Ok(torn)
    }

    /// The marks with this ending of writers that have ended, also of the one whose slot this
    /// process has now.
    fn marks_of_dead(&self, ending: &str) -> Result<Vec<String>> {
        let marks = self.marks_of_slots(ending)?;
        if marks.is_empty() {
            return Ok(Vec::new());
        }
        let writers = self.other_writers()?;
        let dead = marks.into_iter().filter(|(number, _)| !writers.lives(*number));
        Ok(dead.map(|(_, name)| name).collect())
    }

    /// Returns true if a writer has tried a sync of everything whose success it has not noted. It
    /// may have failed, and lost what others had not synced. Error: a mark cannot be read.
    pub fn has_tried_mark(&self) -> Result<bool> {
        let boot = self.backend.boot_id()?;
        for (_, name) in self.marks_of_slots(OF_SLOT)? {
            if self.mark(&name)?.is_some_and(|mark| mark.tried && mark.boot == boot) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// True if a living writer has tried a sync whose success it does not note for some seconds.
    fn is_tried_by_living(&self) -> Result<bool> {
        let deadline = Instant::now() + ATTEMPT_WAIT;
        loop {
            let is_tried = self.has_tried_mark()?;
            if !is_tried || Instant::now() >= deadline {
                return Ok(is_tried);
            }
            std::thread::sleep(ATTEMPT_POLL);
        }
    }

    /// Moves the marks of unfinished packs of writers that have ended to the store's own.
    fn take_packs_marks(&self, boot: &str) -> Result<()> {
        let of_dead = self.marks_of_dead(PACKS_OF_SLOT)?;
        if of_dead.is_empty() {
            return Ok(());
        }
        let mut up_to = 0;
        for name in &of_dead {
            up_to = up_to.max(self.packs_mark(name, boot)?);
        }
        if up_to > self.packs_mark(UNSYNCED_PACKS, boot)? {
            self.put_packs_mark(UNSYNCED_PACKS, up_to)?;
        }
        self.backend.remove_all(layout::WRITERS, &of_dead)
    }

    /// The number in a mark of unfinished packs; 0 if there is none of this boot.
    fn packs_mark(&self, name: &str, boot: &str) -> Result<u32> {
        let bytes = match self.backend.read(name, UNSYNCED_BYTES_MAX) {
            Err(e) if e.is_not_found() => return Ok(0),
            // Damaged by power loss, so written during an earlier boot.
            Err(Error::Damaged { .. }) => return Ok(0),
            other => other?,
        };
        let mark = serde_json::from_slice::<PacksMark>(&bytes).ok();
        Ok(mark.filter(|mark| mark.boot == boot).map_or(0, |mark| mark.up_to))
    }

    /// Returns the number of the last pack whose unfinished records may be lost: unfinished packs
    /// up to it are not used. Returns 0 if there is none. Error: a mark cannot be read.
    pub fn doubted_packs(&self) -> Result<u32> {
        let boot = self.backend.boot_id()?;
        let mut up_to = self.packs_mark(UNSYNCED_PACKS, &boot)?;
        for (_, name) in self.marks_of_slots(PACKS_OF_SLOT)? {
            up_to = up_to.max(self.packs_mark(&name, &boot)?);
        }
        Ok(up_to)
    }

    /// Calls `sync`, which makes unfinished packs durable. If it fails, no process uses these packs
    /// during this boot. Errors: that of `sync`; the mark cannot be written.
    pub fn rely_on_packs(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let name = self.own_packs_mark();
        let before = self.packs_mark(&name, &self.backend.boot_id()?)?;
        let newest = self.newest_pack()?;
        if newest <= before {
            return sync();
        }
        self.put_packs_mark(&name, newest)?;
        sync()?;
        if before == 0 { self.backend.remove(&name) } else { self.put_packs_mark(&name, before) }
    }

    fn put_packs_mark(&self, name: &str, up_to: u32) -> Result<()> {
        let mark = PacksMark { boot: self.backend.boot_id()?, up_to };
        self.backend.put(name, serde_json::to_string(&mark).unwrap_or_default().as_bytes())
    }

    /// Calls `sync`, which makes a pack durable with records of checkpoints that did not wait for a
    /// sync. If it fails, no process uses the pack or relies on these checkpoints during this boot.
    /// Errors: that of `sync`; the mark cannot be written.
    pub fn sync_sealed(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let name = self.own_mark();
        self.rely_on_packs(|| {
            let before = self.mark(&name)?;
            match (self.attempt(&name, sync)?, before) {
                (true, Some(before)) => self.write_mark(&name, &before),
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
        // A writer at work may have removed one since, whose seal failed.
        let there = self.checkpoint_ids()?;
        torn.retain(|torn| there.binary_search(&torn.id).is_ok());
        for TornCheckpoint { id, .. } in &torn {
            self.set_aside(&layout::checkpoint(*id))?;
        }
        for id in self.map_ids()?.into_iter().filter(|id| *id >= from.0) {
            if matches!(self.read_map(id), Err(Error::Damaged { .. })) {
                self.set_aside(&layout::map(id))?;
            }
        }
        for tag in self.tag_names()? {
            let to = self.read_tag(&tag);
            // Listed after the tag was read: a writer at work may have sealed and tagged one.
            let left = self.checkpoint_ids()?;
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
