//! The evaluation of Eicher, *VM Checkpoint Storage and Distribution for SimuBoost* (2015), chapter
//! 6, on this machine.
//!
//! ```text
//!   a workload, an interval:  keyframe record --checkpoint-every ─▶ list --json, stats --json      what each checkpoint holds and took
//!                                        │                      └▶ its images, read warm and cold
//!                                        ├▶ analyze --jobs 1, --jobs 2 ─▶ times, instructions of each interval
//!                                        └▶ plan --analysis --simulate ─▶ more nodes than there are
//!   all of them ─▶ figures/ ─▶ OUT/NAME.csv, .svg, .png, OUT/report.md
//! ```
//!
//! Everything is measured in the run, but for what is labelled: *computed* (transfer times, from
//! bytes) and *simulated* (more nodes than were measured, from interval times that were measured).
//!
//! Left out: the paper's cluster and its hardware; the numbers of its figures are in the report to
//! be looked at, not to be met.

mod figures;
mod measured;
mod output;
mod paper;
mod processing;
mod reading;
mod recording;
mod simulating;
mod workload;

use crate::{Error, Options, Report};
use measured::Run;
use output::Outputs;
use std::path::{Path, PathBuf};
use workload::Kind;

/// Where nothing is said.
const OUT: &str = "out/evaluation";

/// How much.
struct Plan {
    /// Of workloads, where none are chosen.
    workloads: &'static [&'static str],
    /// Between checkpoints, in ms.
    intervals_ms: &'static [u64],
    /// Work behind the boot, in ms.
    work_ms: u64,
    /// Checkpoints whose images are read.
    reads: usize,
    /// The part of its instructions, from the begin on, that is not analysed.
    left_out: f64,
}

/// As there: 0.5 to 8 s.
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

/// Measures all and writes it.
pub fn run(options: &Options) -> Result<Report, Error> {
    if options.rounds.is_some() {
        return Err(Error::NoOption { benchmark: "evaluation", option: "--rounds" });
    }
    let plan = if options.quick { &QUICK } else { &FULL };
    let (kinds, lengths) = chosen(&options.only, plan)?;
    let out = options.out.clone().unwrap_or_else(|| OUT.into());
    let place = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    // Before minutes are spent on what could not be written then.
    Outputs::new(&out)?;
    let mut runs = Vec::new();
    for kind in kinds {
        for length in &lengths {
            match once(options, plan, (kind, *length), place.path()) {
                Ok(run) => {
                    runs.push(run);
                    // All of it takes an hour: what is there is written, whatever becomes of the
                    // rest.
                    written(&runs, &out)?;
                }
                // Its guest may not be had here.
                Err(e) => {
                    options.left_out(&format!("{}, {} ms ({})", kind.key, length, kind.about), &e)
                }
            }
        }
    }
    if runs.is_empty() {
        return Err(Error::failed("evaluate", "no workload could be run"));
    }
    options.say(format!("report: {}", out.join("report.md").display()));
    written(&runs, &out)
}

/// Writes all files.
fn written(runs: &[Run], out: &Path) -> Result<Report, Error> {
    let mut outputs = Outputs::new(out)?;
    let mut report = Report::new("evaluation");
    figures::all(runs, &mut outputs, &mut report)?;
    outputs.index(runs)?;
    Ok(report)
}

/// One workload with one interval.
fn once(
    options: &Options,
    plan: &Plan,
    (kind, every_ms): (&'static Kind, u64),
    place: &Path,
) -> Result<Run, Error> {
    let dir: PathBuf = place.join(format!("{}-{every_ms}", kind.key));
    std::fs::create_dir(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
    let measured = measured::all(options, plan, (kind, every_ms), &dir);
    // A recording takes as much space as the next one.
    let removed =
        std::fs::remove_dir_all(&dir).map_err(Error::io(format!("remove {}", dir.display())));
    let run = measured?;
    removed?;
    Ok(run)
}

/// The workloads and the intervals, in ms, that `only` names; those of the plan where it names
/// none.
fn chosen(only: &[String], plan: &Plan) -> Result<(Vec<&'static Kind>, Vec<u64>), Error> {
    let lengths = FULL.intervals_ms.iter().map(|ms| (format!("{ms}ms"), *ms));
    let lengths: Vec<(String, u64)> = lengths.collect();
    let kinds = workload::ALL.iter();
    let is_known = |part: &String| {
        lengths.iter().any(|(name, _)| name == part) || kinds.clone().any(|kind| kind.key == part)
    };
    if let Some(part) = only.iter().find(|part| !is_known(part)) {
        let parts: Vec<&str> = kinds
            .map(|kind| kind.key)
            .chain(lengths.iter().map(|(name, _)| name.as_str()))
            .collect();
        return Err(Error::NoPart {
            benchmark: "evaluation",
            part: part.clone(),
            parts: parts.join(", "),
        });
    }
    let named_kinds: Vec<&'static Kind> =
        kinds.clone().filter(|kind| only.iter().any(|one| one == kind.key)).collect();
    let named_lengths: Vec<u64> =
        lengths.iter().filter(|(name, _)| only.contains(name)).map(|(_, ms)| *ms).collect();
    let kinds = if named_kinds.is_empty() {
        kinds.filter(|kind| plan.workloads.contains(&kind.key)).collect()
    } else {
        named_kinds
    };
    Ok((kinds, if named_lengths.is_empty() { plan.intervals_ms.to_vec() } else { named_lengths }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_and_intervals_are_chosen_apart() {
        let of = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            chosen(&only, &FULL)
                .map(|(kinds, lengths)| (kinds.iter().map(|k| k.key).collect::<Vec<_>>(), lengths))
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
