//! Tests KVM: tracking, each strategy, restores under KVM and between KVM and TCG, with a guest
//! whose memory the test computes. Each test is skipped if `/dev/kvm` cannot be opened.

use keyframe_tests::{
    Boot, ExternalVm, Orphan, PassSequence, Process, TestEnv, chosen_qemus, needs_kvm, number,
    pass_lines, qemus, skip, variants, wait_until,
};
use rustix::process::{Pid, Signal};
use serde_json::Value;

/// The payload's pages.
const PAGES: usize = 1024;
/// The pages that the payload writes in a pass: a few hundred, so that a pass is short even if KVM
/// itself is emulated.
const DIRTY: u64 = 300;

fn sequence() -> PassSequence {
    PassSequence::new(PAGES, DIRTY)
}

/// Waits until the console has `more` complete passes after the first `skip` lines.
fn wait_for_passes(vm: &mut Process, skip: usize, more: usize) {
    let grown = vm.wait_until(|p| {
        let lines = p.lines();
        let enough = pass_lines(lines.get(skip..).unwrap_or_default()).len() >= more;
        (enough || lines.iter().any(|l| l.contains("KF ERROR"))).then_some(enough)
    });
    assert_eq!(grown, Some(true), "the payload does not go on; {}", vm.report());
}

/// Takes audited checkpoints of a booted payload, stops the run and returns the id of one in the
/// middle.
fn checkpoints(
    env: &TestEnv,
    boot: &Boot,
    options: &[&str],
    sequence: &mut PassSequence,
) -> String {
    let mut all = vec!["--interval", "300ms", "--name", "guest", "--audit", "audit"];
    all.extend(options);
    let mut run = env.start(&all, boot);
    run.wait_for("KF READY");
    wait_for_passes(&mut run, 0, 3);
    let mark = env.list().len();
    let taken = run.wait_until(|_| (env.list().len() >= mark + 6).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    wait_for_passes(&mut run, 0, 6);
    env.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    // The audit compares each checkpoint with a full copy made in the same pause, and fails the run
    // if one differs.
    assert!(exit.success(), "{exit}: {}", run.report());
    sequence.check(&pass_lines(&run.lines()), 6);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    number(&env.list()[mark + 3], "id").to_string()
}

/// The restored payload continues at the checkpoint, and resets through its firmware.
fn goes_on(env: &TestEnv, checkpoint: &str, options: &[&str], sequence: &mut PassSequence) {
    let mut restored = env.restore(checkpoint, options);
    wait_for_passes(&mut restored, 0, 5);
    let first = sequence.check(&pass_lines(&restored.lines()), 5);
    assert!(first.n > 3, "the restored payload began anew: {first:?}");
    restored.type_line("r");
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
            let env = TestEnv::exclusive();
            let boot = Boot { qemu: qemu.path.clone(), ..Boot::payload("kvm", DIRTY) };
            let id = checkpoints(&env, &boot, &["--strategy", strategy], &mut sequence);
            goes_on(&env, &id, &[], &mut sequence);
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
        let env = TestEnv::exclusive();
        let boot = Boot { machine: machine.into(), ..Boot::payload("kvm", DIRTY) }.with(extra);
        let id = checkpoints(&env, &boot, &["--strategy", strategy], &mut sequence);
        let list = env.list();
        assert!(list[1..].iter().all(|entry| entry["strategy"] == strategy), "{list:?}");
        goes_on(&env, &id, &[], &mut sequence);
    }
}

#[test]
fn other_machines_and_backings_of_ram_are_exact_and_go_on() {
    needs_kvm!();
    let mut sequence = sequence();
    let memfd = ["-object", "memory-backend-memfd,id=mem,size=64M,share=on"];
    for (machine, extra) in [("q35,memory-backend=mem", &memfd[..]), ("microvm", &[])] {
        println!("-- {machine}");
        let env = TestEnv::exclusive();
        let boot = Boot { machine: machine.into(), ..Boot::payload("kvm", DIRTY) }.with(extra);
        let id = checkpoints(&env, &boot, &[], &mut sequence);
        goes_on(&env, &id, &[], &mut sequence);
    }
}

#[test]
fn a_killed_engine_leaves_the_guest_running() {
    needs_kvm!();
    let mut sequence = sequence();
    for phase in ["copied", "encoding"] {
        println!("-- killed at {phase}");
        let env = TestEnv::exclusive();
        let fault = format!("kill:{phase}:8");
        let options = ["--interval", "400ms", "--name", "guest", "--fault", &fault];
        let mut run = env.start(&options, &Boot::payload("kvm", DIRTY));
        run.wait_for("KF READY");
        let status = env.json(&["status", "--json", "--name", "guest"]);
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
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
        goes_on(&env, "latest", &[], &mut sequence);
    }
}

/// A processor model that KVM and TCG both support completely. Some KVMs lack SSE3.
const PROCESSOR: [&str; 2] = ["-cpu", "qemu64,-pni"];

