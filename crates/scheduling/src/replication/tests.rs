//! Tests each rule by a table, and the invariants of every policy on random looks.

use super::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const MB: u64 = 1_000_000;

/// `age_ms` after a checkpoint that began at 10 s.
fn look(age_ms: u64) -> VmObservation {
    VmObservation {
        now_ns: (10_000 + age_ms) * MS,
        since_ns: 10_000 * MS,
        ..VmObservation::default()
    }
}

fn flying(age_ms: u64) -> VmObservation {
    VmObservation { in_flight: true, ..look(age_ms) }
}

fn holding(look: VmObservation, packets_held: u64, waited_ms: u64) -> VmObservation {
    VmObservation { packets_held, oldest_packet_ns: Some(look.now_ns - waited_ms * MS), ..look }
}

fn dirty(look: VmObservation, dirty_pages: u64) -> VmObservation {
    VmObservation { dirty_pages, ..look }
}

/// 2 ms of pause, 2,000 bytes a page, 125 MB/s: 16 us a page.
fn acked(pages: u64) -> AcknowledgedEpoch {
    AcknowledgedEpoch {
        pages,
        wire_bytes: pages * 2000,
        pause_ns: 2 * MS,
        transfer_ns: pages * 16_000,
        epoch_ns: 100 * MS,
    }
}

fn waits(decision: ReplicationDecision) -> bool {
    matches!(decision, ReplicationDecision::Wait { .. })
}

#[test]
fn a_fixed_interval_is_due_when_it_is_over_and_nothing_is_in_flight() {
    let mut fixed = FixedInterval::every(100 * MS);
    assert_eq!(fixed.look(&look(40)), ReplicationDecision::Wait { look_in_ns: 60 * MS });
    assert_eq!(
        fixed.look(&holding(look(99), 5, 90)),
        ReplicationDecision::Wait { look_in_ns: MS },
        "whatever is held"
    );
    assert_eq!(fixed.look(&flying(140)), ReplicationDecision::Wait { look_in_ns: LOOK_NS_MIN });
    assert_eq!(fixed.look(&look(100)), ReplicationDecision::Checkpoint(EpochReason::Due));
    assert_eq!(fixed.name(), "fixed 100ms");
}

/// Figure 6, the loop of waiting: each of its four conditions alone ends it.
#[test]
fn the_papers_wait_ends_for_each_reason_of_figure_6() {
    let paper = PaperPolicy::default;
    assert_eq!(
        paper().look(&look(1)),
        ReplicationDecision::Wait { look_in_ns: 50 * MS },
        "none holds"
    );
    assert_eq!(
        paper().look(&holding(look(1), 1, 0)),
        ReplicationDecision::Checkpoint(EpochReason::Packets)
    );
    let disk = |bytes| VmObservation { disk_bytes_held: bytes, ..look(1) };
    assert!(waits(paper().look(&disk(50 * MB))), "the limit itself is kept");
    assert_eq!(
        paper().look(&disk(50 * MB + 1)),
        ReplicationDecision::Checkpoint(EpochReason::DiskBuffer)
    );
    assert_eq!(
        paper().look(&look(1990)),
        ReplicationDecision::Wait { look_in_ns: 10 * MS },
        "not past the longest wait"
    );
    assert_eq!(
        paper().look(&look(2000)),
        ReplicationDecision::Checkpoint(EpochReason::LongestWait)
    );
    assert_eq!(
        paper().look(&VmObservation { stopped: true, ..look(1) }),
        ReplicationDecision::Checkpoint(EpochReason::Packets),
        "a VM that stands after the acknowledgement stands for packets"
    );
    let ended = |pages: [u64; 3]| {
        let mut paper = paper();
        let looks = [50, 100, 150].into_iter().zip(pages);
        let decided: Vec<_> =
            looks.map(|(age, pages)| paper.look(&dirty(look(age), pages))).collect();
        decided.iter().position(|d| *d == ReplicationDecision::Checkpoint(EpochReason::WorkingSet))
    };
    assert_eq!(ended([1000, 1100, 1300]), None);
    assert_eq!(ended([1000, 1050, 1200]), None, "5 % is not less than 5 %");
    assert_eq!(ended([1000, 1049, 1200]), Some(1));
    assert_eq!(ended([1000, 1200, 1210]), Some(2));
    assert_eq!(ended([0, 0, 0]), Some(1), "a VM that writes nothing has reached its set");
}

