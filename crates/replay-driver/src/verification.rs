//! Checks that an interval replays exactly: its replay ends in the state of the next checkpoint.
//!
//! ```text
//!   checkpoint ─▶ replay ─▶ the interval's end ─┬─ equals the next checkpoint ──▶ exact
//!                              │ came off       └─ the log has an event there ─▶ both replay on to an
//!                              ▼                              instruction without ─▶ compared there
//!                         tried again
//! ```
//!
//! Compared are RAM, the blocks of disks that were written, and the state of all processors and
//! devices. Where the log has an event at the end, usually an interrupt, the checkpoint lies before
//! it and a replay that stops there may lie after it. No checkpoint follows the last interval: two
//! replays from different checkpoints are compared there.

use crate::compare::{
    ComparedDisks, DeviceDifference, Difference, DifferencePlace, DifferingDevice, compare_devices,
    compare_disks, compare_ram, compare_ram_with_checkpoint, device_state,
};
use crate::error::{Error, Result};
use crate::try_count::TryCount;
use crate::{Replay, ReplayOptions, ReplayableRecording, StopReason};
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_units::{CheckpointId, error_chain};
use keyframe_vm_disks::ServedDisks;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// One of two paused replays may not have taken the events from the log yet that the other has. Their
/// devices are compared again so often, after pauses of this length, while they differ.
const SETTLE_TURNS: u32 = 5;
const SETTLE: Duration = Duration::from_millis(100);
/// How often two replays go on to a later instruction while only devices differ, and the least
/// number of instructions to the first one. Each step is ten times the one before: a guest that is
/// busy with packets leaves an interrupt pending for long.
const LATER_MAX: u32 = 4;
const LATER_INSTRUCTIONS: u64 = 10_000;

/// The result of an interval's check.
#[derive(Clone, Debug, Serialize)]
pub struct IntervalCheck {
    /// The interval's number.
    pub index: u32,
    /// The checkpoint at its begin.
    pub checkpoint: u64,
    /// The instruction at its begin.
    pub begin: u64,
    /// The instruction at its end.
    pub end: u64,
    /// The checkpoint that its end was compared with; `None` at the end of the log.
    pub compared_with: Option<u64>,
    /// The instruction of the comparison, if that is not the interval's end: at some ends something
    /// else happens at the same instruction, so that several states are right.
    pub compared_at: Option<u64>,
    /// True if the replay got to the interval's end and nothing differed.
    pub exact: bool,
    /// The number of pages of RAM that differ.
    pub differing_pages: u64,
    /// The first 16 of them.
    pub first_differing: Vec<DifferencePlace>,
    /// The number of blocks of 4096 bytes of disks that differ.
    pub differing_blocks: u64,
    /// The first 16 of them.
    pub first_differing_blocks: Vec<DifferencePlace>,
    /// The processors whose registers differ.
    pub differing_processors: Vec<DifferingDevice>,
    /// The devices whose state differs.
    pub differing_devices: Vec<DifferingDevice>,
    /// The reason why the replay did not get to the interval's end, at its last try.
    pub error: Option<String>,
    /// The number of times that it was tried.
    pub tries: u32,
    /// The reason of each try before the last, which did not get to the interval's end.
    pub failed_tries: Vec<String>,
    /// The time from QEMU's start to its end, of all tries together, in nanoseconds.
    pub wall_ns: u64,
}

/// The limits that end a replay before its target.
#[derive(Clone, Copy, Debug)]
pub struct CheckLimits<'a> {
    /// A flag that becomes true once the user wants an end.
    pub interrupted: &'a AtomicBool,
    /// The time for which a replay may stand still.
    pub patience: Duration,
    /// The number of times that an interval is tried whose replay does not get to its end.
    pub tries: u32,
}

