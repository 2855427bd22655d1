//! Copying checkpoints into another store. Copies only what is missing there.
//!
//! ```text
//!   source                                              target
//!     12 ─▶ does a checkpoint there have its origin? ── yes ─▶ tags
//!            │ no
//!            ▼
//!           same run as the one before it? ─ no ──▶ a new run, all pages
//!            │ yes                                       │
//!            └▶ pages in other records than before ─▶ hashed with the target's key, deduplicated ─▶ sealed, with its origin
//! ```
//!
//! Invariants: a copy has the RAM, devices and disks of its origin, byte for byte, and names its
//! origin. The same checkpoint is copied once, also by way of a third store, or back. Each copy is
//! sealed by itself, so an interrupted copy continues after the last sealed one. Tags of the target
//! are never moved. The source is only read.
//!
//! Left out: images beneath disks (the target names the same files), and working sets, which are
//! advice.

use crate::disks::LoadedDisks;
use crate::run::{DiskState, Run, SealRequest};
use crate::tuning::Tuning;
use crate::writer::Writer;
use crate::{Error, LoadedCheckpoint, Result, Sealed, Store};
use jiff::Timestamp;
use keyframe_store_format::disk_meta::DiskMeta;
use keyframe_store_format::meta::{Meta, Origin};
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{CheckpointId, Page, PageIndex, PageRange, ZERO_PAGE};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The most pages of one read: 16 MiB.
const CHUNK_PAGES: usize = 4096;

/// The progress of a copy of checkpoints to another store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// The number, in the source, of the checkpoint that is being copied.
    pub checkpoint: CheckpointId,
    /// The number of checkpoints that are complete.
    pub done: u64,
    /// The number of all checkpoints.
    pub total: u64,
}

/// A checkpoint and its copy in another store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedCheckpoint {
    /// Its number in the source.
    pub from: CheckpointId,
    /// Its number in the target.
    pub to: CheckpointId,
}

/// A checkpoint that cannot be copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedCopy {
    /// Its number in the source.
    pub from: CheckpointId,
    /// What is damaged.
    pub problem: String,
}

/// The result of a copy of checkpoints to another store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyReport {
    /// Checkpoints that were copied.
    pub copied: Vec<CopiedCheckpoint>,
    /// Checkpoints that the target had already.
    pub known: Vec<CopiedCheckpoint>,
    /// The number of pages and blocks that were read.
    pub read_pages: u64,
    /// The number of bytes by which the target's packs, maps and device states grew.
    pub stored_bytes: u64,
    /// Checkpoints that cannot be read whole.
    pub damaged: Vec<FailedCopy>,
    /// Tags that point elsewhere in the target, and stay as they are there.
    pub tags_left: Vec<String>,
}

impl Store {
    /// Copies the checkpoints `ids` into the store `target`, as one of its writers. Calls `progress`
    /// before each checkpoint. A damaged checkpoint is not copied; the report lists it. Returns the
    /// report.
    ///
    /// Errors: [`Error::SameStore`] if `target` is this store; this store cannot be read; the
    /// target cannot be written.
    pub fn copy_to(
        &self,
        target: &Self,
        ids: &BTreeSet<CheckpointId>,
        progress: &mut dyn FnMut(CopyProgress),
    ) -> Result<CopyReport> {
        self.copy_tuned(target, ids, Tuning::default(), progress)
    }

    /// Copies as [`Store::copy_to`], with the caller's limits for the written packs. Returns the
    /// report. Errors: those of [`Store::copy_to`].
    pub fn copy_tuned(
        &self,
        target: &Self,
        ids: &BTreeSet<CheckpointId>,
        tuning: Tuning,
        progress: &mut dyn FnMut(CopyProgress),
    ) -> Result<CopyReport> {
        let how = CopyOptions { tuning, owner: "keyframe copy", edit: &|_| () };
        self.copy_with(target, ids, &how, progress)
    }

