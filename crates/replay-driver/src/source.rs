//! A recording with its log and its checkpoints.

use keyframe_failure::Failure;
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
    pub fn open(path: &Path, store: Option<&Path>, key: &KeyArg) -> Result<Self, Failure> {
        let failed = |e| Failure::recording(&e);
        let mut recording = Recording::open(path).map_err(failed)?;
        if recording.meta.ending == RecordingEnding::Recording {
            if recording.is_in_progress().map_err(failed)? {
                return Err(Failure::new(format!("{} is still being recorded", path.display()))
                    .fix("wait until its `keyframe record` has ended, or end it: keyframe stop"));
            }
            let duration_ns = recording.meta.duration_ns;
            recording.finish(duration_ns).map_err(failed)?;
            eprintln!(
                "keyframe: {}: whoever recorded it was killed; it ends with what QEMU had written by then",
                path.display()
            );
        }
        let place: PathBuf = store.map_or_else(|| recording.store_path(), Path::to_owned);
        let store = key.open(&place).map_err(|e| Failure::store(&e, &place))?;
        if !recording.is_recorder_running().map_err(failed)? {
            adopt_first(&recording, &store, key)?;
        }
        // Those that it could write to stand with each checkpoint.
        recording.meta.media.iter().try_for_each(ImageMeta::require_unchanged).map_err(failed)?;
        let log = recording.readable_log().map_err(failed)?;
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
    pub fn boundaries(&self) -> Result<&LogIndex, Failure> {
        if let Some(boundaries) = self.boundaries.get() {
            return Ok(boundaries);
        }
        let read = LogIndex::read(self.log()).map_err(|e| Failure::recording(&e))?;
        Ok(self.boundaries.get_or_init(|| read))
    }

    /// What a replay of each of `intervals` takes ([`Interval::effort`]).
    pub fn efforts(&self, intervals: &[Interval]) -> Result<Vec<u64>, Failure> {
        let boundaries = self.boundaries()?;
        Ok(intervals.iter().map(|interval| interval.effort(boundaries)).collect())
    }

    /// Where a replay must stand on its way ([`LogIndex::holds`]). None of one that is still
    /// being recorded: what follows it takes its checkpoints, so that the recording stands nowhere.
    pub fn holds(&self) -> Result<Arc<[u64]>, Failure> {
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
    pub fn ends_with_log(&self) -> Result<bool, Failure> {
        let (meta, boundaries) = (&self.recording.meta, self.boundaries()?);
        let is_whole =
            meta.ending == RecordingEnding::Complete && meta.instructions >= boundaries.end();
        Ok(is_whole && !boundaries.ends_with_shutdown())
    }

    /// The last instruction that a replay can stand before.
    pub fn last_standing(&self) -> Result<u64, Failure> {
        let end = self.recording.meta.instructions;
        let end = if self.recording.meta.ending == RecordingEnding::Complete {
            end
        } else {
            end.saturating_sub(1)
        };
        Ok(self.boundaries()?.end().min(end))
    }

    /// How a replay stops at `icount`.
    pub fn until(&self, icount: u64) -> Result<Until, Failure> {
        let is_end = icount >= self.last_standing()? && self.ends_with_log()?;
        Ok(if is_end { Until::LogEnd } else { Until::Instruction(icount) })
    }

    /// Its checkpoints, by instruction.
    pub fn places(&self) -> Result<Vec<RecordedCheckpoint>, Failure> {
        let places = places_in(&self.store, &self.recording)?;
        if places.is_empty() {
            return Err(Failure::new(format!(
                "{} has no checkpoint of recording {}",
                self.store.path().display(),
                self.recording.meta.id
            ))
            .fix("name the store that has them with --store; or take them from a replay: keyframe segment"));
        }
        Ok(places)
    }

    /// Its intervals.
    pub fn intervals(&self) -> Result<Vec<Interval>, Failure> {
        let end = self.boundaries()?.end().min(self.recording.meta.instructions);
        let mut all = intervals(self.places()?, end);
        if self.recording.meta.ending == RecordingEnding::Cut {
            // Behind the last checkpoint the log ends in the middle, and a QEMU that reads on there
            // ends too.
            all.retain(|interval| interval.end.is_some());
        }
        if all.is_empty() {
            return Err(Failure::new(
                "the recording was cut before its second checkpoint: no interval is left to replay",
            )
            .fix("record it again with --checkpoint-every"));
        }
        Ok(all)
    }

    /// Its intervals for a tool, which is to see the same whenever they are replayed; with ends
    /// where a replay can stand and go on if that is wanted.
    pub fn intervals_for_tool(&self, with_standing: bool) -> Result<Vec<Interval>, Failure> {
        let all = self.intervals()?;
        let all = if self.ends_with_log()? {
            all
        } else {
            with_unambiguous_last_end(all, self.boundaries()?)
        };
        if with_standing { self.with_unambiguous_ends(&all) } else { Ok(all) }
    }

    /// `all` with ends where a replay can stand and go on.
    pub fn with_unambiguous_ends(&self, all: &[Interval]) -> Result<Vec<Interval>, Failure> {
        Ok(with_unambiguous_ends(all, self.boundaries()?))
    }
}

/// The checkpoints of `recording` in `store`, by instruction.
pub fn places_in(store: &Store, recording: &Recording) -> Result<Vec<RecordedCheckpoint>, Failure> {
    Ok(sealed_in(store, recording)?.into_iter().map(|(place, _)| place).collect())
}

/// The same, with what each tells about itself.
pub fn sealed_in(
    store: &Store,
    recording: &Recording,
) -> Result<Vec<(RecordedCheckpoint, Sealed)>, Failure> {
    let listing = store.checkpoints().map_err(|e| Failure::store(&e, store.path()))?;
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
pub fn copy_places(from: &Store, places: &[RecordedCheckpoint], to: &Store) -> Result<(), Failure> {
    let ids = places.iter().map(|place| place.checkpoint).collect();
    from.copy_to(to, &ids, &mut |_| ()).map(drop).map_err(|e| Failure::store(&e, to.path()))
}

/// Of a recording that was followed, and that nobody makes any more: its first checkpoint is in the
/// store with the others, and nowhere else.
pub fn adopt_first(recording: &Recording, store: &Store, key: &KeyArg) -> Result<(), Failure> {
    let place = recording.first_store_path();
    if !place.exists() {
        return Ok(());
    }
    if places_in(store, recording)?.is_empty() {
        let first = key.open(&place).map_err(|e| Failure::store(&e, &place))?;
        copy_places(&first, &places_in(&first, recording)?, store)?;
    }
    std::fs::remove_dir_all(&place)
        .map_err(|e| Failure::new(format!("remove {}: {e}", place.display())))
}
