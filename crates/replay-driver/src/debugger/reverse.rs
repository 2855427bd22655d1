//! Where a debugger comes when it runs back: at the last breakpoint, or before the last write to
//! what it watches.
//!
//! ```text
//!   checkpoints    ├──────────────────────────┼─────────────────────────┤
//!   paused at                                                     ▲ from
//!   searched         4th                       3rd        2nd     1st      each by a replay that stops at every breakpoint
//! ```
//!
//! The nearest range is searched first, and it is short: a breakpoint that is hit a million times
//! in an interval is hit shortly before `from`. A range begins where a replay can stop and go on.

use super::forward::{Forward, StopCause};
use super::stub::{Registers, Stub};
use super::{DebugContext, StubState, TRAP};
use crate::ReplayRoute;
use crate::error::Result;
use keyframe_gdb::{Breakpoint, GdbConnection, StopReply};
use std::net::TcpStream;
use std::ops::Range;

/// Instructions in the first range.
const FIRST_LEN: u64 = 10_000;
/// The ratio of the lengths of consecutive ranges.
const GROWTH: u64 = 16;

/// How far a debugger goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReverseMotion {
    /// One instruction.
    Step,
    /// To the last breakpoint or watchpoint.
    Run,
}

/// Where a debugger comes when it goes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReverseStop {
    /// The instruction.
    pub icount: u64,
    /// `watch:ADDRESS;`, if it is a watchpoint.
    pub watch: Option<String>,
    /// True if an interrupt or exception before the instruction is what touched the memory.
    pub is_delivery: bool,
}

impl ReverseStop {
    /// The stop at an instruction, without a watchpoint.
    pub fn at(icount: u64) -> Self {
        Self { icount, watch: None, is_delivery: false }
    }
}

/// Where a debugger begins to go back.
pub(super) struct ReverseStart {
    pub icount: u64,
    /// The processor's registers, which tell the states at an instruction with deliveries apart.
    pub registers: Registers,
}

/// Finds the last hit of the points of `stub_state` before `from`. Without a hit, it is the
/// recording's beginning. Returns `None` if the debugger or the user interrupts the search, or a
/// replay diverges.
pub(super) fn search(
    context: &DebugContext<'_>,
    gdb: &mut GdbConnection<TcpStream>,
    stub_state: &StubState,
    from: &ReverseStart,
) -> Result<Option<ReverseStop>> {
    let begin = Some(ReverseStop::at(0));
    if stub_state.points.is_empty() {
        return Ok(begin);
    }
    for range in search_ranges(context, from.icount)? {
        match last_hit(context, gdb, stub_state, range, from)? {
            SearchResult::Found(found) => return Ok(Some(found)),
            SearchResult::Nothing => {}
            SearchResult::Interrupted => return Ok(None),
        }
    }
    Ok(begin)
}

/// Returns the ranges of instructions to search, the nearest first. They cover all before `from`
/// without a gap.
fn search_ranges(context: &DebugContext<'_>, from: u64) -> Result<Vec<Range<u64>>> {
    let log_index = context.recording.log_index()?;
    let exact = |icount: u64| log_index.next_unambiguous(icount).unwrap_or(u64::MAX);
    let checkpoints = &context.checkpoints;
    let before = checkpoints.partition_point(|checkpoint| exact(checkpoint.icount) < from);
    let mut begins: Vec<u64> =
        checkpoints.iter().take(before).map(|checkpoint| exact(checkpoint.icount)).collect();
    // The last interval alone is divided further.
    let floor = begins.last().copied().unwrap_or(0);
    let near = std::iter::successors(Some(FIRST_LEN), |len| len.checked_mul(GROWTH));
    let mut near: Vec<u64> = near
        .map_while(|len| from.checked_sub(len))
        .take_while(|begin| *begin > floor)
        .map(exact)
        .filter(|begin| *begin > floor && *begin < from)
        .collect();
    near.reverse();
    begins.extend(near);
    begins.dedup();
    let ends = begins.iter().skip(1).copied().chain([from]);
    let mut all: Vec<_> = begins.iter().copied().zip(ends).map(|(begin, end)| begin..end).collect();
    all.reverse();
    Ok(all)
}

/// The result of the search in one range.
enum SearchResult {
    Found(ReverseStop),
    Nothing,
    Interrupted,
}

/// Finds the last hit in a range of instructions.
fn last_hit(
    context: &DebugContext<'_>,
    gdb: &mut GdbConnection<TcpStream>,
    stub_state: &StubState,
    range: Range<u64>,
    from: &ReverseStart,
) -> Result<SearchResult> {
    let route = ReplayRoute::to(context.recording, &context.checkpoints, range.start)?;
    let Some(paused) = context.replay(gdb, route)? else { return Ok(SearchResult::Interrupted) };
    let mut stub = Stub::new(paused, stub_state)?;
    // For some processors QEMU stops at a watchpoint behind the instruction that touched the memory.
    // The debugger is to stop before that instruction.
    let stops_before = stub.processor.stops_before_access();
    let stops_behind = !stops_before && stub_state.points.iter().any(Breakpoint::is_watch);
    let stop = (range.end + u64::from(stops_behind)).min(context.recording.last_stop()?);
    let mut last = None;
    // From a breakpoint QEMU steps, because it would hit the same breakpoint again. The step may
    // touch what is watched.
    let mut command: &[u8] = b"c";
    let mut forward = Forward::new(context, gdb, &mut stub, stub_state, Some(stop));
    while forward.stub.icount()? < stop {
        let run = forward.run(command)?;
        let at = forward.stub.icount()?;
        let is_delivery = match run.cause {
            StopCause::Interrupted | StopCause::Diverged => return Ok(SearchResult::Interrupted),
            StopCause::Stub => false,
            // It has happened before `from` if the debugger does not stand before it.
            StopCause::Delivery { states_before }
                if at == from.icount && states_before.contains(&from.registers) =>
            {
                break;
            }
            StopCause::Delivery { .. } => true,
        };
        let Some(hit) = StopReply::parse(&run.reply).filter(|reply| reply.signal == TRAP) else {
            // The range's end, or the guest's.
            break;
        };
        let was_step = command == b"s";
        command = b"c";
        let icount = match &hit.watch {
            Some(_) if is_delivery || stops_before => at,
            Some(_) => at.saturating_sub(1),
            None if was_step => continue,
            None => {
                command = b"s";
                at
            }
        };
        if icount >= range.end && !is_delivery {
            break;
        }
        let is_before_access = stops_before && hit.watch.is_some() && !is_delivery;
        last = Some(ReverseStop { icount, watch: hit.watch, is_delivery });
        if is_before_access && !forward.step_unwatched()? {
            return Ok(SearchResult::Interrupted);
        }
    }
    Ok(last.map_or(SearchResult::Nothing, SearchResult::Found))
}