#[test]
fn looks_that_events_bring_forward_do_not_make_a_working_set() {
    let mut paper = PaperPolicy::default();
    assert!(waits(paper.look(&dirty(look(50), 1000))));
    assert!(waits(paper.look(&dirty(look(51), 1001))), "1 ms is no distance");
    assert!(waits(paper.look(&dirty(look(100), 2000))));
    let next = VmObservation { since_ns: 10_100 * MS, ..look(150) };
    assert!(waits(paper.look(&dirty(next, 2000))), "a new epoch begins anew");
}

/// Figure 6, the loop until the acknowledgement.
#[test]
fn the_paper_suspends_if_packets_are_held_and_the_threshold_is_passed() {
    let mut paper = PaperPolicy::default();
    let over = holding(dirty(flying(3), 1_000_000), 1, 1);
    assert!(waits(paper.look(&over)), "nothing is known of the link yet");
    paper.acknowledged(&acked(2000));
    // 125 MB/s for the 2 ms of a pause are 250,000 bytes: 125 pages.
    assert_eq!(paper.vm_stop_threshold_pages(), Some(125));
    for (pages, packets, stopped, suspends) in [
        (126, 1, false, true),
        (125, 1, false, false),
        (126, 0, false, false),
        (126, 1, true, false),
        (1_000_000, 0, false, false),
    ] {
        let at = VmObservation { stopped, ..dirty(flying(3), pages) };
        let at = if packets > 0 { holding(at, packets, 1) } else { at };
        let decided = paper.look(&at);
        assert_eq!(decided == ReplicationDecision::Suspend, suspends, "{at:?}: {decided:?}");
        assert!(suspends || waits(decided));
    }
    assert!(waits(paper.look(&flying(5000))), "in flight there is no longest wait");
}

#[test]
fn the_papers_bandwidth_follows_the_link_and_not_its_own_small_epochs() {
    let mut paper = PaperPolicy::default();
    paper.acknowledged(&acked(2000));
    for _ in 0..50 {
        // Two pages, for which a round trip of 0.5 ms is waited.
        paper.acknowledged(&AcknowledgedEpoch { transfer_ns: MS / 2, ..acked(2) });
    }
    assert_eq!(paper.vm_stop_threshold_pages(), Some(125));
    for _ in 0..20 {
        // The link is shared now: half of it is left.
        paper.acknowledged(&AcknowledgedEpoch { transfer_ns: 64 * MS, ..acked(2000) });
    }
    assert_eq!(paper.vm_stop_threshold_pages(), Some(63));
    for _ in 0..30 {
        // Pages compress twice as well.
        paper.acknowledged(&AcknowledgedEpoch {
            wire_bytes: 2_000_000,
            transfer_ns: 16 * MS,
            ..acked(2000)
        });
    }
    assert!((249..=251).contains(&paper.vm_stop_threshold_pages().unwrap()));
    paper.acknowledged(&AcknowledgedEpoch::default());
    assert!(
        paper.describe().iter().all(|(_, value)| value.is_finite()),
        "an empty checkpoint is taken in"
    );
}

/// The adaptive policy after a quiet time, over a known link.
fn knowing(parameters: AdaptiveParameters) -> AdaptivePolicy {
    let mut adaptive = AdaptivePolicy::new(parameters);
    adaptive.acknowledged(&acked(500));
    adaptive.look(&VmObservation {
        now_ns: 5000 * MS,
        since_ns: 5000 * MS,
        ..VmObservation::default()
    });
    adaptive.look(&VmObservation {
        now_ns: 9999 * MS,
        since_ns: 5000 * MS,
        dirty_pages: 500,
        ..VmObservation::default()
    });
    adaptive
}

