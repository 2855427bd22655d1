//! Whatever happens to the engine: the guest runs on, the store is readable, every sealed
//! checkpoint restores.

use keyframe_tests::{
    Bench, Boot, Orphan, PATIENCE, Process, Sequence, hash_lines, number, seed, skip, until,
};
use rustix::process::Signal;
use std::time::{Duration, Instant};

const PHASES: [&str; 9] = [
    "precopy",
    "stopping",
    "paused",
    "copied",
    "device-state",
    "resumed",
    "encoding",
    "sealing",
    "sealed",
];

/// The engine is gone; its console pipe now belongs to QEMU alone. The guest must still print, the
/// store must be whole, the newest checkpoint must restore and go on exactly.
fn assert_survived(
    bench: &Bench,
    run: &mut Process,
    qemu: &Orphan,
    sequence: &mut Sequence,
    context: &str,
) {
    let before = run.lines().len();
    // Not by what waits for the engine: that has ended.
    let deadline = Instant::now() + PATIENCE;
    let prints =
        |run: &Process| hash_lines(&run.lines()).len() >= 3 && run.lines().len() >= before + 3;
    while !prints(run) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let alive = prints(run);
    let console = run.lines();
    qemu.kill();
    assert!(alive, "{context}: the guest stands still; {}", run.report());
    sequence.check(&hash_lines(&console), 3);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    let sealed = bench.list();
    assert!(!sealed.is_empty(), "{context}: nothing was sealed");
}

fn assert_newest_goes_on(bench: &Bench, sequence: &mut Sequence, context: &str) {
    let mut restored = bench.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(
        grown.is_some(),
        "{context}: the newest checkpoint does not go on; {}",
        restored.report()
    );
    sequence.check(&hash_lines(&restored.lines()), 4);
}

/// Checkpoints by request: by the clock the fault would come before the guest has booted, where the
/// machine is busy.
fn take_until_it_ends(bench: &Bench, run: &mut Process) {
    for _ in 0..30 {
        bench.run(&["take", "--name", "guest"]);
        if !run.is_running() {
            return;
        }
    }
}

fn boot() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

#[test]
fn an_engine_killed_at_any_phase_loses_nothing() {
    let mut sequence = Sequence::new(16);
    for (k, phase) in PHASES.into_iter().enumerate() {
        println!("-- killed at {phase}");
        let bench = Bench::new();
        // The first few checkpoints pass; then it dies in the middle of one, with the guest in its
        // workload.
        let fault = format!("kill:{phase}:{}", 12 + k % 3);
        let mut run =
            bench.start(&["--interval", "10m", "--name", "guest", "--fault", &fault], &boot());
        run.wait_for("KF READY");
        let qemu = Orphan::of(&bench, &mut run, "guest");
        take_until_it_ends(&bench, &mut run);
        let exit = run.wait();
        assert!(!exit.success(), "it was not killed; {}", run.report());
        assert_survived(&bench, &mut run, &qemu, &mut sequence, phase);
        if k % 3 == 0 {
            assert_newest_goes_on(&bench, &mut sequence, phase);
        }
    }
}

#[test]
fn an_engine_killed_at_random_moments_loses_nothing() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let seed = seed();
    println!("KEYFRAME_TEST_SEED={seed} draws the moments");
    // Spread over all bits: xorshift gives small numbers for small ones, and needs one but 0.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for round in 0..4 {
        let mut run = bench.start(&["--interval", "50ms", "--name", "guest"], &boot());
        run.wait_for("KF READY");
        let qemu = Orphan::of(&bench, &mut run, "guest");
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        std::thread::sleep(Duration::from_micros(200_000 + state % 400_000));
        run.signal(Signal::KILL);
        run.wait();
        assert_survived(&bench, &mut run, &qemu, &mut sequence, &format!("round {round}"));
    }
    assert_newest_goes_on(&bench, &mut sequence, "after four kills");
}

