//! `replay`: the cost of recording, replaying and analysing, on the same guest work.
//!
//! ```text
//!   a round of a workload   plain  icount  unlogged  record  1s  three_stage
//!     each is a boot, timed between two lines of the guest; the next round has the reverse order
//!     the recording of `record`: one replay of all of it, and one that takes checkpoints
//!   one workload            500ms 1s 2s 4s 8s against record, over more work
//!     its recording: one job, two jobs, two processes at once; each tool on one interval
//! ```
//!
//! A ratio is the median of the ratios of the rounds, so that neighbouring runs are compared. Times
//! exclude the waiting of the guest's thread for a core (`vcpu_clock`). A replay that diverges fails
//! the benchmark.

mod chart;
pub mod recording;
mod rows;
pub mod run_method;
mod tool_costs;
pub mod workload;

use crate::vcpu_clock::TimeSpent;
use crate::{Error, Options, Report};
use recording::Recording;
use rows::Rows;
use run_method::RunMethod;
use std::path::{Path, PathBuf};
use workload::{PreparedWorkload, Workload};

/// The sections of the benchmark, as `--only` names them.
const SECTIONS: [&str; 7] =
    ["record", "checkpoints", "stages", "replay", "jobs", "tools", "memtrace"];
/// The intervals of figure 3.1 of the thesis, and 1 s.
const SWEEP: [&str; 5] = ["500ms", "1s", "2s", "4s", "8s"];
/// The workload whose recording is analysed and whose intervals are varied. If it is not selected,
/// the first selected workload takes its place.
const SUBJECT: &str = "processes";

/// The number of recordings of a workload that are replayed, twice each.
const REPLAYS_MAX: usize = 2;

/// The extent of the benchmark.
struct Plan {
    /// The amount of work, about one second each.
    units: u32,
    /// The amount of work in the runs with several intervals; `None` leaves them out.
    sweep_units: Option<u32>,
    rounds: usize,
    /// The interval of the recording that is analysed.
    every: &'static str,
    /// The workloads, if `--only` names none.
    workloads: &'static [&'static str],
    /// The tools, besides `memtrace` and the tools with which it is compared.
    tools: &'static [&'static str],
}

const FULL: Plan = Plan {
    units: 4,
    sweep_units: Some(10),
    rounds: 3,
    every: "1s",
    workloads: &[
        "idle",
        "compute",
        "hash",
        "processes",
        "compile",
        "redis",
        "sqlite",
        "web",
        "postmark",
    ],
    tools: &["icount", "hot", "coverage", "working-set", "watch", "syscalls", "cache"],
};
const QUICK: Plan = Plan {
    units: 1,
    sweep_units: None,
    rounds: 1,
    every: "250ms",
    workloads: &["processes"],
    tools: &["icount"],
};

/// The selected sections and workloads. All sections are selected if `--only` names none.
struct Selection<'a> {
    only: &'a [String],
}

impl<'a> Selection<'a> {
    fn new(only: &'a [String]) -> Result<Self, Error> {
        let parts: Vec<&str> =
            SECTIONS.into_iter().chain(workload::ALL.iter().map(|workload| workload.key)).collect();
        match only.iter().find(|part| !parts.contains(&part.as_str())) {
            Some(part) => Err(Error::NoPart {
                benchmark: "replay",
                part: part.clone(),
                parts: parts.join(", "),
            }),
            None => Ok(Self { only }),
        }
    }

    fn names(&self, part: &str) -> bool {
        self.only.iter().any(|only| only == part)
    }

    fn section(&self, section: &str) -> bool {
        !SECTIONS.iter().any(|any| self.names(any)) || self.names(section)
    }

    fn workloads(&self, plan: &Plan) -> Vec<&'static Workload> {
        let any = workload::ALL.iter().any(|workload| self.names(workload.key));
        let wanted = |workload: &&Workload| {
            if any { self.names(workload.key) } else { plan.workloads.contains(&workload.key) }
        };
        workload::ALL.iter().filter(wanted).collect()
    }
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let selection = Selection::new(&options.only)?;
    let plan = if options.quick { &QUICK } else { &FULL };
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let follows = run_method::can_follow(options)?;
    if selection.section("stages") && !follows {
        let why = Error::failed("record --follow", "this keyframe record has no --follow");
        options.left_out("three stages live (three_stage_record_over_record)", &why);
    }
    let rounds = options.rounds.map_or(plan.rounds, usize::from);
    let bench = Bench { options, plan, selection, follows, rounds, dir: dir.path() };
    let mut rows = Rows::default();
    let workloads = bench.selection.workloads(plan);
    // An idle workload has no work to analyse.
    let subject = workloads
        .iter()
        .find(|workload| workload.key == SUBJECT)
        .or_else(|| workloads.iter().find(|workload| !workload.is_idle))
        .map(|workload| workload.key);
    for workload in workloads {
        if let Err(e) = bench.workload(workload, Some(workload.key) == subject, &mut rows) {
            // This machine may lack the guest or one of its programs.
            options.left_out(&format!("{} ({})", workload.key, workload.about), &e);
        }
    }
    let mut report = Report::new("replay");
    if rows.is_empty() {
        return Err(Error::failed("measure the cost of recordings", "no workload could be run"));
    }
    rows.report(&mut report);
    report.plot = chart::figure(&rows);
    Ok(report)
}

struct Bench<'a> {
    options: &'a Options,
    plan: &'a Plan,
    selection: Selection<'a>,
    follows: bool,
    rounds: usize,
    dir: &'a Path,
}

