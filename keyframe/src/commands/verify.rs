//! `keyframe verify`: each interval of a recording is replayed, and its end compared with the next
//! checkpoint.

use super::recorded::RecordedArgs;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use crate::progress::instructions_bar;
use indicatif::ProgressBar;
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_replay_driver::{
    ComparedDisks, Difference, Replay, ReplayOptions, ReplayableRecording, StopReason,
    compare_disks, compare_ram, compare_ram_with_checkpoint, jobs,
};
use keyframe_units::CheckpointId;
use keyframe_vm_disks::ServedDisks;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Replay a recording's intervals and compare them with its checkpoints
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each interval is replayed in a QEMU of its own, from its checkpoint to the instruction of the next one. There its RAM is compared with
that checkpoint, page by page, and so are all blocks of disks that the replay or the recording wrote. A replay that departs from its
log stops for ever. Keyframe notices that, and reports the interval, the instruction and the processor's registers. The last
interval ends with the log: no checkpoint follows, so it only has to reach the end.

On a busy machine QEMU's replay sometimes stops where it does not stop the next time. An interval that did not reach its end is
therefore tried again, and the output says so. An interval whose end differs is not tried again.

Exit codes: 0 all intervals are exact, 1 an interval is not.

Examples:
  keyframe verify R
  keyframe verify R --jobs 4 --json"
)]
pub struct Verify {
    #[command(flatten)]
    recorded: RecordedArgs,
    /// How long a replay may stand at one instruction before it counts as having come off its log
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = super::checkpoints::parse_duration)]
    patience: Duration,
    /// How often an interval is tried whose replay does not get to its end
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..=100))]
    tries: u32,
    /// Print what was found as JSON
    #[arg(long)]
    json: bool,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

/// The result of an interval.
#[derive(Clone, Debug, Serialize)]
struct Checked {
    index: u32,
    checkpoint: u64,
    begin: u64,
    end: u64,
    /// The checkpoint that its end was compared with.
    compared_with: Option<u64>,
    /// The instruction at which it was, where that is not its end: at some ends something happens
    /// besides, and the state there is several.
    compared_at: Option<u64>,
    exact: bool,
    differing_pages: u64,
    /// The first of them: RAM block, offset in it in bytes.
    first_differing: Vec<(String, u64)>,
    /// Blocks of 4096 bytes of disks.
    differing_blocks: u64,
    /// The first of them: disk, offset in it in bytes.
    first_differing_blocks: Vec<(String, u64)>,
    /// Why it did not get to its end, at its last try.
    error: Option<String>,
    /// How often it was tried.
    tries: u32,
    /// Why the tries before its last did not get to its end.
    failed_tries: Vec<String>,
    /// From QEMU's start to its end, of all tries.
    wall_ns: u64,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    recording: String,
    instructions: u64,
    intervals: Vec<Checked>,
    exact: bool,
}

impl Verify {
    /// Replays them all.
    pub fn run(&self) -> Outcome {
        let source = self.recorded.open()?;
        let intervals = source.intervals()?;
        let interrupted = jobs::interruption()?;
        let bar = self.bar(&intervals);
        let limits =
            Limits { interrupted: &interrupted, patience: self.patience, tries: self.tries };
        let jobs = self.recorded.jobs;
        let mut checked =
            jobs::for_each_interval(&source, &intervals, jobs, &interrupted, |interval| {
                check(&source, interval, limits, &bar)
            })?;
        bar.finish_and_clear();
        if interrupted.load(Ordering::Relaxed) {
            return Err(Failure::new("interrupted: not all intervals were replayed"));
        }
        checked.sort_by_key(|one: &Checked| one.index);
        self.tell(&source, checked)
    }

    fn bar(&self, intervals: &[Interval]) -> ProgressBar {
        instructions_bar(
            "replaying",
            intervals.iter().map(Interval::len).sum(),
            !self.quiet && !self.json,
        )
    }

