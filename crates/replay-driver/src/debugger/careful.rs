//! Runs a VM across deliveries of interrupts and exceptions that may write to a watchpoint.
//!
//! ```text
//!   armed run ──▶ │ armed steps ──▶ │ step without watchpoints │ armed run ──▶
//!                 no event          delivery: are the watched bytes the same?
//! ```
//!
//! No delivery meets a watchpoint, which QEMU's replay would not survive. A delivery that leaves
//! the watched bytes as they were is no stop, and a read watchpoint sees no delivery.

use super::deliveries::Deliveries;
use super::forward::{Forward, ForwardStop, StopCause};
use super::stub::{Registers, Stub};
use super::{StubState, TRAP};
use crate::error::Result;
use keyframe_gdb::{Breakpoint, StopReply, WriteWatch};
use std::fs::File;

/// The number of deliveries after a hit that are passed carefully, too: a stack is often at the same
/// place, and this takes less time than another replay.
const DELIVERIES_AFTER_HIT: u32 = 64;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepKind {
    /// It executes an instruction.
    Instruction,
    /// It executes an instruction of so many bytes at whose end the processor waits for an
    /// interrupt or takes an exception, and the delivery after it.
    InstructionWithDelivery(u64),
    /// It delivers an interrupt or exception.
    Delivery,
}

/// Runs a VM carefully.
pub(super) struct CarefulRun<'f, 'a, 'c> {
    forward: &'f mut Forward<'a, 'c>,
    position: CarefulPosition,
}

/// Where a careful run is.
pub(super) struct CarefulPosition {
    deliveries: Deliveries<File>,
    icount: u64,
    /// The processor's states at `icount` before each delivery that has happened there.
    states_before: Vec<Registers>,
    /// The instruction after which the VM need not run carefully.
    last: u64,
    /// The number of deliveries that shall be passed carefully.
    deliveries_left: u32,
}

/// How a careful run ended.
pub(super) enum CarefulEnd {
    Stopped(ForwardStop),
    /// It has passed all that had to be passed carefully. The VM has one state here.
    Passed {
        icount: u64,
    },
}

impl<'f, 'a, 'c> CarefulRun<'f, 'a, 'c> {
    /// Prepares a run from where the VM is, an instruction without an event, to `last`. `deliveries`
    /// are those of the log, from its beginning.
    pub fn new(
        forward: &'f mut Forward<'a, 'c>,
        deliveries: Deliveries<File>,
        last: u64,
    ) -> Result<Self> {
        let icount = forward.stub.icount()?;
        let states_before = Vec::new();
        let position =
            CarefulPosition { deliveries, icount, states_before, last, deliveries_left: 0 };
        Ok(Self { forward, position })
    }

    /// Continues a run that has stopped.
    pub fn resume(forward: &'f mut Forward<'a, 'c>, position: CarefulPosition) -> Self {
        Self { forward, position }
    }

    /// Goes to an instruction and a state of the processor there, without watchpoints. If that state
    /// is not met, it goes to the next one. Returns a stop if it is interrupted.
    pub fn reach(
        &mut self,
        icount: u64,
        registers: Option<&Registers>,
    ) -> Result<Option<ForwardStop>> {
        while self.position.icount <= icount {
            let now = self.forward.stub.registers()?;
            if self.position.icount == icount && registers.is_none_or(|registers| *registers == now)
            {
                break;
            }
            let kind = self.step_kind(&now)?;
            if let Some(stop) = self.step_unwatched(now, kind)? {
                return Ok(Some(stop));
            }
        }
        Ok(None)
    }

    /// Goes to before the first delivery at instruction `icount`. If that takes place at the end of
    /// the instruction before, it stops before that one. Returns a stop if it is interrupted.
    pub fn approach(&mut self, icount: u64) -> Result<Option<ForwardStop>> {
        while self.position.icount < icount {
            let now = self.forward.stub.registers()?;
            let kind = self.step_kind(&now)?;
            let has_delivery = matches!(kind, StepKind::InstructionWithDelivery(_));
            if has_delivery && self.position.icount + 1 == icount {
                break;
            }
            if let Some(stop) = self.step_unwatched(now, kind)? {
                return Ok(Some(stop));
            }
        }
        Ok(None)
    }

