//! Tests each strategy with each of its trackers, over each kind of memory that it supports: exact,
//! or refused with the reason and the fix. A guest outlives an engine that dies while it copies the
//! guest's pages.

use keyframe_tests::{
    Boot, HugePages, Orphan, Process, Scope, Sequence, TestEnv, assert_restores_exactly,
    hash_lines, record_skip, take_audited_checkpoints, variants, wait_until,
};
use std::path::Path;

const MEMFD: &str = "memory-backend-memfd,id=mem,size=96M,share=on";

/// A small guest with two vCPUs that write all over its memory.
fn scribbling() -> Boot {
    let mut boot = Boot::new("scribble kf.mib=24 kf.cpus=2");
    boot.mem_mib = 96;
    boot.cpus = 2;
    boot
}

fn backed_by(object: &str) -> Boot {
    Boot { machine: "pc,memory-backend=mem".into(), ..scribbling() }.with(&["-object", object])
}

/// A guest whose lines each depend on all earlier ones.
fn hashing() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// Takes audited checkpoints with `options`, all but the first by `strategy`; restores one of them
/// and compares it.
fn exact(boot: &Boot, options: &[&str], strategies: &[&str]) {
    println!("-- {}", options.join(" "));
    let env = TestEnv::new();
    let mut all = vec!["--interval", "300ms"];
    all.extend(options);
    let (_, id) = take_audited_checkpoints(&env, boot, &all, 3);
    for entry in &env.list()[1..] {
        let used = entry["strategy"].as_str().expect("a strategy");
        assert!(strategies.contains(&used), "{used} instead of {strategies:?}");
    }
    assert_restores_exactly(&env, &id);
}

#[test]
fn copy_on_write_is_exact() {
    exact(&scribbling(), &["--strategy", "cow"], &["cow"]);
}

#[test]
fn copy_on_write_of_shared_memory_is_exact() {
    exact(&backed_by(MEMFD), &["--strategy", "cow"], &["cow"]);
}

#[test]
fn copy_on_write_of_huge_pages_is_exact() {
    let Some(_pages) = HugePages::reserve(48) else { return };
    let object = format!("{MEMFD},hugetlb=on,hugetlbsize=2M");
    exact(&backed_by(&object), &["--strategy", "cow"], &["cow"]);
}

#[test]
fn fork_is_exact() {
    exact(&scribbling(), &["--strategy", "fork"], &["fork"]);
}

#[test]
fn auto_is_exact() {
    exact(&scribbling(), &["--strategy", "auto"], &["precopy", "stop-copy"]);
}

/// Takes `count` checkpoints of a guest of 320 MiB whose two vCPUs write. Returns how the pages of those
/// after the first were found.
fn windows_of(strategy: &str, tracker: &str, count: usize) -> Vec<String> {
    let env = TestEnv::new();
    let mut boot = scribbling();
    boot.mem_mib = 320;
    let options = ["--interval", "200ms", "--strategy", strategy, "--tracker", tracker];
    let (_, id) = take_audited_checkpoints(&env, &boot, &options, count);
    assert_restores_exactly(&env, &id);
    let found = |entry: &serde_json::Value| entry["found_by"].as_str().unwrap_or("").to_owned();
    env.list()[1..].iter().map(found).collect()
}

/// The audit compares all RAM of each checkpoint, whether a window named its last pages or a scan
/// found them because the window could not.
#[test]
fn a_window_in_place_of_the_scan_is_exact() {
    if let Some(reason) = no_window() {
        return record_skip(Scope::Test, &reason);
    }
    let found = windows_of("precopy", "window", 5);
    println!("{found:?}");
    assert!(found.iter().any(|by| by == "window"), "{found:?}");
    assert!(found.iter().all(|by| by == "window" || by.starts_with("scan:")), "{found:?}");
    let others = ["stop-copy", "fork", "pre-scan"].map(|strategy| (strategy, "window"));
    let scanned = [("precopy", "write-protect")];
    for (strategy, tracker) in variants(others.into_iter().chain(scanned), 1) {
        let found = windows_of(strategy, tracker, 4);
        let is_right = |by: &String| match tracker {
            "window" => by == "window" || by.starts_with("scan:"),
            _ => by == "scan",
        };
        assert!(found.iter().all(is_right), "{strategy}, {tracker}: {found:?}");
    }
}

#[test]
fn a_vm_without_exact_windows_is_refused_one_and_scanned_by_default() {
    refused(&backed_by(MEMFD), &["--tracker", "window"], &["name written pages by faults"]);
    let env = TestEnv::new();
    let options = ["--interval", "200ms"];
    take_audited_checkpoints(&env, &backed_by(MEMFD), &options, 2);
    assert!(env.list()[1..].iter().all(|entry| entry["found_by"] == "scan"), "{:?}", env.list());
}

/// The reason why this host has no windows; `None` if it has.
fn no_window() -> Option<String> {
    let features = keyframe_kernel::host_features::probe();
    let item = features.get("page-fault window").expect("doctor looks for it");
    (!item.available).then(|| item.detail.clone())
}