    fn tell(&self, source: &ReplayableRecording, checked: Vec<Checked>) -> Outcome {
        let wrong = checked.iter().filter(|one| !one.exact).count();
        let report = Report {
            recording: source.recording.meta.id.clone(),
            instructions: source.last_stop()?,
            exact: wrong == 0,
            intervals: checked,
        };
        if self.json {
            output::json(&report)?;
        } else {
            report.intervals.iter().for_each(say_failed_tries);
            report.intervals.iter().filter(|one| !one.exact).for_each(say_wrong);
            if wrong == 0 && !self.quiet {
                let compared =
                    report.intervals.iter().filter(|one| one.compared_with.is_some()).count();
                output::print_line(&format!(
                    "all {} intervals replay exactly: {} instructions; at {compared} checkpoints 0 pages of RAM and 0 blocks of \
                     disks differ",
                    report.intervals.len(),
                    report.instructions
                ))?;
                let place = self.recorded.recording.display();
                eprintln!(
                    "keyframe: run a tool over it: keyframe analyze {place} --tool icount --out OUT (others: --list-tools)"
                );
            }
        }
        Ok(if wrong == 0 { DONE } else { FAILED })
    }
}

/// The differences between a replay and its checkpoint.
#[derive(Default)]
struct Differences {
    ram: Difference,
    disks: Difference,
}

impl Differences {
    fn are_none(&self) -> bool {
        self.ram.count == 0 && self.disks.count == 0
    }
}

/// The limits that end a replay before its target.
#[derive(Clone, Copy)]
struct Limits<'a> {
    /// The user wants it.
    interrupted: &'a AtomicBool,
    /// How long it may stand still.
    patience: Duration,
    /// How often it is tried.
    tries: u32,
}

impl Checked {
    fn name(&self) -> String {
        let Self { index, checkpoint, begin, end, .. } = self;
        format!("interval {index} (checkpoint {checkpoint}, instructions {begin} to {end})")
    }
}

/// Also where it was exact at last.
fn say_failed_tries(one: &Checked) {
    for (number, error) in one.failed_tries.iter().enumerate() {
        eprintln!("keyframe: {}: tried again, since at try {} {error}", one.name(), number + 1);
    }
}

fn say_wrong(one: &Checked) {
    let which = one.name();
    if let Some(error) = &one.error {
        eprintln!("keyframe: {which}: {error}");
        return;
    }
    let (pages, blocks) = (one.differing_pages, one.differing_blocks);
    eprintln!(
        "keyframe: {which}: {pages} pages of RAM and {blocks} blocks of disks differ at its end"
    );
    for (name, offset) in one.first_differing.iter().chain(&one.first_differing_blocks) {
        eprintln!("keyframe:   {name} at {offset:#x}");
    }
}

fn check(
    source: &ReplayableRecording,
    interval: &Interval,
    limits: Limits<'_>,
    bar: &ProgressBar,
) -> Checked {
    let began = Instant::now();
    let mut failed_tries = Vec::new();
    let found = loop {
        match replayed(source, interval, limits, bar) {
            Err(failure)
                if failed_tries.len() + 1 < limits.tries as usize
                    && !limits.interrupted.load(Ordering::Relaxed) =>
            {
                failed_tries.push(failure.message);
            }
            found => break found,
        }
    };
    let (difference, compared_at, error) = match found {
        Ok((difference, compared_at)) => (difference, compared_at, None),
        Err(failure) => (Differences::default(), None, Some(failure.message)),
    };
    Checked {
        index: interval.index,
        checkpoint: interval.begin.checkpoint.0,
        begin: interval.begin.icount,
        end: interval.end_icount,
        compared_with: interval.end.map(|id| id.0),
        compared_at,
        exact: error.is_none() && difference.are_none(),
        differing_pages: difference.ram.count,
        first_differing: difference.ram.first,
        differing_blocks: difference.disks.count,
        first_differing_blocks: difference.disks.first,
        error,
        tries: failed_tries.len() as u32 + 1,
        failed_tries,
        wall_ns: keyframe_units::elapsed_ns(began),
    }
}

