//! One run of a VM being written: pages in, checkpoints out.
//!
//! ```text
//!   put* ──▶ seal ──▶ put* ──▶ seal ...           a put or seal that fails makes the run broken:
//!     │                 │                          only `abandon` (or `finish`) goes on from there
//!     └──── abandon ◀───┘  back to the last sealed checkpoint; the caller puts those pages again
//!
//!   seal:  a prune at work followed ─▶ packs synced ─▶ map file durable ─▶ checkpoint file durable ─▶ in-memory state moves on ─▶ tag
//! ```
//!
//! Invariants: the page map in memory is the last sealed one plus the puts since; `undo` leads
//! back. A checkpoint file is written only after everything that it needs is durable. Epochs of a
//! run count its sealed checkpoints.

mod follow;

use crate::chain::{Chain, Changes, Plan};
use crate::checkpoint::{self, DeviceSection};
use crate::composed::PARTS;
use crate::disk_map::{DiskMap, Former, numbers};
use crate::disks::{BaseMeta, DiskCounts, DiskMeta, SectorCounts, blocks_of, space_pages};
use crate::identity::PageRef;
use crate::map_run::{MapHeader, MapRun};
use crate::meta::{Counts, MachineMeta, MemberMeta, Meta, Origin, Sealed, Timing};
use crate::pack_writer::{Input, Placed, PlacedBlock};
use crate::page_map::PageMap;
use crate::store::Inner;
use crate::writer::{Session, Slot};
use crate::{Error, IndexUse, Result};
use jiff::Timestamp;
use keyframe_bytes::hex::to_hex;
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::LockGuard;
use keyframe_store_backend::layout;
use keyframe_units::{
    CheckpointId, Epoch, Page, PageIndex, PageRange, PageSet, RamLayout, ZERO_PAGE,
};
use std::sync::Arc;

/// What became of a page that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// All zeros: nothing is stored.
    Zero,
    /// The page held this content already.
    Unchanged,
    /// The store held this content already.
    Dedup,
    /// A new record was appended.
    Stored {
        /// Its length with header, as compressed.
        bytes: u64,
    },
}

/// What a seal needs besides the pages.
#[derive(Clone, Debug)]
pub struct SealRequest<'a> {
    /// When the pause began.
    pub taken_at: Timestamp,
    /// Why the checkpoint was taken.
    pub reason: String,
    /// See [`Meta::parent`].
    pub parent: Option<CheckpointId>,
    /// The RAM blocks as they are now: the same page space as at [`crate::Writer::begin_run`];
    /// bytes in use may differ.
    pub ram: RamLayout,
    /// The machine; the default for a group.
    pub machine: MachineMeta,
    /// The members of a group; none for one VM.
    pub members: Vec<MemberMeta>,
    /// How long things took.
    pub timing: Timing,
    /// The device state as QEMU gave it.
    pub device_state: &'a [u8],
    /// A tag to point to the new checkpoint.
    pub tag: Option<&'a str>,
}