    /// Returns the copy of checkpoint `id` of `source` in this store; `None` if there is none. Error: a
    /// store cannot be read.
    pub fn copy_of(&self, source: &Self, id: CheckpointId) -> Result<Option<CheckpointId>> {
        let meta = source.sealed(id)?.meta;
        let origin = origin_of(source, id, &meta);
        let mut copies = self.checkpoints()?.sealed.into_iter().filter(|sealed| {
            sealed.meta.taken_at == meta.taken_at
                && origin_of(self, sealed.id, &sealed.meta) == origin
        });
        Ok(copies.next().map(|sealed| sealed.id))
    }

    /// Copies as [`Store::copy_to`], and lets `edit` change the description of each copy. `edit` must
    /// leave the VM's RAM and disks as they are. Other processes see `owner` as the holder of the
    /// target's lock. Returns the report. Errors: those of
    /// [`Store::copy_to`].
    pub fn copy_edited(
        &self,
        target: &Self,
        ids: &BTreeSet<CheckpointId>,
        owner: &str,
        edit: &dyn Fn(&mut Meta),
        progress: &mut dyn FnMut(CopyProgress),
    ) -> Result<CopyReport> {
        let how = CopyOptions { tuning: Tuning::default(), owner, edit };
        self.copy_with(target, ids, &how, progress)
    }

    fn copy_with(
        &self,
        target: &Self,
        ids: &BTreeSet<CheckpointId>,
        how: &CopyOptions<'_>,
        progress: &mut dyn FnMut(CopyProgress),
    ) -> Result<CopyReport> {
        if self.id() == target.id() {
            return Err(Error::SameStore { object: target.path().display().to_string() });
        }
        let writer = target.lock_writer_tuned(how.owner, how.tuning)?;
        let edit = how.edit;
        let mut there = There::default();
        there.look(target)?;
        let report = CopyReport::default();
        let mut copy = Copy { source: self, target, edit, writer, there, open: None, report };
        let tags = self.tags_of_checkpoints()?;
        for (done, id) in (0..).zip(ids) {
            progress(CopyProgress { checkpoint: *id, done, total: ids.len() as u64 });
            let to = match copy.copy_checkpoint(*id) {
                // Later checkpoints may be intact.
                Err(Error::Damaged { object, problem }) => {
                    let problem = format!("{object}: {problem}");
                    copy.report.damaged.push(FailedCopy { from: *id, problem });
                    continue;
                }
                other => other?,
            };
            copy.copy_tags(*id, to, tags.get(id).map_or(&[], Vec::as_slice))?;
        }
        copy.close()?;
        Ok(copy.report)
    }
}

/// The details of a copy.
struct CopyOptions<'a> {
    tuning: Tuning,
    /// The holder of the target's lock, as other processes see it.
    owner: &'a str,
    edit: &'a dyn Fn(&mut Meta),
}

/// The origin of checkpoint `id` of `store`.
fn origin_of(store: &Store, id: CheckpointId, meta: &Meta) -> Origin {
    meta.origin.clone().unwrap_or_else(|| Origin { store: store.id().into(), checkpoint: id })
}

/// The open run in the target, and the source of its newest checkpoint.
struct Open {
    run: Run,
    ram: LoadedCheckpoint,
    disks: LoadedDisks,
}

/// The checkpoints of the target, by origin and time. The time is needed because power loss may
/// take a checkpoint, whose number is then used again.
#[derive(Default)]
struct There {
    copies: BTreeMap<Origin, BTreeMap<Timestamp, CheckpointId>>,
    /// Those that were looked at.
    known: BTreeSet<CheckpointId>,
}

impl There {
    fn add(&mut self, origin: Origin, taken_at: Timestamp, id: CheckpointId) {
        self.copies.entry(origin).or_default().insert(taken_at, id);
        self.known.insert(id);
    }

    /// Adds the checkpoints that other writers have sealed since the last look. Two copies of one
    /// checkpoint at the same time may both be made; each is complete.
    fn look(&mut self, target: &Store) -> Result<()> {
        let mut new = target.ids()?;
        new.retain(|id| self.known.insert(*id));
        for (id, meta) in target.inner().read_metas(&new) {
            // One that cannot be read is left out of this copy, as in a listing.
            if let Ok(meta) = meta {
                self.add(origin_of(target, id, &meta), meta.taken_at, id);
            }
        }
        Ok(())
    }

