//! The constants of the speed-up model, from a recording and an analysis of it.
//!
//! ```text
//!   recording's checkpoints ──▶ pauses, ready times, bytes ─┐
//!                                                           ├─▶ RecordingMeasurements ─▶ the model
//!   analysis' parts ──────────▶ times of simulations, fit ──┘
//! ```

use crate::analysis::IntervalTiming;
use crate::error::{AnalysisError, Result};
use crate::event::{EventSink, ReplayEvent};
use crate::replayable_recording::was_taken_live;
use crate::{ReplayableRecording, previous_timings, sealed_checkpoints_in};
use jiff::{SignedDuration, Timestamp};
use keyframe_model::simulation::SimulatedInterval;
use keyframe_model::{Constants, SlowdownFit, TimedSimulation, fit_slowdown};
use keyframe_replay::RecordingMeta;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_store::Sealed;
use keyframe_store_keys::KeyArg;
use keyframe_units::CheckpointId;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Below that, the length of an interval says little about how long its simulation takes.
const R_SQUARED_MIN: f64 = 0.5;

/// The measurements of one interval, as a cluster needs them.
#[derive(Clone, Debug)]
pub struct MeasuredInterval {
    /// The time at which it could be simulated, in seconds since the recording began: its end's
    /// checkpoint is sealed. If that checkpoint was taken later, from a replay, it is the time at
    /// which its end was recorded, by its instructions.
    pub ready_s: f64,
    /// The time for which the VM ran in it while it was recorded, in seconds: between its
    /// checkpoints, without the pause of the first one. If its checkpoints were taken later, from a
    /// replay, it is its part of the whole time by its instructions.
    pub length_s: f64,
    /// The time of its simulation, in seconds; `None` if it is not done yet.
    pub took_s: Option<f64>,
    /// The number of bytes of all RAM.
    pub ram_bytes: f64,
    /// The number of bytes in the store for its checkpoint and those before it.
    pub stored_bytes: f64,
    /// The number of bytes that the store got since the checkpoint of the interval before.
    pub new_bytes: f64,
}

/// The measurements of a recording and an analysis.
#[derive(Clone, Debug, Serialize)]
pub struct RecordingMeasurements {
    /// The recording's time without its pauses, in seconds.
    pub recorded_s: f64,
    /// The number of checkpoints that were taken while it was recorded.
    pub checkpoints: u64,
    /// The mean pause of these checkpoints, in seconds; `None` if there are none.
    pub pause_s: Option<f64>,
    /// The number of intervals of the analysis.
    pub intervals: u64,
    /// The line through the times of the intervals; `None` if it cannot be fitted.
    pub fit: Option<SlowdownFit>,
    /// All intervals, those that are not done included.
    #[serde(skip)]
    pub pieces: Vec<MeasuredInterval>,
}

