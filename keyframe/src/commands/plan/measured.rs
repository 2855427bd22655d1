//! The model's constants, from what a recording and an analysis of it took.

use crate::failure::Failure;
use crate::keys::KeyArg;
use crate::replaying::{Source, made_before, sealed_in};
use keyframe_model::{Fit, fit};
use keyframe_replay::interval::Interval;
use serde::Serialize;
use std::path::Path;

/// Below that, the length of an interval says little about how long its simulation takes.
const R_SQUARED_LEAST: f64 = 0.5;

/// What was measured.
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
}

impl Measured {
    /// That of the recording at `path`, and of the analysis in `analysis`.
    pub fn of(
        path: &Path,
        store: Option<&Path>,
        key: &KeyArg,
        analysis: Option<&Path>,
    ) -> Result<Self, Failure> {
        let source = Source::open(path, store, key)?;
        let mut pauses = Vec::new();
        for (place, sealed) in sealed_in(&source.store, &source.recording)? {
            // A replay's pauses are nobody's, and the first checkpoint comes before the VM runs.
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
        };
        if let Some(dir) = analysis {
            let (head, done) = made_before(dir)?;
            if head.recording != meta.id {
                return Err(Failure::new(format!("{} is an analysis of another recording", dir.display()))
                    .fix("name one that keyframe analyze has made of this one"));
            }
            let each_s = recorded_s / meta.instructions.max(1) as f64;
            let length = |index: u32| head.intervals.iter().find(|i| i.index == index).map(Interval::len);
            let pairs: Vec<(f64, f64)> = done
                .iter()
                .filter_map(|one| Some((length(one.index)? as f64 * each_s, one.wall_ns as f64 / 1e9)))
                .collect();
            (measured.intervals, measured.fit) = (pairs.len() as u64, fit(&pairs));
            if measured.fit.is_none() {
                return Err(Failure::new(format!("{} has no interval that is done", dir.display()))
                    .fix("let keyframe analyze do some first"));
            }
        }
        Ok(measured)
    }

    /// For people.
    pub fn line(&self) -> String {
        let pause = self.pause_s.map_or_else(String::new, |pause| {
            format!("; {} checkpoints, a pause of {:.1} ms each", self.checkpoints, pause * 1e3)
        });
        let fit = self.fit.map_or_else(String::new, |fit| {
            let poor = if fit.r_squared < R_SQUARED_LEAST {
                ": a poor fit, so that --t-i and --s-sim are better given"
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
