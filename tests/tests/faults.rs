//! One test for each fault of `--fault` (crash.rs has `kill`, `stall` and `pause`, budgets.rs
//! `slow-copy`). Each sealed checkpoint is exact. Checkpoints after the fault succeed, and the
//! guest runs on, if the fault allows it.

use keyframe_tests::{
    Boot, ExternalVm, Orphan, Process, Sequence, TestEnv, assert_restores_exactly, hash_lines,
    number, wait_until,
};

fn hashing() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// Starts an audited run with `fault`.
fn start(env: &TestEnv, fault: &str, options: &[&str]) -> Process {
    println!("-- {fault} {}", options.join(" "));
    let common = ["--interval", "300ms", "--name", "guest", "--audit", "audit", "--fault", fault];
    env.start(&[&common, options].concat(), &hashing())
}

/// Asserts that the guest continues its sequence without an error.
fn assert_runs_on(console: &Process, sequence: &mut Sequence) {
    let before = hash_lines(&console.lines()).len();
    wait_until("the guest runs on", || hash_lines(&console.lines()).len() >= before + 3);
    sequence.check(&hash_lines(&console.lines()), 3);
}

/// Asserts that each checkpoint equals its audit copy and that all in the store are readable.
fn assert_all_exact(env: &TestEnv, run: &Process) {
    let errors = run.errors();
    assert!(!errors.contains("AUDIT") && !errors.contains("audit of"), "{}", run.report());
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}

fn assert_newest_goes_on(env: &TestEnv, sequence: &mut Sequence) {
    let mut restored = env.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the newest checkpoint does not go on; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
}

/// A fault that costs one checkpoint: the engine prints the reason once, the next checkpoints are
/// exact, and the run ends with a warning.
fn costs_one_checkpoint(fault: &str, options: &[&str], reason: &str, sequence: &mut Sequence) {
    let env = TestEnv::new();
    let mut run = start(&env, fault, options);
    run.wait_for_error("checkpoint failed");
    assert!(
        run.errors().contains(reason) && run.errors().contains("nothing is lost"),
        "{}",
        run.report()
    );
    let mark = env.list().len();
    run.wait_for("KF READY");
    wait_until("checkpoints are sealed after the fault", || env.list().len() >= mark + 3);
    assert_runs_on(&run, sequence);
    env.ok(&["stop"]);
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    assert!(run.errors().contains(", 1 failed"), "{}", run.report());
    assert_all_exact(&env, &run);
    let newest = number(env.list().last().expect("a checkpoint"), "id");
    assert_restores_exactly(&env, &newest.to_string());
}

#[test]
fn disk_full() {
    let mut sequence = Sequence::new(16);
    // The fault is in the first, complete checkpoint; then in a later one, when most of the guest
    // is stored.
    for nth in ["disk-full:100", "disk-full:30000"] {
        costs_one_checkpoint(nth, &[], "store pages", &mut sequence);
    }
}

#[test]
fn scan_error() {
    let mut sequence = Sequence::new(16);
    costs_one_checkpoint("scan-error:10", &[], "scan for dirty pages", &mut sequence);
    costs_one_checkpoint(
        "scan-error:6",
        &["--strategy", "cow"],
        "scan for dirty pages",
        &mut sequence,
    );
}

#[test]
fn short_read() {
    let mut sequence = Sequence::new(16);
    costs_one_checkpoint("short-read:25", &[], "unexpected end of file", &mut sequence);
    costs_one_checkpoint(
        "short-read:40",
        &["--strategy", "cow"],
        "unexpected end of file",
        &mut sequence,
    );
}

#[test]
fn slow_encoder() {
    let env = TestEnv::new();
    let mut boot = Boot::new("dirty kf.rate=200 kf.mib=16");
    boot.mem_mib = 96;
    // Encoding takes half a second, and a checkpoint is due each 300 ms.
    let options =
        ["--interval", "300ms", "--staging", "256", "--name", "guest", "--fault", "slow-encoder"];
    let mut run = env.start(&options, &boot);
    run.wait_for("KF READY");
    let status = || env.json(&["status", "--json", "--name", "guest"])[0].clone();
    wait_until("checkpoints queue up", || number(&status(), "queued") > 1);
    let before = number(&status(), "sealed");
    wait_until("they are sealed one after the other", || number(&status(), "sealed") >= before + 8);
    let mut last = status();
    wait_until("checkpoints queue up still", || {
        last = status();
        number(&last, "queued") > 1
    });
    let captured = number(&last, "sealed") + number(&last, "queued");
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    let list = env.list();
    assert!(list.len() as u64 >= captured, "{} of {captured} captured ones are sealed", list.len());
    assert!(
        run.errors().contains(&format!("{} checkpoints sealed, 0 failed", list.len())),
        "{}",
        run.report()
    );
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}

