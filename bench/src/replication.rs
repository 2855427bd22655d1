//! `replication`: the cost of a standby for the guest, from runs with and without a standby.
//!
//! ```text
//!   one round of a workload over a link:   plain  A  B  plain  C  D  plain
//!     A: tracking100, B: transfer100, ...    └──────┬─────┘        the next round: D C B A
//!     slowdown(A) = mean work of the plain runs before and after / work(A)
//!   rounds of a workload:   1 over 1 Gbit/s   1 over 10 Gbit/s   2 over 1 Gbit/s   ...
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
mod method;
mod rows;
mod test_bed;
mod workload;

use crate::guest_files::SmallGuest;
use crate::interrupt::Interrupt;
use crate::{Error, Options, Report};
use keyframe_test_hosts::{Network, Rate};
use method::Method;
use rows::Rows;
use test_bed::TestBed;
use workload::{RunResult, Workload};

/// The number of runs with a method between two plain runs.
const BETWEEN: usize = 2;
const FAILOVER: &str = "failover";
/// The reason why QEMU's own replication is not measured.
const COLO: &str = "not run: QEMU 7.2 has it (x-colo), but under TCG a primary without disk and network hung at its \
                    first checkpoint, and its monitor did not answer";

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
    /// The methods, if `--only` names none.
    methods: &'static [&'static str],
}

const FULL: Plan = Plan {
    seconds: 10,
    rounds: 5,
    failovers: 20,
    links: &["1gbit", "10gbit"],
    methods: &["tracking100", "transfer100", "fixed50", "fixed100", "paper", "adaptive"],
};
const QUICK: Plan = Plan {
    seconds: 5,
    rounds: 1,
    failovers: 3,
    links: &["1gbit"],
    methods: &["tracking100", "transfer100", "fixed100", "paper", "adaptive"],
};

/// The selected links, methods and workloads. If `--only` names none of a group, the group's default
/// is selected.
struct Selection {
    links: Vec<(&'static str, Rate)>,
    methods: Vec<&'static Method>,
    workloads: Vec<&'static Workload>,
    has_failover: bool,
}

impl Selection {
    fn new(only: &[String], plan: &Plan) -> Result<Self, Error> {
        let keys = |of: &[&'static str]| of.to_vec();
        let links = keys(&LINKS.map(|(key, _)| key));
        let methods = keys(&method::ALL.each_ref().map(|method| method.key));
        let workloads = keys(
            &[&workload::ALL.each_ref().map(|workload| workload.key)[..], &[FAILOVER]].concat(),
        );
        let all = [&workloads[..], &links, &methods].concat();
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
        let methods = select(&methods, plan.methods);
        let workloads = select(&workloads, &workloads);
        Ok(Self {
            links: LINKS.into_iter().filter(|(key, _)| links.contains(key)).collect(),
            methods: method::ALL.iter().filter(|method| methods.contains(&method.key)).collect(),
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
    for workload in &selection.workloads {
        options
            .say(format!("{}: {} (the paper's {})", workload.key, workload.about, workload.figure));
        let mut benches = Vec::new();
        for (link, rate) in &selection.links {
            let test_bed =
                TestBed::new(options, &interrupt, &files, network(*rate)?, &dir.path().join(link))?;
            benches.push(Bench { test_bed, workload, link, methods: &selection.methods, seconds });
        }
        for round in 0..rounds {
            for bench in &mut benches {
                if let Err(e) = bench.round(round, &mut rows) {
                    interrupt.check()?;
                    let part =
                        format!("round {} of {} over {}", round + 1, workload.key, bench.link);
                    options.left_out(&part, &e);
                }
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
    methods: &'a [&'static Method],
    seconds: u16,
}

impl Bench<'_> {
    /// Runs each method once, between plain runs: in the given order, or in the reverse order in
    /// every second round.
    fn round(&mut self, round: u16, rows: &mut Rows) -> Result<(), Error> {
        let mut order = self.methods.to_vec();
        if round % 2 == 1 {
            order.reverse();
        }
        let mut before = self.once(None)?;
        rows.plain(self.workload, self.link, &before);
        for part in order.chunks(BETWEEN) {
            let mut done = Vec::new();
            for method in part {
                match self.once(Some(method)) {
                    Ok(one) => done.push((*method, one)),
                    Err(e) => {
                        self.test_bed.interrupt.check()?;
                        let what =
                            format!("{} over {}, {}", self.workload.key, self.link, method.key);
                        self.test_bed.options.left_out(&what, &e);
                    }
                }
            }
            let after = self.once(None)?;
            rows.plain(self.workload, self.link, &after);
            for (method, done) in done {
                rows.add(self.workload, self.link, method, &done, [&before, &after]);
            }
            before = after;
        }
        Ok(())
    }

    /// Runs the workload once, with a method or plain.
    fn once(&mut self, method: Option<&Method>) -> Result<RunResult, Error> {
        let how = method.map_or("plain", |method| method.key);
        self.test_bed.options.say(format!("{} over {}, {how}", self.workload.key, self.link));
        let setup = method.map(|method| method.setup);
        let running = self.test_bed.start(setup, self.workload.append, &|_| Ok(Vec::new()))?;
        self.workload.measure(&running, self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(only: &[&str], plan: &Plan) -> Result<Selection, Error> {
        Selection::new(&only.iter().map(ToString::to_string).collect::<Vec<_>>(), plan)
    }

    #[test]
    fn links_methods_and_workloads_are_selected_independently() {
        let all = selection(&[], &FULL).unwrap();
        assert_eq!(
            (all.links.len(), all.methods.len(), all.workloads.len()),
            (2, 6, workload::ALL.len())
        );
        assert!(all.has_failover);
        let some = selection(&["10gbit", "web", "fixed25", "tracking25"], &QUICK).unwrap();
        let keys: Vec<_> = some.methods.iter().map(|method| method.key).collect();
        assert_eq!(keys, ["tracking25", "fixed25"]);
        assert_eq!((some.links[0].0, some.workloads[0].key), ("10gbit", "web"));
        assert!(!some.has_failover);
        let failover = selection(&["failover"], &QUICK).unwrap();
        assert!(failover.has_failover && failover.workloads.is_empty());
        let wrong = selection(&["web", "100mbit"], &FULL).err().unwrap().to_string();
        assert!(wrong.contains("no part 100mbit") && wrong.contains("1gbit"), "{wrong}");
    }
}