impl SealRequest<'_> {
    /// One of pages alone, taken now: of no machine, without devices, times and tag.
    pub fn of_pages(ram: &RamLayout, reason: &str) -> Self {
        Self {
            taken_at: Timestamp::now(),
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

/// What is known of the blocks of a run's disks.
#[derive(Clone, Debug, Default)]
pub struct DiskState(pub(crate) DiskMap);

/// One run of a VM, being written. Dropping it without [`Run::finish`] loses nothing sealed.
#[derive(Debug)]
pub struct Run {
    inner: Arc<Inner>,
    /// `None` only while the run is being dropped.
    session: Option<Box<Session>>,
    /// Where the session goes back to, and the lock that must outlive the run.
    home: (Slot, Arc<dyn LockGuard>),
    vm: String,
    id: [u8; 16],
    ram: RamLayout,
    /// With the counts of the checkpoint in progress.
    disks: Vec<DiskMeta>,
    epoch: Epoch,
    map: PageMap,
    disk_map: DiskMap,
    chain: Chain,
    puts: Puts,
    /// What has another place than at the last seal.
    changed: Changes,
    /// What the blocks written since held then, oldest first.
    undo_blocks: Vec<Former>,
    /// For each page of `changed`: where it was at the last seal. Not kept before the first seal,
    /// where all was zero.
    undo: Vec<(PageIndex, PageRef)>,
    /// The disks are another checkpoint's: what changed is not known, so that the next map is
    /// complete.
    taken_over: bool,
    /// What the checkpoint in progress is a copy of.
    origin: Option<Origin>,
    broken: bool,
}

/// The pages put since the last seal, by what became of the last put of each.
#[derive(Debug)]
struct Puts {
    all: PageSet,
    zero: PageSet,
    unchanged: PageSet,
    dedup: PageSet,
    /// Of these: content that a disk brought.
    dedup_disk: PageSet,
    stored_bytes: u64,
}

impl Puts {
    fn new(space_pages: u64) -> Self {
        let set = || PageSet::new(space_pages);
        Self {
            all: set(),
            zero: set(),
            unchanged: set(),
            dedup: set(),
            dedup_disk: set(),
            stored_bytes: 0,
        }
    }

    fn clear(&mut self) {
        let Self { all, zero, unchanged, dedup, dedup_disk, .. } = self;
        for set in [all, zero, unchanged, dedup, dedup_disk] {
            set.clear();
        }
        self.stored_bytes = 0;
    }

    fn note(&mut self, page: PageIndex, put: Put, of_disk: bool) {
        self.all.insert(page);
        if of_disk && put == Put::Dedup {
            self.dedup_disk.insert(page);
        } else {
            self.dedup_disk.remove(page);
        }
        for (set, kind) in [
            (&mut self.zero, Put::Zero),
            (&mut self.unchanged, Put::Unchanged),
            (&mut self.dedup, Put::Dedup),
        ] {
            if put == kind {
                set.insert(page);
            } else {
                set.remove(page);
            }
        }
    }

    fn counts(&self) -> Counts {
        let (dirty_pages, zero_pages) = (self.all.len(), self.zero.len());
        let (dedup_pages, unchanged_pages) = (self.dedup.len(), self.unchanged.len());
        Counts {
            dirty_pages,
            zero_pages,
            dedup_pages,
            dedup_disk_pages: self.dedup_disk.len(),
            unchanged_pages,
            stored_pages: dirty_pages - zero_pages - dedup_pages - unchanged_pages,
            stored_bytes: self.stored_bytes,
            map_bytes: 0,
            device_bytes: 0,
        }
    }
}

impl Run {
    pub(crate) fn new(
        inner: Arc<Inner>,
        session: Box<Session>,
        home: (Slot, Arc<dyn LockGuard>),
        chain_base: u64,
        vm: &str,
        id: [u8; 16],
        (ram, disks, state): (&RamLayout, Vec<DiskMeta>, DiskState),
    ) -> Self {
        let space_pages = ram.len_pages();
        Self {
            inner,
            session: Some(session),
            home,
            vm: vm.into(),
            id,
            ram: ram.clone(),
            disks,
            epoch: Epoch(0),
            map: PageMap::default(),
            disk_map: state.0,
            chain: Chain::new(chain_base, space_pages),
            puts: Puts::new(space_pages),
            changed: Changes::none(space_pages),
            undo: Vec::new(),
            undo_blocks: Vec::new(),
            taken_over: false,
            origin: None,
            broken: false,
        }
    }

    /// The next checkpoint that is sealed is a copy of this one.
    pub(crate) fn set_origin(&mut self, origin: Origin) {
        self.origin = Some(origin);
    }

    /// The id of the run: 32 hexadecimal digits.
    pub fn id(&self) -> String {
        to_hex(&self.id)
    }

    /// The epoch that the next seal will have.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Puts the content of a page into the checkpoint in progress; the last put of a page wins.
    /// Pages never put in a run are zero. After an error, [`Run::abandon`].
    pub fn put_page(&mut self, page: PageIndex, content: &Page) -> Result<Put> {
        let mut became = Put::Zero;
        self.put_pages(&[(page, content)], &mut |_, put| became = put)?;
        Ok(became)
    }

    /// The same for many pages, each once; `became` hears what became of each. Faster, where the
    /// writer has several threads.
    pub fn put_pages(
        &mut self,
        pages: &[(PageIndex, &Page)],
        became: &mut dyn FnMut(PageIndex, Put),
    ) -> Result<()> {
        for (page, _) in pages {
            self.admit(*page)?;
        }
        let homes = pages.iter().map(|(page, content)| (content, (*page, self.map.get(*page))));
        let inputs: Vec<Input<'_>> =
            homes.map(|(content, home)| Input { content, home: Some(home) }).collect();
        let mut placed = Vec::with_capacity(pages.len());
        let put = self.session()?.packs.put_all(&inputs, &mut |_, to| placed.push(to));
        put.inspect_err(|_| self.broken = true)?;
        for ((page, _), placed) in pages.iter().zip(placed) {
            let (to, put, of_disk) = match placed {
                None => (PageRef::ZERO, Put::Zero, false),
                Some(Placed::New(to, bytes)) => (to, Put::Stored { bytes }, false),
                Some(Placed::Known(to, _)) if to == self.map.get(*page) => {
                    (to, Put::Unchanged, false)
                }
                Some(Placed::Known(to, kind)) => (to, Put::Dedup, !kind.is_of_ram()),
            };
            self.place(*page, to, put, of_disk);
            became(*page, put);
        }
        Ok(())
    }

    /// Puts a page of zeros.
    pub fn put_zero(&mut self, page: PageIndex) -> Result<Put> {
        self.admit(page)?;
        self.place(page, PageRef::ZERO, Put::Zero, false);
        Ok(Put::Zero)
    }

    /// Puts the content of a block of disk `disk` into the checkpoint in progress, each block once.
    /// Blocks never put in a run are as the disk's image has them. After an error,
    /// [`Run::abandon`].
    pub fn put_block(&mut self, disk: usize, block: u64, content: &Page) -> Result<Put> {
        if *content == ZERO_PAGE {
            self.put_zero_blocks(disk, block, 1)?;
            return Ok(Put::Zero);
        }
        let range = self.admit_blocks(disk, block, 1)?;
        let PlacedBlock { placed, composed, mut sectors } =
            self.session()?.packs.put_block(content).inspect_err(|_| self.broken = true)?;
        let (to, put) = match placed {
            Placed::New(to, bytes) => (to, Put::Stored { bytes }),
            Placed::Known(to, _) if Some(to) == self.disk_map.get(range.first) => {
                (to, Put::Unchanged)
            }
            Placed::Known(to, _) => (to, Put::Dedup),
        };
        if put == Put::Unchanged {
            sectors = SectorCounts { unchanged_sectors: PARTS as u64, ..SectorCounts::default() };
        } else {
            self.undo_blocks.push(self.disk_map.former(range));
            self.disk_map.set(range.first, to);
            self.changed.blocks.insert(numbers(range));
        }
        self.count_blocks(disk, |counts| {
            counts.written_blocks += 1;
            counts.composed_blocks += u64::from(composed);
            counts.sectors += sectors;
            match put {
                Put::Zero => counts.zero_blocks += 1,
                Put::Unchanged => counts.unchanged_blocks += 1,
                Put::Dedup => counts.dedup_blocks += 1,
                Put::Stored { bytes } => {
                    counts.stored_blocks += 1;
                    counts.stored_bytes += bytes;
                }
            }
        });
        Ok(put)
    }

    /// Puts `blocks` blocks of zeros, from `block` on.
    pub fn put_zero_blocks(&mut self, disk: usize, block: u64, blocks: u64) -> Result<()> {
        let range = self.admit_blocks(disk, block, blocks)?;
        self.undo_blocks.push(self.disk_map.former(range));
        self.disk_map.set_zero(range);
        if blocks > 0 {
            self.changed.blocks.insert(numbers(range));
        }
        self.count_blocks(disk, |counts| {
            counts.written_blocks += blocks;
            counts.zero_blocks += blocks;
            counts.sectors.zero_sectors += blocks * PARTS as u64;
        });
        Ok(())
    }

    /// The checkpoint in progress has the disks of checkpoint `id` of this store, beneath the
    /// blocks that are put from here on. Its map is a complete one.
    ///
    /// Error: [`Error::LayoutChanged`] where that has other RAM blocks or disks.
    pub fn put_disks_of(&mut self, id: CheckpointId) -> Result<()> {
        let meta = self.inner.read_checkpoint(id)?.meta;
        let same = |(a, b): (&DiskMeta, &DiskMeta)| {
            (&a.name, a.disk_bytes, &a.base) == (&b.name, b.disk_bytes, &b.base)
        };
        let same_disks =
            meta.disks.len() == self.disks.len() && meta.disks.iter().zip(&self.disks).all(same);
        if !same_disks || !meta.ram.same_space(&self.ram) {
            return Err(Error::LayoutChanged { run: self.id(), epoch: self.epoch.0 });
        }
        let mut map = self.inner.read_maps(&meta)?.1;
        // Read before a prune at work has rewritten it.
        let places = self.places_now(map.records().collect())?;
        map.repoint(&mut |to| *to = places.get(to).copied().unwrap_or(*to));
        let space_pages = space_pages(self.ram.len_pages(), &self.disks).unwrap_or_default();
        let ram_pages = self.ram.len_pages();
        let all = PageRange::new(PageIndex(ram_pages), space_pages.saturating_sub(ram_pages));
        self.undo_blocks.push(self.disk_map.former(all));
        (self.disk_map, self.taken_over) = (map, true);
        Ok(())
    }

    /// The disk's image from the checkpoint in progress on: what it was before stays with the
    /// checkpoints that are sealed.
    pub fn set_base(&mut self, disk: usize, base: BaseMeta) -> Result<()> {
        self.admit_blocks(disk, 0, 0)?;
        if let Some(disk) = self.disks.get_mut(disk) {
            disk.base = base;
        }
        Ok(())
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

    /// Seals the checkpoint in progress: once this returns, it survives power loss (or, as its
    /// writer's [`crate::Durability`] has it, the death of this process). After an error it does
    /// not exist (or, for [`Error::TagNotSet`], exists without its tag; where a later sync fails,
    /// it may not be durable), all earlier ones are unharmed, and [`Run::abandon`] goes on.
    pub fn seal(&mut self, request: SealRequest<'_>) -> Result<Sealed> {
        if self.broken {
            return Err(Error::Broken { run: self.id() });
        }
        if let Some(tag) = request.tag {
            crate::tags::check_tag(tag)?;
        }
        if !request.ram.same_space(&self.ram) {
            return Err(Error::LayoutChanged { run: self.id(), epoch: self.epoch.0 });
        }
        let tag = request.tag.map(String::from);
        let (id, meta) = self.write_checkpoint(request).inspect_err(|_| self.broken = true)?;
        self.chain.commit(&meta.map_chain, &self.changed);
        self.epoch = self.epoch.next();
        self.settle();
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

    /// Forgets the puts since the last seal: the page map is again that of the last sealed
    /// checkpoint. The caller puts those pages again next time. What was appended stays in the
    /// packs and will be found again if it is needed.
    pub fn abandon(&mut self) {
        if self.epoch == Epoch(0) {
            self.map = PageMap::default();
        }
        for (page, was) in std::mem::take(&mut self.undo) {
            self.map.set(page, was);
        }
        for former in std::mem::take(&mut self.undo_blocks).into_iter().rev() {
            self.disk_map.put_back(former);
        }
        self.settle();
    }

    /// What the last sealed checkpoint knows of the disks, for a run that goes on with them. Puts
    /// since are forgotten.
    pub fn disk_state(&mut self) -> DiskState {
        self.abandon();
        DiskState(self.disk_map.clone())
    }

    /// What the writer's index of deduplication holds.
    pub fn index_use(&mut self) -> Result<IndexUse> {
        Ok(self.session()?.packs.index_use())
    }

    /// Ends the run: closes the pack with its trailer and gives the session back to the writer.
    /// Puts since the last seal are forgotten. After an error everything sealed is unharmed all the
    /// same.
    pub fn finish(mut self) -> Result<()> {
        self.session()?.packs.close()?;
        self.session()?.packs.save_index();
        if self.session()?.syncs.is_some() {
            let next = CheckpointId(self.session()?.next_checkpoint);
            self.inner.sync_and_mark(next)?;
        }
        // Dropping gives the session back.
        Ok(())
    }

    fn sync_if_due(&mut self, id: CheckpointId) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let session = self.session()?;
        let synced = session.syncs.as_mut().map_or(Ok(()), |syncs| syncs.sealed(&inner, id));
        // What can still be read of the open pack may be lost.
        synced.inspect_err(|_| session.packs.retire())
    }

    fn settle(&mut self) {
        self.puts.clear();
        self.changed.clear();
        self.undo.clear();
        self.undo_blocks.clear();
        for disk in &mut self.disks {
            disk.counts = DiskCounts::default();
        }
        (self.taken_over, self.broken) = (false, false);
    }

    fn session(&mut self) -> Result<&mut Session> {
        // Absent only inside `drop`, after which nobody can call.
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

    fn place(&mut self, page: PageIndex, to: PageRef, put: Put, of_disk: bool) {
        if let Put::Stored { bytes } = put {
            self.puts.stored_bytes += bytes;
        }
        let was = self.map.get(page);
        // The same content put twice into one checkpoint keeps what became of it the first time.
        if was != to || !self.puts.all.contains(page) {
            self.puts.note(page, put, of_disk);
        }
        if was != to {
            self.map.set(page, to);
            if self.changed.pages.insert(page) && self.epoch > Epoch(0) {
                self.undo.push((page, was));
            }
        }
    }

    /// Everything of a seal that goes to disk, in the order that keeps a crash harmless.
    fn write_checkpoint(&mut self, request: SealRequest<'_>) -> Result<(CheckpointId, Meta)> {
        self.follow_prune()?;
        let session = self.session()?;
        session.packs.sync()?;
        let id = session.next_checkpoint;
        // A failed seal may leave a file, so that its number is not tried again.
        session.next_checkpoint += 1;

        let (map_file, map_chain) = self.encode_map(id);
        let device = DeviceSection::new(request.device_state);
        let counts = Counts {
            map_bytes: map_file.len() as u64,
            device_bytes: device.stored_bytes(),
            ..self.puts.counts()
        };
        let meta = Meta {
            vm: self.vm.clone(),
            run: self.id(),
            epoch: self.epoch,
            parent: request.parent,
            taken_at: request.taken_at,
            reason: request.reason,
            ram: request.ram,
            disks: self.disks.clone(),
            machine: request.machine,
            members: request.members,
            timing: request.timing,
            counts,
            origin: self.origin.take(),
            map_chain,
        };
        let file = checkpoint::encode(id, self.inner.config.id, &meta, &device)?;
        let (map_name, name) = (layout::map(id), layout::checkpoint(CheckpointId(id)));
        let written = self
            .inner
            .backend
            .put(&map_name, &map_file)
            .and_then(|()| self.inner.backend.put(&name, &file));
        if written.is_err() {
            // The checkpoint first: were it to survive without its map, it would be damaged.
            let removed = self.inner.backend.remove(&name);
            if removed.is_ok() {
                let _ = self.inner.backend.remove(&map_name);
            }
        }
        written.map(|()| (CheckpointId(id), meta))
    }

    fn encode_map(&self, id: u64) -> (Vec<u8>, Vec<u64>) {
        let complete_pages = self.map.nonzero_pages() + self.disk_map.known_blocks();
        let plan = if self.taken_over {
            Plan { changed: None, below: Vec::new() }
        } else {
            self.chain.plan(&self.changed, complete_pages)
        };
        // Checked when the run began.
        let space_pages = space_pages(self.ram.len_pages(), &self.disks).unwrap_or_default();
        let header =
            MapHeader { id, parent: plan.below.first().copied(), run: self.id, space_pages };
        let mut run = match &plan.changed {
            None => MapRun::new(header, self.map.iter()),
            Some(changed) => {
                MapRun::new(header, changed.pages.iter().map(|page| (page, self.map.get(page))))
            }
        };
        let mut add = |range: PageRange, to| run.extend(range, to);
        match &plan.changed {
            None => self.disk_map.each(0..space_pages, &mut add),
            Some(changed) => {
                for range in changed.blocks.iter() {
                    self.disk_map.each(range.clone(), &mut add);
                }
            }
        }
        let mut map_chain = vec![id];
        map_chain.extend(plan.below);
        (run.encode(self.inner.config.id), map_chain)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        *self.home.0.lock().ignore_poison() = self.session.take();
    }
}
