//! `keyframe verify`: each interval of a recording is replayed, and its end compared with the next
//! checkpoint.

use super::recorded::RecordedArgs;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use crate::progress::instructions_bar;
use indicatif::ProgressBar;
use keyframe_replay::interval::Interval;
use keyframe_replay_driver::{
    CheckLimits, DifferingDevice, DifferingSection, IntervalCheck, ReplayableRecording,
    check_interval, jobs,
};
use serde::Serialize;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Replay a recording's intervals and compare them with its checkpoints
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each interval is replayed in a QEMU of its own, from its checkpoint to the instruction of the next one. There its RAM is compared with
that checkpoint, page by page, and so are all blocks of disks that the replay or the recording wrote, all registers of the processors
and the state of all devices. A replay that departs from its log stops for ever. Keyframe notices that, and reports the interval, the
instruction and the processor's registers. No checkpoint follows the last interval: its end is compared with that of a second replay,
which begins one checkpoint earlier. In a recording with one checkpoint the replay only has to reach the end.

On a busy machine QEMU's replay sometimes stops where it does not stop the next time. An interval that did not reach its end is
therefore tried again, and the output says so. An interval whose end differs is not tried again.

Exit codes: 0 all intervals are exact, 1 an interval is not.

Examples:
  keyframe verify R
  keyframe verify R --interval 7
  keyframe verify R --jobs 4 --json"
)]
pub struct Verify {
    #[command(flatten)]
    recorded: RecordedArgs,
    /// Only this interval (may be given several times)
    #[arg(long, value_name = "N")]
    interval: Vec<u32>,
    /// How long a replay may stand at one instruction before it counts as having come off its log
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = super::checkpoints::parse_duration)]
    patience: Duration,
    /// Give an interval up after N tries that did not get to its end
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..=100))]
    tries: u32,
    /// Print what was found as JSON
    #[arg(long)]
    json: bool,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    recording: String,
    instructions: u64,
    intervals: Vec<IntervalCheck>,
    exact: bool,
}

impl Verify {
    /// Replays them all, or those that were named.
    pub fn run(&self) -> Outcome {
        let source = self.recorded.open()?;
        let intervals = self.chosen(source.intervals()?)?;
        let interrupted = jobs::interruption()?;
        let bar = self.bar(&intervals);
        let limits =
            CheckLimits { interrupted: &interrupted, patience: self.patience, tries: self.tries };
        let jobs = self.recorded.jobs;
        let mut checked =
            jobs::for_each_interval(&source, &intervals, jobs, &interrupted, |interval| {
                check_interval(&source, interval, limits, &|instructions| bar.inc(instructions))
            })?;
        bar.finish_and_clear();
        if interrupted.load(Ordering::Relaxed) {
            return Err(Failure::new("interrupted: not all intervals were replayed"));
        }
        checked.sort_by_key(|one: &IntervalCheck| one.index);
        self.tell(&source, checked)
    }

    fn chosen(&self, mut intervals: Vec<Interval>) -> Result<Vec<Interval>, Failure> {
        let place = self.recorded.recording.display();
        for number in &self.interval {
            if intervals.iter().all(|interval| interval.index != *number) {
                let (first, last) = (intervals.first(), intervals.last());
                let (first, last) = (first.map_or(0, |i| i.index), last.map_or(0, |i| i.index));
                return Err(Failure::new(format!("{place}: it has no interval {number}"))
                    .fix(format!("name one of {first} to {last}")));
            }
        }
        if !self.interval.is_empty() {
            intervals.retain(|interval| self.interval.contains(&interval.index));
        }
        Ok(intervals)
    }

    fn bar(&self, intervals: &[Interval]) -> ProgressBar {
        instructions_bar(
            "replaying",
            intervals.iter().map(Interval::len).sum(),
            !self.quiet && !self.json,
        )
    }

    fn tell(&self, source: &ReplayableRecording, checked: Vec<IntervalCheck>) -> Outcome {
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
                let replayed = report.intervals.iter().map(|one| one.end - one.begin).sum();
                let count = report.intervals.len();
                let (which, instructions) = match self.interval.len() {
                    0 => (format!("all {count} intervals replay"), report.instructions),
                    1 => ("the interval replays".to_owned(), replayed),
                    _ => (format!("the {count} intervals replay"), replayed),
                };
                output::print_line(&format!(
                    "{which} exactly: {instructions} instructions; at {compared} checkpoints 0 pages of RAM, 0 blocks of \
                     disks, 0 processors and 0 devices differ",
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

/// Also where it was exact at last.
fn say_failed_tries(one: &IntervalCheck) {
    for (number, error) in one.failed_tries.iter().enumerate() {
        eprintln!("keyframe: {}: tried again, since at try {} {error}", name(one), number + 1);
    }
}

fn say_wrong(one: &IntervalCheck) {
    let which = name(one);
    if let Some(error) = &one.error {
        eprintln!("keyframe: {which}: {error}");
        return;
    }
    let (pages, blocks) = (one.differing_pages, one.differing_blocks);
    let (processors, devices) = (one.differing_processors.len(), one.differing_devices.len());
    eprintln!(
        "keyframe: {which}: {pages} pages of RAM, {blocks} blocks of disks, {processors} processors and {devices} devices differ \
         at its end"
    );
    for place in one.first_differing.iter().chain(&one.first_differing_blocks) {
        eprintln!("keyframe:   {} at {:#x}", place.region, place.offset_bytes);
    }
    for DifferingDevice(section) in one.differing_processors.iter().chain(&one.differing_devices) {
        let DifferingSection { name, instance, offset_bytes } = section;
        eprintln!("keyframe:   {name} {instance}, byte {offset_bytes} of its state");
    }
}

fn name(one: &IntervalCheck) -> String {
    let IntervalCheck { index, checkpoint, begin, end, .. } = one;
    format!("interval {index} (checkpoint {checkpoint}, instructions {begin} to {end})")
}
