//! Jumps of a halted guest's clock that a recorded VM missed because it stood, and that its replay
//! would make.
//!
//! While its processor has halted, QEMU has a timer make the guest's clock jump to where something
//! is due (a *warp*, `icount_warp_rt`). A turn of its main loop in which that timer has come to its
//! end, but in which the VM was stopped before that is looked at, ends the timer, and the clock
//! does not jump. Nothing of the stop is in the log but what is missing: no `W` before `h`, no
//! clock behind it, none behind `A`.
//!
//! ```text
//!   recorded        W v₁ h v v   W v h v v │stop│ h v₂ │cont│ ... A ...
//!                     └ armed                       ▲ the timer has come to its end
//!   to be replayed  W v₁ h v v   W v h v v        h v₁        ... A ...
//! ```
//!
//! `W`, `A` and `h` are the log's checkpoints of the warp's start and account and of that clock's
//! timers, `v` the clock. A replay does not stand there: its clock would jump, it would look for a
//! timer's turn that the log has not, and stand still for ever. Where it reads the clock as it was
//! when the timer was armed, the timer does not end, and `A` takes it away having warped by
//! nothing: the state that the recorded VM had.
//!
//! Left out: a timer that ended so and was armed anew before `A`. No log seen has that.

use crate::log::{self, Event, Placed};
use crate::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The log's own checkpoints.
const WARP_START: u8 = 0;
const WARP_ACCOUNT: u8 = 1;
const HOST_TIMERS: u8 = 5;
const WARP_TIMERS: u8 = 6;

/// What a reading of the clock is to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Correction {
    /// Where the reading's eight bytes lie in the log.
    at: u64,
    value: i64,
}

impl Correction {
    pub(crate) fn write(self, log: &File, path: &Path) -> Result<()> {
        log.write_all_at(&self.value.to_be_bytes(), self.at).map_err(Error::io("correct", path))
    }
}

/// What came directly before an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Before {
    #[default]
    Other,
    Start,
    /// The clock, at the warp's start; then perhaps the host's.
    Started(i64),
    Timers,
    /// The account of a warp; its timer has ended while the VM stood if no clock follows.
    Account,
}

/// Finds them as the log comes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Warps {
    before: Before,
    /// What the clock said when the timer was armed.
    armed: Option<i64>,
    /// The last reading for the timer, with nothing read since: it may still have to be corrected.
    last: Option<Correction>,
}

impl Warps {
    /// Takes the log's next event. What comes back lies before it.
    pub(crate) fn take(&mut self, placed: Placed) -> Option<Correction> {
        let before = std::mem::take(&mut self.before);
        let accounted = if before == Before::Account { self.last.take() } else { None };
        match placed.event {
            Event::WarpClock(now) => {
                // Any other reading says that the timer was still there, or that the VM ran.
                self.last = match (before, self.armed) {
                    (Before::Timers, Some(value)) => {
                        Some(Correction { at: placed.offset + 1, value })
                    }
                    _ => None,
                };
                if before == Before::Start {
                    self.before = Before::Started(now);
                }
            }
            Event::Checkpoint(WARP_START) => {
                // Ended, and about to be armed anew.
                if self.last.take().is_some() {
                    self.armed = None;
                }
                self.before = Before::Start;
            }
            Event::Checkpoint(WARP_TIMERS) => {
                if let (Before::Started(now), None) = (before, self.armed) {
                    self.armed = Some(now);
                }
                self.last = None;
                self.before = Before::Timers;
            }
            Event::Checkpoint(WARP_ACCOUNT) => {
                self.armed = None;
                self.before = Before::Account;
            }
            Event::Instructions(_) => (self.armed, self.last) = (None, None),
            // Its timers come between.
            Event::HostClock(_) | Event::Checkpoint(HOST_TIMERS) => {
                if let Before::Started(_) = before {
                    self.before = before;
                }
            }
            _ => {}
        }
        accounted.filter(|_| !matches!(placed.event, Event::WarpClock(_)))
    }

    /// The bytes that may still be corrected, from their first one on.
    pub(crate) fn open_from(&self) -> Option<u64> {
        self.last.map(|correction| correction.at)
    }
}

