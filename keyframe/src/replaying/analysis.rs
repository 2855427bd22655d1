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
//! Invariants: a part is made under another name and gets its own as a whole, so that two who make the same one (the first was
//! taken for lost) do not meet; it counts only with its `done`; another recording, tool or argument is another analysis.

use super::{Subject, With, jobs, ram};
use crate::commands::restore::source_of;
use crate::failure::Failure;
use indicatif::ProgressBar;
use keyframe_analysis::plugin::{self, Interface};
use keyframe_analysis::{GuestRam, Icount, MergeContext, Part, RunContext, Summary, Tool};
use keyframe_cluster::{Feed, Item, Local, More, Queue, WorkerId, drive};
use keyframe_replay::interval::{Interval, Place};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What QEMU says while it makes a part.
const QEMU_LOG: &str = "qemu.log";
/// In the directory of a part that is whole.
const DONE: &str = "done";
/// In that of one that could not be made: why.
const FAILED: &str = "failed";
/// How often it is looked whether intervals have come about.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long each interval took.
const TIMES: &str = "intervals.json";
/// Of that, what an interval's log has.
const SAID_BYTES_MAX: u64 = 64 << 10;
/// And what the error has.
const SAID_LINES: usize = 4;

/// What QEMU said, as far as it is told.
fn said(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(SAID_BYTES_MAX).read_to_end(&mut bytes));
    // A QEMU that was not started said nothing.
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// What `analysis.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The recording's id, or that of a run that was not recorded.
    pub recording: String,
    /// That of a run: nobody can say that what is seen was so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_approximate: bool,
    /// The tool, as it was asked for.
    pub tool: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The intervals.
    pub intervals: Vec<Interval>,
}

impl Head {
    /// That of the analysis in `out`.
    pub fn read(out: &Path) -> Result<Self, Failure> {
        super::order::read(&out.join("analysis.json"))
    }

    /// Without its intervals.
    pub fn of(subject: Subject<'_>, tool: &str, arguments: &[String]) -> Self {
        let is_approximate = subject.is_approximate();
        let (recording, tool) = (subject.id().to_owned(), tool.to_owned());
        Self { recording, is_approximate, tool, arguments: arguments.into(), intervals: Vec::new() }
    }

    /// Whether this one goes on with `other`: it is the same, but for intervals that have come about since.
    fn goes_on_with(&self, other: &Self) -> bool {
        let but_intervals = |head: &Self| Self { intervals: Vec::new(), ..head.clone() };
        self.intervals.starts_with(&other.intervals) && but_intervals(self) == but_intervals(other)
    }
}

/// A part that is there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Done {
    /// The interval.
    pub index: u32,
    /// Tries that it took.
    pub tries: u32,
    /// From QEMU's start to its end.
    pub wall_ns: u64,
    /// When it was begun with, since 1970.
    #[serde(default)]
    pub began_at_ns: u64,
    /// Who made it.
    #[serde(default)]
    pub worker: String,
    /// It was there from an earlier run.
    #[serde(skip)]
    pub is_old: bool,
    parts: Vec<Part>,
}

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
    interface: Interface,
    plugin: PathBuf,
    _plugins: tempfile::TempDir,
    /// Those whose parts were there.
    old: BTreeSet<u32>,
    _lock: Option<std::fs::File>,
}

impl<'a> Analysis<'a> {
    /// By `tool`, which `head` names, of those intervals that lie within `range`, at least in part; into `out`, which is made, or holds
    /// the beginnings of just this analysis.
    pub fn new(
        subject: Subject<'a>,
        tool: &'a dyn Tool,
        head: Head,
        range: Range<u64>,
        out: &Path,
    ) -> Result<Self, Failure> {
        let out =
            std::path::absolute(out).map_err(|e| Failure::new(format!("resolve {}: {e}", out.display())))?;
        let mut this = Self { range, ..Self::join(subject, tool, head, &out)? };
        this.look()?;
        let course = this.course.get_mut().unwrap_or_else(PoisonError::into_inner);
        if course.is_all && course.head.intervals.is_empty() {
            let Range { start, end } = this.range;
            let last = course.all.last().map_or(0, |i| i.end_icount);
            return Err(Failure::new(format!("no interval of the recording lies between {start} and {end}"))
                .fix(format!("it has {last} instructions")));
        }
        let lock = claim(&out, &course.head)?;
        Ok(Self { _lock: Some(lock), ..this })
    }

