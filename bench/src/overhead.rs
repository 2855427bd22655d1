//! `overhead`: the work that a guest loses to checkpoints, from runs with and without Keyframe.
//!
//! ```text
//!   one round:   plain  A  B  C  plain  D  E  plain      A: --interval 100ms, B: 200ms, ...
//!                  └───────┬───────┘                     the next round: E D C B A
//!        lost(A) = 1 - work(A) / (mean of the plain runs before and after)
//! ```
//!
//! Each run is a fresh boot, because the split huge pages that a tracker leaves slow a guest down
//! after tracking. The plain runs before and after, and the alternating order, cancel out a machine
//! that becomes slower or faster.

mod chart;
pub(crate) mod compile_job;
mod workload;

use crate::guest_files::SmallGuest;
use crate::part_selection::PartSelection;
use crate::running_guest::{CheckpointedGuest, RunningGuest, Schedule};
use crate::sample::Sample;
use crate::{Error, Options, Report};
use std::path::Path;
use workload::{WorkRate, Workload};

/// The number of runs between two plain runs.
const BETWEEN: usize = 3;

/// The strategy and the interval of the checkpoints of a run.
#[derive(Clone, Copy, Debug)]
struct Setting {
    strategy: &'static str,
    interval: &'static str,
    interval_ms: u32,
}

impl Setting {
    const fn every(interval: &'static str, interval_ms: u32) -> Self {
        Self { strategy: "precopy", interval, interval_ms }
    }

    /// Returns its name in keys: the interval alone if the strategy is the default.
    fn key(&self) -> String {
        match self.strategy {
            "precopy" => self.interval.into(),
            other => format!("{}_{}", other.replace('-', "_"), self.interval),
        }
    }
}

const INTERVALS: [Setting; 5] = [
    Setting::every("100ms", 100),
    Setting::every("200ms", 200),
    Setting::every("500ms", 500),
    Setting::every("1s", 1000),
    Setting::every("2s", 2000),
];
const STRATEGIES: [Setting; 5] = [
    Setting::every("1s", 1000),
    Setting { strategy: "stop-copy", ..Setting::every("1s", 1000) },
    Setting { strategy: "fork", ..Setting::every("1s", 1000) },
    Setting { strategy: "cow", ..Setting::every("1s", 1000) },
    Setting::every("100ms", 100),
];

/// The workloads, each with its settings.
const WORKLOADS: [(&str, &[Setting]); 3] = [
    ("compute", &INTERVALS),
    ("60k", &STRATEGIES),
    ("compile", INTERVALS.split_at(3).1.split_at(1).0),
];

/// The times and rounds of a benchmark.
struct Plan {
    /// The time from the guest's READY to the first count.
    settle_s: u64,
    /// The counted time.
    seconds: u64,
    /// How often all sources are compiled in a run.
    compiles: u64,
    /// The rounds of each workload, in the order of [`WORKLOADS`].
    rounds: [usize; 3],
}

const FULL: Plan = Plan { settle_s: 2, seconds: 8, compiles: 3, rounds: [3, 2, 1] };
const QUICK: Plan = Plan { settle_s: 1, seconds: 1, compiles: 1, rounds: [1, 1, 1] };

/// The work that a guest lost with one setting.
struct LostWork {
    setting: Setting,
    per_s: Sample,
    work: Sample,
    spare: Sample,
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let all = WORKLOADS.iter().flat_map(|(key, settings)| {
        settings.iter().map(move |setting| format!("{key}_{}", setting.key()))
    });
    let parts = PartSelection::new("overhead", &options.only, all)?;
    let plan = if options.quick { &QUICK } else { &FULL };
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let files = SmallGuest::find(options)?;
    let mut report = Report::new("overhead");
    let mut charted = Vec::new();
    for ((key, settings), rounds) in WORKLOADS.into_iter().zip(plan.rounds) {
        let is_selected = |setting: &&Setting| parts.has(&format!("{key}_{}", setting.key()));
        let settings: Vec<Setting> = settings.iter().filter(is_selected).copied().collect();
        if settings.is_empty() {
            continue;
        }
        let workload = match key {
            "compute" => Workload::compute(&files),
            "60k" => Workload::dirty(&files),
            _ => match Workload::compile(options, dir.path()) {
                Ok(workload) => workload,
                Err(e) => {
                    options.left_out("compiling", &e);
                    continue;
                }
            },
        };
        let rounds = options.rounds.map_or(rounds, usize::from);
        let bench = Bench { options, plan, dir: dir.path(), workload: &workload };
        let (plain, lost) = match bench.compare(&settings, rounds) {
            Err(e) if workload.may_be_left_out() => {
                options.left_out(workload.title, &e);
                continue;
            }
            compared => compared?,
        };
        add_figures(&mut report, workload.key, workload.unit, &plain, &lost);
        charted.push((workload, lost));
    }
    report.plot = chart::figure(&charted);
    Ok(report)
}

struct Bench<'a> {
    options: &'a Options,
    plan: &'a Plan,
    dir: &'a Path,
    workload: &'a Workload,
}

