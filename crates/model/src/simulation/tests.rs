use super::*;
use crate::{Constants, Formula};
use proptest::prelude::*;

/// The tolerance for rounding.
const CLOSE: f64 = 1e-9;

fn near(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() <= CLOSE * expected.abs().max(1.0),
        "{found}, expected {expected}"
    );
}

fn interval(ready_s: f64, work_s: f64) -> SimulatedInterval {
    SimulatedInterval { ready_s, work_s, image_bytes: 0.0, new_bytes: 0.0 }
}

/// Makes intervals that are ready at time 0, with the same sizes.
fn sized(work_s: &[f64], image_bytes: f64, new_bytes: f64) -> Vec<SimulatedInterval> {
    work_s
        .iter()
        .map(|work_s| SimulatedInterval { ready_s: 0.0, work_s: *work_s, image_bytes, new_bytes })
        .collect()
}

/// Limits the network to 1 byte a second.
fn slow(cluster: Cluster) -> Cluster {
    Cluster { network: ClusterNetwork { bits_per_s: Some(8.0), latency_s: 0.0 }, ..cluster }
}

fn ends(outcome: &SimulationOutcome) -> Vec<f64> {
    outcome.intervals.iter().map(|ran| ran.end_s).collect()
}

fn nodes(outcome: &SimulationOutcome) -> Vec<usize> {
    outcome.intervals.iter().map(|ran| ran.node).collect()
}

/// Sections 2.4.2 and 6.3.4 of the paper, and figure 3.4.
#[test]
fn the_regular_case_is_that_of_the_formulas() {
    let paper =
        Constants { t_vm: 3600.0, s_sim: 100.0, s_log: 1.08, t_c: 0.1, t_i: 1.0, s_cp: None };
    let measured =
        Constants { t_vm: 600.0, s_sim: 31.0, s_log: 1.0, t_c: 0.0, t_i: 3.7, s_cp: Some(1.024) };
    let figure = Constants { s_sim: 41.25, s_cp: Some(1.2), ..paper };
    let mut seen = Vec::new();
    for (constants, count, length) in [
        (paper, 90, 2.049),
        (paper, 90, 4.0),
        (paper, 200, 2.0),
        (paper, 4, 8.0),
        (paper, 32, 2.0),
        (measured, 1, 2.0),
        (measured, 4, 0.5),
        (measured, 4, 2.0),
        (measured, 4, 7.5),
        (figure, 1, 56.9),
        (figure, 32, 1.78),
    ] {
        let formula = constants.formula(count, length);
        let expected = constants.run_time(formula, count, length);
        let found =
            simulate(&equal_intervals(&constants, length), &Cluster::of(count as usize)).unwrap();
        let off = (found.makespan_s / expected - 1.0).abs();
        assert!(
            off < 0.01,
            "{count} nodes, {length} s: {} s, and {expected} s by {formula:?}",
            found.makespan_s
        );
        let sequential_s = constants.s_sim * constants.t_vm;
        near(
            found.efficiency(sequential_s, count as usize),
            sequential_s / found.makespan_s / count as f64,
        );
        seen.push(formula);
    }
    assert!(seen.contains(&Formula::Enough) && seen.contains(&Formula::Limited));
}

/// The formula fills the last round with a part of an interval, which a cluster cannot do.
#[test]
fn a_part_of_an_interval_is_added_if_the_nodes_do_not_divide_the_intervals() {
    let measured =
        Constants { t_vm: 600.0, s_sim: 31.0, s_log: 1.0, t_c: 0.0, t_i: 3.7, s_cp: Some(1.024) };
    let found = simulate(&equal_intervals(&measured, 8.0), &Cluster::of(4)).unwrap().makespan_s;
    // 75 intervals: 19 rounds in place of 18.75.
    near(
        found,
        measured.run_time(Formula::Limited, 4, 8.0) - 1.024 * 8.0 + 0.25 * (3.7 + 31.0 * 8.0),
    );
}

#[test]
fn unequal_intervals_wait_for_each_other() {
    // Ready at 1, 2, 3; node 0 has the first until 11, node 1 the second until 4 and the third
    // until 5.
    let intervals = [interval(1.0, 10.0), interval(2.0, 2.0), interval(3.0, 1.0)];
    let outcome = simulate(&intervals, &Cluster::of(2)).unwrap();
    assert_eq!((ends(&outcome), nodes(&outcome)), (vec![11.0, 4.0, 5.0], vec![0, 1, 1]));
    near(outcome.nodes[0].idle_s, 1.0);
    near(outcome.nodes[1].busy_s, 3.0);
    near(outcome.nodes[1].idle_s, 8.0);
    near(outcome.speed_up(13.0), 13.0 / 11.0);
}

