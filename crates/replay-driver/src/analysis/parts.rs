//! Makes the parts of intervals: a QEMU with the tool's plugin, which replays one interval or a
//! range of them.

use super::Analysis;
use super::files::{
    DONE, FAILED, FinishedPart, MESSAGE_LINES, QEMU_LOG, empty_dir, finished_part, part_dir,
    qemu_messages, write,
};
use crate::error::{AnalysisError, Error, Result};
use crate::guest_ram::guest_ram;
use crate::try_count::TryCount;
use crate::{ReplayControl, ReplayOptions, StartTimes};
use keyframe_analysis::{Icount, IcountInterval, Part, ReplayRam, RunContext};
use keyframe_inspect::source_of;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_units::{duration_ns, elapsed_ns, error_chain};
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The worker that makes parts.
#[derive(Clone, Copy)]
pub struct PartMaker<'a> {
    /// The worker's name, which no other worker has at the same time.
    pub name: &'a str,
    /// The number of times that it tries an interval.
    pub tries_max: u32,
    /// A flag that becomes true when the user asks for an end.
    pub interrupted: &'a AtomicBool,
}

/// The caller of a run, which learns of its ends and its parts.
pub(super) trait RunCaller {
    /// Returns the interval with which the run goes on, which begins where `ended` ends; `None` to
    /// end the run. Called with the VM stopped.
    fn next(&mut self, ended: &Interval) -> Result<Option<Interval>>;

    /// Learns how long the start of the run took, before its first end.
    fn started(&mut self, _: StartTimes) {}

    /// Receives complete parts, in their order.
    fn take_parts(&mut self, parts: Vec<Part>) -> Result<()>;
}

/// The begin of a range.
pub(super) struct RangeBegin<'a> {
    /// The directory of the run.
    pub dir: &'a Path,
    pub first: &'a Interval,
    /// False if the first interval is certainly the only one.
    pub may_continue: bool,
}

/// A caller that wants the parts of known intervals in one run.
struct ListedIntervals<'a> {
    following: VecDeque<Interval>,
    parts: &'a mut Vec<Part>,
    start: &'a mut Option<StartTimes>,
}

impl RunCaller for ListedIntervals<'_> {
    fn next(&mut self, _: &Interval) -> Result<Option<Interval>> {
        Ok(self.following.pop_front())
    }

    fn started(&mut self, times: StartTimes) {
        *self.start = Some(times);
    }

    fn take_parts(&mut self, parts: Vec<Part>) -> Result<()> {
        self.parts.extend(parts);
        Ok(())
    }
}

/// The beginning of an interval's work.
#[derive(Clone, Copy)]
pub(super) struct Began {
    pub instant: Instant,
    pub time: SystemTime,
}

impl Began {
    pub fn now() -> Self {
        Self { instant: Instant::now(), time: SystemTime::now() }
    }
}

/// How a part was made.
#[derive(Clone, Copy)]
pub(super) struct PartTiming {
    pub tries: u32,
    pub began: Began,
    /// The time that it took, in nanoseconds.
    pub wall_ns: u64,
    /// How long the start of its QEMU took; `None` if the QEMU had replayed the interval before.
    pub start: Option<StartTimes>,
}

/// The tries of an interval so far.
#[derive(Default)]
pub(super) struct Tries {
    pub count: u32,
    failed: TryCount,
    /// What is written into the part's log.
    pub log: String,
}

impl Tries {
    /// Returns true if no further try is due after `tries_max` failures.
    pub fn are_over(&self, tries_max: u32) -> bool {
        self.failed.is_over(tries_max)
    }

    /// Notes a try that took `seconds`, or failed, with QEMU's `messages`.
    pub fn add(&mut self, outcome: std::result::Result<f64, &Error>, messages: &str) {
        self.count += 1;
        let try_ = self.count;
        let _ = match outcome {
            Ok(seconds) => writeln!(self.log, "try {try_}: done after {seconds:.3} s"),
            Err(error) => {
                self.failed.add(error);
                writeln!(self.log, "try {try_}: {}", error_chain(error))
            }
        };
        self.log.push_str(messages);
    }
}

