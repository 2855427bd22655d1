//! One run of a VM being written: pages in, checkpoints out.
//!
//! ```text
//!   put* ──▶ seal ──▶ put* ──▶ seal ...           a put or seal that fails makes the run broken:
//!     │                 │                          only `abandon` and `finish` work then
//!     └──── abandon ◀───┘  back to the last sealed checkpoint; the caller puts those pages again
//!
//!   put:   before the first one, the packs of other writers learnt
//!   seal:  a prune at work followed ─▶ packs synced ─▶ number told ─▶ map file durable ─▶ checkpoint file durable
//!            ─▶ in-memory state moves on ─▶ tag
//! ```
//!
//! Invariants: a checkpoint file is written only after everything that it needs is durable. The
//! epochs of a run count its sealed checkpoints.

mod disk_state;
mod follow;
mod progress;
mod puts;

use crate::chain::Chain;
use crate::open_store::OpenStore;
use crate::pack_writer::{PageInput, Placed, PlacedBlock};
pub use crate::run::disk_state::DiskState;
use crate::run::progress::RunProgress;
pub use crate::run::puts::PutOutcome;
use crate::sealed::Sealed;
use crate::session::{Session, Slot};
use crate::tags::check_tag;
use crate::writers::{NUMBERS_TAKEN_MAX, no_number};
use crate::{Error, IndexUse, Result};
use jiff::Timestamp;
use keyframe_bytes::hex::to_hex;
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::{is_remote, layout};
use keyframe_store_format::checkpoint::{self, DeviceSection};
use keyframe_store_format::composed::PARTS;
use keyframe_store_format::disk_meta::{
    BaseMeta, DiskCounts, DiskMeta, SectorCounts, blocks_of, space_pages,
};
use keyframe_store_format::meta::{
    Counts, MachineMeta, MemberMeta, Meta, Origin, ProcessingPhases, SinceBoot, Timing,
};
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{
    CheckpointId, Epoch, Page, PageIndex, PageRange, RamLayout, ZERO_PAGE, elapsed_ns,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// The data that a seal needs in addition to the pages.
#[derive(Clone, Debug)]
pub struct SealRequest<'a> {
    /// The time at which the pause began.
    pub taken_at: Timestamp,
    /// The same instant by the clock of the host's kernel: see [`Meta::since_boot`].
    pub since_boot: Option<SinceBoot>,
    /// The reason why the checkpoint was taken.
    pub reason: String,
    /// The parent of the checkpoint: see [`Meta::parent`].
    pub parent: Option<CheckpointId>,
    /// The RAM blocks as they are now. Their page space must be that of
    /// [`crate::Writer::begin_run`]; the bytes in use may differ.
    pub ram: RamLayout,
    /// The machine; the default value for a group.
    pub machine: MachineMeta,
    /// The members of a group; empty for one VM.
    pub members: Vec<MemberMeta>,
    /// The durations of the steps. If `processing` is set, the seal fills in all of it except
    /// `disks`.
    pub timing: Timing,
    /// The device state as QEMU gave it.
    pub device_state: &'a [u8],
    /// A tag that will point to the new checkpoint; `None` for no tag.
    pub tag: Option<&'a str>,
}

impl<'a> SealRequest<'a> {
    /// Creates a request for a checkpoint that `meta` describes, with the device state
    /// `device_state`, without parent and tag.
    pub fn of_description(meta: Meta, device_state: &'a [u8]) -> Self {
        Self {
            taken_at: meta.taken_at,
            since_boot: meta.since_boot,
            reason: meta.reason,
            parent: None,
            ram: meta.ram,
            machine: meta.machine,
            members: meta.members,
            timing: meta.timing,
            device_state,
            tag: None,
        }
    }

    /// Creates a request for a checkpoint of pages only, taken now: without machine, devices, times
    /// and tag.
    pub fn of_pages(ram: &RamLayout, reason: &str) -> Self {
        Self {
            taken_at: Timestamp::now(),
            since_boot: None,
            reason: reason.into(),
            parent: None,
            ram: ram.clone(),
            machine: MachineMeta::default(),
            members: Vec::new(),
            timing: Timing::default(),
            device_state: &[],
            tag: None,
        }
    }
}

