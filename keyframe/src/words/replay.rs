//! The words for the events of replays and analyses.

use crate::failure::{Failure, chain};
use indicatif::ProgressBar;
use keyframe_replay_driver::{EventSink, ReplayEvent};

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

impl EventSink<ReplayEvent> for ReplayWords {
    fn event(&self, event: &ReplayEvent) {
        match (event, &self.bar) {
            (ReplayEvent::ReplaysBegin { instructions }, Some(bar)) => {
                bar.set_length(*instructions);
            }
            (ReplayEvent::Replayed { instructions }, Some(bar)) => bar.inc(*instructions),
            _ => {}
        }
        if let Some(text) = line(event) {
            self.print(&text);
        }
    }
}

/// The line for `event`; `None` if it is not worth a line.
fn line(event: &ReplayEvent) -> Option<String> {
    Some(match event {
        ReplayEvent::RecorderKilled { recording } => format!(
            "{}: its recorder was killed; it ends with what QEMU had written by then",
            recording.display()
        ),
        ReplayEvent::IntervalFailed { index, error } => {
            let fix = error.fix();
            let failure = Failure { fix, ..Failure::new(chain(error)) };
            format!("interval {index}: {failure}")
        }
        ReplayEvent::IntervalWithoutPart { index, reason } => format!("interval {index}: {reason}"),
        ReplayEvent::DebuggerLost { error } => chain(error),
        ReplayEvent::DebuggerWriteRefused => {
            "the debugger wants to write registers or memory: what is \
                                        recorded cannot be changed"
                .into()
        }
        ReplayEvent::DivergedUnderDebugger { icount } => format!(
            "the replay has come off its log at instruction {icount}: go back from there, by one \
             instruction, and on"
        ),
        _ => return None,
    })
}
