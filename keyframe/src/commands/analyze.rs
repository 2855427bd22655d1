//! `keyframe analyze`: a tool over a recording, its intervals side by side.

mod on;

use crate::failure::paths;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use crate::progress::instructions_bar;
use crate::words::replay::ReplayWords;
use indicatif::ProgressBar;
use keyframe_analysis::{Tool, ToolSummary, tools};
use keyframe_replay::interval::Interval;
use keyframe_replay_driver::jobs::JobCount;
use keyframe_replay_driver::{
    Analysis, AnalysisHeader, FinishedPart, JobSpec, OpenedSubject, RunSelection, StartTimes,
    differing_files, jobs, median_dispatch_ns, tool,
};
use keyframe_store_keys::{self as keys, KeyArg};
use on::{Driven, Effort, OnArgs};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Run an analysis tool over a recording, its intervals side by side
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each job replays a range of neighbouring intervals in one QEMU with the tool's plugin, from the checkpoint of the first one on. A job
that has nothing left takes half of what is left of another's range. The results are merged in order. The merged result equals that
of one replay of the whole recording, byte for byte: see --check-sequential. If the command is interrupted, or intervals fail, call it again: it continues with the intervals that are left.

With --approximate the command analyses a run under KVM that was never recorded (keyframe run). REC then names its store. Each
interval is simulated under TCG from its checkpoint, for as long as the guest ran. Input from outside does not come again, and a
second simulation may take another course. --from and --to are then numbers of checkpoints.

TOOL is one that --list-tools shows, or the path of a third party's manifest (NAME.toml).

Examples:
  keyframe analyze R --tool icount --out A
  keyframe analyze R --tool hot --tool-arg symbols=vmlinux --jobs 4 --out A
  keyframe analyze R --tool memtrace --from 500000000 --to 600000000 --out A --check-sequential
  keyframe analyze S --approximate --tool icount --out A
  keyframe analyze S --approximate --follow --tool icount --out A
  keyframe analyze R --tool icount --out A --follow
  keyframe analyze R --tool cache --out /shared/A --on slurm:main --nodes 16
  keyframe analyze --list-tools"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct Analyze {
    /// The recording
    #[arg(value_name = "REC", required_unless_present = "list_tools")]
    recording: Option<PathBuf>,
    /// The tool: a name, or a manifest's path
    #[arg(long, value_name = "TOOL", required_unless_present = "list_tools")]
    tool: Option<String>,
    /// An argument of the tool; may be given several times
    #[arg(long, value_name = "NAME=VALUE")]
    tool_arg: Vec<String>,
    /// Directory for the results: one that does not exist yet, or that of the same analysis, to go
    /// on
    #[arg(long, value_name = "DIR", required_unless_present = "list_tools")]
    out: Option<PathBuf>,
    /// Replays at a time, or auto: the fastest number by a short trial [default: one for each core;
    /// one in each pilot]
    #[arg(long, value_name = "N")]
    jobs: Option<JobCount>,
    /// Only intervals that end after this instruction (with --approximate: from this checkpoint
    /// on)
    #[arg(long, value_name = "ICOUNT")]
    from: Option<u64>,
    /// Only intervals that begin before this instruction (with --approximate: up to this
    /// checkpoint)
    #[arg(long, value_name = "ICOUNT")]
    to: Option<u64>,
    /// Give an interval up after N failed tries
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..=100))]
    tries: u32,
    /// Run it once more, by one replay through all intervals, and compare the results byte by byte
    #[arg(long, conflicts_with = "approximate")]
    check_sequential: bool,
    /// REC is a store with checkpoints of a run that was not recorded: each interval is simulated
    /// under TCG from its checkpoint, without a log. Approximate, and not deterministic
    #[arg(long)]
    approximate: bool,
    /// Analyze while REC is still recorded, or with --approximate while its VM still runs. Each
    /// interval is analyzed as soon as its checkpoints are sealed, and the log reaches beyond it.
    /// The command ends after the recording or the run has ended
    #[arg(long)]
    follow: bool,
    /// With --approximate: the VM whose newest run it is [default: that of the newest checkpoint]
    #[arg(long, value_name = "NAME", requires = "approximate")]
    vm: Option<String>,
    /// Keep what each interval gave, beside the results
    #[arg(long)]
    keep_parts: bool,
    /// Show the tools and their arguments
    #[arg(long)]
    list_tools: bool,
    /// The store that has its checkpoints [default: the one that the recording names]
    #[arg(long, value_name = "STORE")]
    store: Option<PathBuf>,
    /// The QEMU binary for the replays, of the release that recorded [default: that binary, at its
    /// path or in PATH]
    #[arg(long, value_name = "PATH", conflicts_with_all = ["approximate", "follow"])]
    qemu: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    on: OnArgs,
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

