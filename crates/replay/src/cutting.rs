//! Where a recording is cut that has no checkpoints yet.
//!
//! ```text
//!   by instructions   every N-th
//!   by time           as the host's clock stood: by the log's times, or where it has none as the guest read the clock. Taken to run evenly in between
//! ```
//!
//! Each cut then moves to the next instruction at which the log has nothing ([`Boundaries`]): there
//! a replay can stand and go on.

use crate::log::{self, Boundaries, Event, Placed};
use crate::{Error, Result, Times};
use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

/// More than anybody can use: a log may say that years went by.
const CUTS_MAX: usize = 1 << 20;

/// How far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    /// In instructions; at least one.
    Instructions(u64),
    /// By the host's clock while it was recorded.
    Time(Duration),
}

/// The instructions at which the log in the file at `path` is cut, rising, each within it.
///
/// Errors: [`Error::NoClock`] where time is asked for, there are no `times`, and the guest never
/// had the host's clock read; [`Error::TooManyCuts`].
pub fn cuts(path: &Path, times: Times, every: Every, boundaries: &Boundaries) -> Result<Vec<u64>> {
    let mut cutter = Cutter::new(every);
    follow(path, times, &mut |placed, readings| {
        readings.iter().try_for_each(|(icount, now)| cutter.read_clock(*icount, *now))?;
        placed.map_or(Ok(()), |placed| cutter.take(placed)).map(|()| true)
    })?;
    if matches!(every, Every::Time(_)) && cutter.clock.is_none() {
        return Err(Error::NoClock { path: path.into() });
    }
    Ok(std::iter::from_fn(|| cutter.next_cut(boundaries)).collect())
}

/// Takes an event of a log, or its end, and the readings before it.
type Take<'a> = dyn FnMut(Option<Placed>, &[(u64, i64)]) -> Result<bool> + 'a;

/// Gives each event of the log at `path`, and the readings of the host's clock before it, each with
/// its instruction; at last those behind the log's end. Until `take` says false.
fn follow(path: &Path, mut times: Times, take: &mut Take<'_>) -> Result<()> {
    let mut events = log::open(path)?;
    let mut before = 0;
    loop {
        let placed = events.next_event()?;
        let until = if placed.is_some() { events.offset() } else { u64::MAX };
        let mut readings = Vec::new();
        while let Some(now) = times.next_before(until)? {
            readings.push((before, now));
        }
        if let Some(Placed { event: Event::HostClock(now), icount, .. }) = placed
            && !times.are_kept()
        {
            readings.push((icount, now));
        }
        if !take(placed, &readings)? || placed.is_none() {
            return Ok(());
        }
        before = events.icount();
    }
}

/// Finds cuts as the log comes.
#[derive(Clone, Debug)]
pub struct Cutter {
    every: Every,
    /// Where a cut is asked for that has not been given yet.
    wanted: VecDeque<u64>,
    /// How many there have been.
    count: usize,
    /// The last cut that was given.
    last: Option<u64>,
    /// Where the host's clock was read last, and what it said.
    clock: Option<(u64, i64)>,
    /// What it says when the next cut is due.
    due: i64,
}

impl Cutter {
    /// From the log's beginning on.
    pub fn new(every: Every) -> Self {
        Self { every, wanted: VecDeque::new(), count: 0, last: None, clock: None, due: 0 }
    }

    /// Takes the log's next event.
    ///
    /// Error: [`Error::TooManyCuts`].
    pub fn take(&mut self, placed: Placed) -> Result<()> {
        let (Every::Instructions(step), Event::Instructions(_)) = (self.every, placed.event) else {
            return Ok(());
        };
        let step = step.max(1);
        while let Some(next) =
            step.checked_mul(self.count as u64 + 1).filter(|n| *n <= placed.icount)
        {
            self.want(next)?;
        }
        Ok(())
    }

    /// Whether it goes by the host's clock.
    pub fn is_by_time(&self) -> bool {
        matches!(self.every, Every::Time(_))
    }

    fn want(&mut self, icount: u64) -> Result<()> {
        if self.count == CUTS_MAX {
            return Err(Error::TooManyCuts { cuts_max: CUTS_MAX });
        }
        self.count += 1;
        self.wanted.push_back(icount);
        Ok(())
    }

    /// Takes what the host's clock said at instruction `at`.
    ///
    /// Error: [`Error::TooManyCuts`].
    pub fn read_clock(&mut self, at: u64, now: i64) -> Result<()> {
        let Every::Time(step) = self.every else { return Ok(()) };
        let step_ns = i64::try_from(step.as_nanos()).unwrap_or(i64::MAX).max(1);
        let Some((icount, then)) = self.clock else {
            self.due = now.saturating_add(step_ns);
            self.clock = Some((at, now));
            return Ok(());
        };
        // The clock may have been set back.
        if now <= then {
            return Ok(());
        }
        while self.due <= now && self.due < i64::MAX {
            self.want(between((icount, then), (at, now), self.due))?;
            // A guest that slept has nothing in between.
            let missed = now.saturating_sub(self.due) / step_ns;
            let steps = if at == icount { missed.saturating_add(1) } else { 1 };
            self.due = self.due.saturating_add(step_ns.saturating_mul(steps));
        }
        self.clock = Some((at, now));
        Ok(())
    }

