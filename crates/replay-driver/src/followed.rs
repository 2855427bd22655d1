//! A recording whose intervals are looked into while it is still made.
//!
//! ```text
//!   log         ──────────────────────────────────────┤ as far as QEMU has written it
//!   checkpoints 0         1         2         3    (4: sealed, but the log does not reach it)
//!   intervals   [    0    ][    1    ][    2    ]     whole: nothing that is still to come changes them
//! ```
//!
//! When it has ended, it is a recording like all others, and the rest of its intervals comes about.

use super::source::{Source, places_in};
use crate::error::{Error, Result};
use crate::event::SharedEventSink;
use keyframe_locks::IgnorePoison;
use keyframe_replay::cut_points::CutSpacing;
use keyframe_replay::interval::{Interval, intervals, with_unambiguous_ends};
use keyframe_replay::{GrowingLog, Recording};
use keyframe_store::Store;
use keyframe_store_keys::KeyArg;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

/// It.
pub struct Followed {
    /// The recording, as it was when it was opened.
    pub recording: Recording,
    /// Where its checkpoints come about.
    pub store: Store,
    place: Option<PathBuf>,
    key: KeyArg,
    events: SharedEventSink,
    growing: Mutex<Option<GrowingLog>>,
    ended: OnceLock<Arc<Source>>,
}

impl Followed {
    /// The recording at `path`, with the store that it names, or another one. None where that store
    /// is not there yet: the recording has just begun.
    pub fn open(
        path: &Path,
        store: Option<&Path>,
        key: &KeyArg,
        events: SharedEventSink,
    ) -> Result<Option<Self>> {
        let recording = Recording::open(path)?;
        let place = store.map_or_else(|| recording.store_path(), Path::to_owned);
        let opened = match key.open(&place) {
            Err(keyframe_store::Error::NoStore { .. }) if store.is_none() => return Ok(None),
            other => other.map_err(|e| Error::store(&place, e))?,
        };
        let (place, key) = (store.map(Path::to_owned), key.clone());
        let (growing, ended) = (Mutex::new(None), OnceLock::new());
        Ok(Some(Self { recording, store: opened, place, key, events, growing, ended }))
    }

    /// It as one can replay it now.
    pub fn now(&self) -> Result<Arc<Source>> {
        if let Some(source) = self.ended()? {
            return Ok(source);
        }
        let boundaries = self.look(|growing| growing.index().clone())?.unwrap_or_default();
        Ok(Arc::new(Source::so_far(&self.recording, self.store.clone(), boundaries)))
    }

    /// It, where nobody makes it any more.
    fn ended(&self) -> Result<Option<Arc<Source>>> {
        if let Some(source) = self.ended.get() {
            return Ok(Some(Arc::clone(source)));
        }
        if self.recording.is_in_progress()? {
            return Ok(None);
        }
        let source =
            Source::open(self.recording.path(), self.place.as_deref(), &self.key, &*self.events)?;
        Ok(Some(Arc::clone(self.ended.get_or_init(|| Arc::new(source)))))
    }

    /// Its intervals that are whole, with ends where a replay can stand and go on if that is
    /// wanted; and whether these are all.
    pub fn intervals(&self, with_standing: bool) -> Result<(Vec<Interval>, bool)> {
        if let Some(source) = self.ended()? {
            return Ok((source.intervals_for_tool(with_standing)?, true));
        }
        // Before the log is looked at: it reaches what was sealed, or soon does.
        let places = places_in(&self.store, &self.recording)?;
        let whole = |growing: &GrowingLog| {
            let end = growing.last_stop();
            let known = places.iter().filter(|place| place.icount < end).copied().collect();
            let all = intervals(known, end);
            if with_standing { with_unambiguous_ends(&all, growing.index()) } else { all }
        };
        let mut all = self.look(whole)?.unwrap_or_default();
        // What ends with the log as it is now.
        all.pop();
        Ok((all, false))
    }

    /// What a replay of each of `intervals`, which are whole, takes ([`Interval::effort`]).
    pub fn efforts(&self, intervals: &[Interval]) -> Result<Vec<u64>> {
        if let Some(source) = self.ended()? {
            return source.efforts(intervals);
        }
        let of = |growing: &GrowingLog| {
            intervals.iter().map(|one| one.effort(growing.index())).collect()
        };
        let efforts = self.look(of)?;
        Ok(efforts.unwrap_or_else(|| intervals.iter().map(Interval::len).collect()))
    }

    /// The log as it is now; none where QEMU has written nothing.
    fn look<T>(&self, look: impl FnOnce(&GrowingLog) -> T) -> Result<Option<T>> {
        let mut growing = self.growing.lock().ignore_poison();
        if growing.is_none() {
            let (log, times) = (self.recording.log_path(), self.recording.times_path());
            *growing = GrowingLog::open(&log, &times, CutSpacing::Instructions(u64::MAX))?;
        }
        let Some(growing) = growing.as_mut() else { return Ok(None) };
        growing.refresh()?;
        Ok(Some(look(growing)))
    }
}
