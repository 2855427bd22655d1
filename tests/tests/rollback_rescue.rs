//! Tests the death of an engine in the middle of a rollback: the VM runs on, as exactly the target
//! or as exactly what it was, its disks are those of its RAM, and nothing is left behind.
//!
//! The steps of the fault: 1, the VM is paused; 2, its state is kept; 3, its disks are exchanged;
//! 4, the load is prepared; 5, QEMU is about to load; 6, it has loaded; 7, RAM is compared; 8, the
//! VM is complete.

use crate::rollback_flash::boot as flash_boot;
use keyframe_qemu::Qmp;
use keyframe_tests::journaling::{
    blank_image, journaling, records_of, wait_for_more_records, wait_for_records,
};
use keyframe_tests::rollbacks::{grow, hashing, newest, overlays, rows, take};
use keyframe_tests::{
    Boot, ExternalVm, HashLine, Orphan, PATIENCE, PassSequence, Process, Qemu, Sequence, TestEnv,
    chosen_qemus, differing_pages, distribution_qemu, hash_lines, journal_counter, live_ram,
    pass_lines, stored_ram, variants, wait_until,
};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// How a VM is killed in a rollback, and what it is afterwards.
#[derive(Clone, Copy, Debug)]
struct Kill {
    fault: &'static str,
    fast: bool,
    /// Whether it is the target; `None` if that depends on the moment.
    is_target: Option<bool>,
}

const fn kill(fault: &'static str, fast: bool, is_target: Option<bool>) -> Kill {
    Kill { fault, fast, is_target }
}

const KILLS: [Kill; 14] = [
    kill("kill-rollback:6", false, Some(true)),
    kill("kill-rollback:3", true, Some(false)),
    kill("kill-rollback-soon:5", false, None),
    kill("kill-rollback:5", false, Some(false)),
    kill("kill-rollback:7", true, Some(true)),
    kill("kill-rollback:4", false, Some(false)),
    kill("kill-rollback-soon:4", true, None),
    kill("kill-rollback:8", false, Some(true)),
    kill("kill-rollback:1", true, Some(false)),
    kill("kill-rollback:6", true, Some(true)),
    kill("kill-rollback:2", false, Some(false)),
    kill("kill-rollback-soon:3", false, None),
    kill("kill-rollback:5", true, Some(false)),
    kill("kill-rollback:8", true, Some(true)),
];

/// Starts VM `guest`, whose engine `fault` kills, and waits for its guest.
fn start(env: &TestEnv, boot: &Boot, fault: &str) -> Process {
    let mut run = env.start(&["--interval", "none", "--name", "guest", "--fault", fault], boot);
    run.wait_for("KF READY");
    run
}

/// A hashing VM with a checkpoint, whose engine a fault kills in a rollback.
struct Victim {
    env: TestEnv,
    /// The VM's monitor of the test's own.
    monitor: PathBuf,
    run: Process,
    /// The checkpoint.
    target: u64,
    orphan: Orphan,
}

/// Starts a VM of `qemu` with the arguments `extra`, whose engine `fault` kills. Takes a
/// checkpoint, after which the guest prints `more` lines.
fn victim(env: TestEnv, qemu: &Qemu, extra: &[&str], fault: &str, more: usize) -> Victim {
    let (boot, monitor) = hashing(&env, qemu);
    let mut run = start(&env, &boot.with(extra), fault);
    grow(&mut run, 3);
    let target = take(&env);
    grow(&mut run, more);
    let orphan = Orphan::of(&env, &mut run, "guest");
    Victim { env, monitor, run, target, orphan }
}

/// Rolls the VM back until its engine is killed.
fn roll_back(env: &TestEnv, run: &mut Process, target: u64, fast: bool) {
    let target = target.to_string();
    let mut line = vec!["rollback", &target, "--name", "guest"];
    if fast {
        line.push("--fast");
    }
    let killed = env.run(&line);
    let told = String::from_utf8_lossy(&killed.stderr);
    assert!(
        !killed.status.success() && !told.contains("as it was"),
        "the fault did not strike: {told}"
    );
    run.wait();
}

