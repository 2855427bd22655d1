//! The cuts of a replay: the instructions at which it takes checkpoints. They are known from a
//! complete log, or found in a log that is still being written.

use crate::error::Result;
use keyframe_replay::interval::RecordedCheckpoint;
use keyframe_replay::log::LogIndex;
use keyframe_replay::{GrowingLog, Recording};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a log is looked at for growth.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How often it is checked that the recorder still runs.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// The source of a replay's cuts. All instructions are counted from the recording's beginning.
pub trait CutSource {
    /// Returns the next cut after `icount`. Returns `None` if the log ends before it, or if
    /// `interrupted` became true during the wait for it. Error: the log cannot be read.
    fn next_cut(&mut self, icount: u64, interrupted: &AtomicBool) -> Result<Option<u64>>;

    /// Returns the first instruction after the next answer of a disk at which a replay can stop.
    /// Returns `None` if the log ends before it, or if `interrupted` became true during the wait
    /// for it. Error: the log cannot be read.
    fn next_after_disk_answer(
        &mut self,
        icount: u64,
        interrupted: &AtomicBool,
    ) -> Result<Option<u64>>;

    /// Returns true if there is a checkpoint of `icount` already. A cut that waits for a disk's
    /// answer can move past the next cut, which then has no checkpoint of its own.
    fn has_checkpoint_at(&self, icount: u64) -> bool;
}

/// The cuts in a complete log.
pub struct CompleteLogCuts<'a> {
    /// The cuts, in rising order, as instructions.
    pub cuts: &'a [u64],
    /// The log's index.
    pub log_index: &'a LogIndex,
    /// The checkpoints that exist, by instruction.
    pub checkpoints: &'a [RecordedCheckpoint],
}

impl CutSource for CompleteLogCuts<'_> {
    fn next_cut(&mut self, icount: u64, _interrupted: &AtomicBool) -> Result<Option<u64>> {
        Ok(self.cuts.get(self.cuts.partition_point(|cut| *cut <= icount)).copied())
    }

    fn next_after_disk_answer(
        &mut self,
        icount: u64,
        _interrupted: &AtomicBool,
    ) -> Result<Option<u64>> {
        Ok(self.log_index.next_unambiguous_after_disk_answer(icount))
    }

    fn has_checkpoint_at(&self, icount: u64) -> bool {
        self.checkpoints.binary_search_by_key(&icount, |checkpoint| checkpoint.icount).is_ok()
    }
}

/// The cuts in a log that is still being written.
pub struct GrowingLogCuts {
    growing: GrowingLog,
    recording: Recording,
    has_ended: bool,
}

impl GrowingLogCuts {
    /// Creates the source of the cuts in `growing`, the log of `recording`.
    pub fn new(growing: GrowingLog, recording: Recording) -> Self {
        Self { growing, recording, has_ended: false }
    }

    /// Waits until `find` finds an instruction in the log. Returns `None` if the log ends before.
    fn wait_for(
        &mut self,
        interrupted: &AtomicBool,
        find: &mut dyn FnMut(&mut GrowingLog) -> Option<u64>,
    ) -> Result<Option<u64>> {
        let mut checked = Instant::now();
        loop {
            let has_grown = self.growing.refresh()?;
            if let Some(found) = find(&mut self.growing) {
                return Ok(Some(found));
            }
            if self.growing.is_complete() || self.has_ended || interrupted.load(Ordering::Relaxed) {
                return Ok(None);
            }
            if !has_grown && checked.elapsed() > CHECK_EVERY {
                checked = Instant::now();
                // The loop goes round once more: the recorder may have written its last events
                // between the two looks.
                self.has_ended = self.recording.has_ended()?;
                if self.has_ended {
                    self.growing.end();
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl CutSource for GrowingLogCuts {
    fn next_cut(&mut self, icount: u64, interrupted: &AtomicBool) -> Result<Option<u64>> {
        self.wait_for(interrupted, &mut |growing| {
            // The wait for a disk's answer can have moved behind a cut, which is skipped then.
            std::iter::from_fn(|| growing.next_cut()).find(|cut| *cut > icount)
        })
    }

    fn next_after_disk_answer(
        &mut self,
        icount: u64,
        interrupted: &AtomicBool,
    ) -> Result<Option<u64>> {
        self.wait_for(interrupted, &mut |growing| {
            growing.index().next_unambiguous_after_disk_answer(icount)
        })
    }

    /// The replay follows from the beginning, so that no checkpoint exists before it comes there.
    fn has_checkpoint_at(&self, _icount: u64) -> bool {
        false
    }
}
