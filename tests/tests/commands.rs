//! Tests the commands as scripts and people use them: their fields, tags, the control of a running
//! engine, and retention at the end.

use keyframe_tests::{Boot, Process, Sequence, TestEnv, hash_lines, number, restored_pid};
use rustix::process::Signal;
use std::path::Path;

const FIELDS: [&str; 14] = [
    "id",
    "vm",
    "taken_at",
    "epoch",
    "pause_ns",
    "pause",
    "precopy_rounds",
    "dirty_pages",
    "zero_pages",
    "dedup_pages",
    "stored_bytes",
    "map_bytes",
    "device_bytes",
    "interval_ns",
];

#[test]
fn a_run_is_listed_shown_and_counted() {
    let env = TestEnv::new();
    let store = env.store();
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot.extra = vec!["-name".into(), "web server".into()];
    let mut run = env.start(&["--interval", "300ms", "--count", "6"], &boot);
    assert!(run.wait().success(), "{}", run.report());
    let list = env.list();
    assert_eq!(list.len(), 6);
    for (k, entry) in list.iter().enumerate() {
        for field in FIELDS.iter().chain(&["backlog_ns"]) {
            assert!(!entry[field].is_null(), "no {field} in {entry}");
        }
        assert_eq!(number(entry, "id"), k as u64 + 1);
        assert_eq!(number(entry, "epoch"), k as u64);
        // The characters that it changes are told apart by a hash.
        assert!(entry["vm"].as_str().unwrap().starts_with("web-server-"), "{entry}");
        let phases =
            ["stop", "scan", "copy", "device_state", "resume"].map(|p| number(&entry["pause"], p));
        let (sum, pause) = (phases.iter().sum::<u64>(), number(entry, "pause_ns"));
        assert!(sum <= pause && pause > 0, "phases {phases:?} of a pause of {pause}");
        let kinds = ["zero_pages", "dedup_pages", "unchanged_pages", "stored_pages"]
            .map(|p| number(entry, p));
        assert_eq!(kinds.iter().sum::<u64>(), number(entry, "dirty_pages"), "{entry}");
        assert!(number(entry, "device_bytes") > 1000);
        assert_eq!(number(entry, "interval_ns") == 0, k == 0);
    }
    let shown = env.json(&["show", "--json", "--store", &store, "latest"]);
    assert_eq!(shown["id"], 6);
    let ram: u64 = shown["ram"].as_array().unwrap().iter().map(|b| number(b, "total_bytes")).sum();
    assert_eq!(ram, number(&shown, "ram_bytes"));
    assert!(env.ok(&["show", "--store", &store, "3"]).contains("device state"));
    let stats = env.json(&["stats", "--json", "--store", &store]);
    assert_eq!(number(&stats, "checkpoints"), 6);
    let zero: u64 = list.iter().map(|e| number(e, "zero_pages")).sum();
    assert_eq!(number(&stats, "zero_pages"), zero);
    assert!(env.ok(&["list", "--store", &store]).lines().count() == 7);
    assert!(env.ok(&["list", "--store", &store, "--last", "2"]).lines().count() == 3);
    // A pause does not read from the user's pipe: `| head` ends without an error.
    let output = env.run(&["check", "--store", &store, "--quiet"]);
    assert!(output.status.success() && output.stderr.is_empty());
}

/// The capabilities of the thread with this `/proc` directory, as a mask (capabilities(7)).
fn permitted(thread: &Path) -> u64 {
    let status = std::fs::read_to_string(thread.join("status")).expect("a thread's status");
    let mask =
        status.lines().find_map(|line| line.strip_prefix("CapPrm:")).expect("its capabilities");
    u64::from_str_radix(mask.trim(), 16).expect("a mask")
}

/// QEMU has the capabilities of its user. The process that started it keeps those for tracing it
/// and for files.
fn assert_rights(qemu: u64, keyframe: u64) {
    const SYS_PTRACE: u64 = 1 << 19;
    let kept =
        [0, 1, 2, 3, 5, 14, 19, 21, 23, 24, 38, 40].map(|bit| 1u64 << bit).iter().sum::<u64>();
    let [qemu, engine] = [qemu, keyframe].map(|pid| format!("/proc/{pid}"));
    let had = permitted(Path::new(&qemu));
    assert_eq!(had, permitted(Path::new("/proc/self")));
    let wanted = if had & SYS_PTRACE == 0 { had } else { had & kept };
    for thread in std::fs::read_dir(format!("{engine}/task")).expect("the engine's threads") {
        let thread = thread.expect("a thread").path();
        let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
        assert_eq!(permitted(&thread), wanted, "thread {name}");
    }
}