/// The map of a checkpoint that is being sealed.
struct PutMap {
    id: u64,
    map_bytes: u64,
    map_chain: Vec<u64>,
    /// Whether its file was put.
    written: Result<()>,
}

/// One run of a VM, being written. It keeps the writer's place in the store. Dropping it without
/// [`Run::finish`] loses nothing sealed.
#[derive(Debug)]
pub struct Run {
    inner: Arc<OpenStore>,
    /// `None` only while the run is being dropped.
    session: Option<Box<Session>>,
    /// The place that the session returns to.
    home: Slot,
    vm: String,
    id: [u8; 16],
    ram: RamLayout,
    /// Their counts are those of the checkpoint in progress.
    disks: Vec<DiskMeta>,
    epoch: Epoch,
    chain: Chain,
    progress: RunProgress,
    /// The origin of the checkpoint in progress, if it is a copy.
    origin: Option<Origin>,
    broken: bool,
}

impl Run {
    pub(crate) fn new(
        inner: Arc<OpenStore>,
        session: Box<Session>,
        home: Slot,
        chain_base: u64,
        vm: &str,
        id: [u8; 16],
        (ram, disks, state): (&RamLayout, Vec<DiskMeta>, DiskState),
    ) -> Self {
        let ram_pages = ram.len_pages();
        Self {
            inner,
            session: Some(session),
            home,
            vm: vm.into(),
            id,
            ram: ram.clone(),
            disks,
            epoch: Epoch(0),
            chain: Chain::new(chain_base, ram_pages),
            progress: RunProgress::new(ram_pages, state.behind(ram_pages)),
            origin: None,
            broken: false,
        }
    }

    /// Makes the checkpoint in progress a copy of `origin`.
    pub(crate) fn set_origin(&mut self, origin: Origin) {
        self.origin = Some(origin);
    }

    /// Returns the id of the run: 32 hexadecimal digits.
    pub fn id(&self) -> String {
        to_hex(&self.id)
    }

    /// Returns the epoch that the next sealed checkpoint will have.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Puts the content of a page into the checkpoint in progress, and returns the outcome. The
    /// last put of a page counts. Pages that are never put in a run are zero. Errors: the page is
    /// outside the RAM; the store cannot be written. After an error, call [`Run::abandon`].
    pub fn put_page(&mut self, page: PageIndex, content: &Page) -> Result<PutOutcome> {
        let mut became = PutOutcome::Zero;
        self.put_pages(&[(page, content)], &mut |_, put| became = put)?;
        Ok(became)
    }

    /// Puts many pages, each once, on all threads of the writer. Calls `became` with the outcome of
    /// each. Errors: those of [`Self::put_page`].
    pub fn put_pages(
        &mut self,
        pages: &[(PageIndex, &Page)],
        became: &mut dyn FnMut(PageIndex, PutOutcome),
    ) -> Result<()> {
        for (page, _) in pages {
            self.admit(*page)?;
        }
        self.follow_writers()?;
        let homes =
            pages.iter().map(|(page, content)| (content, (*page, self.progress.map.get(*page))));
        let inputs: Vec<PageInput<'_>> =
            homes.map(|(content, home)| PageInput { content, home: Some(home) }).collect();
        let mut placed = Vec::with_capacity(pages.len());
        let put = self.session()?.packs.put_all(&inputs, &mut |_, to| placed.push(to));
        put.inspect_err(|_| self.broken = true)?;
        for ((page, _), placed) in pages.iter().zip(placed) {
            let (to, put, of_disk) = match placed {
                None => (PageRef::ZERO, PutOutcome::Zero, false),
                Some(Placed::New(to, bytes)) => (to, PutOutcome::Stored { bytes }, false),
                Some(Placed::Known(to, _)) if to == self.progress.map.get(*page) => {
                    (to, PutOutcome::Unchanged, false)
                }
                Some(Placed::Known(to, kind)) => (to, PutOutcome::Dedup, !kind.is_of_ram()),
            };
            self.progress.set_page(*page, to, put, of_disk);
            became(*page, put);
        }
        Ok(())
    }

