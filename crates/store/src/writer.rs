//! The one writer of a store: holds the lock, begins runs, sets tags.
//!
//! ```text
//!              lock_writer            begin_run              finish, or drop
//!   unlocked ─────────────▶ Writer ──────────────▶ Run open ─────────────────▶ Writer ──drop both──▶ unlocked
//! ```
//!
//! The session (index, open pack, next number) is with the writer, or lent to the one open run. A
//! run owns what it needs and may move to another thread; tags can be set meanwhile.

use crate::config::now;
use crate::disks::{self, DiskCounts, DiskMeta};
use crate::durability::{Durability, Syncs, TornCheckpoint};
use crate::pack_writer::PackWriter;
use crate::prune::moves::Moves;
use crate::run::{DiskState, Run};
use crate::store::Inner;
use crate::{Error, IndexUse, Result};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::LockGuard;
use keyframe_store_backend::layout;
use keyframe_store_backend::random_bytes;
use keyframe_units::{CheckpointId, RamLayout};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex};

/// The most pages that a run can have: 16 TiB of RAM.
const SPACE_PAGES_MAX: u64 = 1 << 32;

/// Limits of a writer. None of them is part of the format: any store is read with any limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// A pack that has reached this size is closed and followed by another. At most 2^39.
    pub pack_bytes_max: u64,
    /// Records gather in memory until they reach this size.
    pub buffer_bytes: usize,
    /// The base of the map chain rule, at least 2: a restore reads at most this many maps per digit
    /// of the epoch.
    pub chain_base: u64,
    /// In a run with disks: at most so much memory for finding the sectors of blocks; too little
    /// for anything: none are looked for.
    pub sector_index_bytes: usize,
    /// Of the eight sectors of a block, at least so many must be found before it is put together
    /// from them. Each saves a ninth of the block or so; what it costs, half of the speed at which
    /// the block is put and read, is the same for one and for eight (`examples/sectors.rs`).
    pub sector_parts_min: usize,
    /// At most so much memory for what deltas are made on: the pages written again and again. What
    /// is beyond is read from the store each time.
    pub base_bytes: usize,
    /// At most about so much memory for the index of deduplication. What is beyond lies in files,
    /// where the store's place is on this host or has a folder on it; what is beyond these, too, is
    /// forgotten, oldest first, and is stored again when it comes again.
    pub index_bytes: usize,
    /// Threads that hash and compress pages, at least one.
    pub encode_threads: usize,
    /// When checkpoints become durable.
    pub durability: Durability,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            pack_bytes_max: 256 << 20,
            buffer_bytes: 1 << 20,
            chain_base: 16,
            sector_index_bytes: 64 << 20,
            sector_parts_min: 2,
            base_bytes: 256 << 20,
            index_bytes: 256 << 20,
            encode_threads: 1,
            durability: Durability::Checkpoint,
        }
    }
}

/// The one writer of a store, until it and its runs are dropped.
#[derive(Debug)]
pub struct Writer {
    inner: Arc<Inner>,
    lock: Arc<dyn LockGuard>,
    slot: Slot,
    tuning: Tuning,
    torn: Vec<TornCheckpoint>,
    doubt: Option<CheckpointId>,
}

/// Where the session rests while no run is open.
pub(crate) type Slot = Arc<Mutex<Option<Box<Session>>>>;

/// What the runs of a writer have in common.
#[derive(Debug)]
pub(crate) struct Session {
    pub packs: PackWriter,
    /// The number that the next seal tries.
    pub next_checkpoint: u64,
    /// The prune that was followed last.
    pub moves: Option<Moves>,
    /// Where not each seal is one.
    pub syncs: Option<Syncs>,
}

#[derive(Serialize, Deserialize)]
struct Holder {
    pid: u32,
    host: String,
    since: jiff::Timestamp,
    owner: String,
}