fn ask(monitor: &Path, command: &str) -> Value {
    let mut own = Qmp::connect(monitor, PATIENCE).expect("its monitor");
    own.execute(command, None).expect(command)
}

fn state(monitor: &Path) -> String {
    ask(monitor, "query-status")["status"].as_str().expect("a state").to_owned()
}

/// Waits until the rescue has ended, as the note in the run directory tells.
fn rescued(env: &TestEnv) -> String {
    let note = env.path().join("keyframe/guest/rollback.txt");
    let told = || std::fs::read_to_string(&note).is_ok_and(|text| text.ends_with('\n'));
    wait_until("the watchdog has told of the rescue", told);
    std::fs::read_to_string(note).expect("the note")
}

/// Asserts that neither the engine nor the rescue has left anything in QEMU.
fn assert_nothing_is_left(monitor: &Path, settings: &Value) {
    assert_eq!(&ask(monitor, "query-migrate-capabilities"), settings, "the user's settings");
    let has = |command: &str, text: &str| ask(monitor, command).to_string().contains(text);
    assert!(!has("query-named-block-nodes", "keyframe-rollback"), "the image is left");
    assert_eq!(ask(monitor, "query-jobs"), json!([]));
    wait_until("QEMU has forgotten the files", || !has("query-fdsets", "keyframe-"));
}

/// Switches on a capability with which QEMU does not load a snapshot.
fn disturb(monitor: &Path) -> Value {
    let mut own = Qmp::connect(monitor, PATIENCE).expect("its monitor");
    let on = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
    own.execute("migrate-set-capabilities", Some(on)).expect("a capability");
    drop(own);
    ask(monitor, "query-migrate-capabilities")
}

/// Asserts that the RAM of QEMU `pid` is that of checkpoint `id`.
fn assert_ram_is(env: &TestEnv, pid: u32, monitor: &Path, id: u64) {
    let (names, wanted) = stored_ram(Path::new(&env.store()), id);
    let live = live_ram(pid, monitor, &names);
    assert_eq!(differing_pages(&live, &wanted), [0; 0]);
}

/// Asserts that each row of lines is the sequence.
fn check_rows(sequence: &mut Sequence, lines: &[HashLine]) {
    for row in rows(lines) {
        sequence.check(row, 1);
    }
}

#[test]
fn a_vm_whose_engine_is_killed_in_a_rollback_runs_on() {
    let mut sequence = Sequence::new(16);
    for (turn, kill) in variants(KILLS, 4).into_iter().enumerate() {
        for qemu in chosen_qemus(turn as u64) {
            println!("-- {kill:?}, QEMU {}", qemu.label);
            let Victim { env, monitor, mut run, target, orphan } =
                victim(TestEnv::new(), &qemu, &[], kill.fault, 6);
            let settings = disturb(&monitor);
            let far = hash_lines(&run.lines()).last().expect("a line").n;
            roll_back(&env, &mut run, target, kill.fast);
            wait_until("the VM runs", || state(&monitor) == "running");
            let skip = hash_lines(&run.lines()).len();
            let more = || hash_lines(&run.lines()).len() >= skip + 4;
            wait_until("the guest goes on without its engine", more);
            let lines = hash_lines(&run.lines());
            check_rows(&mut sequence, &lines);
            let rows = rows(&lines);
            let is_target = rows.len() == 2;
            assert!(
                rows.len() <= 2 && kill.is_target.is_none_or(|it| it == is_target),
                "{lines:?}"
            );
            assert!(!is_target || rows[1][0].n < far, "it did not go back");
            assert_nothing_is_left(&monitor, &settings);
            attach_again(&env, &orphan, &mut run);
            orphan.kill();
            env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
        }
    }
}

/// A new engine takes the VM on, as after any engine that was killed.
fn attach_again(env: &TestEnv, orphan: &Orphan, run: &mut Process) {
    let before = newest(env);
    let (pid, qmp) = (orphan.pid().to_string(), orphan.qmp.display().to_string());
    let store = env.store();
    let line = ["attach", &pid, "--qmp", &qmp, "--store", &store, "--name", "again"];
    let mut engine = Process::start(env.command(&[&line[..], &["--interval", "none"]].concat()));
    engine.wait_for_error("by `keyframe take`");
    env.ok(&["take", "--name", "again"]);
    assert!(newest(env) > before);
    let lines = hash_lines(&run.lines()).len();
    env.ok(&["rollback", "latest", "--name", "again"]);
    wait_until("the guest goes on", || hash_lines(&run.lines()).len() > lines + 2);
    env.ok(&["stop", "--name", "again"]);
    assert!(engine.wait().success(), "{}", engine.report());
}

