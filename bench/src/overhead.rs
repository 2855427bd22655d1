//! What checkpoints cost the guest: its work with and without Keyframe, in runs that follow each
//! other.
//!
//! ```text
//!   one round:   plain  A  B  C  plain  D  E  plain      A: --interval 100ms, B: 200ms, ...; the next round: E D C B A
//!                  └───────┬───────┘
//!        lost(A) = 1 - work(A) / (mean of the plain runs before and after)
//! ```
//!
//! Each run is a fresh boot, for what is left of a tracker (split huge pages) slows a guest that is
//! no longer tracked. Plain runs on both sides of a few others, in an order that turns round, let a
//! machine that gets slower favour nobody.

mod chart;
pub(crate) mod compile;
mod subject;

use crate::guest::Guest as Files;
use crate::parts::Parts;
use crate::sample::Sample;
use crate::vm::{Guest, Protected};
use crate::{Error, Options, Report};
use std::path::Path;
use subject::{Done, Subject};

/// Runs between two plain ones.
const BETWEEN: usize = 3;

/// How checkpoints are taken in a run.
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

    /// As in keys: the interval alone where the strategy is the default one.
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

/// The guests, each with what is measured on it.
const SUBJECTS: [(&str, &[Setting]); 3] = [
    ("compute", &INTERVALS),
    ("60k", &STRATEGIES),
    ("compile", INTERVALS.split_at(3).1.split_at(1).0),
];

/// How long and how often.
struct Plan {
    /// From the guest's READY to the first count.
    settle_s: u64,
    /// What is counted.
    seconds: u64,
    /// Times that all sources are compiled, in a run.
    compiles: u64,
    /// Rounds with the computing, the dirtying, the compiling guest.
    rounds: [usize; 3],
}

const FULL: Plan = Plan { settle_s: 2, seconds: 8, compiles: 3, rounds: [3, 2, 1] };
const QUICK: Plan = Plan { settle_s: 1, seconds: 1, compiles: 1, rounds: [1, 1, 1] };

/// What one setting did to one guest.
struct Lost {
    setting: Setting,
    per_s: Sample,
    work: Sample,
    spare: Sample,
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let all = SUBJECTS.iter().flat_map(|(key, settings)| {
        settings.iter().map(move |setting| format!("{key}_{}", setting.key()))
    });
    let parts = Parts::choose("overhead", &options.only, all)?;
    let plan = if options.quick { &QUICK } else { &FULL };
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let files = Files::find(options)?;
    let mut report = Report::new("overhead");
    let mut charted = Vec::new();
    for ((key, settings), rounds) in SUBJECTS.into_iter().zip(plan.rounds) {
        let wanted = |setting: &&Setting| parts.has(&format!("{key}_{}", setting.key()));
        let settings: Vec<Setting> = settings.iter().filter(wanted).copied().collect();
        if settings.is_empty() {
            continue;
        }
        let subject = match key {
            "compute" => Subject::compute(&files),
            "60k" => Subject::dirty(&files),
            _ => match Subject::compile(options, dir.path()) {
                Ok(subject) => subject,
                Err(e) => {
                    options.left_out("compiling", &e);
                    continue;
                }
            },
        };
        let rounds = options.rounds.map_or(rounds, usize::from);
        let bench = Bench { options, plan, dir: dir.path(), subject: &subject };
        let (plain, lost) = match bench.compare(&settings, rounds) {
            Err(e) if subject.may_be_left_out() => {
                options.left_out(subject.title, &e);
                continue;
            }
            compared => compared?,
        };
        figures(&mut report, (subject.key, subject.unit), &plain, &lost);
        charted.push((subject, lost));
    }
    report.plot = chart::figure(&charted);
    Ok(report)
}

struct Bench<'a> {
    options: &'a Options,
    plan: &'a Plan,
    dir: &'a Path,
    subject: &'a Subject,
}

