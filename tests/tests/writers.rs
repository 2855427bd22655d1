//! Tests several VMs that write their checkpoints into one store at the same time.

use keyframe_tests::{
    Boot, Orphan, Process, Sequence, TestEnv, assert_restores_exactly, hash_lines, number,
    wait_until,
};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;

/// With so many VMs the content that all have in common outweighs the rest.
const VMS: u64 = 6;

fn boot() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

fn start(env: &TestEnv, name: &str) -> Process {
    let audit = format!("audit-{name}");
    let mut run = env.start(&["--name", name, "--interval", "300ms", "--audit", &audit], &boot());
    run.wait_for("KF READY");
    run
}

/// The checkpoints of VM `name`, oldest first.
fn of(list: &[Value], name: &str) -> Vec<u64> {
    list.iter().filter(|one| one["vm"] == name).map(|one| number(one, "id")).collect()
}

fn wait_for_more(env: &TestEnv, names: &[&str], more: usize) {
    let before = env.list();
    wait_until(&format!("{more} checkpoints of each of {names:?}"), || {
        let now = env.list();
        let has_more = |name: &&str| of(&now, name).last() > of(&before, name).last();
        let count = |name: &&str| {
            let last = of(&before, name).last().copied().unwrap_or(0);
            of(&now, name).iter().filter(|id| **id > last).count()
        };
        names.iter().all(|name| has_more(name) && count(name) >= more)
    });
}

/// The audit of the run has copied RAM in the pause; the restored VM has the same.
fn assert_exact(env: &TestEnv, name: &str) {
    let copy = |id: u64| env.path().join(format!("audit-{name}")).join(format!("{id}.ram"));
    let len_bytes = |id: &u64| std::fs::metadata(copy(*id)).map_or(0, |about| about.len());
    let ids = of(&env.list(), name);
    // The engine may have been killed while it wrote the copy of the newest.
    let whole_bytes = ids.iter().map(len_bytes).max().unwrap_or(0);
    let id = ids.iter().rev().find(|id| len_bytes(id) == whole_bytes).expect("a checkpoint");
    assert!(whole_bytes > 0, "{name}: no checkpoint has a copy");
    std::fs::create_dir_all(env.path().join("audit")).expect("a directory");
    std::fs::copy(copy(*id), env.path().join("audit").join(format!("{id}.ram"))).expect("a copy");
    assert_restores_exactly(env, &id.to_string());
}

#[test]
fn vms_share_a_store_beside_take_forget_and_prune_and_one_that_is_killed_harms_no_other() {
    let env = TestEnv::new();
    let store = env.store();
    let mut one = start(&env, "one");
    let mut two = start(&env, "two");
    let killed = Orphan::of(&env, &mut two, "two");
    wait_for_more(&env, &["one", "two"], 3);
    env.refused(&["unlock", "--store", &store], 11, &["VM one", "VM two"]);
    env.ok(&["take", "--name", "one"]);
    let list = env.list();
    for name in ["one", "two"] {
        let oldest = of(&list, name)[..2].iter().map(u64::to_string).collect::<Vec<_>>();
        env.ok(&["forget", "--store", &store, &oldest[0], &oldest[1]]);
    }
    env.ok(&["prune", "--store", &store, "--max-unused", "0"]);
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    wait_for_more(&env, &["one", "two"], 2);

    two.signal(Signal::KILL);
    two.wait();
    killed.kill();
    wait_for_more(&env, &["one"], 2);
    env.ok(&["prune", "--store", &store, "--max-unused", "0"]);
    let mut three = start(&env, "three");
    wait_for_more(&env, &["one", "three"], 2);
    env.ok(&["prune", "--store", &store, "--max-unused", "0"]);
    for (name, run) in [("one", &mut one), ("three", &mut three)] {
        env.ok(&["stop", "--name", name]);
        // The audit compares each checkpoint with its copy, and fails the run if one differs.
        let exit = run.wait();
        assert!(exit.success(), "{exit}: {}", run.report());
    }
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    for name in ["one", "two", "three"] {
        assert_exact(&env, name);
    }
    let newest = of(&env.list(), "two").last().expect("a checkpoint").to_string();
    let mut restored = env.restore(&newest, &[]);
    let lines = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(lines.is_some(), "{}", restored.report());
    Sequence::new(16).check(&hash_lines(&restored.lines()), 4);
}

fn folder_bytes(path: &Path) -> u64 {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(about) if about.is_dir() => folder_bytes(&entry.path()),
            Ok(about) => about.len(),
            Err(_) => 0,
        })
        .sum()
}

#[test]
fn vms_of_one_image_take_little_more_in_one_store_than_one_of_them() {
    let env = TestEnv::new();
    let store = env.store();
    let bytes = || folder_bytes(Path::new(&store));
    let mut runs = Vec::new();
    let mut first_bytes = 0;
    // All run at the end, and no pack of theirs is closed.
    for vm in 0..VMS {
        let name = format!("vm{vm}");
        let mut run = env.start(&["--interval", "10m", "--name", &name], &boot());
        run.wait_for("KF READY");
        env.ok(&["take", "--name", &name]);
        if vm == 0 {
            first_bytes = bytes();
        }
        runs.push((name, run));
    }
    let all_bytes = bytes();
    for (name, run) in &mut runs {
        env.ok(&["stop", "--name", name.as_str()]);
        assert!(run.wait().success(), "{}", run.report());
    }
    println!("{VMS} VMs: {all_bytes} bytes; one: {first_bytes}");
    assert!(
        all_bytes * 4 < first_bytes * VMS * 3,
        "{VMS} VMs take {all_bytes} bytes; one takes {first_bytes}"
    );
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
}
