//! Where a recording is cut that has no checkpoints yet.
//!
//! ```text
//!   by instructions   every N-th
//!   by time           as the host's clock stood in the log: read at some instructions, taken to run evenly between two of them
//! ```
//!
//! Each cut then moves to the next instruction at which the log has nothing ([`Boundaries`]): there a replay can stand and go on.

use crate::log::{self, Boundaries, Event};
use crate::{Error, Result};
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
/// Errors: [`Error::NoClock`] where time is asked for and the guest never had the host's clock read; [`Error::TooManyCuts`].
pub fn cuts(path: &Path, every: Every, boundaries: &Boundaries) -> Result<Vec<u64>> {
    let wanted = match every {
        Every::Instructions(step) => {
            let step = step.max(1);
            let count = boundaries.end() / step;
            if count > CUTS_MAX as u64 {
                return Err(Error::TooManyCuts { cuts_max: CUTS_MAX });
            }
            (1..=count).map(|n| n * step).collect()
        }
        Every::Time(step) => by_time(path, i64::try_from(step.as_nanos()).unwrap_or(i64::MAX).max(1))?,
    };
    let mut cuts: Vec<u64> = Vec::with_capacity(wanted.len());
    for icount in wanted {
        // Those before it may have moved beyond it.
        if cuts.last().is_none_or(|last| *last < icount)
            && let Some(cut) = boundaries.next_unambiguous(icount)
        {
            cuts.push(cut);
        }
    }
    Ok(cuts)
}

/// The instruction at which the host's clock had gone on by `after` since the log begins; none where it ends before.
///
/// Error: [`Error::NoClock`] where the guest never had the host's clock read.
pub fn at_time(path: &Path, after: Duration) -> Result<Option<u64>> {
    let after_ns = i64::try_from(after.as_nanos()).unwrap_or(i64::MAX);
    let mut events = log::open(path)?;
    let (mut due, mut last) = (None, None);
    while let Some(placed) = events.next_event()? {
        let Event::HostClock(now) = placed.event else { continue };
        let due = *due.get_or_insert(now.saturating_add(after_ns));
        let (icount, then) = *last.get_or_insert((placed.icount, now));
        if now >= due {
            return Ok(Some(between((icount, then), (placed.icount, now), due)));
        }
        // The clock may have been set back.
        if now > then {
            last = Some((placed.icount, now));
        }
    }
    match last {
        Some(_) => Ok(None),
        None => Err(Error::NoClock { path: path.into() }),
    }
}

/// The instruction at clock `due`, between two at which the clock was read: it is taken to run evenly.
fn between((icount, then): (u64, i64), (next, now): (u64, i64), due: i64) -> u64 {
    let all = now.saturating_sub(then);
    if all <= 0 {
        return next;
    }
    let part = due.saturating_sub(then).max(0) as f64 / all as f64;
    icount + (next.saturating_sub(icount) as f64 * part) as u64
}

fn by_time(path: &Path, step_ns: i64) -> Result<Vec<u64>> {
    let mut events = log::open(path)?;
    let mut last: Option<(u64, i64)> = None;
    let mut due = 0;
    let mut wanted = Vec::new();
    while let Some(placed) = events.next_event()? {
        let Event::HostClock(now) = placed.event else { continue };
        let Some((icount, then)) = last else {
            due = now.saturating_add(step_ns);
            last = Some((placed.icount, now));
            continue;
        };
        // The clock may have been set back.
        if now <= then {
            continue;
        }
        while due <= now {
            if wanted.len() == CUTS_MAX {
                return Err(Error::TooManyCuts { cuts_max: CUTS_MAX });
            }
            wanted.push(between((icount, then), (placed.icount, now), due));
            // A guest that slept has nothing in between.
            let missed = now.saturating_sub(due) / step_ns;
            let asleep = placed.icount == icount;
            due =
                due.saturating_add(step_ns.saturating_mul(if asleep { missed.saturating_add(1) } else { 1 }));
            if due == i64::MAX {
                break;
            }
        }
        last = Some((placed.icount, now));
    }
    match last {
        Some(_) => Ok(wanted),
        None => Err(Error::NoClock { path: path.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(events: &[(u32, i64)]) -> (tempfile::NamedTempFile, Boundaries) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let events: Vec<_> = events
            .iter()
            .map(|(count, clock)| [&[0][..], &count.to_be_bytes(), &[28], &clock.to_be_bytes()].concat())
            .collect();
        let events: Vec<&[u8]> = events.iter().map(Vec::as_slice).collect();
        std::fs::write(file.path(), log::tests::bytes(&events)).unwrap();
        let boundaries = Boundaries::read(file.path()).unwrap();
        (file, boundaries)
    }

    #[test]
    fn cuts_are_as_far_apart_as_asked_and_where_nothing_happens() {
        let (file, boundaries) = log(&[(100, 1000), (100, 2000), (300, 3000), (1, 9000)]);
        let cuts = |every| cuts(file.path(), every, &boundaries).unwrap();
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
        let at = |ns| at_time(file.path(), Duration::from_nanos(ns)).unwrap();
        let found: Vec<_> = [0, 500, 1000, 1500, 2000, 8000, 8001].map(at).into();
        assert_eq!(found, [Some(100), Some(150), Some(200), Some(350), Some(500), Some(501), None]);
        let (wild, _) = log(&[(9, i64::MIN), (9, i64::MAX), (9, i64::MIN)]);
        assert!(at_time(wild.path(), Duration::MAX).unwrap().is_some());
    }

    #[test]
    fn a_clock_that_says_anything_is_bounded() {
        let (file, boundaries) = log(&[(9, i64::MIN), (u32::MAX, i64::MAX), (9, i64::MIN), (9, i64::MAX)]);
        let cuts = |ns| cuts(file.path(), Every::Time(Duration::from_nanos(ns)), &boundaries);
        assert!(matches!(cuts(1), Err(Error::TooManyCuts { .. })));
        assert!(cuts(u64::MAX >> 1).unwrap().len() <= 3);
        let every = super::cuts(file.path(), Every::Instructions(1), &boundaries);
        assert!(matches!(every, Err(Error::TooManyCuts { .. })));
    }

    #[test]
    fn without_a_clock_there_is_no_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), log::tests::bytes(&[&[0, 0, 0, 0, 9]])).unwrap();
        let found = cuts(file.path(), Every::Time(Duration::from_secs(1)), &Boundaries::default());
        assert!(matches!(found, Err(Error::NoClock { .. })));
    }
}
