//! A recording whose intervals are replayed while it is still being made.
//!
//! ```text
//!   log         ──────────────────────────────────────┤ as far as QEMU has written it
//!   checkpoints 0         1         2         3    (4: sealed, but the log does not reach it)
//!   intervals   [    0    ][    1    ][    2    ]     complete: no later event changes them
//! ```
//!
//! After its end it is a recording like all others, and its last intervals appear.

use crate::error::{Error, Result};
use crate::event::SharedReplayEventSink;
use crate::{KnownIntervals, ReplayableRecording, checkpoints_in};
use keyframe_locks::IgnorePoison;
use keyframe_replay::cut_points::CutSpacing;
use keyframe_replay::interval::{Interval, intervals, with_unambiguous_ends};
use keyframe_replay::{GrowingLog, Recording};
use keyframe_store::Store;
use keyframe_store_keys::KeyArg;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

/// A recording that may still be in progress.
pub struct LiveRecording {
    /// The recording, as it was when it was opened.
    pub recording: Recording,
    /// The store in which its checkpoints appear.
    pub store: Store,
    /// The store that the caller named.
    named_store: Option<PathBuf>,
    key: KeyArg,
    events: SharedReplayEventSink,
    growing: Mutex<Option<GrowingLog>>,
    ended: OnceLock<Arc<ReplayableRecording>>,
}

impl LiveRecording {
    /// Opens the recording at `path` with the store that it names, or with `store`. Returns `None`
    /// if the recording has just begun, and the store that it names does not exist yet. Errors: the
    /// recording or the store cannot be opened.
    pub fn open(
        path: &Path,
        store: Option<&Path>,
        key: &KeyArg,
        events: SharedReplayEventSink,
    ) -> Result<Option<Self>> {
        let recording = Recording::open(path)?;
        let place = store.map_or_else(|| recording.store_path(), Path::to_owned);
        let opened = match key.open(&place) {
            Err(keyframe_store::Error::NoStore { .. }) if store.is_none() => return Ok(None),
            other => other.map_err(|e| Error::store(&place, e))?,
        };
        Ok(Some(Self {
            recording,
            store: opened,
            named_store: store.map(Path::to_owned),
            key: key.clone(),
            events,
            growing: Mutex::new(None),
            ended: OnceLock::new(),
        }))
    }

    /// Returns the part of the recording that can be replayed now: all of it if the recording is
    /// complete. Error: the recording or its store cannot be read.
    pub fn now(&self) -> Result<Arc<ReplayableRecording>> {
        if let Some(recording) = self.ended()? {
            return Ok(recording);
        }
        let log_index = self.look(|growing| growing.index().clone())?.unwrap_or_default();
        let store = self.store.clone();
        Ok(Arc::new(ReplayableRecording::so_far(&self.recording, store, log_index)))
    }

    /// Returns the complete recording; `None` while it is still being made.
    fn ended(&self) -> Result<Option<Arc<ReplayableRecording>>> {
        if let Some(recording) = self.ended.get() {
            return Ok(Some(Arc::clone(recording)));
        }
        if self.recording.is_in_progress()? {
            return Ok(None);
        }
        let store = self.named_store.as_deref();
        let path = self.recording.path();
        let recording = ReplayableRecording::open(path, store, &self.key, &*self.events)?;
        Ok(Some(Arc::clone(self.ended.get_or_init(|| Arc::new(recording)))))
    }

    /// Returns the recording's complete intervals. If `needs_exact_ends`, each ends where a replay
    /// can stop and go on. Error: the log or the store cannot be read.
    pub fn intervals(&self, needs_exact_ends: bool) -> Result<KnownIntervals> {
        if let Some(recording) = self.ended()? {
            let intervals = recording.intervals_for_tool(needs_exact_ends)?;
            return Ok(KnownIntervals { intervals, is_complete: true });
        }
        // The checkpoints are listed before the log is read: the log reaches what was sealed, or
        // soon does.
        let checkpoints = checkpoints_in(&self.store, &self.recording)?;
        let complete = |growing: &GrowingLog| {
            let end = growing.last_stop();
            let reached = checkpoints.iter().filter(|one| one.icount < end).copied().collect();
            let all = intervals(reached, end);
            if needs_exact_ends { with_unambiguous_ends(&all, growing.index()) } else { all }
        };
        let mut intervals = self.look(complete)?.unwrap_or_default();
        // The last one ends where the log ends now.
        intervals.pop();
        Ok(KnownIntervals { intervals, is_complete: false })
    }

    /// Returns the work of the replay of each of `intervals`, which are complete, in instructions
    /// ([`Interval::effort`]). Error: the log cannot be read.
    pub fn efforts(&self, intervals: &[Interval]) -> Result<Vec<u64>> {
        if let Some(recording) = self.ended()? {
            return recording.efforts(intervals);
        }
        let of = |growing: &GrowingLog| {
            intervals.iter().map(|one| one.effort(growing.index())).collect()
        };
        let efforts = self.look(of)?;
        Ok(efforts.unwrap_or_else(|| intervals.iter().map(Interval::len).collect()))
    }

    /// Calls `look` with the log as it is now. Returns `None` if QEMU has not written to it yet.
    fn look<T>(&self, look: impl FnOnce(&GrowingLog) -> T) -> Result<Option<T>> {
        let mut growing = self.growing.lock().ignore_poison();
        if growing.is_none() {
            let spacing = CutSpacing::Instructions(u64::MAX);
            *growing = GrowingLog::of(&self.recording, spacing)?;
        }
        let Some(growing) = growing.as_mut() else { return Ok(None) };
        growing.refresh()?;
        Ok(Some(look(growing)))
    }
}