/// Replays `interval` and compares its end with the next checkpoint, or at the end of the log with
/// another replay. Calls `progress` with the number of instructions that it has replayed since the
/// last call. Errors are in the result.
pub fn check_interval(
    source: &ReplayableRecording,
    interval: &Interval,
    limits: CheckLimits<'_>,
    progress: &dyn Fn(u64),
) -> IntervalCheck {
    let began = Instant::now();
    let mut failed_tries = Vec::new();
    let mut try_count = TryCount::default();
    let found = loop {
        match replayed(source, interval, limits, progress) {
            Err(error) => {
                try_count.add(&error);
                if try_count.is_over(limits.tries) || limits.interrupted.load(Ordering::Relaxed) {
                    break Err(error);
                }
                failed_tries.push(error_chain(&error));
            }
            found => break found,
        }
    };
    let (difference, compared_at, error) = match found {
        Ok((difference, compared_at)) => (difference, compared_at, None),
        Err(error) => (VmDifference::default(), None, Some(error_chain(&error))),
    };
    IntervalCheck {
        index: interval.index,
        checkpoint: interval.begin.checkpoint.0,
        begin: interval.begin.icount,
        end: interval.end_icount,
        compared_with: interval.end.map(|id| id.0),
        compared_at,
        exact: error.is_none() && difference.is_none(),
        differing_pages: difference.ram.count,
        first_differing: difference.ram.first,
        differing_blocks: difference.disks.count,
        first_differing_blocks: difference.disks.first,
        differing_processors: difference.devices.processors,
        differing_devices: difference.devices.devices,
        error,
        tries: failed_tries.len() as u32 + 1,
        failed_tries,
        wall_ns: keyframe_units::elapsed_ns(began),
    }
}

/// The differences between a replay and its checkpoint.
#[derive(Default)]
struct VmDifference {
    ram: Difference,
    disks: Difference,
    devices: DeviceDifference,
}

impl VmDifference {
    fn is_none(&self) -> bool {
        self.ram.count == 0 && self.disks.count == 0 && self.devices.is_none()
    }

    /// True if RAM, disks and the processors' registers are equal, and a device differs.
    fn is_of_devices_alone(&self) -> bool {
        let Self { ram, disks, devices } = self;
        ram.count == 0
            && disks.count == 0
            && devices.processors.is_empty()
            && !devices.devices.is_empty()
    }
}

fn replayed(
    source: &ReplayableRecording,
    interval: &Interval,
    limits: CheckLimits<'_>,
    progress: &dyn Fn(u64),
) -> Result<(VmDifference, Option<u64>)> {
    let with = ReplayOptions { patience: limits.patience, ..ReplayOptions::default() };
    let interrupted = limits.interrupted;
    let end = source.until(interval.end_icount)?;
    let other = other_replay(source, interval)?;
    let until = other.map_or(end, |(_, at)| Until::Instruction(at));
    let mut replay = Replay::start(source, interval.begin, until, &with)?;
    let mut told = interval.begin.icount;
    let mut tell = |icount: u64| {
        progress(icount.saturating_sub(told));
        told = icount.max(told);
    };
    let mut reached = replay.arrive(interrupted, &mut tell)?;
    let mut compared = None;
    if let (Some((begin, at)), StopReason::Target) = (other, reached) {
        let of_replay = (&mut replay, interval.begin.checkpoint);
        let (found, at) = compare_with_replay(source, of_replay, begin, at, &with, interrupted)?;
        compared = Some((found, Some(at)));
        if interval.end.is_none() && until != end {
            reached = replay.go_on(end, interrupted, &mut tell)?;
        }
    }
    tell(interval.end_icount);
    if reached == StopReason::Interrupted {
        return Err(Error::Interrupted);
    }
    let (difference, at) = match (compared, interval.end) {
        (Some(compared), _) => compared,
        (None, None) => Default::default(),
        (None, Some(end)) => {
            let begin = interval.begin.checkpoint;
            let difference = differing_from(source, &mut replay, begin, end)?;
            if !difference.is_none() {
                replay.end()?;
                let found = compare_after_end(source, interval, end, &with, interrupted)?;
                return Ok((found.0, Some(found.1)));
            }
            (difference, None)
        }
    };
    replay.end()?;
    Ok((difference, at))
}

