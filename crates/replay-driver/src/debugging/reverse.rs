//! Where a debugger comes when it runs back: at the last breakpoint, or before the last write to
//! what it watches.
//!
//! ```text
//!   checkpoints    ├──────────────────────────┼─────────────────────────┤
//!   stands                                                        ▲ from
//!   looked through   4th                       3rd        2nd     1st      each by one replay that stops at every breakpoint
//! ```
//!
//! The nearest stretch is looked through first, and it is short: a breakpoint that is met a million
//! times in an interval is met soon before where one stands. A stretch begins where a replay can
//! stand and go on.

use super::stub::Stub;
use super::{Told, With};
use crate::error::{ReplayError, Result};
use crate::travel::{Standing, Way};
use keyframe_gdb::{GdbConnection, Received, StopReply};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Instructions of the first stretch.
const FIRST: u64 = 10_000;
/// How much longer each is than the one before it.
const GROWTH: u64 = 16;

/// How far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Back {
    /// One instruction.
    Step,
    /// To the last breakpoint or watchpoint.
    Run,
}

/// Where it comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The instruction.
    pub icount: u64,
    /// `watch:ADDRESS;`, where it is one that touched what is watched.
    pub watch: Option<String>,
}

/// Where the last of the points that a debugger `told` lies before `from`; the recording's
/// beginning where there is none, and `None` where the debugger, or the user, does not want to
/// wait.
pub(super) fn search(
    with: &With<'_>,
    gdb: &mut GdbConnection<TcpStream>,
    told: &Told,
    from: u64,
) -> Result<Option<Found>> {
    let begin = Some(Found { icount: 0, watch: None });
    if told.points.is_empty() {
        return Ok(begin);
    }
    for (start, end) in stretches(with, from)? {
        match last_in(with, gdb, told, start, end)? {
            Looked::Found(found) => return Ok(Some(found)),
            Looked::Nothing => {}
            Looked::Interrupted => return Ok(None),
        }
    }
    Ok(begin)
}

/// What is looked through, nearest first: they follow each other without a gap, down to the
/// recording's beginning.
fn stretches(with: &With<'_>, from: u64) -> Result<Vec<(u64, u64)>> {
    let boundaries = with.source.boundaries()?;
    let standing = |icount: u64| boundaries.next_unambiguous(icount).unwrap_or(u64::MAX);
    let places = &with.places;
    let before = places.partition_point(|place| standing(place.icount) < from);
    let mut begins: Vec<u64> =
        places.iter().take(before).map(|place| standing(place.icount)).collect();
    // Within the last interval, and only there, some that are nearer.
    let floor = begins.last().copied().unwrap_or(0);
    let near = std::iter::successors(Some(FIRST), |len| len.checked_mul(GROWTH));
    let mut near: Vec<u64> = near
        .map_while(|len| from.checked_sub(len))
        .take_while(|begin| *begin > floor)
        .map(standing)
        .filter(|begin| *begin > floor && *begin < from)
        .collect();
    near.reverse();
    begins.extend(near);
    begins.dedup();
    let ends = begins.iter().skip(1).copied().chain([from]);
    let mut all: Vec<(u64, u64)> = begins.iter().copied().zip(ends).collect();
    all.reverse();
    Ok(all)
}

enum Looked {
    Found(Found),
    Nothing,
    Interrupted,
}

/// The last hit in `[start, end)`.
fn last_in(
    with: &With<'_>,
    gdb: &mut GdbConnection<TcpStream>,
    told: &Told,
    start: u64,
    end: u64,
) -> Result<Looked> {
    let way = Way::to(with.source, &with.places, start)?;
    let Some(standing) =
        Standing::at(with.source, way, (&with.extra[..], true), with.interrupted, &mut |_| ())?
    else {
        return Ok(Looked::Interrupted);
    };
    let mut stub = Stub::new(standing, told)?;
    // A watchpoint stops behind the instruction that touched the memory; that is the one to stand
    // before.
    let watches = told.points.iter().any(keyframe_gdb::Breakpoint::is_watch);
    let stop = (end + u64::from(watches)).min(with.source.last_standing()?);
    let mut last = None;
    // Off a breakpoint it steps: else it meets that again where it stands. The step may touch what
    // is watched.
    let mut how: &[u8] = b"c";
    while stub.icount()? < stop {
        // Anew each time: it holds once, and another stop may have taken it.
        stub.standing.replay.restored().vm().qmp().replay_break(stop)?;
        let Some(reply) = run_on(with, gdb, &mut stub, how)? else {
            return Ok(Looked::Interrupted);
        };
        let at = stub.icount()?;
        let Some(hit) = StopReply::parse(&reply).filter(|reply| reply.signal == 5) else {
            // Its end, or the guest's.
            break;
        };
        let was_step = how == b"s";
        how = b"c";
        let place = match &hit.watch {
            Some(_) => at.saturating_sub(1),
            None if was_step => continue,
            None => {
                how = b"s";
                at
            }
        };
        if place >= end {
            break;
        }
        last = Some(Found { icount: place, watch: hit.watch });
    }
    Ok(last.map_or(Looked::Nothing, Looked::Found))
}

/// Lets it run until it stops; `None` where nobody waits for that.
fn run_on(
    with: &With<'_>,
    gdb: &mut GdbConnection<TcpStream>,
    stub: &mut Stub,
    how: &[u8],
) -> Result<Option<Vec<u8>>> {
    let mut idling = stub.idling();
    stub.send(how)?;
    loop {
        stub.wait(gdb, &mut idling)?;
        match stub.receive(Duration::ZERO)? {
            Some(Received::Packet(reply)) if StopReply::parse(&reply).is_some() => {
                return Ok(Some(reply));
            }
            Some(Received::Closed) => return Err(ReplayError::EndedInSearch.into()),
            _ => {}
        }
        let interrupted =
            matches!(gdb.receive(Duration::ZERO)?, Some(Received::Interrupt | Received::Closed));
        if interrupted || with.interrupted.load(Ordering::Relaxed) {
            return Ok(None);
        }
    }
}
