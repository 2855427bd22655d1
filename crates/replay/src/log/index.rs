//! At which instructions a log has events.

use super::{LogEvent, PositionedEvent, open};
use crate::Result;
use std::ops::Range;
use std::path::Path;

/// The number of the synchronization point at which QEMU resets the machine.
const RESET_CHECKPOINT: u8 = 2;

/// The instruction at which the guest asked QEMU to shut down for good, if it did.
///
/// QEMU shuts down some time after the request, and a replay does so at another instruction than
/// the recording. The log holds the instructions in between, but a replay need not reach them. A
/// reset does not end the log: a replay waits for it at a synchronization point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ShutdownRequest(Option<u64>);

impl ShutdownRequest {
    /// Takes the log's next event into account.
    pub(super) fn add(&mut self, event: PositionedEvent) {
        match event.event {
            LogEvent::Shutdown(_) => drop(self.0.get_or_insert(event.icount)),
            LogEvent::Checkpoint(RESET_CHECKPOINT) => self.0 = None,
            _ => {}
        }
    }

    /// The last instruction that every replay reaches, of a log with `instructions` instructions.
    pub(super) fn end(self, instructions: u64) -> u64 {
        self.0.map_or(instructions, |at| at.min(instructions))
    }
}

/// The instructions at which a log has events.
///
/// At an instruction without an event the VM has exactly one state. At an instruction with events
/// it has several: one before and one after each event. A replay can therefore stop reliably, and
/// be compared, only at an *unambiguous* instruction: one without an event.
#[derive(Clone, Debug, Default)]
pub struct LogIndex {
    /// The instructions with events, rising.
    events: Vec<u64>,
    /// The instructions at which a disk answered, rising.
    disk_answers: Vec<u64>,
    /// See [`LogIndex::holds`].
    holds: Vec<u64>,
    /// When the last bottom half at the current instruction was scheduled.
    last_bottom_half: Option<u64>,
    /// The last instruction up to the end at which an interrupt or exception was delivered.
    last_delivery: Option<u64>,
    shutdown: ShutdownRequest,
}

impl LogIndex {
    /// Builds the index of the log at `path`.
    ///
    /// Errors: [`Error::Io`](crate::Error::Io), [`Error::Damaged`](crate::Error::Damaged).
    pub fn read(path: &Path) -> Result<Self> {
        let mut reader = open(path)?;
        let mut index = Self::default();
        while let Some(event) = reader.next_event()? {
            index.add(event);
        }
        Ok(index)
    }

    /// Adds the log's next event to the index.
    pub fn add(&mut self, event: PositionedEvent) {
        self.shutdown.add(event);
        let instructions = match event.event {
            LogEvent::Instructions(_) => {
                self.last_bottom_half = None;
                &mut self.events
            }
            LogEvent::DiskAnswer => &mut self.disk_answers,
            LogEvent::Delivery => {
                if self.shutdown.0.is_none_or(|end| end == event.icount) {
                    self.last_delivery = Some(event.icount);
                }
                return;
            }
            LogEvent::BottomHalf(at) if self.last_bottom_half == Some(at) => &mut self.holds,
            LogEvent::BottomHalf(at) => {
                self.last_bottom_half = Some(at);
                return;
            }
            _ => return,
        };
        if instructions.last() != Some(&event.icount) {
            instructions.push(event.icount);
        }
    }

    /// Returns the last instruction that every replay reaches: the log's last one, or the one at
    /// which the machine was asked to shut down.
    pub fn end(&self) -> u64 {
        self.shutdown.end(self.events.last().copied().unwrap_or(0))
    }

    /// Returns whether the log ends with a shutdown request. A replay then ends QEMU as it reaches
    /// the end.
    pub fn ends_with_shutdown(&self) -> bool {
        self.shutdown.0.is_some()
    }

    /// Returns the *holds*: instructions at which the recorded VM was stopped while a network card
    /// was about to send. A VM that resumes schedules the card's sending bottom half once more, so
    /// the log has it twice. A replay gets past such an instruction only if it stops there, too.
    pub fn holds(&self) -> &[u64] {
        &self.holds
    }

    /// Returns whether the guest has two states at the log's end: before and after an interrupt.
    pub fn end_is_ambiguous(&self) -> bool {
        self.last_delivery == Some(self.end())
    }

    /// Returns whether the VM has exactly one state at instruction `icount`.
    pub fn is_unambiguous(&self, icount: u64) -> bool {
        self.events.binary_search(&icount).is_err()
    }

    /// Returns the number of instructions with events in `range`.
    pub fn count(&self, range: Range<u64>) -> u64 {
        let before = |icount| self.events.partition_point(|event| *event < icount);
        before(range.end).saturating_sub(before(range.start)) as u64
    }

    /// Returns the last unambiguous instruction that is at or before `icount`; 0 if there is none.
    pub fn last_unambiguous(&self, icount: u64) -> u64 {
        let upto = self.events.partition_point(|event| *event <= icount);
        let mut candidate = icount;
        for event in self.events[..upto].iter().rev() {
            if *event != candidate {
                break;
            }
            candidate = candidate.saturating_sub(1);
        }
        candidate
    }

    /// Returns the first unambiguous instruction after `icount`; `None` if no replay is sure to
    /// reach one.
    pub fn next_unambiguous(&self, icount: u64) -> Option<u64> {
        let first = icount.checked_add(1)?;
        let from = self.events.partition_point(|event| *event < first);
        // Events rise. As long as each equals the candidate, the next instruction is the candidate.
        (first..)
            .zip(self.events.get(from..)?)
            .find(|(candidate, event)| *event > candidate)
            .map(|(candidate, _)| candidate)
            .filter(|candidate| *candidate < self.end())
    }

    /// Returns the first unambiguous instruction after the next answer of a disk at or after
    /// `icount`; `None` if there is none.
    pub fn next_unambiguous_after_disk_answer(&self, icount: u64) -> Option<u64> {
        let next = self.disk_answers.partition_point(|answer| *answer < icount);
        self.next_unambiguous(*self.disk_answers.get(next)?)
    }
}
