//! What a standby costs the guest: its work and its answers with and without, in runs that follow
//! each other.
//!
//! ```text
//!   one round of a workload over a link:   plain  A  B  plain  C  D  plain      A: fixed:50ms, B: fixed:100ms, ...; the next round: D C B A
//!                                            └──────┬─────┘
//!                      slowdown(A) = mean work of the plain runs before and after / work(A)
//!   a failover:   boot, protect, ask ─▶ the primary's host loses power ─▶ the next answer
//! ```
//!
//! Each run is a fresh boot on hosts of its own (`hosts`), the plain one with the same QEMU line in
//! the same place. Both hosts, and the clients', are this one machine: what the standby computes,
//! which elsewhere is another machine's, is in the slowdown.
//!
//! Left out: what replication is right about; the end-to-end tests' clients find that out.

mod chart;
mod clients;
mod failover;
mod pair;
mod rows;
mod workload;

use crate::guest::Guest as Files;
use crate::interrupt::Interrupt;
use crate::{Error, Options, Report};
use keyframe_test_hosts::{Network, Rate};
use pair::Lab;
use rows::Rows;
use workload::{Done, Kind};

/// Protected runs between two plain ones.
const BETWEEN: usize = 2;
const FAILOVER: &str = "failover";
/// Why QEMU's own replication is not beside it.
const COLO: &str = "not run: QEMU 7.2 has it (x-colo), but under TCG a primary with neither disk nor network stood still from its first \
                    checkpoint on, and its monitor answered no more";

/// When epochs are taken.
#[derive(Debug)]
pub struct Policy {
    /// As in keys.
    key: &'static str,
    /// As `--policy` takes it.
    word: &'static str,
}

const POLICIES: [Policy; 4] = [
    Policy { key: "fixed50", word: "fixed:50ms" },
    Policy { key: "fixed100", word: "fixed:100ms" },
    Policy { key: "paper", word: "paper" },
    Policy { key: "adaptive", word: "adaptive" },
];
/// Links, as keys have them.
const LINKS: [(&str, Rate); 2] = [("1gbit", Rate::GIGABIT), ("10gbit", Rate::TEN_GIGABIT)];

/// How long and how often.
struct Plan {
    /// What is counted of a run.
    seconds: u16,
    rounds: u16,
    failovers: u16,
    /// Where none are chosen.
    links: &'static [&'static str],
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