    /// The one that somebody else has begun in `out`, which is absolute.
    pub fn join(subject: Subject<'a>, tool: &'a dyn Tool, head: Head, out: &Path) -> Result<Self, Failure> {
        let version = subject.qemu_version();
        let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map_while(|word| word.parse().ok());
        let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let interface = Interface::of_qemu(major, minor).ok_or_else(|| {
            Failure::new(format!("QEMU {version} has an interface for plugins that Keyframe has none for"))
                .fix("record with QEMU 7.2 or 10")
        })?;
        let folder = tempfile::Builder::new().prefix("keyframe-plugin-").tempdir();
        let folder = folder.map_err(|e| Failure::new(format!("make a directory for the plugin: {e}")))?;
        let plugin = plugin::place(folder.path(), interface).map_err(|e| Failure::analysis(&e))?;
        let (all, is_all) = subject.intervals(tool.can_cut())?;
        let course = RwLock::new(Course { all, head, is_all });
        let (out, old, range) = (out.to_owned(), BTreeSet::new(), 0..u64::MAX);
        Ok(Self { subject, tool, course, range, out, interface, plugin, _plugins: folder, old, _lock: None })
    }

    fn course(&self) -> RwLockReadGuard<'_, Course> {
        self.course.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its intervals, as far as they have come about.
    pub fn intervals(&self) -> Vec<Interval> {
        self.course().head.intervals.clone()
    }

    /// Looks what has come about.
    fn look(&self) -> Result<(), Failure> {
        let (all, is_all) = self.subject.intervals(self.tool.can_cut())?;
        let mut course = self.course.write().unwrap_or_else(PoisonError::into_inner);
        let lies_in = |i: &&Interval| i.end_icount > self.range.start && i.from_icount < self.range.end;
        let intervals = all.iter().filter(lies_in).copied().collect();
        let head = Head { intervals, ..course.head.clone() };
        if !head.goes_on_with(&course.head) {
            return Err(Failure::new("the recording's checkpoints have changed while it was analysed")
                .fix("begin again in another directory, and leave the store alone meanwhile"));
        }
        *course = Course { all, head, is_all };
        Ok(())
    }