/// A VM that its user paused is exactly the target, or exactly what it was, to the last byte, and
/// stays paused.
#[test]
fn a_paused_vm_whose_engine_is_killed_in_a_rollback_is_exact_and_stays_paused() {
    let kills = KILLS.into_iter().filter(|kill| !kill.fault.ends_with(":1") && !kill.fast);
    for (turn, kill) in variants(kills, 2).into_iter().enumerate() {
        for qemu in chosen_qemus(turn as u64 + 1) {
            println!("-- {kill:?}, QEMU {}", qemu.label);
            let Victim { env, monitor, mut run, target, orphan } =
                victim(TestEnv::new(), &qemu, &[], kill.fault, 3);
            Qmp::connect(&monitor, PATIENCE).expect("its monitor").stop().expect("stop");
            let told = || env.json(&["status", "--json"])[0]["state"] == "paused";
            wait_until("the engine sees the pause", told);
            roll_back(&env, &mut run, target, false);
            let is_target = if kill.fault == "kill-rollback:8" {
                true
            } else {
                rescued(&env).contains(&format!("is checkpoint {target}"))
            };
            assert!(kill.is_target.is_none_or(|it| it == is_target), "{}", run.report());
            let is_now = if is_target { target } else { newest(&env) };
            assert_ram_is(&env, orphan.pid(), &monitor, is_now);
            assert!(matches!(&*state(&monitor), "paused" | "prelaunch"), "{}", state(&monitor));
            let lines = hash_lines(&run.lines()).len();
            Qmp::connect(&monitor, PATIENCE).expect("its monitor").cont().expect("cont");
            wait_until("the guest goes on", || hash_lines(&run.lines()).len() > lines + 2);
            let mut sequence = Sequence::new(16);
            check_rows(&mut sequence, &hash_lines(&run.lines()));
        }
    }
}

/// RAM and disk are of one instant, whichever that is.
#[test]
fn a_vm_with_a_disk_whose_engine_is_killed_in_a_rollback_runs_on() {
    for (turn, kill) in variants(KILLS, 4).into_iter().enumerate() {
        for qemu in chosen_qemus(turn as u64) {
            println!("-- {kill:?}, QEMU {}", qemu.label);
            let env = TestEnv::new();
            let image = blank_image(&env, "disk");
            let mut run = start(&env, &journaling(&qemu, &image), kill.fault);
            wait_for_records(&mut run, 0, 100);
            let target = take(&env);
            let far = wait_for_more_records(&mut run, 300);
            let orphan = Orphan::of(&env, &mut run, "guest");
            let skip = run.lines().len();
            roll_back(&env, &mut run, target, kill.fast);
            let since = |lines: &[String]| {
                let told = |line| journal_counter(std::slice::from_ref(line), "written=");
                lines.iter().skip(skip).map(told).filter(|n| *n > 0).collect::<Vec<_>>()
            };
            // More records than the ring holds: the guest reads each block before it overwrites it.
            let goes_on = || {
                let told = since(&run.lines());
                let first = told.iter().min().copied().unwrap_or(u64::MAX);
                told.last().is_some_and(|last| *last > first.saturating_add(400))
            };
            wait_until("the guest goes on without its engine", goes_on);
            records_of(&run.lines());
            let went_back = since(&run.lines()).iter().any(|n| *n < far);
            assert!(kill.is_target.is_none_or(|it| it == went_back), "{}", run.report());
            wait_until("the other disk is removed", || overlays(&env) == 1);
            let left = env.path().join("keyframe/guest/heir.sock");
            wait_until("the server waits for no heir", || !left.exists());
            orphan.kill();
            env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
        }
    }
}

