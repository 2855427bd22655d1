//! `evaluation`: repeats chapter 6 of Eicher, *VM Checkpoint Storage and Distribution for SimuBoost*
//! (2015) on this machine.
//!
//! ```text
//!   a measurement: a workload, an interval, a round
//!     keyframe record --checkpoint-every ─┬▶ list --json, stats --json, maps   figures of checkpoints
//!                                         ├▶ images, read warm and cold
//!                                         ├▶ analyze --jobs 1, --jobs 2        times and instructions
//!                                         └▶ plan --analysis --simulate        more nodes
//!     keyframe record, analyze --follow beside it                              one of them in a round
//!       ─▶ OUT/measurements/NAME.json
//!   all files there ─▶ rounds ─▶ figures/ ─▶ OUT/NAME.csv, .svg, .png, OUT/report.md
//! ```
//!
//! All values are measured, except those marked *computed* (transfer times, from bytes)
//! and *simulated* (more nodes, from the measured times of intervals). The report shows the values
//! of the paper for comparison; they are from other hardware and are no target.
//!
//! Invariants: a measurement is there completely or not at all. A call measures what is missing, a
//! round after the other, so that a call that stops early leaves complete rounds.

mod checkpoint_cost;
mod checkpoint_figures;
mod evaluated_run;
mod figures;
mod image_reading;
mod machine;
mod maps;
mod measurement;
mod output;
mod paper_statement;
mod prediction;
mod recording;
mod report_head;
mod rounds;
mod selection;
mod simulations;
mod workload;

use crate::interrupt::Interrupt;
use crate::keyframe_json::KeyframeJson;
use crate::{Error, Options, Report};
use evaluated_run::{EvaluatedRun, RunRequest};
use measurement::{Measurement, MeasurementFiles, MeasurementKey, Provenance, commit_of};
use output::Outputs;
use report_head::ReportHead;
use rounds::RunRounds;
use selection::Selection;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The default output directory.
const OUT: &str = "out/evaluation";

/// The extent of an evaluation.
struct Plan {
    /// The workloads, if `--only` names none.
    workloads: &'static [&'static str],
    /// The times between checkpoints, if `--only` names none.
    intervals_ms: &'static [u64],
    /// The number of rounds, if `--rounds` does not say it.
    rounds: u16,
    /// The duration of the work after the boot.
    work_ms: u64,
    /// The number of checkpoints whose images are read.
    reads: usize,
    /// The part of the instructions, from the beginning, that is not analysed.
    left_out: f64,
}

/// Intervals as in the paper: 0.5 to 8 s.
const FULL: Plan = Plan {
    workloads: &["compile", "bonnie", "stream"],
    intervals_ms: &[500, 1000, 2000, 4000, 8000],
    rounds: 3,
    work_ms: 24_000,
    reads: 8,
    left_out: 0.0,
};
const QUICK: Plan = Plan {
    workloads: &["small"],
    intervals_ms: &[500, 1000],
    rounds: 1,
    work_ms: 1500,
    reads: 2,
    left_out: 0.85,
};

impl Plan {
    /// Describes what each measurement does.
    fn description(&self) -> String {
        format!(
            "{} s of work after the boot, {} images read, the last {:.0} % of the instructions analysed",
            self.work_ms as f64 / 1e3,
            self.reads,
            (1.0 - self.left_out) * 100.0
        )
    }
}

/// What a user can do about missing measurements.
const GO_ON: &str = "run the same command again to measure the others";

/// Why a command stopped measuring.
#[derive(Clone, Copy)]
enum Ended {
    /// All was tried.
    AllTried,
    /// The time of `--stop-after` has passed.
    StopAfter(Duration),
    /// A signal asked the program to end.
    Interrupted,
}

/// Measures what is missing and writes the report.
pub fn run(options: &Options) -> Result<Report, Error> {
    let plan = if options.quick { &QUICK } else { &FULL };
    let selection = Selection::new(&options.only, plan)?;
    let wanted = selection.keys(options.rounds.unwrap_or(plan.rounds));
    let out = options.out.clone().unwrap_or_else(|| OUT.into());
    // Fails now if the directory cannot be made, not after an hour.
    Outputs::new(&out)?;
    let files = MeasurementFiles::in_output(&out)?;
    let (missing, ended) = if options.stop_after == Some(Duration::ZERO) {
        let known = keys(&files.load(None)?);
        (without(&wanted, &known), Ended::StopAfter(Duration::ZERO))
    } else {
        measure_missing(options, plan, &selection, &wanted, &files)?
    };
    write_outputs(&files, &out, &wanted, &missing, ended, options)
}