impl Writer {
    pub(crate) fn lock(inner: Arc<Inner>, owner: &str, tuning: Tuning) -> Result<Self> {
        let tuning = Tuning { pack_bytes_max: tuning.pack_bytes_max.min(1 << 39), ..tuning };
        let lock = inner.backend.lock(&holder(owner)).map_err(named)?;
        let torn = inner.settle()?;
        let doubt = inner.in_doubt()?;
        let (inner, tuning) = match inner.backend.without_syncs() {
            Some(relaxed) if tuning.durability != Durability::Checkpoint => {
                (inner.on(relaxed), tuning)
            }
            _ => (inner, Tuning { durability: Durability::Checkpoint, ..tuning }),
        };
        // What a prune gives up is not relied on from the beginning.
        let moves = inner.moves(None)?;
        let packs = PackWriter::new(inner.clone(), tuning, moves.as_ref())?;
        if let Some(moves) = &moves {
            inner.put_seen(moves.generation)?;
        }
        // A map without a checkpoint may be left by a crash; its number is not used again either.
        let newest_map = inner.map_ids()?.last().copied();
        let newest = inner.checkpoint_ids()?.last().copied();
        if let Some(newest) = newest {
            // Its writer may have died between the rename and the sync of the directory: what is
            // seen as sealed stays.
            inner.backend.sync(&layout::checkpoint(newest))?;
        }
        let syncs = Syncs::of(tuning.durability);
        let next_checkpoint = newest_map.max(newest.map(|id| id.0)).unwrap_or(0) + 1;
        let session = Box::new(Session { packs, next_checkpoint, moves, syncs });
        if tuning.durability != Durability::Checkpoint {
            inner.put_mark(CheckpointId(next_checkpoint))?;
            // What comes from here on is not to be durable before that is.
            inner.backend.sync_all()?;
        }
        Ok(Self {
            inner,
            lock: lock.into(),
            slot: Arc::new(Mutex::new(Some(session))),
            tuning,
            torn,
            doubt,
        })
    }

    /// When its checkpoints become durable: what was asked for, or with each one, where the store's
    /// place knows nothing else.
    pub fn durability(&self) -> Durability {
        self.tuning.durability
    }

    /// Checkpoints that power loss took before they were durable ([`Durability`]): set aside when
    /// the store was locked.
    pub fn torn(&self) -> &[TornCheckpoint] {
        &self.torn
    }

    /// A sync of the checkpoints from this one on has failed since the machine came up: until it
    /// goes down they can be read, and what is missing of them then is set aside. New ones do not
    /// build on them.
    pub fn in_doubt(&self) -> Option<CheckpointId> {
        self.doubt
    }

    /// What its index of deduplication holds; none while a run is open.
    pub fn index_use(&self) -> Option<IndexUse> {
        let session = self.slot.lock().ignore_poison();
        session.as_ref().map(|session| session.packs.index_use())
    }

    /// Begins a run with a fresh id: its first checkpoint will be complete. One run can be open at
    /// a time.
    pub fn begin_run(&mut self, vm: &str, ram: &RamLayout) -> Result<Run> {
        self.begin_run_with(vm, ram, Vec::new(), DiskState::default())
    }

    /// The same of a VM with disks (their counts are not looked at). `state` is what is known of
    /// them already: nothing, or that of an earlier run of the same VM with the same disks.
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
        let space_pages = ram.len_pages();
        if space_pages > SPACE_PAGES_MAX {
            return Err(Error::TooLarge { space_pages });
        }
        if disks::space_pages(space_pages, &disks).is_none() {
            return Err(Error::DisksTooLarge);
        }
        let id = random_bytes()?;
        let session = self.slot.lock().ignore_poison().take();
        let mut session = session.ok_or(Error::RunOpen)?;
        session.packs.begin_run(disks.iter().any(|disk| !disk.left_out));
        let home = (self.slot.clone(), self.lock.clone());
        Ok(Run::new(
            self.inner.clone(),
            session,
            home,
            self.tuning.chain_base,
            vm,
            id,
            (ram, disks, state),
        ))
    }

    /// Points a tag, new or old, to a checkpoint. Also while a run is open.
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
            // Where this fails, the next writer does it.
            let _ = self.inner.sync_and_unmark();
        }
    }
}

impl Inner {
    /// Becomes the one that prunes.
    pub(crate) fn lock_prune(&self) -> Result<Box<dyn LockGuard>> {
        self.backend.lock_prune(&holder("keyframe prune")).map_err(named)
    }

    /// Who writes to the store now, if somebody does, for messages.
    pub(crate) fn lock_holder(&self) -> Result<Option<String>> {
        Ok(self.backend.lock_holder()?.map(|text| describe_holder(&text)))
    }
}

/// What the lock file tells others.
fn holder(owner: &str) -> String {
    let holder =
        Holder { pid: std::process::id(), host: this_host(), since: now(), owner: owner.into() };
    serde_json::to_string(&holder).unwrap_or_default()
}

fn this_host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn named(error: Error) -> Error {
    match error {
        Error::Locked { holder } => Error::Locked { holder: describe_holder(&holder) },
        other => other,
    }
}

/// True of a process of this host that is not there any more.
pub(crate) fn is_dead(holder: &str) -> bool {
    serde_json::from_str::<Holder>(holder).is_ok_and(|holder| {
        holder.host == this_host()
            && !std::path::Path::new("/proc").join(holder.pid.to_string()).exists()
    })
}

pub(crate) fn describe_holder(text: &str) -> String {
    match serde_json::from_str::<Holder>(text) {
        Ok(Holder { pid, host, since, owner }) => {
            format!("{owner} (process {pid} on {host}, since {since})")
        }
        Err(_) => "another process".into(),
    }
}