/// An interval, as `--json` shows it.
#[derive(Serialize)]
struct Shown {
    index: u32,
    tries: u32,
    wall_ns: u64,
    began_at_ns: u64,
    worker: String,
    /// Of the first interval of a range: how long the start of its QEMU took.
    start: Option<StartTimes>,
    /// Its part was there from an earlier run.
    is_old: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    recording: String,
    /// Simulated without a log: another time it may be otherwise.
    is_approximate: bool,
    tool: String,
    intervals: Vec<Shown>,
    /// Of a recording.
    instructions: Option<u64>,
    /// Of a run that was not recorded: how long the guest ran, by its own time.
    guest_ns: Option<u64>,
    /// All replays and the merge.
    wall_ns: u64,
    /// The merge of the intervals' parts into the results.
    merge_ns: u64,
    /// What lies between an interval's end and the begin of the next on the same worker, in the
    /// median.
    dispatch_ns: Option<u64>,
    files: Vec<PathBuf>,
    summary: Vec<String>,
    /// Whether one replay through all gives the same; none where that was not asked for.
    equals_sequential: Option<bool>,
    /// How long that one took.
    sequential_wall_ns: Option<u64>,
}

impl Analyze {
    /// Runs it.
    pub fn run(&self) -> Outcome {
        if self.list_tools {
            return list();
        }
        let (Some(recording), Some(name), Some(out)) = (&self.recording, &self.tool, &self.out)
        else {
            return Err(Failure::new("REC, --tool and --out are needed"));
        };
        let tool = tool(name, &self.tool_arg, self.approximate)?;
        // Columns of a trace are taken and freed all the time.
        keyframe_kernel::malloc::keep_freed_memory();
        let job_spec = self.job_spec(recording)?;
        let opened = job_spec.open(&self.key, Arc::new(ReplayWords::default()))?;
        self.analyse(&*tool, name, &opened, job_spec, out)
    }

    fn job_spec(&self, subject: &Path) -> Result<JobSpec, Failure> {
        let selection = || RunSelection { vm: self.vm.clone(), from: self.from, to: self.to };
        Ok(JobSpec {
            subject: paths::absolute_store(subject)?,
            captured: self.approximate.then(selection),
            store: self.store.as_deref().map(paths::absolute_store).transpose()?,
            key_file: None,
            qemu: self.qemu.as_deref().map(paths::absolute).transpose()?,
            follow: self.follow,
            tries: self.tries,
        })
    }

    fn analyse(
        &self,
        tool: &dyn Tool,
        name: &str,
        opened: &OpenedSubject,
        job_spec: JobSpec,
        out: &Path,
    ) -> Outcome {
        let subject = opened.subject();
        // Of a run, only those are there that were asked for.
        let range = match opened {
            OpenedSubject::Unrecorded(_) => 0..u64::MAX,
            _ => self.from.unwrap_or(0)..self.to.unwrap_or(u64::MAX),
        };
        let head = AnalysisHeader::of(subject, name, &self.tool_arg);
        let interrupted = jobs::interruption()?;
        let began = Instant::now();
        let mut analysis = Analysis::new(subject, tool, head, range, out)?;
        if self.on.is_elsewhere() {
            JobSpec { key_file: keys::file_for_jobs()?, ..job_spec }.write(analysis.out())?;
        }
        let bar = self.bar(&analysis.intervals());
        let effort = Effort { jobs: self.jobs, tries: self.tries };
        let driven = self.on.drive(&mut analysis, effort, &interrupted, &bar)?;
        if let Driven::Detached(jobs) = driven {
            return self.tell_detached(&jobs);
        }
        let done = analysis.collect(&ReplayWords::default())?;
        let merging = Instant::now();
        let summary = analysis.merge(done.clone())?;
        let merge_ns = keyframe_units::elapsed_ns(merging);
        let wall_ns = keyframe_units::elapsed_ns(began);
        let sequential =
            self.check_sequential.then(|| self.in_sequence(&analysis, &summary, &interrupted));
        let sequential = sequential.transpose()?;
        if !self.keep_parts {
            analysis.clear()?;
        }
        let length = analysis.intervals().iter().map(Interval::len).sum();
        let report = Report {
            recording: subject.id().to_owned(),
            is_approximate: subject.is_approximate(),
            tool: name.to_owned(),
            instructions: (!subject.is_approximate()).then_some(length),
            guest_ns: subject.is_approximate().then_some(length),
            intervals: done.iter().map(shown).collect(),
            wall_ns,
            merge_ns,
            dispatch_ns: median_dispatch_ns(&done),
            files: summary.files,
            summary: summary.lines,
            equals_sequential: sequential.as_ref().map(|(differing, _)| differing.is_empty()),
            sequential_wall_ns: sequential.as_ref().map(|(_, wall_ns)| *wall_ns),
        };
        let differing = sequential.map(|(differing, _)| differing).unwrap_or_default();
        self.tell(&report, &differing)
    }

