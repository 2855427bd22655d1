//! Tests VMs that stand still although no client paused them: their guest has powered off under
//! `-no-shutdown`, a reboot was turned into a shutdown, or the guest has panicked. A rollback makes
//! such a VM run exactly as the target. A checkpoint of it comes back in the same run state, also by a
//! rollback if QEMU can be brought into the state.

use keyframe_tests::{
    Boot, PATIENCE, Process, Sequence, TestEnv, assert_no_errors, chosen_qemus, hash_lines,
    wait_until,
};
use serde_json::json;
use std::path::Path;

/// The run state that QEMU tells at its monitor.
fn run_state(monitor: &Path) -> String {
    let mut own = keyframe_qemu::Qmp::connect(monitor, PATIENCE).unwrap();
    let answer = own.execute("query-status", None).unwrap();
    answer["status"].as_str().unwrap().to_owned()
}

/// Brings the guest into a state in which it stands still, and waits until `status` names it.
fn make_stand(env: &TestEnv, run: &mut Process, monitor: &Path, state: &str, command: &str) {
    if let Some(port) = command.strip_prefix("port ") {
        let mut own = keyframe_qemu::Qmp::connect(monitor, PATIENCE).unwrap();
        let write = serde_json::json!({ "command-line": format!("o {port}") });
        own.execute("human-monitor-command", Some(write)).unwrap();
    } else {
        run.type_line(command);
    }
    let told = || env.json(&["status", "--json"])[0]["state"] == state;
    wait_until("status names the run state", told);
    assert_eq!(run_state(monitor), state);
}

/// Waits until the guest has printed `more` lines of its sequence.
fn grow(vm: &mut Process, more: usize) {
    let before = hash_lines(&vm.lines()).len();
    let grown = vm.wait_until(|p| (hash_lines(&p.lines()).len() >= before + more).then_some(()));
    assert!(grown.is_some(), "the guest is silent; {}", vm.report());
}

fn check(qemu: &str, extra: &[&str], state: &str, commands: &[&str], sequence: &mut Sequence) {
    let env = TestEnv::new();
    let monitor = env.path().join("own.sock");
    let mut boot = Boot::new("hash")
        .with(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())])
        .with(extra);
    qemu.clone_into(&mut boot.qemu);
    boot.mem_mib = 96;
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    grow(&mut run, 3);
    env.ok(&["take", "--name", "guest", "--tag", "ran"]);
    let mut rollbacks = 0;
    // A second time: what the rollback has set in QEMU is as it was.
    for command in commands {
        grow(&mut run, 3);
        make_stand(&env, &mut run, &monitor, state, command);
        rollbacks += 1;
        let done = env.json(&["rollback", "ran", "--name", "guest", "--json"]);
        assert_eq!(done["runs"], true, "{state}");
        assert_eq!(run_state(&monitor), "running");
        grow(&mut run, 3);
    }
    make_stand(&env, &mut run, &monitor, state, commands[0]);
    env.ok(&["take", "--name", "guest", "--tag", "stood"]);
    assert_eq!(run_state(&monitor), state, "a checkpoint changes no run state");
    // The VM is in that state already.
    let done = env.json(&["rollback", "stood", "--name", "guest", "--json"]);
    assert_eq!((&done["runs"], &*run_state(&monitor)), (&json!(false), state));
    env.ok(&["rollback", "ran", "--name", "guest"]);
    rollbacks += 1;
    grow(&mut run, 3);
    if state == "suspended" {
        // A newer QEMU saves by itself that a VM sleeps, and not as a run state.
        make_stand(&env, &mut run, &monitor, state, commands[0]);
        return end(&env, run, (state, &monitor), rollbacks, sequence);
    }
    let back = env.run(&["rollback", "stood", "--name", "guest"]);
    if state == "shutdown" {
        assert!(back.status.success(), "{back:?}");
        assert_eq!(run_state(&monitor), state);
        let shown = env.json(&["status", "--json"])[0]["state"].clone();
        assert_eq!(shown, state);
        // It is not in the middle of anything: it runs from an earlier checkpoint.
        env.ok(&["rollback", "ran", "--name", "guest"]);
        rollbacks += 1;
        grow(&mut run, 3);
    } else {
        let text = String::from_utf8_lossy(&back.stderr).into_owned();
        assert!(text.contains("stood still") && text.contains(state), "{text}");
        assert!(text.contains("keyframe restore"), "{text}");
        assert_eq!(run_state(&monitor), "running");
    }
    make_stand(&env, &mut run, &monitor, state, commands[0]);
    end(&env, run, (state, &monitor), rollbacks, sequence);
}