fn for_latency(ms: u64) -> AdaptiveParameters {
    AdaptiveParameters {
        latency: Some(LatencyTarget { ns: ms * MS }),
        ..AdaptiveParameters::default()
    }
}

#[test]
fn a_single_packet_leaves_after_an_eighth_of_a_pause_or_at_once_if_transfers_are_short() {
    let mut adaptive = knowing(AdaptiveParameters::default());
    assert_eq!(
        adaptive.look(&holding(dirty(look(50), 100), 1, 0)),
        ReplicationDecision::Checkpoint(EpochReason::Packets)
    );
    let mut adaptive = knowing(AdaptiveParameters::default());
    let held = holding(dirty(look(50), 500), 1, 0);
    assert_eq!(adaptive.look(&held), ReplicationDecision::Wait { look_in_ns: 250_000 });
    let later = VmObservation { now_ns: held.now_ns + 250_000, ..held };
    assert_eq!(adaptive.look(&later), ReplicationDecision::Checkpoint(EpochReason::Packets));
    assert_eq!(
        adaptive.look(&holding(dirty(look(60), 500), 9, 10)),
        ReplicationDecision::Checkpoint(EpochReason::Packets),
        "it waited in flight"
    );
}

#[test]
fn a_complete_checkpoint_is_no_debt() {
    let mut adaptive = AdaptivePolicy::default();
    adaptive.look(&look(0));
    adaptive.look(&dirty(look(50), 300));
    adaptive.acknowledged(&acked(4_000_000));
    assert_eq!(
        adaptive.look(&holding(look(60), 1, 5)),
        ReplicationDecision::Checkpoint(EpochReason::Packets)
    );
}

#[test]
fn a_burst_goes_as_one_and_waits_for_half_a_pause_at_most() {
    let mut adaptive = knowing(AdaptiveParameters::default());
    let mut waited_ns = 0;
    for packets in 1.. {
        let at = VmObservation {
            now_ns: look(50).now_ns + waited_ns,
            packets_held: packets,
            ..holding(dirty(look(50), 500), 1, 0)
        };
        match adaptive.look(&at) {
            ReplicationDecision::Wait { .. } => waited_ns += 100_000,
            decided => {
                assert_eq!(
                    (decided, waited_ns),
                    (ReplicationDecision::Checkpoint(EpochReason::Packets), MS)
                );
                break;
            }
        }
    }
}

/// Checkpoints in 10 s of packets without end, each of 2 ms of pause and 0.5 ms of first writes;
/// virtual CPUs are busy for this part of the time.
fn endless(parameters: AdaptiveParameters, busy_percent: Option<u64>) -> u64 {
    let mut adaptive = knowing(parameters);
    let (mut now_ns, mut since_ns, mut count) = (10_000 * MS, 10_000 * MS, 0);
    while now_ns < 20_000 * MS {
        now_ns += MS;
        let oldest_packet_ns = Some(since_ns);
        let busy_ns = busy_percent.map(|percent| now_ns * percent / 100);
        let held = VmObservation {
            now_ns,
            since_ns,
            dirty_pages: 500,
            packets_held: 9,
            oldest_packet_ns,
            ..VmObservation::default()
        };
        if adaptive.look(&VmObservation { busy_ns, ..held })
            == ReplicationDecision::Checkpoint(EpochReason::Packets)
        {
            (since_ns, count) = (now_ns, count + 1);
            adaptive.acknowledged(&acked(500));
        }
    }
    count
}