/// A checkpoint taken under `from` continues under `to`. Then one of the original VM shows that it
/// is unharmed.
fn crosses(
    from: &'static str,
    to: &str,
    machine: &str,
    cpus: u32,
    qemu: &str,
    sequence: &mut PassSequence,
) {
    let env = TestEnv::exclusive();
    let boot =
        Boot { machine: machine.into(), cpus, qemu: qemu.into(), ..Boot::payload(from, DIRTY) };
    let boot = boot.with(&PROCESSOR);
    let id = checkpoints(&env, &boot, &[], sequence);
    goes_on(&env, &id, &["--accel", to], sequence);
    goes_on(&env, &id, &["--accel", from], sequence);
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
    let env = TestEnv::exclusive();
    // The guest asks KVM for its clock, in a page that the payload does not use.
    let asked = ["-fw_cfg", "name=opt/keyframe/msr,string=4b564d01=f001"];
    let boot = Boot::payload("kvm", DIRTY).with(&PROCESSOR).with(&asked);
    let id = checkpoints(&env, &boot, &[], &mut sequence);
    let store = env.store();
    env.refused(
        &["restore", "--store", &store, &id, "--accel", "tcg"],
        1,
        &["kvmclock", "kvm=off"],
    );
    goes_on(&env, &id, &["--accel", "kvm"], &mut sequence);
}

/// A CPU feature that the guest's model has but its processor never had may be missing at the
/// target: TCG has no transactions, and some KVMs have none either.
#[test]
fn what_the_guest_never_had_does_not_keep_it_from_moving() {
    needs_kvm!();
    let mut sequence = sequence();
    let env = TestEnv::exclusive();
    let boot = Boot::payload("tcg", DIRTY).with(&["-cpu", "qemu64,-pni,+rtm,+hle"]);
    let id = checkpoints(&env, &boot, &[], &mut sequence);
    let shown = env.json(&["show", "--json", "--store", &env.store(), &id]);
    assert!(shown["machine"]["cpu_lacks"].to_string().contains("rtm"), "{shown}");
    goes_on(&env, &id, &["--accel", "kvm"], &mut sequence);
    let mut restored = env.restore(&id, &["--accel", "kvm", "--paused"]);
    restored.wait_for_error("is paused after");
    if !restored.errors().contains("rtm") {
        println!("less was shown than is possible: this machine's KVM has transactions");
    }
}

/// A checkpoint of KVM is restored on a host without KVM.
#[test]
fn a_host_without_kvm_is_told_of_tcg() {
    needs_kvm!();
    let mut sequence = sequence();
    let env = TestEnv::exclusive();
    let boot = Boot::payload("kvm", DIRTY).with(&PROCESSOR);
    let id = checkpoints(&env, &boot, &[], &mut sequence);
    // A mount namespace in which /dev/kvm is another device.
    let restore = env.command(&["restore", "--store", &env.store(), &id]);
    let mut command = std::process::Command::new("unshare");
    command.args([
        "--mount",
        "sh",
        "-c",
        "mount --bind /dev/null /dev/kvm || exit 77; exec \"$@\"",
        "sh",
    ]);
    command.arg(restore.get_program()).args(restore.get_args()).env("XDG_RUNTIME_DIR", env.path());
    let mut without = Process::start(command);
    let code = without.wait().code();
    if code == Some(77) || without.errors().starts_with("unshare:") {
        skip!("/dev/kvm cannot be hidden from a process here: {}", without.errors());
    }
    assert_eq!(code, Some(1), "{}", without.report());
    without.wait_for_error("--accel tcg");
}

/// If this machine's KVM supports less than TCG's processor, a guest that may use the rest is not
/// restored under KVM.
#[test]
fn a_processor_that_lacks_what_the_guest_may_use_is_refused() {
    needs_kvm!();
    let host = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if host.contains(" 3dnow ") {
        skip!("this machine's processor has 3DNow!");
    }
    let mut sequence = sequence();
    let env = TestEnv::exclusive();
    // TCG has the feature. KVM does not show it to a guest with this model unless the host has it.
    let boot = Boot::payload("tcg", DIRTY).with(&["-cpu", "qemu64,+pni,+3dnow"]);
    let id = checkpoints(&env, &boot, &[], &mut sequence);
    let store = env.store();
    env.refused(
        &["restore", "--store", &store, &id, "--accel", "kvm"],
        1,
        &["3dnow", "start it without"],
    );
    goes_on(&env, &id, &["--accel", "tcg"], &mut sequence);
}