impl RecordingMeasurements {
    /// Reads the measurements of the recording at `path` and of the analysis in `analysis`. If its
    /// recorder was killed, this completes the recording, and tells `events`.
    ///
    /// # Errors
    ///
    /// [`AnalysisError::AnotherRecording`], [`AnalysisError::NoIntervalDone`], and the errors of
    /// reading the recording, its store or the analysis.
    pub fn read(
        path: &Path,
        store: Option<&Path>,
        key: &KeyArg,
        analysis: Option<&Path>,
        events: &dyn EventSink<ReplayEvent>,
    ) -> Result<Self> {
        let source = ReplayableRecording::open(path, store, key, events)?;
        let checkpoints = sealed_checkpoints_in(&source.store, &source.recording)?;
        let meta = &source.recording.meta;
        let pauses_s = pauses_s(&checkpoints);
        let paused_s: f64 = pauses_s.iter().sum();
        let recorded_s = meta.duration_ns as f64 / 1e9 - paused_s;
        let mut measurements = Self {
            recorded_s,
            checkpoints: pauses_s.len() as u64,
            pause_s: (!pauses_s.is_empty()).then(|| paused_s / pauses_s.len() as f64),
            intervals: 0,
            fit: None,
            pieces: Vec::new(),
        };
        let lengths = RecordedLengths::new(meta, &checkpoints, recorded_s);
        let (mut all, mut took_s) = (Vec::new(), BTreeMap::new());
        if let Some(dir) = analysis {
            let (head, done) = previous_timings(dir)?;
            if head.recording != meta.id {
                return Err(AnalysisError::AnotherRecording(dir.to_owned()).into());
            }
            let times = timed_simulations(&head.intervals, &done, &lengths);
            measurements.intervals = times.len() as u64;
            let fit = fit_slowdown(&times);
            measurements.fit =
                Some(fit.ok_or_else(|| AnalysisError::NoIntervalDone(dir.to_owned()))?);
            took_s = done.iter().map(|one| (one.index, one.wall_ns as f64 / 1e9)).collect();
            all = head.intervals;
        }
        if all.is_empty() {
            // A recording that has not been cut yet is one interval, or none.
            all = source.intervals().unwrap_or_default();
        }
        measurements.pieces = pieces(meta, &checkpoints, &all, (&took_s, &lengths));
        Ok(measurements)
    }

    /// Returns true if the line through the intervals says little about them.
    pub fn fits_badly(&self) -> bool {
        self.fit.is_some_and(|fit| fit.r_squared < R_SQUARED_MIN)
    }

    /// Returns the recorded time of all intervals, in seconds.
    pub fn length_s(&self) -> f64 {
        self.pieces.iter().map(|piece| piece.length_s).sum()
    }

    /// Returns the intervals for a simulated cluster. Those that are not done take as long as
    /// `constants` say. If `sends_all`, a node gets the whole RAM with its first checkpoint,
    /// otherwise the stored bytes.
    pub fn simulated_intervals(
        &self,
        constants: &Constants,
        sends_all: bool,
    ) -> Vec<SimulatedInterval> {
        let interval = |piece: &MeasuredInterval| SimulatedInterval {
            ready_s: piece.ready_s,
            work_s: piece.took_s.unwrap_or_else(|| constants.simulation(piece.length_s)),
            image_bytes: if sends_all {
                piece.ram_bytes
            } else {
                piece.stored_bytes.min(piece.ram_bytes)
            },
            new_bytes: piece.new_bytes,
        };
        self.pieces.iter().map(interval).collect()
    }
}

/// The pauses of the recorded VM, in seconds. The pauses of a replay do not delay the recording, and
/// the first checkpoint is taken before the VM runs.
fn pauses_s(checkpoints: &[(RecordedCheckpoint, Sealed)]) -> Vec<f64> {
    let delayed = |(place, sealed): &&(RecordedCheckpoint, Sealed)| {
        was_taken_live(sealed) && place.icount > 0
    };
    let paused = checkpoints.iter().filter(delayed);
    paused.map(|(_, sealed)| sealed.meta.timing.pause_ns as f64 / 1e9).collect()
}

/// The recorded times of intervals.
struct RecordedLengths<'a> {
    /// The checkpoints that were taken while the VM was recorded.
    taken: BTreeMap<CheckpointId, &'a Sealed>,
    /// The end of the recording.
    ended_at: Timestamp,
    /// The recorded time of an instruction in the mean, in seconds.
    each_s: f64,
}

impl<'a> RecordedLengths<'a> {
    /// `recorded_s` is the whole time without pauses, in seconds.
    fn new(
        meta: &RecordingMeta,
        checkpoints: &'a [(RecordedCheckpoint, Sealed)],
        recorded_s: f64,
    ) -> Self {
        let taken = checkpoints.iter().filter(|(_, sealed)| was_taken_live(sealed));
        let length =
            SignedDuration::from_nanos(i64::try_from(meta.duration_ns).unwrap_or(i64::MAX));
        Self {
            taken: taken.map(|(place, sealed)| (place.checkpoint, sealed)).collect(),
            ended_at: meta.began_at.saturating_add(length).unwrap_or(meta.began_at),
            each_s: recorded_s / meta.instructions.max(1) as f64,
        }
    }

