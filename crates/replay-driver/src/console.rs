//! What a recorded guest wrote to its console. Replays find it out once; a file keeps it.

use crate::error::{Error, Result};
use crate::event::{EventSink, ReplayEvent};
use crate::{Replay, ReplayOptions, ReplayableRecording, StopReason, jobs};
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::Interval;
use keyframe_replay::{Console, log, read_console_output};
use keyframe_scratch_directory::ScratchDirectory;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// The longest console that is read, in bytes.
const CONSOLE_BYTES_MAX: u64 = 1 << 30;

/// Returns the lines of the guest's console. The first call replays the recording for them, `jobs`
/// intervals at a time (as many as there are cores if `None`), and keeps them in the recording's
/// directory. `events` learns how far these replays are.
///
/// Errors: a replay fails; the file with the lines is damaged or cannot be written.
pub fn console(
    recording: &ReplayableRecording,
    jobs: Option<u64>,
    events: &dyn EventSink<ReplayEvent>,
) -> Result<Console> {
    let path = recording.recording.console_path();
    if !path.exists() {
        replay_all(recording, &path, jobs, events)?;
    }
    let written = read_console_output(&path, CONSOLE_BYTES_MAX)?;
    let log = log::open(recording.log())?;
    Ok(Console::new(log, &written)?)
}

/// Replays all intervals, and joins what the guest wrote in them in the file at `path`.
fn replay_all(
    recording: &ReplayableRecording,
    path: &Path,
    jobs: Option<u64>,
    events: &dyn EventSink<ReplayEvent>,
) -> Result<()> {
    let intervals = recording.with_unambiguous_ends(&recording.intervals()?)?;
    let interrupted = jobs::interruption()?;
    let instructions = intervals.iter().map(Interval::len).sum();
    events.event(&ReplayEvent::ReplaysBegin { instructions });
    let mut parts =
        jobs::for_each_interval(recording, &intervals, jobs, &interrupted, |interval| {
            let output = output_of(recording, interval, &interrupted);
            events.event(&ReplayEvent::Replayed { instructions: interval.len() });
            (interval.index, output)
        })?;
    if interrupted.load(Ordering::Relaxed) {
        return Err(Error::Interrupted);
    }
    parts.sort_by_key(|(index, _)| *index);
    let mut all = Vec::new();
    for (index, output) in parts {
        let output = output.map_err(|e| Error::InInterval { index, source: Box::new(e) })?;
        all.extend(output);
    }
    // The file appears as a whole, or not at all.
    let temporary = path.with_extension("part");
    std::fs::write(&temporary, all).map_err(|e| Error::file("write", &temporary, e))?;
    std::fs::rename(&temporary, path).map_err(|e| Error::file("write", path, e))
}

/// Replays `interval`, and returns what the guest wrote in it.
fn output_of(
    recording: &ReplayableRecording,
    interval: &Interval,
    interrupted: &AtomicBool,
) -> Result<Vec<u8>> {
    let folder = ScratchDirectory::new("console");
    let folder = folder.map_err(|e| Error::io("make a directory for a console", e))?;
    let path = folder.path().join("console");
    let options =
        ReplayOptions { console: Some(path.clone()), lazy: true, ..ReplayOptions::default() };
    let read = || read_console_output(&path, CONSOLE_BYTES_MAX);
    let end = recording.until(interval.end_icount)?;
    let warms_up = interval.begin.icount < interval.from_icount;
    let first = if warms_up { Until::Instruction(interval.from_icount) } else { end };
    let mut replay = Replay::start(recording, interval.begin, first, &options)?;
    let mut reached = replay.arrive(interrupted, &mut |_| ())?;
    let mut before = 0;
    if warms_up && reached != StopReason::Interrupted {
        before = read()?.len();
        reached = replay.go_on(end, interrupted, &mut |_| ())?;
    }
    if reached == StopReason::Interrupted {
        return Err(Error::Interrupted);
    }
    replay.end()?;
    Ok(read()?.split_off(before))
}
