//! Groups: several VMs in one checkpoint, of one instant, and back to life together.

use keyframe_tests::journaling::{blank_image, journaling, records_of};
use keyframe_tests::{
    Bench, Boot, Foreign, HashLine, Process, Sequence, chosen_qemus, distribution_qemu,
    ended_lines, hash_lines, number, until, variants,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Two VMs that check themselves, `a` and `b`, with their consoles in files.
pub fn hashing(bench: &Bench) -> Vec<Boot> {
    ["a", "b"].iter().map(|name| member(bench, name, "hash", 96)).collect()
}

/// A member whose console is in the file `NAME.log`.
pub fn member(bench: &Bench, name: &str, work: &str, mem_mib: u64) -> Boot {
    let mut boot = Boot::new(work);
    boot.mem_mib = mem_mib;
    boot.serial = format!("file:{}", bench.path().join(format!("{name}.log")).display());
    boot.with(&["-name", name])
}

/// `keyframe run --group` of `members`.
pub fn start(bench: &Bench, options: &[&str], members: &[Boot]) -> Process {
    let lines: Vec<Vec<String>> = members.iter().map(Boot::command).collect();
    let store = bench.store();
    let mut args = vec!["run", "--store", &store, "--group", "--name", "pair"];
    args.extend(options);
    for line in &lines {
        args.push("--");
        args.extend(line.iter().map(String::as_str));
    }
    Process::start(bench.command(&args))
}

/// Two VMs that send each other numbered datagrams over the network at `lan`, and notice one that
/// is lost or repeated.
fn talking(bench: &Bench, lan: &str) -> Vec<Boot> {
    let link = format!("stream,id=n,server=off,addr.type=unix,addr.path={lan}");
    let one = |(name, own, other): (&str, u8, u8)| {
        let work = format!("peer kf.ip=10.0.2.{own} kf.peer=10.0.2.{other}");
        let device = format!("virtio-net-pci,netdev=n,mac=52:54:00:00:00:0{own}");
        member(bench, name, &work, 96).with(&["-netdev", &link, "-device", &device])
    };
    [("a", 1, 2), ("b", 2, 1)].map(one).into()
}

/// How many datagrams member `name` got; none lost, none twice, nothing else wrong.
fn datagrams(bench: &Bench, name: &str) -> u64 {
    let console = console(bench, name);
    assert!(!console.iter().any(|line| line.contains("KF ERROR")), "{name}: {console:?}");
    let counters = console.iter().rev().find_map(|line| line.strip_prefix("peer frames="));
    let Some((frames, rest)) = counters.and_then(|c| c.split_once(' ')) else { return 0 };
    assert_eq!(rest, "lost=0 twice=0", "{name}: {console:?}");
    frames.parse().expect("a number")
}

/// Both have got `least` datagrams more than they had.
fn both_talk_on(bench: &Bench, vms: &mut Process, least: u64) {
    let before = ["a", "b"].map(|name| datagrams(bench, name));
    let grown = |(name, before): (&str, u64)| datagrams(bench, name) >= before + least;
    let both = vms.wait_until(|_| ["a", "b"].into_iter().zip(before).all(grown).then_some(()));
    assert!(
        both.is_some(),
        "a: {:?}, b: {:?}; {}",
        console(bench, "a"),
        console(bench, "b"),
        vms.report()
    );
}

/// What the console of member `name` has said.
pub fn console(bench: &Bench, name: &str) -> Vec<String> {
    ended_lines(&bench.path().join(format!("{name}.log")))
}

fn hashes(bench: &Bench, name: &str) -> Vec<HashLine> {
    hash_lines(&console(bench, name))
}

pub fn wait_until_ready(bench: &Bench, run: &mut Process) {
    let ready = |name| console(bench, name).iter().any(|line| line.contains("KF READY"));
    let both = run.wait_until(|_| (ready("a") && ready("b")).then_some(()));
    assert!(both.is_some(), "{}", run.report());
}

fn status(bench: &Bench) -> Value {
    bench.json(&["status", "--json", "--name", "pair"])[0].clone()
}

#[test]
fn a_group_is_captured_exactly_by_each_strategy() {
    let bench = Bench::new();
    for strategy in variants(["precopy", "stop-copy", "cow", "fork"], 2) {
        let before = bench.list().len();
        let mut run = start(
            &bench,
            &["--strategy", strategy, "--audit", "audit", "--count", "4", "--interval", "700ms"],
            &hashing(&bench),
        );
        let exit = run.wait();
        // The audit compares both VMs' RAM, copied in the same pause, with what was sealed.
        assert!(exit.success(), "{strategy}: {exit}: {}", run.report());
        assert_eq!(bench.list().len(), before + 4, "{strategy}");
    }
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), "latest"]);
    let names: Vec<_> =
        shown["members"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "b"]);
    bench.ok(&["check", "--read-data", "--store", &bench.store()]);
}

