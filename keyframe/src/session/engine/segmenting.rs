//! Checkpoints of a VM that replays a recording: at chosen instructions, where it stands.
//!
//! ```text
//!   stands at a cut ─▶ no disk request under way? ─▶ checkpoint ─▶ go on to the next cut ─▶ ...
//!                              └─ one is: on to behind the next answer of a disk
//! ```

use super::{DONE, End, Engine, Failure, Inbox, OnExit, Outcome};
use crate::failure::chain;
use crate::replaying::{Course, Passage, Reached};
use keyframe_qemu::restore::Until;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a report of the encoder is waited for at a time.
const WAIT: Duration = Duration::from_millis(50);

impl Engine<'_> {
    /// Takes a checkpoint at each cut of `course`, of a VM that stands at the first of them, where
    /// `passage` has brought it. `tell` learns where it is.
    pub fn run_through(
        mut self,
        mut passage: Passage,
        course: &mut dyn Course,
        tell: &mut dyn FnMut(u64),
    ) -> Outcome {
        self.say(&self.greeting());
        let followed = self.follow(&mut passage, course, tell);
        // Whatever came of it: nobody has a use for a replay that stands.
        let code = self.finish(Ok(End::Asked(OnExit::Kill)));
        match followed {
            Err(failure) => Err(failure),
            Ok(false) if matches!(code, Ok(DONE)) => {
                Err(Failure::new("interrupted")
                    .fix("call it again: it goes on with what is missing"))
            }
            Ok(_) => code,
        }
    }

    /// False where it was interrupted.
    fn follow(
        &mut self,
        passage: &mut Passage,
        course: &mut dyn Course,
        tell: &mut dyn FnMut(u64),
    ) -> Result<bool, Failure> {
        loop {
            tell(passage.icount);
            self.await_room();
            if self.interrupted.load(Ordering::Relaxed) {
                return Ok(false);
            }
            self.look();
            let to = if self.is_busy()? {
                course.behind_answer(passage.icount, &self.interrupted)?
            } else {
                if !course.is_there(passage.icount) {
                    self.capture("segment", None, None).map_err(Failure::new)?;
                }
                course.next_cut(passage.icount, &self.interrupted)?
            };
            let Some(to) = to else { return Ok(!self.interrupted.load(Ordering::Relaxed)) };
            let Some(member) = self.machines.members_mut().first_mut() else { return Ok(true) };
            let vm = &mut member.machine.vm;
            match passage.go_on(vm, Until::Instruction(to), &self.interrupted, tell)? {
                Reached::Interrupted => return Ok(false),
                Reached::LogEnd => return Ok(true),
                Reached::There => {}
            }
        }
    }

    fn is_busy(&mut self) -> Result<bool, Failure> {
        let Some(member) = self.machines.members_mut().first_mut() else { return Ok(false) };
        let machine = &mut member.machine;
        machine.disks.are_busy(machine.vm.qmp()).map_err(|e| Failure::new(chain(&*e)))
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
                Some(Inbox::Report(report)) => self.settle(*report),
                Some(Inbox::Request(pending)) => drop(self.answer(pending)),
                None if self.may_capture() || self.interrupted.load(Ordering::Relaxed) => return,
                None => {}
            }
        }
    }
}