#[test]
fn checkpoints_that_never_end_are_taken_as_far_apart_as_the_overhead_allows() {
    let twenty = AdaptiveParameters {
        overhead: Some(OverheadTarget { percent: 20.0 }),
        ..AdaptiveParameters::default()
    };
    // 20 % of 10 s are 2 s: 800 checkpoints, and those that the account had saved. A target holds
    // for all of the VM's time, busy or not.
    for busy_percent in [None, Some(10), Some(100), Some(400)] {
        let count = endless(twenty, busy_percent);
        assert!((795..=810).contains(&count), "{count} at {busy_percent:?}");
    }
}

#[test]
fn without_a_target_a_pause_counts_as_far_as_the_vm_would_have_computed() {
    // 33 % of 10 s, and the savings: checkpoints cost 2.5 ms each, 1.5 ms if half of the pause
    // would have been idle, and at least 0.9 ms.
    for (busy_percent, expected) in
        [(None, 1320), (Some(400), 1320), (Some(100), 1320), (Some(50), 2200), (Some(0), 3667)]
    {
        let count = endless(AdaptiveParameters::default(), busy_percent);
        assert!(
            (expected - 20..=expected + 60).contains(&count),
            "{count} at {busy_percent:?}, not {expected}"
        );
    }
}

#[test]
fn with_a_latency_target_the_checkpoint_waits_as_long_as_it_can() {
    let mut adaptive = knowing(for_latency(30));
    // 27 ms are planned. 500 pages take 8 ms of transfer and 2 ms of pause, so 17 ms are left, of
    // which 5 ms have passed.
    let ReplicationDecision::Wait { look_in_ns } =
        adaptive.look(&holding(dirty(look(1000), 500), 1, 5))
    else {
        panic!()
    };
    assert!((11 * MS..=12 * MS + MS / 10).contains(&look_in_ns), "{look_in_ns}");
    assert!(waits(adaptive.look(&holding(dirty(look(1011), 500), 1, 16))));
    assert_eq!(
        adaptive.look(&holding(dirty(look(1013), 500), 1, 18)),
        ReplicationDecision::Checkpoint(EpochReason::Packets)
    );
    let mut adaptive = knowing(for_latency(5));
    assert_eq!(
        adaptive.look(&holding(dirty(look(9), 500), 1, 0)),
        ReplicationDecision::Checkpoint(EpochReason::Packets),
        "too late anyhow"
    );
}

#[test]
fn without_packets_a_set_that_is_reached_waits_until_its_checkpoint_is_cheap() {
    let mut adaptive = knowing(AdaptiveParameters::default());
    // 2 ms and 1,000 first writes are 3 ms: 0.5 % of 600.
    for age in (20..600).step_by(20) {
        assert!(waits(adaptive.look(&dirty(look(age), 1000))), "at {age} ms");
    }
    assert_eq!(
        adaptive.look(&dirty(look(600), 1000)),
        ReplicationDecision::Checkpoint(EpochReason::WorkingSet)
    );
    let mut growing = knowing(AdaptiveParameters::default());
    for age in (20..2000).step_by(20) {
        assert!(waits(growing.look(&dirty(look(age), age * age))), "at {age} ms");
    }
    assert_eq!(
        growing.look(&dirty(look(2000), 4_000_000)),
        ReplicationDecision::Checkpoint(EpochReason::LongestWait)
    );
    let mut writing = knowing(AdaptiveParameters::default());
    let full = VmObservation { disk_bytes_held: 51 * MB, ..look(5) };
    assert_eq!(writing.look(&full), ReplicationDecision::Checkpoint(EpochReason::DiskBuffer));
}

