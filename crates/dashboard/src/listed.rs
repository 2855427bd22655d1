//! The checkpoints of one store, as they are now, at the cost of what is new.
//!
//! ```text
//!   directories unchanged ──▶ as before
//!   else: names ──▶ gone: dropped;  new: few are read one by one, many all at once
//! ```
//!
//! A store elsewhere has no directories to look at: it is listed anew every few seconds.

use super::{StoreFix, locked, said};
use keyframe_inspect::entry::Entry;
use keyframe_store::{CheckpointId, Sealed, Store};
use keyframe_web::{
    ApiError, CheckpointListing, CheckpointRow, PauseBreakdown, StoreHead, StoreSizes,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// The time for which a listing is used without a check of the store.
const KEPT: Duration = Duration::from_millis(500);
/// The same for a store that is not in a directory of this machine.
const KEPT_REMOTE: Duration = Duration::from_secs(5);
/// A directory that changed a moment ago may change again without its time telling.
const SETTLED: Duration = Duration::from_millis(200);
/// More new ones than these are read together.
const ALONE_MAX: usize = 24;
/// The time for which the size of a store's files is used.
const SIZES_KEPT: Duration = Duration::from_secs(5);
const SIZES_KEPT_REMOTE: Duration = Duration::from_secs(120);

/// A store and the listing of its checkpoints.
pub struct ListedStore {
    store: Store,
    place: PathBuf,
    fix: StoreFix,
    state: Mutex<State>,
    total: Mutex<Option<(Instant, u64)>>,
}

/// A checkpoint of a recording, with its place in the recording.
#[derive(Clone, Debug)]
pub struct RecordedEntry {
    /// The number of the checkpoint in its store.
    pub checkpoint: u64,
    /// The recording's id.
    pub recording: String,
    /// The number of instructions that the VM had executed at the checkpoint.
    pub icount: u64,
}

#[derive(Default)]
struct State {
    looked_at: Option<Instant>,
    /// The modification times of the store's directories; `None` if the backend does not provide
    /// them.
    stamp: Option<[SystemTime; 2]>,
    all: BTreeMap<u64, Arc<CheckpointRow>>,
    recorded: BTreeMap<u64, RecordedEntry>,
    /// Checkpoints that could not be read, so that they are not read again.
    unreadable: BTreeSet<u64>,
    newest_of_run: HashMap<String, u64>,
    listing: Arc<CheckpointListing>,
    problem: Option<String>,
}

impl ListedStore {
    /// Makes the entry of a store, without reading its checkpoints.
    pub fn new(store: Store, fix: StoreFix) -> Self {
        let place = store.absolute_path().unwrap_or_else(|_| store.path().into());
        Self { store, place, fix, state: Mutex::default(), total: Mutex::default() }
    }

    /// Converts an error of this store into the dashboard's answer, with a text for the user.
    pub fn error(&self, error: &keyframe_store::Error) -> ApiError {
        use keyframe_store::Error;
        let text = said(error, (self.fix)(error, &self.place));
        match error {
            Error::UnknownCheckpoint { .. } | Error::UnknownTag { .. } => ApiError::Unknown(text),
            Error::InvalidTag { .. } => ApiError::Bad(text),
            _ => ApiError::Failed(text),
        }
    }

    /// Returns the store's id.
    pub fn id(&self) -> &str {
        self.store.id()
    }

    /// Returns the store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the absolute path or the address of the store.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Makes the next call of [`ListedStore::listing`] read the store again. Called after the
    /// dashboard has changed the store.
    pub fn look_again(&self) {
        let mut state = locked(&self.state);
        (state.looked_at, state.stamp) = (None, None);
    }

    /// Returns the listing of the store's checkpoints. Reads the store again if it may have
    /// changed. Error: the store cannot be listed.
    pub fn listing(&self) -> Result<Arc<CheckpointListing>, ApiError> {
        let mut state = locked(&self.state);
        self.renew(&mut state)?;
        Ok(Arc::clone(&state.listing))
    }

    /// Returns the checkpoints of the recording with the id `recording`, in the order of their
    /// numbers. Error: the store cannot be listed.
    pub fn recorded(&self, recording: &str) -> Result<Vec<RecordedEntry>, ApiError> {
        let mut state = locked(&self.state);
        self.renew(&mut state)?;
        Ok(state.recorded.values().filter(|one| one.recording == recording).cloned().collect())
    }

    /// Returns the store's entry in the list of stores. If it cannot be read, the entry holds the
    /// problem.
    pub fn head(&self) -> StoreHead {
        let mut state = locked(&self.state);
        let failed = self.renew(&mut state).err().map(|problem| problem.to_string());
        let hurt = state.unreadable.len();
        let hurt = (hurt > 0).then(|| format!("{hurt} checkpoints cannot be read: keyframe check"));
        let all = &state.listing.checkpoints;
        let vms: BTreeSet<&String> = all.iter().map(|one| &one.vm).collect();
        StoreHead {
            id: self.id().into(),
            place: self.place.display().to_string(),
            checkpoints: all.len(),
            newest: all.last().map(|one| one.id),
            vms: vms.into_iter().cloned().collect(),
            generation: state.listing.generation,
            problem: failed.or_else(|| state.problem.clone()).or(hurt),
        }
    }

    fn renew(&self, state: &mut State) -> Result<(), ApiError> {
        let kept = if self.store.is_remote() { KEPT_REMOTE } else { KEPT };
        if state.looked_at.is_some_and(|at| at.elapsed() < kept) {
            return Ok(());
        }
        // Before it is read: a change meanwhile is seen at the next look.
        let stamp = self.stamp();
        state.looked_at = Some(Instant::now());
        if stamp.is_some() && stamp == state.stamp {
            return Ok(());
        }
        let found = self.read(state);
        state.problem = found.as_ref().err().map(ToString::to_string);
        state.stamp = stamp.filter(|_| found.is_ok());
        found
    }

    /// The modification times of the store's directories; `None` if the backend does not provide
    /// them.
    fn stamp(&self) -> Option<[SystemTime; 2]> {
        if self.store.is_remote() {
            return None;
        }
        let of = |folder: &str| {
            let changed = match std::fs::metadata(self.place.join(folder)) {
                Ok(found) => found.modified().ok()?,
                // None was made yet.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => SystemTime::UNIX_EPOCH,
                Err(_) => return None,
            };
            changed.elapsed().is_ok_and(|ago| ago > SETTLED).then_some(changed)
        };
        Some([of("checkpoints")?, of("tags")?])
    }

    fn read(&self, state: &mut State) -> Result<(), ApiError> {
        let failed = |e: keyframe_store::Error| self.error(&e);
        let ids: BTreeSet<u64> =
            self.store.ids().map_err(failed)?.into_iter().map(|id| id.0).collect();
        let before = (state.all.len(), state.unreadable.len());
        state.all.retain(|id, _| ids.contains(id));
        state.recorded.retain(|id, _| ids.contains(id));
        state.unreadable.retain(|id| ids.contains(id));
        let mut changed = before != (state.all.len(), state.unreadable.len());
        let is_new = |id: &&u64| !state.all.contains_key(id) && !state.unreadable.contains(id);
        let new: Vec<u64> = ids.iter().filter(is_new).copied().collect();
        changed |= !new.is_empty();
        if new.len() > ALONE_MAX {
            let listing = self.store.checkpoints().map_err(failed)?;
            state.unreadable.extend(listing.unreadable.iter().map(|one| one.id.0));
            let wanted: BTreeSet<u64> = new.into_iter().collect();
            listing
                .sealed
                .iter()
                .filter(|one| wanted.contains(&one.id.0))
                .for_each(|one| state.add(one));
        } else {
            for id in new {
                match self.store.sealed(CheckpointId(id)) {
                    Ok(sealed) => state.add(&sealed),
                    // Gone since it was listed.
                    Err(keyframe_store::Error::UnknownCheckpoint { .. }) => {}
                    Err(_) => drop(state.unreadable.insert(id)),
                }
            }
        }
        changed |= state.set_tags(&self.store.tags_of_checkpoints().map_err(failed)?);
        if changed || state.listing.generation == 0 {
            let generation = state.listing.generation + 1;
            state.listing = Arc::new(CheckpointListing {
                generation,
                checkpoints: state.all.values().cloned().collect(),
            });
        }
        Ok(())
    }

    /// Returns the sums over all checkpoints, and the bytes of the store's files. Errors: the store
    /// cannot be listed; its files cannot be counted.
    pub fn sizes(&self) -> Result<StoreSizes, ApiError> {
        let listing = self.listing()?;
        let mut sizes = StoreSizes { total_bytes: self.total_bytes()?, ..StoreSizes::default() };
        for one in &listing.checkpoints {
            sizes.raw_bytes += one.ram_bytes;
            sizes.dirty_bytes += one.dirty_pages * 4096;
            sizes.zero_pages += one.zero_pages;
            sizes.dedup_pages += one.dedup_pages;
            sizes.unchanged_pages += one.unchanged_pages;
            sizes.stored_pages += one.stored_pages;
            sizes.stored_bytes += one.stored_bytes;
        }
        let ratio = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        sizes.dedup_ratio = ratio(
            sizes.dedup_pages + sizes.unchanged_pages + sizes.stored_pages,
            sizes.stored_pages,
        );
        sizes.compression_ratio = ratio(sizes.stored_pages * 4096, sizes.stored_bytes);
        sizes.reduction_ratio = ratio(sizes.raw_bytes, sizes.total_bytes);
        Ok(sizes)
    }

    fn total_bytes(&self) -> Result<u64, ApiError> {
        let kept_for = if self.store.is_remote() { SIZES_KEPT_REMOTE } else { SIZES_KEPT };
        let mut kept = locked(&self.total);
        if let Some((at, total_bytes)) = *kept
            && at.elapsed() < kept_for
        {
            return Ok(total_bytes);
        }
        let total_bytes = if self.store.is_remote() {
            self.store.stats().map_err(|e| self.error(&e))?.total_bytes
        } else {
            ["packs", "maps", "checkpoints", "tags"]
                .iter()
                .map(|folder| bytes_in(&self.place.join(folder)))
                .sum()
        };
        *kept = Some((Instant::now(), total_bytes));
        Ok(total_bytes)
    }
}

/// Returns the bytes of the files in a folder. A file that is removed meanwhile counts nothing.
fn bytes_in(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|found| found.len()).sum()
}

