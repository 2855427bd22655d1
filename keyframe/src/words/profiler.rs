//! The words for the events of a measurement.

use crate::failure::chain;
use indicatif::ProgressBar;
use keyframe_event_text::session::unguarded;
use keyframe_profiler::{EventSink, ProfilerEvent};

/// Moves a progress bar, and prints warnings above it.
#[derive(Clone, Debug)]
pub struct ProfilerWords {
    /// The bar, in milliseconds.
    pub bar: ProgressBar,
}

impl EventSink<ProfilerEvent> for ProfilerWords {
    fn event(&self, event: &ProfilerEvent) {
        match event {
            ProfilerEvent::GuestStarted => self.bar.set_message("waiting for the guest"),
            ProfilerEvent::UnguardedAttach { qemu_pid } => {
                if let Some((_, text)) = unguarded(*qemu_pid) {
                    self.bar.suspend(|| eprintln!("keyframe: {text}"));
                }
            }
            ProfilerEvent::NotEnded { error } => {
                self.bar.suspend(|| eprintln!("keyframe: warning: {}", chain(error)));
            }
            ProfilerEvent::EpochsBegin { vcpus, total } => {
                self.bar.set_message(
                    vcpus.map_or_else(|| "measuring".into(), |n| format!("measuring, {n} vCPUs")),
                );
                self.bar.set_length(total.as_millis() as u64);
                self.bar.set_position(0);
            }
            ProfilerEvent::EpochMeasured { length } => self.bar.inc(length.as_millis() as u64),
            _ => {}
        }
    }
}