#[test]
fn a_talkative_vm_is_checkpointed_ahead_of_its_packets_if_that_lasts() {
    // Epochs of 400 ms: pages either grow by 10 a millisecond, or are all there at once.
    let decided = |steady: bool, talks: bool| {
        let mut adaptive = AdaptivePolicy::default();
        let pages = |age: u64| if steady { age * 10 } else { 4000 };
        for epoch in 0..4 {
            let since_ns = (8000 + epoch * 400) * MS;
            for age in 1..400 {
                let packets_held = u64::from(talks && age > 398);
                let now_ns = since_ns + age * MS;
                let oldest_packet_ns = (packets_held > 0).then_some(now_ns);
                let at = VmObservation {
                    now_ns,
                    since_ns,
                    packets_held,
                    oldest_packet_ns,
                    ..VmObservation::default()
                };
                adaptive.look(&VmObservation {
                    dirty_pages: pages(age),
                    in_flight: age < 70,
                    ..at
                });
            }
            adaptive.acknowledged(&acked(4000));
        }
        let since_ns = 9600 * MS;
        (70..400).find(|age| {
            let at = VmObservation {
                now_ns: since_ns + age * MS,
                since_ns,
                dirty_pages: pages(*age),
                ..VmObservation::default()
            };
            adaptive.look(&at) == ReplicationDecision::Checkpoint(EpochReason::Transfer)
        })
    };
    assert!(decided(true, true).is_some());
    assert_eq!(decided(true, false), None, "no peer waits for it");
    assert_eq!(decided(false, true), None, "they would be dirty again before they are sent");
}

#[test]
fn the_adaptive_policy_suspends_if_pages_come_much_faster_than_the_link_sends_them() {
    let at = |pages_per_ms: u64, parameters: AdaptiveParameters| {
        let mut adaptive = knowing(parameters);
        for epoch in 0..5 {
            let since_ns = (9980 + 4 * epoch) * MS;
            for age in 1..=4 {
                let at = VmObservation {
                    now_ns: since_ns + age * MS - 1,
                    since_ns,
                    ..VmObservation::default()
                };
                adaptive.look(&dirty(at, age * pages_per_ms));
            }
        }
        adaptive.look(&holding(dirty(flying(4), 4 * pages_per_ms), 1, 1))
    };
    // 16 us a page: 62 pages a millisecond are as fast as the link.
    assert!(waits(at(60, AdaptiveParameters::default())));
    assert!(
        waits(at(100, AdaptiveParameters::default())),
        "it brings the VM about what it costs the packet"
    );
    assert_eq!(at(200, AdaptiveParameters::default()), ReplicationDecision::Suspend);
    assert_eq!(at(200, for_latency(20)), ReplicationDecision::Suspend);
    assert!(waits(at(200, for_latency(2000))), "it is in time all the same");
    let cheap = AdaptiveParameters {
        overhead: Some(OverheadTarget { percent: 0.1 }),
        ..AdaptiveParameters::default()
    };
    assert!(waits(at(200, cheap)), "the account does not have it");
}

#[test]
fn reasons_have_names_and_estimates_have_units() {
    let all = [
        EpochReason::Due,
        EpochReason::WorkingSet,
        EpochReason::Packets,
        EpochReason::DiskBuffer,
        EpochReason::LongestWait,
        EpochReason::Transfer,
        EpochReason::Asked,
    ];
    let names: std::collections::BTreeSet<_> = all.iter().map(|reason| reason.name()).collect();
    assert_eq!(names.len(), all.len());
    let policies: [Box<dyn ReplicationScheduler>; 3] = [
        Box::new(FixedInterval::every(MS)),
        Box::new(PaperPolicy::default()),
        Box::new(AdaptivePolicy::default()),
    ];
    for policy in policies {
        for (name, value) in policy.describe() {
            let with_unit = ["_ns", "_per_s", "_pages", "_per_page", "_at_100ms", "_percent"]
                .iter()
                .any(|u| name.ends_with(u));
            assert!(with_unit && value.is_finite(), "{name}: {value}");
        }
    }
    assert_eq!(AdaptivePolicy::new(for_latency(20)).name(), "adaptive (latency 20ms)");
}