#[test]
fn longest_first_is_better_if_the_longest_interval_is_last() {
    let intervals = sized(&[1.0, 1.0, 1.0, 3.0], 0.0, 0.0);
    let of =
        |policy| simulate(&intervals, &Cluster { policy, ..Cluster::of(2) }).unwrap().makespan_s;
    near(of(AssignmentPolicy::InOrder), 4.0);
    near(of(AssignmentPolicy::LongestFirst), 3.0);
}

#[test]
fn nodes_start_when_they_are_demanded_and_fast_ones_come_first() {
    let mut cluster = Cluster::of(2);
    cluster.nodes[0].start_s = 2.0;
    cluster.nodes[1] = ClusterNode { slots: 2, start_s: 2.0, speed: 2.0 };
    let intervals = [interval(5.0, 4.0), interval(5.0, 4.0), interval(5.0, 4.0)];
    let outcome = simulate(&intervals, &cluster).unwrap();
    assert_eq!((ends(&outcome), nodes(&outcome)), (vec![9.0, 9.0, 11.0], vec![1, 1, 0]));
    // Of two slots.
    near(outcome.nodes[1].start_s, 4.0);
    near(outcome.nodes[1].idle_s, 2.0 * 5.0 + 2.0 * 2.0);
}

#[test]
fn deferred_intervals_begin_when_all_are_ready() {
    let intervals = [interval(1.0, 1.0), interval(9.0, 1.0)];
    let cluster = Cluster { dispatch: Dispatch::Deferred, ..Cluster::of(2) };
    let outcome = simulate(&intervals, &cluster).unwrap();
    assert_eq!(ends(&outcome), [10.0, 10.0]);
}

#[test]
fn transfers_share_the_servers_link() {
    // Two at half a byte a second: each of 4 bytes is there at 8; then each node alone lacks 1 byte
    // of the next.
    let mut intervals = sized(&[1.0, 3.0, 1.0, 1.0], 4.0, 1.0);
    let outcome = simulate(&intervals, &slow(Cluster::of(2))).unwrap();
    // Node 0: 0 until 9; interval 2 lacks the new bytes of 1 and 2: until 11, done at 12. Node 1: 1
    // until 11; 3 lacks 2 bytes: until 13, done at 14.
    assert_eq!((ends(&outcome), nodes(&outcome)), (vec![9.0, 11.0, 12.0, 14.0], vec![0, 1, 0, 1]));
    near(outcome.sent_bytes, 4.0 + 4.0 + 2.0 + 2.0);
    // One of 2 bytes and one of 4: both have half until 4, the rest of 2 alone until 6.
    intervals.truncate(2);
    intervals[0].image_bytes = 2.0;
    let outcome = simulate(&intervals, &slow(Cluster::of(2))).unwrap();
    assert_eq!(outcome.intervals.iter().map(|ran| ran.there_s).collect::<Vec<_>>(), [4.0, 6.0]);
}

#[test]
fn latency_comes_before_each_transfer() {
    let mut cluster = slow(Cluster::of(1));
    cluster.network.latency_s = 0.5;
    let outcome = simulate(&sized(&[1.0, 1.0], 4.0, 1.0), &cluster).unwrap();
    assert_eq!(ends(&outcome), [5.5, 8.0]);
}

#[test]
fn held_bytes_are_sent_again_only_if_whole_images_are_sent() {
    let intervals = sized(&[1.0, 1.0, 1.0], 10.0, 4.0);
    let missing = simulate(&intervals, &Cluster::of(1)).unwrap();
    assert_eq!(
        missing.intervals.iter().map(|ran| ran.sent_bytes).collect::<Vec<_>>(),
        [10.0, 4.0, 4.0]
    );
    let whole =
        simulate(&intervals, &Cluster { transfer: Transfer::Whole, ..Cluster::of(1) }).unwrap();
    near(whole.sent_bytes, 30.0);
}

#[test]
fn near_keeps_neighbours_together() {
    let intervals = sized(&[1.0; 8], 100.0, 10.0);
    let of = |policy| {
        let cluster = Cluster { policy, dispatch: Dispatch::Deferred, ..Cluster::of(2) };
        simulate(&intervals, &cluster).unwrap()
    };
    let (near_by, in_order) = (of(AssignmentPolicy::Near), of(AssignmentPolicy::InOrder));
    // One begins at the front, the other in the middle.
    assert_eq!(nodes(&near_by), [0, 0, 0, 0, 1, 1, 1, 1]);
    near(near_by.sent_bytes, 2.0 * 100.0 + 6.0 * 10.0);
    near(in_order.sent_bytes, 2.0 * 100.0 + 6.0 * 20.0);
    near(near_by.makespan_s, in_order.makespan_s);
}