/// Corrects the whole log in the file at `path`; what has been corrected stays as it is.
pub(crate) fn correct(path: &Path) -> Result<()> {
    let mut events = log::open(path)?;
    let (mut warps, mut all) = (Warps::default(), Vec::new());
    while let Some(placed) = events.next_event()? {
        all.extend(warps.take(placed));
    }
    if all.is_empty() {
        return Ok(());
    }
    let file = File::options().write(true).open(path).map_err(Error::io("open", path))?;
    all.into_iter().try_for_each(|correction| correction.write(&file, path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::log::tests::bytes;
    use proptest::prelude::*;

    /// A log by its letters: `N`, `W`, `A`, `h`, a disk's answer `B`, `I`; `H` with the host's
    /// clock, a number with the other one.
    pub fn log(letters: &str) -> Vec<u8> {
        let event = |letter: &str| match letter {
            "N" => vec![0, 0, 0, 0, 7],
            "I" => vec![1],
            "B" => [&[8][..], &[0; 8]].concat(),
            "W" => vec![30],
            "A" => vec![31],
            "h" => vec![36],
            "H" => [&[35, 28][..], &[0; 8]].concat(),
            now => [&[log::WARP_CLOCK][..], &now.parse::<i64>().unwrap().to_be_bytes()].concat(),
        };
        let events: Vec<Vec<u8>> =
            letters.split(' ').filter(|one| !one.is_empty()).map(event).collect();
        bytes(&events.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    fn corrected(log: &[u8]) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), log).unwrap();
        let twice: Vec<_> = (0..2)
            .map(|_| {
                correct(file.path()).unwrap();
                std::fs::read(file.path()).unwrap()
            })
            .collect();
        assert!(twice[0] == twice[1], "what is corrected stays so");
        twice[0].clone()
    }

    #[track_caller]
    fn becomes(before: &str, after: &str) {
        assert!(corrected(&log(before)) == log(after), "{before}");
    }

    /// As QEMU 10 wrote them; a replay of each stood still.
    #[test]
    fn a_timer_that_ended_while_the_vm_stood_does_not_end() {
        becomes("N W 5 h 6 7 W 8 h 9 10 h 20 B A A I N", "N W 5 h 6 7 W 8 h 9 10 h 5 B A A I N");
        becomes("N W 5 h 6 7 h 20 A W 30 h 31 32 A 33 I", "N W 5 h 6 7 h 5 A W 30 h 31 32 A 33 I");
        // With the host's clock.
        becomes("N W 5 H h 6 H 7 H h 20 H A I N", "N W 5 H h 6 H 7 H h 5 H A I N");
    }

    #[test]
    fn others_are_as_they_were() {
        for all in [
            // It has warped: by the timer, by the account, and after a stop.
            "N W 5 h 6 7 W 8 h 9 10 B A W 11 A I N",
            "N W 5 h 6 7 W 8 h 9 A 10 I N",
            "N W 5 h 6 7 h 20 21 h 22 A 23 W 24 h 25 26 A",
            // It was never armed, or is about to be armed anew.
            "N W 5 W 6 B A A I N",
            "N h 6 A A I N",
            "N W 5 h 6 W 20 h 21 A 22",
            // The log ends before that is known.
            "N W 5 h 6 7 h 20",
            "N W 5 h 6 7 h 20 A",
        ] {
            becomes(all, all);
        }
        // Of two, each by its own.
        becomes(
            "N W 5 h 6 A 7 N W 50 W 51 h 52 53 h 54 A N W 60 h 61 A N",
            "N W 5 h 6 A 7 N W 50 W 51 h 52 53 h 51 A N W 60 h 60 A N",
        );
    }

    proptest! {
        /// Only readings of the clock are ever corrected.
        #[test]
        fn nothing_else_is_touched(letters in prop::collection::vec("[NWAhBIH]|[1-9]", 0..60)) {
            let before = log(&letters.join(" "));
            let after = corrected(&before);
            let kinds = |log: &[u8]| {
                let mut events = log::Events::new(&log[log::HEADER_BYTES as usize..], Path::new("log"));
                let mut all = Vec::new();
                while let Some(placed) = events.next_event().unwrap() {
                    let is_clock = matches!(placed.event, Event::WarpClock(_));
                    all.push((placed.offset, if is_clock { Event::WarpClock(0) } else { placed.event }));
                }
                all
            };
            prop_assert_eq!(kinds(&before), kinds(&after));
        }
    }
}
