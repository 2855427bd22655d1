//! What a recorded guest wrote to its console: put together by replays, once.

use super::{Reached, Replay, Source, With, jobs};
use crate::error::{Error, Result};
use crate::event::{Event, EventSink};
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::Interval;
use keyframe_replay::{Console, log, read_console_output};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// More than any guest says.
const CONSOLE_BYTES_MAX: u64 = 1 << 30;

/// The console's lines. Where nobody asked before, the recording is replayed for it, `jobs`
/// intervals at a time.
pub fn console(source: &Source, jobs: Option<u64>, events: &dyn EventSink) -> Result<Console> {
    let path = source.recording.console_path();
    if !path.exists() {
        replay(source, &path, jobs, events)?;
    }
    let written = read_console_output(&path, CONSOLE_BYTES_MAX)?;
    let log = log::open(source.log())?;
    Ok(Console::new(log, &written)?)
}

/// Has the intervals write what the guest wrote in them, and puts it together at `path`.
fn replay(source: &Source, path: &Path, jobs: Option<u64>, events: &dyn EventSink) -> Result<()> {
    let intervals = source.with_unambiguous_ends(&source.intervals()?)?;
    let interrupted = jobs::interruption()?;
    let instructions = intervals.iter().map(Interval::len).sum();
    events.event(&Event::ReplaysBegin { instructions });
    let mut parts = jobs::side_by_side(source, &intervals, jobs, &interrupted, |interval| {
        let part = part(source, interval, &interrupted);
        events.event(&Event::Replayed { instructions: interval.len() });
        (interval.index, part)
    })?;
    if interrupted.load(Ordering::Relaxed) {
        return Err(Error::Interrupted);
    }
    parts.sort_by_key(|(index, _)| *index);
    let mut all = Vec::new();
    for (index, part) in parts {
        let part = part.map_err(|e| Error::InInterval { index, source: Box::new(e) })?;
        all.extend(part);
    }
    // Whole or not at all.
    let temporary = path.with_extension("part");
    std::fs::write(&temporary, all).map_err(|e| Error::file("write", &temporary, e))?;
    std::fs::rename(&temporary, path).map_err(|e| Error::file("write", path, e))
}

/// What the guest wrote in `interval`.
fn part(source: &Source, interval: &Interval, interrupted: &AtomicBool) -> Result<Vec<u8>> {
    let folder = tempfile::Builder::new().prefix("keyframe-console-").tempdir();
    let folder = folder.map_err(|e| Error::io("make a directory for a console", e))?;
    let path = folder.path().join("console");
    let with = With { console: Some(path.clone()), lazy: true, ..With::default() };
    let read = || read_console_output(&path, CONSOLE_BYTES_MAX).map_err(Error::from);
    let end = source.until(interval.end_icount)?;
    let warms_up = interval.begin.icount < interval.from_icount;
    let first = if warms_up { Until::Instruction(interval.from_icount) } else { end };
    let mut replay = Replay::start(source, interval.begin, first, &with)?;
    let mut reached = replay.arrive(interrupted, &mut |_| ())?;
    let mut before = 0;
    if warms_up && reached != Reached::Interrupted {
        before = read()?.len();
        reached = replay.go_on(end, interrupted, &mut |_| ())?;
    }
    if reached == Reached::Interrupted {
        return Err(Error::Interrupted);
    }
    replay.end()?;
    Ok(read()?.split_off(before))
}
