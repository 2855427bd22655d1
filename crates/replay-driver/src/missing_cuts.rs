//! The checkpoints that a recording still lacks, and those that it has not written yet.

use crate::error::{Error, Result};
use crate::replayable_recording::ReplayableRecording;
use keyframe_replay::Recording;
use keyframe_replay::interval::RecordedCheckpoint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The time between two looks at a recording.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Returns those of the cuts `wanted` (instructions, rising) for which `present` has no checkpoint: at
/// the cut, or behind it and before the next one.
pub fn missing_cuts(present: &[RecordedCheckpoint], wanted: &[u64]) -> Vec<u64> {
    let is_there = |cut: u64, next: Option<&u64>| {
        let from = present.partition_point(|place| place.icount < cut);
        present.get(from).is_some_and(|place| next.is_none_or(|next| place.icount < *next))
    };
    let numbered = (0..).zip(wanted);
    let missing = numbered.filter(|(n, cut)| !is_there(**cut, wanted.get(n + 1)));
    missing.map(|(_, cut)| *cut).collect()
}

/// Returns the checkpoint before the first instruction among `present`, the checkpoints of `source`.
/// Error: [`Error::NoFirstCheckpoint`].
pub fn first_checkpoint(
    present: &[RecordedCheckpoint],
    source: &ReplayableRecording,
) -> Result<RecordedCheckpoint> {
    let first = present.first().filter(|first| first.icount == 0).copied();
    first.ok_or_else(|| Error::NoFirstCheckpoint(source.store.path().to_owned()))
}

/// Returns the name of the VM that follows `recording`. Another recording of the same VM may be
/// followed at the same time, so the name has a part of the recording's id.
pub fn follower_name(recording: &Recording) -> String {
    let first = |text: &str, count| text.chars().take(count).collect::<String>();
    format!("{}-follower-{}", first(&recording.meta.vm, 40), first(&recording.meta.id, 8))
}

/// Waits for something that a recording has not written yet.
pub struct RecordingWait<'a> {
    /// The recording.
    pub recording: &'a Recording,
    /// Set to true to end the wait.
    pub interrupted: &'a AtomicBool,
}

impl RecordingWait<'_> {
    /// Waits until `find` finds `what`, and returns it. Errors: that of `find`;
    /// [`Error::Interrupted`]; [`Error::EndedBefore`] if the recording ends without it.
    pub fn until<T>(&self, what: &'static str, find: impl Fn() -> Result<Option<T>>) -> Result<T> {
        loop {
            let has_ended = self.recording.has_ended()?;
            if let Some(found) = find()? {
                return Ok(found);
            }
            if self.interrupted.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            if has_ended {
                return Err(Error::EndedBefore(what));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::CheckpointId;

    #[test]
    fn a_checkpoint_a_little_behind_its_cut_is_not_missing() {
        let present = [0, 105, 300, 410]
            .map(|icount| RecordedCheckpoint { icount, checkpoint: CheckpointId(1) });
        assert_eq!(missing_cuts(&present, &[100, 200, 300, 400]), [200]);
        assert_eq!(missing_cuts(&present, &[420]), [420]);
        assert_eq!(missing_cuts(&[], &[1, 2]), [1, 2]);
    }
}
