//! Tests the death of the engine at any time: the guest runs on, the store stays readable, and each
//! sealed checkpoint restores.

use keyframe_tests::{
    Boot, Orphan, PATIENCE, Process, Scope, Sequence, TestEnv, hash_lines, number, record_skip,
    seed, wait_until,
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

/// Asserts the state after the engine died: QEMU alone holds the console's pipe and the guest still
/// prints, the store is whole, and the newest checkpoint restores and continues exactly.
fn assert_survived(
    env: &TestEnv,
    run: &mut Process,
    qemu: &Orphan,
    sequence: &mut Sequence,
    context: &str,
) {
    let before = run.lines().len();
    // `wait_for` would stop at once, because the engine has ended.
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
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    let sealed = env.list();
    assert!(!sealed.is_empty(), "{context}: nothing was sealed");
}

fn assert_newest_goes_on(env: &TestEnv, sequence: &mut Sequence, context: &str) {
    let mut restored = env.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(
        grown.is_some(),
        "{context}: the newest checkpoint does not go on; {}",
        restored.report()
    );
    sequence.check(&hash_lines(&restored.lines()), 4);
}

/// Checkpoints are requested. With a fixed interval the fault could come before the guest has
/// booted on a busy machine.
fn take_until_it_ends(env: &TestEnv, run: &mut Process) {
    for _ in 0..30 {
        env.run(&["take", "--name", "guest"]);
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
        let env = TestEnv::new();
        // The first checkpoints succeed; then the engine dies in one, while the guest runs its
        // workload.
        let fault = format!("kill:{phase}:{}", 12 + k % 3);
        let mut run =
            env.start(&["--interval", "10m", "--name", "guest", "--fault", &fault], &boot());
        run.wait_for("KF READY");
        let qemu = Orphan::of(&env, &mut run, "guest");
        take_until_it_ends(&env, &mut run);
        let exit = run.wait();
        assert!(!exit.success(), "it was not killed; {}", run.report());
        assert_survived(&env, &mut run, &qemu, &mut sequence, phase);
        if k % 3 == 0 {
            assert_newest_goes_on(&env, &mut sequence, phase);
        }
    }
}

#[test]
fn an_engine_killed_at_random_moments_loses_nothing() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let seed = seed();
    println!("KEYFRAME_TEST_SEED={seed} draws the moments");
    // Spread over all bits, because xorshift yields small numbers for small seeds; it needs a seed
    // other than 0.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for round in 0..4 {
        let mut run = env.start(&["--interval", "50ms", "--name", "guest"], &boot());
        run.wait_for("KF READY");
        let qemu = Orphan::of(&env, &mut run, "guest");
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        std::thread::sleep(Duration::from_micros(200_000 + state % 400_000));
        run.signal(Signal::KILL);
        run.wait();
        assert_survived(&env, &mut run, &qemu, &mut sequence, &format!("round {round}"));
    }
    assert_newest_goes_on(&env, &mut sequence, "after four kills");
}

#[test]
fn a_stalled_engine_does_not_hold_the_guest() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
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
    let mut run = env.start(&options, &boot());
    run.wait_for("KF READY");
    // The engine stalls in a pause for ten minutes; the guest must print long before that.
    let stalled = run.wait_until(|_| {
        let status = env.json(&["status", "--json", "--name", "guest"]);
        (number(&status[0], "sealed") >= 11).then_some(())
    });
    assert!(stalled.is_some(), "{}", run.report());
    std::thread::sleep(Duration::from_secs(2));
    let before = hash_lines(&run.lines()).len();
    let printed = run.wait_until(|p| (hash_lines(&p.lines()).len() >= before + 5).then_some(()));
    assert!(printed.is_some(), "the guest is held by a stalled engine; {}", run.report());
    let qemu = Orphan::of(&env, &mut run, "guest");
    run.signal(Signal::KILL);
    run.wait();
    // The failure stays visible.
    let shown = env.json(&["status", "--json"]);
    assert_eq!(
        (&shown[0]["kind"], number(&shown[0], "qemu_pid")),
        (&"orphan".into(), qemu.pid().into()),
        "{shown}"
    );
    assert!(env.ok(&["status"]).contains("keyframe stop --name guest"));
    env.ok(&["stop", "--name", "guest"]);
    wait_until("the VM has ended", || !qemu.is_running());
    assert_eq!(env.json(&["status", "--json"]), serde_json::json!([]));
    sequence.check(&hash_lines(&run.lines()), 5);
    let sealed = env.list().len();
    assert!(sealed >= 11, "{sealed} checkpoints");
    assert_newest_goes_on(&env, &mut sequence, "stalled");
}

