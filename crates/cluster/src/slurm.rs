//! Runs pilots in Slurm: tasks of job arrays that process the items of a queue.
//!
//! ```text
//!   sbatch --array=0-3 ──▶ task 0: keyframe __work OUT ──▶ item, item, item ... until none is left
//!                          task 1: ...
//!   a node fails               Slurm restarts its task elsewhere; the queue gets the items back
//!   squeue, once a second      items of tasks that do not run are returned to the queue
//!   all tasks ended, items left (time limit, refused nodes)
//!                              new pilots are submitted, unless no item gets settled
//! ```
//!
//! `slurm.json` keeps the job ids, so that a new submitter continues with the jobs of one that
//! ended. slurmdbd is not needed.

mod programs;
mod tasks;

use crate::{Error, Queue, Result, Runner, Share, WorkerId};
pub use programs::SlurmPrograms;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tasks::SlurmTask;

const SQUEUE: &str = "squeue";
const SBATCH: &str = "sbatch";
const SCANCEL: &str = "scancel";
const SCONTROL: &str = "scontrol";
const SINFO: &str = "sinfo";
/// Time between two calls of squeue: each is work for the controller that all users share.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long to wait for pilots to end by themselves when nothing is left.
const END_WAIT: Duration = Duration::from_secs(5);
/// How many rounds of pilots may end without settling an item.
const ROUNDS_MAX: u32 = 3;
/// Slurm's default of MaxArraySize, if the controller does not tell it.
const MAX_ARRAY_SIZE: u32 = 1001;
/// The length of a pilot's log in an error, in characters.
const LOG_BYTES: usize = 1000;

/// The resources and options of jobs.
#[derive(Clone, Debug)]
pub struct SlurmOptions {
    /// The partition; `None` for Slurm's default.
    pub partition: Option<String>,
    /// The number of pilots; `None` for one per node of the partition.
    pub pilots: Option<u32>,
    /// The largest number of pilots that run at a time; `None` for no limit.
    pub limit: Option<u32>,
    /// The number of items that a pilot processes at a time, which is also its number of
    /// processors.
    pub slots: u32,
    /// Memory of a pilot, in MiB.
    pub memory_mib: u64,
    /// The time limit of a pilot, in Slurm's notation. `None` for the default of Slurm.
    pub time: Option<String>,
    /// Further options for sbatch.
    pub more: Vec<String>,
    /// The command line of a pilot.
    pub command: Vec<OsString>,
    /// The name of the jobs.
    pub name: String,
    /// The directory for the pilots' logs and `slurm.json`.
    pub dir: PathBuf,
}

/// The contents of `slurm.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct SubmittedJobs {
    /// The ids of the job arrays, in the order of their submission.
    jobs: Vec<u64>,
}

/// The states of the pilots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PilotStates {
    /// Pilots that run.
    pub running: usize,
    /// The number of squeue's lines for waiting tasks; a line may stand for several tasks.
    pub waiting: usize,
    /// Slurm's reason why the first waiting task waits; `None` if no task waits.
    pub reason: Option<String>,
}

/// A runner whose workers are pilots in Slurm.
#[derive(Debug)]
pub struct SlurmRunner {
    options: SlurmOptions,
    programs: SlurmPrograms,
    state: SubmittedJobs,
    asked: Option<Instant>,
    states: PilotStates,
    last: Option<SlurmTask>,
    rounds: u32,
    settled: usize,
}