    /// The copy taken at that time; the latest one if the time is not known.
    fn get(&self, origin: &Origin, taken_at: Option<Timestamp>) -> Option<CheckpointId> {
        let copies = self.copies.get(origin)?;
        taken_at.map_or_else(|| copies.values().next_back(), |at| copies.get(&at)).copied()
    }
}

struct Copy<'a> {
    source: &'a Store,
    target: &'a Store,
    edit: &'a dyn Fn(&mut Meta),
    writer: Writer,
    there: There,
    open: Option<Open>,
    report: CopyReport,
}

impl Copy<'_> {
    /// The number of a checkpoint's copy. Makes the copy if there is none.
    fn copy_checkpoint(&mut self, id: CheckpointId) -> Result<CheckpointId> {
        let mut ram = self.source.load(id)?;
        let origin = origin_of(self.source, id, &ram.meta);
        // In object storage, this is the only writer.
        if self.writer.is_shared() {
            self.there.look(self.target)?;
        }
        if let Some(to) = self.there.get(&origin, Some(ram.meta.taken_at)) {
            self.report.known.push(CopiedCheckpoint { from: id, to });
            return Ok(to);
        }
        (self.edit)(&mut ram.meta);
        let disks = self.source.load_disks(id)?;
        let goes_on = self.open.as_ref().is_some_and(|open| open.goes_on_with(&ram.meta, &disks));
        if !goes_on {
            self.close()?;
        }
        let (mut run, before) = if let Some(open) = self.open.take() {
            (open.run, Some((open.ram, open.disks)))
        } else {
            let (meta, state) = (&ram.meta, DiskState::default());
            (self.writer.begin_run_with(&meta.vm, &meta.ram, meta.disks.clone(), state)?, None)
        };
        self.report.read_pages += put_ram(&mut run, before.as_ref().map(|(ram, _)| ram), &ram)?;
        self.report.read_pages +=
            put_disks(&mut run, before.as_ref().map(|(_, disks)| disks), &disks)?;
        run.set_origin(origin.clone());
        let sealed = run.seal(self.request(&ram))?;
        let counts = &sealed.meta.counts;
        let of_disks: u64 = sealed.meta.disks.iter().map(|disk| disk.counts.stored_bytes).sum();
        self.report.stored_bytes +=
            counts.stored_bytes + counts.map_bytes + counts.device_bytes + of_disks;
        self.report.copied.push(CopiedCheckpoint { from: id, to: sealed.id });
        self.there.add(origin, ram.meta.taken_at, sealed.id);
        self.open = Some(Open { run, ram, disks });
        Ok(sealed.id)
    }

    fn request<'a>(&self, ram: &'a LoadedCheckpoint) -> SealRequest<'a> {
        let meta = ram.meta.clone();
        // A parent is in the same store as its child.
        let home = |checkpoint| match &meta.origin {
            Some(_) => {
                self.source.sealed(checkpoint).ok().map(|s| origin_of(self.source, s.id, &s.meta))
            }
            None => Some(Origin { store: self.source.id().into(), checkpoint }),
        };
        let when = |parent| self.source.sealed(parent).ok().map(|sealed| sealed.meta.taken_at);
        let parent = meta.parent.and_then(|of| self.there.get(&home(of)?, when(of)));
        SealRequest { parent, ..SealRequest::of_description(meta, &ram.device_state) }
    }

    fn close(&mut self) -> Result<()> {
        self.open.take().map_or(Ok(()), |open| open.run.finish())
    }

    /// Gives the copy the tags of its origin.
    fn copy_tags(&mut self, from: CheckpointId, to: CheckpointId, tags: &[String]) -> Result<()> {
        let (tags, pinned) = Sealed::split_tags(from, tags);
        if pinned {
            self.target.pin(to)?;
        }
        for tag in tags {
            match self.target.inner().read_tag(&tag)? {
                None => drop(self.target.set_tag(&tag, to)?),
                Some(there) if there == to => {}
                Some(_) => self.report.tags_left.push(tag),
            }
        }
        Ok(())
    }
}

