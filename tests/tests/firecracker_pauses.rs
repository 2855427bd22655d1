//! Tests the pauses of a VM of Firecracker beside those of its user: neither undoes the other, and a
//! VM runs on although engine and watchdog are killed in a pause.

use keyframe_tests::firecracker::{
    ExternalFirecracker, FirecrackerGuest, assert_ends_well, assert_goes_on, attach,
};
use keyframe_tests::helpers::{helper_of, kill};
use keyframe_tests::{TestEnv, needs_firecracker, wait_until};
use std::time::Duration;

fn start(env: &TestEnv, guest: &FirecrackerGuest) -> ExternalFirecracker {
    ExternalFirecracker::start(env, guest, &guest.config(128, ""))
}

/// Some of the user's requests come in a pause of the engine, which has one each 10 ms.
#[test]
fn a_pause_of_the_user_is_never_undone() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let mut run = attach(&env, &vm, &["--interval", "10ms"]);
    run.wait_for_error("a checkpoint every");
    for round in 0..60 {
        std::thread::sleep(Duration::from_millis(round % 13));
        vm.api().pause().unwrap();
        // What it had printed may be on its way to the file.
        std::thread::sleep(Duration::from_millis(30));
        let printed = vm.lines().len();
        std::thread::sleep(Duration::from_millis(50));
        assert!(vm.is_paused(), "round {round}: it runs again");
        assert_eq!(vm.lines().len(), printed, "round {round}: it has run");
        vm.api().resume().unwrap();
        vm.grows(1);
        assert!(!vm.is_paused(), "round {round}: it is paused again");
    }
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    assert_goes_on(&env, || vm.lines(), &[]);
}

/// A pipe without a reader ends the pause.
#[test]
fn a_vm_runs_on_if_engine_and_watchdog_are_killed_in_a_pause() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    for phase in ["paused", "device-state", "copied"] {
        let fault = format!("stall:{phase}:2");
        let mut run = attach(&env, &vm, &["--interval", "100ms", "--fault", &fault]);
        run.wait_for_error("a checkpoint every");
        let watchdog = helper_of(run.pid(), "__watchdog");
        wait_until("the engine stalls in a pause", || {
            let before = vm.lines().len();
            std::thread::sleep(Duration::from_millis(500));
            vm.lines().len() == before
        });
        kill(watchdog);
        kill(run.pid());
        run.wait();
        vm.grows(10);
        assert!(!vm.is_paused(), "{phase}");
    }
    let mut run = attach(&env, &vm, &["--interval", "100ms", "--count", "3", "--audit", "audit"]);
    assert_ends_well(&mut run);
    assert_goes_on(&env, || vm.lines(), &[]);
}

/// A stalled engine does not hold the VM for longer than it may.
#[test]
fn the_watchdog_ends_the_pause_of_an_engine_that_stalls() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let options = ["--interval", "100ms", "--fault", "stall:copied:2", "--pause-limit", "300ms"];
    let mut run = attach(&env, &vm, &options);
    run.wait_for_error("a checkpoint every");
    vm.grows(100);
    kill(run.pid());
    run.wait();
    vm.grows(10);
}
