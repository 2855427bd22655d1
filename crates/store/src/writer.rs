//! A writer of a store: holds its slot, begins runs, sets tags.
//!
//! ```text
//!              lock_writer            begin_run              finish, or drop
//!   no writer ────────────▶ Writer ──────────────▶ Run open ─────────────────▶ Writer ──drop both──▶ no writer
//! ```
//!
//! The session (index, open pack, next number) is with the writer, or lent to the one open run. A
//! run owns what it needs and may move to another thread. The writer can set tags meanwhile.

use crate::durability::{Syncs, TornCheckpoint};
use crate::durability_kind::Durability;
use crate::lock_holder::{encode_holder, with_named_holder};
use crate::open_store::OpenStore;
use crate::pack_writer::PackWriter;
use crate::run::{DiskState, Run};
use crate::session::{Session, Slot};
use crate::store::Store;
use crate::tuning::Tuning;
use crate::writers::{OwnSlot, WriterState};
use crate::{Error, IndexUse, Result};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::{StartingWriter, layout, random_bytes};
use keyframe_store_format::disk_meta::{DiskCounts, DiskMeta, space_pages};
use keyframe_units::{CheckpointId, RamLayout};
use std::sync::{Arc, Mutex};

/// The most pages that a run can have: 16 TiB of RAM.
const SPACE_PAGES_MAX: u64 = 1 << 32;

/// A writer of a store, until it and its runs are dropped. A store in a directory can have many
/// writers at a time; a store in object storage has one.
#[derive(Debug)]
pub struct Writer {
    /// Holds the place among the writers.
    inner: Arc<OpenStore>,
    /// The store without this writer's place, to begin anew.
    store: Arc<OpenStore>,
    owner: String,
    slot: Slot,
    /// As asked for.
    asked: Tuning,
    tuning: Tuning,
    torn: Vec<TornCheckpoint>,
    doubt: Option<CheckpointId>,
}

impl Store {
    /// Becomes a writer of the store, and returns it. Other processes see `owner` as its
    /// description. Reads the indexes of all packs, and the whole packs that writers which have
    /// ended did not finish. Errors: [`Error::Locked`] if a repair is at work, or if the store is in
    /// object storage and has a writer; a pack cannot be read.
    pub fn lock_writer(&self, owner: &str) -> Result<Writer> {
        self.lock_writer_tuned(owner, Tuning::default())
    }

    /// Becomes a writer as [`Store::lock_writer`] does, with the caller's limits for the written
    /// packs. Errors: those of [`Store::lock_writer`].
    pub fn lock_writer_tuned(&self, owner: &str, tuning: Tuning) -> Result<Writer> {
        let joined = self.inner().backend.join(&encode_holder(owner)).map_err(with_named_holder)?;
        Writer::start(self.inner(), owner, joined, tuning)
    }

    /// Becomes the only writer. Error: [`Error::Locked`] if there is a writer.
    pub(crate) fn lock_alone(&self, owner: &str) -> Result<Writer> {
        let lock = self.inner().backend.lock(&encode_holder(owner)).map_err(with_named_holder)?;
        Writer::start(self.inner(), owner, StartingWriter::alone(lock), Tuning::default())
    }
}

impl Writer {
    fn start(
        store: &OpenStore,
        owner: &str,
        joined: StartingWriter,
        asked: Tuning,
    ) -> Result<Self> {
        let tuning = asked;
        let tuning = Tuning { pack_bytes_max: tuning.pack_bytes_max.min(1 << 39), ..tuning };
        let StartingWriter { slot, start, files, settled } = joined;
        let mut inner = store.with_slot(OwnSlot::new(slot));
        if let Some(files) = files {
            inner = inner.with_backend(files.into());
        }
        let torn = match settled {
            Some(torn) => torn.into_iter().map(TornCheckpoint::from).collect(),
            None => inner.settle()?,
        };
        let doubt = inner.in_doubt()?;
        // A writer may have died between the rename of a checkpoint and the sync of the folder. A
        // checkpoint that was seen as sealed must stay.
        inner.backend.remove_all(layout::CHECKPOINTS, &[])?;
        // A crash may leave a map without a checkpoint. Its number is not used again either.
        let newest_map = inner.map_ids()?.last().copied();
        let newest = inner.checkpoint_ids()?.last().copied();
        let newest = newest_map.max(newest.map(|id| id.0)).unwrap_or(0);
        // Until now, others see the number that the writer before in this slot has said.
        inner.tell(|said| *said = WriterState { number: newest, ..WriterState::default() })?;
        drop(start);
        let (inner, tuning) = match inner.backend.without_syncs() {
            Some(relaxed) if tuning.durability != Durability::Checkpoint => {
                (inner.with_backend(relaxed), tuning)
            }
            _ => (inner, Tuning { durability: Durability::Checkpoint, ..tuning }),
        };
        // The writer must not use the packs that a prune removes.
        let moves = inner.moves(None)?;
        let mut packs = PackWriter::new(inner.clone(), tuning, moves.as_ref())?;
        packs.keep_reserve();
        if let Some(moves) = &moves {
            inner.put_seen(moves.generation)?;
        }
        let syncs = Syncs::of(tuning.durability);
        let next_checkpoint = newest + 1;
        let session = Box::new(Session { packs, next_checkpoint, moves, syncs });
        if tuning.durability != Durability::Checkpoint {
            inner.put_mark(CheckpointId(next_checkpoint))?;
            // The mark must be durable before the following checkpoints are. If this sync fails,
            // it may have lost what other writers have not synced.
            inner.sync_and_mark(CheckpointId(next_checkpoint))?;
        }
        let slot = Arc::new(Mutex::new(Some(session)));
        let (store, owner) = (store.with_backend(store.backend.clone()), owner.to_owned());
        Ok(Self { inner, store, owner, slot, asked, tuning, torn, doubt })
    }