#[test]
fn intervals_of_a_failed_node_are_simulated_elsewhere() {
    let fails = |back_s| Failures::Listed(vec![NodeFailure { node: 0, at_s: 3.0, back_s }]);
    // Node 0 is lost in the middle of the first; node 1 has it from 4 on.
    let intervals = sized(&[5.0, 4.0], 0.0, 0.0);
    let outcome =
        simulate(&intervals, &Cluster { failures: fails(None), ..Cluster::of(2) }).unwrap();
    assert_eq!((ends(&outcome), nodes(&outcome)), (vec![9.0, 4.0], vec![1, 1]));
    assert_eq!(
        (outcome.intervals[0].tries, outcome.intervals[1].tries, outcome.failures()),
        (2, 1, 1)
    );
    let NodeUsage { busy_s, lost_s, down_s, intervals: done, .. } = outcome.nodes[0];
    assert_eq!((busy_s, lost_s, down_s, done), (3.0, 3.0, 6.0, 0));
    // Alone it comes back at 4, starts until 5, and begins anew with nothing.
    let mut cluster = slow(Cluster { failures: fails(Some(4.0)), ..Cluster::of(1) });
    cluster.nodes[0].start_s = 1.0;
    let outcome = simulate(&sized(&[0.5, 4.0], 1.0, 0.5), &cluster).unwrap();
    // Interval 0: 1 to 2.5. Interval 1 lacks half a byte, is there at 3 and lost then; from 5 on
    // all of its byte is sent.
    assert_eq!(ends(&outcome), [2.5, 10.0]);
    near(outcome.nodes[0].start_s, 2.0);
    near(outcome.nodes[0].down_s, 1.0);
    near(outcome.sent_bytes, 1.0 + 0.5 + 1.0);
}

#[test]
fn a_simulation_that_cannot_end_is_an_error() {
    let intervals = sized(&[5.0, 5.0], 0.0, 0.0);
    let lost = |node| NodeFailure { node, at_s: 6.0, back_s: None };
    let failures = Failures::Listed(vec![lost(0), lost(1)]);
    let outcome = simulate(&sized(&[5.0; 3], 0.0, 0.0), &Cluster { failures, ..Cluster::of(2) });
    assert_eq!(outcome, Err(SimulationError::Lost { at_s: 6.0, done: 2, intervals: 3 }));
    let failures = Failures::Random { mtbf_s: 1e-3, repair_s: Some(0.0), seed: 1 };
    let outcome = simulate(&intervals, &Cluster { failures, ..Cluster::of(2) });
    assert!(matches!(outcome, Err(SimulationError::Hopeless { done: 0, .. })), "{outcome:?}");
}

#[test]
fn input_out_of_bounds_is_refused() {
    let good = [interval(0.0, 1.0)];
    let refused = |intervals: &[SimulatedInterval], cluster: Cluster, word: &str| {
        let text = simulate(intervals, &cluster).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    };
    refused(&[], Cluster::of(1), "no interval");
    refused(&good, Cluster::of(0), "no node");
    refused(&[interval(f64::NAN, 1.0)], Cluster::of(1), "ready time of interval 0");
    refused(&[interval(0.0, -1.0)], Cluster::of(1), "0 or more");
    let mut still = Cluster::of(1);
    still.nodes[0].speed = 0.0;
    refused(&good, still, "speed of node 0");
    let nobody = Failures::Listed(vec![NodeFailure { node: 3, at_s: 0.0, back_s: None }]);
    refused(&good, Cluster { failures: nobody, ..Cluster::of(1) }, "node 3");
}

fn intervals() -> impl Strategy<Value = Vec<SimulatedInterval>> {
    let one = (0.0..50.0_f64, 0.0..20.0_f64, 0.0..100.0_f64, 0.0..100.0_f64).prop_map(
        |(ready_s, work_s, image_bytes, new_bytes)| SimulatedInterval {
            ready_s,
            work_s,
            image_bytes,
            new_bytes,
        },
    );
    prop::collection::vec(one, 1..30)
}

