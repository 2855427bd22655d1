//! Recordings with their intervals, and the progress of analyses.
//!
//! A named directory is a recording or an analysis itself, or it holds some, one level deep.

use super::{locked, said, stores::Stores};
use keyframe_replay::interval::{Interval, RecordedCheckpoint, intervals};
use keyframe_replay::{Recording, RecordingEnding};
use keyframe_replay_driver::{IntervalState, interval_states};
use keyframe_store::CheckpointId;
use keyframe_web::chunks;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The time for which an answer is used again.
const KEPT: Duration = Duration::from_secs(2);
/// The most pieces in which intervals are shown.
const PIECES_MAX: usize = 300;
/// Recordings and analyses that are shown at most.
const SHOWN_MAX: usize = 200;

/// The recordings and analyses that the dashboard shows.
pub struct Recordings {
    named: Vec<PathBuf>,
    analyses: Vec<PathBuf>,
    kept: Mutex<Option<(Instant, Value)>>,
}

impl Recordings {
    /// Creates the list from the directories in which [`Recordings::all`] looks. Reads nothing yet.
    pub fn new(recordings: Vec<PathBuf>, analyses: Vec<PathBuf>) -> Self {
        Self { named: recordings, analyses, kept: Mutex::default() }
    }

    /// Returns all recordings as JSON, each with its intervals and analyses, and the analyses of
    /// other recordings. `stores` holds the recordings' checkpoints.
    pub fn all(&self, stores: &Stores) -> Value {
        let mut kept = locked(&self.kept);
        if let Some((at, all)) = &*kept
            && at.elapsed() < KEPT
        {
            return all.clone();
        }
        let mut analyses: Vec<(String, Value)> =
            places(&self.analyses, "analysis.json").iter().map(|place| analysis(place)).collect();
        let mut recordings = Vec::new();
        for place in places(&self.named, "recording.json") {
            let mut shown = recording(&place, stores);
            let id = shown.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
            let is_of_it = |one: &(String, Value)| !id.is_empty() && one.0 == id;
            let of_it: Vec<Value> =
                analyses.extract_if(.., |one| is_of_it(one)).map(|(_, one)| one).collect();
            if let Some(object) = shown.as_object_mut() {
                object.insert("analyses".into(), json!(of_it));
            }
            recordings.push(shown);
        }
        let others: Vec<Value> = analyses.into_iter().map(|(_, one)| one).collect();
        let all = json!({ "recordings": recordings, "analyses": others });
        *kept = Some((Instant::now(), all.clone()));
        all
    }
}

/// The directories with a file `mark`, among `named` and in them.
fn places(named: &[PathBuf], mark: &str) -> Vec<PathBuf> {
    let mut found = BTreeSet::new();
    for place in named {
        if place.join(mark).is_file() || !place.is_dir() {
            found.insert(place.clone());
            continue;
        }
        let inside =
            std::fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path());
        found.extend(inside.filter(|place| place.join(mark).is_file()));
    }
    found.into_iter().take(SHOWN_MAX).collect()
}

fn recording(place: &Path, stores: &Stores) -> Value {
    let path = place.display().to_string();
    let recording = match Recording::open(place) {
        Ok(recording) => recording,
        Err(e) => return json!({ "path": path, "problem": said(&e, e.fix()) }),
    };
    let meta = &recording.meta;
    let store = recording.store_path();
    let id = stores.name(BTreeSet::from([store.clone()])).remove(&store);
    let listed = id.as_deref().and_then(|id| stores.get(id));
    let recorded =
        listed.map(|listed| listed.recorded(&meta.id)).and_then(Result::ok).unwrap_or_default();
    let place = |one: &super::listed::RecordedEntry| RecordedCheckpoint {
        icount: one.icount,
        checkpoint: CheckpointId(one.checkpoint),
    };
    // While it is made, its newest checkpoint is the last known position.
    let newest = recorded.iter().map(|one| one.icount).max().unwrap_or(0);
    let instructions =
        if meta.ending == RecordingEnding::Recording { newest } else { meta.instructions };
    let all = intervals(recorded.iter().map(place).collect(), instructions);
    json!({
        "path": path,
        "id": meta.id,
        "vm": meta.vm,
        "began_at": meta.began_at,
        "duration_ns": meta.duration_ns,
        "ending": meta.ending,
        "is_being_made": recording.is_recorder_running().unwrap_or(false),
        "instructions": instructions,
        "log_bytes": meta.log_bytes,
        "stored_log_bytes": recording.stored_log_bytes(),
        "store": id,
        "checkpoints": recorded.len(),
        "intervals": all.len(),
        "pieces": pieces(&all),
    })
}

/// Groups of intervals in a row, few enough to be drawn.
fn pieces(all: &[Interval]) -> Vec<Value> {
    let of = |piece: std::ops::Range<usize>| {
        let (first, last) = (all[piece.start], all[piece.end - 1]);
        json!({
            "first": first.index,
            "last": last.index,
            "checkpoint": first.begin.checkpoint,
            "from_icount": first.from_icount,
            "end_icount": last.end_icount,
        })
    };
    chunks(all.len(), PIECES_MAX).map(of).collect()
}

/// The progress of an analysis, and the recording that it is of.
fn analysis(place: &Path) -> (String, Value) {
    let path = place.display().to_string();
    let (head, states) = match interval_states(place) {
        Ok(found) => found,
        Err(error) => {
            let problem = said(&error, error.fix());
            return (String::new(), json!({ "path": path, "problem": problem }));
        }
    };
    let count = |wanted| states.iter().filter(|state| **state == wanted).count();
    let pieces = chunks(states.len(), PIECES_MAX).map(|piece| {
        let some = &states[piece.clone()];
        let of = |wanted| some.iter().filter(|state| **state == wanted).count();
        json!({ "first": piece.start, "last": piece.end - 1, "done": of(IntervalState::Done), "failed": of(IntervalState::Failed) })
    });
    let shown = json!({
        "path": path,
        "tool": head.tool,
        "arguments": head.arguments,
        "is_approximate": head.is_approximate,
        "intervals": states.len(),
        "done": count(IntervalState::Done),
        "failed": count(IntervalState::Failed),
        "pieces": pieces.collect::<Vec<_>>(),
    });
    (head.recording, shown)
}