impl SlurmRunner {
    /// Creates a runner that continues with the jobs in `slurm.json`, if there are any.
    ///
    /// Errors: [`Error::Io`] if `slurm.json` cannot be read; [`Error::Answer`] if it is damaged.
    pub fn new(options: SlurmOptions, programs: SlurmPrograms) -> Result<Self> {
        let path = options.dir.join("slurm.json");
        let state = match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text)
                .map_err(|e| Error::Answer { program: "slurm.json", message: e.to_string() })?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => SubmittedJobs::default(),
            Err(e) => return Err(Error::io("read", &path)(e)),
        };
        let states = PilotStates::default();
        Ok(Self {
            options,
            programs,
            state,
            asked: None,
            states,
            last: None,
            rounds: 0,
            settled: 0,
        })
    }

    /// Returns the ids of the job arrays that Slurm has accepted.
    pub fn jobs(&self) -> &[u64] {
        &self.state.jobs
    }

    /// Returns the states of the pilots when squeue was last called.
    pub fn pilot_states(&self) -> &PilotStates {
        &self.states
    }

    /// Returns the name of a pilot's worker: job, task, number of restarts, node and process.
    /// `variable` reads the environment that Slurm gives the pilot.
    pub fn worker_id(variable: impl Fn(&str) -> Option<String>) -> WorkerId {
        let of = |name: &str, otherwise: &str| variable(name).unwrap_or_else(|| otherwise.into());
        let job = variable("SLURM_ARRAY_JOB_ID").unwrap_or_else(|| of("SLURM_JOB_ID", "0"));
        let (task, restarts) = (of("SLURM_ARRAY_TASK_ID", "0"), of("SLURM_RESTART_COUNT", "0"));
        let (node, pid) = (of("SLURMD_NODENAME", "node"), std::process::id());
        WorkerId::new(&format!("slurm.{job}.{task}.{restarts}.{node}.{pid}"))
    }

    /// Returns the share of a pilot in the work, from its task's number; `None` if Slurm does not
    /// tell. `variable` reads the environment that Slurm gives the pilot.
    pub fn share(variable: impl Fn(&str) -> Option<String>) -> Option<Share> {
        let number = |name: &str| variable(name)?.parse::<u32>().ok();
        let (task, first) = (number("SLURM_ARRAY_TASK_ID")?, number("SLURM_ARRAY_TASK_MIN")?);
        let count = number("SLURM_ARRAY_TASK_COUNT")?;
        Some(Share { number: task.checked_sub(first)?, count }).filter(|one| one.number < count)
    }

    /// Returns true if `other` is another start of the pilot `own`: a process of the same task of
    /// the same job, which Slurm has started again since.
    pub fn is_earlier_start(own: &WorkerId, other: &WorkerId) -> bool {
        own != other && task_of(own).is_some_and(|task| Some(task) == task_of(other))
    }

    /// Calls squeue for all jobs.
    fn ask(&mut self) -> Result<Vec<SlurmTask>> {
        if self.state.jobs.is_empty() {
            return Ok(Vec::new());
        }
        let jobs: Vec<String> = self.state.jobs.iter().map(u64::to_string).collect();
        let args = [
            "--noheader".into(),
            "--array".into(),
            format!("--jobs={}", jobs.join(",")),
            tasks::FORMAT.into(),
        ];
        match self.programs.ask(SQUEUE, &args, &[]) {
            Ok(text) => Ok(tasks::parse(&text)),
            // squeue forgets a job some minutes after its end, and refuses to list it alone.
            Err(Error::Refused { message, .. }) if message.contains("Invalid job id") => {
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        }
    }

    fn refresh(&mut self) -> Result<Vec<SlurmTask>> {
        let tasks = self.ask()?;
        self.asked = Some(Instant::now());
        let waiting: Vec<&SlurmTask> = tasks.iter().filter(|task| task.is_waiting()).collect();
        self.states = PilotStates {
            running: tasks.iter().filter(|task| task.is_running()).count(),
            waiting: waiting.len(),
            reason: waiting.first().map(|task| task.reason.clone()),
        };
        Ok(tasks)
    }

    /// Returns the items of pilots whose task does not run to the queue.
    fn return_items(&self, queue: &Queue, tasks: &[SlurmTask]) -> Result<()> {
        let runs = |worker: &WorkerId| match task_of(worker) {
            Some((job, index)) if self.state.jobs.contains(&job) => tasks
                .iter()
                .any(|task| task.is_running() && task.job == job && task.index == Some(index)),
            // Not a pilot of these jobs.
            _ => true,
        };
        queue.return_items(|worker| !runs(worker)).map(drop)
    }

    /// Starts pilots for `items` open items. If the queue is closed, no more than these will come.
    fn submit(&mut self, items: usize, is_closed: bool) -> Result<()> {
        let most = u32::try_from(items).unwrap_or(u32::MAX).div_ceil(self.options.slots.max(1));
        let most = if is_closed { most } else { u32::MAX };
        let wanted = match self.options.pilots {
            Some(pilots) => pilots,
            None => self.nodes()?,
        };
        let mut left = wanted.clamp(1, most.max(1));
        let mut at_once = self.max_array_size();
        while left > 0 {
            let count = left.min(at_once);
            match self.submit_array(count) {
                Ok(job) => {
                    self.state.jobs.push(job);
                    self.save()?;
                    left -= count;
                }
                // The account's limit may allow fewer tasks.
                Err(Error::Refused { message, .. }) if is_too_many(&message) && count > 1 => {
                    at_once = count / 2;
                }
                // Fewer pilots can do the work too.
                Err(Error::Refused { message, .. }) if is_too_many(&message) && left < wanted => {
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn submit_array(&self, count: u32) -> Result<u64> {
        let o = &self.options;
        fs::create_dir_all(&o.dir).map_err(Error::io("make", &o.dir))?;
        let limit = o.limit.map_or_else(String::new, |limit| format!("%{limit}"));
        let mut args: Vec<OsString> = [
            "--parsable".to_owned(),
            format!("--job-name={}", o.name),
            format!("--array=0-{}{limit}", count - 1),
            format!("--cpus-per-task={}", o.slots),
            format!("--mem={}M", o.memory_mib),
            "--nodes=1".into(),
            "--ntasks=1".into(),
            "--requeue".into(),
            "--open-mode=append".into(),
        ]
        .map(OsString::from)
        .into();
        args.extend(o.partition.iter().map(|name| format!("--partition={name}").into()));
        args.extend(o.time.iter().map(|time| format!("--time={time}").into()));
        let mut output = OsString::from("--output=");
        output.push(o.dir.join("%A_%a.log"));
        args.push(output);
        args.extend(o.more.iter().map(OsString::from));
        let answer = self.programs.ask(SBATCH, &args, &script(&o.command))?;
        // "12" or "12;cluster", possibly after output of a site's plugin.
        let number =
            answer.lines().last().and_then(|line| line.split(';').next()?.trim().parse().ok());
        number.ok_or_else(|| Error::Answer { program: SBATCH, message: answer.trim().to_owned() })
    }

    fn save(&self) -> Result<()> {
        let path = self.options.dir.join("slurm.json");
        let new = self.options.dir.join("slurm.json.new");
        let text = serde_json::to_string_pretty(&self.state).unwrap_or_default();
        fs::write(&new, text).map_err(Error::io("write", &new))?;
        fs::rename(&new, &path).map_err(Error::io("rename", &new))
    }

    fn max_array_size(&self) -> u32 {
        let told = self.programs.ask(SCONTROL, &["show", "config"], &[]).ok();
        let number = |text: String| {
            let line = text.lines().find(|line| line.trim_start().starts_with("MaxArraySize"))?;
            line.split('=').nth(1)?.trim().parse().ok()
        };
        told.and_then(number).filter(|size| *size > 0).unwrap_or(MAX_ARRAY_SIZE)
    }

    /// The number of nodes of the partition that can run jobs.
    fn nodes(&self) -> Result<u32> {
        let mut args = vec!["--noheader".to_owned(), "--format=%P|%D|%t".into()];
        args.extend(self.options.partition.iter().map(|name| format!("--partition={name}")));
        let text = self.programs.ask(SINFO, &args, &[])?;
        let of = |line: &str| {
            let mut words = line.trim().split('|');
            let (partition, count, state) =
                (words.next()?, words.next()?.parse::<u32>().ok()?, words.next()?);
            let is_ours = self.options.partition.is_some() || partition.ends_with('*');
            let is_up = ["idle", "mix", "alloc", "comp"].iter().any(|up| state.starts_with(up));
            (is_ours && is_up && !state.ends_with('*')).then_some(count)
        };
        Ok(text.lines().filter_map(of).fold(0, u32::saturating_add).max(1))
    }

    /// Cancels all tasks, or with `options` some of them.
    fn cancel(&mut self, options: &[&str]) -> Result<()> {
        if self.state.jobs.is_empty() {
            return Ok(());
        }
        let mut args: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        args.push("--quiet".into());
        args.extend(self.state.jobs.iter().map(u64::to_string));
        let Err(error) = self.programs.ask(SCANCEL, &args, &[]) else { return Ok(()) };
        // scancel fails silently if a job has already ended, so check whether any task is left.
        let limit = Instant::now() + END_WAIT;
        while self.refresh()?.iter().any(|task| task.is_running() || task.is_waiting()) {
            if !options.is_empty() {
                return Ok(());
            }
            if Instant::now() > limit {
                return Err(error);
            }
            std::thread::sleep(ASK_EVERY / 2);
        }
        Ok(())
    }

    /// Describes the last pilot, for an error about pilots that settle no item.
    fn describe_last_pilot(&self) -> String {
        let mut text =
            self.last.as_ref().map_or_else(|| "the last one has ended".into(), ToString::to_string);
        if let Some(said) = newest_log(&self.options.dir) {
            let _ = write!(text, "; its log ends with: {said}");
        }
        text
    }
}

impl Runner for SlurmRunner {
    fn tend(&mut self, queue: &Queue) -> Result<()> {
        if self.asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY) {
            return Ok(());
        }
        let tasks = self.refresh()?;
        self.return_items(queue, &tasks)?;
        if tasks.iter().any(|task| task.is_running() || task.is_waiting()) {
            self.last = tasks.into_iter().next();
            return Ok(());
        }
        let left = queue.items()?.len();
        // Waiting pilots take new items by themselves; the first item starts pilots.
        if left == 0 {
            return Ok(());
        }
        let settled = queue.settled()?.len();
        self.rounds = if settled > self.settled { 1 } else { self.rounds + 1 };
        self.settled = settled;
        if self.rounds > ROUNDS_MAX {
            return Err(Error::NoProgress { rounds: ROUNDS_MAX, last: self.describe_last_pilot() });
        }
        self.submit(left, queue.is_closed())?;
        self.refresh().map(drop)
    }

    fn end(&mut self, queue: &Queue) -> Result<()> {
        let is_done = queue.is_closed() && queue.items()?.is_empty() && queue.taken()?.is_empty();
        if is_done {
            self.cancel(&["--state=PENDING"])?;
            let limit = Instant::now() + END_WAIT;
            while Instant::now() < limit && self.refresh()?.iter().any(SlurmTask::is_running) {
                std::thread::sleep(ASK_EVERY / 10);
            }
        }
        self.cancel(&[])
    }
}

/// The job array and the task of a pilot's worker.
fn task_of(worker: &WorkerId) -> Option<(u64, u32)> {
    let mut words = worker.as_str().split('.');
    (words.next()? == "slurm").then_some(())?;
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

fn is_too_many(message: &str) -> bool {
    ["submit limit", "MaxSubmit", "MaxJobCount", "Invalid job array", "temporarily unable"]
        .iter()
        .any(|text| message.contains(text))
}

/// A shell script that executes `command`.
fn script(command: &[OsString]) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt;
    let mut text = b"#!/bin/sh\nexec".to_vec();
    for word in command {
        text.extend(b" '");
        for byte in word.as_bytes() {
            if *byte == b'\'' { text.extend(b"'\\''") } else { text.push(*byte) }
        }
        text.push(b'\'');
    }
    text.push(b'\n');
    text
}

/// The end of the pilots' newest log.
fn newest_log(dir: &Path) -> Option<String> {
    let logs = fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".log"));
    let newest = logs.max_by_key(|entry| entry.metadata().and_then(|m| m.modified()).ok())?;
    let text = String::from_utf8_lossy(&fs::read(newest.path()).ok()?).into_owned();
    let from = text.char_indices().rev().nth(LOG_BYTES).map_or(0, |(at, _)| at);
    let end = text[from..].trim();
    (!end.is_empty()).then(|| end.to_owned())
}

#[cfg(test)]
mod tests;
