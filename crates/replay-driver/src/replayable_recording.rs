//! A recording that can be replayed, with its log and its checkpoints.

use crate::error::{Error, Result};
use crate::event::{EventSink, ReplayEvent};
use keyframe_qemu::QemuIdentity;
use keyframe_qemu::restore::{Until, replay_binary};
use keyframe_replay::interval::{
    Interval, RecordedCheckpoint, intervals, with_unambiguous_ends, with_unambiguous_last_end,
};
use keyframe_replay::log::LogIndex;
use keyframe_replay::recording::{ImageMeta, ReadableLog};
use keyframe_replay::{Recording, RecordingEnding};
use keyframe_store::{Sealed, Store};
use keyframe_store_keys::KeyArg;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A recording that can be replayed.
pub struct ReplayableRecording {
    /// The recording.
    pub recording: Recording,
    /// The store of its checkpoints.
    pub store: Store,
    /// The QEMU binary for its replays; `None` for the one that recorded it
    /// ([`ReplayableRecording::find_qemu`]).
    pub qemu: Option<PathBuf>,
    log: ReadableLog,
    log_index: OnceLock<LogIndex>,
    holds: OnceLock<Arc<[u64]>>,
}

impl ReplayableRecording {
    /// Opens the recording at `path` with the store that it names, or with `store`. If its recorder
    /// was killed, this completes the recording, and tells `events`.
    ///
    /// # Errors
    ///
    /// [`Error::StillRecording`] while it is being made; other errors if the recording, its store
    /// or the media of its VM cannot be read.
    pub fn open(
        path: &Path,
        store: Option<&Path>,
        key: &KeyArg,
        events: &dyn EventSink<ReplayEvent>,
    ) -> Result<Self> {
        let mut recording = Recording::open(path)?;
        if recording.meta.ending == RecordingEnding::Recording {
            if recording.is_in_progress()? {
                return Err(Error::StillRecording(path.to_owned()));
            }
            let duration_ns = recording.meta.duration_ns;
            recording.finish(duration_ns)?;
            events.event(&ReplayEvent::RecorderKilled { recording: path.to_owned() });
        }
        let place: PathBuf = store.map_or_else(|| recording.store_path(), Path::to_owned);
        let store = key.open(&place).map_err(|e| Error::store(&place, e))?;
        if !recording.is_recorder_running()? {
            adopt_first_checkpoint(&recording, &store, key)?;
        }
        // The disks that the VM could write to are checked with each checkpoint.
        recording.meta.media.iter().try_for_each(ImageMeta::require_unchanged)?;
        let log = recording.readable_log()?;
        let (log_index, holds) = (OnceLock::new(), OnceLock::new());
        Ok(Self { recording, store, qemu: None, log, log_index, holds })
    }

    /// Makes the value for a recording that is still being made. Its checkpoints go to `store`.
    pub fn growing(recording: &Recording, store: Store) -> Self {
        let log = recording.live_log();
        Self {
            recording: recording.clone(),
            store,
            qemu: None,
            log,
            log_index: OnceLock::new(),
            holds: OnceLock::new(),
        }
    }

    /// Makes the value for a recording that takes its checkpoints while it is being made.
    /// `log_index` is the index of its log so far.
    pub fn so_far(recording: &Recording, store: Store, log_index: LogIndex) -> Self {
        let (log, holds) = (recording.live_log(), Arc::<[u64]>::from(log_index.holds()));
        let (log_index, holds) = (OnceLock::from(log_index), OnceLock::from(holds));
        Self { recording: recording.clone(), store, qemu: None, log, log_index, holds }
    }

    /// Finds the QEMU binary for its replays, which all use it then: `chosen`, or else the one that
    /// recorded it, wherever it is now. Error: there is none, or it is of another release.
    pub fn find_qemu(&mut self, chosen: Option<&Path>) -> Result<()> {
        self.qemu = Some(replay_binary(&self.qemu_identity(), chosen)?);
        Ok(())
    }