/// Measures those of `wanted` that have no file. Returns those that still have none, and why it
/// ended.
fn measure_missing(
    options: &Options,
    plan: &Plan,
    selection: &Selection,
    wanted: &[MeasurementKey],
    files: &MeasurementFiles,
) -> Result<(Vec<MeasurementKey>, Ended), Error> {
    let began = Instant::now();
    let provenance = Provenance::now(options, plan.description())?;
    let commit = commit_of(&options.keyframe);
    let mut known = keys(&files.load(Some(&provenance))?);
    let to_do = without(wanted, &known);
    if to_do.len() < wanted.len() {
        let there = wanted.len() - to_do.len();
        options.say(format!("{there} of {} measurements are there already", wanted.len()));
    }
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let interrupt = Interrupt::listen()?;
    let keyframe = KeyframeJson { options, interrupt: &interrupt };
    let mut ended = Ended::AllTried;
    for key in &to_do {
        if let Some(limit) = options.stop_after.filter(|limit| began.elapsed() >= *limit) {
            ended = Ended::StopAfter(limit);
            break;
        }
        match measure(keyframe, plan, selection.request(*key)?, dir.path()) {
            Ok(run) => {
                files.save(&Measurement::of(run, &provenance, commit.clone()))?;
                known.push(*key);
                options.say(format!(
                    "measured {} of {}, {:.0} minutes",
                    wanted.len() - without(wanted, &known).len(),
                    wanted.len(),
                    began.elapsed().as_secs_f64() / 60.0
                ));
            }
            Err(_) if interrupt.is_set() => {
                ended = Ended::Interrupted;
                break;
            }
            // This machine may lack the guest of the workload.
            Err(e) => {
                let subject = format!("{}, {} ms, round {}", key.workload, key.every_ms, key.round);
                options.left_out(&subject, &e);
            }
        }
    }
    Ok((without(wanted, &known), ended))
}

fn keys(measurements: &[Measurement]) -> Vec<MeasurementKey> {
    measurements.iter().map(Measurement::key).collect()
}

/// Returns those of `all` that are not among `known`.
fn without(all: &[MeasurementKey], known: &[MeasurementKey]) -> Vec<MeasurementKey> {
    all.iter().filter(|key| !known.contains(key)).copied().collect()
}

/// Writes the figures and the report of all complete measurements.
fn write_outputs(
    files: &MeasurementFiles,
    out: &Path,
    wanted: &[MeasurementKey],
    missing: &[MeasurementKey],
    ended: Ended,
    options: &Options,
) -> Result<Report, Error> {
    let measurements = files.load(None)?;
    let why = match ended {
        Ended::StopAfter(Duration::ZERO) => {
            "run the command without --stop-after 0s to measure the others".into()
        }
        Ended::StopAfter(limit) => {
            format!("stopped after {}; {GO_ON}", humantime::format_duration(limit))
        }
        Ended::Interrupted => format!("interrupted; {GO_ON}"),
        Ended::AllTried => "the others failed, see the warnings".into(),
    };
    let there = wanted.len() - missing.len();
    let incomplete = (!missing.is_empty())
        .then(|| format!("{there} of {} measurements are complete: {why}", wanted.len()));
    let Some(head) = ReportHead::of(&measurements) else {
        let problem = incomplete.unwrap_or_else(|| "no workload could be run".into());
        return Err(Error::failed("evaluate", problem));
    };
    let groups = RunRounds::group(measurements);
    let mut outputs = Outputs::new(out)?;
    let mut report = Report::new("evaluation");
    figures::write_all(&groups, &mut outputs, &mut report)?;
    outputs.write_report(&head.text(&groups, incomplete.as_deref().unwrap_or_default()))?;
    options.say(format!("report: {}", out.join("report.md").display()));
    report.incomplete = incomplete;
    Ok(report)
}

/// Makes one measurement, in a directory of its own in `parent`.
fn measure(
    keyframe: KeyframeJson<'_>,
    plan: &Plan,
    request: RunRequest,
    parent: &Path,
) -> Result<EvaluatedRun, Error> {
    let name = format!("{}-{}", request.workload.key, request.every_ms);
    let dir: PathBuf = parent.join(name);
    std::fs::create_dir(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
    let measured = evaluated_run::measure_run(keyframe, plan, request, &dir);
    // The next recording needs the space.
    let removed =
        std::fs::remove_dir_all(&dir).map_err(Error::io(format!("remove {}", dir.display())));
    let run = measured?;
    removed?;
    Ok(run)
}
