//! `keyframe log`: what a recorded guest wrote to its console, by instruction.

use super::recorded::RecordedArgs;
use crate::failure::{DONE, FAILED, Outcome};
use crate::output;
use serde::Serialize;

/// Print a recorded guest's console, by instruction
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each line is printed with the instruction at which its last byte was written. The log of a recording has only the instants of the
writes. The bytes come from a replay: the first call replays all intervals side by side, and keeps their output in
REC/console.log. If the guest has several serial consoles, the first one is printed.

Exit codes: 0 a line was printed, 1 no line has the marker.

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
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

/// The output of `--json`.
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
        let console = self.recorded.console(&source, !self.quiet && !self.json)?;
        if console.unplaced_bytes > 0 && !self.quiet {
            eprintln!(
                "keyframe: warning: {} bytes at the end are nowhere in the log: the guest has another console, or {} is not \
                 this recording's; remove it to have it made again",
                console.unplaced_bytes,
                source.recording.console_path().display()
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
                // The guest's output must not move the cursor of the user's terminal.
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
}