#[test]
fn an_engine_is_asked_for_checkpoints_by_name() {
    let env = TestEnv::new();
    let store = env.store();
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    assert!(env.list().is_empty(), "nobody asked for these");
    let taken = env.json(&["take", "--json", "--tag", "first", "--name", "guest"]);
    assert_eq!((number(&taken, "id"), &taken["tags"][0]), (1, &"first".into()));
    env.ok(&["take", "--strategy", "stop-copy"]);
    env.refused(&["take", "--tag", "../evil"], 1, &["evil"]);
    env.refused(&["take", "--tag", "42"], 1, &["42"]);
    let status = env.json(&["status", "--json"]);
    assert_eq!((number(&status[0], "sealed"), &status[0]["vm"]), (2, &"guest".into()));
    assert_rights(number(&status[0], "qemu_pid"), number(&status[0], "engine_pid"));
    assert!(env.ok(&["status"]).contains("guest: running"));
    run.signal(Signal::INT);
    assert!(run.wait().success(), "{}", run.report());
    assert!(run.errors().contains("2 checkpoints sealed"), "{}", run.report());
    assert_eq!(env.json(&["show", "--json", "--store", &store, "first"])["id"], 1);

    let mut restored = env.restore("first", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 3).then_some(()));
    assert!(grown.is_some(), "{}", restored.report());
    Sequence::new(16).check(&hash_lines(&restored.lines()), 3);
    assert_rights(restored_pid(&restored).into(), restored.pid().into());
    restored.signal(Signal::INT);
    assert!(restored.wait().success(), "{}", restored.report());
}

/// Two VMs run, each with a store of its own.
#[test]
fn a_store_says_which_vm_is_meant() {
    let mut env = TestEnv::new();
    let other = env.path().join("other store").display().to_string();
    env.ok(&["init", &other]);
    let mut boot = Boot::new("idle");
    boot.mem_mib = 96;
    let options = ["--interval", "none", "--name"];
    let mut one = env.start(&[&options[..], &["one"]].concat(), &boot);
    let mut line = vec!["run", "--store", &other, "--no-rehearsal", "--name", "two", "--"];
    let words = boot.command();
    line.extend(words.iter().map(String::as_str));
    let mut two = Process::start(env.command(&line));
    for run in [&mut one, &mut two] {
        run.wait_for("KF READY");
    }
    env.refused(&["take"], 1, &["several VMs run", "one, two"]);
    let taken = env.json(&["take", "--json", "--store", &other]);
    assert_eq!(taken["vm"], "two");
    let taken = env.json(&["take", "--json", "--store", &env.store(), "--tag", "base"]);
    assert_eq!(taken["vm"], "one");
    env.refused(
        &["take", "--store", &other, "--name", "one"],
        1,
        &["other store", "keyframe status"],
    );
    env.refused(&["take", "--store", "nowhere"], 1, &["nowhere", "keyframe status"]);
    let of_other = env.json(&["status", "--json", "--store", &other]);
    assert_eq!((of_other.as_array().map(Vec::len), &of_other[0]["vm"]), (Some(1), &"two".into()));
    assert!(env.ok(&["status", "--store", "nowhere"]).contains("nowhere"));
    let back = env.json(&["rollback", "--json", "--store", &env.store(), "base"]);
    assert_eq!(back["vm"], "one");

    // The variable chooses, and a store of which no VM runs does not mislead.
    env.set("KEYFRAME_STORE", "nowhere");
    env.refused(&["take"], 1, &["several VMs run", "one, two"]);
    env.set("KEYFRAME_STORE", &other);
    assert_eq!(env.json(&["take", "--json"])["vm"], "two");
    env.ok(&["stop"]);
    assert!(two.wait().success(), "{}", two.report());
    // One VM runs, so it is meant.
    env.ok(&["stop"]);
    assert!(one.wait().success(), "{}", one.report());
}

