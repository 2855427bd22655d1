//! `replication`: the cost of a standby for the guest, from runs with and without a standby.
//!
//! ```text
//!   one round of a workload over a link:   plain  A  B  plain  C  D  plain
//!     A: fixed:50ms, B: fixed:100ms, ...     └──────┬─────┘        the next round: D C B A
//!     slowdown(A) = mean work of the plain runs before and after / work(A)
//!   a failover:   boot, protect, ask ─▶ the primary's host loses power ─▶ the next answer
//! ```
//!
//! Each run is a fresh boot on three hosts (`keyframe_test_hosts`); a plain run has the same QEMU
//! command line on the same host. All hosts share this machine, so the slowdown includes the work of
//! the standby, which normally is on another machine. The end-to-end tests check that replication is
//! correct; this benchmark does not.

mod chart;
mod clients;
mod failover;
mod rows;
mod test_bed;
mod workload;

use crate::guest_files::SmallGuest;
use crate::interrupt::Interrupt;
use crate::{Error, Options, Report};
use keyframe_test_hosts::{Network, Rate};
use rows::Rows;
use test_bed::TestBed;
use workload::{RunResult, Workload};

/// The number of protected runs between two plain runs.
const BETWEEN: usize = 2;
const FAILOVER: &str = "failover";
/// The reason why QEMU's own replication is not measured.
const COLO: &str = "not run: QEMU 7.2 has it (x-colo), but under TCG a primary without disk and network hung at its \
                    first checkpoint, and its monitor did not answer";

/// A policy of `keyframe protect`.
#[derive(Debug)]
pub struct Policy {
    /// Its name in keys.
    key: &'static str,
    /// The value of `--policy`.
    word: &'static str,
}

const POLICIES: [Policy; 4] = [
    Policy { key: "fixed50", word: "fixed:50ms" },
    Policy { key: "fixed100", word: "fixed:100ms" },
    Policy { key: "paper", word: "paper" },
    Policy { key: "adaptive", word: "adaptive" },
];
/// The links by their names in keys.
const LINKS: [(&str, Rate); 2] = [("1gbit", Rate::GIGABIT), ("10gbit", Rate::TEN_GIGABIT)];

/// The extent of the benchmark.
struct Plan {
    /// The counted time of a run.
    seconds: u16,
    rounds: u16,
    failovers: u16,
    /// The links, if `--only` names none.
    links: &'static [&'static str],
    /// The policies, if `--only` names none.
    policies: &'static [&'static str],
}

const FULL: Plan = Plan {
    seconds: 10,
    rounds: 3,
    failovers: 20,
    links: &["1gbit", "10gbit"],
    policies: &["fixed50", "fixed100", "paper", "adaptive"],
};
const QUICK: Plan = Plan {
    seconds: 5,
    rounds: 1,
    failovers: 3,
    links: &["1gbit"],
    policies: &["fixed100", "paper", "adaptive"],
};

