//! Where a replay that takes checkpoints is to stand: known from the log's whole, or found while it
//! is still being written.

use crate::error::Result;
use keyframe_replay::interval::RecordedCheckpoint;
use keyframe_replay::log::LogIndex;
use keyframe_replay::{GrowingLog, Recording};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often it is looked whether a log has grown.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How often it is looked whether anybody still records.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// The way of such a replay.
pub trait Course {
    /// The next cut behind `icount`; none where the log ends before, or somebody has interrupted
    /// the wait for it.
    fn next_cut(&mut self, icount: u64, interrupted: &AtomicBool) -> Result<Option<u64>>;

    /// The first place behind the next answer of a disk, where it can stand; none as above.
    fn behind_answer(&mut self, icount: u64, interrupted: &AtomicBool) -> Result<Option<u64>>;

    /// Whether there is a checkpoint of `icount` already: a cut that waits for a disk's answer may
    /// move beyond the next cut, which has none of its own then.
    fn is_there(&self, icount: u64) -> bool;
}

/// Over a log that is whole.
pub struct Known<'a> {
    /// The cuts, rising.
    pub cuts: &'a [u64],
    /// What the log says of them.
    pub boundaries: &'a LogIndex,
    /// The checkpoints that there are.
    pub places: &'a [RecordedCheckpoint],
}

impl Course for Known<'_> {
    fn next_cut(&mut self, icount: u64, _interrupted: &AtomicBool) -> Result<Option<u64>> {
        Ok(self.cuts.get(self.cuts.partition_point(|cut| *cut <= icount)).copied())
    }

    fn behind_answer(&mut self, icount: u64, _interrupted: &AtomicBool) -> Result<Option<u64>> {
        Ok(self.boundaries.next_unambiguous_after_disk_answer(icount))
    }

    fn is_there(&self, icount: u64) -> bool {
        self.places.binary_search_by_key(&icount, |place| place.icount).is_ok()
    }
}

/// Over a log that is being written.
pub struct Live {
    growing: GrowingLog,
    recording: Recording,
    has_ended: bool,
}

impl Live {
    /// Over the log of `recording`.
    pub fn new(growing: GrowingLog, recording: Recording) -> Self {
        Self { growing, recording, has_ended: false }
    }

    /// Waits until `find` finds something in the log, or that has ended without.
    fn wait_for(
        &mut self,
        interrupted: &AtomicBool,
        find: &mut dyn FnMut(&mut GrowingLog) -> Option<u64>,
    ) -> Result<Option<u64>> {
        let mut asked = Instant::now();
        loop {
            let has_grown = self.growing.refresh()?;
            if let Some(found) = find(&mut self.growing) {
                return Ok(Some(found));
            }
            if self.growing.is_complete() || self.has_ended || interrupted.load(Ordering::Relaxed) {
                return Ok(None);
            }
            if !has_grown && asked.elapsed() > ASK_EVERY {
                asked = Instant::now();
                // Once more round the loop: what it wrote last may have come between the two looks.
                self.has_ended = self.recording.has_ended()?;
                if self.has_ended {
                    self.growing.end();
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Course for Live {
    fn next_cut(&mut self, icount: u64, interrupted: &AtomicBool) -> Result<Option<u64>> {
        self.wait_for(interrupted, &mut |growing| {
            // One that the wait for a disk's answer has moved beyond is none any more.
            std::iter::from_fn(|| growing.next_cut()).find(|cut| *cut > icount)
        })
    }

    fn behind_answer(&mut self, icount: u64, interrupted: &AtomicBool) -> Result<Option<u64>> {
        self.wait_for(interrupted, &mut |growing| {
            growing.index().next_unambiguous_after_disk_answer(icount)
        })
    }

    fn is_there(&self, _icount: u64) -> bool {
        // It follows from the beginning on.
        false
    }
}