#[test]
fn a_stalled_engine_does_not_hold_the_guest() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let options = [
        "--interval",
        "400ms",
        "--name",
        "guest",
        "--pause-limit",
        "500ms",
        "--fault",
        "stall:copied:12",
    ];
    let mut run = bench.start(&options, &boot());
    run.wait_for("KF READY");
    // It stalls for ten minutes in a pause; the guest must print on long before that.
    let stalled = run.wait_until(|_| {
        let status = bench.json(&["status", "--json", "--name", "guest"]);
        (number(&status[0], "sealed") >= 11).then_some(())
    });
    assert!(stalled.is_some(), "{}", run.report());
    std::thread::sleep(Duration::from_secs(2));
    let before = hash_lines(&run.lines()).len();
    let printed = run.wait_until(|p| (hash_lines(&p.lines()).len() >= before + 5).then_some(()));
    assert!(printed.is_some(), "the guest is held by a stalled engine; {}", run.report());
    let qemu = Orphan::of(&bench, &mut run, "guest");
    run.signal(Signal::KILL);
    run.wait();
    // It is not forgotten.
    let shown = bench.json(&["status", "--json"]);
    assert_eq!(
        (&shown[0]["kind"], number(&shown[0], "qemu_pid")),
        (&"orphan".into(), qemu.pid().into()),
        "{shown}"
    );
    assert!(bench.ok(&["status"]).contains("keyframe stop --name guest"));
    bench.ok(&["stop", "--name", "guest"]);
    until("the VM has ended", || !qemu.is_running());
    assert_eq!(bench.json(&["status", "--json"]), serde_json::json!([]));
    sequence.check(&hash_lines(&run.lines()), 5);
    let sealed = bench.list().len();
    assert!(sealed >= 11, "{sealed} checkpoints");
    assert_newest_goes_on(&bench, &mut sequence, "stalled");
}

#[test]
fn a_torn_pause_is_dropped_and_the_next_checkpoint_is_exact() {
    let bench = Bench::new();
    // Stalls once for longer than the limit, then goes on by itself: the checkpoint in which the
    // guest ran must not be sealed.
    let options = [
        "--interval",
        "400ms",
        "--name",
        "guest",
        "--pause-limit",
        "3s",
        "--audit",
        "audit",
        "--fault",
        "pause:copied:12",
    ];
    let mut run = bench.start(&options, &boot());
    run.wait_for("KF READY");
    run.wait_for_error("the VM ran during the pause");
    let mark = bench.list().len();
    let taken = run.wait_until(|_| (bench.list().len() >= mark + 3).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    bench.ok(&["stop"]);
    assert_eq!(run.wait().code(), Some(3), "a failed checkpoint is a warning; {}", run.report());
    assert!(!run.errors().contains("AUDIT"), "{}", run.report());
}

#[test]
fn a_vm_that_ends_in_a_checkpoint_ends_the_run_cleanly() {
    let bench = Bench::new();
    let mut run = bench.start(&["--interval", "10ms", "--name", "guest"], &boot());
    run.wait_for("KF READY");
    run.say("poweroff");
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    // Killed from outside, in the middle of back-to-back checkpoints.
    let mut run = bench.start(&["--interval", "10ms", "--name", "guest"], &boot());
    run.wait_for("KF READY");
    Orphan::of(&bench, &mut run, "guest").kill();
    let exit = run.wait();
    assert_eq!(exit.code(), Some(1), "{}", run.report());
    assert!(run.errors().contains("QEMU ended"), "{}", run.report());
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
}

#[test]
fn a_full_disk_loses_nothing_and_checkpoints_go_on_when_there_is_room() {
    let bench = Bench::without_store();
    let small = bench.path().join("small");
    std::fs::create_dir(&small).unwrap();
    // A small file system of its own, in a mount namespace that ends with the engine.
    let store = small.join("store").display().to_string();
    let line = boot().command().iter().map(|a| format!("'{a}'")).collect::<Vec<_>>().join(" ");
    let script = format!(
        "mount -t tmpfs -o size=160m none {small} && {keyframe} init {store} && \
         fallocate -l 130M {small}/ballast && \
         {{ (while [ ! -e {bench}/free ]; do sleep 0.1; done; rm {small}/ballast) & }} && \
         exec {keyframe} run --store {store} --interval 200ms --name guest --audit {bench}/audit -- {line}",
        small = small.display(),
        bench = bench.path().display(),
        keyframe = keyframe_tests::keyframe().display(),
    );
    let mut command = std::process::Command::new("unshare");
    command.args(["-m", "sh", "-c", &script]).env("XDG_RUNTIME_DIR", bench.path());
    let mut run = Process::start(command);
    let full = run.wait_until(|p| {
        let errors = p.errors();
        (errors.contains("No space left")
            || errors.contains("unshare")
            || errors.contains("mount:"))
        .then_some(errors)
    });
    let errors = full.unwrap_or_else(|| panic!("the disk never filled; {}", run.report()));
    if errors.contains("unshare:") || errors.contains("mount:") {
        skip!("no permission for a mount namespace: {errors}");
    }
    let before = bench.json(&["status", "--json", "--name", "guest"]);
    std::fs::write(bench.path().join("free"), "").unwrap();
    let went_on = run.wait_until(|_| {
        let status = bench.json(&["status", "--json", "--name", "guest"]);
        (number(&status[0], "sealed") > number(&before[0], "sealed")).then_some(())
    });
    assert!(went_on.is_some(), "no checkpoint after there was room; {}", run.report());
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    // The audit compared every sealed checkpoint, those after the failures too.
    assert!(
        !run.errors().contains("AUDIT") && !run.errors().contains("audit of"),
        "{}",
        run.report()
    );
}