#[test]
fn a_kept_vm_runs_on_alone() {
    let env = TestEnv::new();
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    let options = ["--interval", "200ms", "--count", "3", "--name", "guest", "--on-exit", "keep"];
    let mut run = env.start(&options, &boot);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    let errors = run.errors();
    let pid: i32 = errors
        .rsplit_once("QEMU ")
        .and_then(|(_, r)| r.split(',').next()?.trim().parse().ok())
        .expect("a pid");
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
    while hash_lines(&run.lines()).len() < 3 && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let lines = hash_lines(&run.lines());
    // A running VM keeps its name; an ended one frees it.
    let store = env.store();
    let line = boot.command();
    let mut args = vec!["run", "--store", &store, "--name", "guest", "--count", "1", "--"];
    args.extend(line.iter().map(String::as_str));
    env.refused(&args, 1, &["still runs", "--name"]);
    let target = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(target, Signal::TERM).unwrap();
    assert!(lines.len() >= 3, "the kept VM is silent; {}", run.report());
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
    while rustix::process::test_kill_process(target).is_ok() && std::time::Instant::now() < deadline
    {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    env.ok(&args);
}

#[test]
fn checkpoints_that_cannot_keep_up_wait_and_say_so() {
    let env = TestEnv::new();
    let mut boot = Boot::new("dirty kf.rate=20000 kf.mib=16");
    boot.mem_mib = 96;
    // Checkpoints come faster than any machine encodes them, and the memory for their pages fills.
    let options =
        ["--interval", "100ms", "--staging", "128", "--name", "guest", "--fault", "slow-encoder"];
    let mut run = env.start(&options, &boot);
    run.wait_for("KF READY");
    run.wait_for_error("late: the one before was still being encoded");
    env.ok(&["stop"]);
    // A checkpoint that finds the memory full fails with a warning; the next one has its pages.
    assert!(matches!(run.wait().code(), Some(0 | 3)), "{}", run.report());
    assert!(env.list().iter().any(|e| number(e, "backlog_ns") > 10_000_000));
}

#[test]
fn stores_are_shared_by_runs_one_after_the_other() {
    let env = TestEnv::new();
    let mut boot = Boot::new("idle");
    boot.mem_mib = 96;
    for name in ["one", "two"] {
        let mut run = env.start(&["--interval", "300ms", "--count", "3", "--name", name], &boot);
        assert!(run.wait().success(), "{}", run.report());
    }
    let list = env.list();
    assert_eq!(list.len(), 6);
    assert_eq!(
        (&list[2]["vm"], &list[3]["vm"], number(&list[3], "epoch")),
        (&"one".into(), &"two".into(), 0)
    );
    // The second VM booted the same kernel, whose pages the store already had.
    let dedup: u64 = list[3..].iter().map(|e| number(e, "dedup_pages")).sum();
    assert!(dedup > 100, "only {dedup} pages deduplicated across runs");
}

/// With equal intervals and no interference the simulation agrees with the formulas.
fn a_cluster_is_simulated(env: &TestEnv, paper: &[&str]) {
    let simulated = [paper, &["--nodes", "4,32,90", "--simulate"]].concat();
    let plan = env.json(&[&simulated[..], &["--json"]].concat());
    let rows = plan["simulated"]["table"].as_array().expect("a table");
    assert_eq!(rows.iter().map(|row| number(row, "nodes")).collect::<Vec<_>>(), [4, 32, 90]);
    for row in rows {
        let (found, formula) =
            (row["makespan_s"].as_f64(), row["closed_form"]["run_time_s"].as_f64());
        let off = found.zip(formula).map(|(found, formula)| (found / formula - 1.0).abs());
        assert!(off.is_some_and(|off| off < 0.02), "{row:#}");
    }
    let text = env.ok(&simulated);
    assert!(text.contains("simulated from constants") && text.contains("efficiency"), "{text}");
    let failing =
        [&simulated[..], &["--mtbf", "30m", "--repair", "5m", "--seed", "7", "--json"]].concat();
    let (once, again) = (env.json(&failing), env.json(&failing));
    assert_eq!(once, again, "chance follows the seed");
    for (with, without) in once["simulated"]["table"].as_array().expect("a table").iter().zip(rows)
    {
        assert!(with["makespan_s"].as_f64() > without["makespan_s"].as_f64(), "{with:#}");
    }
    env.refused(&[&simulated[..], &["--mtbf", "1s"]].concat(), 1, &["failed for good", "--repair"]);
    env.refused(&[&simulated[..], &["--network", "1Gbit"]].concat(), 2, &["--from"]);
    env.refused(&[paper, &["--deferred"]].concat(), 2, &["--simulate"]);
    env.refused(
        &[paper, &["--simulate", "--nodes", "5000"]].concat(),
        1,
        &["at most 4096", "--nodes"],
    );
}

/// The figures of the paper.
#[test]
fn a_parallel_simulation_is_planned() {
    let env = TestEnv::without_store();
    let paper = [
        "plan", "--t-vm", "3600", "--s-sim", "100", "--s-log", "1.08", "--t-c", "0.1", "--t-i", "1",
    ];
    let plan = env.json(&[&paper[..], &["--json"]].concat());
    assert_eq!((number(&plan, "n_opt"), &plan["formula"]), (90, &"enough".into()));
    assert!(plan["speed_up"].as_f64().is_some_and(|s| (84.0..85.0).contains(&s)), "{plan:#}");
    let plot = ["--nodes", "4", "--plot", "plan.svg"];
    let text = env.ok(&[&paper[..], &plot].concat());
    assert!(text.contains("N 90") && text.contains("4 are too few"), "{text}");
    assert!(env.path().join("plan.svg").exists());
    env.refused(&[&paper[..], &["--plot", "plan.txt"]].concat(), 1, &[".svg"]);
    a_cluster_is_simulated(&env, &paper);
    env.refused(&["plan", "--nodes", "4"], 2, &["--t-vm", "--s-sim"]);
    let none = ["plan", "--t-vm", "0", "--s-sim", "100", "--t-c", "0.1", "--t-i", "1"];
    env.refused(&none, 1, &["t_vm", "more than 0"]);
    env.refused(&["plan", "--from", "R", "--s-sim", "9", "--t-i", "1"], 1, &["no recording"]);
}
