//! KVM: tracking, each strategy, restores within it and across to TCG and back, with a guest of
//! which every byte is known.
//!
//! Each test is skipped if `/dev/kvm` cannot be opened.

use keyframe_tests::{
    Bench, Boot, PassSequence, Process, chosen_qemus, needs_kvm, number, pass_lines, qemus, skip,
    variants,
};
use rustix::process::{Pid, Signal};
use serde_json::Value;

/// The payload's pages.
const PAGES: usize = 1024;
/// Those that it takes in a pass; a few hundred, so that a pass stays short where KVM itself is
/// emulated.
const DIRTY: u64 = 300;

fn sequence() -> PassSequence {
    PassSequence::new(PAGES, DIRTY)
}

/// Waits until the console has `more` whole passes behind the first `skip` lines.
fn wait_for_passes(vm: &mut Process, skip: usize, more: usize) {
    let grown = vm.wait_until(|p| {
        let lines = p.lines();
        let enough = pass_lines(lines.get(skip..).unwrap_or_default()).len() >= more;
        (enough || lines.iter().any(|l| l.contains("KF ERROR"))).then_some(enough)
    });
    assert_eq!(grown, Some(true), "the payload does not go on; {}", vm.report());
}

/// Takes audited checkpoints of a booted payload, stops the run and returns the number of one in
/// the middle.
fn checkpoints(
    bench: &Bench,
    boot: &Boot,
    options: &[&str],
    sequence: &mut PassSequence,
) -> String {
    let mut all = vec!["--interval", "300ms", "--name", "guest", "--audit", "audit"];
    all.extend(options);
    let mut run = bench.start(&all, boot);
    run.wait_for("KF READY");
    wait_for_passes(&mut run, 0, 3);
    let mark = bench.list().len();
    let taken = run.wait_until(|_| (bench.list().len() >= mark + 6).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    wait_for_passes(&mut run, 0, 6);
    bench.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    // The audit compares every checkpoint with a full copy made in the same pause, and fails the
    // run where one differs.
    assert!(exit.success(), "{exit}: {}", run.report());
    sequence.check(&pass_lines(&run.lines()), 6);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    number(&bench.list()[mark + 3], "id").to_string()
}

/// The restored payload goes on where the checkpoint stands, and resets through its firmware.
fn goes_on(bench: &Bench, checkpoint: &str, options: &[&str], sequence: &mut PassSequence) {
    let mut restored = bench.restore(checkpoint, options);
    wait_for_passes(&mut restored, 0, 5);
    let first = sequence.check(&pass_lines(&restored.lines()), 5);
    assert!(first.n > 3, "the restored payload began anew: {first:?}");
    restored.say("r");
    restored.wait_for("KF READY");
    let at =
        restored.lines().iter().position(|l| l.contains("KF READY")).expect("the line just seen");
    wait_for_passes(&mut restored, at, 3);
    assert_eq!(sequence.check(&pass_lines(&restored.lines()[at..]), 3).n, 1);
}

#[test]
fn every_strategy_is_exact_and_restores_go_on() {
    needs_kvm!();
    let mut sequence = sequence();
    for qemu in qemus() {
        for strategy in ["precopy", "stop-copy"] {
            println!("-- {strategy}, QEMU {}", qemu.label);
            let bench = Bench::alone();
            let boot = Boot { qemu: qemu.path.clone(), ..Boot::payload("kvm", DIRTY) };
            let id = checkpoints(&bench, &boot, &["--strategy", strategy], &mut sequence);
            goes_on(&bench, &id, &[], &mut sequence);
        }
    }
}

#[test]
fn copies_made_behind_the_pause_are_exact_and_restores_go_on() {
    needs_kvm!();
    let mut sequence = sequence();
    let memfd = ["-object", "memory-backend-memfd,id=mem,size=64M,share=on"];
    for (strategy, machine, extra) in
        [("cow", "pc", &[][..]), ("cow", "pc,memory-backend=mem", &memfd[..]), ("fork", "pc", &[])]
    {
        println!("-- {strategy}, {machine}");
        let bench = Bench::alone();
        let boot = Boot { machine: machine.into(), ..Boot::payload("kvm", DIRTY) }.with(extra);
        let id = checkpoints(&bench, &boot, &["--strategy", strategy], &mut sequence);
        let list = bench.list();
        assert!(list[1..].iter().all(|entry| entry["strategy"] == strategy), "{list:?}");
        goes_on(&bench, &id, &[], &mut sequence);
    }
}

#[test]
fn other_machines_and_backings_of_ram_are_exact_and_go_on() {
    needs_kvm!();
    let mut sequence = sequence();
    let memfd = ["-object", "memory-backend-memfd,id=mem,size=64M,share=on"];
    for (machine, extra) in [("q35,memory-backend=mem", &memfd[..]), ("microvm", &[])] {
        println!("-- {machine}");
        let bench = Bench::alone();
        let boot = Boot { machine: machine.into(), ..Boot::payload("kvm", DIRTY) }.with(extra);
        let id = checkpoints(&bench, &boot, &[], &mut sequence);
        goes_on(&bench, &id, &[], &mut sequence);
    }
}

#[test]
fn a_killed_engine_leaves_the_guest_running() {
    needs_kvm!();
    let mut sequence = sequence();
    for phase in ["copied", "encoding"] {
        println!("-- killed at {phase}");
        let bench = Bench::alone();
        let fault = format!("kill:{phase}:8");
        let options = ["--interval", "400ms", "--name", "guest", "--fault", &fault];
        let mut run = bench.start(&options, &Boot::payload("kvm", DIRTY));
        run.wait_for("KF READY");
        let status = bench.json(&["status", "--json", "--name", "guest"]);
        let qemu = Pid::from_raw(number(&status[0], "qemu_pid") as i32).expect("a pid");
        let exit = run.wait();
        assert!(!exit.success(), "it was not killed; {}", run.report());
        let before = pass_lines(&run.lines()).len();
        let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
        while pass_lines(&run.lines()).len() < before + 3 && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let _ = rustix::process::kill_process(qemu, Signal::KILL);
        assert!(
            pass_lines(&run.lines()).len() >= before + 3,
            "the guest stands still; {}",
            run.report()
        );
        sequence.check(&pass_lines(&run.lines()), 3);
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
        goes_on(&bench, "latest", &[], &mut sequence);
    }
}

/// The processor that this machine's KVM and TCG both have whole. Some KVMs lack SSE3.
const PROCESSOR: [&str; 2] = ["-cpu", "qemu64,-pni"];

/// A checkpoint taken under `from` goes on under `to`; then one of the original again, to show that
/// it is unharmed.
fn crosses(
    from: &'static str,
    to: &str,
    machine: &str,
    cpus: u32,
    qemu: &str,
    sequence: &mut PassSequence,
) {
    let bench = Bench::alone();
    let boot =
        Boot { machine: machine.into(), cpus, qemu: qemu.into(), ..Boot::payload(from, DIRTY) };
    let boot = boot.with(&PROCESSOR);
    let id = checkpoints(&bench, &boot, &[], sequence);
    goes_on(&bench, &id, &["--accel", to], sequence);
    goes_on(&bench, &id, &["--accel", from], sequence);
}

#[test]
fn a_checkpoint_of_kvm_goes_on_under_tcg() {
    needs_kvm!();
    let mut sequence = sequence();
    for qemu in qemus() {
        for (machine, cpus) in variants([("pc", 1), ("q35", 2), ("microvm", 1)], 2) {
            println!("-- {machine}, QEMU {}", qemu.label);
            crosses("kvm", "tcg", machine, cpus, &qemu.path, &mut sequence);
        }
    }
}

#[test]
fn a_checkpoint_of_tcg_goes_on_under_kvm() {
    needs_kvm!();
    let mut sequence = sequence();
    for qemu in qemus() {
        for (machine, cpus) in variants([("pc", 1), ("q35", 2), ("microvm", 1)], 2) {
            println!("-- {machine}, QEMU {}", qemu.label);
            crosses("tcg", "kvm", machine, cpus, &qemu.path, &mut sequence);
        }
    }
}

#[test]
fn what_tcg_cannot_go_on_with_is_refused_and_goes_on_under_kvm() {
    needs_kvm!();
    let mut sequence = sequence();
    let bench = Bench::alone();
    // The guest asks KVM for its clock, in a page that the payload does not use.
    let asked = ["-fw_cfg", "name=opt/keyframe/msr,string=4b564d01=f001"];
    let boot = Boot::payload("kvm", DIRTY).with(&PROCESSOR).with(&asked);
    let id = checkpoints(&bench, &boot, &[], &mut sequence);
    let store = bench.store();
    bench.refused(
        &["restore", "--store", &store, &id, "--accel", "tcg"],
        1,
        &["kvmclock", "kvm=off"],
    );
    goes_on(&bench, &id, &["--accel", "kvm"], &mut sequence);
}

/// What the guest's model has but its processor never had, the target may lack as well: TCG has no
/// transactions, and some KVMs have none either.
#[test]
fn what_the_guest_never_had_does_not_keep_it_from_moving() {
    needs_kvm!();
    let mut sequence = sequence();
    let bench = Bench::alone();
    let boot = Boot::payload("tcg", DIRTY).with(&["-cpu", "qemu64,-pni,+rtm,+hle"]);
    let id = checkpoints(&bench, &boot, &[], &mut sequence);
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), &id]);
    assert!(shown["machine"]["cpu_lacks"].to_string().contains("rtm"), "{shown}");
    goes_on(&bench, &id, &["--accel", "kvm"], &mut sequence);
    let mut restored = bench.restore(&id, &["--accel", "kvm", "--paused"]);
    restored.wait_for_error("is paused after");
    if !restored.errors().contains("rtm") {
        println!("less was shown than is possible: this machine's KVM has transactions");
    }
}