fn any_look() -> impl Strategy<Value = (u64, bool, VmObservation)> {
    let pages = prop_oneof![0..200_u64, 0..1_000_000_u64, Just(u64::MAX)];
    let step_ns = prop_oneof![1..100_000_u64, 1..50 * MS, 1..5000 * MS];
    let held = (0..4_u64, 0..100 * MB, 0..3000 * MS);
    (step_ns, any::<bool>(), any::<bool>(), any::<bool>(), pages, held).prop_map(
        |(
            step_ns,
            new_epoch,
            in_flight,
            stopped,
            dirty_pages,
            (packets_held, disk_bytes_held, waited_ns),
        )| {
            let oldest_packet_ns = (packets_held > 0).then_some(waited_ns);
            let held = VmObservation {
                packets_held,
                oldest_packet_ns,
                disk_bytes_held,
                ..VmObservation::default()
            };
            (step_ns, new_epoch, VmObservation { in_flight, dirty_pages, stopped, ..held })
        },
    )
}

fn any_acked() -> impl Strategy<Value = AcknowledgedEpoch> {
    (0..1_000_000_u64, 0..10_000 * MB, 0..100 * MS, 0..10_000 * MS).prop_map(
        |(pages, wire_bytes, pause_ns, transfer_ns)| AcknowledgedEpoch {
            pages,
            wire_bytes,
            pause_ns,
            transfer_ns,
            epoch_ns: transfer_ns,
        },
    )
}

/// The number of a policy (0 fixed, 1 the paper's, 2 adaptive), and its parameters.
type Given = (u8, u64, Option<u64>, Option<f64>);

fn any_policy() -> impl Strategy<Value = Given> {
    let targets = (proptest::option::of(1..1000 * MS), proptest::option::of(0.0..120.0));
    (0..3_u8, 1..1000 * MS, targets)
        .prop_map(|(kind, ns, (latency, overhead))| (kind, ns, latency, overhead))
}

/// The policy and its longest epoch.
fn built((kind, ns, latency, overhead): Given) -> (Box<dyn ReplicationScheduler>, u64) {
    let parameters = AdaptiveParameters {
        latency: latency.map(|ns| LatencyTarget { ns }),
        overhead: overhead.map(|percent| OverheadTarget { percent }),
        ..AdaptiveParameters::default()
    };
    match kind {
        0 => (Box::new(FixedInterval::every(ns)), ns),
        1 => (Box::new(PaperPolicy::default()), PaperParameters::default().wait_max_ns),
        _ => (Box::new(AdaptivePolicy::new(parameters)), parameters.wait_max_ns),
    }
}

proptest! {
    #[test]
    fn every_policy_keeps_its_invariants_on_random_looks(
        given in any_policy(),
        looks in proptest::collection::vec((any_look(), proptest::option::of(any_acked())), 1..60),
    ) {
        let (mut policy, wait_max_ns) = built(given);
        let (mut now_ns, mut since_ns) = (1, 1);
        for ((step_ns, new_epoch, look), acked) in looks {
            now_ns += step_ns;
            if new_epoch {
                since_ns = now_ns;
            }
            if let Some(acked) = acked {
                policy.acknowledged(&acked);
            }
            let oldest_packet_ns = look.oldest_packet_ns.map(|waited_ns| now_ns.saturating_sub(waited_ns));
            let look = VmObservation { now_ns, since_ns, oldest_packet_ns, ..look };
            match policy.look(&look) {
                ReplicationDecision::Checkpoint(reason) => {
                    prop_assert!(!look.in_flight, "a second checkpoint in flight: {look:?}");
                    prop_assert!(reason != EpochReason::Asked);
                }
                ReplicationDecision::Suspend => prop_assert!(look.in_flight && !look.stopped && look.packets_held > 0),
                ReplicationDecision::Wait { look_in_ns } => {
                    prop_assert!(look_in_ns > 0 && look_in_ns <= LOOK_NS_MAX);
                    prop_assert!(look.in_flight || look.age_ns() + look_in_ns <= wait_max_ns);
                    prop_assert!(look.in_flight || !look.stopped || given.0 == 0);
                }
            }
            for (name, value) in policy.describe() {
                prop_assert!(value.is_finite(), "{name}: {value}");
            }
        }
    }
}