    /// Returns the QEMU of its replays, as the recording describes it.
    pub fn qemu_identity(&self) -> QemuIdentity {
        let meta = &self.recording.meta;
        QemuIdentity {
            path: self.qemu.clone().unwrap_or_else(|| meta.qemu_path.clone().into()),
            version: meta.qemu_version.clone(),
            blake3: meta.qemu_blake3.clone(),
        }
    }

    /// Returns the path of QEMU's log.
    pub fn log(&self) -> &Path {
        self.log.path()
    }

    /// Returns the index of the log, which the first call reads. Error: the log cannot be read.
    pub fn log_index(&self) -> Result<&LogIndex> {
        if let Some(log_index) = self.log_index.get() {
            return Ok(log_index);
        }
        let read = LogIndex::read(self.log())?;
        Ok(self.log_index.get_or_init(|| read))
    }

    /// Returns the work of the replay of each of `intervals`, in instructions
    /// ([`Interval::effort`]). Error: the log cannot be read.
    pub fn efforts(&self, intervals: &[Interval]) -> Result<Vec<u64>> {
        let log_index = self.log_index()?;
        Ok(intervals.iter().map(|interval| interval.effort(log_index)).collect())
    }

    /// Returns the instructions at which a replay must stop for a moment ([`LogIndex::holds`]).
    /// There are none in a recording that is still being made: the follower takes its checkpoints,
    /// so that the recorded VM is never paused.
    ///
    /// Error: the log cannot be read.
    pub fn holds(&self) -> Result<Arc<[u64]>> {
        if let Some(holds) = self.holds.get() {
            return Ok(Arc::clone(holds));
        }
        let is_growing = self.recording.meta.ending == RecordingEnding::Recording;
        let found: Arc<[u64]> =
            if is_growing { Arc::new([]) } else { self.log_index()?.holds().into() };
        Ok(Arc::clone(self.holds.get_or_init(|| found)))
    }

    /// Returns true if a replay to the recording's end runs until QEMU ends with the log. If false,
    /// the replay stops before the last instruction at which it can: where the machine was asked to
    /// shut down, before the log breaks off, or before an instruction during which QEMU ended.
    ///
    /// Error: the log cannot be read.
    pub fn ends_with_log(&self) -> Result<bool> {
        let (meta, log_index) = (&self.recording.meta, self.log_index()?);
        let is_whole =
            meta.ending == RecordingEnding::Complete && meta.instructions >= log_index.end();
        Ok(is_whole && !log_index.ends_with_shutdown())
    }

    /// Returns the last instruction before which a replay can stop. Error: the log cannot be read.
    pub fn last_stop(&self) -> Result<u64> {
        let end = self.recording.meta.instructions;
        let end = if self.recording.meta.ending == RecordingEnding::Complete {
            end
        } else {
            end.saturating_sub(1)
        };
        Ok(self.log_index()?.end().min(end))
    }

    /// Returns the target of a replay to instruction `icount`, in the form that QEMU needs. Error:
    /// the log cannot be read.
    pub fn until(&self, icount: u64) -> Result<Until> {
        let is_end = icount >= self.last_stop()? && self.ends_with_log()?;
        Ok(if is_end { Until::LogEnd } else { Until::Instruction(icount) })
    }

    /// Returns the recording's checkpoints, by instruction.
    ///
    /// # Errors
    ///
    /// [`Error::NoCheckpoint`] if its store has none.
    pub fn checkpoints(&self) -> Result<Vec<RecordedCheckpoint>> {
        let checkpoints = checkpoints_in(&self.store, &self.recording)?;
        if checkpoints.is_empty() {
            return Err(Error::NoCheckpoint {
                store: self.store.path().to_owned(),
                recording: self.recording.meta.id.clone(),
            });
        }
        Ok(checkpoints)
    }

