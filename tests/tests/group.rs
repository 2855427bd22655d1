//! Tests groups: checkpoints of several VMs at one instant, and their restore together.

use keyframe_tests::journaling::{blank_image, journaling, records_of};
use keyframe_tests::{
    Boot, ExternalVm, HashLine, Process, Sequence, TestEnv, chosen_qemus, distribution_qemu,
    ended_lines, hash_lines, number, variants, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Two VMs that check themselves, `a` and `b`, with their consoles in files.
pub fn hashing(env: &TestEnv) -> Vec<Boot> {
    ["a", "b"].iter().map(|name| member(env, name, "hash", 96)).collect()
}

/// A member whose console is the file `NAME.log`.
pub fn member(env: &TestEnv, name: &str, work: &str, mem_mib: u64) -> Boot {
    let mut boot = Boot::new(work);
    boot.mem_mib = mem_mib;
    boot.serial = format!("file:{}", env.path().join(format!("{name}.log")).display());
    boot.with(&["-name", name])
}

/// Starts `keyframe run --group` of `members`.
pub fn start(env: &TestEnv, options: &[&str], members: &[Boot]) -> Process {
    let lines: Vec<Vec<String>> = members.iter().map(Boot::command).collect();
    let store = env.store();
    let mut args = vec!["run", "--store", &store, "--group", "--name", "pair"];
    args.extend(options);
    for line in &lines {
        args.push("--");
        args.extend(line.iter().map(String::as_str));
    }
    Process::start(env.command(&args))
}

/// Two VMs that send each other numbered datagrams over the network at `lan`, and report a lost or
/// repeated one.
fn talking(env: &TestEnv, lan: &str) -> Vec<Boot> {
    let link = format!("stream,id=n,server=off,addr.type=unix,addr.path={lan}");
    let one = |(name, own, other): (&str, u8, u8)| {
        let work = format!("peer kf.ip=10.0.2.{own} kf.peer=10.0.2.{other}");
        let device = format!("virtio-net-pci,netdev=n,mac=52:54:00:00:00:0{own}");
        member(env, name, &work, 96).with(&["-netdev", &link, "-device", &device])
    };
    [("a", 1, 2), ("b", 2, 1)].map(one).into()
}

/// The number of datagrams that member `name` received. Asserts that none was lost or repeated.
fn datagrams(env: &TestEnv, name: &str) -> u64 {
    let console = console(env, name);
    assert!(!console.iter().any(|line| line.contains("KF ERROR")), "{name}: {console:?}");
    let counters = console.iter().rev().find_map(|line| line.strip_prefix("peer frames="));
    let Some((frames, rest)) = counters.and_then(|c| c.split_once(' ')) else { return 0 };
    assert_eq!(rest, "lost=0 twice=0", "{name}: {console:?}");
    frames.parse().expect("a number")
}

/// Waits until both members have received `least` further datagrams.
fn both_talk_on(env: &TestEnv, vms: &mut Process, least: u64) {
    let before = ["a", "b"].map(|name| datagrams(env, name));
    let grown = |(name, before): (&str, u64)| datagrams(env, name) >= before + least;
    let both = vms.wait_until(|_| ["a", "b"].into_iter().zip(before).all(grown).then_some(()));
    assert!(
        both.is_some(),
        "a: {:?}, b: {:?}; {}",
        console(env, "a"),
        console(env, "b"),
        vms.report()
    );
}

/// The console of member `name`.
pub fn console(env: &TestEnv, name: &str) -> Vec<String> {
    ended_lines(&env.path().join(format!("{name}.log")))
}

fn hashes(env: &TestEnv, name: &str) -> Vec<HashLine> {
    hash_lines(&console(env, name))
}

pub fn wait_until_ready(env: &TestEnv, run: &mut Process) {
    let ready = |name| console(env, name).iter().any(|line| line.contains("KF READY"));
    let both = run.wait_until(|_| (ready("a") && ready("b")).then_some(()));
    assert!(both.is_some(), "{}", run.report());
}

fn status(env: &TestEnv) -> Value {
    env.json(&["status", "--json", "--name", "pair"])[0].clone()
}

#[test]
fn a_group_is_captured_exactly_by_each_strategy() {
    let env = TestEnv::new();
    for strategy in variants(["precopy", "stop-copy", "cow", "fork"], 2) {
        let before = env.list().len();
        let mut run = start(
            &env,
            &["--strategy", strategy, "--audit", "audit", "--count", "4", "--interval", "700ms"],
            &hashing(&env),
        );
        let exit = run.wait();
        // The audit copies the RAM of both VMs in the pause and compares it with the checkpoint.
        assert!(exit.success(), "{strategy}: {exit}: {}", run.report());
        assert_eq!(env.list().len(), before + 4, "{strategy}");
    }
    let shown = env.json(&["show", "--json", "--store", &env.store(), "latest"]);
    let names: Vec<_> =
        shown["members"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "b"]);
    env.ok(&["check", "--read-data", "--store", &env.store()]);
}

