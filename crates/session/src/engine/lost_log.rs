//! A recorded VM whose QEMU has lost parts of its log: the recording ends there, and the VM runs on.

use super::{Engine, Event, Instant, Ordering};
use crate::error::CheckpointError;

impl Engine<'_> {
    /// Returns true while a checkpoint of this run is of use.
    pub(super) fn takes_checkpoints(&self) -> bool {
        !self.given_up && !self.has_lost_log()
    }

    /// Returns true if QEMU has lost parts of the recording's log.
    pub(super) fn has_lost_log(&self) -> bool {
        let recorded = self.options.recorded.as_ref();
        recorded.is_some_and(|recorded| recorded.has_lost_log.load(Ordering::Relaxed))
    }

    /// Shows in the status that the recording has ended early, and tells it once.
    pub(super) fn look_at_log(&mut self) {
        if !self.has_lost_log() {
            return;
        }
        let text = CheckpointError::LogLost.to_string();
        // Each time: the seal of a checkpoint that was under way clears it.
        self.update(|status| status.last_error = Some(text));
        if self.said_log_lost.is_none() {
            self.said_log_lost = Some(Instant::now());
            self.tell(&Event::LogLost);
        }
    }
}