    /// Returns the recording's intervals.
    ///
    /// # Errors
    ///
    /// [`Error::NoInterval`] if it was cut before its second checkpoint.
    pub fn intervals(&self) -> Result<Vec<Interval>> {
        let end = self.log_index()?.end().min(self.recording.meta.instructions);
        let mut all = intervals(self.checkpoints()?, end);
        if self.recording.meta.ending == RecordingEnding::Cut {
            // The log breaks off behind the last checkpoint, and a QEMU that reads that part ends.
            all.retain(|interval| interval.end.is_some());
        }
        if all.is_empty() {
            return Err(Error::NoInterval);
        }
        Ok(all)
    }

    /// Returns the recording's intervals for a tool, with ends at which each replay shows the tool
    /// the same. If `needs_exact_ends`, each ends where a replay can stop and go on. Error: the log
    /// cannot be read.
    pub fn intervals_for_tool(&self, needs_exact_ends: bool) -> Result<Vec<Interval>> {
        let all = self.intervals()?;
        let all = if self.ends_with_log()? {
            all
        } else {
            with_unambiguous_last_end(all, self.log_index()?)
        };
        if needs_exact_ends { self.with_unambiguous_ends(&all) } else { Ok(all) }
    }

    /// Returns `all` with ends at which a replay can stop and go on. Error: the log cannot be read.
    pub fn with_unambiguous_ends(&self, all: &[Interval]) -> Result<Vec<Interval>> {
        Ok(with_unambiguous_ends(all, self.log_index()?))
    }
}

/// Returns the checkpoints of `recording` in `store`, by instruction. Error: the store cannot be
/// read.
pub fn checkpoints_in(store: &Store, recording: &Recording) -> Result<Vec<RecordedCheckpoint>> {
    Ok(sealed_checkpoints_in(store, recording)?
        .into_iter()
        .map(|(checkpoint, _)| checkpoint)
        .collect())
}

/// Returns the checkpoints of `recording` in `store` with their metadata, by instruction. Error:
/// the store cannot be read.
pub fn sealed_checkpoints_in(
    store: &Store,
    recording: &Recording,
) -> Result<Vec<(RecordedCheckpoint, Sealed)>> {
    let listing = store.checkpoints().map_err(|e| Error::store(store.path(), e))?;
    let of = |sealed: Sealed| {
        let place = sealed.meta.machine.recorded.as_ref()?;
        let ours = place.recording == recording.meta.id;
        ours.then_some((RecordedCheckpoint { icount: place.icount, checkpoint: sealed.id }, sealed))
    };
    let mut all: Vec<_> = listing.sealed.into_iter().filter_map(of).collect();
    all.sort_unstable_by_key(|(checkpoint, _)| *checkpoint);
    Ok(all)
}

/// Returns whether a checkpoint was taken while its VM was recorded; otherwise a replay took it later.
pub(crate) fn was_taken_live(sealed: &Sealed) -> bool {
    sealed.meta.reason != "segment"
}

/// Copies `checkpoints` from the store `from` to the store `to`. Those that it has already are left
/// as they are. Errors: a checkpoint cannot be read; `to` cannot be written or is in use.
pub fn copy_checkpoints(
    from: &Store,
    checkpoints: &[RecordedCheckpoint],
    to: &Store,
) -> Result<()> {
    let ids = checkpoints.iter().map(|one| one.checkpoint).collect();
    from.copy_to(to, &ids, &mut |_| ()).map(drop).map_err(|e| Error::store(to.path(), e))
}

/// Moves the first checkpoint of a recording that was followed from its own store into `store`,
/// which holds the others. The recording must have ended. Errors: a store cannot be opened, read or
/// written.
pub fn adopt_first_checkpoint(recording: &Recording, store: &Store, key: &KeyArg) -> Result<()> {
    let place = recording.first_store_path();
    if !place.exists() {
        return Ok(());
    }
    if checkpoints_in(store, recording)?.is_empty() {
        let first = key.open(&place).map_err(|e| Error::store(&place, e))?;
        copy_checkpoints(&first, &checkpoints_in(&first, recording)?, store)?;
    }
    std::fs::remove_dir_all(&place).map_err(|e| Error::file("remove", &place, e))
}