    /// The same, and lets others know; what there is to do now, and whether no more comes.
    fn look_and_tell(&self) -> Result<(Vec<Item>, bool), Failure> {
        let before = self.course().head.intervals.len();
        self.look()?;
        let course = self.course();
        if course.head.intervals.len() > before {
            // Before they are in the queue.
            let path = self.out.join("analysis.json");
            write(&path.with_extension("new"), text(&course.head).as_bytes())?;
            std::fs::rename(path.with_extension("new"), &path)
                .map_err(|e| Failure::new(format!("rename {}: {e}", path.display())))?;
        }
        Ok((course.head.intervals.iter().map(item).collect(), course.is_all))
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

    /// The VM's RAM.
    pub fn ram_bytes(&self) -> Result<u64, Failure> {
        let store = self.subject.store();
        let first = self.intervals().first().map(|one| one.begin.checkpoint);
        let sealed = first.map(|id| store.sealed(id)).transpose();
        let sealed = sealed.map_err(|e| Failure::store(&e, store.path()))?;
        Ok(sealed.map_or(0, |sealed| sealed.meta.ram.len_bytes()))
    }

    /// Interval `index`, which may have come about since somebody looked.
    pub fn interval(&self, index: u32) -> Result<Interval, Failure> {
        let find = || self.course().all.iter().find(|interval| interval.index == index).copied();
        if let Some(interval) = find() {
            return Ok(interval);
        }
        let (all, is_all) = self.subject.intervals(self.tool.can_cut())?;
        let mut course = self.course.write().unwrap_or_else(PoisonError::into_inner);
        (course.all, course.is_all) = (all, is_all);
        drop(course);
        find().ok_or_else(|| Failure::new(format!("the recording has no interval {index}")))
    }

    /// The queue of the intervals that are left. Those that were given up are in it again, and what a process of this host had that
    /// has ended since.
    pub fn queue(&mut self) -> Result<Queue, Failure> {
        let failed = |e: keyframe_cluster::Error| Failure::cluster(&e);
        let queue = Queue::create(&self.out.join("queue")).map_err(failed)?;
        let is_there = |one: &&Interval| done_in(&self.out, one).is_some();
        let intervals = self.intervals();
        self.old = intervals.iter().filter(is_there).map(|one| one.index).collect();
        queue.put_back(WorkerId::is_local).map_err(failed)?;
        queue.reopen(|index| !self.old.contains(&index)).map_err(failed)?;
        let settled = queue.settled().map_err(failed)?;
        for item in intervals.iter().map(item).filter(|item| self.old.contains(&item.index)) {
            if !settled.contains(&item) {
                queue.put_settled(item).map_err(failed)?;
            }
        }
        Ok(queue)
    }

    /// What there is to do, as it comes about.
    pub fn feed(&self) -> impl Feed {
        Coming { analysis: self, looked: None }
    }

    /// Makes the parts of all intervals in this process, `jobs` at a time.
    pub fn make_here(
        &mut self,
        jobs: Option<u64>,
        tries: u32,
        interrupted: &Arc<AtomicBool>,
        bar: &ProgressBar,
    ) -> Result<(), Failure> {
        let queue = self.queue()?;
        let this = &*self;
        bar.inc(this.intervals().iter().filter(|one| this.is_old(one.index)).map(Interval::len).sum());
        let slots = jobs.map_or_else(jobs::cores, |n| n as usize);
        let job = |item: Item| {
            // It was put there for an interval that this process knows.
            let Ok(interval) = this.interval(item.index) else { return };
            let maker = format!("local-{:?}", std::thread::current().id());
            let mut told = interval.from_icount;
            let mut tell = |icount: u64| {
                bar.inc(icount.min(interval.end_icount).saturating_sub(told));
                told = icount.max(told);
            };
            match this.make(&interval, &maker, tries, interrupted, &mut tell) {
                Ok(()) => tell(interval.end_icount),
                // It is missed when the parts are collected.
                Err(failure) if !interrupted.load(Ordering::Relaxed) => {
                    bar.suspend(|| eprintln!("keyframe: interval {}: {failure}", item.index));
                }
                Err(_) => {}
            }
        };
        let driven = std::thread::scope(|scope| {
            let mut local = Local::new(scope, slots, interrupted, &job);
            drive(&queue, &mut this.feed(), &mut local, interrupted, &mut |_| ())
        });
        bar.finish_and_clear();
        driven.map_err(|e| Failure::cluster(&e))?;
        jobs::unless(interrupted)
    }

    /// The parts of all intervals, in order, once each is settled.
    pub fn collect(&self) -> Result<Vec<Done>, Failure> {
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
        let Some((index, why)) = failures.first() else { return Ok(made) };
        for (index, why) in failures.iter().skip(1) {
            eprintln!("keyframe: interval {index}: {why}");
        }
        let (failed, count) = (failures.len(), intervals.len());
        Err(Failure::new(format!("{failed} of {count} intervals failed; interval {index}: {why}"))
            .fix("call it again to try those once more; keyframe verify tells whether the recording replays"))
    }

    fn why_failed(&self, interval: &Interval) -> String {
        let text = std::fs::read_to_string(self.place(interval).join(FAILED));
        text.unwrap_or_else(|_| "its part is not there".into())
    }

    /// Makes the part of `interval`, trying again where a replay fails, and leaves it, or why there is none. Nothing where it is
    /// interrupted. `maker` is the name of who makes it.
    pub fn make(
        &self,
        interval: &Interval,
        maker: &str,
        tries_max: u32,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
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
                return Err(Failure::new("interrupted"));
            }
            let _ = match &ran {
                Ok(_) => writeln!(log, "try {tries}: done after {:.3} s", began.elapsed().as_secs_f64()),
                Err(failure) => writeln!(log, "try {tries}: {}", failure.message),
            };
            let said = said(&dir.join(QEMU_LOG));
            log.push_str(&said);
            write(&dir.join("log"), log.as_bytes())?;
            match ran {
                Ok(parts) => {
                    let wall_ns = crate::output::elapsed_ns(began);
                    let since = began_at.duration_since(UNIX_EPOCH).unwrap_or_default();
                    let began_at_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
                    let (index, worker) = (interval.index, maker.to_owned());
                    let done = Done { index, tries, wall_ns, began_at_ns, worker, is_old: false, parts };
                    write(&dir.join(DONE), serde_json::to_string(&done).unwrap_or_default().as_bytes())?;
                    return self.publish(&dir, interval);
                }
                Err(failure) if tries >= tries_max => {
                    // Its reason is in what QEMU said last, if it said anything.
                    let last: Vec<&str> = said.lines().rev().take(SAID_LINES).collect();
                    let message = last.iter().rev().fold(failure.message, |all, line| all + "\n  " + line);
                    write(&dir.join(FAILED), message.as_bytes())?;
                    return self.publish(&dir, interval);
                }
                Err(_) => {}
            }
        }
    }

    /// Gives what is in `dir` its name, unless another one was faster.
    fn publish(&self, dir: &Path, interval: &Interval) -> Result<(), Failure> {
        let place = self.place(interval);
        let failed = |e: std::io::Error| Failure::new(format!("rename {}: {e}", dir.display()));
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
        let Some(at) = course.all.iter().position(|one| one.index == first.index) else { return Vec::new() };
        let before = &course.all[..=at];
        let follow = before.windows(2).rev().take_while(|pair| pair[0].end_icount == pair[1].from_icount);
        let count = follow.take(self.tool.warm_up_intervals()).count();
        before[at - count..at].to_vec()
    }

    /// The parts of `intervals`, which follow each other, by one QEMU that goes through what warms it up and then them.
    fn run(
        &self,
        dir: &Path,
        intervals: &[Interval],
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Vec<Part>, Failure> {
        let Some(first) = intervals.first() else { return Ok(Vec::new()) };
        let before = self.warm_up(first);
        let all = [&*before, intervals].concat();
        let begin = before.first().unwrap_or(first).begin;
        let mut parts = self.go_through(dir, begin, &all, interrupted, tell)?;
        parts.retain(|part| before.iter().all(|one| one.index != part.interval.index));
        Ok(parts)
    }

    /// One QEMU from `begin` on through `intervals`, which follow each other. What lies before them is dropped.
    fn go_through(
        &self,
        dir: &Path,
        begin: Place,
        intervals: &[Interval],
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Vec<Part>, Failure> {
        let failed = |e: keyframe_analysis::Error| Failure::analysis(&e);
        let Some(first) = intervals.first() else { return Ok(Vec::new()) };
        let warm_up = (begin.icount < first.from_icount).then_some(keyframe_analysis::Interval {
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
        let mut running = self.tool.begin(&context).map_err(failed)?;
        let with = With {
            extra: vec!["-plugin".into(), running.option().into()],
            log: Some(dir.join(QEMU_LOG)),
            lazy: !self.tool.reads_ram(),
            ..With::default()
        };
        let mut cut = || running.cut().map_err(failed);
        self.subject.go_through(begin, intervals, with, (interrupted, tell), &mut cut)?;
        running.finish().map_err(failed)
    }

    /// The guest's RAM at `place`.
    fn ram(&self, place: Place) -> Result<GuestRam, Failure> {
        let store = self.subject.store();
        let meta = store.sealed(place.checkpoint).map_err(|e| Failure::store(&e, store.path()))?.meta;
        let source = source_of(&meta.machine, &meta.ram);
        ram::of(&source, &meta.machine.guest_map.unwrap_or_default(), self.interface)
    }

    /// The results of all parts.
    pub fn merge(&self, done: Vec<Done>) -> Result<Summary, Failure> {
        let took: Vec<Took> = done.iter().map(Took::from).collect();
        let times = serde_json::to_string_pretty(&took).unwrap_or_default();
        write(&self.out.join(TIMES), times.as_bytes())?;
        let parts = done.into_iter().flat_map(|done| done.parts).collect();
        let merge = MergeContext { parts, out: self.out.clone() };
        self.tool.merge(&merge).map_err(|e| Failure::analysis(&e))
    }

    /// The results of one replay through all intervals, in `OUT/sequential`.
    pub fn in_sequence(
        &self,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Summary, Failure> {
        let dir = self.out.join("sequential");
        let parts = dir.join("parts");
        fresh(&dir)?;
        fresh(&parts)?;
        let all = self.intervals();
        let [Some(first), Some(last)] = [all.first(), all.last()] else {
            return Err(Failure::new("there is no interval to analyse"));
        };
        let intervals = if self.tool.can_cut() {
            all.clone()
        } else {
            vec![Interval { end: last.end, end_icount: last.end_icount, ..*first }]
        };
        let parts = self.run(&parts, &intervals, interrupted, tell)?;
        self.tool.merge(&MergeContext { parts, out: dir }).map_err(|e| Failure::analysis(&e))
    }

    /// Removes the parts, which nobody needs once the results are there.
    pub fn clear(&self) -> Result<(), Failure> {
        let parts = self.out.join("parts");
        std::fs::remove_dir_all(&parts)
            .and_then(|()| std::fs::remove_dir_all(self.out.join("queue")))
            .map_err(|e| Failure::new(format!("remove {} and what is beside it: {e}", parts.display())))
    }
}

/// What comes about, looked at now and then.
struct Coming<'a> {
    analysis: &'a Analysis<'a>,
    looked: Option<Instant>,
}

impl Feed for Coming<'_> {
    fn more(&mut self) -> keyframe_cluster::Result<More> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(More::Items(Vec::new()));
        }
        let looked = self.analysis.look_and_tell();
        self.looked = Some(Instant::now());
        match looked {
            Ok((items, true)) => Ok(More::Last(items)),
            Ok((items, false)) => Ok(More::Items(items)),
            Err(failure) => Err(keyframe_cluster::Error::Feed(failure.message)),
        }
    }
}

