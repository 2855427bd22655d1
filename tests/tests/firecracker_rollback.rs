//! Tests the rollback of Firecracker's VMs: another Firecracker takes the place of the one that runs.
//!
//! The guest prints the numbers of a sequence. After a rollback it prints those after the checkpoint
//! again, and they must be the same.

use keyframe_tests::firecracker::{
    ExternalFirecracker, assert_ends_well, assert_same_sequence, attach, end_clones, payload_lines,
    take_audited, take_audited_after,
};
use keyframe_tests::firecracker_drive::{names, start_on};
use keyframe_tests::tap_network::{TapNetwork, frames_received};
use keyframe_tests::{
    Process, TestEnv, is_gone, needs_firecracker, needs_taps, number, variants, wait_until,
};
use serde_json::{Value, json};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

/// Rolls the VM `name` back to `checkpoint`. Returns the answer.
fn roll_back(env: &TestEnv, name: &str, words: &[&str]) -> Value {
    env.json(&[&["rollback", "--json", "--name", name][..], words].concat())
}

/// Attaches to `vm`, and takes checkpoints when asked alone.
fn attach_idle(env: &TestEnv, vm: &ExternalFirecracker) -> Process {
    let mut run = attach(env, vm, &["--interval", "none"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    run
}

/// Stops the session `run` of the VM `fc`.
fn stop(env: &TestEnv, run: &mut Process) {
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(run);
}

/// Ends `vm`, so that another one can start at its socket.
fn end(env: &TestEnv, vm: ExternalFirecracker) {
    let pid = vm.pid();
    drop(vm);
    wait_until("the VM is gone", || is_gone(pid));
    std::fs::remove_file(env.path().join("fc.sock")).unwrap();
}

/// The number of a line of the guest's sequence.
fn number_of(line: &str) -> u64 {
    u64::from_str_radix(&line[3..19], 16).unwrap()
}

/// Waits until `lines` show the `nth` step back to what was printed before, right after the line
/// `kept`, which came before the checkpoint.
fn assert_went_back(lines: impl Fn() -> Vec<String>, nth: usize, kept: &str) {
    let steps_back = || {
        let lines = lines();
        let back = |pair: &[String]| number_of(&pair[1]) <= number_of(&pair[0]);
        (1..lines.len()).filter(|at| back(&lines[at - 1..=*at])).collect::<Vec<_>>()
    };
    wait_until("the VM goes back", || steps_back().len() >= nth);
    let at = steps_back()[nth - 1];
    wait_until("the VM goes on", || lines().len() > at + 8);
    let lines = lines();
    let (first, again) = lines.split_at(at);
    assert!(number_of(&again[0]) > number_of(kept), "not from {kept} on: {again:?}");
    assert!(assert_same_sequence(first, again) > 0, "{kept}: {again:?}");
}

/// The process of `vm` is another one, at the same socket.
fn succeed(vm: &mut ExternalFirecracker, done: &Value) {
    let former = vm.pid();
    let pid = u32::try_from(number(done, "successor_pid")).unwrap();
    vm.is_succeeded_by(pid);
    assert!(is_gone(former), "{done}");
    assert!(!vm.is_paused(), "{done}");
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    assert!(line.contains(&*vm.socket().to_string_lossy()), "{line}");
}

#[test]
fn a_vm_goes_back_again_and_again_at_the_same_socket_and_console() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let mut vm = ExternalFirecracker::start(&env, &guest, &guest.config(128, ""));
    std::fs::set_permissions(vm.socket(), std::fs::Permissions::from_mode(0o640)).unwrap();
    let mut run = attach(&env, &vm, &["--interval", "200ms", "--audit", "audit"]);
    run.wait_for_error("a checkpoint every");
    vm.grows(30);
    let kept = vm.lines().pop().unwrap();
    let base = number(&env.json(&["take", "--json", "--name", "fc", "--tag", "base"]), "id");
    for (nth, fast) in [false, true, false].into_iter().enumerate() {
        vm.grows(20);
        let words = if fast { &["base", "--fast"][..] } else { &["base"] };
        let done = roll_back(&env, "fc", words);
        assert_eq!(number(&done, "checkpoint"), base);
        assert_eq!(done["before"].is_u64(), !fast, "{done}");
        succeed(&mut vm, &done);
        assert_went_back(|| vm.lines(), nth + 1, &kept);
    }
    assert_eq!(std::fs::metadata(vm.socket()).unwrap().mode() & 0o777, 0o640);
    // The checkpoints after it grow from its target.
    let entries = env.list();
    let last = |entry: &Value| entry["reason"] == "rollback";
    assert!(entries.iter().filter(|entry| last(entry)).count() >= 2, "{entries:?}");
    let new = env.json(&["take", "--json", "--name", "fc"]);
    assert!(number(&new, "id") > base);
    stop(&env, &mut run);
    vm.grows(5);
    take_audited_after(&env, &vm);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    let mut restored = env.restore(&new["id"].to_string(), &[]);
    assert!(restored.wait_until(|run| (run.lines().len() > 20).then_some(())).is_some());
}

#[test]
fn a_vm_that_keyframe_has_started_goes_back_and_ends_with_it() {
    let guest = needs_firecracker!();
    let env = TestEnv::new().with_rehearsals();
    let (config, socket) = (env.path().join("vm.json"), env.path().join("run.sock"));
    std::fs::write(&config, guest.config(128, "")).unwrap();
    let (config, socket) = (config.display().to_string(), socket.display().to_string());
    let (store, binary) = (env.store(), guest.binary());
    let words = ["run", "--store", &store, "--name", "fc", "--interval", "200ms", "--"];
    let line = [&*binary, "--api-sock", &socket, "--config-file", &config, "--id", "web"];
    let mut run = Process::start(env.command(&[&words[..], &line[..]].concat()));
    let lines = |run: &Process| payload_lines(&(run.lines().join("\n") + "\n"));
    assert!(run.wait_until(|run| (lines(run).len() > 30).then_some(())).is_some());
    let kept = lines(&run).pop().unwrap();
    env.ok(&["take", "--name", "fc", "--tag", "base"]);
    let grown = lines(&run).len() + 20;
    assert!(run.wait_until(|run| (lines(run).len() > grown).then_some(())).is_some());
    let done = roll_back(&env, "fc", &["base"]);
    let pid = u32::try_from(number(&done, "successor_pid")).unwrap();
    assert_went_back(|| lines(&run), 1, &kept);
    let status = env.ok(&["status"]);
    assert!(status.contains(&format!("(Firecracker {pid},")), "{status}");
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(line.contains("--id\0web") && !line.contains("--config-file"), "{line}");
    stop(&env, &mut run);
    wait_until("the VM is gone", || is_gone(pid));
}

#[test]
fn a_drive_goes_back_with_its_vm_under_the_same_path() {
    let guest = needs_firecracker!();
    for kind in variants(["xfs", "ext4"], 1) {
        let env = TestEnv::new();
        let Some((mounted, drive, mut vm)) = start_on(kind, &env, &guest) else { continue };
        let mut run = attach(&env, &vm, &["--interval", "300ms"]);
        run.wait_for_error("a checkpoint every");
        vm.grows(50);
        let kept = vm.lines().pop().unwrap();
        env.ok(&["take", "--name", "fc", "--tag", "base"]);
        let inode = std::fs::metadata(&drive).unwrap().ino();
        for nth in 1..=2 {
            vm.grows(40);
            let done = roll_back(&env, "fc", &["base"]);
            succeed(&mut vm, &done);
            // The guest compares its drive with what it has in RAM.
            assert_went_back(|| vm.lines(), nth, &kept);
            vm.grows(40);
        }
        assert_ne!(std::fs::metadata(&drive).unwrap().ino(), inode, "the copy is in its place");
        stop(&env, &mut run);
        vm.grows(50);
        let left = names(&mounted.dir);
        assert!(!left.iter().any(|name| name == ".keyframe-drives"), "{kind}: {left:?}");
        take_audited_after(&env, &vm);
    }
}

#[test]
fn a_vm_with_a_network_card_goes_back_with_its_tap() {
    let (guest, network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new();
    network.tap("kf1", 1);
    let _flood = network.flood(1);
    let card = r#", "network-interfaces": [{ "iface_id": "eth0", "host_dev_name": "kf1" }],
        "mmds-config": { "version": "V2", "network_interfaces": ["eth0"] }"#;
    let mut vm = ExternalFirecracker::start(&env, &guest, &guest.config(128, card));
    let data = json!({ "name": "web" });
    vm.api().set_metadata(&data).unwrap();
    let mut run = attach(&env, &vm, &["--interval", "300ms"]);
    run.wait_for_error("a checkpoint every");
    vm.grows(3);
    env.ok(&["take", "--name", "fc", "--tag", "base"]);
    let received = |vm: &ExternalFirecracker| frames_received(&vm.output()).len();
    assert_receives(&vm, &network);
    let done = roll_back(&env, "fc", &["base"]);
    succeed(&mut vm, &done);
    let before = received(&vm);
    assert_eq!(vm.api().metadata().unwrap(), data);
    wait_until("the VM receives frames", || received(&vm) > before + 2);
    assert_receives(&vm, &network);
    stop(&env, &mut run);
}

/// Keyframe is in another network namespace than the VM and its tap.
#[test]
fn a_vm_in_a_network_namespace_of_its_own_stays_there() {
    let (guest, _network) = (needs_firecracker!(), needs_taps!());
    let env = TestEnv::new();
    let card = r#", "network-interfaces": [{ "iface_id": "eth0", "host_dev_name": "own1" }]"#;
    let config = guest.config(128, card);
    let mut vm = ExternalFirecracker::start_in_own_network(&env, &guest, &config, "own1", true);
    let mut run = attach(&env, &vm, &["--interval", "300ms"]);
    run.wait_for_error("a checkpoint every");
    let network = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    let (kept, own) = (vm.lines().pop().unwrap(), network(vm.pid()));
    env.ok(&["take", "--name", "fc", "--tag", "base"]);
    vm.grows(20);
    let done = roll_back(&env, "fc", &["base"]);
    succeed(&mut vm, &done);
    assert_went_back(|| vm.lines(), 1, &kept);
    assert_eq!(network(vm.pid()), own);
    stop(&env, &mut run);
    // A tap that is gone before its successor could open it.
    end(&env, vm);
    let vm = ExternalFirecracker::start_in_own_network(&env, &guest, &config, "own1", false);
    let mut run = attach_idle(&env, &vm);
    env.ok(&["take", "--name", "fc", "--tag", "other"]);
    env.refused(&["rollback", "--name", "fc", "other"], 1, &["vanishes with it", "ip tuntap add"]);
    vm.grows(3);
    stop(&env, &mut run);
}

/// A restored VM's files and socket are of the command that restored it.
#[test]
fn a_vm_that_was_restored_is_not_put_back_and_runs_on() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = ExternalFirecracker::start(&env, &guest, &guest.config(128, ""));
    take_audited(&env, &vm, "1");
    let (mut branch, clones) = env.branch(&["latest", "-n", "1", "--name", "clone"]);
    let (api, pid) = (clones[0]["monitor"].as_str().unwrap(), clones[0]["qemu_pid"].to_string());
    let store = env.store();
    let words = ["attach", "--store", &store, "--name", "of-clone", "--interval", "none", "--api"];
    let mut run = Process::start(env.command(&[&words[..], &[api, &pid]].concat()));
    run.wait_for_error("checkpoints by `keyframe take`");
    env.refused(&["rollback", "--name", "of-clone", "1"], 1, &["branch", "keyframe restore 1"]);
    env.ok(&["take", "--name", "of-clone"]);
    env.ok(&["stop", "--name", "of-clone"]);
    assert_ends_well(&mut run);
    end_clones(&mut branch, &clones);
}

/// Waits until frames come from `vm`, which has the tap `kf1`.
fn assert_receives(vm: &ExternalFirecracker, network: &TapNetwork) {
    let sent = network.frames_from("kf1");
    vm.grows(2);
    wait_until("the guest sends frames", || network.frames_from("kf1") > sent);
}

#[test]
fn what_cannot_go_back_is_refused_and_the_vm_is_left_alone() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let mut vm = ExternalFirecracker::start(&env, &guest, &guest.config(128, ""));
    let mut run = attach_idle(&env, &vm);
    env.ok(&["take", "--name", "fc", "--tag", "base"]);
    env.refused(&["rollback", "--name", "fc", "absent"], 1, &["absent"]);
    // A paused VM stays paused.
    vm.api().pause().unwrap();
    let done = roll_back(&env, "fc", &["base"]);
    assert_eq!(done["runs"], false, "{done}");
    let former = vm.pid();
    vm.is_succeeded_by(u32::try_from(number(&done, "successor_pid")).unwrap());
    assert!(is_gone(former) && vm.is_paused());
    vm.api().resume().unwrap();
    vm.grows(3);
    stop(&env, &mut run);
    // A checkpoint of another machine.
    end(&env, vm);
    let other = ExternalFirecracker::start(&env, &guest, &guest.config(160, ""));
    let mut run = attach_idle(&env, &other);
    env.refused(&["rollback", "--name", "fc", "base"], 1, &["RAM blocks differ", "restore"]);
    other.grows(3);
    stop(&env, &mut run);
}