    /// Puts a page of zeros, and returns the outcome. Error: the page is outside the RAM, or an
    /// earlier put of the run has failed ([`Error::Broken`]).
    pub fn put_zero(&mut self, page: PageIndex) -> Result<PutOutcome> {
        self.admit(page)?;
        self.progress.set_page(page, PageRef::ZERO, PutOutcome::Zero, false);
        Ok(PutOutcome::Zero)
    }

    /// Puts the content of block number `block` of disk number `disk` into the checkpoint in
    /// progress, each block once, and returns the outcome. Blocks that are never put in a run are
    /// in the disk's image. Errors: there is no such disk or block; the store cannot be written.
    /// After an error, call [`Run::abandon`].
    pub fn put_block(&mut self, disk: usize, block: u64, content: &Page) -> Result<PutOutcome> {
        if *content == ZERO_PAGE {
            self.put_zero_blocks(disk, block, 1)?;
            return Ok(PutOutcome::Zero);
        }
        let range = self.admit_blocks(disk, block, 1)?;
        self.follow_writers()?;
        let PlacedBlock { placed, composed, mut sectors } =
            self.session()?.packs.put_block(content).inspect_err(|_| self.broken = true)?;
        let (to, put) = match placed {
            Placed::New(to, bytes) => (to, PutOutcome::Stored { bytes }),
            Placed::Known(to, _) if Some(to) == self.progress.disk_map.get(range.first) => {
                (to, PutOutcome::Unchanged)
            }
            Placed::Known(to, _) => (to, PutOutcome::Dedup),
        };
        if put == PutOutcome::Unchanged {
            sectors = SectorCounts { unchanged_sectors: PARTS as u64, ..SectorCounts::default() };
        } else {
            self.progress.set_block(range.first, to);
        }
        self.count_blocks(disk, |counts| {
            counts.written_blocks += 1;
            counts.composed_blocks += u64::from(composed);
            counts.sectors += sectors;
            match put {
                PutOutcome::Zero => counts.zero_blocks += 1,
                PutOutcome::Unchanged => counts.unchanged_blocks += 1,
                PutOutcome::Dedup => counts.dedup_blocks += 1,
                PutOutcome::Stored { bytes } => {
                    counts.stored_blocks += 1;
                    counts.stored_bytes += bytes;
                }
            }
        });
        Ok(put)
    }

    /// Puts `blocks` blocks of zeros of disk number `disk`, from block number `block` on. Error:
    /// there is no such disk or block, or an earlier put of the run has failed ([`Error::Broken`]).
    pub fn put_zero_blocks(&mut self, disk: usize, block: u64, blocks: u64) -> Result<()> {
        let range = self.admit_blocks(disk, block, blocks)?;
        self.progress.set_zero_blocks(range);
        self.count_blocks(disk, |counts| {
            counts.written_blocks += blocks;
            counts.zero_blocks += blocks;
            counts.sectors.zero_sectors += blocks * PARTS as u64;
        });
        Ok(())
    }

    /// Gives the checkpoint in progress the disks of checkpoint `id` of this store. Later puts
    /// change them. The next map is a complete one. That checkpoint may have other RAM.
    ///
    /// Errors: [`Error::LayoutChanged`] if that checkpoint has other disks; it does not exist, or
    /// cannot be read.
    pub fn put_disks_of(&mut self, id: CheckpointId) -> Result<()> {
        let meta = self.inner.read_checkpoint(id)?.meta;
        let same = |(a, b): (&DiskMeta, &DiskMeta)| {
            (&a.name, a.disk_bytes, &a.base) == (&b.name, b.disk_bytes, &b.base)
        };
        let same_disks =
            meta.disks.len() == self.disks.len() && meta.disks.iter().zip(&self.disks).all(same);
        if !same_disks {
            return Err(Error::LayoutChanged { run: self.id(), epoch: self.epoch.0 });
        }
        let (there, here) = (meta.ram.len_pages(), self.ram.len_pages());
        let mut map = self.inner.read_maps(&meta)?.1.behind(there, here);
        // A prune at work may not have rewritten this map yet.
        let session = self.session.as_deref_mut().ok_or(Error::RunOpen)?;
        let records = map.records().collect();
        let places = follow::places_after_prune(&self.inner, session, records)?;
        map.repoint(&mut |to| *to = places.get(to).copied().unwrap_or(*to));
        let space_pages = space_pages(self.ram.len_pages(), &self.disks).unwrap_or_default();
        let ram_pages = self.ram.len_pages();
        let all = PageRange::new(PageIndex(ram_pages), space_pages.saturating_sub(ram_pages));
        self.progress.replace_disks(all, map);
        Ok(())
    }