impl Analysis<'_> {
    /// Returns the directory of the interval's part.
    pub(super) fn part_dir(&self, interval: &Interval) -> PathBuf {
        part_dir(&self.out, interval)
    }

    /// Returns the directory in which `maker` makes the part of `interval`.
    pub(super) fn making_dir(&self, interval: &Interval, maker: PartMaker<'_>) -> PathBuf {
        self.out.join("parts").join(format!(".{:06}.{}", interval.index, maker.name))
    }

    /// Makes the part of `interval` in a QEMU of its own, after the `tries` that it has had, and
    /// publishes it, or the reason why it failed.
    pub(super) fn make_alone(
        &self,
        interval: &Interval,
        maker: PartMaker<'_>,
        mut tries: Tries,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let (began, interrupted) = (Began::now(), maker.interrupted);
        let dir = self.making_dir(interval, maker);
        loop {
            empty_dir(&dir)?;
            let ran = self.run(&dir, std::slice::from_ref(interval), interrupted, on_progress);
            if interrupted.load(Ordering::Relaxed) {
                // No other process knows of this directory.
                let _ = std::fs::remove_dir_all(&dir);
                return Err(Error::Interrupted);
            }
            let messages = qemu_messages(&dir.join(QEMU_LOG));
            tries.add(ran.as_ref().map(|_| began.instant.elapsed().as_secs_f64()), &messages);
            match ran {
                Ok((parts, start)) => {
                    let wall_ns = elapsed_ns(began.instant);
                    let timing = PartTiming { tries: tries.count, began, wall_ns, start };
                    let done = finished(interval, maker, timing, parts);
                    return self.publish_done(&dir, interval, &done, &tries.log);
                }
                Err(error) if tries.are_over(maker.tries_max) => {
                    return self.publish_failure(&dir, interval, &error, &tries.log, &messages);
                }
                Err(_) => {}
            }
        }
    }

    /// Publishes the part of `interval` that is in `dir`.
    pub(super) fn publish_done(
        &self,
        dir: &Path,
        interval: &Interval,
        done: &FinishedPart,
        log: &str,
    ) -> Result<()> {
        write(&dir.join("log"), log.as_bytes())?;
        let text = serde_json::to_string(done).unwrap_or_default();
        write(&dir.join(DONE), text.as_bytes())?;
        self.publish(dir, interval)
    }

    /// Publishes why `interval` has no part.
    pub(super) fn publish_failure(
        &self,
        dir: &Path,
        interval: &Interval,
        error: &Error,
        log: &str,
        messages: &str,
    ) -> Result<()> {
        write(&dir.join("log"), log.as_bytes())?;
        let text = with_last_lines(error_chain(error), messages);
        write(&dir.join(FAILED), text.as_bytes())?;
        self.publish(dir, interval)
    }

    /// Renames `dir` to the interval's part, unless another worker was faster.
    fn publish(&self, dir: &Path, interval: &Interval) -> Result<()> {
        let place = self.part_dir(interval);
        let failed = |e| Error::file("rename", dir, e);
        if std::fs::rename(dir, &place).is_ok() {
            return Ok(());
        }
        if finished_part(&self.out, interval).is_some() {
            return std::fs::remove_dir_all(dir).map_err(failed);
        }
        // A part that failed before is there.
        std::fs::remove_dir_all(&place).map_err(failed)?;
        std::fs::rename(dir, &place).map_err(failed)
    }

    /// Returns the intervals before `first` that warm up the tool.
    fn warm_up(&self, first: &Interval) -> Vec<Interval> {
        // The simulation of an interval does not end where the next interval begins.
        if self.subject.is_approximate() {
            return Vec::new();
        }
        let progress = self.progress();
        let all = &progress.known.intervals;
        let Some(at) = all.iter().position(|one| one.index == first.index) else {
            return Vec::new();
        };
        let before = &all[..=at];
        let consecutive =
            before.windows(2).rev().take_while(|pair| pair[0].end_icount == pair[1].from_icount);
        let count = consecutive.take(self.tool.warm_up_intervals()).count();
        before[at - count..at].to_vec()
    }

    /// Returns whether a run can go on from one interval to the next.
    pub(super) fn can_continue(&self) -> bool {
        self.tool.can_cut() && !self.subject.is_approximate()
    }

    /// Makes the parts of `intervals`, which are consecutive, in one QEMU that runs through the
    /// tool's warm-up and then through them. Returns them, and how long the start took.
    pub(super) fn run(
        &self,
        dir: &Path,
        intervals: &[Interval],
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<(Vec<Part>, Option<StartTimes>)> {
        let (mut parts, mut start) = (Vec::new(), None);
        let Some((first, following)) = intervals.split_first() else { return Ok((parts, start)) };
        let following: VecDeque<Interval> = following.iter().copied().collect();
        let may_continue = !following.is_empty();
        let mut caller = ListedIntervals { following, parts: &mut parts, start: &mut start };
        let range = RangeBegin { dir, first, may_continue };
        self.run_range(range, interrupted, on_progress, &mut caller)?;
        Ok((parts, start))
    }

    /// Runs one QEMU through the tool's warm-up, then through the first interval of `range` and the
    /// intervals that `caller` returns.
    pub(super) fn run_range(
        &self,
        RangeBegin { dir, first, may_continue }: RangeBegin<'_>,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
        caller: &mut dyn RunCaller,
    ) -> Result<()> {
        let warm_up = self.warm_up(first);
        let kept = |mut parts: Vec<Part>| {
            parts.retain(|part| warm_up.iter().all(|one| one.index != part.interval.index));
            parts
        };
        let mut filling: VecDeque<Interval> = warm_up.iter().chain([first]).copied().collect();
        let Some(begins) = filling.pop_front() else { return Ok(()) };
        let begin = begins.begin;
        let may_continue = may_continue || !filling.is_empty();
        let context = self.run_context(dir, &begins, may_continue)?;
        let mut running = self.tool.begin(&context)?;
        let options = ReplayOptions {
            extra: vec!["-plugin".into(), running.option().into()],
            log: Some(dir.join(QEMU_LOG)),
            lazy: !self.tool.reads_ram(),
            ..ReplayOptions::default()
        };
        let mut present = context.warm_up.is_none().then_some(begins);
        let (mut began, start_times) = (Instant::now(), Cell::new(None));
        let mut on_end = || {
            if let Some(times) = start_times.take() {
                caller.started(times);
            }
            if let (Some(factor), Some(ended)) = (self.tool.waits(), &present) {
                let time = self.subject.recorded_time(ended)?;
                let time = time.ok_or(AnalysisError::NoRecordedTime(ended.index))?;
                wait_until(began + time.saturating_mul(factor as u32), interrupted);
            }
            began = Instant::now();
            let next = match present {
                None => Some(begins),
                Some(ended) => match filling.pop_front() {
                    Some(following) => Some(following),
                    None => caller.next(&ended)?,
                },
            };
            running.cut(next.map(icount_interval))?;
            present = next;
            caller.take_parts(kept(running.completed()?))?;
            Ok(next)
        };
        let mut on_start = |times| start_times.set(Some(times));
        let control = ReplayControl { interrupted, on_progress, on_start: &mut on_start };
        self.subject.run_range(begin, &begins, options, control, &mut on_end)?;
        caller.take_parts(kept(running.finish()?))
    }

    /// Describes a run from the checkpoint of `first` on, in the directory `dir`.
    fn run_context(&self, dir: &Path, first: &Interval, may_continue: bool) -> Result<RunContext> {
        let begin = first.begin;
        let warm_up = (begin.icount < first.from_icount).then_some(IcountInterval {
            index: first.index,
            start: Icount(begin.icount),
            end: Icount(first.from_icount),
        });
        Ok(RunContext {
            interface: self.plugin.interface,
            plugin: self.plugin.path.clone(),
            ram: self.ram_at(begin)?,
            dir: dir.to_owned(),
            warm_up,
            first: icount_interval(*first),
            may_continue,
        })
    }

    /// Describes the guest's RAM at a checkpoint.
    fn ram_at(&self, checkpoint: RecordedCheckpoint) -> Result<ReplayRam> {
        let store = self.subject.store();
        let sealed = store.sealed(checkpoint.checkpoint);
        let meta = sealed.map_err(|e| Error::store(store.path(), e))?.meta;
        let source = source_of(&meta.machine, &meta.ram);
        guest_ram(&source, &meta.machine.guest_map.unwrap_or_default(), self.plugin.interface)
    }
}

