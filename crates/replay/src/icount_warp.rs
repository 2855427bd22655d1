//! Corrects clock readings of a log that would make a replay hang: jumps of a halted guest's clock
//! that the recorded VM missed because it was stopped, and that its replay would make.
//!
//! While the processor is halted, QEMU arms a timer that makes the guest's clock jump to its next
//! deadline (a *warp*, QEMU's `icount_warp_rt`). If QEMU's main loop sees that the timer has
//! expired, but the VM was stopped just before, the timer ends and the clock does not jump. The log
//! shows the stop only by missing events: no `W` before `h`, no clock reading after `h` nor after
//! `A`.
//!
//! ```text
//!   recorded        W v₁ h v v   W v h v v │stop│ h v₂ │cont│ ... A ...
//!                     └ armed                       ▲ the timer has expired
//!   to be replayed  W v₁ h v v   W v h v v        h v₁        ... A ...
//! ```
//!
//! `W` and `A` are QEMU's synchronization points for the start and the account of a warp, `h` the
//! one for the warp clock's timers, `v` a reading of that clock. The replay is not stopped at this
//! place: its clock would jump, it would wait for a turn of the timers that the log does not have,
//! and hang. If it reads the time at which the timer was armed, the timer does not expire, and `A`
//! removes it without a jump, which is the state of the recorded VM.
//!
//! Not handled: a timer that ended this way and was armed anew before `A`. No known log has that.

use crate::log::{self, LogEvent, PositionedEvent};
use crate::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Numbers of QEMU's synchronization points.
const WARP_START: u8 = 0;
const WARP_ACCOUNT: u8 = 1;
const HOST_TIMERS: u8 = 5;
const WARP_TIMERS: u8 = 6;

/// A reading of the warp clock that a replay must read with another value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockCorrection {
    /// Byte offset of the reading's eight bytes in the log.
    offset: u64,
    /// The value to write, in nanoseconds.
    ns: i64,
}

impl ClockCorrection {
    /// Writes the correction into the log.
    pub(crate) fn write(self, log: &File, path: &Path) -> Result<()> {
        log.write_all_at(&self.ns.to_be_bytes(), self.offset).map_err(Error::io("correct", path))
    }
}

/// The part of the pattern that the last events match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Preceding {
    #[default]
    Other,
    WarpStart,
    /// The clock reading of a warp's start, then perhaps events of the host's clock.
    WarpStartClock(i64),
    WarpTimers,
    /// The account of a warp. If no clock reading follows, the timer ended while the VM was
    /// stopped.
    WarpAccount,
}

/// Finds the readings to correct in a log that is read event by event.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WarpCorrector {
    preceding: Preceding,
    /// The clock reading at which the timer was armed.
    armed_ns: Option<i64>,
    /// The correction of the last reading for the timer, while it is undecided.
    candidate: Option<ClockCorrection>,
}

impl WarpCorrector {
    /// Adds the log's next event. Returns a correction of an earlier reading if this event decides
    /// it.
    pub(crate) fn add(&mut self, event: PositionedEvent) -> Option<ClockCorrection> {
        let preceding = std::mem::take(&mut self.preceding);
        let accounted =
            if preceding == Preceding::WarpAccount { self.candidate.take() } else { None };
        match event.event {
            LogEvent::WarpClock(now) => {
                // A second reading shows that the timer was still there, or that the VM ran.
                self.candidate = match (preceding, self.armed_ns) {
                    (Preceding::WarpTimers, Some(ns)) => {
                        Some(ClockCorrection { offset: event.offset + 1, ns })
                    }
                    _ => None,
                };
                if preceding == Preceding::WarpStart {
                    self.preceding = Preceding::WarpStartClock(now);
                }
            }
            LogEvent::Checkpoint(WARP_START) => {
                // The timer has ended and is about to be armed anew.
                if self.candidate.take().is_some() {
                    self.armed_ns = None;
                }
                self.preceding = Preceding::WarpStart;
            }
            LogEvent::Checkpoint(WARP_TIMERS) => {
                if let (Preceding::WarpStartClock(now), None) = (preceding, self.armed_ns) {
                    self.armed_ns = Some(now);
                }
                self.candidate = None;
                self.preceding = Preceding::WarpTimers;
            }
            LogEvent::Checkpoint(WARP_ACCOUNT) => {
                self.armed_ns = None;
                self.preceding = Preceding::WarpAccount;
            }
            LogEvent::Instructions(_) => (self.armed_ns, self.candidate) = (None, None),
            // The host clock's timers may run in between.
            LogEvent::HostClock(_) | LogEvent::Checkpoint(HOST_TIMERS) => {
                if let Preceding::WarpStartClock(_) = preceding {
                    self.preceding = preceding;
                }
            }
            _ => {}
        }
        accounted.filter(|_| !matches!(event.event, LogEvent::WarpClock(_)))
    }