impl Bench<'_> {
    /// Measures `settings` against plain runs. Gives back the plain runs' work a second, and what
    /// each setting lost.
    fn compare(&self, settings: &[Setting], rounds: usize) -> Result<(Sample, Vec<Lost>), Error> {
        let mut lost: Vec<Lost> = settings.iter().map(Lost::new).collect();
        let mut plain = Sample::default();
        // The plain run behind one round is the one before the next.
        let mut before = self.plain(&mut plain)?;
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..lost.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            // A look makes do with one plain run.
            let between = if self.options.quick { order.len() } else { BETWEEN };
            for part in order.chunks(between) {
                let done: Vec<(usize, Done)> = part
                    .iter()
                    .map(|at| Ok((*at, self.protected(&lost[*at].setting)?)))
                    .collect::<Result<_, Error>>()?;
                let after = if self.options.quick { before } else { self.plain(&mut plain)? };
                let around = before.mean(after);
                for (at, done) in done {
                    lost[at].push(done, around);
                }
                before = after;
            }
        }
        Ok((plain, lost))
    }

    fn plain(&self, plain: &mut Sample) -> Result<Done, Error> {
        self.options.say(format!("{}, plain", self.subject.key));
        let mut guest = Guest::start(&self.subject.command)?;
        let done = self.subject.measure(&mut guest, self.plan)?;
        guest.power_off();
        plain.push(done.work_per_s);
        Ok(done)
    }

    fn protected(&self, setting: &Setting) -> Result<Done, Error> {
        self.options
            .say(format!("{}, {} every {}", self.subject.key, setting.strategy, setting.interval));
        let store = self.dir.join("store");
        let how = (setting.interval, setting.strategy);
        let done = {
            let mut vm = Protected::start(self.options, &store, how, &self.subject.command)?;
            self.subject.measure(&mut vm.guest, self.plan)
        };
        std::fs::remove_dir_all(&store)
            .map_err(Error::io(format!("remove {}", store.display())))?;
        done
    }
}

impl Lost {
    fn new(setting: &Setting) -> Self {
        let (per_s, work, spare) = Default::default();
        Self { setting: *setting, per_s, work, spare }
    }

    fn push(&mut self, done: Done, plain: Done) {
        self.per_s.push(done.work_per_s);
        self.work.push(1.0 - done.work_per_s / plain.work_per_s);
        if let (Some(spare), Some(plain)) = (done.spare_per_s, plain.spare_per_s) {
            self.spare.push(1.0 - spare / plain);
        }
    }
}

fn figures(report: &mut Report, (key, unit): (&str, &str), plain: &Sample, lost: &[Lost]) {
    report.figure(format!("{key}_plain_{unit}_per_s"), plain.median());
    report.figure(format!("{key}_pairs"), lost.first().map_or(0, |l| l.work.len()) as f64);
    // What two plain runs differ by is what a loss is uncertain by.
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
        let done = |work_per_s, spare_per_s| Done { work_per_s, spare_per_s };
        let around = done(90.0, Some(30.0)).mean(done(110.0, Some(50.0)));
        let mut lost = Lost::new(&INTERVALS[3]);
        lost.push(done(98.0, Some(20.0)), around);
        assert!((lost.work.median() - 0.02).abs() < 1e-9);
        assert!((lost.spare.median() - 0.5).abs() < 1e-9);
    }

    /// Those are read by others.
    #[test]
    fn the_keys_are_those_promised() {
        let (mut report, mut plain) = (Report::new("overhead"), Sample::default());
        plain.push(100.0);
        for ((_, settings), subject) in SUBJECTS.iter().zip(["compute", "60k"]) {
            let mut lost: Vec<Lost> = settings.iter().map(Lost::new).collect();
            let done = |work_per_s| Done { work_per_s, spare_per_s: None };
            for lost in &mut lost {
                lost.push(done(98.0), done(100.0));
            }
            figures(&mut report, (subject, "units"), &plain, &lost);
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