    /// Returns the recorded time of `interval`, in seconds.
    fn of(&self, interval: &Interval) -> f64 {
        self.between_checkpoints(interval).unwrap_or(interval.len() as f64 * self.each_s)
    }

    fn between_checkpoints(&self, interval: &Interval) -> Option<f64> {
        let begin = self.taken.get(&interval.begin.checkpoint)?;
        let ended_at = match interval.end {
            Some(end) => self.taken.get(&end)?.meta.taken_at,
            None => self.ended_at,
        };
        let taken_s = ended_at.duration_since(begin.meta.taken_at).as_secs_f64();
        let length_s = taken_s - begin.meta.timing.pause_ns as f64 / 1e9;
        // The wall clock was set in between: the difference is useless.
        (length_s > 0.0).then_some(length_s)
    }
}

/// The recorded time and the time of the simulation of each interval that is done, in seconds.
fn timed_simulations(
    intervals: &[Interval],
    done: &[IntervalTiming],
    lengths: &RecordedLengths<'_>,
) -> Vec<TimedSimulation> {
    let timed = |one: &IntervalTiming| {
        let interval = intervals.iter().find(|interval| interval.index == one.index)?;
        let recorded_s = lengths.of(interval);
        Some(TimedSimulation { recorded_s, simulated_s: one.wall_ns as f64 / 1e9 })
    };
    done.iter().filter_map(timed).collect()
}

fn pieces(
    meta: &RecordingMeta,
    checkpoints: &[(RecordedCheckpoint, Sealed)],
    all: &[Interval],
    (took_s, lengths): (&BTreeMap<u32, f64>, &RecordedLengths<'_>),
) -> Vec<MeasuredInterval> {
    let duration_s = meta.duration_ns as f64 / 1e9;
    let ready_s = |interval: &Interval| {
        let end = checkpoints.iter().find(|(place, _)| Some(place.checkpoint) == interval.end);
        match end {
            Some((_, sealed)) if was_taken_live(sealed) => {
                let timing = &sealed.meta.timing;
                let taken_s = sealed.meta.taken_at.duration_since(meta.began_at).as_secs_f64();
                (taken_s + (timing.pause_ns + timing.encode_ns) as f64 / 1e9).max(0.0)
            }
            _ => duration_s * interval.end_icount as f64 / meta.instructions.max(1) as f64,
        }
    };
    let sums = byte_sums(checkpoints);
    let mut before = 0.0;
    all.iter()
        .map(|interval| {
            let (stored_bytes, ram_bytes) = sums.get(&interval.begin).copied().unwrap_or_default();
            let new_bytes = (stored_bytes - before).max(0.0);
            before = stored_bytes;
            MeasuredInterval {
                ready_s: ready_s(interval),
                length_s: lengths.of(interval),
                took_s: took_s.get(&interval.index).copied(),
                ram_bytes,
                stored_bytes,
                new_bytes,
            }
        })
        .collect()
}

/// For each checkpoint, the bytes in the store for it and those before it, and the bytes of its RAM.
fn byte_sums(
    checkpoints: &[(RecordedCheckpoint, Sealed)],
) -> BTreeMap<RecordedCheckpoint, (f64, f64)> {
    let mut sum = 0.0;
    let add = |(place, sealed): &(RecordedCheckpoint, Sealed)| {
        let counts = &sealed.meta.counts;
        let of_disks: u64 = sealed.meta.disks.iter().map(|disk| disk.counts.stored_bytes).sum();
        sum += (counts.stored_bytes + counts.map_bytes + counts.device_bytes + of_disks) as f64;
        (*place, (sum, sealed.meta.ram.len_bytes() as f64))
    };
    checkpoints.iter().map(add).collect()
}