/// Returns the replay with which the replay of `interval` is to be compared, by its checkpoint and
/// the instruction of the comparison; `None` if the end is to be compared with its checkpoint, or
/// cannot be compared.
///
/// The checkpoint at the end lies before an event of that instruction, and the replay's stop may
/// lie after it: they are compared at the next instruction without an event. No checkpoint follows
/// the last interval: the other replay begins one checkpoint earlier, if there is one.
fn other_replay(
    source: &ReplayableRecording,
    interval: &Interval,
) -> Result<Option<(RecordedCheckpoint, u64)>> {
    let (end, log_index) = (interval.end_icount, source.log_index()?);
    if let Some(checkpoint) = interval.end {
        let has_event = log_index.count(end..end.saturating_add(1)) > 0;
        let at = if has_event { log_index.next_unambiguous(end) } else { None };
        return Ok(at.map(|at| (RecordedCheckpoint { icount: end, checkpoint }, at)));
    }
    let at = log_index.last_unambiguous(end.min(source.last_stop()?));
    let checkpoints = source.checkpoints()?;
    let before = checkpoints.iter().rev().find(|one| one.icount < interval.begin.icount);
    Ok(before.filter(|_| at > interval.begin.icount).map(|before| (*before, at)))
}

/// Compares after an end at whose instruction the log has an event: an interrupt, a disk's answer.
/// The checkpoint may lie before that event and the replay's stop after it, or the other way. So
/// one replay from the interval's beginning and one from the checkpoint at its end run to the next
/// instruction without an event, without a stop before it, and are compared there.
fn compare_after_end(
    source: &ReplayableRecording,
    interval: &Interval,
    end: CheckpointId,
    with: &ReplayOptions,
    interrupted: &AtomicBool,
) -> Result<(VmDifference, u64)> {
    let Some(at) = source.log_index()?.next_unambiguous(interval.end_icount) else {
        return compare_at_log_end(source, interval, end, with, interrupted);
    };
    let place = RecordedCheckpoint { icount: interval.end_icount, checkpoint: end };
    let mut one = Replay::start(source, interval.begin, Until::Instruction(at), with)?;
    if one.arrive(interrupted, &mut |_| ())? != StopReason::Target {
        return Err(Error::Interrupted);
    }
    let of_one = (&mut one, interval.begin.checkpoint);
    let compared = compare_with_replay(source, of_one, place, at, with, interrupted)?;
    one.end()?;
    Ok(compared)
}

/// Compares `one`, a replay that began at a checkpoint and has reached instruction `at`, with a
/// replay from checkpoint `begin` to `at`. Returns what differs, and the instruction of the
/// comparison.
///
/// A paused QEMU takes events from the log that it finds there, such as a packet, and an interrupt
/// may then be pending in one of the replays already. If nothing but devices differs, both replays
/// go on to a later instruction and are compared there. There all must be equal, RAM included.
fn compare_with_replay(
    source: &ReplayableRecording,
    (one, checkpoint): (&mut Replay, CheckpointId),
    begin: RecordedCheckpoint,
    mut at: u64,
    with: &ReplayOptions,
    interrupted: &AtomicBool,
) -> Result<(VmDifference, u64)> {
    let mut other = Replay::start(source, begin, Until::Instruction(at), with)?;
    let mut reached = other.arrive(interrupted, &mut |_| ())?;
    let mut later = 0;
    loop {
        if reached != StopReason::Target {
            return Err(Error::Interrupted);
        }
        let sides = [(&mut *one, checkpoint), (&mut other, begin.checkpoint)];
        let difference = difference_of_replays(source, sides)?;
        let step = LATER_INSTRUCTIONS * 10u64.pow(later);
        let next = source.log_index()?.next_unambiguous(at.saturating_add(step));
        let may_go_on = difference.is_of_devices_alone() && later < LATER_MAX;
        let last = source.last_stop()?;
        let next = next.filter(|next| may_go_on && *next <= last);
        let Some(next) = next else {
            other.end()?;
            return Ok((difference, at));
        };
        (at, later) = (next, later + 1);
        reached = one.go_on(Until::Instruction(at), interrupted, &mut |_| ())?;
        if reached == StopReason::Target {
            reached = other.go_on(Until::Instruction(at), interrupted, &mut |_| ())?;
        }
    }
}

