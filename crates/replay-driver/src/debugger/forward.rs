//! Lets a VM run forward until it stops, for both directions of a debugger.
//!
//! ```text
//!   start ──── armed run ────▶ stops                                  the common case
//!   start ──── armed run ────▶ ╳ off its log
//!                   another replay ──▶ careful run (careful.rs) ──▶ stops, or the armed run again
//! ```
//!
//! QEMU loses its replay if the processor delivers an interrupt or exception whose frame it writes
//! to a watchpoint: the check of the watchpoint ends the delivery half-way, and QEMU then executes
//! one instruction without a budget. Its instruction counter has 16 bits, so it goes back by
//! 65,535, the delivery is lost, and the replay never continues.

use super::careful::{CarefulEnd, CarefulPosition, CarefulRun};
use super::deliveries::Deliveries;
use super::stub::{Registers, Stub};
use super::{DebugContext, INTERRUPT, StubState};
use crate::error::{ReplayError, Result};
use crate::event::ReplayEvent;
use crate::{PauseOptions, PausedReplay, ReplayRoute};
use keyframe_gdb::{Breakpoint, GdbConnection, GdbMessage, StopReply};
use keyframe_kernel::open_file::OpenFile;
use keyframe_replay::{ReplayProgress, StallDetector, log};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a running VM may stay at one instruction before it counts as diverged.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same for a VM that can be replaced by another replay, so that an error costs a moment.
const PATIENCE_IF_RECOVERABLE: Duration = Duration::from_secs(2);
/// How often a running VM is asked for its instruction.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// The same for a VM with watchpoints, which may lose its replay.
const ASK_WATCHED_EVERY: Duration = Duration::from_millis(100);
/// By how many instructions QEMU's counter goes back when it loses a delivery.
const LOST_INSTRUCTIONS: u64 = 65_535;

/// Lets a VM run forward.
pub(super) struct Forward<'a, 'c> {
    pub context: &'a DebugContext<'c>,
    gdb: &'a mut GdbConnection<TcpStream>,
    /// The gdbstub of the VM. It is another VM's after a divergence.
    pub stub: &'a mut Stub,
    pub stub_state: &'a StubState,
    /// The instruction before which the VM stops at the latest; `None` for the log's end.
    pub limit: Option<u64>,
    /// The position of a careful run that has stopped.
    pub careful: Option<CarefulPosition>,
    has_watches: bool,
    /// True after the debugger or the user has asked for a stop.
    wants_stop: bool,
}

/// How a VM has stopped.
pub(super) struct ForwardStop {
    /// The packet of the gdbstub, or one of the same form.
    pub reply: Vec<u8>,
    pub cause: StopCause,
}

/// Why a VM has stopped.
pub(super) enum StopCause {
    /// The gdbstub tells it: a breakpoint, a watchpoint, a step, or the limit.
    Stub,
    /// The delivery of an interrupt or exception has written to a watchpoint. The processor stands
    /// before the handler's first instruction, with the same instruction count as before the
    /// delivery. `states_before` are its earlier states at that count.
    Delivery { states_before: Vec<Registers> },
    /// The debugger or the user has asked for it.
    Interrupted,
    /// The replay has diverged from its log. The event was told.
    Diverged,
}

/// How a wait for a running VM ended.
enum WaitEnd {
    Stopped(ForwardStop),
    Lost(LostReplay),
}

/// A replay that has diverged, and can be recovered.
struct LostReplay {
    /// The greatest instruction that was seen before.
    greatest: u64,
    /// Where the VM stands; `None` if QEMU has ended.
    icount: Option<u64>,
}

/// The beginning of a run.
struct RunStart {
    icount: u64,
    /// The registers, if the run can be recovered. Without them, the VM has one state at `icount`.
    registers: Option<Registers>,
}