impl State {
    /// Adds a checkpoint that the listing does not hold yet. Callers add them in rising order.
    fn add(&mut self, sealed: &Sealed) {
        let entry = Entry::of(sealed);
        let before = self.newest_of_run.insert(entry.run.clone(), entry.id);
        if let Some(recorded) = &sealed.meta.machine.recorded {
            let (recording, icount) = (recorded.recording.clone(), recorded.icount);
            self.recorded
                .insert(entry.id, RecordedEntry { checkpoint: entry.id, recording, icount });
        }
        let parent = entry.restored_from.or(before);
        let taken_ms = sealed.meta.taken_at.as_millisecond();
        self.all.insert(entry.id, Arc::new(checkpoint(entry, parent, taken_ms)));
    }

    /// Sets the tags of checkpoints. Returns true if one of them has changed.
    fn set_tags(&mut self, tags: &BTreeMap<CheckpointId, Vec<String>>) -> bool {
        let mut changed = false;
        for (id, one) in &mut self.all {
            let none = Vec::new();
            let all = tags.get(&CheckpointId(*id)).unwrap_or(&none);
            let (names, pinned) = Sealed::split_tags(CheckpointId(*id), all);
            if one.tags != names || one.pinned != pinned {
                *one = Arc::new(CheckpointRow { tags: names, pinned, ..CheckpointRow::clone(one) });
                changed = true;
            }
        }
        changed
    }
}