/// A run under KVM is analysed while it goes on. The analysis ends with the run, also if that is
/// killed.
#[test]
fn what_is_captured_under_kvm_is_simulated_meanwhile() {
    needs_kvm!();
    for (kill, qemu) in [false, true].into_iter().zip(chosen_qemus(0).iter().cycle()) {
        let env = TestEnv::new();
        let boot = Boot { qemu: qemu.path.clone(), ..Boot::payload("kvm", DIRTY) };
        let mut run = env.start(&["--interval", "300ms", "--name", "guest"], &boot);
        // A VM outlives an engine that is killed.
        let _vm = Orphan::of(&env, &mut run, "guest");
        wait_until("a first checkpoint", || !env.list().is_empty());
        let store = env.store();
        let args = ["analyze", &*store, "--approximate", "--follow", "--tool", "icount"];
        let mut analysis =
            Process::start(env.command(&[&args[..], &["--out", "A", "--json"]].concat()));
        let settled = env.path().join("A/queue/settled");
        let count = || std::fs::read_dir(&settled).map_or(0, Iterator::count);
        wait_until("simulated intervals of a run that goes on", || count() >= 2);
        assert!(run.is_running(), "{}", run.report());
        run.signal(if kill { Signal::KILL } else { Signal::INT });
        run.wait();
        let report =
            analysis.wait_until(|p| serde_json::from_str::<Value>(&p.lines().join("\n")).ok());
        let report = report.unwrap_or_else(|| panic!("{}", analysis.report()));
        assert!(analysis.wait().success(), "{}", analysis.report());
        let intervals = report["intervals"].as_array().map(Vec::len);
        assert_eq!(intervals, Some(env.list().len() - 1), "{report:#}");
    }
}

/// `--count-instructions` is refused under TCG before a checkpoint is taken. An attached VM runs on.
#[test]
fn instructions_that_cannot_be_counted_are_refused() {
    let env = TestEnv::new();
    let boot = Boot::payload("tcg", DIRTY);
    let mut run = env.start(&["--count-instructions"], &boot);
    assert_eq!(run.wait().code(), Some(1), "{}", run.report());
    let said = run.errors();
    assert!(said.contains("TCG") && said.contains("fix:"), "{said}");

    let mut vm = ExternalVm::start(&env, &boot);
    vm.console.wait_for("KF READY");
    let args =
        env.attach_args(&["--qmp", &vm.socket("a")], vm.console.pid(), &["--count-instructions"]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    env.refused(&args, 1, &["TCG", "keyframe record"]);
    assert!(vm.is_running());
    wait_for_passes(&mut vm.console, 0, 3);
    assert!(env.list().is_empty());
}

/// The counts of a run under KVM are the lengths of its simulated intervals. A host whose processor
/// has no counter says so.
#[test]
fn counted_instructions_are_the_lengths_of_intervals() {
    needs_kvm!();
    let env = TestEnv::new();
    let boot = Boot::payload("kvm", DIRTY);
    let mut run =
        env.start(&["--interval", "400ms", "--count", "5", "--count-instructions"], &boot);
    if !run.wait().success() {
        let said = run.errors();
        let is_known = ["a counter of the guest's instructions", "the host's instructions"];
        assert!(is_known.iter().any(|text| said.contains(text)), "{said}");
        assert!(said.contains("fix:") && env.list().is_empty(), "{said}");
        skip!("this host cannot count a guest's instructions: {said}");
    }
    let counts: Vec<u64> =
        env.list().iter().map(|checkpoint| number(checkpoint, "counted_instructions")).collect();
    assert!(counts.is_sorted() && counts.first() < counts.last(), "{counts:?}");
    let store = env.store();
    let args = ["analyze", &store, "--approximate", "--tool", "icount", "--out", "A", "--json"];
    env.ok(&args);
    let header = std::fs::read_to_string(env.path().join("A/analysis.json")).expect("its header");
    let header: Value = serde_json::from_str(&header).expect("JSON");
    let lengths: Vec<u64> = header["intervals"]
        .as_array()
        .expect("intervals")
        .iter()
        .map(|interval| number(interval, "end_icount") - number(interval, "from_icount"))
        .collect();
    let counted: Vec<u64> = counts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(lengths, counted, "{header:#}");
}

/// A run under KVM is analysed afterwards: TCG simulates each interval from its checkpoint.
#[test]
fn what_was_captured_under_kvm_is_simulated_under_tcg() {
    needs_kvm!();
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let boot = Boot { qemu: qemu.path.clone(), ..Boot::payload("kvm", DIRTY) };
        let mut run = env.start(&["--interval", "400ms", "--count", "5"], &boot);
        assert!(run.wait().success(), "{}", run.report());
        let store = env.store();
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
            env.json(&args)
        };
        let report = analyze("A", &[]);
        assert_eq!(
            (&report["is_approximate"], &report["instructions"]),
            (&Value::Bool(true), &Value::Null)
        );
        assert_eq!(report["intervals"].as_array().map(Vec::len), Some(4), "{report:#}");
        let table = std::fs::read_to_string(env.path().join("A/icount.csv")).expect("its table");
        let ran = |line: &str| {
            line.split(',').nth(2).and_then(|cell| cell.parse::<u64>().ok()).expect("a number")
        };
        let ran: Vec<u64> = table.lines().skip(1).map(ran).collect();
        // The first interval has the boot. If the guest's clock stood still, the guest would wait
        // for it.
        let least = ran[1..].iter().min().expect("intervals");
        assert!(*least > 20_000, "{table}");
        assert!(
            std::fs::read_to_string(env.path().join("A/analysis.json"))
                .expect("it")
                .contains("is_approximate")
        );
        // A part of the run, selected by its checkpoints.
        let part = analyze("B", &["--from", "2", "--to", "4"]);
        assert_eq!(part["intervals"].as_array().map(Vec::len), Some(2), "{part:#}");
        env.refused(
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
