//! Injects faults into a protected VM: after each, one host runs it, and no answer that a client
//! got is taken back.

use keyframe_test_hosts::{Direction, Rate};
use keyframe_tests::fault_trial::{Fault, LEDGER, Side, Trial};
use keyframe_tests::protection::Hosts;
use keyframe_tests::relay::relay;
use keyframe_tests::{TestEnv, seed, wait_until};
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The number of faults in `make test`, and of failovers in `make soak`.
const FAULTS: usize = 3;
const SOAK_FAILOVERS: u32 = 200;

/// Injects one fault, and recovers.
fn survives(fault: Fault) -> Trial {
    let mut trial = Trial::new(1, &[]);
    trial.inject(fault);
    trial.recover();
    trial
}

#[test]
fn an_engine_that_dies_takes_its_vm_with_it_and_the_standby_goes_on() {
    let mut trial = Trial::new(1, &[]);
    trial.inject(Fault::EngineDies);
    // Nothing is left of the VM: QEMU, its guard, the gate, the server of its disks.
    wait_until("the old host is empty", || trial.hosts.a.pids().is_empty());
    trial.recover();
    assert_eq!((trial.failovers(), trial.primary()), (1, "b"));
    trial.end();
}

#[test]
fn an_engine_that_stalls_has_its_vm_stopped_and_learns_that_it_is_deposed() {
    let mut trial = Trial::new(1, &[]);
    trial.signal("a", Signal::STOP);
    // The guard pauses the VM, because the engine cannot. The trial checks all the time that it is
    // paused before the standby runs.
    trial.wait_until("the VM stands", |trial| trial.hosts.running_qemus("a") == 0);
    trial.wait_until("the standby takes over", |trial| trial.errors("b").contains("took over"));
    trial.wait_for_entries(10);
    assert_eq!(
        trial.hosts.stopped_qemus("a"),
        1,
        "stopped, since there is nobody who could end it"
    );
    trial.signal("a", Signal::CONT);
    trial.wait_until("the old one learns it", |trial| {
        trial.errors("a").contains("another host runs the VM")
    });
    wait_until("the old VM is gone", || {
        trial.hosts.stopped_qemus("a") + trial.hosts.running_qemus("a") == 0
    });
    trial.recover();
    assert_eq!((trial.failovers(), trial.primary()), (1, "b"));
    trial.end();
}

#[test]
#[ignore = "make soak"]
fn soak_a_vm_runs_on_while_its_standby_stalls_and_is_protected_afterwards() {
    let mut trial = Trial::new(1, &[]);
    trial.signal("b", Signal::STOP);
    trial.wait_until("the VM runs unprotected", |trial| {
        trial.errors("a").contains("the VM runs unprotected")
    });
    trial.wait_for_entries(10);
    trial.run_for(Duration::from_secs(2));
    trial.wait_for_entries(10);
    trial.signal("b", Signal::CONT);
    trial.recover();
    assert_eq!((trial.failovers(), trial.primary()), (0, "a"));
    trial.end();
}

#[test]
#[ignore = "make soak"]
fn soak_a_witness_is_missed_only_when_a_host_falls_silent() {
    let mut trial = Trial::new(1, &[]);
    trial.stop_witness();
    let before = trial.errors("a");
    trial.run_for(Duration::from_secs(2));
    trial.wait_for_entries(10);
    assert_eq!(trial.errors("a"), before, "nothing has failed");
    trial.start_witness();
    trial.inject(Fault::WitnessAndStandbyDie);
    trial.recover();
    assert_eq!((trial.failovers(), trial.primary()), (0, "a"));
    trial.end();
}

