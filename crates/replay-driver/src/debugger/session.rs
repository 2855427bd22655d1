//! The session of one debugger.

use super::forward::{Forward, StopCause};
use super::reverse::{self, ReverseMotion, ReverseStart, ReverseStop};
use super::stub::Stub;
use super::{DebugContext, INTERRUPT, LOOK_EVERY, StubState, TRAP};
use crate::error::Result;
use crate::event::ReplayEvent;
use crate::{PausedReplay, ReplayRoute};
use keyframe_gdb::{GdbConnection, GdbMessage, GdbRequest, StopReply};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How a session ended.
#[derive(PartialEq, Eq)]
pub(super) enum SessionEnd {
    /// The debugger has detached. Another one may connect.
    Detached,
    /// The VM is to end: the debugger killed it, or the user asked for an end.
    Killed,
}

/// What follows a debugger's packet.
enum Reply {
    Send(Vec<u8>),
    /// The session ends after this answer.
    End(SessionEnd, Vec<u8>),
}

/// The session of one debugger.
pub(super) struct Session<'a> {
    context: &'a DebugContext<'a>,
    gdb: GdbConnection<TcpStream>,
    /// The gdbstub of the paused VM.
    stub: Stub,
    stub_state: StubState,
    /// True after the event that writes are refused.
    has_refused: bool,
}

impl<'a> Session<'a> {
    pub fn new(context: &'a DebugContext<'a>, gdb: GdbConnection<TcpStream>, stub: Stub) -> Self {
        Self { context, gdb, stub, stub_state: StubState::default(), has_refused: false }
    }

    /// Returns the VM, without breakpoints.
    pub fn release(self) -> Result<PausedReplay> {
        self.stub.release()
    }

    /// Answers the debugger's packets until it goes.
    pub fn run(&mut self) -> Result<SessionEnd> {
        let mut is_first = true;
        loop {
            if self.context.interrupted.load(Ordering::Relaxed) {
                return Ok(SessionEnd::Killed);
            }
            let payload = match self.gdb.receive(LOOK_EVERY) {
                Ok(None | Some(GdbMessage::Interrupt)) => continue,
                Ok(Some(GdbMessage::Closed)) => return Ok(SessionEnd::Detached),
                Ok(Some(GdbMessage::Packet(payload))) => payload,
                Err(e) => {
                    // The VM stays paused for the next debugger.
                    self.context.events.event(&ReplayEvent::DebuggerLost { error: e.into() });
                    return Ok(SessionEnd::Detached);
                }
            };
            if std::mem::take(&mut is_first) {
                // A debugger that connected before the VM was paused has repeated its packet.
                while self.gdb.receive(Duration::ZERO)? == Some(GdbMessage::Packet(payload.clone()))
                {
                }
            }
            match self.answer(&payload)? {
                Reply::Send(answer) => self.gdb.send(&answer)?,
                Reply::End(end, answer) => {
                    self.gdb.send(&answer)?;
                    return Ok(end);
                }
            }
        }
    }

    fn answer(&mut self, payload: &[u8]) -> Result<Reply> {
        let answer = match GdbRequest::parse(payload) {
            GdbRequest::Detach => return Ok(Reply::End(SessionEnd::Detached, b"OK".to_vec())),
            GdbRequest::Kill => return Ok(Reply::End(SessionEnd::Killed, b"OK".to_vec())),
            GdbRequest::Unsupported => Vec::new(),
            GdbRequest::Write => self.refuse_write(),
            GdbRequest::Run => self.run_on(payload)?,
            GdbRequest::StepBack => self.go_back(ReverseMotion::Step)?,
            GdbRequest::RunBack => self.go_back(ReverseMotion::Run)?,
            GdbRequest::SetBreakpoint(point) => {
                let answer = self.stub.ask(payload)?;
                if answer == b"OK" {
                    self.stub_state.points.insert(point);
                }
                answer
            }
            GdbRequest::RemoveBreakpoint(point) => {
                let answer = self.stub.ask(payload)?;
                if answer == b"OK" {
                    self.stub_state.points.remove(&point);
                }
                answer
            }
            GdbRequest::StopReason => {
                self.stub_state.points.clear();
                self.stub.ask(payload)?
            }
            GdbRequest::Supported => {
                self.stub_state.supported = payload.to_vec();
                with_reverse(self.stub.ask(payload)?)
            }
            GdbRequest::Thread => {
                self.stub_state.thread = payload.to_vec();
                self.stub.ask(payload)?
            }
            GdbRequest::Monitor => self.monitor(payload)?,
            GdbRequest::Other => self.stub.ask(payload)?,
        };
        Ok(Reply::Send(answer))
    }