impl<'a, 'c> Forward<'a, 'c> {
    pub fn new(
        context: &'a DebugContext<'c>,
        gdb: &'a mut GdbConnection<TcpStream>,
        stub: &'a mut Stub,
        stub_state: &'a StubState,
        limit: Option<u64>,
    ) -> Self {
        let has_watches = stub_state.points.iter().any(Breakpoint::is_watch);
        Self {
            context,
            gdb,
            stub,
            stub_state,
            limit,
            careful: None,
            has_watches,
            wants_stop: false,
        }
    }

    /// Lets the VM run as `command` says, a debugger's packet, until it stops or is interrupted. If
    /// the replay diverges without watchpoints, this tells the event and stops it. Errors: QEMU
    /// ends or does not answer; the log cannot be read.
    pub fn run(&mut self, command: &[u8]) -> Result<ForwardStop> {
        let is_step = is_step(command);
        let mut careful = self.careful.take();
        let registers = if self.has_watches { Some(self.stub.registers()?) } else { None };
        let mut start = RunStart { icount: self.stub.icount()?, registers };
        loop {
            let end = match careful.take() {
                Some(position) => CarefulRun::resume(self, position).run(is_step)?,
                None => match self.run_armed(command, &start, is_step)? {
                    WaitEnd::Stopped(stop) => return Ok(stop),
                    WaitEnd::Lost(lost) => self.recover(&start, &lost, is_step)?,
                },
            };
            match end {
                CarefulEnd::Stopped(stop) => return Ok(stop),
                CarefulEnd::Passed { icount } => start = RunStart { icount, registers: None },
            }
        }
    }

    /// Makes one step without watchpoints, from an instruction that QEMU would stop at again.
    /// Returns false if the step was interrupted. Errors: those of [`Forward::run`].
    pub fn step_unwatched(&mut self) -> Result<bool> {
        self.stub.disarm(self.stub_state)?;
        let run = self.run(b"s")?;
        self.stub.arm(self.stub_state)?;
        Ok(!matches!(run.cause, StopCause::Interrupted | StopCause::Diverged))
    }

    /// Lets the VM run with its watchpoints.
    fn run_armed(&mut self, command: &[u8], start: &RunStart, is_step: bool) -> Result<WaitEnd> {
        if let Some(limit) = self.limit {
            self.stub.break_at(limit)?;
        }
        self.stub.send(command)?;
        self.wait(start.icount, self.has_watches, is_step)
    }

    /// Waits until a VM that runs since instruction `start` has stopped. If its replay diverges, this
    /// tells the event and stops it.
    pub fn wait_for_stop(&mut self, start: u64) -> Result<ForwardStop> {
        match self.wait(start, false, true)? {
            WaitEnd::Stopped(stop) => Ok(stop),
            WaitEnd::Lost(_) => Err(ReplayError::EndedUnderDebugger.into()),
        }
    }

    /// Returns true if the debugger or the user has asked for a stop.
    pub fn wants_stop(&mut self) -> Result<bool> {
        // After a debugger that has gone, the next one finds the VM paused.
        if !self.wants_stop {
            let message = self.gdb.receive(Duration::ZERO)?;
            let wants = matches!(message, Some(GdbMessage::Interrupt | GdbMessage::Closed));
            self.wants_stop = wants || self.context.interrupted.load(Ordering::Relaxed);
        }
        Ok(self.wants_stop)
    }

    /// Returns the stop of a VM that QEMU's stop at an instruction, or an interrupt, has stopped.
    pub fn stop_of(&self, cause: StopCause) -> ForwardStop {
        let stop = StopReply { signal: INTERRUPT, watch: None, thread: self.stub.thread.clone() };
        ForwardStop { reply: stop.packet(""), cause }
    }

    /// Goes to before the first delivery at instruction `icount`, from an instruction without an
    /// event before it. An interruption ends this early.
    pub fn approach_delivery(&mut self, icount: u64) -> Result<()> {
        let log = log::open(self.context.recording.log())?;
        CarefulRun::new(self, Deliveries::new(log), icount)?.approach(icount).map(drop)
    }