/// The engine has the VM's only connection to its monitor, and QEMU is as it was before.
#[test]
fn an_attached_vm_whose_engine_is_killed_in_a_rollback_runs_on() {
    for kill in variants(KILLS, 2) {
        println!("-- {kill:?}");
        let env = TestEnv::new();
        let mut boot = Boot::new("hash");
        boot.mem_mib = 96;
        let mut vm = ExternalVm::start(&env, &boot);
        vm.console.wait_for("KF READY");
        let traces = vm.traces();
        let options = ["--interval", "none", "--fault", kill.fault];
        let mut engine = env.attach(&vm, &options);
        engine.wait_for_error("by `keyframe take`");
        grow(&mut vm.console, 3);
        let target = take(&env);
        grow(&mut vm.console, 5);
        roll_back(&env, &mut engine, target, kill.fast);
        wait_until("the VM runs", || vm.is_running());
        grow(&mut vm.console, 4);
        vm.assert_unchanged_since(&traces);
        let lines = hash_lines(&vm.console.lines());
        let rows = rows(&lines);
        assert!(kill.is_target.is_none_or(|it| it == (rows.len() == 2)), "{lines:?}");
        let mut sequence = Sequence::new(16);
        check_rows(&mut sequence, &lines);
    }
}

/// The machine is reset before the load, so it cannot be put back as it was: it becomes the target.
#[test]
fn a_vm_that_stood_still_runs_as_the_target_after_its_engine_was_killed() {
    for (step, is_target) in variants([(5, true), (4, false), (6, true), (7, true)], 2) {
        println!("-- killed at step {step}");
        let (qemu, fault) = (distribution_qemu(), format!("kill-rollback:{step}"));
        let Victim { env, monitor, mut run, target, orphan } =
            victim(TestEnv::new(), &qemu, &["-no-shutdown"], &fault, 3);
        run.type_line("poweroff");
        wait_until("the guest has powered off", || state(&monitor) == "shutdown");
        let lines = hash_lines(&run.lines()).len();
        roll_back(&env, &mut run, target, false);
        let told = rescued(&env);
        assert_eq!(told.contains(&format!("is checkpoint {target}")), is_target, "{told}");
        if is_target {
            wait_until("the guest goes on", || hash_lines(&run.lines()).len() > lines + 2);
        } else {
            assert_eq!(state(&monitor), "shutdown");
        }
        let mut sequence = Sequence::new(16);
        check_rows(&mut sequence, &hash_lines(&run.lines()));
        orphan.kill();
    }
}

/// QEMU fails to load the target, and the engine is killed on the way back to the checkpoint that
/// it took before: the VM runs on as it was.
#[test]
fn a_vm_whose_engine_is_killed_on_the_way_back_is_as_it_was() {
    for fault in variants(["kill-rollback:8", "kill-rollback:9", "kill-rollback-soon:8"], 2) {
        println!("-- {fault}");
        let env = TestEnv::new();
        let (boot, monitor) = hashing(&env, &distribution_qemu());
        // Only QEMU sees this difference, as it loads the devices.
        let other = boot.clone().with(&["-device", "virtio-rng-pci,addr=9"]);
        let boot = boot.with(&["-device", "virtio-rng-pci,addr=8"]);
        let mut run = env.start(&["--interval", "none", "--name", "other"], &other);
        run.wait_for("KF READY");
        env.ok(&["take", "--name", "other"]);
        let target = newest(&env);
        env.ok(&["stop", "--name", "other"]);
        assert!(run.wait().success(), "{}", run.report());
        let mut run = start(&env, &boot, fault);
        grow(&mut run, 4);
        let orphan = Orphan::of(&env, &mut run, "guest");
        roll_back(&env, &mut run, target, false);
        let told = rescued(&env);
        assert!(told.contains(&format!("is checkpoint {}", newest(&env))), "{told}");
        let lines = hash_lines(&run.lines()).len();
        wait_until("the guest goes on", || hash_lines(&run.lines()).len() > lines + 3);
        assert_eq!(state(&monitor), "running");
        Sequence::new(16).check(&hash_lines(&run.lines()), 7);
        orphan.kill();
    }
}