/// A checkpoint of KVM comes to a host that has none.
#[test]
fn a_host_without_kvm_is_told_of_tcg() {
    needs_kvm!();
    let mut sequence = sequence();
    let bench = Bench::alone();
    let boot = Boot::payload("kvm", DIRTY).with(&PROCESSOR);
    let id = checkpoints(&bench, &boot, &[], &mut sequence);
    // Its own view of the file system, in which /dev/kvm is another device.
    let restore = bench.command(&["restore", "--store", &bench.store(), &id]);
    let mut command = std::process::Command::new("unshare");
    command.args([
        "--mount",
        "sh",
        "-c",
        "mount --bind /dev/null /dev/kvm || exit 77; exec \"$@\"",
        "sh",
    ]);
    command
        .arg(restore.get_program())
        .args(restore.get_args())
        .env("XDG_RUNTIME_DIR", bench.path());
    let mut without = Process::start(command);
    let code = without.wait().code();
    if code == Some(77) || without.errors().starts_with("unshare:") {
        skip!("/dev/kvm cannot be hidden from a process here: {}", without.errors());
    }
    assert_eq!(code, Some(1), "{}", without.report());
    without.wait_for_error("--accel tcg");
}

/// Where this machine's KVM has less than TCG's processor, a guest that may use that does not come
/// to KVM.
#[test]
fn a_processor_that_lacks_what_the_guest_may_use_is_refused() {
    needs_kvm!();
    let host = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if host.contains(" 3dnow ") {
        skip!("this machine's processor has 3DNow!");
    }
    let mut sequence = sequence();
    let bench = Bench::alone();
    // TCG has it, and no KVM shows it to a guest by this name's default model unless the host has
    // it too.
    let boot = Boot::payload("tcg", DIRTY).with(&["-cpu", "qemu64,+pni,+3dnow"]);
    let id = checkpoints(&bench, &boot, &[], &mut sequence);
    let store = bench.store();
    bench.refused(
        &["restore", "--store", &store, &id, "--accel", "kvm"],
        1,
        &["3dnow", "started without"],
    );
    goes_on(&bench, &id, &["--accel", "tcg"], &mut sequence);
}