    /// The byte offset from which on the log may still be corrected, if any.
    pub(crate) fn undecided_from(&self) -> Option<u64> {
        self.candidate.map(|correction| correction.offset)
    }
}

/// Corrects the complete log at `path` in place. Correcting it again changes nothing.
///
/// Errors: [`Error::Io`], [`Error::Damaged`].
pub(crate) fn correct_log(path: &Path) -> Result<()> {
    let mut reader = log::open(path)?;
    let (mut corrector, mut corrections) = (WarpCorrector::default(), Vec::new());
    while let Some(event) = reader.next_event()? {
        corrections.extend(corrector.add(event));
    }
    if corrections.is_empty() {
        return Ok(());
    }
    let file = File::options().write(true).open(path).map_err(Error::io("open", path))?;
    corrections.into_iter().try_for_each(|correction| correction.write(&file, path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::log::tests::bytes;
    use proptest::prelude::*;

    /// A log from letters: instructions `N`, synchronization points `W`, `A` and `h`, a disk's
    /// answer `B`, an interrupt `I`, `H` with a reading of the host's clock; a number is a reading
    /// of the warp clock.
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
                correct_log(file.path()).unwrap();
                std::fs::read(file.path()).unwrap()
            })
            .collect();
        assert!(twice[0] == twice[1], "a second correction changes nothing");
        twice[0].clone()
    }

    #[track_caller]
    fn becomes(before: &str, after: &str) {
        assert!(corrected(&log(before)) == log(after), "{before}");
    }

    /// From logs of QEMU 10, whose replays hung.
    #[test]
    fn a_timer_that_ended_while_the_vm_was_stopped_does_not_expire() {
        becomes("N W 5 h 6 7 W 8 h 9 10 h 20 B A A I N", "N W 5 h 6 7 W 8 h 9 10 h 5 B A A I N");
        becomes("N W 5 h 6 7 h 20 A W 30 h 31 32 A 33 I", "N W 5 h 6 7 h 5 A W 30 h 31 32 A 33 I");
        // With the host's clock.
        becomes("N W 5 H h 6 H 7 H h 20 H A I N", "N W 5 H h 6 H 7 H h 5 H A I N");
    }

    #[test]
    fn other_readings_are_not_corrected() {
        for all in [
            // The clock jumped: by the timer, by the account, and after a stop.
            "N W 5 h 6 7 W 8 h 9 10 B A W 11 A I N",
            "N W 5 h 6 7 W 8 h 9 A 10 I N",
            "N W 5 h 6 7 h 20 21 h 22 A 23 W 24 h 25 26 A",
            // The timer was never armed, or is about to be armed anew.
            "N W 5 W 6 B A A I N",
            "N h 6 A A I N",
            "N W 5 h 6 W 20 h 21 A 22",
            // The log ends before it is decided.
            "N W 5 h 6 7 h 20",
            "N W 5 h 6 7 h 20 A",
        ] {
            becomes(all, all);
        }
        // Two timers, each corrected by its own reading.
        becomes(
            "N W 5 h 6 A 7 N W 50 W 51 h 52 53 h 54 A N W 60 h 61 A N",
            "N W 5 h 6 A 7 N W 50 W 51 h 52 53 h 51 A N W 60 h 60 A N",
        );
    }

    proptest! {
        /// Only readings of the warp clock are ever corrected.
        #[test]
        fn other_events_are_not_touched(letters in prop::collection::vec("[NWAhBIH]|[1-9]", 0..60)) {
            let before = log(&letters.join(" "));
            let after = corrected(&before);
            let kinds = |log: &[u8]| {
                let (events, version) = (&log[log::HEADER_BYTES as usize..], log::LogVersion::QEMU_10);
                let mut events = log::LogReader::new(events, Path::new("log"), version);
                let mut all = Vec::new();
                while let Some(event) = events.next_event().unwrap() {
                    let is_clock = matches!(event.event, LogEvent::WarpClock(_));
                    all.push((event.offset, if is_clock { LogEvent::WarpClock(0) } else { event.event }));
                }
                all
            };
            prop_assert_eq!(kinds(&before), kinds(&after));
        }
    }
}
