//! Tests Firecracker's VMs with network cards: checkpoints are exact while frames flood in, the VM
//! and its network run on whatever happens to the engine, and a checkpoint is restored under other
//! taps.
//!
//! The guest checks each buffer that its card writes to (`guests/firecracker/net.h`), and its output
//! is looked at for errors in every test.

use keyframe_tests::firecracker::{
    ExternalFirecracker, FirecrackerGuest, assert_ends_well, assert_same_sequence, attach,
    end_clones, payload_lines, take_audited, take_audited_after,
};
use keyframe_tests::tap_network::{TapNetwork, frames_received};
use keyframe_tests::{PATIENCE, Process, TestEnv, needs_firecracker, needs_taps, wait_until};
use std::path::Path;
use std::time::{Duration, Instant};

/// A network card of a configuration; `more` are members of it, which begin with a comma.
fn card(tap: &str, more: &str) -> String {
    format!(
        r#", "network-interfaces": [{{ "iface_id": "eth0", "host_dev_name": "{tap}" {more} }}]"#
    )
}

fn start(env: &TestEnv, guest: &FirecrackerGuest, more: &str) -> ExternalFirecracker {
    ExternalFirecracker::start(env, guest, &guest.config(128, more))
}

/// Waits until `vm` receives frames, sends some itself through `tap`, and computes.
fn assert_network_runs(vm: &ExternalFirecracker, network: &TapNetwork, tap: &str) {
    let received = || frames_received(&vm.output()).last().copied().unwrap_or_default();
    let (before, sent) = (received(), network.frames_from(tap));
    vm.grows(2);
    wait_until("the guest receives frames", || received() > before);
    wait_until("the guest sends frames", || network.frames_from(tap) > sent);
    assert!(!vm.is_paused());
}

/// Restores `latest` with `options` until its guest has received frames and printed lines that are
/// among those of `printed`.
fn assert_goes_on(env: &TestEnv, printed: &[String], options: &[&str]) {
    let store = env.store();
    let words = [&["restore", "--store", &store, "latest"], options].concat();
    let mut restored = Process::start(env.command(&words));
    let until = Instant::now() + PATIENCE;
    loop {
        let output = restored.lines().join("\n") + "\n";
        let lines = payload_lines(&output);
        let received = frames_received(&output);
        let has_received = received.last() > received.first();
        if assert_same_sequence(printed, &lines) > 2 && lines.len() > 8 && has_received {
            break;
        }
        let report = restored.report();
        assert!(Instant::now() < until && restored.is_running(), "it does not go on: {report}");
        std::thread::sleep(Duration::from_millis(50));
    }
    restored.signal(rustix::process::Signal::INT);
    assert!(restored.wait().success(), "{}", restored.report());
}