/// Makes the dashboard's row of a checkpoint. The caller adds the parent.
pub fn as_shown(sealed: &Sealed) -> CheckpointRow {
    checkpoint(
        Entry::of(sealed),
        sealed.meta.parent.map(|id| id.0),
        sealed.meta.taken_at.as_millisecond(),
    )
}

fn checkpoint(entry: Entry, parent: Option<u64>, taken_ms: i64) -> CheckpointRow {
    let of_disks: u64 = entry.disks.iter().map(|disk| disk.counts.stored_bytes).sum();
    let pause = entry.pause;
    CheckpointRow {
        id: entry.id,
        parent,
        taken_ms,
        pause: PauseBreakdown {
            stop: pause.stop,
            device_state: pause.device_state,
            scan: pause.scan,
            copy: pause.copy,
            resume: pause.resume,
        },
        added_bytes: entry.stored_bytes + entry.map_bytes + entry.device_bytes + of_disks,
        disk_written_bytes: entry.disks.iter().map(|disk| disk.written_bytes).sum(),
        vm: entry.vm,
        run: entry.run,
        epoch: entry.epoch,
        taken_at: entry.taken_at,
        reason: entry.reason,
        tags: entry.tags,
        pinned: entry.pinned,
        strategy: entry.strategy,
        pause_ns: entry.pause_ns,
        dirty_pages: entry.dirty_pages,
        zero_pages: entry.zero_pages,
        dedup_pages: entry.dedup_pages,
        unchanged_pages: entry.unchanged_pages,
        stored_pages: entry.stored_pages,
        stored_bytes: entry.stored_bytes,
        interval_ns: entry.interval_ns,
        backlog_ns: entry.backlog_ns,
        encode_ns: entry.encode_ns,
        ram_bytes: entry.ram_bytes,
    }
}
