//! The words for the events of replays and analyses.

use crate::failure::{Failure, chain};
use indicatif::ProgressBar;
use keyframe_replay_driver::{Event, EventSink};

/// Prints events to standard error, and moves a progress bar if there is one.
#[derive(Clone, Debug, Default)]
pub struct ReplayWords {
    bar: Option<ProgressBar>,
}

impl ReplayWords {
    /// Prints lines above `bar`, and moves it.
    pub fn above(bar: &ProgressBar) -> Self {
        Self { bar: Some(bar.clone()) }
    }

    fn print(&self, text: &str) {
        let print = || eprintln!("keyframe: {text}");
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

impl EventSink for ReplayWords {
    fn event(&self, event: &Event) {
        match (event, &self.bar) {
            (Event::ReplaysBegin { instructions }, Some(bar)) => bar.set_length(*instructions),
            (Event::Replayed { instructions }, Some(bar)) => bar.inc(*instructions),
            _ => {}
        }
        if let Some(text) = line(event) {
            self.print(&text);
        }
    }
}

/// The line for `event`; `None` if it is not worth a line.
fn line(event: &Event) -> Option<String> {
    Some(match event {
        Event::RecorderKilled { recording } => format!(
            "{}: its recorder was killed; it ends with what QEMU had written by then",
            recording.display()
        ),
        Event::IntervalFailed { index, error } => {
            let fix = error.fix();
            let failure = Failure { fix, ..Failure::new(chain(error)) };
            format!("interval {index}: {failure}")
        }
        Event::IntervalWithoutPart { index, reason } => format!("interval {index}: {reason}"),
        Event::DebuggerLost { error } => chain(error),
        Event::DebuggerWriteRefused => "the debugger wants to write registers or memory: what is \
                                        recorded cannot be changed"
            .into(),
        Event::DivergedUnderDebugger { icount } => format!(
            "the replay has come off its log at instruction {icount}: go back from there, by one \
             instruction, and on"
        ),
        _ => return None,
    })
}
