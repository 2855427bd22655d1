//! Chooses the instructions at which a recording without checkpoints is cut.
//!
//! ```text
//!   by instructions   every N-th instruction
//!   by time           every N seconds of the host's clock, from REC/times; between two times the
//!                     guest is assumed to run evenly
//! ```
//!
//! Each cut point then moves to the next unambiguous instruction ([`LogIndex`]), at which a replay
//! can stop and go on.

use crate::log::{self, LogEvent, LogIndex, PositionedEvent};
use crate::{Error, LogTimes, Result};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

/// The most cut points of a log, which may claim that years went by.
const CUTS_MAX: usize = 1 << 20;

/// The distance between two cut points of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutSpacing {
    /// A number of instructions, at least one.
    Instructions(u64),
    /// A time by the host's clock during the recording.
    Time(Duration),
}

/// A reading of the host's clock in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// The number of instructions that had run by then.
    pub icount: u64,
    /// The clock's value, in nanoseconds.
    pub ns: i64,
}

/// Returns the instructions at which the log at `log` is to be cut, rising, each within the log.
/// `times` is the path of the log's times, which only [`CutSpacing::Time`] needs.
///
/// Errors: [`Error::NoTimes`] if `times` is empty; [`Error::TooManyCuts`]; [`Error::Io`];
/// [`Error::Damaged`].
pub fn find_cut_points(
    log: &Path,
    times: &Path,
    spacing: CutSpacing,
    index: &LogIndex,
) -> Result<Vec<u64>> {
    let mut finder = CutFinder::new(spacing);
    if finder.is_by_time() {
        for_each_reading(log, times, &mut |reading| {
            finder.add_clock_reading(reading).map(ControlFlow::Continue)
        })?;
        if finder.last_reading.is_none() {
            return Err(Error::NoTimes { path: times.into() });
        }
    } else {
        let mut reader = log::open(log)?;
        while let Some(event) = reader.next_event()? {
            finder.add_event(event)?;
        }
    }
    Ok(std::iter::from_fn(|| finder.next_cut(index)).collect())
}

/// Returns the instruction at which the host's clock had advanced by `after` since the log began;
/// `None` if the log ends before.
///
/// Errors: [`Error::NoTimes`] if the file at `times` is empty; [`Error::Io`]; [`Error::Damaged`].
pub fn instruction_at_time(log: &Path, times: &Path, after: Duration) -> Result<Option<u64>> {
    let after_ns = i64::try_from(after.as_nanos()).unwrap_or(i64::MAX);
    let (mut due_ns, mut last, mut found) = (None, None, None);
    for_each_reading(log, times, &mut |reading| {
        let due_ns = *due_ns.get_or_insert(reading.ns.saturating_add(after_ns));
        let before = *last.get_or_insert(reading);
        if reading.ns >= due_ns {
            found = Some(interpolate(before, reading, due_ns));
            return Ok(ControlFlow::Break(()));
        }
        // The clock may have been set back.
        if reading.ns > before.ns {
            last = Some(reading);
        }
        Ok(ControlFlow::Continue(()))
    })?;
    match last {
        Some(_) => Ok(found),
        None => Err(Error::NoTimes { path: times.into() }),
    }
}

/// Calls `visit` with each of the log's times and the instruction up to which the log had been
/// written by then, until `visit` breaks.
fn for_each_reading(
    log: &Path,
    times: &Path,
    visit: &mut dyn FnMut(ClockReading) -> Result<ControlFlow<()>>,
) -> Result<()> {
    let mut reader = log::open(log)?;
    let mut times = LogTimes::open(times)?;
    loop {
        let icount = reader.icount();
        let has_event = reader.next_event()?.is_some();
        let until = if has_event { reader.offset() } else { u64::MAX };
        while let Some(ns) = times.next_before(until)? {
            if visit(ClockReading { icount, ns })?.is_break() {
                return Ok(());
            }
        }
        if !has_event {
            return Ok(());
        }
    }
}

