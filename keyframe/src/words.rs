//! Prints the events of the crates as lines on standard error.

pub mod failover;
pub mod profiler;
pub mod replay;

use keyframe_event_text::{Importance, failover as failover_text, session as session_text};
use keyframe_session::{Event, EventSink};
use std::sync::Arc;

/// Prints events to standard error, as far as the user wants to read them.
#[derive(Clone, Copy, Debug, Default)]
pub struct StderrWords {
    /// Print errors only.
    pub quiet: bool,
    /// Print a line for each checkpoint, too.
    pub verbose: bool,
}

impl StderrWords {
    /// Prints as the options `--quiet` and `--verbose` say.
    pub fn shared(quiet: bool, verbose: bool) -> Arc<Self> {
        Arc::new(Self { quiet, verbose })
    }
}

impl EventSink<Event> for StderrWords {
    fn event(&self, event: &Event) {
        if let Some((importance, text)) = session_text::line(event) {
            self.print(importance, &text);
        }
    }
}

impl keyframe_failover::FailoverEventSink for StderrWords {
    fn failover_event(&self, event: &keyframe_failover::FailoverEvent) {
        if let Some((importance, text)) = failover_text::line(event) {
            self.print(importance, &text);
        }
    }
}

impl StderrWords {
    /// Prints `text` if the user wants to read lines of this importance.
    pub fn print(self, importance: Importance, text: &str) {
        let is_wanted = match importance {
            Importance::Detail => self.verbose,
            Importance::Usual => !self.quiet,
            Importance::Always => true,
        };
        if is_wanted {
            eprintln!("keyframe: {text}");
        }
    }
}