    /// Returns true if this process is no writer any more: no request of it has reached the
    /// checkpoint server for the time of its lease, or the server was restarted. Nothing can be
    /// sealed with this writer any more; [`Self::again`] makes another one. What was sealed stays.
    /// A writer of a directory keeps its place until it is dropped.
    pub fn is_lost(&self) -> bool {
        self.inner.own_slot.as_ref().is_some_and(|own| own.is_lost())
    }

    /// Returns true if other processes may write to the store at the same time.
    pub(crate) fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }

    /// Becomes a writer of the same store once more, with the same owner and limits, and returns
    /// it. Errors: those of [`Store::lock_writer`].
    pub fn again(&self) -> Result<Self> {
        let holder = encode_holder(&self.owner);
        let joined = self.store.backend.join(&holder).map_err(with_named_holder)?;
        Self::start(&self.store, &self.owner, joined, self.asked)
    }

    /// Returns the time at which the writer's checkpoints become durable: as requested, or with
    /// each checkpoint if the backend has no other way.
    pub fn durability(&self) -> Durability {
        self.tuning.durability
    }

    /// Returns the checkpoints that power loss damaged before they were durable ([`Durability`]).
    /// Locking the store moved them to the quarantine.
    pub fn torn(&self) -> &[TornCheckpoint] {
        &self.torn
    }

    /// Returns the first checkpoint that a failed sync may have lost since the machine's boot.
    /// Returns `None` if there is none. It and later ones can be read until the machine goes down;
    /// after that, the damaged ones go to the quarantine. New checkpoints do not build on them.
    pub fn in_doubt(&self) -> Option<CheckpointId> {
        self.doubt
    }

    /// Returns the size of its deduplication index; `None` while a run is open.
    pub fn index_use(&self) -> Option<IndexUse> {
        let session = self.slot.lock().ignore_poison();
        session.as_ref().map(|session| session.packs.index_use())
    }

    /// Begins a run of VM `vm` with the RAM blocks `ram` and a new id. Its first checkpoint will be
    /// complete. One run can be open at a time. Error: a run is open.
    pub fn begin_run(&mut self, vm: &str, ram: &RamLayout) -> Result<Run> {
        self.begin_run_with(vm, ram, Vec::new(), DiskState::default())
    }

    /// Begins a run of VM `vm` with the RAM blocks `ram` and the disks `disks`, whose counts are
    /// ignored. `state` is the default, or the state of an earlier run of the same VM with the same
    /// disks. Error: a run is open.
    pub fn begin_run_with(
        &mut self,
        vm: &str,
        ram: &RamLayout,
        mut disks: Vec<DiskMeta>,
        state: DiskState,
    ) -> Result<Run> {
        for disk in &mut disks {
            disk.counts = DiskCounts::default();
        }
        let ram_pages = ram.len_pages();
        if ram_pages > SPACE_PAGES_MAX {
            return Err(Error::TooLarge { space_pages: ram_pages });
        }
        if space_pages(ram_pages, &disks).is_none() {
            return Err(Error::DisksTooLarge);
        }
        let id = random_bytes()?;
        let session = self.slot.lock().ignore_poison().take();
        let mut session = session.ok_or(Error::RunOpen)?;
        session.packs.begin_run(disks.iter().any(|disk| !disk.left_out));
        Ok(Run::new(
            self.inner.clone(),
            session,
            self.slot.clone(),
            self.tuning.chain_base,
            vm,
            id,
            (ram, disks, state),
        ))
    }

    /// Makes a new or existing tag point to checkpoint `id`. Works while a run is open.
    ///
    /// Errors: [`Error::UnknownCheckpoint`] if there is no such checkpoint; [`Error::InvalidTag`]
    /// if `tag` cannot be the name of a tag; the tag cannot be written.
    pub fn set_tag(&mut self, tag: &str, id: CheckpointId) -> Result<()> {
        crate::tags::check_tag(tag)?;
        let ids = self.inner.checkpoint_ids()?;
        if ids.binary_search(&id).is_err() {
            return Err(Error::UnknownCheckpoint {
                name: id.to_string(),
                newest: ids.last().copied(),
            });
        }
        self.inner.write_tag(tag, id)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let is_idle = self.slot.lock().ignore_poison().is_some();
        if is_idle && self.tuning.durability != Durability::Checkpoint {
            // If this fails, the next writer does it.
            let _ = self.inner.sync_and_unmark();
        }
    }
}