/// Finds cut points in a log while the log is read event by event.
#[derive(Clone, Debug)]
pub struct CutFinder {
    spacing: CutSpacing,
    /// Cut points by spacing alone that [`CutFinder::next_cut`] has not returned yet.
    pending: VecDeque<u64>,
    /// Number of cut points by spacing so far.
    count: usize,
    /// The last cut point that was returned.
    last_cut: Option<u64>,
    last_reading: Option<ClockReading>,
    /// The clock at the next cut point.
    due_ns: i64,
}

impl CutFinder {
    /// Creates a finder that begins at the log's beginning.
    pub fn new(spacing: CutSpacing) -> Self {
        let pending = VecDeque::new();
        Self { spacing, pending, count: 0, last_cut: None, last_reading: None, due_ns: 0 }
    }

    /// Returns whether the cut points depend on the log's times.
    pub fn is_by_time(&self) -> bool {
        matches!(self.spacing, CutSpacing::Time(_))
    }

    /// Adds the log's next event.
    ///
    /// Error: [`Error::TooManyCuts`].
    pub fn add_event(&mut self, event: PositionedEvent) -> Result<()> {
        let (CutSpacing::Instructions(step), LogEvent::Instructions(_)) =
            (self.spacing, event.event)
        else {
            return Ok(());
        };
        let step = step.max(1);
        while let Some(next) =
            step.checked_mul(self.count as u64 + 1).filter(|next| *next <= event.icount)
        {
            self.push_pending(next)?;
        }
        Ok(())
    }

    fn push_pending(&mut self, icount: u64) -> Result<()> {
        if self.count == CUTS_MAX {
            return Err(Error::TooManyCuts { cuts_max: CUTS_MAX });
        }
        self.count += 1;
        self.pending.push_back(icount);
        Ok(())
    }

    /// Adds the next reading of the host's clock.
    ///
    /// Error: [`Error::TooManyCuts`].
    pub fn add_clock_reading(&mut self, reading: ClockReading) -> Result<()> {
        let CutSpacing::Time(step) = self.spacing else { return Ok(()) };
        let step_ns = i64::try_from(step.as_nanos()).unwrap_or(i64::MAX).max(1);
        let Some(before) = self.last_reading else {
            self.due_ns = reading.ns.saturating_add(step_ns);
            self.last_reading = Some(reading);
            return Ok(());
        };
        // The clock may have been set back.
        if reading.ns <= before.ns {
            return Ok(());
        }
        while self.due_ns <= reading.ns && self.due_ns < i64::MAX {
            self.push_pending(interpolate(before, reading, self.due_ns))?;
            // A guest that ran no instruction between the readings gets one cut point for all
            // steps.
            let missed = reading.ns.saturating_sub(self.due_ns) / step_ns;
            let is_idle = reading.icount == before.icount;
            let steps = if is_idle { missed.saturating_add(1) } else { 1 };
            self.due_ns = self.due_ns.saturating_add(step_ns.saturating_mul(steps));
        }
        self.last_reading = Some(reading);
        Ok(())
    }

    /// Returns the next cut point, moved to the next instruction that is unambiguous by `index`;
    /// `None` if that is not known yet.
    pub fn next_cut(&mut self, index: &LogIndex) -> Option<u64> {
        while let Some(&icount) = self.pending.front() {
            // The previous cut point may have moved beyond this one.
            if self.last_cut.is_none_or(|last| last < icount) {
                self.last_cut = Some(index.next_unambiguous(icount)?);
                self.pending.pop_front();
                return self.last_cut;
            }
            self.pending.pop_front();
        }
        None
    }
}

