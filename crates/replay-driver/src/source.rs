//! A recording with its log and its checkpoints.

use crate::error::{Error, Result};
use crate::event::{Event, EventSink};
use keyframe_qemu::restore::Until;
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
pub struct Source {
    /// The recording.
    pub recording: Recording,
    /// Where its checkpoints are.
    pub store: Store,
    log: ReadableLog,
    boundaries: OnceLock<LogIndex>,
    holds: OnceLock<Arc<[u64]>>,
}

impl Source {
    /// Opens the recording at `path` with the store that it names, or another one.
    pub fn open(
        path: &Path,
        store: Option<&Path>,
        key: &KeyArg,
        events: &dyn EventSink,
    ) -> Result<Self> {
        let mut recording = Recording::open(path)?;
        if recording.meta.ending == RecordingEnding::Recording {
            if recording.is_in_progress()? {
                return Err(Error::StillRecording(path.to_owned()));
            }
            let duration_ns = recording.meta.duration_ns;
            recording.finish(duration_ns)?;
            events.event(&Event::RecorderKilled { recording: path.to_owned() });
        }
        let place: PathBuf = store.map_or_else(|| recording.store_path(), Path::to_owned);
        let store = key.open(&place).map_err(|e| Error::store(&place, e))?;
        if !recording.is_recorder_running()? {
            adopt_first(&recording, &store, key)?;
        }
        // Those that it could write to stand with each checkpoint.
        recording.meta.media.iter().try_for_each(ImageMeta::require_unchanged)?;
        let log = recording.readable_log()?;
        Ok(Self { recording, store, log, boundaries: OnceLock::new(), holds: OnceLock::new() })
    }

    /// One that is still being recorded, with the store for its checkpoints.
    pub fn growing(recording: &Recording, store: Store) -> Self {
        let log = recording.live_log();
        Self {
            recording: recording.clone(),
            store,
            log,
            boundaries: OnceLock::new(),
            holds: OnceLock::new(),
        }
    }

    /// One that takes its checkpoints while it is recorded, with what its log has so far.
    pub fn so_far(recording: &Recording, store: Store, boundaries: LogIndex) -> Self {
        let (log, holds) = (recording.live_log(), Arc::<[u64]>::from(boundaries.holds()));
        let (boundaries, holds) = (OnceLock::from(boundaries), OnceLock::from(holds));
        Self { recording: recording.clone(), store, log, boundaries, holds }
    }

    /// QEMU's log.
    pub fn log(&self) -> &Path {
        self.log.path()
    }

    /// Where the log has something. It is read once.
    pub fn boundaries(&self) -> Result<&LogIndex> {
        if let Some(boundaries) = self.boundaries.get() {
            return Ok(boundaries);
        }
        let read = LogIndex::read(self.log())?;
        Ok(self.boundaries.get_or_init(|| read))
    }

    /// What a replay of each of `intervals` takes ([`Interval::effort`]).
    pub fn efforts(&self, intervals: &[Interval]) -> Result<Vec<u64>> {
        let boundaries = self.boundaries()?;
        Ok(intervals.iter().map(|interval| interval.effort(boundaries)).collect())
    }

    /// Where a replay must stand on its way ([`LogIndex::holds`]). None of one that is still
    /// being recorded: what follows it takes its checkpoints, so that the recording stands nowhere.
    pub fn holds(&self) -> Result<Arc<[u64]>> {
        if let Some(holds) = self.holds.get() {
            return Ok(Arc::clone(holds));
        }
        let is_growing = self.recording.meta.ending == RecordingEnding::Recording;
        let found: Arc<[u64]> =
            if is_growing { Arc::new([]) } else { self.boundaries()?.holds().into() };
        Ok(Arc::clone(self.holds.get_or_init(|| found)))
    }

