//! `evaluation`: repeats chapter 6 of Eicher, *VM Checkpoint Storage and Distribution for SimuBoost*
//! (2015) on this machine.
//!
//! ```text
//!   a workload, an interval:
//!     keyframe record --checkpoint-every ─┬▶ list --json, stats --json     figures of checkpoints
//!                                         ├▶ images, read warm and cold
//!                                         ├▶ analyze --jobs 1, --jobs 2    times and instructions
//!                                         └▶ plan --analysis --simulate    more nodes
//!   all of them ─▶ figures/ ─▶ OUT/NAME.csv, .svg, .png, OUT/report.md
//! ```
//!
//! All values are measured in the run, except those marked *computed* (transfer times, from bytes)
//! and *simulated* (more nodes, from the measured times of intervals). The report shows the values
//! of the paper for comparison; they are from other hardware and are no target.

mod evaluated_run;
mod figures;
mod image_reading;
mod output;
mod paper_statement;
mod recording;
mod reprocessing;
mod simulations;
mod workload;

use crate::{Error, Options, Report};
use evaluated_run::EvaluatedRun;
use output::Outputs;
use std::path::{Path, PathBuf};
use workload::Workload;

/// The default output directory.
const OUT: &str = "out/evaluation";

/// The extent of an evaluation.
struct Plan {
    /// The workloads, if `--only` names none.
    workloads: &'static [&'static str],
    /// The times between checkpoints, if `--only` names none.
    intervals_ms: &'static [u64],
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
    work_ms: 24_000,
    reads: 8,
    left_out: 0.0,
};
const QUICK: Plan = Plan {
    workloads: &["small"],
    intervals_ms: &[500, 1000],
    work_ms: 1500,
    reads: 2,
    left_out: 0.85,
};

/// Measures all runs and writes the report.
pub fn run(options: &Options) -> Result<Report, Error> {
    if options.rounds.is_some() {
        return Err(Error::NoOption { benchmark: "evaluation", option: "--rounds" });
    }
    let plan = if options.quick { &QUICK } else { &FULL };
    let selection = Selection::new(&options.only, plan)?;
    let out = options.out.clone().unwrap_or_else(|| OUT.into());
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    // Fails now if the directory cannot be made, not after an hour.
    Outputs::new(&out)?;
    let mut runs = Vec::new();
    for workload in selection.workloads {
        for every_ms in &selection.intervals_ms {
            match measure(options, plan, workload, *every_ms, dir.path()) {
                Ok(run) => {
                    runs.push(run);
                    // A later run may fail: the files of the completed runs are written now.
                    write_outputs(&runs, &out)?;
                }
                // This machine may lack the guest of the workload.
                Err(e) => options
                    .left_out(&format!("{}, {every_ms} ms ({})", workload.key, workload.about), &e),
            }
        }
    }
    if runs.is_empty() {
        return Err(Error::failed("evaluate", "no workload could be run"));
    }
    options.say(format!("report: {}", out.join("report.md").display()));
    write_outputs(&runs, &out)
}

fn write_outputs(runs: &[EvaluatedRun], out: &Path) -> Result<Report, Error> {
    let mut outputs = Outputs::new(out)?;
    let mut report = Report::new("evaluation");
    figures::write_all(runs, &mut outputs, &mut report)?;
    outputs.write_report(runs)?;
    Ok(report)
}

/// Measures one workload with one interval, in a directory of its own in `parent`.
fn measure(
    options: &Options,
    plan: &Plan,
    workload: &'static Workload,
    every_ms: u64,
    parent: &Path,
) -> Result<EvaluatedRun, Error> {
    let dir: PathBuf = parent.join(format!("{}-{every_ms}", workload.key));
    std::fs::create_dir(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
    let measured = evaluated_run::measure_run(options, plan, workload, every_ms, &dir);
    // The next recording needs the space.
    let removed =
        std::fs::remove_dir_all(&dir).map_err(Error::io(format!("remove {}", dir.display())));
    let run = measured?;
    removed?;
    Ok(run)
}

/// The workloads and intervals to measure.
struct Selection {
    workloads: Vec<&'static Workload>,
    intervals_ms: Vec<u64>,
}

impl Selection {
    /// Selects the workloads and intervals that `only` names; those of the plan if it names none.
    fn new(only: &[String], plan: &Plan) -> Result<Self, Error> {
        let intervals: Vec<(String, u64)> =
            FULL.intervals_ms.iter().map(|ms| (format!("{ms}ms"), *ms)).collect();
        let names: Vec<&str> = workload::ALL
            .iter()
            .map(|workload| workload.key)
            .chain(intervals.iter().map(|(name, _)| name.as_str()))
            .collect();
        if let Some(part) = only.iter().find(|part| !names.contains(&part.as_str())) {
            let (benchmark, part) = ("evaluation", part.clone());
            return Err(Error::NoPart { benchmark, part, parts: names.join(", ") });
        }
        let is_named = |name: &str| only.iter().any(|part| part == name);
        let select = |is_selected: &dyn Fn(&str) -> bool| -> Vec<&'static Workload> {
            workload::ALL.iter().filter(|workload| is_selected(workload.key)).collect()
        };
        let mut workloads = select(&is_named);
        if workloads.is_empty() {
            workloads = select(&|key| plan.workloads.contains(&key));
        }
        let mut intervals_ms: Vec<u64> =
            intervals.iter().filter(|(name, _)| is_named(name)).map(|(_, ms)| *ms).collect();
        if intervals_ms.is_empty() {
            intervals_ms = plan.intervals_ms.to_vec();
        }
        Ok(Self { workloads, intervals_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_and_intervals_are_selected_independently() {
        let of = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            Selection::new(&only, &FULL).map(|selection| {
                let keys: Vec<_> = selection.workloads.iter().map(|one| one.key).collect();
                (keys, selection.intervals_ms)
            })
        };
        assert_eq!(of(&[]).unwrap(), (FULL.workloads.to_vec(), FULL.intervals_ms.to_vec()));
        assert_eq!(of(&["bonnie"]).unwrap(), (vec!["bonnie"], FULL.intervals_ms.to_vec()));
        assert_eq!(of(&["small", "2000ms"]).unwrap(), (vec!["small"], vec![2000]));
        let text = of(&["3s"]).unwrap_err().to_string();
        assert!(
            text.contains("no part 3s") && text.contains("bonnie") && text.contains("500ms"),
            "{text}"
        );
    }
}
