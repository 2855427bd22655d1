//! A tool over the intervals of a recording: its plugin in a QEMU for each, or in one for all.
//!
//! ```text
//!   OUT/analysis.json      what is analysed, and how: a second run goes on with what is missing
//!   OUT/parts/000007/      of interval 7: the tool's part, `done` when it is whole, `log` with each try and what QEMU said in it
//!   OUT/...                the results, once all parts are there
//!   OUT/intervals.json     how long each interval took, and after how many tries
//! ```
//!
//! Invariant: a part counts only with its `done`, which is written last; another recording, tool or argument is another analysis.

use super::{Subject, With, jobs, ram};
use crate::commands::restore::source_of;
use crate::failure::Failure;
use indicatif::ProgressBar;
use keyframe_analysis::plugin::{self, Interface};
use keyframe_analysis::{GuestRam, Icount, MergeContext, Part, RunContext, Summary, Tool};
use keyframe_replay::interval::{Interval, Place};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// What QEMU says while it makes a part.
const QEMU_LOG: &str = "qemu.log";
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
    /// Of those intervals of `all` that lie within `range`, at least in part.
    pub fn within(
        subject: Subject<'_>,
        tool: &str,
        arguments: &[String],
        all: &[Interval],
        range: Range<u64>,
    ) -> Result<Self, Failure> {
        let lies_in = |i: &&Interval| i.end_icount > range.start && i.from_icount < range.end;
        let intervals: Vec<_> = all.iter().filter(lies_in).copied().collect();
        if intervals.is_empty() {
            let Range { start, end } = range;
            let last = all.last().map_or(0, |i| i.end_icount);
            return Err(Failure::new(format!("no interval of the recording lies between {start} and {end}"))
                .fix(format!("it has {last} instructions")));
        }
        let is_approximate = subject.is_approximate();
        let (recording, tool) = (subject.id().to_owned(), tool.to_owned());
        Ok(Self { recording, is_approximate, tool, arguments: arguments.into(), intervals })
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
    /// It was there from an earlier run.
    #[serde(skip)]
    pub is_old: bool,
    parts: Vec<Part>,
}

/// An analysis.
pub struct Analysis<'a> {
    subject: Subject<'a>,
    tool: &'a dyn Tool,
    all: Vec<Interval>,
    head: Head,
    out: PathBuf,
    interface: Interface,
    plugin: PathBuf,
    _plugins: tempfile::TempDir,
}

impl<'a> Analysis<'a> {
    /// Of those intervals of `all` that `head` names, into `out`, which is made, or holds the beginnings of just this analysis.
    pub fn new(
        subject: Subject<'a>,
        tool: &'a dyn Tool,
        all: Vec<Interval>,
        head: Head,
        out: &Path,
    ) -> Result<Self, Failure> {
        let out =
            std::path::absolute(out).map_err(|e| Failure::new(format!("resolve {}: {e}", out.display())))?;
        claim(&out, &head)?;
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
        Ok(Self { subject, tool, all, head, out, interface, plugin, _plugins: folder })
    }

    /// Its intervals.
    pub fn intervals(&self) -> &[Interval] {
        &self.head.intervals
    }

    fn place(&self, interval: &Interval) -> PathBuf {
        place_in(&self.out, interval)
    }

    /// The parts of all intervals, `jobs` at a time, in order.
    pub fn make_all(
        &self,
        jobs: Option<u64>,
        tries: u32,
        interrupted: &AtomicBool,
        bar: &ProgressBar,
    ) -> Result<Vec<Done>, Failure> {
        let intervals = self.intervals();
        let work = |interval: &Interval| {
            let mut told = interval.from_icount;
            let mut tell = |icount: u64| {
                bar.inc(icount.min(interval.end_icount).saturating_sub(told));
                told = icount.max(told);
            };
            let one = match done_in(&self.out, interval) {
                Some(done) => Ok(done),
                None => self.make(interval, tries, interrupted, &mut tell),
            };
            tell(interval.end_icount);
            one.map_err(|failure| (interval.index, failure))
        };
        let all = jobs::side_by_side(intervals, jobs, interrupted, work);
        bar.finish_and_clear();
        if interrupted.load(Ordering::Relaxed) {
            return Err(Failure::new("interrupted")
                .fix("call it again: it goes on with the intervals that are missing"));
        }
        let (mut made, mut failures) = (Vec::with_capacity(all.len()), Vec::new());
        for one in all {
            match one {
                Ok(done) => made.push(done),
                Err(failure) => failures.push(failure),
            }
        }
        failures.sort_by_key(|(index, _)| *index);
        if let Some((index, failure)) = failures.first() {
            for (index, failure) in failures.iter().skip(1) {
                eprintln!("keyframe: interval {index}: {}", failure.message);
            }
            let (failed, count) = (failures.len(), intervals.len());
            return Err(Failure::new(format!(
                "{failed} of {count} intervals failed; interval {index}: {}",
                failure.message
            ))
            .fix(
                "call it again to try those once more; keyframe verify tells whether the recording replays",
            ));
        }
        made.sort_by_key(|done: &Done| done.index);
        Ok(made)
    }

