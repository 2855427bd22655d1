//! Checkpoints of a VM that replays a recording: at chosen instructions, while it stands there.
//!
//! ```text
//!   stands at a cut ─▶ no disk request under way? ─▶ checkpoint ─▶ advance to the next cut ─▶ ...
//!                              └─ one is: advance past the next answer of a disk
//! ```

use super::{
    CheckpointReason, End, Engine, EngineMessage, Error, Event, OnExit, Result, RunReport, Verdict,
};
use keyframe_qemu::Vm;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The time for which the engine waits for a report of the encoder at once.
const WAIT: Duration = Duration::from_millis(50);

/// The result of one step of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The VM stands at the next instruction at which a checkpoint may be taken.
    Stands,
    /// There is no further such instruction.
    End,
    /// The user has asked for an end.
    Interrupted,
}

/// Brings a VM that replays a recording from one instruction to the next.
pub trait ReplaySteps {
    /// The error of a step.
    type Error: From<Error>;

    /// Returns whether a checkpoint of the instruction at which the VM stands exists already.
    fn is_captured(&self) -> bool;

    /// Lets `vm` run to the next instruction at which a checkpoint may be taken, or until
    /// `interrupted` is set. `is_busy` is true if a request of a disk is under way at the present
    /// one: then the next one is the instruction after the request's answer. Returns whether the VM
    /// stands at such an instruction.
    ///
    /// Error: the VM has ended, or departs from the recording.
    fn advance(
        &mut self,
        vm: &mut Vm,
        is_busy: bool,
        interrupted: &AtomicBool,
    ) -> Result<Step, Self::Error>;
}

impl Engine<'_> {
    /// Takes a checkpoint at each instruction to which `steps` brings the VM. The VM stands at the
    /// first of them when this is called. Returns the result of the run. Errors: those of `steps`;
    /// [`Error::Interrupted`]; those of the session.
    pub fn run_through<S: ReplaySteps>(mut self, steps: &mut S) -> Result<RunReport, S::Error> {
        self.tell(&Event::Started(self.greeting()));
        let followed = self.follow(steps);
        // In any case: no user has a use for a replay that stands.
        let report = self.finish(Ok(End::Asked(OnExit::Kill)));
        let was_interrupted = !followed?;
        let report = report?;
        if was_interrupted && report.verdict() == Verdict::Complete {
            return Err(Error::Interrupted.into());
        }
        Ok(report)
    }

    /// False if it was interrupted.
    fn follow<S: ReplaySteps>(&mut self, steps: &mut S) -> Result<bool, S::Error> {
        loop {
            self.await_room();
            if self.interrupted.load(Ordering::Relaxed) {
                return Ok(false);
            }
            self.look();
            let is_busy = self.is_busy()?;
            if !is_busy && !steps.is_captured() {
                self.capture(CheckpointReason::Segment, None, None).map_err(Error::from)?;
            }
            let Some(member) = self.machines.members_mut().first_mut() else { return Ok(true) };
            match steps.advance(
                member.vm.qemu().map_err(Error::from)?,
                is_busy,
                &self.interrupted,
            )? {
                Step::Interrupted => return Ok(false),
                Step::End => return Ok(!self.interrupted.load(Ordering::Relaxed)),
                Step::Stands => {}
            }
        }
    }

    fn is_busy(&mut self) -> Result<bool> {
        let Some(member) = self.machines.members_mut().first_mut() else { return Ok(false) };
        member.vm.has_requests_under_way().map_err(|source| Error::Machine {
            operation: "ask for requests of disks under way",
            source,
        })
    }

    /// Takes in the encoder's reports, and waits while the next capture has no room.
    fn await_room(&mut self) {
        loop {
            let message = if self.may_capture() || self.interrupted.load(Ordering::Relaxed) {
                self.inbox.try_recv().ok()
            } else {
                self.inbox.recv_timeout(WAIT).ok()
            };
            match message {
                Some(EngineMessage::Report(report)) => self.settle(*report),
                Some(EngineMessage::Request(pending)) => drop(self.answer(pending)),
                None if self.may_capture() || self.interrupted.load(Ordering::Relaxed) => return,
                None => {}
            }
        }
    }
}