#[test]
fn a_group_comes_back_together_and_goes_on() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let mut run = start(&bench, &["--interval", "500ms"], &hashing(&bench));
    wait_until_ready(&bench, &mut run);
    let mark = bench.list().len();
    until("checkpoints of running guests", || bench.list().len() >= mark + 3);
    bench.ok(&["stop", "--name", "pair"]);
    assert!(run.wait().success(), "{}", run.report());
    for name in ["a", "b"] {
        sequence.check(&hashes(&bench, name), 1);
        std::fs::remove_file(bench.path().join(format!("{name}.log"))).unwrap();
    }
    let mut restored = bench.restore("latest", &[]);
    let grown = |name| hashes(&bench, name).len() >= 4;
    let both = restored.wait_until(|_| (grown("a") && grown("b")).then_some(()));
    assert!(
        both.is_some(),
        "a: {:?}, b: {:?}; {}",
        console(&bench, "a"),
        console(&bench, "b"),
        restored.report()
    );
    for name in ["a", "b"] {
        sequence.check(&hashes(&bench, name), 4);
    }
}

#[test]
fn without_one_of_its_members_the_others_run_on() {
    let bench = Bench::new();
    let mut run = start(&bench, &["--interval", "300ms"], &hashing(&bench));
    wait_until_ready(&bench, &mut run);
    until("a checkpoint", || !bench.list().is_empty());
    let victim = number(&status(&bench)["members"][0], "qemu_pid");
    kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
    run.wait_for_error("VM a has ended: no more checkpoints of the group");
    let before = hashes(&bench, "b").len();
    until("the other one runs on", || hashes(&bench, "b").len() > before + 2);
    bench.refused(&["take", "--name", "pair"], 1, &["no more checkpoints"]);
    bench.ok(&["stop", "--name", "pair"]);
    assert_eq!(run.wait().code(), Some(1), "{}", run.report());
    bench.ok(&["check", "--read-data", "--store", &bench.store()]);
}

#[test]
fn where_one_cannot_be_stopped_the_others_run_again() {
    let bench = Bench::new();
    // The monitor of the first member breaks just before the third pause.
    let mut run =
        start(&bench, &["--interval", "400ms", "--fault", "qmp-lost:stopping:3"], &hashing(&bench));
    wait_until_ready(&bench, &mut run);
    run.wait_for_error("closed the monitor");
    for name in ["a", "b"] {
        let before = hashes(&bench, name).len();
        until("both run on", || hashes(&bench, name).len() > before + 2);
    }
}

#[test]
fn running_vms_are_attached_to_as_a_group_and_left_as_they_were() {
    let bench = Bench::new();
    let dirs = ["x", "y"].map(|name| bench.path().join(name));
    let mut vms: Vec<Foreign> = dirs
        .iter()
        .map(|dir| {
            std::fs::create_dir(dir).unwrap();
            let mut boot = Boot::new("hash");
            boot.mem_mib = 96;
            Foreign::start_in(dir, &boot)
        })
        .collect();
    for vm in &mut vms {
        vm.console.wait_for("KF READY");
    }
    let before: Vec<_> = vms.iter().map(Foreign::traces).collect();
    let (sockets, pids): (Vec<_>, Vec<_>) =
        vms.iter().map(|vm| (vm.socket("a"), vm.console.pid().to_string())).unzip();
    let store = bench.store();
    let args =
        ["attach", "--store", &store, "--count", "4", "--interval", "400ms", "--audit", "audit"];
    let monitors = ["--qmp", &sockets[0], "--qmp", &sockets[1], &pids[0], &pids[1]];
    bench.ok(&[&args[..], &monitors].concat());
    assert_eq!(bench.list().len(), 4);
    for (vm, before) in vms.iter().zip(&before) {
        vm.assert_left_as(before);
        assert!(vm.runs());
    }
    bench.refused(
        &[&args[..], &["--qmp", &sockets[0], &pids[0], &pids[1]]].concat(),
        1,
        &["one --qmp SOCKET"],
    );
}

#[test]
fn what_is_no_group_is_refused() {
    let bench = Bench::new();
    let mut twins = hashing(&bench);
    twins[1] = twins[0].clone();
    let mut run = start(&bench, &[], &twins);
    assert_eq!(run.wait().code(), Some(1));
    run.wait_for_error("two VMs of the group are named a");
    let mut alone = start(&bench, &[], &twins[..1]);
    assert_eq!(alone.wait().code(), Some(1));
    alone.wait_for_error("at least two VMs");
    assert!(bench.list().is_empty());
}

