//! What recording, replaying and analysing cost, on the same guest work.
//!
//! ```text
//!   a round of a workload   plain  icount  unlogged  record  1s  three_stage        each a boot, timed between two lines of the guest;
//!                           three_stage  1s  record  unlogged  icount  plain          the next round goes back
//!                                              └▶ its recording: one replay through all, one that takes checkpoints
//!   of one workload         500ms 1s 2s 4s 8s against record, over more work
//!                           its recording: jobs 1, jobs 2, two at once; each tool on one interval
//! ```
//!
//! A ratio is the median of those of the rounds: what stood beside each other is compared. Time is
//! that of the guest's thread without its waiting for a core (`clock`).
//!
//! Left out: what a replay is right about; `keyframe verify` says that, and a replay that goes
//! wrong fails the benchmark.

mod analyses;
mod chart;
pub(crate) mod clock;
pub(crate) mod initrd;
mod recorded;
mod rows;
mod ways;
mod workload;

use crate::{Error, Options, Report};
use clock::Spent;
use recorded::Recorded;
use rows::Rows;
use std::path::{Path, PathBuf};
use ways::Way;
use workload::{Kind, Workload};

/// What is measured, as `--only` names it.
const SECTIONS: [&str; 7] =
    ["record", "checkpoints", "stages", "replay", "jobs", "tools", "memtrace"];
/// Of the thesis' figure 3.1, besides 1 s.
const SWEEP: [&str; 5] = ["500ms", "1s", "2s", "4s", "8s"];
/// The workload whose recording is analysed, and with which intervals are varied; the first that is
/// wanted where it is not.
const SUBJECT: &str = "processes";

/// Recordings of a workload that are replayed, twice each.
const REPLAYS_MAX: usize = 2;

/// How much and how often.
struct Plan {
    /// Seconds of work, about.
    units: u32,
    /// Seconds of work in the runs with several intervals; none: they are left out.
    sweep_units: Option<u32>,
    rounds: usize,
    /// Between the checkpoints of the recording that is analysed.
    every: &'static str,
    /// Workloads, where none are chosen.
    workloads: &'static [&'static str],
    /// Tools beside `memtrace` and what it is compared with.
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

/// What of it is wanted: a section where any is named, of a workload where any is named.
struct Chosen<'a> {
    only: &'a [String],
}

impl<'a> Chosen<'a> {
    fn of(only: &'a [String]) -> Result<Self, Error> {
        let parts: Vec<&str> =
            SECTIONS.into_iter().chain(workload::ALL.iter().map(|kind| kind.key)).collect();
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

    fn workloads(&self, plan: &Plan) -> Vec<&'static Kind> {
        let any = workload::ALL.iter().any(|kind| self.names(kind.key));
        let wanted = |kind: &&Kind| {
            if any { self.names(kind.key) } else { plan.workloads.contains(&kind.key) }
        };
        workload::ALL.iter().filter(wanted).collect()
    }
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let chosen = Chosen::of(&options.only)?;
    let plan = if options.quick { &QUICK } else { &FULL };
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let follows = ways::can_follow(options)?;
    if chosen.section("stages") && !follows {
        let why = Error::failed("record --follow", "this keyframe record has no --follow");
        options.left_out("three stages live (three_stage_record_over_record)", &why);
    }
    let rounds = options.rounds.map_or(plan.rounds, usize::from);
    let bench = Bench { options, plan, chosen, follows, rounds, dir: dir.path() };
    let mut rows = Rows::default();
    let kinds = bench.chosen.workloads(plan);
    // Sleeping is no work to analyse.
    let subject = kinds
        .iter()
        .find(|kind| kind.key == SUBJECT)
        .or_else(|| kinds.iter().find(|kind| !kind.is_idle))
        .map(|kind| kind.key);
    for kind in kinds {
        if let Err(e) = bench.workload(kind, Some(kind.key) == subject, &mut rows) {
            // Its guest, or a program in it, may not be had here; the small guest's are.
            options.left_out(&format!("{} ({})", kind.key, kind.about), &e);
        }
    }
    let mut report = Report::new("replay");
    if rows.is_empty() {
        return Err(Error::failed("measure what recordings cost", "no workload could be run"));
    }
    rows.report(&mut report);
    report.plot = chart::figure(&rows);
    Ok(report)
}

struct Bench<'a> {
    options: &'a Options,
    plan: &'a Plan,
    chosen: Chosen<'a>,
    follows: bool,
    rounds: usize,
    dir: &'a Path,
}