    /// Whether a replay to its end goes on until QEMU ends with its log. Else it stops at the last
    /// instruction that it can stand before: where the machine was asked to shut down, or before
    /// the log breaks off or an instruction within which QEMU ended, as it would again.
    pub fn ends_with_log(&self) -> Result<bool> {
        let (meta, boundaries) = (&self.recording.meta, self.boundaries()?);
        let is_whole =
            meta.ending == RecordingEnding::Complete && meta.instructions >= boundaries.end();
        Ok(is_whole && !boundaries.ends_with_shutdown())
    }

    /// The last instruction that a replay can stand before.
    pub fn last_standing(&self) -> Result<u64> {
        let end = self.recording.meta.instructions;
        let end = if self.recording.meta.ending == RecordingEnding::Complete {
            end
        } else {
            end.saturating_sub(1)
        };
        Ok(self.boundaries()?.end().min(end))
    }

    /// How a replay stops at `icount`.
    pub fn until(&self, icount: u64) -> Result<Until> {
        let is_end = icount >= self.last_standing()? && self.ends_with_log()?;
        Ok(if is_end { Until::LogEnd } else { Until::Instruction(icount) })
    }

    /// Its checkpoints, by instruction.
    pub fn places(&self) -> Result<Vec<RecordedCheckpoint>> {
        let places = places_in(&self.store, &self.recording)?;
        if places.is_empty() {
            return Err(Error::NoCheckpoint {
                store: self.store.path().to_owned(),
                recording: self.recording.meta.id.clone(),
            });
        }
        Ok(places)
    }

    /// Its intervals.
    pub fn intervals(&self) -> Result<Vec<Interval>> {
        let end = self.boundaries()?.end().min(self.recording.meta.instructions);
        let mut all = intervals(self.places()?, end);
        if self.recording.meta.ending == RecordingEnding::Cut {
            // Behind the last checkpoint the log ends in the middle, and a QEMU that reads on there
            // ends too.
            all.retain(|interval| interval.end.is_some());
        }
        if all.is_empty() {
            return Err(Error::NoInterval);
        }
        Ok(all)
    }

    /// Its intervals for a tool, which is to see the same whenever they are replayed; with ends
    /// where a replay can stand and go on if that is wanted.
    pub fn intervals_for_tool(&self, with_standing: bool) -> Result<Vec<Interval>> {
        let all = self.intervals()?;
        let all = if self.ends_with_log()? {
            all
        } else {
            with_unambiguous_last_end(all, self.boundaries()?)
        };
        if with_standing { self.with_unambiguous_ends(&all) } else { Ok(all) }
    }

    /// `all` with ends where a replay can stand and go on.
    pub fn with_unambiguous_ends(&self, all: &[Interval]) -> Result<Vec<Interval>> {
        Ok(with_unambiguous_ends(all, self.boundaries()?))
    }
}

/// The checkpoints of `recording` in `store`, by instruction.
pub fn places_in(store: &Store, recording: &Recording) -> Result<Vec<RecordedCheckpoint>> {
    Ok(sealed_in(store, recording)?.into_iter().map(|(place, _)| place).collect())
}

/// The same, with what each tells about itself.
pub fn sealed_in(
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
    all.sort_unstable_by_key(|(place, _)| *place);
    Ok(all)
}

/// Brings checkpoints to another store, unless they are there.
pub fn copy_places(from: &Store, places: &[RecordedCheckpoint], to: &Store) -> Result<()> {
    let ids = places.iter().map(|place| place.checkpoint).collect();
    from.copy_to(to, &ids, &mut |_| ()).map(drop).map_err(|e| Error::store(to.path(), e))
}

/// Of a recording that was followed, and that nobody makes any more: its first checkpoint is in the
/// store with the others, and nowhere else.
pub fn adopt_first(recording: &Recording, store: &Store, key: &KeyArg) -> Result<()> {
    let place = recording.first_store_path();
    if !place.exists() {
        return Ok(());
    }
    if places_in(store, recording)?.is_empty() {
        let first = key.open(&place).map_err(|e| Error::store(&place, e))?;
        copy_places(&first, &places_in(&first, recording)?, store)?;
    }
    std::fs::remove_dir_all(&place).map_err(|e| Error::file("remove", &place, e))
}