    /// Runs on until the VM stops or all is passed; after one instruction if `is_step`. After a
    /// stop, the run can be continued from the position in `forward`.
    pub fn run(mut self, is_step: bool) -> Result<CarefulEnd> {
        loop {
            if let Some(end) = self.run_once(is_step)? {
                if matches!(end, CarefulEnd::Stopped(_)) {
                    self.forward.careful = Some(self.position);
                }
                return Ok(end);
            }
        }
    }

    /// Runs to before the next delivery, or makes one step. Returns the end of the run if it is
    /// one.
    fn run_once(&mut self, is_step: bool) -> Result<Option<CarefulEnd>> {
        let log_index = self.forward.context.recording.log_index()?;
        let limit = self.forward.limit.unwrap_or(u64::MAX);
        let icount = self.position.icount;
        if self.forward.wants_stop()? {
            return Ok(Some(CarefulEnd::Stopped(self.forward.stop_of(StopCause::Interrupted))));
        }
        if icount >= limit {
            return Ok(Some(CarefulEnd::Stopped(self.forward.stop_of(StopCause::Stub))));
        }
        let next = self.position.deliveries.next(icount)?;
        let has_passed = icount > self.position.last && self.position.deliveries_left == 0;
        if !is_step && (has_passed || next.is_none()) && log_index.is_unambiguous(icount) {
            return Ok(Some(CarefulEnd::Passed { icount }));
        }
        let calm = log_index.last_unambiguous(next.unwrap_or(icount)).min(limit);
        let stop = if !is_step && calm > icount {
            self.run_to(calm)?
        } else {
            self.step_watched(is_step)?
        };
        Ok(stop.map(CarefulEnd::Stopped))
    }

    /// Lets the VM run to instruction `calm`, up to which is no delivery. Returns the stop if it
    /// stops elsewhere.
    fn run_to(&mut self, calm: u64) -> Result<Option<ForwardStop>> {
        let begin = self.position.icount;
        self.forward.stub.break_at(calm)?;
        self.forward.stub.send(b"c")?;
        let stop = self.forward.wait_for_stop(begin)?;
        self.position.icount = self.forward.stub.icount()?;
        self.position.states_before.clear();
        let is_there =
            self.position.icount == calm && is_plain(&stop) && signal(&stop) != Some(TRAP);
        Ok((!is_there).then_some(stop))
    }

    /// Makes one step. Returns the stop, if it is one for the debugger.
    fn step_watched(&mut self, is_step: bool) -> Result<Option<ForwardStop>> {
        let before = self.forward.stub.registers()?;
        let kind = self.step_kind(&before)?;
        let stop = if kind == StepKind::Instruction {
            let stop = self.step(before, kind)?;
            let is_hit = StopReply::parse(&stop.reply).is_some_and(|reply| reply.watch.is_some());
            if is_hit || !is_plain(&stop) {
                return Ok(Some(stop));
            }
            stop
        } else {
            let state = self.forward.stub_state;
            let bytes_before = watched_bytes(self.forward.stub, state)?;
            self.forward.stub.disarm(state)?;
            let stop = self.step(before, kind)?;
            self.forward.stub.arm(state)?;
            let bytes = watched_bytes(self.forward.stub, state)?;
            let changed = bytes.into_iter().zip(bytes_before).find(|(now, before)| now != before);
            if let Some(((watch, _), _)) = changed {
                self.position.deliveries_left = DELIVERIES_AFTER_HIT;
                return Ok(Some(self.delivery_stop(watch)));
            }
            if !is_plain(&stop) {
                return Ok(Some(stop));
            }
            stop
        };
        Ok((is_step || self.is_at_breakpoint()?).then_some(stop))
    }

    /// Makes one step without watchpoints. Returns a stop if it is interrupted.
    fn step_unwatched(&mut self, before: Registers, kind: StepKind) -> Result<Option<ForwardStop>> {
        if self.forward.wants_stop()? {
            return Ok(Some(self.forward.stop_of(StopCause::Interrupted)));
        }
        self.forward.stub.disarm(self.forward.stub_state)?;
        let stop = self.step(before, kind)?;
        self.forward.stub.arm(self.forward.stub_state)?;
        Ok((!is_plain(&stop)).then_some(stop))
    }