    fn wait(&mut self, start: u64, can_recover: bool, is_step: bool) -> Result<WaitEnd> {
        let mut idle_watch = self.stub.idle_watch();
        let patience = if can_recover { PATIENCE_IF_RECOVERABLE } else { PATIENCE };
        let mut progress = Progress::new(start, self.has_watches, patience);
        let log = self.stub.open_log(self.context.recording.log());
        let mut cause = StopCause::Stub;
        let mut interrupted_at: Option<Instant> = None;
        loop {
            self.stub.wait(self.gdb, &mut idle_watch)?;
            match self.stub.receive(Duration::ZERO)? {
                Some(GdbMessage::Packet(reply)) if StopReply::parse(&reply).is_some() => {
                    let icount = self.stub.icount()?;
                    let is_lost = progress.is_behind(icount)
                        || can_recover && !is_step && self.is_at_loss(icount)?;
                    if is_lost && can_recover {
                        return Ok(WaitEnd::Lost(progress.lost(Some(icount))));
                    }
                    if is_lost && matches!(cause, StopCause::Stub) {
                        self.tell_divergence(icount);
                        cause = StopCause::Diverged;
                    }
                    return Ok(WaitEnd::Stopped(ForwardStop { reply, cause }));
                }
                // Console output and the like.
                Some(GdbMessage::Packet(reply)) => self.gdb.send(&reply)?,
                Some(GdbMessage::Closed) if can_recover && !self.wants_stop()? => {
                    return Ok(WaitEnd::Lost(progress.lost(None)));
                }
                Some(GdbMessage::Closed) => return Err(ReplayError::EndedUnderDebugger.into()),
                Some(GdbMessage::Interrupt) | None => {}
            }
            if let Some(interrupted_at) = interrupted_at {
                if interrupted_at.elapsed() > PATIENCE {
                    return Err(ReplayError::StubSilent { seconds: PATIENCE.as_secs() }.into());
                }
            } else if self.wants_stop()? {
                cause = StopCause::Interrupted;
            } else if progress.is_due() {
                let icount = match self.stub.icount() {
                    Ok(icount) => icount,
                    // QEMU is ending.
                    Err(_) if can_recover => return Ok(WaitEnd::Lost(progress.lost(None))),
                    Err(e) => return Err(e),
                };
                if progress.is_lost(icount, log.and_then(OpenFile::offset)) {
                    if can_recover {
                        return Ok(WaitEnd::Lost(progress.lost(Some(icount))));
                    }
                    self.tell_divergence(icount);
                    cause = StopCause::Diverged;
                }
            }
            if interrupted_at.is_none() && !matches!(cause, StopCause::Stub) {
                self.stub.interrupt()?;
                interrupted_at = Some(Instant::now());
            }
        }
    }

    /// Returns true if a VM that has lost a delivery would stand at `icount`: the log has an event
    /// where the counter was before, and none here.
    fn is_at_loss(&self, icount: u64) -> Result<bool> {
        let log_index = self.context.recording.log_index()?;
        Ok(log_index.is_unambiguous(icount)
            && !log_index.is_unambiguous(icount.saturating_add(LOST_INSTRUCTIONS)))
    }

    fn tell_divergence(&self, icount: u64) {
        self.context.events.event(&ReplayEvent::DivergedUnderDebugger { icount });
    }