#[test]
fn other_trackers_and_threads_are_exact() {
    let all = [
        ("precopy", "--copy-threads", "2"),
        ("stop-copy", "--tracker", "compare"),
        ("precopy", "--tracker", "sync"),
        ("precopy", "--tracker", "compare"),
    ];
    for (strategy, option, value) in variants(all, 1) {
        exact(&scribbling(), &["--strategy", strategy, option, value], &[strategy]);
    }
}

/// Asserts that `keyframe run OPTIONS` of `boot` is refused before the guest prints anything.
fn refused(boot: &Boot, options: &[&str], words: &[&str]) {
    let env = TestEnv::new();
    let store = env.store();
    let line = boot.command();
    let mut args = vec!["run", "--store", &store, "--count", "1"];
    args.extend(options);
    args.push("--");
    args.extend(line.iter().map(String::as_str));
    let output = env.run(&args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{options:?}: {text}");
    for word in words.iter().chain(&["fix:"]) {
        assert!(text.contains(word), "{options:?}: no {word:?} in: {text}");
    }
    assert!(output.stdout.is_empty(), "the guest ran: {}", String::from_utf8_lossy(&output.stdout));
    assert!(env.list().is_empty());
}

#[test]
fn what_a_strategy_cannot_do_is_refused_before_the_guest_runs() {
    refused(&backed_by(MEMFD), &["--strategy", "fork"], &["shared memory", "share=off"]);
    let caged = scribbling().with(&["-sandbox", "on,spawn=deny"]);
    refused(&caged, &["--strategy", "fork"], &["seccomp", "-sandbox"]);
    refused(
        &scribbling(),
        &["--strategy", "cow", "--tracker", "write-protect"],
        &["--tracker sync"],
    );
    refused(&scribbling(), &["--strategy", "cow", "--tracker", "compare"], &["--tracker sync"]);
    let dir = tempfile::tempdir().unwrap();
    let file = format!(
        "memory-backend-file,id=mem,size=96M,share=on,mem-path={}",
        dir.path().join("ram").display()
    );
    if on_disk(dir.path()) {
        refused(
            &backed_by(&file),
            &["--strategy", "cow"],
            &["file on disk", "memory-backend-memfd"],
        );
    } else {
        record_skip(Scope::Part, "copy-on-write over a file on disk: the directory is in memory");
    }
}

/// True if the files of this directory are on a disk and not in memory.
fn on_disk(dir: &Path) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    rustix::fs::statfs(dir).is_ok_and(|at| at.f_type.cast_unsigned() != TMPFS_MAGIC)
}

#[test]
fn a_strategy_that_the_run_was_not_started_for_is_refused_when_it_is_asked_for() {
    let env = TestEnv::new();
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &backed_by(MEMFD));
    run.wait_for("KF READY");
    env.ok(&["take"]);
    env.refused(&["take", "--strategy", "cow"], 1, &["copy-on-write", "fix:", "--tracker sync"]);
    env.refused(&["take", "--strategy", "fork"], 1, &["shared memory", "fix:"]);
    // The run continues unharmed.
    env.ok(&["take", "--strategy", "stop-copy"]);
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
}

/// The engine dies as soon as the VM runs again, before it has copied the checkpoint's pages.
fn killed_while_copying(env: &TestEnv, strategy: &str) -> (Process, Orphan) {
    let options = [
        "--interval",
        "400ms",
        "--name",
        "guest",
        "--strategy",
        strategy,
        "--fault",
        "kill:resumed:12",
    ];
    let mut run = env.start(&options, &hashing());
    let qemu = Orphan::of(env, &mut run, "guest");
    let exit = run.wait();
    assert!(!exit.success(), "it was not killed; {}", run.report());
    qemu.assert_runs_on(&run, "hash ", 3);
    (run, qemu)
}

fn assert_newest_goes_on(env: &TestEnv, sequence: &mut Sequence) {
    let mut restored = env.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the newest checkpoint does not go on; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
}

#[test]
fn an_engine_killed_in_a_copy_on_write_does_not_hold_the_guest() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let (run, qemu) = killed_while_copying(&env, "cow");
    qemu.kill();
    sequence.check(&hash_lines(&run.lines()), 2);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    assert_newest_goes_on(&env, &mut sequence);
}

#[test]
fn an_engine_killed_with_a_frozen_child_leaves_none_and_the_next_reaps_it() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let (run, qemu) = killed_while_copying(&env, "fork");
    wait_until("the frozen child is dead", || qemu.children().iter().all(|state| *state == 'Z'));
    let zombies = qemu.children().len();
    assert!(zombies <= 1, "{zombies} children are left");
    // The next engine on the same VM reaps its own snapshots and those of the dead one.
    let socket = qemu.qmp.display().to_string();
    let options = ["--strategy", "fork", "--count", "3", "--interval", "300ms", "--name", "again"];
    let args = env.attach_args(&["--qmp", &socket], qemu.pid(), &options);
    let output = env.run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    // The dead engine's watchdog may still run and resume the VM in a pause; that checkpoint is
    // discarded.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("3 checkpoints sealed"), "{output:?}");
    assert!(qemu.children().is_empty(), "children are left: {:?}", qemu.children());
    qemu.assert_runs_on(&run, "hash ", 3);
    qemu.kill();
    sequence.check(&hash_lines(&run.lines()), 3);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}