#[test]
fn qemu_killed() {
    let mut sequence = Sequence::new(16);
    for (k, phase) in ["precopy", "paused", "copied", "sealing"].into_iter().enumerate() {
        let env = TestEnv::new();
        let mut run = start(&env, &format!("qemu-killed:{phase}:12"), &[]);
        assert_eq!(run.wait().code(), Some(1), "{}", run.report());
        assert!(run.errors().contains("QEMU ended with signal: 9"), "{}", run.report());
        assert!(
            !run.errors().contains("checkpoint failed"),
            "its end is no failure; {}",
            run.report()
        );
        assert_all_exact(&env, &run);
        assert!(env.list().len() >= 3);
        if k % 2 == 1 {
            assert_newest_goes_on(&env, &mut sequence);
        }
    }
}

#[test]
fn qmp_lost() {
    let mut sequence = Sequence::new(16);
    for (phase, on_exit) in [("paused", "kill"), ("precopy", "keep"), ("stopping", "kill")] {
        let env = TestEnv::new();
        let mut run = start(&env, &format!("qmp-lost:{phase}:8"), &["--on-exit", on_exit]);
        let qemu = Orphan::of(&env, &mut run, "guest");
        run.wait_for_error("no more checkpoints are taken; the VM runs on");
        assert!(run.errors().contains("has closed the monitor"), "{}", run.report());
        let sealed = env.list().len();
        assert!(sealed >= 3);
        // The engine stays: the guest runs, no checkpoint is tried, and each request gets the
        // reason.
        assert_runs_on(&run, &mut sequence);
        assert!(run.is_running(), "{}", run.report());
        let status = env.json(&["status", "--json", "--name", "guest"]);
        assert_eq!((&status[0]["state"], number(&status[0], "failed")), (&"unknown".into(), 1));
        assert!(
            status[0]["last_error"].as_str().is_some_and(|e| e.contains("monitor")),
            "{status}"
        );
        env.refused(&["take"], 1, &["no more checkpoints"]);
        env.ok(&["stop"]);
        assert_eq!(run.wait().code(), Some(1), "{}", run.report());
        assert_eq!(env.list().len(), sealed);
        assert_all_exact(&env, &run);
        assert_eq!(qemu.is_running(), on_exit == "keep", "{}", run.report());
        if on_exit == "keep" {
            assert_runs_on(&run, &mut sequence);
        } else if phase == "paused" {
            assert_newest_goes_on(&env, &mut sequence);
        }
    }
}

/// A run that ends with its Nth checkpoint also ends if that one cannot come any more, and treats
/// the VM as `--on-exit` says. Its exit code is a failure.
#[test]
fn qmp_lost_before_the_last_checkpoint_that_was_asked_for() {
    let mut sequence = Sequence::new(16);
    for on_exit in ["kill", "keep"] {
        let env = TestEnv::new();
        let options = ["--on-exit", on_exit, "--count", "100"];
        let mut run = start(&env, "qmp-lost:precopy:8", &options);
        let qemu = Orphan::of(&env, &mut run, "guest");
        assert_eq!(run.wait().code(), Some(1), "{}", run.report());
        run.wait_for_error("no more checkpoints are taken");
        let sealed = env.list().len();
        assert!(sealed >= 3);
        run.wait_for_error(&format!(
            "the 100 checkpoints of --count cannot be reached: {sealed} are sealed"
        ));
        assert_eq!(qemu.is_running(), on_exit == "keep", "{}", run.report());
        if on_exit == "keep" {
            assert_runs_on(&run, &mut sequence);
        }
        assert_all_exact(&env, &run);
    }
}

#[test]
fn qmp_lost_of_a_vm_that_was_attached_to() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let mut vm = ExternalVm::start(&env, &hashing());
    vm.console.wait_for("KF READY");
    let monitor = vm.socket("a");
    let attach = |options: &[&str]| {
        let all =
            [&["--interval", "300ms", "--audit", "audit", "--name", "guest"], options].concat();
        env.run(
            &env.attach_args(&["--qmp", &monitor], vm.console.pid(), &all)
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>(),
        )
    };
    let output = attach(&["--fault", "qmp-lost:paused:4"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no more checkpoints are taken") && said.contains("detached"), "{said}");
    assert!(vm.is_running(), "it was left paused: {said}");
    assert_runs_on(&vm.console, &mut sequence);
    // Three checkpoints; fewer if one failed or a pause was repeated, as on a busy machine. Each
    // failure is printed, so that none is missing silently.
    let (sealed, failed) = (env.list().len(), said.matches("checkpoint failed").count());
    assert!((1..=3).contains(&sealed) && sealed + failed <= 4, "{said}");
    assert!(said.contains(&format!("{sealed} checkpoints sealed, {failed} failed")), "{said}");
    // The VM's monitor works; the next engine finds it.
    let output = attach(&["--count", "2"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(env.list().len(), sealed + 2);
    assert_runs_on(&vm.console, &mut sequence);
}