/// A run under KVM is looked into afterwards: each interval is simulated, and goes on where its
/// checkpoint stood.
#[test]
fn what_was_captured_under_kvm_is_simulated_under_tcg() {
    needs_kvm!();
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let boot = Boot { qemu: qemu.path.clone(), ..Boot::payload("kvm", DIRTY) };
        let mut run = bench.start(&["--interval", "400ms", "--count", "5"], &boot);
        assert!(run.wait().success(), "{}", run.report());
        let store = bench.store();
        let analyze = |out: &str, more: &[&str]| {
            let mut args = vec![
                "analyze",
                &*store,
                "--approximate",
                "--tool",
                "icount",
                "--out",
                out,
                "--json",
            ];
            args.extend(more);
            bench.json(&args)
        };
        let report = analyze("A", &[]);
        assert_eq!(
            (&report["is_approximate"], &report["instructions"]),
            (&Value::Bool(true), &Value::Null)
        );
        assert_eq!(report["intervals"].as_array().map(Vec::len), Some(4), "{report:#}");
        let table = std::fs::read_to_string(bench.path().join("A/icount.csv")).expect("its table");
        let ran = |line: &str| {
            line.split(',').nth(2).and_then(|cell| cell.parse::<u64>().ok()).expect("a number")
        };
        let ran: Vec<u64> = table.lines().skip(1).map(ran).collect();
        // The first one has the boot. Had its clock stood still, a guest would wait for it and do
        // nothing.
        let least = ran[1..].iter().min().expect("intervals");
        assert!(*least > 20_000, "{table}");
        assert!(
            std::fs::read_to_string(bench.path().join("A/analysis.json"))
                .expect("it")
                .contains("is_approximate")
        );
        // Part of it, by its checkpoints.
        let part = analyze("B", &["--from", "2", "--to", "4"]);
        assert_eq!(part["intervals"].as_array().map(Vec::len), Some(2), "{part:#}");
        bench.refused(
            &[
                "analyze",
                &store,
                "--approximate",
                "--tool",
                "icount",
                "--out",
                "C",
                "--check-sequential",
            ],
            2,
            &["--approximate"],
        );
    }
}