/// The selected links, policies and workloads. If `--only` names none of a group, the group's default
/// is selected.
struct Selection {
    links: Vec<(&'static str, Rate)>,
    policies: Vec<&'static Policy>,
    workloads: Vec<&'static Workload>,
    has_failover: bool,
}

impl Selection {
    fn new(only: &[String], plan: &Plan) -> Result<Self, Error> {
        let keys = |of: &[&'static str]| of.to_vec();
        let links = keys(&LINKS.map(|(key, _)| key));
        let policies = keys(&POLICIES.each_ref().map(|policy| policy.key));
        let workloads = keys(
            &[&workload::ALL.each_ref().map(|workload| workload.key)[..], &[FAILOVER]].concat(),
        );
        let all = [&workloads[..], &links, &policies].concat();
        if let Some(part) = only.iter().find(|part| !all.contains(&part.as_str())) {
            let parts = all.join(", ");
            return Err(Error::NoPart { benchmark: "replication", part: part.clone(), parts });
        }
        let select = |group: &[&'static str], otherwise: &[&'static str]| -> Vec<&'static str> {
            let named: Vec<_> =
                group.iter().copied().filter(|key| only.iter().any(|part| part == key)).collect();
            if named.is_empty() { otherwise.to_vec() } else { named }
        };
        let links = select(&links, plan.links);
        let policies = select(&policies, plan.policies);
        let workloads = select(&workloads, &workloads);
        Ok(Self {
            links: LINKS.into_iter().filter(|(key, _)| links.contains(key)).collect(),
            policies: POLICIES.iter().filter(|policy| policies.contains(&policy.key)).collect(),
            workloads: workload::ALL
                .iter()
                .filter(|workload| workloads.contains(&workload.key))
                .collect(),
            has_failover: workloads.contains(&FAILOVER),
        })
    }
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let plan = if options.quick { &QUICK } else { &FULL };
    let selection = Selection::new(&options.only, plan)?;
    let interrupt = Interrupt::listen()?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let files = SmallGuest::find(options)?.absolute()?;
    let seconds = options.seconds.unwrap_or(plan.seconds);
    let rounds = options.rounds.unwrap_or(plan.rounds);
    options.say(format!("{rounds} round(s), {seconds} s of each run are counted"));
    let mut rows = Rows::new(seconds);
    let network =
        |rate| Network::new(rate).map_err(Error::io("make hosts of network namespaces (as root)"));
    for (link, rate) in &selection.links {
        for workload in &selection.workloads {
            options.say(format!(
                "{} over {link}: {} (the paper's {})",
                workload.key, workload.about, workload.figure
            ));
            let test_bed = TestBed::new(options, &interrupt, &files, network(*rate)?, dir.path())?;
            let mut bench =
                Bench { test_bed, workload, link, policies: &selection.policies, seconds };
            if let Err(e) = bench.compare(rounds, &mut rows) {
                interrupt.check()?;
                options.left_out(&format!("{} over {link}", workload.key), &e);
            }
        }
    }
    if selection.has_failover {
        let mut test_bed =
            TestBed::new(options, &interrupt, &files, network(Rate::GIGABIT)?, dir.path())?;
        let times =
            options.rounds.filter(|_| selection.workloads.is_empty()).unwrap_or(plan.failovers);
        for n in 1..=times {
            options.say(format!("failover {n} of {times}"));
            match failover::measure(&mut test_bed) {
                Ok(took) => rows.failovers_ns.push(took.as_nanos() as f64),
                Err(e) => {
                    interrupt.check()?;
                    options.left_out(&format!("failover {n}"), &e);
                }
            }
        }
    }
    if rows.is_empty() {
        return Err(Error::failed("measure the cost of replication", "no run could be measured"));
    }
    let mut report = Report::new("replication");
    rows.report(&mut report);
    if !selection.workloads.is_empty() {
        report.notes.insert("colo".into(), COLO.into());
    }
    report.plot = chart::figure(&rows);
    Ok(report)
}

/// One workload over one link.
struct Bench<'a> {
    test_bed: TestBed<'a>,
    workload: &'static Workload,
    link: &'static str,
    policies: &'a [&'static Policy],
    seconds: u16,
}

impl Bench<'_> {
    fn compare(&mut self, rounds: u16, rows: &mut Rows) -> Result<(), Error> {
        // The plain run after one round is also the one before the next.
        let mut before = self.once(None)?;
        rows.plain(self.workload, self.link, &before);
        for round in 0..rounds {
            let mut order = self.policies.to_vec();
            if round % 2 == 1 {
                order.reverse();
            }
            for part in order.chunks(BETWEEN) {
                let mut done = Vec::new();
                for policy in part {
                    match self.once(Some(policy)) {
                        Ok(one) => done.push((*policy, one)),
                        Err(e) => {
                            self.test_bed.interrupt.check()?;
                            let what = format!(
                                "{} over {} with {}",
                                self.workload.key, self.link, policy.word
                            );
                            self.test_bed.options.left_out(&what, &e);
                        }
                    }
                }
                let after = self.once(None)?;
                rows.plain(self.workload, self.link, &after);
                for (policy, done) in done {
                    rows.protected(self.workload, self.link, policy, &done, [&before, &after]);
                }
                before = after;
            }
        }
        Ok(())
    }

    /// Runs the workload once, with a policy or plain.
    fn once(&mut self, policy: Option<&Policy>) -> Result<RunResult, Error> {
        let how = policy.map_or("plain", |policy| policy.word);
        self.test_bed.options.say(format!("{} over {}, {how}", self.workload.key, self.link));
        let running =
            self.test_bed.start(policy.map(|policy| policy.word), self.workload.append, &|_| {
                Ok(Vec::new())
            })?;
        self.workload.measure(&running, policy.is_some(), self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(only: &[&str], plan: &Plan) -> Result<Selection, Error> {
        Selection::new(&only.iter().map(ToString::to_string).collect::<Vec<_>>(), plan)
    }

    #[test]
    fn links_policies_and_workloads_are_selected_independently() {
        let all = selection(&[], &FULL).unwrap();
        assert_eq!(
            (all.links.len(), all.policies.len(), all.workloads.len()),
            (2, 4, workload::ALL.len())
        );
        assert!(all.has_failover);
        let some = selection(&["10gbit", "web", "paper"], &QUICK).unwrap();
        assert_eq!(
            (some.links[0].0, some.policies[0].key, some.workloads[0].key),
            ("10gbit", "paper", "web")
        );
        assert!(!some.has_failover);
        let failover = selection(&["failover"], &QUICK).unwrap();
        assert!(failover.has_failover && failover.workloads.is_empty());
        let wrong = selection(&["web", "100mbit"], &FULL).err().unwrap().to_string();
        assert!(wrong.contains("no part 100mbit") && wrong.contains("1gbit"), "{wrong}");
    }
}