impl Bench<'_> {
    /// Measures `settings` against plain runs. Returns the work rates of the plain runs, and the lost
    /// work of each setting.
    fn compare(
        &self,
        settings: &[Setting],
        rounds: usize,
    ) -> Result<(Sample, Vec<LostWork>), Error> {
        let mut lost: Vec<LostWork> = settings.iter().map(LostWork::new).collect();
        let mut plain = Sample::default();
        // The plain run after one round is also the one before the next.
        let mut before = self.plain(&mut plain)?;
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..lost.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            // A quick run has one plain run only.
            let between = if self.options.quick { order.len() } else { BETWEEN };
            for part in order.chunks(between) {
                let rates: Vec<(usize, WorkRate)> = part
                    .iter()
                    .map(|at| Ok((*at, self.with_checkpoints(&lost[*at].setting)?)))
                    .collect::<Result<_, Error>>()?;
                let after = if self.options.quick { before } else { self.plain(&mut plain)? };
                let around = before.mean(after);
                for (at, rate) in rates {
                    lost[at].push(rate, around);
                }
                before = after;
            }
        }
        Ok((plain, lost))
    }

    fn plain(&self, plain: &mut Sample) -> Result<WorkRate, Error> {
        self.options.say(format!("{}, plain", self.workload.key));
        let mut guest = RunningGuest::start(&self.workload.command)?;
        let rate = self.workload.measure(&mut guest, self.plan)?;
        guest.power_off();
        plain.push(rate.work_per_s);
        Ok(rate)
    }

    fn with_checkpoints(&self, setting: &Setting) -> Result<WorkRate, Error> {
        self.options
            .say(format!("{}, {} every {}", self.workload.key, setting.strategy, setting.interval));
        let store = self.dir.join("store");
        let schedule = Schedule { interval: setting.interval, strategy: setting.strategy };
        let rate = {
            let mut vm =
                CheckpointedGuest::start(self.options, &store, schedule, &self.workload.command)?;
            self.workload.measure(&mut vm.guest, self.plan)
        };
        std::fs::remove_dir_all(&store)
            .map_err(Error::io(format!("remove {}", store.display())))?;
        rate
    }
}

impl LostWork {
    fn new(setting: &Setting) -> Self {
        let (per_s, work, spare) = Default::default();
        Self { setting: *setting, per_s, work, spare }
    }

    fn push(&mut self, rate: WorkRate, plain: WorkRate) {
        self.per_s.push(rate.work_per_s);
        self.work.push(1.0 - rate.work_per_s / plain.work_per_s);
        if let (Some(spare), Some(plain)) = (rate.spare_per_s, plain.spare_per_s) {
            self.spare.push(1.0 - spare / plain);
        }
    }
}

fn add_figures(report: &mut Report, key: &str, unit: &str, plain: &Sample, lost: &[LostWork]) {
    report.figure(format!("{key}_plain_{unit}_per_s"), plain.median());
    report.figure(format!("{key}_pairs"), lost.first().map_or(0, |l| l.work.len()) as f64);
    // The spread of the plain runs is the uncertainty of the losses.
    if plain.len() > 1 {
        report.ratio(
            format!("{key}_plain_spread"),
            (plain.percentile(100) - plain.percentile(1)) / plain.median(),
        );
    }
    for lost in lost {
        let setting = lost.setting.key();
        report.figure(format!("{key}_{setting}_{unit}_per_s"), lost.per_s.median());
        report.ratio(format!("work_lost_{key}_{setting}"), lost.work.median());
        if lost.spare.len() > 0 {
            report.ratio(format!("spare_lost_{key}_{setting}"), lost.spare.median());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_against_the_plain_runs_around_it() {
        let rate = |work_per_s, spare_per_s| WorkRate { work_per_s, spare_per_s };
        let around = rate(90.0, Some(30.0)).mean(rate(110.0, Some(50.0)));
        let mut lost = LostWork::new(&INTERVALS[3]);
        lost.push(rate(98.0, Some(20.0)), around);
        assert!((lost.work.median() - 0.02).abs() < 1e-9);
        assert!((lost.spare.median() - 0.5).abs() < 1e-9);
    }

    /// Other programs read these keys.
    #[test]
    fn the_keys_are_those_promised() {
        let (mut report, mut plain) = (Report::new("overhead"), Sample::default());
        plain.push(100.0);
        for ((_, settings), workload) in WORKLOADS.iter().zip(["compute", "60k"]) {
            let mut lost: Vec<LostWork> = settings.iter().map(LostWork::new).collect();
            let rate = |work_per_s| WorkRate { work_per_s, spare_per_s: None };
            for lost in &mut lost {
                lost.push(rate(98.0), rate(100.0));
            }
            add_figures(&mut report, workload, "units", &plain, &lost);
        }
        for key in ["work_lost_compute_1s", "work_lost_60k_1s", "work_lost_compute_100ms"] {
            assert!((report.ratios[key] - 0.02).abs() < 1e-9, "{key}");
        }
    }

    #[test]
    fn keys_name_the_strategy_unless_it_is_the_default() {
        let keys: Vec<_> = STRATEGIES.iter().map(Setting::key).collect();
        assert_eq!(keys, ["1s", "stop_copy_1s", "fork_1s", "cow_1s", "100ms"]);
    }
}