    /// Sets the image beneath a disk from the checkpoint in progress on. Sealed checkpoints keep
    /// the former one. Error: there is no such disk, or an earlier put of the run has failed
    /// ([`Error::Broken`]).
    pub fn set_base(&mut self, disk: usize, base: BaseMeta) -> Result<()> {
        self.admit_blocks(disk, 0, 0)?;
        if let Some(disk) = self.disks.get_mut(disk) {
            disk.base = base;
        }
        Ok(())
    }

    /// Before the first put of a checkpoint: learns what other writers have sealed.
    fn follow_writers(&mut self) -> Result<()> {
        if !self.progress.is_empty() {
            return Ok(());
        }
        let session = self.session.as_deref_mut().ok_or(Error::RunOpen)?;
        let followed = session.packs.follow_writers(session.moves.as_ref());
        followed.inspect_err(|_| self.broken = true)
    }

    fn count_blocks(&mut self, disk: usize, count: impl FnOnce(&mut DiskCounts)) {
        if let Some(disk) = self.disks.get_mut(disk) {
            count(&mut disk.counts);
        }
    }

    fn admit_blocks(&self, disk: usize, block: u64, blocks: u64) -> Result<PageRange> {
        if self.broken {
            return Err(Error::Broken { run: self.id() });
        }
        let of_disk = blocks_of(self.ram.len_pages(), &self.disks, disk);
        let inside =
            of_disk.filter(|of| block.checked_add(blocks).is_some_and(|end| end <= of.len_pages));
        let inside = inside.ok_or(Error::BlockOutside { disk, block, blocks })?;
        Ok(PageRange::new(PageIndex(inside.first.0 + block), blocks))
    }

    /// Seals the checkpoint in progress, and returns its description. After this returns, the
    /// checkpoint survives power loss, or at least the death of this process, as the writer's
    /// [`crate::Durability`] says.
    ///
    /// Errors: the store cannot be written; [`Error::InvalidTag`] if the tag of `request` is not
    /// valid; [`Error::LayoutChanged`] if `request` has other RAM blocks than the run;
    /// [`Error::Broken`] if an earlier put or seal failed and [`Run::abandon`] was not called;
    /// [`Error::TagNotSet`]. After an error the checkpoint does not exist, with two exceptions:
    /// after [`Error::TagNotSet`] it exists without its tag, and after a failed later sync it may
    /// not be durable. All earlier checkpoints are unharmed, and [`Run::abandon`] makes the run
    /// usable.
    pub fn seal(&mut self, request: SealRequest<'_>) -> Result<Sealed> {
        if self.broken {
            return Err(Error::Broken { run: self.id() });
        }
        if let Some(tag) = request.tag {
            check_tag(tag)?;
        }
        if !request.ram.same_space(&self.ram) {
            return Err(Error::LayoutChanged { run: self.id(), epoch: self.epoch.0 });
        }
        let tag = request.tag.map(String::from);
        let (id, meta) = self.write_checkpoint(request).inspect_err(|_| self.broken = true)?;
        self.chain.commit(&meta.map_chain, &self.progress.changed);
        self.epoch = self.epoch.next();
        self.progress.seal();
        self.begin_next();
        self.sync_if_due(id).inspect_err(|_| self.broken = true)?;
        if let Some(tag) = &tag {
            self.inner.write_tag(tag, id).map_err(|source| Error::TagNotSet {
                id,
                tag: tag.clone(),
                source: Box::new(source),
            })?;
        }
        Ok(Sealed { id, meta, tags: tag.into_iter().collect() })
    }

