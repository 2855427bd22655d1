//! Compares the policies in the model: a regression test of the rules, not a measurement.

use super::model::{
    self, COMPILE, COORDINATOR, EP, Host, MS, Outcome, SP, WATCHED, WEB, WEB_BUSY, WEB_CALM,
    Workload,
};
use super::{
    AdaptiveParameters, AdaptivePolicy, FixedInterval, LatencyTarget, OverheadTarget, PaperPolicy,
    ReplicationScheduler,
};

const COMPUTING: [&Workload; 3] = [&COMPILE, &EP, &SP];
const ANSWERING: [&Workload; 5] = [&WEB_CALM, &WEB, &WEB_BUSY, &COORDINATOR, &WATCHED];

fn hosts() -> [Host; 4] {
    let short = |host: Host| Host { pause_ns: MS / 2, ..host };
    let (gigabit, ten) = (Host::gigabits(1.0), Host::gigabits(10.0));
    [gigabit, ten, short(gigabit), short(ten)]
}

fn run(policy: &mut dyn ReplicationScheduler, load: &Workload, host: Host) -> Outcome {
    model::run(policy, load, host, 20_000 * MS, 7)
}

/// The outcomes of the adaptive and the paper's policy on the same load, three times.
fn both(load: &Workload, host: Host) -> impl Iterator<Item = (Outcome, Outcome)> {
    [7, 8, 9].into_iter().map(move |seed| {
        let adaptive = model::run(&mut AdaptivePolicy::default(), load, host, 20_000 * MS, seed);
        (adaptive, model::run(&mut PaperPolicy::default(), load, host, 20_000 * MS, seed))
    })
}

fn fixed(load: &Workload, host: Host) -> Outcome {
    run(&mut FixedInterval::every(100 * MS), load, host)
}

fn paper(load: &Workload, host: Host) -> Outcome {
    run(&mut PaperPolicy::default(), load, host)
}

fn adaptive(load: &Workload, host: Host) -> Outcome {
    run(&mut AdaptivePolicy::default(), load, host)
}

fn at_latency(ms: u64) -> AdaptivePolicy {
    AdaptivePolicy::new(AdaptiveParameters {
        latency: Some(LatencyTarget { ns: ms * MS }),
        ..AdaptiveParameters::default()
    })
}

fn at_overhead(percent: f64) -> AdaptivePolicy {
    AdaptivePolicy::new(AdaptiveParameters {
        overhead: Some(OverheadTarget { percent }),
        ..AdaptiveParameters::default()
    })
}

/// Names the case in a failed assertion.
fn at(load: &Workload, host: Host) -> String {
    format!("{} over {} bytes/ns, pause {} ns", load.name, host.bytes_per_ns, host.pause_ns)
}

#[test]
fn the_model_agrees_with_calculations_by_hand() {
    let host = Host { first_write_ns: 0.0, ..Host::gigabits(10.0) };
    let computed = fixed(&EP, host);
    assert!(
        (computed.slowdown - 2.0 / 98.0).abs() < 0.002,
        "2 ms of each 100: {}",
        computed.slowdown
    );
    // An answer waits for half an interval, the pause, and the transfer; serving it took 3 ms.
    let answered = fixed(&WEB_CALM, host);
    assert!((answered.mean_ns() / 1e6 - (50.0 + 2.0 + 3.0)).abs() < 4.0, "{}", answered.mean_ns());
    // 60,000 pages of 2 KiB over 125 MB/s: the transfer alone takes most of a second.
    assert!((900e6..1100e6).contains(&fixed(&SP, Host::gigabits(1.0)).epoch_ns));
    let again = fixed(&WEB_CALM, host);
    assert_eq!(answered.latencies_ns, again.latencies_ns, "one seed is one run");
}

#[test]
fn the_adaptive_policy_costs_no_more_than_the_papers() {
    for host in hosts() {
        for load in COMPUTING.into_iter().chain(ANSWERING) {
            for (adaptive, paper) in both(load, host) {
                let most = paper.slowdown + 0.02;
                assert!(
                    adaptive.slowdown <= most,
                    "{}: {} > {most}",
                    at(load, host),
                    adaptive.slowdown
                );
            }
        }
    }
}

#[test]
fn the_adaptive_policy_answers_no_later_than_the_papers() {
    let p99_ns = |outcome: &Outcome| Outcome::percentile_ns(&outcome.latencies_ns, 99) as f64;
    for host in hosts() {
        for load in ANSWERING {
            for (adaptive, paper) in both(load, host) {
                let at = at(load, host);
                // If transfers are shorter than pauses, both policies do the same.
                let most_ns = paper.mean_ns() * 1.01;
                assert!(adaptive.mean_ns() <= most_ns, "{at}: {} > {most_ns}", adaptive.mean_ns());
                assert!(
                    p99_ns(&adaptive) <= p99_ns(&paper) * 1.1,
                    "{at}: {} > {}",
                    p99_ns(&adaptive),
                    p99_ns(&paper)
                );
                assert!(
                    adaptive.good >= paper.good - 0.01,
                    "{at}: {} < {}",
                    adaptive.good,
                    paper.good
                );
                let (adaptive, paper) = (adaptive.tolerable, paper.tolerable);
                assert!(adaptive >= paper - 0.01, "{at}: {adaptive} < {paper}");
            }
        }
    }
}

