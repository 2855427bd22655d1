//! Makes the parts of a range: neighbouring intervals, in one QEMU.
//!
//! ```text
//!   QEMU at the checkpoint of 4 ──▶ 4 │ 5 ──▶ 5 │ 6 ──▶ 6 │ another worker has 7: QEMU ends
//!                                     └ cut       └ cut
//!                                     publish 4   publish 5          publish 6
//! ```
//!
//! A range takes interval after interval from those that are open. Other workers take from the same
//! ones, so a range ends where another worker has begun.
//!
//! Invariant: when a run fails, the intervals that it had begun are made one by one, each in a QEMU
//! of its own, so that one interval that fails costs no other one its part.

use super::Analysis;
use super::files::{QEMU_LOG, empty_dir, qemu_messages};
use super::parts::{Began, PartMaker, PartTiming, RangeBegin, RunCaller, Tries, finished};
use crate::StartTimes;
use crate::error::{AnalysisError, Error, Result};
use keyframe_analysis::Part;
use keyframe_cluster::Slot;
use keyframe_replay::interval::Interval;
use keyframe_units::elapsed_ns;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// An interval of a range that has begun, and has no part yet.
#[derive(Clone, Copy)]
struct BegunInterval {
    interval: Interval,
    began: Began,
    /// The time that it took, in nanoseconds; `None` while it runs.
    wall_ns: Option<u64>,
}

/// A run through a range.
struct RangeRun<'a> {
    analysis: &'a Analysis<'a>,
    maker: PartMaker<'a>,
    slot: &'a Slot<'a>,
    /// The directory of the run.
    dir: &'a Path,
    begun: VecDeque<BegunInterval>,
    /// How long the start took, until a part has it.
    start: Option<StartTimes>,
    /// A part could not be published.
    failed_to_publish: bool,
}

impl Analysis<'_> {
    /// Makes the part of `first`, which `slot` has, and, as far as `slot` can take them, of the
    /// intervals after it, and publishes each part, or the reason why it failed. `on_progress` is called now
    /// and then with the instruction that QEMU has reached.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] if `maker` was interrupted; other errors if the directory of the
    /// analysis or the queue cannot be read or written. A replay that fails is no error.
    pub fn make(
        &self,
        first: &Interval,
        slot: &Slot<'_>,
        maker: PartMaker<'_>,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        if !self.can_continue() {
            return self.make_alone(first, maker, Tries::default(), on_progress);
        }
        let dir = self.making_dir(first, maker);
        empty_dir(&dir)?;
        let begun = VecDeque::from([BegunInterval::now(*first)]);
        let mut run = RangeRun {
            analysis: self,
            maker,
            slot,
            dir: &dir,
            begun,
            start: None,
            failed_to_publish: false,
        };
        let range = RangeBegin { dir: &dir, first, may_continue: true };
        let ran = self.run_range(range, maker.interrupted, on_progress, &mut run);
        let messages = qemu_messages(&dir.join(QEMU_LOG));
        // No other process knows of this directory.
        let _ = std::fs::remove_dir_all(&dir);
        let error = match ran {
            Ok(()) => match run.begun.front() {
                None => return Ok(()),
                Some(one) => AnalysisError::NoPart(one.interval.index).into(),
            },
            Err(_) if maker.interrupted.load(Ordering::Relaxed) => return Err(Error::Interrupted),
            Err(error) if run.failed_to_publish => return Err(error),
            Err(error) => error,
        };
        let begun = run.begun;
        let mut made = Ok(());
        for (number, one) in begun.iter().enumerate() {
            let mut tries = Tries::default();
            // The last one ran when the run failed.
            let has_failed = number + 1 == begun.len();
            if has_failed {
                tries.add(Err(&error), &messages);
            }
            let interval = &one.interval;
            let one_made = if has_failed && tries.are_over(maker.tries_max) {
                empty_dir(&dir).and_then(|()| {
                    self.publish_failure(&dir, interval, &error, &tries.log, &messages)
                })
            } else {
                self.make_alone(interval, maker, tries, on_progress)
            };
            if matches!(one_made, Err(Error::Interrupted)) {
                return one_made;
            }
            made = made.and(one_made.and_then(|()| Ok(slot.settle(interval.index)?)));
        }
        made
    }

    /// Returns the interval that begins where `ended` ends; `None` if there is none yet.
    fn interval_after(&self, ended: &Interval) -> Option<Interval> {
        let next = self.interval(ended.index.checked_add(1)?).ok()?;
        (next.from_icount == ended.end_icount).then_some(next)
    }
}

impl BegunInterval {
    fn now(interval: Interval) -> Self {
        Self { interval, began: Began::now(), wall_ns: None }
    }
}

impl RunCaller for RangeRun<'_> {
    fn next(&mut self, ended: &Interval) -> Result<Option<Interval>> {
        if let Some(one) = self.begun.back_mut() {
            one.wall_ns = Some(elapsed_ns(one.began.instant));
        }
        if self.maker.interrupted.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let Some(next) = self.analysis.interval_after(ended) else { return Ok(None) };
        if !self.slot.take_number(next.index)? {
            return Ok(None);
        }
        self.begun.push_back(BegunInterval::now(next));
        Ok(Some(next))
    }

    fn started(&mut self, times: StartTimes) {
        self.start = Some(times);
    }

    fn take_parts(&mut self, parts: Vec<Part>) -> Result<()> {
        for part in parts {
            let published = self.publish(part);
            self.failed_to_publish |= published.is_err();
            published?;
        }
        Ok(())
    }
}

impl RangeRun<'_> {
    /// Publishes the part of the interval that began first.
    fn publish(&mut self, part: Part) -> Result<()> {
        let is_next = |one: &BegunInterval| one.interval.index == part.interval.index;
        let Some(BegunInterval { interval, began, wall_ns }) =
            self.begun.front().filter(|one| is_next(one)).copied()
        else {
            return Err(AnalysisError::NoPart(part.interval.index).into());
        };
        let mut dir = self.dir.to_owned().into_os_string();
        dir.push(format!(".{:06}", interval.index));
        let dir = PathBuf::from(dir);
        empty_dir(&dir)?;
        move_files(self.dir, &dir, &format!("{:06}.", interval.index))?;
        let wall_ns = wall_ns.unwrap_or_default();
        let mut tries = Tries::default();
        tries.add(Ok(wall_ns as f64 / 1e9), &qemu_messages(&self.dir.join(QEMU_LOG)));
        let timing = PartTiming { tries: tries.count, began, wall_ns, start: self.start.take() };
        let done = finished(&interval, self.maker, timing, vec![part]);
        let published = self.analysis.publish_done(&dir, &interval, &done, &tries.log);
        if published.is_err() {
            // No other process knows of this directory.
            let _ = std::fs::remove_dir_all(&dir);
        }
        published?;
        self.begun.pop_front();
        Ok(self.slot.settle(interval.index)?)
    }
}

/// Moves the files whose names begin with `prefix`.
fn move_files(from: &Path, to: &Path, prefix: &str) -> Result<()> {
    let failed = |e| Error::file("read", from, e);
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if name.to_string_lossy().starts_with(prefix) {
            let path = from.join(&name);
            std::fs::rename(&path, to.join(&name)).map_err(|e| Error::file("rename", &path, e))?;
        }
    }
    Ok(())
}