/// What of it is wanted: of links, of policies and of what is measured those that are named, where
/// any are.
struct Chosen {
    links: Vec<(&'static str, Rate)>,
    policies: Vec<&'static Policy>,
    kinds: Vec<&'static Kind>,
    has_failover: bool,
}

impl Chosen {
    fn of(only: &[String], plan: &Plan) -> Result<Self, Error> {
        let keys = |of: &[&'static str]| of.to_vec();
        let links = keys(&LINKS.map(|(key, _)| key));
        let policies = keys(&POLICIES.each_ref().map(|policy| policy.key));
        let kinds =
            keys(&[&workload::ALL.each_ref().map(|kind| kind.key)[..], &[FAILOVER]].concat());
        let all = [&kinds[..], &links, &policies].concat();
        if let Some(part) = only.iter().find(|part| !all.contains(&part.as_str())) {
            let parts = all.join(", ");
            return Err(Error::NoPart { benchmark: "replication", part: part.clone(), parts });
        }
        let wanted = |group: &[&'static str], otherwise: &[&'static str]| -> Vec<&'static str> {
            let named: Vec<_> =
                group.iter().copied().filter(|key| only.iter().any(|part| part == key)).collect();
            if named.is_empty() { otherwise.to_vec() } else { named }
        };
        let links = wanted(&links, plan.links);
        let policies = wanted(&policies, plan.policies);
        let kinds = wanted(&kinds, &kinds);
        Ok(Self {
            links: LINKS.into_iter().filter(|(key, _)| links.contains(key)).collect(),
            policies: POLICIES.iter().filter(|policy| policies.contains(&policy.key)).collect(),
            kinds: workload::ALL.iter().filter(|kind| kinds.contains(&kind.key)).collect(),
            has_failover: kinds.contains(&FAILOVER),
        })
    }
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let plan = if options.quick { &QUICK } else { &FULL };
    let chosen = Chosen::of(&options.only, plan)?;
    let interrupt = Interrupt::listen()?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let files = Files::find(options)?.absolute()?;
    let seconds = options.seconds.unwrap_or(plan.seconds);
    let rounds = options.rounds.unwrap_or(plan.rounds);
    options.say(format!("{rounds} round(s), {seconds} s of each run are counted"));
    let mut rows = Rows::new(seconds);
    let network =
        |rate| Network::new(rate).map_err(Error::io("make hosts of network namespaces (as root)"));
    for (link, rate) in &chosen.links {
        for kind in &chosen.kinds {
            options.say(format!(
                "{} over {link}: {} (the paper's {})",
                kind.key, kind.about, kind.figure
            ));
            let lab = Lab::new(options, &interrupt, &files, network(*rate)?, dir.path())?;
            let mut bench = Bench { lab, kind, link, policies: &chosen.policies, seconds };
            if let Err(e) = bench.compare(rounds, &mut rows) {
                interrupt.check()?;
                options.left_out(&format!("{} over {link}", kind.key), &e);
            }
        }
    }
    if chosen.has_failover {
        let mut lab = Lab::new(options, &interrupt, &files, network(Rate::GIGABIT)?, dir.path())?;
        let times = options.rounds.filter(|_| chosen.kinds.is_empty()).unwrap_or(plan.failovers);
        for n in 1..=times {
            options.say(format!("failover {n} of {times}"));
            match failover::once(&mut lab) {
                Ok(took) => rows.failovers_ns.push(took.as_nanos() as f64),
                Err(e) => {
                    interrupt.check()?;
                    options.left_out(&format!("failover {n}"), &e);
                }
            }
        }
    }
    if rows.is_empty() {
        return Err(Error::failed("measure what replication costs", "no run could be measured"));
    }
    let mut report = Report::new("replication");
    rows.report(&mut report);
    if !chosen.kinds.is_empty() {
        report.notes.insert("colo".into(), COLO.into());
    }
    report.plot = chart::figure(&rows);
    Ok(report)
}

/// One workload over one link.
struct Bench<'a> {
    lab: Lab<'a>,
    kind: &'static Kind,
    link: &'static str,
    policies: &'a [&'static Policy],
    seconds: u16,
}

impl Bench<'_> {
    fn compare(&mut self, rounds: u16, rows: &mut Rows) -> Result<(), Error> {
        // The plain run behind one round is the one before the next.
        let mut before = self.once(None)?;
        rows.plain(self.kind, self.link, &before);
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
                            self.lab.interrupt.check()?;
                            let what = format!(
                                "{} over {} with {}",
                                self.kind.key, self.link, policy.word
                            );
                            self.lab.options.left_out(&what, &e);
                        }
                    }
                }
                let after = self.once(None)?;
                rows.plain(self.kind, self.link, &after);
                for (policy, done) in done {
                    rows.protected(self.kind, self.link, policy, &done, [&before, &after]);
                }
                before = after;
            }
        }
        Ok(())
    }

    /// One run, under a policy or plain.
    fn once(&mut self, policy: Option<&Policy>) -> Result<Done, Error> {
        let how = policy.map_or("plain", |policy| policy.word);
        self.lab.options.say(format!("{} over {}, {how}", self.kind.key, self.link));
        let running =
            self.lab
                .start(policy.map(|policy| policy.word), self.kind.append, &|_| Ok(Vec::new()))?;
        self.kind.measure(&running, policy.is_some(), self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(only: &[&str], plan: &Plan) -> Result<Chosen, Error> {
        Chosen::of(&only.iter().map(ToString::to_string).collect::<Vec<_>>(), plan)
    }

    #[test]
    fn links_policies_and_workloads_are_chosen_apart() {
        let all = chosen(&[], &FULL).unwrap();
        assert_eq!(
            (all.links.len(), all.policies.len(), all.kinds.len()),
            (2, 4, workload::ALL.len())
        );
        assert!(all.has_failover);
        let some = chosen(&["10gbit", "web", "paper"], &QUICK).unwrap();
        assert_eq!(
            (some.links[0].0, some.policies[0].key, some.kinds[0].key),
            ("10gbit", "paper", "web")
        );
        assert!(!some.has_failover);
        let failover = chosen(&["failover"], &QUICK).unwrap();
        assert!(failover.has_failover && failover.kinds.is_empty());
        let wrong = chosen(&["web", "100mbit"], &FULL).err().unwrap().to_string();
        assert!(wrong.contains("no part 100mbit") && wrong.contains("1gbit"), "{wrong}");
    }
}