    fn tell_detached(&self, jobs: &[u64]) -> Outcome {
        if self.json {
            output::json(&serde_json::json!({ "jobs": jobs }))?;
        } else if !self.quiet {
            let list: Vec<String> = jobs.iter().map(u64::to_string).collect();
            eprintln!(
                "keyframe: jobs {} are at it; the same command without --detach waits for them",
                list.join(", ")
            );
        }
        Ok(DONE)
    }

    fn bar(&self, intervals: &[Interval]) -> ProgressBar {
        instructions_bar(
            "analysing",
            intervals.iter().map(Interval::len).sum(),
            !self.quiet && !self.json,
        )
    }

    /// The result files that one replay through all makes otherwise, and how long it took.
    fn in_sequence(
        &self,
        analysis: &Analysis<'_>,
        summary: &ToolSummary,
        interrupted: &AtomicBool,
    ) -> Result<(Vec<PathBuf>, u64), Failure> {
        let began = Instant::now();
        let bar = self.bar(&analysis.intervals());
        let first = analysis.intervals().first().map_or(0, |i| i.from_icount);
        let sequential = analysis.in_sequence(interrupted, &mut |icount| {
            bar.set_position(icount.saturating_sub(first));
        })?;
        bar.finish_and_clear();
        let wall_ns = keyframe_units::elapsed_ns(began);
        Ok((differing_files(summary, &sequential)?, wall_ns))
    }

    fn tell(&self, report: &Report, differing: &[PathBuf]) -> Outcome {
        if self.json {
            output::json(report)?;
        } else if !self.quiet {
            if report.is_approximate {
                eprintln!(
                    "keyframe: approximate: simulated without a log; another time it may be otherwise"
                );
            }
            for line in &report.summary {
                output::print_line(line)?;
            }
            let count = report.intervals.len();
            let after = output::duration(report.wall_ns);
            let length = match (report.instructions, report.guest_ns) {
                (Some(instructions), _) => format!("{instructions} instructions"),
                (None, ns) => format!("{} of the guest's time", output::duration(ns.unwrap_or(0))),
            };
            eprintln!("keyframe: {length} in {count} intervals, {after}");
            for file in &report.files {
                eprintln!("keyframe: {}", file.display());
            }
            if let (Some(true), Some(took)) = (report.equals_sequential, report.sequential_wall_ns)
            {
                eprintln!(
                    "keyframe: one replay through all gives the same, byte for byte; it took {}",
                    output::duration(took)
                );
            }
        }
        for file in differing {
            eprintln!(
                "keyframe: {} DIFFERS from one replay through all (sequential/ beside it)",
                file.display()
            );
        }
        Ok(if differing.is_empty() { DONE } else { FAILED })
    }
}

fn shown(done: &FinishedPart) -> Shown {
    Shown {
        index: done.index,
        tries: done.tries,
        wall_ns: done.wall_ns,
        began_at_ns: done.began_at_ns,
        worker: done.worker.clone(),
        start: done.start,
        is_old: done.is_old,
    }
}

fn list() -> Outcome {
    for tool in tools::descriptions() {
        output::print_line(&format!("{:12} {}", tool.name, tool.about))?;
        for (name, about) in tool.arguments {
            output::print_line(&format!("               --tool-arg {name}=...   {about}"))?;
        }
        for (name, about) in tool.results {
            output::print_line(&format!("               {name}: {about}"))?;
        }
    }
    Ok(DONE)
}