#[test]
fn packets_between_members_are_neither_lost_nor_repeated() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let lan = bench.path().join("lan").display().to_string();
        let mut members = talking(&bench, &lan);
        for boot in &mut members {
            boot.qemu.clone_from(&qemu.path);
        }
        let mut run = start(&bench, &["--interval", "250ms", "--lan", &lan], &members);
        wait_until_ready(&bench, &mut run);
        both_talk_on(&bench, &mut run, 500);
        let mark = bench.list().len();
        until("checkpoints of VMs that talk", || bench.list().len() >= mark + 6);
        // Through all these pauses.
        both_talk_on(&bench, &mut run, 500);
        bench.ok(&["stop", "--name", "pair"]);
        run.wait();
        let list = bench.list();
        for entry in list.iter().rev().step_by(3).take(3) {
            for name in ["a", "b"] {
                std::fs::remove_file(bench.path().join(format!("{name}.log"))).unwrap();
            }
            let mut restored = bench.restore(&number(entry, "id").to_string(), &[]);
            restored.wait_for_error("of group pair is running");
            both_talk_on(&bench, &mut restored, 500);
        }
    }
}

#[test]
fn a_group_is_restored_beside_itself_on_another_network() {
    let bench = Bench::new();
    let lan = bench.path().join("lan").display().to_string();
    let mut run = start(&bench, &["--interval", "400ms", "--lan", &lan], &talking(&bench, &lan));
    wait_until_ready(&bench, &mut run);
    both_talk_on(&bench, &mut run, 100);
    let mark = bench.list().len();
    until("a checkpoint of VMs that talk", || bench.list().len() >= mark + 2);
    let store = bench.store();
    bench.refused(&["restore", "--store", &store, "latest"], 1, &["lan", "--lan OLD=NEW"]);
    let other = format!("{lan}={lan}2");
    let serial = |name: &str| format!("file:{}", bench.path().join(name).display());
    let (x, y) = (serial("x.log"), serial("y.log"));
    let mut copy =
        bench.restore("latest", &["--lan", &other, "--", "-serial", &x, "--", "-serial", &y]);
    copy.wait_for_error("of group pair is running");
    both_talk_on(&bench, &mut run, 500);
    drop(copy);
    both_talk_on(&bench, &mut run, 500);
}

/// Each member's disk is of the group's instant, and its own.
#[test]
fn a_group_comes_back_with_its_disks() {
    let bench = Bench::new();
    let images = ["a", "b"].map(|name| blank_image(&bench, name));
    let member = |(name, image): (&str, &std::path::PathBuf)| {
        let mut boot = journaling(&distribution_qemu(), image);
        boot.serial = format!("file:{}", bench.path().join(format!("{name}.log")).display());
        boot.with(&["-name", name])
    };
    let members: Vec<Boot> = ["a", "b"].into_iter().zip(&images).map(member).collect();
    let mut run = start(&bench, &["--interval", "500ms"], &members);
    wait_until_ready(&bench, &mut run);
    let both_write = |vms: &mut Process, least: u64| {
        let done = |name| records_of(&console(&bench, name)) >= least;
        let both = vms.wait_until(|_| (done("a") && done("b")).then_some(()));
        assert!(
            both.is_some(),
            "a: {:?}, b: {:?}; {}",
            console(&bench, "a"),
            console(&bench, "b"),
            vms.report()
        );
    };
    both_write(&mut run, 300);
    let mark = bench.list().len();
    until("checkpoints of guests that write", || bench.list().len() >= mark + 2);
    let before = ["a", "b"].map(|name| records_of(&console(&bench, name)));
    bench.ok(&["stop", "--name", "pair"]);
    assert!(run.wait().success(), "{}", run.report());
    assert!(run.errors().contains(", 0 failed"), "{}", run.report());
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), "latest"]);
    let names: Vec<_> =
        shown["disks"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a/d", "b/d"]);
    for name in ["a", "b"] {
        std::fs::remove_file(bench.path().join(format!("{name}.log"))).unwrap();
    }
    let mut restored = bench.restore("latest", &[]);
    // More than a ring: each block is compared with RAM before it is overwritten.
    both_write(&mut restored, before.iter().max().unwrap() + 400);
    restored.signal(Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    for image in &images {
        assert!(
            std::fs::read(image).unwrap().iter().all(|byte| *byte == 0),
            "an image was written"
        );
    }
}
