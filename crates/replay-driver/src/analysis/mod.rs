//! A tool over the intervals of a recording: its plugin in a QEMU for each, or in one for all.
//!
//! ```text
//!   OUT/analysis.json      what is analysed, and how: a second run goes on with what is missing
//!   OUT/lock               held by who wants the results
//!   OUT/queue/             the intervals that are left (crates/cluster/src/queue.rs)
//!   OUT/parts/000007/      of interval 7: the tool's part, `done` or `failed`, `log` with each try and what QEMU said in it
//!   OUT/...                the results, once all parts are there
//!   OUT/intervals.json     how long each interval took, and after how many tries
//! ```
//!
//! What lies there is in `files.rs`.
//!
//! Invariants: a part is made under another name and gets its own as a whole, so that two who make
//! the same one (the first was taken for lost) do not meet; it counts only with its `done`; another
//! recording, tool or argument is another analysis.

mod files;

pub use files::{Done, Head, dispatch_ns, made_before, progress};

use files::{
    DONE, FAILED, QEMU_LOG, SAID_LINES, TIMES, Took, claim, done_in, fresh, place_in, said, write,
};
use keyframe_locks::IgnorePoison;
use keyframe_units::{duration_ns, error_chain};

use super::{Subject, With, jobs, ram};
use crate::error::{AnalysisError, Error, Result};
use crate::event::{Event, EventSink};
use keyframe_analysis::plugin::{self, PluginInterface};
use keyframe_analysis::{GuestRam, Icount, MergeContext, Part, RunContext, Tool, ToolSummary};
use keyframe_cluster::{ItemSource, LocalRunner, NewItems, Queue, QueueItem, WorkerId, drive};
use keyframe_inspect::source_of;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often it is looked whether intervals have come about.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What comes about while a recording is followed.
struct Course {
    /// The intervals of what is analysed.
    all: Vec<Interval>,
    /// Those of them that are wanted, and what with.
    head: Head,
    /// No others come.
    is_all: bool,
}

/// An analysis.
pub struct Analysis<'a> {
    subject: Subject<'a>,
    tool: &'a dyn Tool,
    course: RwLock<Course>,
    /// Which intervals are wanted, by their instructions.
    range: Range<u64>,
    out: PathBuf,
    interface: PluginInterface,
    plugin: PathBuf,
    _plugins: tempfile::TempDir,
    /// Those whose parts were there.
    old: BTreeSet<u32>,
    _lock: Option<std::fs::File>,
}

impl<'a> Analysis<'a> {
    /// By `tool`, which `head` names, of those intervals that lie within `range`, at least in part;
    /// into `out`, which is made, or holds the beginnings of just this analysis.
    pub fn new(
        subject: Subject<'a>,
        tool: &'a dyn Tool,
        head: Head,
        range: Range<u64>,
        out: &Path,
    ) -> Result<Self> {
        let out = std::path::absolute(out).map_err(|e| Error::file("resolve", out, e))?;
        let mut this = Self { range, ..Self::join(subject, tool, head, &out)? };
        let course = this.course.get_mut().ignore_poison();
        course.head.intervals = within(&course.all, &this.range);
        if course.is_all && course.head.intervals.is_empty() {
            let Range { start: from, end: to } = this.range;
            let instructions = course.all.last().map_or(0, |i| i.end_icount);
            return Err(AnalysisError::EmptyRange { from, to, instructions }.into());
        }
        let lock = claim(&out, &course.head)?;
        Ok(Self { _lock: Some(lock), ..this })
    }