fn item(interval: &Interval) -> Item {
    Item { index: interval.index, weight: interval.len() }
}

fn of(interval: Interval) -> keyframe_analysis::Interval {
    keyframe_analysis::Interval {
        index: interval.index,
        start: Icount(interval.from_icount),
        end: Icount(interval.end_icount),
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    std::fs::write(path, bytes).map_err(|e| Failure::new(format!("write {}: {e}", path.display())))
}

/// An empty directory.
fn fresh(dir: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Failure::new(format!("empty {}: {e}", dir.display())));
        }
        _ => {}
    }
    std::fs::create_dir_all(dir).map_err(|e| Failure::new(format!("make {}: {e}", dir.display())))
}

/// How long an interval took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Took {
    /// The interval.
    pub index: u32,
    /// Tries that it took.
    pub tries: u32,
    /// From QEMU's start to its end.
    pub wall_ns: u64,
    /// When it was begun with, since 1970.
    #[serde(default)]
    pub began_at_ns: u64,
}

impl From<&Done> for Took {
    fn from(&Done { index, tries, wall_ns, began_at_ns, .. }: &Done) -> Self {
        Self { index, tries, wall_ns, began_at_ns }
    }
}

/// What lies between an interval and the next of the same worker, in the median; none where no worker had two.
pub fn dispatch_ns(done: &[Done]) -> Option<u64> {
    let mut all: Vec<&Done> = done.iter().collect();
    all.sort_by_key(|one| (&one.worker, one.began_at_ns));
    let between = |pair: &[&Done]| {
        let is_one = pair[0].worker == pair[1].worker;
        is_one
            .then(|| pair[1].began_at_ns.saturating_sub(pair[0].began_at_ns.saturating_add(pair[0].wall_ns)))
    };
    let mut gaps: Vec<u64> = all.windows(2).filter_map(between).collect();
    gaps.sort_unstable();
    gaps.get(gaps.len() / 2).copied()
}