impl Bench<'_> {
    fn ways(&self) -> Vec<Way> {
        let [record, checkpoints, stages, replay] = ["record", "checkpoints", "stages", "replay"]
            .map(|section| self.chosen.section(section));
        let mut ways = Vec::new();
        if record {
            ways.extend([Way::Plain, Way::Icount, Way::Unlogged]);
        }
        if record || checkpoints || stages || replay {
            ways.push(Way::Record);
        }
        if checkpoints || stages {
            ways.push(Way::Every("1s"));
        }
        if stages && self.follows {
            ways.push(Way::Live);
        }
        ways
    }

    fn workload(
        &self,
        kind: &'static Kind,
        is_subject: bool,
        rows: &mut Rows,
    ) -> Result<(), Error> {
        let work = Workload::prepare(kind, self.plan.units, self.options, self.dir)?;
        let ways = self.ways();
        // The real guest boots slowly, and there are many workloads for it.
        let rounds = if kind.is_of_real_guest() { self.rounds.div_ceil(3) } else { self.rounds };
        for round in 0..rounds {
            for way in in_turn(&ways, round) {
                let is_replayed =
                    way == Way::Record && round < REPLAYS_MAX && self.chosen.section("replay");
                self.once(&work, way, is_replayed, rows)?;
            }
        }
        if is_subject
            && self.chosen.section("checkpoints")
            && let Some(units) = self.plan.sweep_units
        {
            self.sweep(kind, units, rows)?;
        }
        let analysed =
            ["jobs", "tools", "memtrace"].iter().any(|section| self.chosen.section(section));
        if is_subject && analysed {
            let out = self.place(kind, "analysed");
            ways::run(self.options, &work, Way::Every(self.plan.every), &out)?;
            let analysed = analyses::all(self, &out, rows);
            remove(&out)?;
            analysed?;
        }
        Ok(())
    }

    /// Runs it once; a recording can be replayed while it is there.
    fn once(
        &self,
        work: &Workload,
        way: Way,
        is_replayed: bool,
        rows: &mut Rows,
    ) -> Result<(), Error> {
        let out = self.place(work.kind, way.key());
        let ran = ways::run(self.options, work, way, &out);
        if let Ok(ran) = &ran {
            rows.push(work.kind, way.key(), ran.work);
            if way == Way::Live {
                rows.push(work.kind, "three_stage_whole", ran.whole);
                let time_ns = ran.whole.time_ns + ran.behind.as_nanos() as f64;
                rows.push(work.kind, "followed_whole", Spent { time_ns, ..ran.whole });
            }
            if is_replayed {
                let recorded = Recorded { options: self.options, dir: &out };
                rows.push(work.kind, "recorded_whole", ran.whole);
                self.options.say(format!("{}, replay", work.kind.key));
                rows.push(work.kind, "replayed_whole", recorded.replay()?);
                self.options.say(format!("{}, segment", work.kind.key));
                rows.push(work.kind, "segmented_whole", recorded.segment("1s")?);
            }
        }
        remove(&out)?;
        ran.map(drop)
    }

    /// Several intervals between checkpoints, over work that is long enough for them; in each round
    /// between two recordings without.
    fn sweep(&self, kind: &'static Kind, units: u32, rows: &mut Rows) -> Result<(), Error> {
        let work = Workload::prepare(kind, units, self.options, self.dir)?;
        let ways = [&[Way::Record], &SWEEP.map(Way::Every)[..], &[Way::Record]].concat();
        for round in 0..self.rounds.div_ceil(2) {
            for way in in_turn(&ways, round) {
                let out = self.place(kind, way.key());
                let ran = ways::run(self.options, &work, way, &out);
                remove(&out)?;
                rows.push_sweep(way.key(), ran?.work);
            }
        }
        Ok(())
    }

    fn place(&self, kind: &Kind, name: &str) -> PathBuf {
        self.dir.join(format!("{}-{name}", kind.key))
    }
}

/// There and back again: a machine that gets slower favours nobody.
fn in_turn(ways: &[Way], round: usize) -> Vec<Way> {
    let mut order = ways.to_vec();
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
    fn sections_and_workloads_are_chosen_apart() {
        let only = |parts: &[&str]| parts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let nothing = only(&[]);
        let chosen = Chosen::of(&nothing).unwrap();
        assert!(chosen.section("jobs") && chosen.workloads(&FULL).len() == workload::ALL.len());
        assert_eq!(
            chosen.workloads(&QUICK).iter().map(|kind| kind.key).collect::<Vec<_>>(),
            [SUBJECT]
        );
        let some = only(&["record", "redis", "compute"]);
        let chosen = Chosen::of(&some).unwrap();
        assert!(chosen.section("record") && !chosen.section("jobs"));
        assert_eq!(
            chosen.workloads(&QUICK).iter().map(|kind| kind.key).collect::<Vec<_>>(),
            ["compute", "redis"]
        );
        assert!(Chosen::of(&only(&["oracle"])).is_err());
    }

    #[test]
    fn plans_name_what_there_is() {
        for plan in [&FULL, &QUICK] {
            assert!(
                plan.workloads.iter().all(|key| workload::ALL.iter().any(|kind| kind.key == *key))
            );
        }
    }
}