fn clusters() -> impl Strategy<Value = Cluster> {
    let node = (1_usize..3, 0.0..3.0_f64, 0.5..2.0_f64)
        .prop_map(|(slots, start_s, speed)| ClusterNode { slots, start_s, speed });
    let network = (prop::option::of(50.0..5e3_f64), 0.0..0.5_f64)
        .prop_map(|(bits_per_s, latency_s)| ClusterNetwork { bits_per_s, latency_s });
    let failures = prop_oneof![
        Just(Failures::Listed(Vec::new())),
        (100.0..1e3_f64, 0.0..20.0_f64, any::<u64>()).prop_map(|(mtbf_s, repair_s, seed)| {
            Failures::Random { mtbf_s, repair_s: Some(repair_s), seed }
        }),
    ];
    let transfer = prop_oneof![Just(Transfer::Whole), Just(Transfer::Missing)];
    let policy = prop_oneof![
        Just(AssignmentPolicy::InOrder),
        Just(AssignmentPolicy::LongestFirst),
        Just(AssignmentPolicy::Near)
    ];
    let dispatch = prop_oneof![Just(Dispatch::Immediate), Just(Dispatch::Deferred)];
    (prop::collection::vec(node, 1..6), network, transfer, policy, dispatch, failures).prop_map(
        |(nodes, network, transfer, policy, dispatch, failures)| Cluster {
            nodes,
            network,
            transfer,
            policy,
            dispatch,
            failures,
        },
    )
}

proptest! {
    #[test]
    fn nothing_is_lost_or_done_twice(intervals in intervals(), cluster in clusters()) {
        let outcome = simulate(&intervals, &cluster).unwrap();
        prop_assert_eq!(outcome.intervals.len(), intervals.len());
        prop_assert_eq!(outcome.nodes.iter().map(|node| node.intervals).sum::<usize>(), intervals.len());
        for (ran, interval) in outcome.intervals.iter().zip(&intervals) {
            prop_assert!(ran.begin_s >= interval.ready_s && ran.there_s >= ran.begin_s && ran.tries >= 1);
            let work_s = interval.work_s / cluster.nodes[ran.node].speed;
            prop_assert!((ran.end_s - ran.there_s - work_s).abs() < 1e-6, "{ran:?}");
            // The link alone takes so long for it.
            let least_s = cluster.network.bits_per_s.map_or(0.0, |bits| ran.sent_bytes * 8.0 / bits);
            prop_assert!(ran.there_s - ran.begin_s >= least_s - 1e-6, "{ran:?}");
            prop_assert!(ran.sent_bytes <= interval.image_bytes);
            prop_assert!(ran.end_s <= outcome.makespan_s);
        }
        for (node, used) in cluster.nodes.iter().zip(&outcome.nodes) {
            let all_s = used.busy_s + used.transfer_s + used.start_s + used.down_s + used.idle_s;
            let expected_s = outcome.makespan_s * node.slots as f64;
            prop_assert!((all_s - expected_s).abs() < 1e-6 * expected_s.max(1.0), "{used:?}, {expected_s}");
        }
        // No slot runs two tasks at once.
        for number in 0..cluster.nodes.len() {
            let of_node: Vec<&IntervalRun> = outcome.intervals.iter().filter(|ran| ran.node == number).collect();
            for ran in &of_node {
                let at_once = of_node.iter().filter(|one| one.begin_s <= ran.begin_s && ran.begin_s < one.end_s);
                prop_assert!(at_once.count() <= cluster.nodes[number].slots);
            }
        }
        prop_assert_eq!(simulate(&intervals, &cluster).unwrap(), outcome);
    }

    /// No cluster is faster than its parts allow.
    #[test]
    fn no_run_is_shorter_than_its_parts(intervals in intervals(), cluster in clusters()) {
        let outcome = simulate(&intervals, &cluster).unwrap();
        let fastest = cluster.nodes.iter().map(|node| node.speed).fold(0.0, f64::max);
        for interval in &intervals {
            prop_assert!(outcome.makespan_s >= interval.ready_s + interval.work_s / fastest - 1e-6);
        }
        let power: f64 = cluster.nodes.iter().map(|node| node.speed * node.slots as f64).sum();
        let work_s: f64 = intervals.iter().map(|interval| interval.work_s).sum();
        prop_assert!(outcome.makespan_s >= work_s / power - 1e-6);
        if let Some(bits) = cluster.network.bits_per_s {
            let sent_bytes: f64 = outcome.intervals.iter().map(|ran| ran.sent_bytes).sum();
            prop_assert!(outcome.makespan_s >= sent_bytes * 8.0 / bits - 1e-6);
        }
    }
}