/// Ends the run, whose guest went back to the same instant `rollbacks` times.
fn end(
    env: &TestEnv,
    mut run: Process,
    (state, monitor): (&str, &Path),
    rollbacks: usize,
    sequence: &mut Sequence,
) {
    env.ok(&["stop", "--name", "guest"]);
    let code = run.wait().code();
    assert_eq!(code, Some(if state == "guest-panicked" { 4 } else { 0 }), "{}", run.report());
    assert_no_errors(&run);

    // A line that the guest printed before a rollback may reach this process after it. The numbers
    // tell where the guest began anew: it had gone on by three lines before each rollback.
    let lines = hash_lines(&run.lines());
    let stretches: Vec<_> = lines.chunk_by(|one, next| one.n < next.n).collect();
    assert_eq!(stretches.len(), rollbacks + 1, "{}", run.report());
    for stretch in &stretches {
        sequence.check(stretch, 3);
    }
    let firsts: Vec<_> = stretches.iter().map(|stretch| stretch[0].n).collect();
    let (least, most) = (firsts[1..].iter().min().unwrap(), firsts[1..].iter().max().unwrap());
    assert!(most - least <= 1, "not the same instant each time: {firsts:?}");
    comes_back(env, monitor, state);
}

/// A restored VM stands still in the state of its checkpoint.
fn comes_back(env: &TestEnv, monitor: &Path, state: &str) {
    let monitor = monitor.with_file_name("restored.sock");
    let place = format!("unix:{},server=on,wait=off", monitor.display());
    let mut restored = env.restore("stood", &["--", "-qmp", &place]);
    wait_until("the restored VM stands still", || monitor.exists() && run_state(&monitor) == state);
    let lines = hash_lines(&restored.lines()).len();
    assert_eq!(lines, 0, "a VM that was {state} runs");
    let mut own = keyframe_qemu::Qmp::connect(&monitor, PATIENCE).unwrap();
    own.quit().unwrap();
    restored.wait();
}

#[test]
fn a_vm_whose_guest_has_powered_off_rolls_back_and_runs() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(2) {
        check(&qemu.path, &["-no-shutdown"], "shutdown", &["poweroff", "poweroff"], &mut sequence);
    }
}

#[test]
fn a_vm_whose_reboot_is_a_shutdown_rolls_back_and_stands_at_the_next_reboot() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(3) {
        let extra = ["-no-shutdown", "-action", "reboot=shutdown"];
        check(&qemu.path, &extra, "shutdown", &["reboot", "reboot"], &mut sequence);
    }
}

#[test]
fn a_vm_whose_guest_has_panicked_rolls_back_and_runs() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(4) {
        let extra = ["-device", "pvpanic", "-action", "panic=pause"];
        // The small guest has no driver for the device.
        let panic = "port /b 0x505 1";
        check(&qemu.path, &extra, "guest-panicked", &[panic, panic], &mut sequence);
    }
}

#[test]
fn a_vm_whose_guest_sleeps_rolls_back_and_runs() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(5) {
        // ACPI's sleep state S3.
        let sleep = "port /w 0x604 0x2400";
        check(&qemu.path, &[], "suspended", &[sleep, sleep], &mut sequence);
    }
}
