//! One test for each fault of `--fault` (`kill`, `stall` and `pause` are in crash.rs, `slow-copy`
//! in budgets.rs): every sealed checkpoint is exact, those after the fault are sealed where there
//! can be any, and the guest runs on where it can.

use keyframe_tests::{
    Bench, Boot, Foreign, Orphan, Process, Sequence, assert_restores_exactly, hash_lines, number,
    until,
};

fn hashing() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// Starts an audited run that is to suffer `fault`.
fn start(bench: &Bench, fault: &str, options: &[&str]) -> Process {
    println!("-- {fault} {}", options.join(" "));
    let common = ["--interval", "300ms", "--name", "guest", "--audit", "audit", "--fault", fault];
    bench.start(&[&common, options].concat(), &hashing())
}

/// The guest prints on, and has printed nothing but its sequence.
fn assert_runs_on(console: &Process, sequence: &mut Sequence) {
    let before = hash_lines(&console.lines()).len();
    until("the guest runs on", || hash_lines(&console.lines()).len() >= before + 3);
    sequence.check(&hash_lines(&console.lines()), 3);
}

/// No checkpoint differed from its copy, and all that are in the store can be read.
fn assert_all_exact(bench: &Bench, run: &Process) {
    let errors = run.errors();
    assert!(!errors.contains("AUDIT") && !errors.contains("audit of"), "{}", run.report());
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
}

fn assert_newest_goes_on(bench: &Bench, sequence: &mut Sequence) {
    let mut restored = bench.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the newest checkpoint does not go on; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
}

/// A fault that costs one checkpoint: said once, why; the next ones are exact, and the run ends
/// with a warning.
fn costs_one_checkpoint(fault: &str, options: &[&str], reason: &str, sequence: &mut Sequence) {
    let bench = Bench::new();
    let mut run = start(&bench, fault, options);
    run.wait_for_error("checkpoint failed");
    assert!(
        run.errors().contains(reason) && run.errors().contains("nothing is lost"),
        "{}",
        run.report()
    );
    let mark = bench.list().len();
    run.wait_for("KF READY");
    until("checkpoints are sealed after the fault", || bench.list().len() >= mark + 3);
    assert_runs_on(&run, sequence);
    bench.ok(&["stop"]);
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    assert!(run.errors().contains(", 1 failed"), "{}", run.report());
    assert_all_exact(&bench, &run);
    let newest = number(bench.list().last().expect("a checkpoint"), "id");
    assert_restores_exactly(&bench, &newest.to_string());
}

#[test]
fn disk_full() {
    let mut sequence = Sequence::new(16);
    // In the first, complete checkpoint; and in a later one, in which most of the guest has been
    // stored.
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
    let bench = Bench::new();
    let mut boot = Boot::new("dirty kf.rate=200 kf.mib=16");
    boot.mem_mib = 96;
    // Half a second of encoding for each, and one due each 300 ms.
    let options =
        ["--interval", "300ms", "--staging", "256", "--name", "guest", "--fault", "slow-encoder"];
    let mut run = bench.start(&options, &boot);
    run.wait_for("KF READY");
    let status = || bench.json(&["status", "--json", "--name", "guest"])[0].clone();
    until("checkpoints queue up", || number(&status(), "queued") > 1);
    let before = number(&status(), "sealed");
    until("they are sealed one after the other", || number(&status(), "sealed") >= before + 8);
    let mut last = status();
    until("checkpoints queue up still", || {
        last = status();
        number(&last, "queued") > 1
    });
    let captured = number(&last, "sealed") + number(&last, "queued");
    bench.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    let list = bench.list();
    assert!(list.len() as u64 >= captured, "{} of {captured} captured ones are sealed", list.len());
    assert!(
        run.errors().contains(&format!("{} checkpoints sealed, 0 failed", list.len())),
        "{}",
        run.report()
    );
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
}

#[test]
fn qemu_killed() {
    let mut sequence = Sequence::new(16);
    for (k, phase) in ["precopy", "paused", "copied", "sealing"].into_iter().enumerate() {
        let bench = Bench::new();
        let mut run = start(&bench, &format!("qemu-killed:{phase}:12"), &[]);
        assert_eq!(run.wait().code(), Some(1), "{}", run.report());
        assert!(run.errors().contains("QEMU ended with signal: 9"), "{}", run.report());
        assert!(
            !run.errors().contains("checkpoint failed"),
            "its end is no failure; {}",
            run.report()
        );
        assert_all_exact(&bench, &run);
        assert!(bench.list().len() >= 3);
        if k % 2 == 1 {
            assert_newest_goes_on(&bench, &mut sequence);
        }
    }
}