#[test]
fn a_group_comes_back_together_and_goes_on() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let mut run = start(&env, &["--interval", "500ms"], &hashing(&env));
    wait_until_ready(&env, &mut run);
    let mark = env.list().len();
    wait_until("checkpoints of running guests", || env.list().len() >= mark + 3);
    env.ok(&["stop", "--name", "pair"]);
    assert!(run.wait().success(), "{}", run.report());
    for name in ["a", "b"] {
        sequence.check(&hashes(&env, name), 1);
        std::fs::remove_file(env.path().join(format!("{name}.log"))).unwrap();
    }
    let mut restored = env.restore("latest", &[]);
    let grown = |name| hashes(&env, name).len() >= 4;
    let both = restored.wait_until(|_| (grown("a") && grown("b")).then_some(()));
    assert!(
        both.is_some(),
        "a: {:?}, b: {:?}; {}",
        console(&env, "a"),
        console(&env, "b"),
        restored.report()
    );
    for name in ["a", "b"] {
        sequence.check(&hashes(&env, name), 4);
    }
}

#[test]
fn without_one_of_its_members_the_others_run_on() {
    let env = TestEnv::new();
    let mut run = start(&env, &["--interval", "300ms"], &hashing(&env));
    wait_until_ready(&env, &mut run);
    wait_until("a checkpoint", || !env.list().is_empty());
    let victim = number(&status(&env)["members"][0], "qemu_pid");
    kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
    run.wait_for_error("VM a has ended: no more checkpoints of the group");
    let before = hashes(&env, "b").len();
    wait_until("the other one runs on", || hashes(&env, "b").len() > before + 2);
    env.refused(&["take", "--name", "pair"], 1, &["no more checkpoints"]);
    env.ok(&["stop", "--name", "pair"]);
    assert_eq!(run.wait().code(), Some(1), "{}", run.report());
    env.ok(&["check", "--read-data", "--store", &env.store()]);
}

#[test]
fn where_one_cannot_be_stopped_the_others_run_again() {
    let env = TestEnv::new();
    // The monitor of the first member breaks just before the third pause.
    let mut run =
        start(&env, &["--interval", "400ms", "--fault", "qmp-lost:stopping:3"], &hashing(&env));
    wait_until_ready(&env, &mut run);
    run.wait_for_error("closed the monitor");
    for name in ["a", "b"] {
        let before = hashes(&env, name).len();
        wait_until("both run on", || hashes(&env, name).len() > before + 2);
    }
}

#[test]
fn running_vms_are_attached_to_as_a_group_and_left_as_they_were() {
    let env = TestEnv::new();
    let dirs = ["x", "y"].map(|name| env.path().join(name));
    let mut vms: Vec<ExternalVm> = dirs
        .iter()
        .map(|dir| {
            std::fs::create_dir(dir).unwrap();
            let mut boot = Boot::new("hash");
            boot.mem_mib = 96;
            ExternalVm::start_in(dir, &boot)
        })
        .collect();
    for vm in &mut vms {
        vm.console.wait_for("KF READY");
    }
    let before: Vec<_> = vms.iter().map(ExternalVm::traces).collect();
    let (sockets, pids): (Vec<_>, Vec<_>) =
        vms.iter().map(|vm| (vm.socket("a"), vm.console.pid().to_string())).unzip();
    let store = env.store();
    let args =
        ["attach", "--store", &store, "--count", "4", "--interval", "400ms", "--audit", "audit"];
    let monitors = ["--qmp", &sockets[0], "--qmp", &sockets[1], &pids[0], &pids[1]];
    env.ok(&[&args[..], &monitors].concat());
    assert_eq!(env.list().len(), 4);
    for (vm, before) in vms.iter().zip(&before) {
        vm.assert_unchanged_since(before);
        assert!(vm.is_running());
    }
    env.refused(
        &[&args[..], &["--qmp", &sockets[0], &pids[0], &pids[1]]].concat(),
        1,
        &["one --qmp SOCKET"],
    );
}