/// What the analysis in `out` is, and how long its intervals took, as far as they are done.
pub fn made_before(out: &Path) -> Result<(Head, Vec<Took>), Failure> {
    let head =
        Head::read(out).map_err(|failure| failure.fix("name a directory that keyframe analyze has made"))?;
    let all = std::fs::read_to_string(out.join(TIMES)).ok();
    let all: Option<Vec<Took>> = all.and_then(|text| serde_json::from_str(&text).ok());
    let so_far = || head.intervals.iter().filter_map(|one| done_in(out, one)).map(|done| Took::from(&done));
    let took = all.unwrap_or_else(|| so_far().collect());
    Ok((head, took))
}

fn place_in(out: &Path, interval: &Interval) -> PathBuf {
    out.join("parts").join(format!("{:06}", interval.index))
}

/// The part of `interval` that is in `out`.
fn done_in(out: &Path, interval: &Interval) -> Option<Done> {
    let place = place_in(out, interval);
    let text = std::fs::read_to_string(place.join(DONE)).ok()?;
    let mut done: Done = serde_json::from_str(&text).ok()?;
    // It was made under another name.
    done.parts.iter_mut().for_each(|part| part.dir.clone_from(&place));
    (done.index == interval.index).then_some(done)
}

/// Makes `out` the place of the analysis that `head` says, and its caller the one who wants it.
fn claim(out: &Path, head: &Head) -> Result<std::fs::File, Failure> {
    let file = out.join("analysis.json");
    match std::fs::read_to_string(&file) {
        Ok(there) => {
            let is_same = serde_json::from_str::<Head>(&there).is_ok_and(|there| head.goes_on_with(&there));
            return if is_same {
                let lock = lock(out)?;
                write(&file, text(head).as_bytes())?;
                Ok(lock)
            } else {
                Err(Failure::new(format!("{} holds another analysis", out.display()))
                    .fix("name a directory that does not exist yet, or the same recording, tool and arguments to go on"))
            };
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(Failure::new(format!("read {}: {e}", file.display()))),
    }
    std::fs::create_dir_all(out).map_err(|e| Failure::new(format!("make {}: {e}", out.display())))?;
    let mut entries =
        std::fs::read_dir(out).map_err(|e| Failure::new(format!("read {}: {e}", out.display())))?;
    if entries.next().is_some() {
        return Err(Failure::new(format!("{} exists and is not empty", out.display()))
            .fix("name a directory that does not exist yet"));
    }
    let lock = lock(out)?;
    write(&file, text(head).as_bytes())?;
    Ok(lock)
}

fn text(head: &Head) -> String {
    serde_json::to_string_pretty(head).unwrap_or_default()
}

/// The kernel drops it with its process.
fn lock(out: &Path) -> Result<std::fs::File, Failure> {
    let path = out.join("lock");
    let file = std::fs::File::options().create(true).append(true).open(&path);
    let file = file.map_err(|e| Failure::new(format!("open {}: {e}", path.display())))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => {
            Err(Failure::new(format!("{} is being worked on by another keyframe analyze", out.display()))
                .fix("wait until that one ends, or end it; it can be called again"))
        }
        Err(std::fs::TryLockError::Error(e)) => Err(Failure::new(format!("lock {}: {e}", path.display()))),
    }
}