    /// Returns what the next step does. `registers` are the processor's.
    fn step_kind(&mut self, registers: &Registers) -> Result<StepKind> {
        if self.position.deliveries.count_at(self.position.icount)?
            > self.position.states_before.len()
        {
            return Ok(StepKind::Delivery);
        }
        let is_near = self.position.deliveries.count_at(self.position.icount + 1)? > 0;
        let len = if is_near { delivering_len(self.forward.stub, registers)? } else { None };
        Ok(len.map_or(StepKind::Instruction, StepKind::InstructionWithDelivery))
    }

    /// Makes one step from the state `before`, of the kind that [`Self::step_kind`] tells.
    fn step(&mut self, before: Registers, kind: StepKind) -> Result<ForwardStop> {
        let from = self.position.icount;
        self.forward.stub.send(b"s")?;
        let stop = self.forward.wait_for_stop(from)?;
        let now = self.forward.stub.registers()?;
        self.position.icount = self.forward.stub.icount()?;
        if self.position.icount != from {
            self.position.states_before.clear();
        }
        let has_delivered = match kind {
            StepKind::Instruction => false,
            // QEMU stops also if it has looked for interrupts and there was none.
            StepKind::Delivery => self.position.icount == from && now != before,
            StepKind::InstructionWithDelivery(len) => {
                let has_changed = if self.forward.stub.processor.delivery().writes_frame {
                    // It changes the stack pointer, which these instructions alone do not.
                    now.general() != before.general()
                } else {
                    let next = before.instruction_pointer().map(|at| at.wrapping_add(len));
                    now.instruction_pointer() != next
                };
                self.position.icount == from + 1 && has_changed
            }
        };
        if has_delivered {
            self.position.deliveries_left = self.position.deliveries_left.saturating_sub(1);
            self.position.states_before.push(before);
        }
        Ok(stop)
    }

    fn delivery_stop(&self, watch: WriteWatch) -> ForwardStop {
        let thread = self.forward.stub.thread.clone();
        let stop = StopReply { signal: TRAP, watch: Some(watch.stop_field()), thread };
        let states_before = self.position.states_before.clone();
        ForwardStop { reply: stop.packet(""), cause: StopCause::Delivery { states_before } }
    }

    /// Returns true if the debugger has a breakpoint at the next instruction. The end of a step does
    /// not tell it.
    fn is_at_breakpoint(&mut self) -> Result<bool> {
        let at = self.forward.stub.registers()?.instruction_pointer();
        let points = &self.forward.stub_state.points;
        Ok(at.is_some() && points.iter().any(|point| point.instruction() == at))
    }
}

/// Returns true for a stop that the gdbstub tells.
fn is_plain(stop: &ForwardStop) -> bool {
    matches!(stop.cause, StopCause::Stub)
}

fn signal(stop: &ForwardStop) -> Option<u8> {
    StopReply::parse(&stop.reply).map(|reply| reply.signal)
}

/// Returns the watchpoints of `state` for writes, with the bytes that they watch.
fn watched_bytes(stub: &mut Stub, state: &StubState) -> Result<Vec<(WriteWatch, Vec<u8>)>> {
    let watches = state.points.iter().filter_map(Breakpoint::write_watch);
    watches.map(|watch| Ok((watch, stub.memory(watch.address, watch.bytes)?))).collect()
}

/// Returns the length of the next instruction if a delivery can follow it in the same step.
fn delivering_len(stub: &mut Stub, registers: &Registers) -> Result<Option<u64>> {
    let Some(at) = registers.instruction_pointer() else { return Ok(None) };
    let delivery = stub.processor.delivery();
    let mut code = Vec::new();
    // A page may end within the longest instruction.
    for len in (1..=delivery.code_bytes).rev() {
        code = decoded(&stub.memory(at, len as u64)?);
        if code.len() == len {
            break;
        }
    }
    Ok((delivery.after_instruction)(&code))
}

/// Decodes hexadecimal digits; an error is no bytes.
fn decoded(digits: &[u8]) -> Vec<u8> {
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let (pairs, rest) = digits.as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
    bytes.filter(|_| rest.is_empty()).unwrap_or_default()
}