/// The VM of the target stood still, so this one does, too. While its engine dies, its firmware may
/// run for a moment; it has written to no disk then.
#[test]
fn a_vm_whose_engine_is_killed_stands_still_if_the_target_did() {
    let kills =
        ["kill-rollback-soon:14", "kill-rollback:14", "kill-rollback:15", "kill-rollback:16"];
    for fault in variants(kills, 2) {
        println!("-- {fault}");
        let Victim { env, monitor, mut run, target: ran, orphan } =
            victim(TestEnv::new(), &distribution_qemu(), &["-no-shutdown"], fault, 0);
        run.type_line("poweroff");
        wait_until("the guest has powered off", || state(&monitor) == "shutdown");
        let stood = take(&env);
        // The first nine steps: this one is reset before its load, too.
        env.ok(&["rollback", &ran.to_string(), "--name", "guest"]);
        grow(&mut run, 3);
        roll_back(&env, &mut run, stood, false);
        let told = rescued(&env);
        assert!(told.contains(&format!("is checkpoint {stood}")), "{told}");
        assert_eq!(state(&monitor), "shutdown");
        assert_ram_is(&env, orphan.pid(), &monitor, stood);
        orphan.kill();
    }
}

/// QEMU crashes if it loads the state of a writable flash chip twice while the VM stands still.
#[test]
fn a_vm_with_a_flash_chip_whose_engine_is_killed_in_a_rollback_runs_on() {
    for kill in variants(KILLS, 2) {
        println!("-- {kill:?}");
        let env = TestEnv::new();
        let boot = flash_boot(&env, &distribution_qemu());
        let mut run = start(&env, &boot, kill.fault);
        let target = take(&env);
        let passes = |run: &Process| pass_lines(&run.lines()).len();
        let before = passes(&run);
        wait_until("the guest goes on", || passes(&run) > before + 3);
        let orphan = Orphan::of(&env, &mut run, "guest");
        roll_back(&env, &mut run, target, kill.fast);
        let monitor = env.path().join("own.sock");
        wait_until("the VM runs", || state(&monitor) == "running");
        let before = passes(&run);
        wait_until("the guest goes on without its engine", || passes(&run) > before + 4);
        assert!(orphan.is_running(), "QEMU has ended");
        let lines = pass_lines(&run.lines());
        let rows: Vec<_> = lines.chunk_by(|a, b| a.n < b.n).collect();
        assert!(kill.is_target.is_none_or(|it| it == (rows.len() == 2)), "{}", run.report());
        let mut sequence = PassSequence::new(1024, 300);
        for row in rows {
            sequence.check(row, 1);
        }
    }
}

/// A rescue reads an encrypted store with the engine's key. Without it, the VM must not run, and
/// the note says what to restore.
#[test]
fn a_rescue_that_cannot_read_the_store_ends_the_vm_and_says_what_to_restore() {
    for has_key in [true, false] {
        let mut env = TestEnv::without_store();
        let key = env.path().join("key");
        std::fs::write(&key, [0x5a; 32]).expect("a key file");
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&key, private).expect("its mode");
        env.ok(&["init", &env.store(), "--encrypt", "--key-file", "key"]);
        env.set("KEYFRAME_KEY_FILE", "key");
        let Victim { mut env, monitor, mut run, target, orphan } =
            victim(env, &distribution_qemu(), &[], "kill-rollback:6", 3);
        env.set("KEYFRAME_KEY_FILE", &env.path().join("other").display().to_string());
        std::fs::rename(&key, env.path().join("other")).expect("a name");
        if has_key {
            std::fs::copy(env.path().join("other"), &key).expect("a copy");
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("mode");
        }
        roll_back(&env, &mut run, target, false);
        let told = rescued(&env);
        if has_key {
            assert!(told.contains(&format!("is checkpoint {target}")), "{told}");
            assert_eq!(state(&monitor), "running");
        } else {
            wait_until("QEMU is ended", || !orphan.is_running());
            let before = newest(&env);
            assert!(before > target, "the state before is sealed");
            assert!(told.contains(&format!("keyframe restore {before} ")), "{told}");
            let mut restored = env.restore(&before.to_string(), &[]);
            grow(&mut restored, 3);
            Sequence::new(16).check(&hash_lines(&restored.lines()), 3);
        }
        orphan.kill();
    }
}