/// The engine is killed at each step. The watchdog ends the rollback: the VM is as it was, or the
/// checkpoint, and runs.
#[test]
fn a_vm_runs_on_if_the_engine_is_killed_at_any_step() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, _, mut vm)) = start_on("xfs", &env, &guest) else { return };
    let note = env.path().join("keyframe/fc/rollback.txt");
    let mut went_back = 0;
    for step in 1..=8 {
        let fault = format!("kill-rollback:{step}");
        let mut run = attach(&env, &vm, &["--interval", "200ms", "--fault", &fault]);
        run.wait_for_error("a checkpoint every");
        vm.grows(20);
        let kept = vm.lines().pop().unwrap();
        env.ok(&["take", "--name", "fc", "--tag", &format!("base-{step}")]);
        vm.grows(20);
        let former = vm.pid();
        let asked = env.run(&["rollback", "--name", "fc", &format!("base-{step}")]);
        assert!(!asked.status.success(), "{step}");
        assert!(!run.wait().success(), "{step}: {}", run.report());
        if step <= 4 {
            wait_until("the VM runs on", || !vm.is_paused());
            if step == 4 {
                wait_until("the watchdog tells of it", || note.exists());
            }
            let next = env.path().join("fc.sock.next");
            wait_until("the waiting successor ends", || {
                vm.others_below(env.path()).is_empty() && !next.exists()
            });
            assert!(!is_gone(former), "{step}");
        } else {
            wait_until("the watchdog ends the rollback", || note.exists());
            let said = std::fs::read_to_string(&note).unwrap();
            assert!(said.contains("the VM is checkpoint"), "{step}: {said}");
            let others = vm.others_below(env.path());
            assert_eq!(others.len(), 1, "{step}: {others:?}");
            assert!(is_gone(former), "{step}");
            vm.is_succeeded_by(others[0]);
            went_back += 1;
            assert_went_back(|| vm.lines(), went_back, &kept);
            assert!(!vm.is_paused(), "{step}");
        }
        // The guest compares its drive with what it has in RAM.
        vm.grows(20);
        wait_until("the copies are removed", || {
            !names(&mounted.dir).iter().any(|name| name == ".keyframe-drives")
        });
        let _ = std::fs::remove_file(&note);
    }
    take_audited_after(&env, &vm);
}