    /// The one that somebody else has begun in `out`, which is absolute.
    pub fn join(subject: Subject<'a>, tool: &'a dyn Tool, head: Head, out: &Path) -> Result<Self> {
        let version = subject.qemu_version();
        let mut numbers =
            version.split(|c: char| !c.is_ascii_digit()).map_while(|word| word.parse().ok());
        let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let interface = PluginInterface::of_qemu(major, minor)
            .ok_or_else(|| AnalysisError::NoPluginInterface { version: version.to_owned() })?;
        let folder = tempfile::Builder::new().prefix("keyframe-plugin-").tempdir();
        let folder = folder.map_err(|e| Error::io("make a directory for the plugin", e))?;
        let plugin = plugin::install(folder.path(), interface)?;
        let (all, is_all) = subject.intervals(tool.can_cut())?;
        let course = RwLock::new(Course { all, head, is_all });
        let (out, old, range) = (out.to_owned(), BTreeSet::new(), 0..u64::MAX);
        Ok(Self {
            subject,
            tool,
            course,
            range,
            out,
            interface,
            plugin,
            _plugins: folder,
            old,
            _lock: None,
        })
    }

    fn course(&self) -> RwLockReadGuard<'_, Course> {
        self.course.read().ignore_poison()
    }

    /// Its intervals, as far as they have come about.
    pub fn intervals(&self) -> Vec<Interval> {
        self.course().head.intervals.clone()
    }

    /// Looks what has come about.
    fn look(&self) -> Result<()> {
        let (all, is_all) = self.subject.intervals(self.tool.can_cut())?;
        let mut course = self.course.write().ignore_poison();
        let head = Head { intervals: within(&all, &self.range), ..course.head.clone() };
        if !head.goes_on_with(&course.head) {
            return Err(AnalysisError::CheckpointsChanged.into());
        }
        *course = Course { all, head, is_all };
        Ok(())
    }

    /// The same, where anything may have, and lets others know; what there is to do now, and
    /// whether no more comes.
    fn look_and_tell(&self) -> Result<(Vec<QueueItem>, bool)> {
        let (before, is_all) = (self.course().head.intervals.len(), self.course().is_all);
        if !is_all {
            self.look()?;
        }
        let course = self.course();
        if course.head.intervals.len() > before {
            // Before they are in the queue.
            course.head.save(&self.out)?;
        }
        Ok((self.items(&course.head.intervals)?, course.is_all))
    }

    /// `intervals` as a queue takes them.
    fn items(&self, intervals: &[Interval]) -> Result<Vec<QueueItem>> {
        let efforts = self.subject.efforts(intervals)?;
        let items = intervals
            .iter()
            .zip(efforts)
            .map(|(one, weight)| QueueItem { index: one.index, weight });
        Ok(items.collect())
    }

    fn place(&self, interval: &Interval) -> PathBuf {
        place_in(&self.out, interval)
    }

    /// Its directory.
    pub fn out(&self) -> &Path {
        &self.out
    }

    /// Its tool, as it was asked for; of a manifest its file's name.
    pub fn tool_name(&self) -> String {
        let stem = PathBuf::from(&self.course().head.tool);
        stem.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Whether its part was there when the queue was made.
    pub fn is_old(&self, index: u32) -> bool {
        self.old.contains(&index)
    }

    /// How long those are.
    pub fn old_instructions(&self) -> u64 {
        self.intervals().iter().filter(|one| self.is_old(one.index)).map(Interval::len).sum()
    }

    /// The VM's RAM.
    pub fn ram_bytes(&self) -> Result<u64> {
        let store = self.subject.store();
        let first = self.intervals().first().map(|one| one.begin.checkpoint);
        let sealed = first.map(|id| store.sealed(id)).transpose();
        let sealed = sealed.map_err(|e| Error::store(store.path(), e))?;
        Ok(sealed.map_or(0, |sealed| sealed.meta.ram.len_bytes()))
    }

    /// Interval `index`, which may have come about since somebody looked.
    pub fn interval(&self, index: u32) -> Result<Interval> {
        let find = || self.course().all.iter().find(|interval| interval.index == index).copied();
        if let Some(interval) = find() {
            return Ok(interval);
        }
        let (all, _) = self.subject.intervals(self.tool.can_cut())?;
        self.course.write().ignore_poison().all = all;
        find().ok_or_else(|| AnalysisError::NoInterval(index).into())
    }

    /// The queue of the intervals that are left. Those that were given up are in it again, and what
    /// a process of this host had that has ended since.
    pub fn queue(&mut self) -> Result<Queue> {
        let queue = Queue::create(&self.out.join("queue"))?;
        let is_there = |one: &&Interval| done_in(&self.out, one).is_some();
        let intervals = self.intervals();
        self.old = intervals.iter().filter(is_there).map(|one| one.index).collect();
        queue.return_items(WorkerId::is_local)?;
        queue.reopen(|index| !self.old.contains(&index))?;
        let settled: BTreeSet<u32> = queue.settled()?.into_iter().map(|item| item.index).collect();
        let is_new =
            |one: &&Interval| self.old.contains(&one.index) && !settled.contains(&one.index);
        let unsettled: Vec<Interval> = intervals.iter().filter(is_new).copied().collect();
        for item in self.items(&unsettled)? {
            queue.add_settled(item)?;
        }
        Ok(queue)
    }

    /// What there is to do, as it comes about.
    pub fn feed(&self) -> impl ItemSource {
        Coming { analysis: self, looked: None }
    }

    /// Makes the parts of all intervals in this process, `jobs` at a time.
    pub fn make_here(
        &mut self,
        jobs: Option<u64>,
        tries: u32,
        interrupted: &Arc<AtomicBool>,
        events: &dyn EventSink,
    ) -> Result<()> {
        let queue = self.queue()?;
        let this = &*self;
        events.event(&Event::Replayed { instructions: this.old_instructions() });
        let slots = jobs.map_or_else(jobs::cores, |n| n as usize);
        let job = |item: QueueItem| {
            // It was put there for an interval that this process knows.
            let Ok(interval) = this.interval(item.index) else { return };
            let maker = format!("local-{:?}", std::thread::current().id());
            let mut told = interval.from_icount;
            let mut tell = |icount: u64| {
                let instructions = icount.min(interval.end_icount).saturating_sub(told);
                events.event(&Event::Replayed { instructions });
                told = icount.max(told);
            };
            match this.make(&interval, &maker, tries, interrupted, &mut tell) {
                Ok(()) => tell(interval.end_icount),
                // It is missed when the parts are collected.
                Err(error) if !interrupted.load(Ordering::Relaxed) => {
                    events.event(&Event::IntervalFailed { index: item.index, error });
                }
                Err(_) => {}
            }
        };
        let driven = std::thread::scope(|scope| {
            let mut local = LocalRunner::new(scope, slots, interrupted, &job);
            drive(&queue, &mut this.feed(), &mut local, interrupted, &mut |_| ())
        });
        driven?;
        jobs::unless(interrupted)
    }

    /// The parts of all intervals, in order, once each is settled.
    pub fn collect(&self, events: &dyn EventSink) -> Result<Vec<Done>> {
        let (mut made, mut failures) = (Vec::new(), Vec::new());
        let intervals = self.intervals();
        for interval in &intervals {
            match done_in(&self.out, interval) {
                Some(done) => {
                    made.push(Done { is_old: self.is_old(done.index), ..done });
                }
                None => failures.push((interval.index, self.why_failed(interval))),
            }
        }
        let (failed, count) = (failures.len(), intervals.len());
        let mut failures = failures.into_iter();
        let Some((index, reason)) = failures.next() else { return Ok(made) };
        for (index, reason) in failures {
            events.event(&Event::IntervalWithoutPart { index, reason });
        }
        Err(AnalysisError::IntervalsFailed { failed, count, index, reason }.into())
    }

    fn why_failed(&self, interval: &Interval) -> String {
        let text = std::fs::read_to_string(self.place(interval).join(FAILED));
        text.unwrap_or_else(|_| "its part is not there".into())
    }

    /// Makes the part of `interval`, trying again where a replay fails, and leaves it, or why there
    /// is none. Nothing where it is interrupted. `maker` is the name of who makes it.
    pub fn make(
        &self,
        interval: &Interval,
        maker: &str,
        tries_max: u32,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let (began, began_at) = (Instant::now(), SystemTime::now());
        let dir = self.out.join("parts").join(format!(".{:06}.{maker}", interval.index));
        let mut log = String::new();
        let mut tries = 0;
        loop {
            tries += 1;
            fresh(&dir)?;
            let ran = self.run(&dir, std::slice::from_ref(interval), interrupted, tell);
            if interrupted.load(Ordering::Relaxed) {
                // Nobody has ever heard of it.
                let _ = std::fs::remove_dir_all(&dir);
                return Err(Error::Interrupted);
            }
            let _ = match &ran {
                Ok(_) => {
                    writeln!(log, "try {tries}: done after {:.3} s", began.elapsed().as_secs_f64())
                }
                Err(error) => writeln!(log, "try {tries}: {}", error_chain(error)),
            };
            let said = said(&dir.join(QEMU_LOG));
            log.push_str(&said);
            write(&dir.join("log"), log.as_bytes())?;
            match ran {
                Ok(parts) => {
                    let wall_ns = keyframe_units::elapsed_ns(began);
                    let since = began_at.duration_since(UNIX_EPOCH).unwrap_or_default();
                    let began_at_ns = duration_ns(since);
                    let (index, worker) = (interval.index, maker.to_owned());
                    let done =
                        Done { index, tries, wall_ns, began_at_ns, worker, is_old: false, parts };
                    write(
                        &dir.join(DONE),
                        serde_json::to_string(&done).unwrap_or_default().as_bytes(),
                    )?;
                    return self.publish(&dir, interval);
                }
                Err(error) if tries >= tries_max => {
                    // Its reason is in what QEMU said last, if it said anything.
                    let last: Vec<&str> = said.lines().rev().take(SAID_LINES).collect();
                    let message = last
                        .iter()
                        .rev()
                        .fold(error_chain(&error), |all, line| all + "\n  " + line);
                    write(&dir.join(FAILED), message.as_bytes())?;
                    return self.publish(&dir, interval);
                }
                Err(_) => {}
            }
        }
    }

    /// Gives what is in `dir` its name, unless another one was faster.
    fn publish(&self, dir: &Path, interval: &Interval) -> Result<()> {
        let place = self.place(interval);
        let failed = |e| Error::file("rename", dir, e);
        if std::fs::rename(dir, &place).is_ok() {
            return Ok(());
        }
        if done_in(&self.out, interval).is_some() {
            return std::fs::remove_dir_all(dir).map_err(failed);
        }
        // One that failed before.
        std::fs::remove_dir_all(&place).map_err(failed)?;
        std::fs::rename(dir, &place).map_err(failed)
    }

    /// The intervals before `first` that warm the tool up for it.
    fn warm_up(&self, first: &Interval) -> Vec<Interval> {
        // Where a simulation of the interval before would end is not where this one begins.
        if self.subject.is_approximate() {
            return Vec::new();
        }
        let course = self.course();
        let Some(at) = course.all.iter().position(|one| one.index == first.index) else {
            return Vec::new();
        };
        let before = &course.all[..=at];
        let follow =
            before.windows(2).rev().take_while(|pair| pair[0].end_icount == pair[1].from_icount);
        let count = follow.take(self.tool.warm_up_intervals()).count();
        before[at - count..at].to_vec()
    }

    /// The parts of `intervals`, which follow each other, by one QEMU that goes through what warms
    /// it up and then them.
    fn run(
        &self,
        dir: &Path,
        intervals: &[Interval],
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Vec<Part>> {
        let Some(first) = intervals.first() else { return Ok(Vec::new()) };
        let before = self.warm_up(first);
        let all = [&*before, intervals].concat();
        let begin = before.first().unwrap_or(first).begin;
        let mut parts = self.go_through(dir, begin, &all, interrupted, tell)?;
        parts.retain(|part| before.iter().all(|one| one.index != part.interval.index));
        Ok(parts)
    }

    /// One QEMU from `begin` on through `intervals`, which follow each other. What lies before them
    /// is dropped.
    fn go_through(
        &self,
        dir: &Path,
        begin: RecordedCheckpoint,
        intervals: &[Interval],
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Vec<Part>> {
        let Some(first) = intervals.first() else { return Ok(Vec::new()) };
        let warm_up =
            (begin.icount < first.from_icount).then_some(keyframe_analysis::IcountInterval {
                index: first.index,
                start: Icount(begin.icount),
                end: Icount(first.from_icount),
            });
        let context = RunContext {
            interface: self.interface,
            plugin: self.plugin.clone(),
            ram: self.ram(begin)?,
            dir: dir.to_owned(),
            warm_up,
            intervals: intervals.iter().copied().map(of).collect(),
        };
        let mut running = self.tool.begin(&context)?;
        let with = With {
            extra: vec!["-plugin".into(), running.option().into()],
            log: Some(dir.join(QEMU_LOG)),
            lazy: !self.tool.reads_ram(),
            ..With::default()
        };
        let mut cut = || running.cut().map_err(Error::from);
        self.subject.go_through(begin, intervals, with, (interrupted, tell), &mut cut)?;
        Ok(running.finish()?)
    }

    /// The guest's RAM at `place`.
    fn ram(&self, place: RecordedCheckpoint) -> Result<GuestRam> {
        let store = self.subject.store();
        let meta = store.sealed(place.checkpoint).map_err(|e| Error::store(store.path(), e))?.meta;
        let source = source_of(&meta.machine, &meta.ram);
        ram::of(&source, &meta.machine.guest_map.unwrap_or_default(), self.interface)
    }

    /// The results of all parts.
    pub fn merge(&self, done: Vec<Done>) -> Result<ToolSummary> {
        let took: Vec<Took> = done.iter().map(Took::from).collect();
        let times = serde_json::to_string_pretty(&took).unwrap_or_default();
        write(&self.out.join(TIMES), times.as_bytes())?;
        let parts = done.into_iter().flat_map(|done| done.parts).collect();
        let merge = MergeContext { parts, out: self.out.clone() };
        self.tool.merge(&merge).map_err(Error::from)
    }

    /// The results of one replay through all intervals, in `OUT/sequential`.
    pub fn in_sequence(
        &self,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<ToolSummary> {
        let dir = self.out.join("sequential");
        let parts = dir.join("parts");
        fresh(&dir)?;
        fresh(&parts)?;
        let all = self.intervals();
        let [Some(first), Some(last)] = [all.first(), all.last()] else {
            return Err(AnalysisError::NoIntervals.into());
        };
        let intervals = if self.tool.can_cut() {
            all.clone()
        } else {
            vec![Interval { end: last.end, end_icount: last.end_icount, ..*first }]
        };
        let parts = self.run(&parts, &intervals, interrupted, tell)?;
        self.tool.merge(&MergeContext { parts, out: dir }).map_err(Error::from)
    }

    /// Removes the parts, which nobody needs once the results are there.
    pub fn clear(&self) -> Result<()> {
        let parts = self.out.join("parts");
        std::fs::remove_dir_all(&parts)
            .and_then(|()| std::fs::remove_dir_all(self.out.join("queue")))
            .map_err(|e| Error::io(format!("remove {} and what is beside it", parts.display()), e))
    }
}

/// What comes about, looked at now and then.
struct Coming<'a> {
    analysis: &'a Analysis<'a>,
    looked: Option<Instant>,
}

impl ItemSource for Coming<'_> {
    fn new_items(&mut self) -> keyframe_cluster::Result<NewItems> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(NewItems::Open(Vec::new()));
        }
        let looked = self.analysis.look_and_tell();
        self.looked = Some(Instant::now());
        match looked {
            Ok((items, true)) => Ok(NewItems::Complete(items)),
            Ok((items, false)) => Ok(NewItems::Open(items)),
            Err(error) => Err(keyframe_cluster::Error::Source(error_chain(&error))),
        }
    }
}

/// Those that lie within `range`, at least in part.
fn within(all: &[Interval], range: &Range<u64>) -> Vec<Interval> {
    let lies_in = |i: &&Interval| i.end_icount > range.start && i.from_icount < range.end;
    all.iter().filter(lies_in).copied().collect()
}

fn of(interval: Interval) -> keyframe_analysis::IcountInterval {
    keyframe_analysis::IcountInterval {
        index: interval.index,
        start: Icount(interval.from_icount),
        end: Icount(interval.end_icount),
    }
}