impl Open {
    /// True if a checkpoint is the next one of this run, with the same disks, and holds all blocks
    /// that the previous one held.
    fn goes_on_with(&self, meta: &Meta, disks: &LoadedDisks) -> bool {
        let before = &self.ram.meta;
        let form = |disk: &DiskMeta| (disk.name.clone(), disk.disk_bytes, disk.left_out);
        let same_disks = before.disks.len() == meta.disks.len()
            && before.disks.iter().map(form).eq(meta.disks.iter().map(form));
        before.run == meta.run
            && meta.parent.is_none()
            && before.ram.same_space(&meta.ram)
            && same_disks
            && knows_all_of(disks, &self.disks)
    }
}

/// The blocks of all disks.
fn all_blocks(meta: &Meta) -> PageRange {
    let (first, end) = (meta.ram.len_pages(), meta.space_pages().unwrap_or_default());
    PageRange::new(PageIndex(first), end.saturating_sub(first))
}

/// True if `now` holds all blocks that `before` holds.
fn knows_all_of(now: &LoadedDisks, before: &LoadedDisks) -> bool {
    let mut in_both = 0;
    now.each(all_blocks(&now.meta), &mut |range, _| {
        before.each(range, &mut |known, _| in_both += known.len_pages);
    });
    in_both == before.known_blocks()
}

/// Puts the pages that differ from those of `before`, or all; returns the number of pages read.
fn put_ram(
    run: &mut Run,
    before: Option<&LoadedCheckpoint>,
    now: &LoadedCheckpoint,
) -> Result<u64> {
    let mut read = 0;
    let Some(before) = before else {
        let all = PageRange::new(PageIndex(0), now.meta.ram.len_pages());
        now.read_pages(all, &mut |page, content| {
            read += 1;
            run.put_page(page, content).map(drop)
        })?;
        return Ok(read);
    };
    let mut chunk = Vec::with_capacity(CHUNK_PAGES);
    let mut put = |run: &mut Run, chunk: &mut Vec<PageIndex>| {
        read += chunk.len() as u64;
        now.read_some(chunk, &mut |page, content| run.put_page(page, content).map(drop))?;
        chunk.clear();
        Ok::<_, Error>(())
    };
    for page in (0..now.meta.ram.len_pages()).map(PageIndex) {
        if now.page_ref(page) == before.page_ref(page) {
            continue;
        }
        if now.is_zero(page) {
            run.put_zero(page)?;
            continue;
        }
        chunk.push(page);
        if chunk.len() == CHUNK_PAGES {
            put(run, &mut chunk)?;
        }
    }
    put(run, &mut chunk)?;
    Ok(read)
}

/// Puts the blocks that differ from those of `before`, or all; returns the number of blocks read.
fn put_disks(run: &mut Run, before: Option<&LoadedDisks>, now: &LoadedDisks) -> Result<u64> {
    let mut read = 0;
    for (index, disk) in now.meta.disks.iter().enumerate() {
        let Some(blocks) = now.meta.blocks_of(index) else { continue };
        let other_base = |before: &LoadedDisks| {
            before.meta.disks.get(index).is_none_or(|before| before.base != disk.base)
        };
        if before.is_some_and(other_base) {
            run.set_base(index, disk.base.clone())?;
        }
        let mut extents = Vec::new();
        now.each(blocks, &mut |range, to| {
            if !before.is_some_and(|before| is_same(before, range, to)) {
                extents.push((range, to));
            }
        });
        let mut content: Page = ZERO_PAGE;
        for (range, to) in extents {
            let at = range.first.0 - blocks.first.0;
            if to == PageRef::ZERO {
                run.put_zero_blocks(index, at, range.len_pages)?;
            } else {
                now.read_block(range.first, &mut content)?;
                run.put_block(index, at, &content)?;
                read += 1;
            }
        }
    }
    Ok(read)
}

/// True if `before` has the same record `to` for all blocks of `range`.
fn is_same(before: &LoadedDisks, range: PageRange, to: PageRef) -> bool {
    let mut same = 0;
    before.each(range, &mut |known, was| same += if was == to { known.len_pages } else { 0 });
    same == range.len_pages
}