/// The instruction at clock `due_ns`, which lies between two readings: the guest is assumed to run
/// evenly between them.
fn interpolate(before: ClockReading, after: ClockReading, due_ns: i64) -> u64 {
    let all_ns = after.ns.saturating_sub(before.ns);
    if all_ns <= 0 {
        return after.icount;
    }
    let part = due_ns.saturating_sub(before.ns).max(0) as f64 / all_ns as f64;
    before.icount + (after.icount.saturating_sub(before.icount) as f64 * part) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log with its times.
    struct TimedLog {
        dir: tempfile::TempDir,
        index: LogIndex,
    }

    impl TimedLog {
        /// Runs of instructions, each with the clock at its end.
        fn new(runs: &[(u32, i64)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let events: Vec<_> =
                runs.iter().map(|(count, _)| [&[0][..], &count.to_be_bytes()].concat()).collect();
            let events: Vec<&[u8]> = events.iter().map(Vec::as_slice).collect();
            std::fs::write(dir.path().join("log"), log::tests::bytes(&events)).unwrap();
            let lines: Vec<_> = runs
                .iter()
                .zip(1_u64..)
                .map(|((_, ns), n)| format!("{ns} {}\n", log::HEADER_BYTES + 5 * n))
                .collect();
            std::fs::write(dir.path().join("times"), lines.concat()).unwrap();
            let index = LogIndex::read(&dir.path().join("log")).unwrap();
            Self { dir, index }
        }

        fn cuts(&self, spacing: CutSpacing) -> Result<Vec<u64>> {
            let [log, times] = ["log", "times"].map(|name| self.dir.path().join(name));
            find_cut_points(&log, &times, spacing, &self.index)
        }

        fn at(&self, after: Duration) -> Result<Option<u64>> {
            let [log, times] = ["log", "times"].map(|name| self.dir.path().join(name));
            instruction_at_time(&log, &times, after)
        }
    }

    #[test]
    fn cuts_have_their_spacing_and_are_unambiguous() {
        let log = TimedLog::new(&[(100, 1000), (100, 2000), (300, 3000), (1, 9000)]);
        let cuts = |spacing| log.cuts(spacing).unwrap();
        assert_eq!(
            cuts(CutSpacing::Instructions(100)),
            [101, 201, 301, 401],
            "none after 500: 501 is the log's end"
        );
        assert_eq!(cuts(CutSpacing::Instructions(1000)), [0; 0]);
        // 100 instructions in the first thousand, 300 in the second; then the guest slept.
        assert_eq!(cuts(CutSpacing::Time(Duration::from_nanos(500))), [151, 201, 351]);
        assert_eq!(cuts(CutSpacing::Time(Duration::from_nanos(100_000))), [0; 0]);
    }

    #[test]
    fn a_time_is_interpolated_between_two_readings() {
        let log = TimedLog::new(&[(100, 1000), (100, 2000), (300, 3000), (1, 9000)]);
        let at = |ns| log.at(Duration::from_nanos(ns)).unwrap();
        let found: Vec<_> = [0, 500, 1000, 1500, 2000, 8000, 8001].map(at).into();
        assert_eq!(found, [Some(100), Some(150), Some(200), Some(350), Some(500), Some(501), None]);
        let wild = TimedLog::new(&[(9, i64::MIN), (9, i64::MAX), (9, i64::MIN)]);
        assert!(wild.at(Duration::MAX).unwrap().is_some());
    }

    #[test]
    fn any_clock_gives_a_bounded_number_of_cuts() {
        let log =
            TimedLog::new(&[(9, i64::MIN), (u32::MAX, i64::MAX), (9, i64::MIN), (9, i64::MAX)]);
        let by_time = |ns| log.cuts(CutSpacing::Time(Duration::from_nanos(ns)));
        assert!(matches!(by_time(1), Err(Error::TooManyCuts { .. })));
        assert!(by_time(u64::MAX >> 1).unwrap().len() <= 3);
        let by_instruction = log.cuts(CutSpacing::Instructions(1));
        assert!(matches!(by_instruction, Err(Error::TooManyCuts { .. })));
    }

    #[test]
    fn without_times_a_log_is_cut_by_instructions_only() {
        let log = TimedLog::new(&[(9, 1)]);
        std::fs::write(log.dir.path().join("times"), "").unwrap();
        let second = Duration::from_secs(1);
        assert!(matches!(log.cuts(CutSpacing::Time(second)), Err(Error::NoTimes { .. })));
        assert!(matches!(log.at(second), Err(Error::NoTimes { .. })));
        std::fs::remove_file(log.dir.path().join("times")).unwrap();
        assert!(matches!(log.cuts(CutSpacing::Time(second)), Err(Error::Io { .. })));
        assert_eq!(log.cuts(CutSpacing::Instructions(4)).unwrap(), [5]);
    }
}