#[test]
fn the_adaptive_policy_answers_at_least_twice_as_fast_as_a_fixed_interval() {
    for host in hosts() {
        for load in ANSWERING {
            let (adaptive, fixed) = (adaptive(load, host), fixed(load, host));
            assert!(
                2.0 * adaptive.mean_ns() <= fixed.mean_ns(),
                "{}: {}",
                at(load, host),
                adaptive.mean_ns()
            );
        }
    }
}

/// Section VI of the paper: figures 7 (compile), 8a (ep: nearly no difference), 8b (sp), 9 (web)
/// and 10 (coordinator, compared with 50 ms there).
#[test]
fn the_papers_policy_beats_a_fixed_interval_in_the_papers_cases() {
    for host in [Host::gigabits(1.0), Host::gigabits(10.0)] {
        for load in COMPUTING {
            let (paper, fixed) = (paper(load, host), fixed(load, host));
            assert!(paper.slowdown <= fixed.slowdown, "{}: {}", at(load, host), paper.slowdown);
        }
        for load in [&WEB, &COORDINATOR] {
            let (paper, fixed) = (paper(load, host), fixed(load, host));
            assert!(
                paper.mean_ns() < fixed.mean_ns() && paper.good > fixed.good,
                "{}",
                at(load, host)
            );
        }
        let fixed = run(&mut FixedInterval::every(50 * MS), &COORDINATOR, host);
        assert!(paper(&COORDINATOR, host).slowdown < fixed.slowdown);
    }
}

#[test]
fn a_latency_target_is_kept_and_a_looser_one_is_cheaper() {
    for host in hosts() {
        for load in [&WEB_CALM, &WEB, &COORDINATOR] {
            let [tight, loose] = [20, 50].map(|ms| run(&mut at_latency(ms), load, host));
            for (outcome, target_ms) in [(&tight, 20), (&loose, 50)] {
                let p90_ns = Outcome::percentile_ns(&outcome.held_ns, 90);
                assert!(
                    p90_ns <= target_ms * MS * 11 / 10,
                    "{}: {p90_ns} for {target_ms} ms",
                    at(load, host)
                );
            }
            assert!(loose.epoch_ns > 1.5 * tight.epoch_ns, "{}", at(load, host));
        }
    }
}

#[test]
fn an_overhead_target_is_kept() {
    for host in hosts() {
        for load in [&WEB_CALM, &WEB, &WEB_BUSY] {
            for percent in [5.0, 15.0] {
                let outcome = run(&mut at_overhead(percent), load, host);
                // The model's slowdown is relative to the running time, and includes all first
                // writes.
                let part = outcome.slowdown / (1.0 + outcome.slowdown);
                assert!(
                    part <= percent / 100.0 * 1.2 + 0.005,
                    "{}: {part} for {percent} %",
                    at(load, host)
                );
            }
        }
    }
}

/// `cargo test -p keyframe-scheduling model_table -- --ignored --nocapture`
#[test]
#[ignore = "prints the model's table, for docs/design/replication-scheduling.md"]
fn model_table() {
    println!("A MODEL, nothing was measured");
    for host in hosts() {
        println!("\n{} Gbit/s, pause {} ms", host.bytes_per_ns * 8.0, host.pause_ns as f64 / 1e6);
        for load in COMPUTING.into_iter().chain(ANSWERING) {
            let mut policies: [Box<dyn ReplicationScheduler>; 5] = [
                Box::new(FixedInterval::every(100 * MS)),
                Box::new(PaperPolicy::default()),
                Box::new(AdaptivePolicy::default()),
                Box::new(at_latency(20)),
                Box::new(at_overhead(10.0)),
            ];
            for policy in &mut policies {
                let outcome = run(policy.as_mut(), load, host);
                let ms = |of: &[u64], percent| Outcome::percentile_ns(of, percent) as f64 / 1e6;
                println!(
                    "{:<12} {:<24} slower {:>5.1}%  epoch {:>6.1} ms  suspended {:>4.1}%  answers {:>6.1} ms, p50 {:>6.1}, \
                     p99 {:>6.1}  held p50 {:>5.1}, p99 {:>5.1}  good {:>3.0}%, tolerable {:>3.0}%  {:?}",
                    load.name,
                    policy.name(),
                    outcome.slowdown * 100.0,
                    outcome.epoch_ns / 1e6,
                    outcome.suspended_ns as f64 / (20_000 * MS) as f64 * 100.0,
                    outcome.mean_ns() / 1e6,
                    ms(&outcome.latencies_ns, 50),
                    ms(&outcome.latencies_ns, 99),
                    ms(&outcome.held_ns, 50),
                    ms(&outcome.held_ns, 99),
                    outcome.good * 100.0,
                    outcome.tolerable * 100.0,
                    outcome.reasons
                );
            }
        }
    }
}