#[test]
fn what_is_no_group_is_refused() {
    let env = TestEnv::new();
    let mut twins = hashing(&env);
    twins[1] = twins[0].clone();
    let mut run = start(&env, &[], &twins);
    assert_eq!(run.wait().code(), Some(1));
    run.wait_for_error("two VMs of the group are named a");
    let mut alone = start(&env, &[], &twins[..1]);
    assert_eq!(alone.wait().code(), Some(1));
    alone.wait_for_error("at least two VMs");
    assert!(env.list().is_empty());
}

#[test]
fn packets_between_members_are_neither_lost_nor_repeated() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let lan = env.path().join("lan").display().to_string();
        let mut members = talking(&env, &lan);
        for boot in &mut members {
            boot.qemu.clone_from(&qemu.path);
        }
        let mut run = start(&env, &["--interval", "250ms", "--lan", &lan], &members);
        wait_until_ready(&env, &mut run);
        both_talk_on(&env, &mut run, 500);
        let mark = env.list().len();
        wait_until("checkpoints of VMs that talk", || env.list().len() >= mark + 6);
        // All these pauses together.
        both_talk_on(&env, &mut run, 500);
        env.ok(&["stop", "--name", "pair"]);
        run.wait();
        let list = env.list();
        for entry in list.iter().rev().step_by(3).take(3) {
            for name in ["a", "b"] {
                std::fs::remove_file(env.path().join(format!("{name}.log"))).unwrap();
            }
            let mut restored = env.restore(&number(entry, "id").to_string(), &[]);
            restored.wait_for_error("of group pair is running");
            both_talk_on(&env, &mut restored, 500);
        }
    }
}

#[test]
fn a_group_is_restored_beside_itself_on_another_network() {
    let env = TestEnv::new();
    let lan = env.path().join("lan").display().to_string();
    let mut run = start(&env, &["--interval", "400ms", "--lan", &lan], &talking(&env, &lan));
    wait_until_ready(&env, &mut run);
    both_talk_on(&env, &mut run, 100);
    let mark = env.list().len();
    wait_until("a checkpoint of VMs that talk", || env.list().len() >= mark + 2);
    let store = env.store();
    env.refused(&["restore", "--store", &store, "latest"], 1, &["lan", "--lan OLD=NEW"]);
    let other = format!("{lan}={lan}2");
    let serial = |name: &str| format!("file:{}", env.path().join(name).display());
    let (x, y) = (serial("x.log"), serial("y.log"));
    let mut copy =
        env.restore("latest", &["--lan", &other, "--", "-serial", &x, "--", "-serial", &y]);
    copy.wait_for_error("of group pair is running");
    both_talk_on(&env, &mut run, 500);
    drop(copy);
    both_talk_on(&env, &mut run, 500);
}

/// Each member's disk is of the group's instant, and its own.
#[test]
fn a_group_comes_back_with_its_disks() {
    let env = TestEnv::new();
    let images = ["a", "b"].map(|name| blank_image(&env, name));
    let member = |(name, image): (&str, &std::path::PathBuf)| {
        let mut boot = journaling(&distribution_qemu(), image);
        boot.serial = format!("file:{}", env.path().join(format!("{name}.log")).display());
        boot.with(&["-name", name])
    };
    let members: Vec<Boot> = ["a", "b"].into_iter().zip(&images).map(member).collect();
    let mut run = start(&env, &["--interval", "500ms"], &members);
    wait_until_ready(&env, &mut run);
    let both_write = |vms: &mut Process, least: u64| {
        let done = |name| records_of(&console(&env, name)) >= least;
        let both = vms.wait_until(|_| (done("a") && done("b")).then_some(()));
        assert!(
            both.is_some(),
            "a: {:?}, b: {:?}; {}",
            console(&env, "a"),
            console(&env, "b"),
            vms.report()
        );
    };
    both_write(&mut run, 300);
    let mark = env.list().len();
    wait_until("checkpoints of guests that write", || env.list().len() >= mark + 2);
    let before = ["a", "b"].map(|name| records_of(&console(&env, name)));
    env.ok(&["stop", "--name", "pair"]);
    assert!(run.wait().success(), "{}", run.report());
    assert!(run.errors().contains(", 0 failed"), "{}", run.report());
    let shown = env.json(&["show", "--json", "--store", &env.store(), "latest"]);
    let names: Vec<_> =
        shown["disks"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a/d", "b/d"]);
    for name in ["a", "b"] {
        std::fs::remove_file(env.path().join(format!("{name}.log"))).unwrap();
    }
    let mut restored = env.restore("latest", &[]);
    // More records than the ring holds, so that the guest compares each block with RAM before it
    // overwrites it.
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