#[test]
fn checkpoints_are_exact_while_frames_flood_in() {
    let (guest, network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new().with_rehearsals();
    network.tap("kf1", 1);
    network.tap("kf2", 2);
    let _flood = (network.flood(1), network.flood(2));
    let vm = start(&env, &guest, &card("kf1", ""));
    assert_network_runs(&vm, &network, "kf1");
    let options = ["--interval", "200ms", "--count", "8", "--audit", "audit", "--verbose"];
    let mut run = attach(&env, &vm, &options);
    assert_ends_well(&mut run);
    let said = run.errors();
    assert!(said.contains("a restore was rehearsed"), "{said}");
    assert_eq!(env.list().len(), 8, "{said}");
    assert_network_runs(&vm, &network, "kf1");
    vm.grows(8);
    let printed = vm.lines();
    // Its tap is in use.
    let store = env.store();
    let restore = ["restore", "--store", &store, "latest"];
    env.refused(&restore, 1, &["kf1", "eth0", "in use", "--tap eth0=TAP"]);
    let other = |choice| [&restore[..], &["--tap", choice]].concat();
    env.refused(&other("eth0=kf9"), 1, &["kf9", "missing", "ip tuntap add kf9 mode tap"]);
    env.refused(&other("eth1=kf2"), 1, &["no network card eth1", "eth0"]);
    env.refused(&other("kf2"), 2, &["CARD=TAP"]);
    assert_goes_on(&env, &printed, &["--tap", "eth0=kf2"]);
    assert_goes_on(&env, &printed, &["--tap", "eth0=kf2", "--lazy"]);
    assert_network_runs(&vm, &network, "kf1");
    drop(vm);
    // With its own tap, and so with its first name.
    assert_goes_on(&env, &printed, &[]);
}

#[test]
fn checkpoints_of_a_vm_with_rate_limits_are_exact() {
    let (guest, network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new();
    network.tap("kf1", 1);
    let _flood = network.flood(1);
    let limit = r#"{ "ops": { "size": 20, "refill_time": 50 } }"#;
    let limits = format!(r#", "rx_rate_limiter": {limit}, "tx_rate_limiter": {limit}"#);
    let entropy = format!(r#", "entropy": {{ "rate_limiter": {limit} }}"#);
    let vm = start(&env, &guest, &(card("kf1", &limits) + &entropy));
    take_audited(&env, &vm, "6");
    assert_network_runs(&vm, &network, "kf1");
    vm.grows(8);
    let printed = vm.lines();
    drop(vm);
    assert_goes_on(&env, &printed, &[]);
}

#[test]
fn the_network_runs_on_if_the_engine_dies_in_any_phase() {
    let (guest, network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new();
    network.tap("kf1", 1);
    let _flood = network.flood(1);
    let vm = start(&env, &guest, &card("kf1", ""));
    for phase in ["precopy", "stopping", "paused", "device-state", "copied", "resumed", "sealing"] {
        let fault = format!("kill:{phase}:2");
        let mut run = attach(&env, &vm, &["--interval", "100ms", "--fault", &fault]);
        assert!(!run.wait().success(), "{phase}: {}", run.report());
        assert_network_runs(&vm, &network, "kf1");
    }
    take_audited_after(&env, &vm);
}

#[test]
fn each_clone_has_a_tap_of_its_own() {
    let (guest, network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new();
    network.tap("kf1", 1);
    network.tap("kf2", 2);
    network.tap("own", 3);
    let _floods = [network.flood(1), network.flood(2), network.flood(3)];
    let vm = start(&env, &guest, &card("own", ""));
    take_audited(&env, &vm, "3");
    vm.grows(8);
    let printed = vm.lines();
    let store = env.store();
    let branch = ["branch", "--store", &store, "latest", "-n"];
    env.refused(&[&branch[..], &["2"]].concat(), 1, &["cannot share own", "--tap eth0=tap%d"]);
    let three = [&branch[..], &["3", "--tap", "eth0=kf%d"]].concat();
    env.refused(&three, 1, &["kf3", "missing"]);
    let (mut branch, clones) = env.branch(&["latest", "-n", "2", "--tap", "eth0=kf%d"]);
    assert_eq!(clones.len(), 2);
    for clone in &clones {
        let path = Path::new(clone["directory"].as_str().unwrap()).join("console.log");
        let output = || std::fs::read_to_string(&path).unwrap_or_default();
        wait_until("the clone receives frames", || frames_received(&output()).len() > 3);
        assert!(assert_same_sequence(&printed, &payload_lines(&output())) > 0);
    }
    assert_network_runs(&vm, &network, "own");
    end_clones(&mut branch, &clones);
}

#[test]
fn a_vm_that_was_restored_paused_is_exact_although_frames_wait() {
    let (guest, network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new();
    network.tap("kf1", 1);
    let _flood = network.flood(1);
    let vm = start(&env, &guest, &card("kf1", ""));
    take_audited(&env, &vm, "2");
    vm.grows(8);
    let printed = vm.lines();
    drop(vm);
    let (store, socket) = (env.store(), env.path().join("clone.sock"));
    let restore = ["restore", "--store", &store, "latest", "--paused"];
    let mut restored = Process::start(env.command(&restore));
    restored.wait_for_error("is paused after");
    let said = restored.errors();
    let word = |before: &str| {
        let (_, rest) = said.rsplit_once(before).unwrap_or_else(|| panic!("{said}"));
        rest.split([',', ')', '\n']).next().unwrap_or_default().trim().to_owned()
    };
    std::os::unix::fs::symlink(word("API "), &socket).unwrap();
    let (api, pid) = (socket.display().to_string(), word("(Firecracker "));
    let words =
        ["attach", "--store", &store, "--name", "paused", "--api", &api, "--audit", "audit2"];
    let none = ["--interval", "none", &pid];
    let mut run = Process::start(env.command(&[&words[..], &none].concat()));
    run.wait_for_error("checkpoints by `keyframe take`");
    for _ in 0..3 {
        env.ok(&["take", "--name", "paused"]);
    }
    env.ok(&["stop", "--name", "paused"]);
    assert_ends_well(&mut run);
    restored.signal(rustix::process::Signal::INT);
    restored.wait();
    assert_eq!(env.list().len(), 5, "{}", run.report());
    assert_goes_on(&env, &printed, &[]);
}

#[test]
fn a_run_of_a_vm_with_a_card_is_rehearsed_beside_it() {
    let (guest, network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new().with_rehearsals();
    network.tap("kf1", 1);
    let _flood = network.flood(1);
    let (config, socket) = (env.path().join("vm.json"), env.path().join("run.sock"));
    std::fs::write(&config, guest.config(128, &card("kf1", ""))).unwrap();
    let (config, socket) = (config.display().to_string(), socket.display().to_string());
    let (store, binary) = (env.store(), guest.binary());
    let words = ["run", "--store", &store, "--name", "fc", "--verbose", "--interval", "300ms"];
    let line = ["--audit", "audit", "--", &binary, "--api-sock", &socket, "--config-file", &config];
    let mut run = Process::start(env.command(&[&words[..], &line[..]].concat()));
    run.wait_for_error("a restore was rehearsed");
    wait_until("checkpoints are taken", || env.list().len() > 3);
    let received = |run: &Process| frames_received(&run.lines().join("\n"));
    assert!(run.wait_until(|run| (received(run).len() > 2).then_some(())).is_some());
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    payload_lines(&(run.lines().join("\n") + "\n"));
}
