//! `keyframe log`: what a recorded guest wrote to its console, by instruction.

use super::recorded::RecordedArgs;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use crate::replaying::{Reached, Replay, Source, With, jobs, until};
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::Interval;
use keyframe_replay::{Console, log, read_output};
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// More than any guest says.
const CONSOLE_BYTES_MAX: u64 = 1 << 30;

/// Print a recorded guest's console, by instruction
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each line is told with the instruction at which its last byte was written. The log says when bytes were written, a replay says
which: the first call replays the recording, all intervals side by side, and keeps what they wrote in REC/console.log. Where a
guest has several serial consoles, the first is told.

Exit codes: 0 there is such a line, 1 none has the marker.

Examples:
  keyframe log R
  keyframe log R --marker 'login:'
  keyframe log R --json | jq '.lines[] | select(.last > 1000000000)'"
)]
pub struct Log {
    #[command(flatten)]
    recorded: RecordedArgs,
    /// Only lines that hold this text
    #[arg(long, value_name = "TEXT")]
    marker: Option<String>,
    /// Print them as JSON
    #[arg(long)]
    json: bool,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
}

/// As `--json` shows them.
#[derive(Serialize)]
struct Report {
    recording: String,
    lines: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    /// Instructions before its first byte.
    first: u64,
    /// Before its last one.
    last: u64,
    text: String,
}

impl Log {
    /// Prints them.
    pub fn run(&self) -> Outcome {
        let source = self.recorded.open()?;
        let failed = |e| Failure::recording(&e);
        let path = source.recording.console_path();
        if !path.exists() {
            self.replay(&source, &path)?;
        }
        let written = read_output(&path, CONSOLE_BYTES_MAX).map_err(failed)?;
        let events = log::open(source.log()).map_err(failed)?;
        let console = Console::new(events, &written).map_err(failed)?;
        if console.unplaced_bytes > 0 && !self.quiet {
            eprintln!(
                "keyframe: warning: {} bytes at the end are nowhere in the log: the guest has another console, or {} is not \
                 this recording's; remove it to have it made again",
                console.unplaced_bytes,
                path.display()
            );
        }
        let holds = |text: &str| self.marker.as_ref().is_none_or(|marker| text.contains(marker));
        let lines: Vec<Line> = console
            .lines
            .into_iter()
            .filter(|line| holds(&line.text))
            .map(|line| Line { first: line.first, last: line.last, text: line.text })
            .collect();
        let found = !lines.is_empty();
        if self.json {
            output::json(&Report { recording: source.recording.meta.id.clone(), lines })?;
        } else {
            for line in &lines {
                // What a guest writes is not to move the cursor of whoever reads it.
                let text: String = line
                    .text
                    .chars()
                    .map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c })
                    .collect();
                output::print_line(&format!("{:>14}  {text}", line.last))?;
            }
        }
        match &self.marker {
            Some(marker) if !found => {
                if !self.quiet {
                    eprintln!("keyframe: no line of the console holds {marker:?}");
                }
                Ok(FAILED)
            }
            _ => Ok(DONE),
        }
    }

    /// Has the intervals write what the guest wrote in them, and puts it together at `path`.
    fn replay(&self, source: &Source, path: &Path) -> Result<(), Failure> {
        let intervals = source.with_standing_ends(&source.intervals()?)?;
        let interrupted = jobs::interruption()?;
        let bar = if self.quiet || self.json {
            indicatif::ProgressBar::hidden()
        } else {
            jobs::bar("replaying", intervals.iter().map(Interval::len).sum())
        };
        let mut parts = jobs::side_by_side(&intervals, self.recorded.jobs, &interrupted, |interval| {
            let part = part(source, interval, &interrupted);
            bar.inc(interval.len());
            (interval.index, part)
        });
        bar.finish_and_clear();
        if interrupted.load(Ordering::Relaxed) {
            return Err(Failure::new("interrupted"));
        }
        parts.sort_by_key(|(index, _)| *index);
        let mut all = Vec::new();
        for (index, part) in parts {
            let part = part.map_err(|failure| failure.about(&format!("interval {index}")))?;
            all.extend(part);
        }
        // Whole or not at all.
        let temporary = path.with_extension("part");
        let failed = |e| Failure::new(format!("write {}: {e}", temporary.display()));
        std::fs::write(&temporary, all).map_err(failed)?;
        std::fs::rename(&temporary, path).map_err(|e| Failure::new(format!("write {}: {e}", path.display())))
    }
}

/// What the guest wrote in `interval`.
fn part(source: &Source, interval: &Interval, interrupted: &AtomicBool) -> Result<Vec<u8>, Failure> {
    let folder = tempfile::Builder::new().prefix("keyframe-console-").tempdir();
    let folder = folder.map_err(|e| Failure::new(format!("make a directory for a console: {e}")))?;
    let path = folder.path().join("console");
    let with = With { console: Some(path.clone()), lazy: true, ..With::default() };
    let read = || read_output(&path, CONSOLE_BYTES_MAX).map_err(|e| Failure::recording(&e));
    let end = until(interval);
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
        return Err(Failure::new("interrupted"));
    }
    replay.end()?;
    Ok(read()?.split_off(before))
}