impl Bench<'_> {
    fn methods(&self) -> Vec<RunMethod> {
        let [record, checkpoints, stages, replay] = ["record", "checkpoints", "stages", "replay"]
            .map(|section| self.selection.section(section));
        let mut methods = Vec::new();
        if record {
            methods.extend([RunMethod::Plain, RunMethod::Icount, RunMethod::Unlogged]);
        }
        if record || checkpoints || stages || replay {
            methods.push(RunMethod::Record);
        }
        if checkpoints || stages {
            methods.push(RunMethod::Every("1s"));
        }
        if stages && self.follows {
            methods.push(RunMethod::Live);
        }
        methods
    }

    fn workload(
        &self,
        workload: &'static Workload,
        is_subject: bool,
        rows: &mut Rows,
    ) -> Result<(), Error> {
        let work = PreparedWorkload::prepare(workload, self.plan.units, self.options, self.dir)?;
        let methods = self.methods();
        // The real guest boots slowly and has many workloads.
        let rounds =
            if workload.is_of_real_guest() { self.rounds.div_ceil(3) } else { self.rounds };
        for round in 0..rounds {
            for method in in_turn(&methods, round) {
                let is_replayed = method == RunMethod::Record
                    && round < REPLAYS_MAX
                    && self.selection.section("replay");
                self.once(&work, method, is_replayed, rows)?;
            }
        }
        if is_subject
            && self.selection.section("checkpoints")
            && let Some(units) = self.plan.sweep_units
        {
            self.sweep(workload, units, rows)?;
        }
        let is_analysed =
            ["jobs", "tools", "memtrace"].iter().any(|section| self.selection.section(section));
        if is_subject && is_analysed {
            let out = self.directory(workload, "analysed");
            run_method::run(self.options, &work, RunMethod::Every(self.plan.every), &out)?;
            let analysed = tool_costs::measure(self, &out, rows);
            remove(&out)?;
            analysed?;
        }
        Ok(())
    }

    /// Runs a workload once. If `is_replayed`, replays the recording too.
    fn once(
        &self,
        work: &PreparedWorkload,
        method: RunMethod,
        is_replayed: bool,
        rows: &mut Rows,
    ) -> Result<(), Error> {
        let out = self.directory(work.workload, method.key());
        let ran = run_method::run(self.options, work, method, &out);
        if let Ok(ran) = &ran {
            rows.push(work.workload, method.key(), ran.work);
            if method == RunMethod::Live {
                rows.push(work.workload, "three_stage_whole", ran.whole);
                let time_ns = ran.whole.time_ns + ran.closing.as_nanos() as f64;
                rows.push(work.workload, "followed_whole", TimeSpent { time_ns, ..ran.whole });
            }
            if is_replayed {
                let recording = Recording { options: self.options, dir: &out };
                rows.push(work.workload, "recorded_whole", ran.whole);
                self.options.say(format!("{}, replay", work.workload.key));
                rows.push(work.workload, "replayed_whole", recording.replay()?);
                self.options.say(format!("{}, segment", work.workload.key));
                rows.push(work.workload, "segmented_whole", recording.segment("1s")?);
            }
        }
        remove(&out)?;
        ran.map(drop)
    }

    /// Measures several intervals on a longer run of the workload. Each round begins and ends with a
    /// recording without checkpoints.
    fn sweep(&self, workload: &'static Workload, units: u32, rows: &mut Rows) -> Result<(), Error> {
        let work = PreparedWorkload::prepare(workload, units, self.options, self.dir)?;
        let methods =
            [&[RunMethod::Record], &SWEEP.map(RunMethod::Every)[..], &[RunMethod::Record]].concat();
        for round in 0..self.rounds.div_ceil(2) {
            for method in in_turn(&methods, round) {
                let out = self.directory(workload, method.key());
                let ran = run_method::run(self.options, &work, method, &out);
                remove(&out)?;
                rows.push_sweep(method.key(), ran?.work);
            }
        }
        Ok(())
    }

    fn directory(&self, workload: &Workload, name: &str) -> PathBuf {
        self.dir.join(format!("{}-{name}", workload.key))
    }
}

/// Returns the order of a round. It alternates, to cancel out a machine that becomes slower.
fn in_turn(methods: &[RunMethod], round: usize) -> Vec<RunMethod> {
    let mut order = methods.to_vec();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

fn remove(dir: &Path) -> Result<(), Error> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", dir.display()))(e))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_and_workloads_are_selected_independently() {
        let only = |parts: &[&str]| parts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let nothing = only(&[]);
        let selection = Selection::new(&nothing).unwrap();
        assert!(
            selection.section("jobs") && selection.workloads(&FULL).len() == workload::ALL.len()
        );
        assert_eq!(
            selection.workloads(&QUICK).iter().map(|workload| workload.key).collect::<Vec<_>>(),
            [SUBJECT]
        );
        let some = only(&["record", "redis", "compute"]);
        let selection = Selection::new(&some).unwrap();
        assert!(selection.section("record") && !selection.section("jobs"));
        assert_eq!(
            selection.workloads(&QUICK).iter().map(|workload| workload.key).collect::<Vec<_>>(),
            ["compute", "redis"]
        );
        assert!(Selection::new(&only(&["oracle"])).is_err());
    }

    #[test]
    fn plans_name_known_workloads() {
        for plan in [&FULL, &QUICK] {
            assert!(
                plan.workloads
                    .iter()
                    .all(|key| workload::ALL.iter().any(|workload| workload.key == *key))
            );
        }
    }
}