    /// Makes the part of `interval`, trying again where a replay fails.
    fn make(
        &self,
        interval: &Interval,
        tries_max: u32,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Done, Failure> {
        let began = Instant::now();
        let dir = self.place(interval);
        let mut log = String::new();
        let mut tries = 0;
        loop {
            tries += 1;
            fresh(&dir)?;
            let ran = self.run(&dir, std::slice::from_ref(interval), interrupted, tell);
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
                    let done = Done { index: interval.index, tries, wall_ns, is_old: false, parts };
                    write(&dir.join("done"), serde_json::to_string(&done).unwrap_or_default().as_bytes())?;
                    return Ok(done);
                }
                Err(failure) if tries >= tries_max || interrupted.load(Ordering::Relaxed) => {
                    // Its reason is in what QEMU said last, if it said anything.
                    let last: Vec<&str> = said.lines().rev().take(SAID_LINES).collect();
                    let message = last.iter().rev().fold(failure.message, |all, line| all + "\n  " + line);
                    return Err(Failure { message, ..failure });
                }
                Err(_) => {}
            }
        }
    }

    /// The intervals before `first` that warm the tool up for it.
    fn warm_up(&self, first: &Interval) -> &[Interval] {
        // Where a simulation of the interval before would end is not where this one begins.
        if self.subject.is_approximate() {
            return &[];
        }
        let Some(at) = self.all.iter().position(|one| one.index == first.index) else { return &[] };
        let before = &self.all[..=at];
        let follow = before.windows(2).rev().take_while(|pair| pair[0].end_icount == pair[1].from_icount);
        let count = follow.take(self.tool.warm_up_intervals()).count();
        &self.all[at - count..at]
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
        let all = [before, intervals].concat();
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
        let [Some(first), Some(last)] = [self.head.intervals.first(), self.head.intervals.last()] else {
            return Err(Failure::new("there is no interval to analyse"));
        };
        let intervals = if self.tool.can_cut() {
            self.head.intervals.clone()
        } else {
            vec![Interval { end: last.end, end_icount: last.end_icount, ..*first }]
        };
        let parts = self.run(&parts, &intervals, interrupted, tell)?;
        self.tool.merge(&MergeContext { parts, out: dir }).map_err(|e| Failure::analysis(&e))
    }

    /// Removes the parts, which nobody needs once the results are there.
    pub fn clear(&self) -> Result<(), Failure> {
        let parts = self.out.join("parts");
        std::fs::remove_dir_all(&parts).map_err(|e| Failure::new(format!("remove {}: {e}", parts.display())))
    }
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

/// Makes `out` the place of the analysis that `head` says.
/// How long an interval took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Took {
    /// The interval.
    pub index: u32,
    /// Tries that it took.
    pub tries: u32,
    /// From QEMU's start to its end.
    pub wall_ns: u64,
}

impl From<&Done> for Took {
    fn from(&Done { index, tries, wall_ns, .. }: &Done) -> Self {
        Self { index, tries, wall_ns }
    }
}

/// What the analysis in `out` is, and how long its intervals took, as far as they are done.
pub fn made_before(out: &Path) -> Result<(Head, Vec<Took>), Failure> {
    let file = out.join("analysis.json");
    let text = std::fs::read_to_string(&file).map_err(|e| {
        Failure::new(format!("read {}: {e}", file.display()))
            .fix("name a directory that keyframe analyze has made")
    })?;
    let head: Head = serde_json::from_str(&text)
        .map_err(|e| Failure::new(format!("{} says nothing of an analysis: {e}", file.display())))?;
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
    let text = std::fs::read_to_string(place_in(out, interval).join("done")).ok()?;
    let mut done: Done = serde_json::from_str(&text).ok()?;
    done.is_old = true;
    (done.index == interval.index).then_some(done)
}

fn claim(out: &Path, head: &Head) -> Result<(), Failure> {
    let file = out.join("analysis.json");
    match std::fs::read_to_string(&file) {
        Ok(text) => {
            let is_same = serde_json::from_str::<Head>(&text).is_ok_and(|there| there == *head);
            return if is_same {
                Ok(())
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
    write(&file, serde_json::to_string_pretty(head).unwrap_or_default().as_bytes())
}