#[test]
fn a_standby_without_room_says_so_and_the_vm_runs_on_unprotected() {
    let env = TestEnv::without_store();
    let hosts = Hosts::new(&env);
    let _witness = hosts.witness(&env);
    let standby = hosts.standby_on_small_disk(&env, "b", "300k");
    let mut vm = hosts.protect(&env, &[], &hosts.ledger_guest(LEDGER));
    hosts.wait_until_protected(&env, "a", &mut vm);
    let client = hosts.client();
    vm.wait_for_error("No space left on device");
    vm.wait_for_error("the VM runs unprotected");
    assert!(standby.errors().contains("could not be applied"), "{}", standby.report());
    client.wait_for_entries(20, &mut vm);
    hosts.b.kill_all();
    drop(standby);
    let mounts = std::fs::read_to_string("/proc/mounts").expect("the mounts");
    assert!(
        !mounts.contains(&env.path().display().to_string()),
        "a mount is left behind: {mounts}"
    );

    let mut next = hosts.standby(&env, "b", &[]);
    hosts.wait_until_protected(&env, "a", &mut vm);
    hosts.a.kill_all();
    client.wait_for_entries(20, &mut next);
    client.end();
}

#[test]
fn two_hosts_that_die_at_once_leave_a_standby_that_pretends_nothing() {
    let mut trial = Trial::new(1, &[]);
    trial.kill_host("a");
    trial.kill_host("b");
    let (env, hosts) = (&trial.env, &trial.hosts);
    let alone = hosts.standby(env, "b", &[]);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(hosts.running_qemus("b"), 0, "{}", alone.report());
    let status = hosts.status(env, "b").expect("its status");
    assert_eq!(
        (status["role"].as_str(), status["connected"].as_bool()),
        (Some("standby"), Some(false))
    );
    for words in [&["failover"][..], &["failover", "--force"]] {
        let output = hosts.command(env, "b", words).output().expect("run keyframe failover");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains("no whole epoch"),
            "{words:?}: {output:?}"
        );
    }
    assert_eq!(hosts.running_qemus("b"), 0, "{}", alone.report());
}

#[test]
#[ignore = "make soak"]
fn soak_a_link_that_flaps_costs_time_and_nothing_else() {
    let mut trial = survives(Fault::LinkFlaps(6));
    trial.inject(Fault::StandbyCut(1000));
    trial.recover();
    trial.inject(Fault::EngineStumbles(300));
    trial.recover();
    trial.end();
}

#[test]
#[ignore = "make soak"]
fn soak_a_cable_that_carries_one_way_alone_costs_time_and_nothing_else() {
    for side in [Side::Primary, Side::Standby] {
        for way in [Direction::In, Direction::Out] {
            let mut trial = survives(Fault::OneWay(side, way, 500));
            let (was, other) = (trial.primary(), trial.other());
            let (mute, runs, says) = match side {
                Side::Primary => (was, other, "took over"),
                Side::Standby => (other, was, "the VM runs unprotected"),
            };
            trial.hosts.mute(mute, way, true);
            trial.wait_until(says, |trial| trial.errors(runs).contains(says));
            trial.wait_for_entries(10);
            trial.hosts.mute(mute, way, false);
            trial.recover();
            assert_eq!(trial.primary(), runs, "{side:?}, {way:?}");
            trial.end();
        }
    }
}

#[test]
#[ignore = "make soak"]
fn soak_a_second_way_tells_a_cut_link_from_a_dead_host() {
    let env = TestEnv::without_store();
    let hosts = Hosts::new(&env);
    hosts.add_second_path().expect("a second cable");
    let _witness = hosts.witness(&env);
    let mut standby = hosts.standby(&env, "b", &["--listen", "0.0.0.0:7430"]);
    let mut vm =
        hosts.protect(&env, &["--standby-beat", "10.79.0.2:7430"], &hosts.ledger_guest(LEDGER));
    hosts.wait_until_protected(&env, "a", &mut vm);
    let client = hosts.client();
    // Longer than a host may be silent (2 s), shorter than the data path may be down.
    let outage = Duration::from_millis(3500);
    hosts.cut("b", true);
    std::thread::sleep(outage);
    hosts.cut("b", false);
    client.wait_for_entries(20, &mut vm);
    hosts.wait_until_protected(&env, "a", &mut vm);
    hosts.cut_second_path(true).expect("cut it");
    std::thread::sleep(outage);
    client.wait_for_entries(20, &mut vm);
    hosts.cut_second_path(false).expect("mend it");
    assert!(!standby.errors().contains("took over"), "{}", standby.report());
    assert!(!vm.errors().contains("unprotected"), "{}", vm.report());
    hosts.a.kill_all();
    client.wait_for_entries(20, &mut standby);
    client.end();
}