fn replayed(
    source: &ReplayableRecording,
    interval: &Interval,
    limits: Limits<'_>,
    bar: &ProgressBar,
) -> Result<(Differences, Option<u64>), Failure> {
    let with = ReplayOptions { patience: limits.patience, ..ReplayOptions::default() };
    let interrupted = limits.interrupted;
    let mut replay =
        Replay::start(source, interval.begin, source.until(interval.end_icount)?, &with)?;
    let mut told = interval.begin.icount;
    let mut tell = |icount: u64| {
        bar.inc(icount.saturating_sub(told));
        told = icount.max(told);
    };
    let reached = replay.arrive(interrupted, &mut tell)?;
    tell(interval.end_icount);
    let difference = match (reached, interval.end) {
        (StopReason::Interrupted, _) => return Err(Failure::new("interrupted")),
        (_, Some(end)) => differing_from(source, &mut replay, interval.begin.checkpoint, end)?,
        (_, None) => Differences::default(),
    };
    replay.end()?;
    match interval.end {
        Some(end) if !difference.are_none() => {
            let (difference, at) = compare_behind_end(source, interval, end, &with, interrupted)?;
            Ok((difference, Some(at)))
        }
        _ => Ok((difference, None)),
    }
}

/// Compares behind an end at whose instruction the log has an event: an interrupt, a disk's answer.
/// The checkpoint may lie before that event and the replay's stop after it, or the other way. So one
/// replay from the interval's beginning and one from the checkpoint at its end run to the next
/// instruction without an event, without a stop before it, and are compared there.
fn compare_behind_end(
    source: &ReplayableRecording,
    interval: &Interval,
    end: CheckpointId,
    with: &ReplayOptions,
    interrupted: &AtomicBool,
) -> Result<(Differences, u64), Failure> {
    let Some(at) = source.log_index()?.next_unambiguous(interval.end_icount) else {
        return compare_at_log_end(source, interval, end, with, interrupted);
    };
    let place = RecordedCheckpoint { icount: interval.end_icount, checkpoint: end };
    let until = Until::Instruction(at);
    let mut one = Replay::start(source, interval.begin, until, with)?;
    let mut other = Replay::start(source, place, until, with)?;
    let both = [one.arrive(interrupted, &mut |_| ())?, other.arrive(interrupted, &mut |_| ())?];
    if both != [StopReason::Target; 2] {
        return Err(Failure::new("interrupted"));
    }
    let layout = other.loaded.meta.ram.clone();
    let ram = compare_ram(one.restored(), other.restored(), &layout)?;
    let disks = disks_difference(
        source,
        DisksOf { checkpoint: interval.begin.checkpoint, served: one.served() },
        DisksOf { checkpoint: end, served: other.served() },
    )?;
    let difference = Differences { ram, disks };
    one.end().and(other.end())?;
    Ok((difference, at))
}

/// Compares at the log's end, for an interval without an instruction behind its end that has no
/// event. All events of the last instruction have happened there.
fn compare_at_log_end(
    source: &ReplayableRecording,
    interval: &Interval,
    end: CheckpointId,
    with: &ReplayOptions,
    interrupted: &AtomicBool,
) -> Result<(Differences, u64), Failure> {
    let mut replay = Replay::start(source, interval.begin, Until::LogEnd, with)?;
    if replay.arrive(interrupted, &mut |_| ())? == StopReason::Interrupted {
        return Err(Failure::new("interrupted"));
    }
    let difference = differing_from(source, &mut replay, interval.begin.checkpoint, end)?;
    replay.end()?;
    Ok((difference, source.last_stop()?))
}

/// Compares `replay`, which began at checkpoint `begin`, with checkpoint `end`.
fn differing_from(
    source: &ReplayableRecording,
    replay: &mut Replay,
    begin: CheckpointId,
    end: CheckpointId,
) -> Result<Differences, Failure> {
    let expected = source.store.load(end).map_err(|e| Failure::store(&e, source.store.path()))?;
    let ram = compare_ram_with_checkpoint(replay.restored(), &expected)?;
    let disks = disks_difference(
        source,
        DisksOf { checkpoint: begin, served: replay.served() },
        DisksOf { checkpoint: end, served: None },
    )?;
    Ok(Differences { ram, disks })
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
) -> Result<Difference, Failure> {
    // A replay's disks are served; without any, no maps need be read.
    if one.served.is_none() {
        return Ok(Difference::default());
    }
    let disks_of = |id| {
        source
            .store
            .load_disks(id)
            .map(Arc::new)
            .map_err(|e| Failure::store(&e, source.store.path()))
    };
    Ok(compare_disks(
        &mut ComparedDisks::new(disks_of(one.checkpoint)?, one.served),
        &mut ComparedDisks::new(disks_of(other.checkpoint)?, other.served),
    )?)
}