    /// Replaces a VM that has diverged by another replay, and lets that one run carefully.
    fn recover(
        &mut self,
        start: &RunStart,
        lost: &LostReplay,
        is_step: bool,
    ) -> Result<CarefulEnd> {
        let context = self.context;
        let log_index = context.recording.log_index()?;
        let log = || log::open(context.recording.log()).map(Deliveries::new);
        // Where the delivery was lost, if QEMU's counter tells it.
        let lost_at = lost.icount.map(|icount| icount.saturating_add(LOST_INSTRUCTIONS));
        let lost_at = lost_at.filter(|lost_at| *lost_at >= lost.greatest);
        let mut passed = lost.greatest;
        if let (Some(lost_at), Some(icount)) = (lost_at, lost.icount)
            && icount < lost.greatest
            && log()?.next(lost_at)? == Some(lost_at)
        {
            passed = lost_at;
        }
        // The VM would have stopped at a hit before.
        let begin = log_index.last_unambiguous(passed);
        let is_after_start = begin >= start.icount;
        let begin = if is_after_start { begin } else { log_index.last_unambiguous(start.icount) };
        let route = ReplayRoute::to(context.recording, &context.checkpoints, begin)?;
        let options = PauseOptions { extra: &context.extra, has_gdbstub: true };
        let interrupted = context.interrupted;
        let paused = PausedReplay::at(context.recording, route, options, interrupted, &mut |_| ())?;
        let Some(paused) = paused else {
            return Ok(CarefulEnd::Stopped(self.stop_of(StopCause::Interrupted)));
        };
        *self.stub = Stub::new(paused, self.stub_state)?;
        let mut careful = CarefulRun::new(self, log()?, lost_at.unwrap_or(u64::MAX))?;
        if !is_after_start
            && let Some(stop) = careful.reach(start.icount, start.registers.as_ref())?
        {
            return Ok(CarefulEnd::Stopped(stop));
        }
        careful.run(is_step)
    }
}

/// Returns whether a debugger's packet executes one instruction.
fn is_step(command: &[u8]) -> bool {
    let action = command.strip_prefix(b"vCont;").unwrap_or(command);
    matches!(action.first(), Some(b's' | b'S'))
}

/// Watches the instruction counter of a running VM.
struct Progress {
    detector: StallDetector,
    began: Instant,
    asked: Instant,
    ask_every: Duration,
    patience: Duration,
    greatest: u64,
}

impl Progress {
    fn new(start: u64, has_watches: bool, patience: Duration) -> Self {
        let began = Instant::now();
        let ask_every = if has_watches { ASK_WATCHED_EVERY } else { ASK_EVERY };
        let detector = StallDetector::new(start);
        Self { detector, began, asked: began, ask_every, patience, greatest: start }
    }

    /// Returns true if the VM is to be asked for its instruction.
    fn is_due(&self) -> bool {
        self.asked.elapsed() >= self.ask_every
    }

    /// Returns true if the counter has gone back.
    fn is_behind(&self, icount: u64) -> bool {
        icount < self.greatest
    }

    /// Notes the VM's instruction and how far it has read its log, if that is known. Returns true if
    /// the counter has gone back, or the VM has stood still for too long.
    fn is_lost(&mut self, icount: u64, log_bytes: Option<u64>) -> bool {
        self.asked = Instant::now();
        if self.is_behind(icount) {
            return true;
        }
        self.greatest = icount;
        let elapsed = self.began.elapsed();
        let progress = self.detector.observe(elapsed, icount, log_bytes, self.patience);
        matches!(progress, ReplayProgress::Stalled { .. })
    }

    fn lost(&self, icount: Option<u64>) -> LostReplay {
        LostReplay { greatest: self.greatest, icount }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_told_from_runs() {
        for (command, expected) in [
            (&b"s"[..], true),
            (b"S05", true),
            (b"vCont;s:p1.1;c:p1.-1", true),
            (b"c", false),
            (b"vCont;c", false),
            (b"C05;s", false),
        ] {
            assert_eq!(is_step(command), expected, "{}", String::from_utf8_lossy(command));
        }
    }

    #[test]
    fn a_counter_that_goes_back_is_lost() {
        let mut progress = Progress::new(100_000, true, PATIENCE);
        assert!(!progress.is_lost(100_000, None));
        assert!(!progress.is_lost(120_000, None));
        assert!(progress.is_lost(119_999, None));
        let lost = progress.lost(Some(119_999));
        assert_eq!((lost.greatest, lost.icount), (120_000, Some(119_999)));
        assert!(Progress::new(100_000, true, PATIENCE).is_behind(99_999));
    }
}