/// No answer may come before the epoch has travelled to the standby and back.
#[test]
#[ignore = "make soak"]
fn soak_hosts_that_are_far_apart_hold_answers_for_so_long() {
    const DELAY: Duration = Duration::from_millis(5);
    for rate in [Rate::GIGABIT, Rate::TEN_GIGABIT] {
        let env = TestEnv::without_store();
        let hosts = Hosts::with_rate(&env, rate);
        let _witness = hosts.witness(&env);
        let mut standby = hosts.standby(&env, "b", &[]);
        let over = Arc::new(AtomicBool::new(false));
        let (at, to) = ("10.78.0.3:7430", "10.78.0.2:7430");
        let ends = Arc::clone(&over);
        let way = move || {
            relay(at.parse().expect("an address"), to.parse().expect("an address"), DELAY, &ends)
        };
        let relay = hosts.c.inside(way).expect("enter a namespace");
        let mut vm = hosts.protect(&env, &["--standby", at], &hosts.ledger_guest(LEDGER));
        hosts.wait_until_protected(&env, "a", &mut vm);
        let client = hosts.client();
        let before = client.seen().took.len();
        client.wait_for_entries(100, &mut vm);
        let took = client.seen().took.split_off(before);
        assert!(took.iter().all(|took| *took >= 2 * DELAY), "{rate:?}: {took:?}");
        hosts.a.kill_all();
        client.wait_for_entries(100, &mut standby);
        client.end();
        over.store(true, Ordering::Relaxed);
        relay.join().expect("the relay's thread").expect("enter a namespace").expect("listen");
    }
}

#[test]
#[ignore = "make soak"]
fn soak_vms_with_several_vcpus_survive_their_host() {
    for cpus in [2, 4] {
        let mut trial = Trial::new(cpus, &[]);
        trial.inject(Fault::HostDies);
        trial.recover();
        // Then the other host fails.
        trial.inject(Fault::HostDies);
        trial.recover();
        assert_eq!((trial.failovers(), trial.primary()), (2, "a"));
        trial.end();
    }
}

/// Injects `faults` faults drawn from `seed`. Returns the number of failovers.
fn play(seed: u64, faults: usize) -> u32 {
    println!(
        "seed {seed}, again with: KEYFRAME_TEST_SEED={seed} cargo test -p keyframe-tests --test end_to_end faults_by_seed"
    );
    let mut state = seed;
    let mut draw = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let script: Vec<Fault> = (0..faults).map(|_| Fault::from_random(draw(), draw())).collect();
    println!("script: {script:?}");
    let verified: &[&str] = if seed.is_multiple_of(3) { &["--verify"] } else { &[] };
    let mut trial = Trial::new(1 + u32::from(seed % 4 == 3), verified);
    for fault in script {
        trial.inject(fault);
        trial.recover();
    }
    let failovers = trial.failovers();
    let seen = trial.end();
    println!(
        "seed {seed}: {} entries, {failovers} failovers, the longest answer {:?}",
        seen.entries, seen.longest
    );
    failovers
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn faults_by_seed() {
    play(seed(), FAULTS);
}

#[test]
#[ignore = "make soak"]
fn soak_faults_by_seed_until_the_vm_has_changed_hosts_200_times() {
    let seeds = number("KEYFRAME_SEEDS").unwrap_or(1000);
    let mut failovers = 0;
    for seed in (seed()..).take(usize::try_from(seeds).expect("a number of seeds")) {
        failovers += play(seed, 3 * FAULTS);
        println!("{failovers} failovers so far");
        if failovers >= SOAK_FAILOVERS {
            break;
        }
    }
}