/// Compares two paused replays, each given with the checkpoint that it began with.
fn difference_of_replays(
    source: &ReplayableRecording,
    [(one, checkpoint), (other, other_checkpoint)]: [(&mut Replay, CheckpointId); 2],
) -> Result<VmDifference> {
    let layout = other.loaded.meta.ram.clone();
    let ram = compare_ram(one.restored(), other.restored(), &layout)?;
    let disks = disks_difference(
        source,
        DisksOf { checkpoint, served: one.served() },
        DisksOf { checkpoint: other_checkpoint, served: other.served() },
    )?;
    let mut compare = || -> Result<DeviceDifference> {
        compare_devices(&device_state(one.restored())?, &device_state(other.restored())?)
    };
    let mut devices = compare()?;
    for _ in 0..SETTLE_TURNS {
        if devices.is_none() {
            break;
        }
        std::thread::sleep(SETTLE);
        devices = compare()?;
    }
    Ok(VmDifference { ram, disks, devices })
}

/// Compares RAM and disks at the log's end, for an interval without a later instruction that has no
/// event. All events of the last instruction have happened there, which the checkpoint's processors
/// and devices may not have seen.
fn compare_at_log_end(
    source: &ReplayableRecording,
    interval: &Interval,
    end: CheckpointId,
    with: &ReplayOptions,
    interrupted: &AtomicBool,
) -> Result<(VmDifference, u64)> {
    let mut replay = Replay::start(source, interval.begin, Until::LogEnd, with)?;
    if replay.arrive(interrupted, &mut |_| ())? == StopReason::Interrupted {
        return Err(Error::Interrupted);
    }
    let found = differing_from(source, &mut replay, interval.begin.checkpoint, end)?;
    replay.end()?;
    let difference = VmDifference { devices: DeviceDifference::default(), ..found };
    Ok((difference, source.last_stop()?))
}

/// Compares `replay`, which began at checkpoint `begin`, with checkpoint `end`.
fn differing_from(
    source: &ReplayableRecording,
    replay: &mut Replay,
    begin: CheckpointId,
    end: CheckpointId,
) -> Result<VmDifference> {
    let expected = source.store.load(end).map_err(|e| Error::store(source.store.path(), e))?;
    let ram = compare_ram_with_checkpoint(replay.restored(), &expected)?;
    let disks = disks_difference(
        source,
        DisksOf { checkpoint: begin, served: replay.served() },
        DisksOf { checkpoint: end, served: None },
    )?;
    let devices = compare_devices(&device_state(replay.restored())?, &expected.device_state)?;
    Ok(VmDifference { ram, disks, devices })
}

/// One side of a comparison of disks.
struct DisksOf<'a> {
    /// The checkpoint, or the one that the replay began with.
    checkpoint: CheckpointId,
    /// The disks of the replay; `None` for a checkpoint.
    served: Option<&'a mut ServedDisks>,
}

fn disks_difference(
    source: &ReplayableRecording,
    one: DisksOf<'_>,
    other: DisksOf<'_>,
) -> Result<Difference> {
    // A replay's disks are served; without any, no maps need be read.
    if one.served.is_none() {
        return Ok(Difference::default());
    }
    let disks_of = |id| {
        let loaded = source.store.load_disks(id);
        loaded.map(Arc::new).map_err(|e| Error::store(source.store.path(), e))
    };
    compare_disks(
        &mut ComparedDisks::new(disks_of(one.checkpoint)?, one.served),
        &mut ComparedDisks::new(disks_of(other.checkpoint)?, other.served),
    )
}