/// Adds the last lines of QEMU's messages, which tell why a replay failed, to its error.
fn with_last_lines(error: String, messages: &str) -> String {
    let last: Vec<&str> = messages.lines().rev().take(MESSAGE_LINES).collect();
    last.iter().rev().fold(error, |all, line| all + "\n  " + line)
}

/// Describes a part that `maker` has made.
pub(super) fn finished(
    interval: &Interval,
    maker: PartMaker<'_>,
    timing: PartTiming,
    parts: Vec<Part>,
) -> FinishedPart {
    let PartTiming { tries, began, wall_ns, start } = timing;
    let since = began.time.duration_since(UNIX_EPOCH).unwrap_or_default();
    FinishedPart {
        index: interval.index,
        tries,
        wall_ns,
        began_at_ns: duration_ns(since),
        worker: maker.name.to_owned(),
        is_old: false,
        start,
        parts,
    }
}

/// Waits until `end`, or until `interrupted` becomes true.
fn wait_until(end: Instant, interrupted: &AtomicBool) {
    const LOOK_EVERY: Duration = Duration::from_millis(20);
    while !interrupted.load(Ordering::Relaxed) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK_EVERY));
    }
}

fn icount_interval(interval: Interval) -> IcountInterval {
    IcountInterval {
        index: interval.index,
        start: Icount(interval.from_icount),
        end: Icount(interval.end_icount),
    }
}
