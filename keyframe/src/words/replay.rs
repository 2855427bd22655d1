//! The words for the events of replays and analyses.

use indicatif::ProgressBar;
use keyframe_event_text::replay::line;
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