    /// Follows a prune that waits for this run, and learns what other writers have sealed. Otherwise
    /// the run does both at the next seal. Does nothing in object storage, where each look is a
    /// request. Error: the store cannot be written.
    pub fn follow_prune(&mut self) -> Result<()> {
        if is_remote(&self.inner.path) && !self.inner.is_shared() {
            return Ok(());
        }
        let session = self.session.as_deref_mut().ok_or(Error::RunOpen)?;
        let followed = follow::follow_prune(&self.inner, session, &mut self.progress)
            .and_then(|()| session.packs.follow_writers(session.moves.as_ref()));
        // A failure may have cut off records of the checkpoint in progress.
        self.broken |= followed.is_err() && !self.progress.is_empty();
        followed
    }

    /// Removes checkpoint `id`, which this run has sealed, with its tags. The caller then seals no
    /// further checkpoint. Error: it cannot be removed.
    pub fn retract(&mut self, id: CheckpointId) -> Result<()> {
        self.inner.remove_checkpoints(&BTreeSet::from([id]))
    }

    /// Forgets the puts since the last seal. The caller puts those pages again into the next
    /// checkpoint. Their records stay in the packs, where deduplication finds them, unless the
    /// medium was too full for them.
    pub fn abandon(&mut self) {
        self.progress.undo();
        if let Ok(session) = self.session() {
            session.packs.return_space();
            session.packs.free_memory_if_lost();
            // The steps of the next checkpoint are its own.
            session.packs.take_times();
        }
        self.begin_next();
    }

    /// Returns the known content of the disks at the last sealed checkpoint, for another run with
    /// the same disks. Forgets the puts since then.
    pub fn disk_state(&mut self) -> DiskState {
        self.abandon();
        DiskState::new(self.progress.disk_map.clone(), self.ram.len_pages())
    }

    /// Returns the size of the writer's deduplication index. Error: [`Error::RunOpen`], only while
    /// the run is being dropped.
    pub fn index_use(&mut self) -> Result<IndexUse> {
        Ok(self.session()?.packs.index_use())
    }

    /// Ends the run: closes the pack with its trailer and returns the session to the writer.
    /// Forgets the puts since the last seal. Error: the trailer cannot be written; all sealed
    /// checkpoints are unharmed.
    pub fn finish(mut self) -> Result<()> {
        self.session()?.packs.close()?;
        self.session()?.packs.save_index();
        if self.session()?.syncs.is_some() {
            let next = CheckpointId(self.session()?.next_checkpoint);
            self.inner.sync_and_mark(next)?;
        }
        // Dropping returns the session.
        Ok(())
    }