    /// Passes a line to QEMU's monitor. What the monitor prints comes before the answer.
    fn monitor(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        let mut answer = self.stub.ask(payload)?;
        while answer.first() == Some(&b'O') && answer != b"OK" {
            self.gdb.send(&answer)?;
            answer = self.stub.answer()?;
        }
        Ok(answer)
    }

    fn refuse_write(&mut self) -> Vec<u8> {
        if !std::mem::replace(&mut self.has_refused, true) {
            self.context.events.event(&ReplayEvent::DebuggerWriteRefused);
        }
        b"E01".to_vec()
    }

    /// Lets the VM run as `payload` says, until it stops or the debugger interrupts it.
    fn run_on(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        let context = self.context;
        let end = context.recording.last_stop()?;
        let stub = &mut self.stub;
        let thread = stub.thread.clone();
        let at_end = || {
            let stop = StopReply { signal: TRAP, watch: None, thread: thread.clone() };
            stop.packet("replaylog:end;")
        };
        if stub.icount()? >= end {
            return Ok(at_end());
        }
        let limit = if context.recording.ends_with_log()? { None } else { Some(end) };
        let stop =
            Forward::new(context, &mut self.gdb, stub, &self.stub_state, limit).run(payload)?;
        let is_delivery = matches!(stop.cause, StopCause::Delivery { .. });
        if !is_delivery && (stub.icount()? >= end || stub.is_shut_down()?) {
            return Ok(at_end());
        }
        Ok(stop.reply)
    }

    /// Replays to where the debugger comes when it goes back, and changes over to that replay.
    fn go_back(&mut self, motion: ReverseMotion) -> Result<Vec<u8>> {
        let context = self.context;
        let from = self.stub.icount()?;
        let thread = self.stub.thread.clone();
        let stop = |signal, watch, why: &str| {
            StopReply { signal, watch, thread: thread.clone() }.packet(why)
        };
        let found = match motion {
            ReverseMotion::Step => Some(ReverseStop::at(from.saturating_sub(1))),
            ReverseMotion::Run => {
                let start = ReverseStart { icount: from, registers: self.stub.registers()? };
                reverse::search(context, &mut self.gdb, &self.stub_state, &start)?
            }
        };
        let Some(found) = found else {
            // Interrupted: the VM is still where it was.
            return Ok(stop(INTERRUPT, None, ""));
        };
        // The processor has several states at the instruction of a delivery.
        let icount = if found.is_delivery {
            context.recording.log_index()?.last_unambiguous(found.icount)
        } else {
            found.icount
        };
        let route = ReplayRoute::to(context.recording, &context.checkpoints, icount)?;
        if route.icount >= from {
            return Ok(stop(TRAP, None, "replaylog:begin;"));
        }
        // The paused VM is kept until the other one is there: if that fails, nothing is lost.
        let paused = context.replay(&mut self.gdb, route)?;
        let Some(paused) = paused else { return Ok(stop(INTERRUPT, None, "")) };
        self.stub = Stub::new(paused, &self.stub_state)?;
        if found.is_delivery {
            let (gdb, stub) = (&mut self.gdb, &mut self.stub);
            Forward::new(context, gdb, stub, &self.stub_state, None)
                .approach_delivery(found.icount)?;
        }
        let is_begin = found.icount < route.icount || found.icount == 0;
        Ok(stop(TRAP, found.watch, if is_begin { "replaylog:begin;" } else { "" }))
    }
}

/// Adds to the capabilities in QEMU's `answer` that the VM can go back.
fn with_reverse(mut answer: Vec<u8>) -> Vec<u8> {
    for word in [&b";ReverseStep+"[..], b";ReverseContinue+"] {
        if !answer.windows(word.len() - 1).any(|part| part == &word[1..]) {
            answer.extend(word);
        }
    }
    answer
}
