//! The model's constants, from what a recording and an analysis of it took.

use crate::failure::Failure;
use crate::words::replay::ReplayWords;
use keyframe_model::{Fit, fit_slowdown};
use keyframe_replay::RecordingMeta;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_replay_driver::{ReplayableRecording, previous_timings, sealed_checkpoints_in};
use keyframe_store::Sealed;
use keyframe_store_keys::KeyArg;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Below that, the length of an interval says little about how long its simulation takes.
const R_SQUARED_LEAST: f64 = 0.5;

/// An interval, as a cluster would get it.
#[derive(Clone, Debug)]
pub struct Piece {
    /// When it could be simulated, in seconds since the recording began: its end's checkpoint is
    /// sealed. Where that was taken later, from a replay: its end is recorded, by its instructions.
    pub ready_s: f64,
    /// Its part of the recorded time, by its instructions.
    pub length_s: f64,
    /// How long its simulation took; none: it is not done yet.
    pub took_s: Option<f64>,
    /// All of the RAM.
    pub ram_bytes: f64,
    /// What the store has got for its checkpoint and those before it.
    pub stored_bytes: f64,
    /// What it got since that of the interval before.
    pub new_bytes: f64,
}

/// The measurements of a recording and an analysis.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The recording's time without its pauses, in seconds.
    pub recorded_s: f64,
    /// Checkpoints that were taken while it was recorded.
    pub checkpoints: u64,
    /// Their mean pause, in seconds.
    pub pause_s: Option<f64>,
    /// Intervals of the analysis.
    pub intervals: u64,
    /// The line through them.
    pub fit: Option<Fit>,
    /// All of them, and those that are not done.
    #[serde(skip)]
    pub pieces: Vec<Piece>,
}

impl Measured {
    /// Reads the measurements of the recording at `path` and of the analysis in `analysis`.
    pub fn of(
        path: &Path,
        store: Option<&Path>,
        key: &KeyArg,
        analysis: Option<&Path>,
    ) -> Result<Self, Failure> {
        let source = ReplayableRecording::open(path, store, key, &ReplayWords::default())?;
        let mut pauses = Vec::new();
        let checkpoints = sealed_checkpoints_in(&source.store, &source.recording)?;
        for (place, sealed) in &checkpoints {
            // Pauses of a replay do not delay the recording, and the first checkpoint is taken before
            // the VM runs.
            if sealed.meta.reason != "segment" && place.icount > 0 {
                pauses.push(sealed.meta.timing.pause_ns as f64 / 1e9);
            }
        }
        let meta = &source.recording.meta;
        let paused_s: f64 = pauses.iter().sum();
        let recorded_s = meta.duration_ns as f64 / 1e9 - paused_s;
        let mut measured = Self {
            recorded_s,
            checkpoints: pauses.len() as u64,
            pause_s: (!pauses.is_empty()).then(|| paused_s / pauses.len() as f64),
            intervals: 0,
            fit: None,
            pieces: Vec::new(),
        };
        let each_s = recorded_s / meta.instructions.max(1) as f64;
        let (mut all, mut took) = (Vec::new(), BTreeMap::new());
        if let Some(dir) = analysis {
            let (head, done) = previous_timings(dir)?;
            if head.recording != meta.id {
                return Err(Failure::new(format!(
                    "{} is an analysis of another recording",
                    dir.display()
                ))
                .fix("name one that keyframe analyze has made of this one"));
            }
            let length =
                |index: u32| head.intervals.iter().find(|i| i.index == index).map(Interval::len);
            let pairs: Vec<(f64, f64)> = done
                .iter()
                .filter_map(|one| {
                    Some((length(one.index)? as f64 * each_s, one.wall_ns as f64 / 1e9))
                })
                .collect();
            (measured.intervals, measured.fit) = (pairs.len() as u64, fit_slowdown(&pairs));
            if measured.fit.is_none() {
                return Err(Failure::new(format!(
                    "{} has no interval that is done",
                    dir.display()
                ))
                .fix("let keyframe analyze do some first"));
            }
            took = done.iter().map(|one| (one.index, one.wall_ns as f64 / 1e9)).collect();
            all = head.intervals;
        }
        if all.is_empty() {
            // A recording that has not been cut yet is one interval, or none.
            all = source.intervals().unwrap_or_default();
        }
        measured.pieces = pieces(meta, &checkpoints, &all, (&took, each_s));
        Ok(measured)
    }

    /// Whether the line through the intervals says little about them.
    pub fn fits_badly(&self) -> bool {
        self.fit.is_some_and(|fit| fit.r_squared < R_SQUARED_LEAST)
    }

    /// Returns the measurements as a line for users.
    pub fn line(&self) -> String {
        let pause = self.pause_s.map_or_else(String::new, |pause| {
            format!("; {} checkpoints, a pause of {:.1} ms each", self.checkpoints, pause * 1e3)
        });
        let fit = self.fit.map_or_else(String::new, |fit| {
            let poor = if self.fits_badly() {
                ": a poor fit, so that --t-i and --s-sim are better given, and --simulate takes the intervals as they are"
            } else {
                ""
            };
            format!(
                "; {} intervals simulated in {:.2} s and {:.2} s for each second (R^2 {:.2}{poor})",
                self.intervals, fit.t_i, fit.slowdown, fit.r_squared
            )
        });
        format!("measured: {:.1} s recorded{pause}{fit}", self.recorded_s)
    }
}

fn pieces(
    meta: &RecordingMeta,
    checkpoints: &[(RecordedCheckpoint, Sealed)],
    all: &[Interval],
    (took, each_s): (&BTreeMap<u32, f64>, f64),
) -> Vec<Piece> {
    let duration_s = meta.duration_ns as f64 / 1e9;
    let ready_s = |interval: &Interval| {
        let end = checkpoints.iter().find(|(place, _)| Some(place.checkpoint) == interval.end);
        match end {
            Some((_, sealed)) if sealed.meta.reason != "segment" => {
                let timing = &sealed.meta.timing;
                let taken_s = sealed.meta.taken_at.duration_since(meta.began_at).as_secs_f64();
                (taken_s + (timing.pause_ns + timing.encode_ns) as f64 / 1e9).max(0.0)
            }
            _ => duration_s * interval.end_icount as f64 / meta.instructions.max(1) as f64,
        }
    };
    // What each checkpoint brought, and all up to it.
    let mut sum = 0.0;
    let sums: BTreeMap<RecordedCheckpoint, (f64, f64)> = checkpoints
        .iter()
        .map(|(place, sealed)| {
            let counts = &sealed.meta.counts;
            let of_disks: u64 = sealed.meta.disks.iter().map(|disk| disk.counts.stored_bytes).sum();
            sum += (counts.stored_bytes + counts.map_bytes + counts.device_bytes + of_disks) as f64;
            (*place, (sum, sealed.meta.ram.len_bytes() as f64))
        })
        .collect();
    let mut before = 0.0;
    all.iter()
        .map(|interval| {
            let (stored_bytes, ram_bytes) = sums.get(&interval.begin).copied().unwrap_or_default();
            let new_bytes = (stored_bytes - before).max(0.0);
            before = stored_bytes;
            Piece {
                ready_s: ready_s(interval),
                length_s: interval.len() as f64 * each_s,
                took_s: took.get(&interval.index).copied(),
                ram_bytes,
                stored_bytes,
                new_bytes,
            }
        })
        .collect()
}