    fn sync_if_due(&mut self, id: CheckpointId) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let session = self.session()?;
        let synced = session.syncs.as_mut().map_or(Ok(false), |syncs| syncs.sealed(&inner, id));
        match synced {
            Ok(true) => session.packs.note_durable(),
            Ok(false) => Ok(()),
            Err(error) => {
                // The records of the open pack may be lost, although they can still be read.
                session.packs.retire();
                Err(error)
            }
        }
    }

    /// Begins the next checkpoint, or this one again.
    fn begin_next(&mut self) {
        for disk in &mut self.disks {
            disk.counts = DiskCounts::default();
        }
        self.broken = false;
    }

    fn session(&mut self) -> Result<&mut Session> {
        // Absent only inside `drop`.
        self.session.as_deref_mut().ok_or(Error::RunOpen)
    }

    fn admit(&self, page: PageIndex) -> Result<()> {
        if self.broken {
            return Err(Error::Broken { run: self.id() });
        }
        let space_pages = self.ram.len_pages();
        if page.0 >= space_pages {
            return Err(Error::PageOutside { page, space_pages });
        }
        Ok(())
    }

    /// Writes the files of a seal, in the order that makes a crash harmless.
    fn write_checkpoint(&mut self, request: SealRequest<'_>) -> Result<(CheckpointId, Meta)> {
        let session = self.session.as_deref_mut().ok_or(Error::RunOpen)?;
        follow::follow_prune(&self.inner, session, &mut self.progress)?;
        let syncing = Instant::now();
        session.packs.sync()?;
        let sync_ns = elapsed_ns(syncing);
        let put = session.packs.take_times();
        let mapping = Instant::now();
        let PutMap { id, map_bytes, map_chain, written: map_written } = self.put_map()?;
        let map_ns = elapsed_ns(mapping);
        let (map_name, name) = (layout::map(id), layout::checkpoint(CheckpointId(id)));
        let device = DeviceSection::new(request.device_state);
        let counts = Counts {
            map_bytes,
            device_bytes: device.stored_bytes(),
            ..self.progress.puts.counts()
        };
        // A copy has the times of its origin.
        let is_copy = self.origin.is_some();
        let own_phases = |phases| ProcessingPhases {
            hash: put.hash,
            look_up: put.look_up,
            compress: put.compress,
            append: put.append,
            sync: sync_ns,
            map: map_ns,
            ..phases
        };
        let processing = request.timing.processing;
        let meta = Meta {
            vm: self.vm.clone(),
            run: self.id(),
            epoch: self.epoch,
            parent: request.parent,
            taken_at: request.taken_at,
            since_boot: request.since_boot,
            reason: request.reason,
            ram: request.ram,
            disks: self.disks.clone(),
            machine: request.machine,
            members: request.members,
            timing: Timing {
                processing: if is_copy { processing } else { processing.map(own_phases) },
                ..request.timing
            },
            counts,
            origin: self.origin.take(),
            map_chain,
        };
        let file = checkpoint::encode(id, self.inner.config.id, &meta, &device);
        let has_map = map_written.is_ok();
        let written = map_written.and_then(|()| self.inner.backend.put(&name, &file?));
        // Where the map could not be put, another writer may have put one with this number.
        if written.is_err() && (has_map || !self.inner.is_shared()) {
            // Removes the checkpoint first: without its map it would be damaged.
            let removed = self.inner.backend.remove(&name);
            if removed.is_ok() {
                let _ = self.inner.backend.remove(&map_name);
            }
        }
        let newest = written.is_ok().then_some(CheckpointId(id));
        // If others cannot be told, they keep both this checkpoint and the one before.
        let _ = self.inner.tell(|said| {
            said.sealing = false;
            said.newest = newest.or(said.newest);
        });
        written.map(|()| (CheckpointId(id), meta))
    }

    /// Takes the number of the checkpoint, and puts its map. Error: there is no free number.
    fn put_map(&mut self) -> Result<PutMap> {
        let session = self.session.as_deref_mut().ok_or(Error::RunOpen)?;
        // The run was refused if this had no answer.
        let space_pages = space_pages(self.ram.len_pages(), &self.disks).unwrap_or_default();
        let mut id = self.inner.free_number(session.next_checkpoint)?;
        for _ in 0..NUMBERS_TAKEN_MAX {
            // A failed seal may leave a file, so that its number is not tried again.
            session.next_checkpoint = id + 1;
            session.packs.tell_open(|said| (said.number, said.sealing) = (id, true))?;
            let (map, map_chain) = self.progress.next_map(&self.chain, id, self.id, space_pages);
            let map_file = map.encode(self.inner.config.id);
            match self.inner.put_new(&layout::map(id), &map_file) {
                Ok(false) => id = self.inner.free_number(id + 1)?,
                written => {
                    let (written, map_bytes) = (written.map(drop), map_file.len() as u64);
                    return Ok(PutMap { id, map_bytes, map_chain, written });
                }
            }
        }
        Err(no_number(&self.inner))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // If others cannot be told, they keep the newest checkpoint of this run.
        let _ = self.inner.tell(|said| said.newest = None);
        *self.home.lock().ignore_poison() = self.session.take();
    }
}