    /// The next cut: where it was asked for, or behind that, where `boundaries` has nothing. None
    /// where that is not known yet.
    pub fn next_cut(&mut self, boundaries: &Boundaries) -> Option<u64> {
        while let Some(&icount) = self.wanted.front() {
            // The one before it may have moved beyond it.
            if self.last.is_none_or(|last| last < icount) {
                self.last = Some(boundaries.next_unambiguous(icount)?);
                self.wanted.pop_front();
                return self.last;
            }
            self.wanted.pop_front();
        }
        None
    }
}

/// The instruction at which the host's clock had gone on by `after` since the log begins; none
/// where it ends before.
///
/// Error: [`Error::NoClock`] where there are no `times` and the guest never had the host's clock
/// read.
pub fn at_time(path: &Path, times: Times, after: Duration) -> Result<Option<u64>> {
    let after_ns = i64::try_from(after.as_nanos()).unwrap_or(i64::MAX);
    let (mut due, mut last, mut found) = (None, None, None);
    follow(path, times, &mut |_, readings| {
        for &(at, now) in readings {
            let due = *due.get_or_insert(now.saturating_add(after_ns));
            let (icount, then) = *last.get_or_insert((at, now));
            if now >= due {
                found = Some(between((icount, then), (at, now), due));
                return Ok(false);
            }
            // The clock may have been set back.
            if now > then {
                last = Some((at, now));
            }
        }
        Ok(true)
    })?;
    match last {
        Some(_) => Ok(found),
        None => Err(Error::NoClock { path: path.into() }),
    }
}

/// The instruction at clock `due`, between two at which the clock was read: it is taken to run
/// evenly.
fn between((icount, then): (u64, i64), (next, now): (u64, i64), due: i64) -> u64 {
    let all = now.saturating_sub(then);
    if all <= 0 {
        return next;
    }
    let part = due.saturating_sub(then).max(0) as f64 / all as f64;
    icount + (next.saturating_sub(icount) as f64 * part) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(events: &[(u32, i64)]) -> (tempfile::NamedTempFile, Boundaries) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let events: Vec<_> = events
            .iter()
            .map(|(count, clock)| {
                [&[0][..], &count.to_be_bytes(), &[28], &clock.to_be_bytes()].concat()
            })
            .collect();
        let events: Vec<&[u8]> = events.iter().map(Vec::as_slice).collect();
        std::fs::write(file.path(), log::tests::bytes(&events)).unwrap();
        let boundaries = Boundaries::read(file.path()).unwrap();
        (file, boundaries)
    }

    #[test]
    fn cuts_are_as_far_apart_as_asked_and_where_nothing_happens() {
        let (file, boundaries) = log(&[(100, 1000), (100, 2000), (300, 3000), (1, 9000)]);
        let cuts = |every| cuts(file.path(), Times::none(), every, &boundaries).unwrap();
        assert_eq!(
            cuts(Every::Instructions(100)),
            [101, 201, 301, 401],
            "none behind 500: 501 is the log's end"
        );
        assert_eq!(cuts(Every::Instructions(1000)), [0; 0]);
        // 100 instructions in the first thousand, 300 in the second; then it slept.
        assert_eq!(cuts(Every::Time(Duration::from_nanos(500))), [151, 201, 351]);
        assert_eq!(cuts(Every::Time(Duration::from_nanos(100_000))), [0; 0]);
    }

    #[test]
    fn a_time_is_found_between_two_readings() {
        let (file, _) = log(&[(100, 1000), (100, 2000), (300, 3000), (1, 9000)]);
        let at = |ns| at_time(file.path(), Times::none(), Duration::from_nanos(ns)).unwrap();
        let found: Vec<_> = [0, 500, 1000, 1500, 2000, 8000, 8001].map(at).into();
        assert_eq!(found, [Some(100), Some(150), Some(200), Some(350), Some(500), Some(501), None]);
        let (wild, _) = log(&[(9, i64::MIN), (9, i64::MAX), (9, i64::MIN)]);
        assert!(at_time(wild.path(), Times::none(), Duration::MAX).unwrap().is_some());
    }

    #[test]
    fn a_clock_that_says_anything_is_bounded() {
        let (file, boundaries) =
            log(&[(9, i64::MIN), (u32::MAX, i64::MAX), (9, i64::MIN), (9, i64::MAX)]);
        let cuts = |ns| {
            cuts(file.path(), Times::none(), Every::Time(Duration::from_nanos(ns)), &boundaries)
        };
        assert!(matches!(cuts(1), Err(Error::TooManyCuts { .. })));
        assert!(cuts(u64::MAX >> 1).unwrap().len() <= 3);
        let every = super::cuts(file.path(), Times::none(), Every::Instructions(1), &boundaries);
        assert!(matches!(every, Err(Error::TooManyCuts { .. })));
    }

    #[test]
    fn without_a_clock_there_is_no_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), log::tests::bytes(&[&[0, 0, 0, 0, 9]])).unwrap();
        let found = cuts(
            file.path(),
            Times::none(),
            Every::Time(Duration::from_secs(1)),
            &Boundaries::default(),
        );
        assert!(matches!(found, Err(Error::NoClock { .. })));
    }
}