#[test]
fn a_torn_pause_is_dropped_and_the_next_checkpoint_is_exact() {
    let env = TestEnv::new();
    // The engine stalls once for longer than the limit, then continues. The guest ran during that
    // checkpoint, so it must not be sealed.
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
    let mut run = env.start(&options, &boot());
    run.wait_for("KF READY");
    run.wait_for_error("the VM ran during the pause");
    let mark = env.list().len();
    let taken = run.wait_until(|_| (env.list().len() >= mark + 3).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    env.ok(&["stop"]);
    assert_eq!(run.wait().code(), Some(3), "a failed checkpoint is a warning; {}", run.report());
    assert!(!run.errors().contains("AUDIT"), "{}", run.report());
}

#[test]
fn a_vm_that_ends_in_a_checkpoint_ends_the_run_cleanly() {
    let env = TestEnv::new();
    let mut run = env.start(&["--interval", "10ms", "--name", "guest"], &boot());
    run.wait_for("KF READY");
    run.type_line("poweroff");
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    // The engine is killed from outside while it takes checkpoints without a break.
    let mut run = env.start(&["--interval", "10ms", "--name", "guest"], &boot());
    run.wait_for("KF READY");
    Orphan::of(&env, &mut run, "guest").kill();
    let exit = run.wait();
    assert_eq!(exit.code(), Some(1), "{}", run.report());
    assert!(run.errors().contains("QEMU ended"), "{}", run.report());
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}

/// Runs a guest into a store on a file system of 160 MiB, of which `ballast_mib` are taken, until it is
/// full. `cure`, shell commands beside the run, begin once the file `free` is there. `$S` is the
/// store, `$K` Keyframe, `$B` the ballast. Returns `None`, and records a skip, without permission.
fn run_until_full(env: &TestEnv, ballast_mib: u32, cure: &str) -> Option<Process> {
    let small = env.path().join("small");
    std::fs::create_dir(&small).unwrap();
    // A small file system, in a mount namespace that ends with the engine.
    let store = small.join("store").display().to_string();
    let line = boot().command().iter().map(|a| format!("'{a}'")).collect::<Vec<_>>().join(" ");
    let script = format!(
        "export S={store} K={keyframe} B={small}/ballast && \
         mount -t tmpfs -o size=160m none {small} && $K init $S && \
         fallocate -l {ballast_mib}M $B && \
         {{ (while [ ! -e {env}/free ]; do kill -0 $$ || exit; sleep 0.1; done; \
             {{ {cure}; }} >{env}/cure 2>&1; echo rc $? >>{env}/cure) & }} && \
         exec $K run --store $S --interval 200ms --name guest --audit {env}/audit -- {line}",
        small = small.display(),
        env = env.path().display(),
        keyframe = keyframe_tests::keyframe().display(),
    );
    let mut command = std::process::Command::new("unshare");
    command.args(["-m", "sh", "-c", &script]).env("XDG_RUNTIME_DIR", env.path());
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
        record_skip(Scope::Test, format!("no permission for a mount namespace: {errors}"));
        return None;
    }
    Some(run)
}

/// Fills a store, and makes room by `cure`, which prints `words`; the run seals further checkpoints.
fn fill_and_cure(ballast_mib: u32, cure: &str, words: &[&str]) {
    let env = TestEnv::without_store();
    let Some(mut run) = run_until_full(&env, ballast_mib, cure) else { return };
    let sealed = || number(&env.json(&["status", "--json", "--name", "guest"])[0], "sealed");
    let before = sealed();
    let failing = || env.json(&["status", "--json", "--name", "guest"])[0]["failing"].clone();
    wait_until("the status tells that the store is full", || failing() == "store full");
    let told = env.ok(&["status", "--name", "guest"]);
    assert!(told.contains("running") && told.contains(", FAILING: store full"), "{told}");
    std::fs::write(env.path().join("free"), "").unwrap();
    let cured = run.wait_until(|_| {
        let told = std::fs::read_to_string(env.path().join("cure")).unwrap_or_default();
        (told.contains("rc ") && sealed() > before).then_some(told)
    });
    let told =
        cured.unwrap_or_else(|| panic!("no checkpoint after there was room; {}", run.report()));
    assert!(told.ends_with("rc 0\n"), "{told}");
    assert!(words.iter().all(|word| told.contains(word)), "{told}");
    wait_until("the status tells that checkpoints are sealed", || failing().is_null());
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    // The audit compared each sealed checkpoint, also those after the failures.
    assert!(
        !run.errors().contains("AUDIT") && !run.errors().contains("audit of"),
        "{}",
        run.report()
    );
}

/// Nothing is sealed, so nothing can be brought back: no hint says so.
#[test]
fn a_store_that_stays_full_is_told_by_the_exit_code() {
    let env = TestEnv::without_store();
    let Some(mut run) = run_until_full(&env, 155, "true") else { return };
    let status = env.json(&["status", "--json", "--name", "guest"]);
    assert_eq!((&status[0]["failing"], &status[0]["sealed"]), (&"store full".into(), &0.into()));
    env.ok(&["stop", "--name", "guest"]);
    assert_eq!(run.wait().code(), Some(12), "{}", run.report());
    assert!(!run.errors().contains("keyframe restore"), "{}", run.report());
}

#[test]
fn a_full_disk_loses_nothing_and_checkpoints_go_on_when_there_is_room() {
    fill_and_cure(130, "rm $B", &[]);
}

#[test]
fn a_prune_on_a_full_disk_makes_room_for_the_run_beside_it() {
    let cure = "$K forget --store $S --keep-last 1 && $K prune --store $S";
    fill_and_cure(90, cure, &["removed", "rewritten"]);
}