#[test]
fn qmp_lost() {
    let mut sequence = Sequence::new(16);
    for (phase, on_exit) in [("paused", "kill"), ("precopy", "keep"), ("stopping", "kill")] {
        let bench = Bench::new();
        let mut run = start(&bench, &format!("qmp-lost:{phase}:8"), &["--on-exit", on_exit]);
        let qemu = Orphan::of(&bench, &mut run, "guest");
        run.wait_for_error("no more checkpoints are taken; the VM runs on");
        assert!(run.errors().contains("has closed the monitor"), "{}", run.report());
        let sealed = bench.list().len();
        assert!(sealed >= 3);
        // It is watched on: the guest runs, nothing more is tried, and who asks is told.
        assert_runs_on(&run, &mut sequence);
        assert!(run.is_running(), "{}", run.report());
        let status = bench.json(&["status", "--json", "--name", "guest"]);
        assert_eq!((&status[0]["state"], number(&status[0], "failed")), (&"unknown".into(), 1));
        assert!(
            status[0]["last_error"].as_str().is_some_and(|e| e.contains("monitor")),
            "{status}"
        );
        bench.refused(&["take"], 1, &["no more checkpoints"]);
        bench.ok(&["stop"]);
        assert_eq!(run.wait().code(), Some(1), "{}", run.report());
        assert_eq!(bench.list().len(), sealed);
        assert_all_exact(&bench, &run);
        assert_eq!(qemu.is_running(), on_exit == "keep", "{}", run.report());
        if on_exit == "keep" {
            assert_runs_on(&run, &mut sequence);
        } else if phase == "paused" {
            assert_newest_goes_on(&bench, &mut sequence);
        }
    }
}

/// A run that was to end with its Nth checkpoint ends when that cannot come any more, as it would
/// have with it: the VM as --on-exit says. But it has failed.
#[test]
fn qmp_lost_before_the_last_checkpoint_that_was_asked_for() {
    let mut sequence = Sequence::new(16);
    for on_exit in ["kill", "keep"] {
        let bench = Bench::new();
        let options = ["--on-exit", on_exit, "--count", "100"];
        let mut run = start(&bench, "qmp-lost:precopy:8", &options);
        let qemu = Orphan::of(&bench, &mut run, "guest");
        assert_eq!(run.wait().code(), Some(1), "{}", run.report());
        run.wait_for_error("no more checkpoints are taken");
        let sealed = bench.list().len();
        assert!(sealed >= 3);
        run.wait_for_error(&format!(
            "the 100 checkpoints of --count cannot be reached: {sealed} are sealed"
        ));
        assert_eq!(qemu.is_running(), on_exit == "keep", "{}", run.report());
        if on_exit == "keep" {
            assert_runs_on(&run, &mut sequence);
        }
        assert_all_exact(&bench, &run);
    }
}

#[test]
fn qmp_lost_of_a_vm_that_was_attached_to() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let mut vm = Foreign::start(&bench, &hashing());
    vm.console.wait_for("KF READY");
    let monitor = vm.socket("a");
    let attach = |options: &[&str]| {
        let all =
            [&["--interval", "300ms", "--audit", "audit", "--name", "guest"], options].concat();
        bench.run(
            &bench
                .attach_args(&["--qmp", &monitor], vm.console.pid(), &all)
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>(),
        )
    };
    let output = attach(&["--fault", "qmp-lost:paused:4"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no more checkpoints are taken") && said.contains("detached"), "{said}");
    assert!(vm.runs(), "it was left paused: {said}");
    assert_runs_on(&vm.console, &mut sequence);
    // Three, unless one failed by itself: then that is told, and nothing is missing silently.
    let sealed = bench.list().len();
    assert!(
        said.contains(&format!("{sealed} checkpoints sealed, {} failed", 4 - sealed)),
        "{said}"
    );
    // Its monitor is whole; the next engine finds it.
    let output = attach(&["--count", "2"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(bench.list().len(), sealed + 2);
    assert_runs_on(&vm.console, &mut sequence);
}
