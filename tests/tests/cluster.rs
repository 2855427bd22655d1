//! Tests analyses whose intervals run on the nodes of a Slurm cluster.

use keyframe_test_hosts::{Rate, SlurmCluster};
use keyframe_tests::{Boot, Process, TestEnv, number};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Starts the recording `R`, with checkpoints.
fn record(env: &TestEnv) -> Process {
    let boot =
        Boot { machine: "q35".into(), mem_mib: 96, ..Boot::new("hash kf.mib=2 kf.pause_ms=5") };
    let mut command = env.command(&["record", "--out", "R", "--checkpoint-every", "300ms"]);
    command.arg("--").args(boot.command());
    Process::start(command)
}

fn count(path: &Path) -> usize {
    std::fs::read_dir(path).map_or(0, Iterator::count)
}

/// Runs `keyframe analyze` into `out`, on the cluster's server.
fn analyze(env: &TestEnv, cluster: &SlurmCluster, options: &[&str]) -> Command {
    let mut args = vec!["analyze", "R", "--tool", "hot", "--out", "A", "--json", "--keep-parts"];
    args.extend(["--on", "slurm:main", "--lease", "3s"]);
    args.extend(options);
    cluster.on_server(&env.command(&args))
}

fn assert_same_files(one: &Path, other: &Path) {
    let mut count = 0;
    for entry in std::fs::read_dir(one).expect("read the results").flatten() {
        let name = entry.file_name();
        let is_result = entry.path().is_file()
            && !["analysis.json", "order.json", "intervals.json", "lock"]
                .iter()
                .any(|own| name == *own);
        if is_result {
            let read =
                |dir: &Path| std::fs::read_to_string(dir.join(&name)).expect("read a result");
            let (one, other) = (read(one), read(other));
            let differing = one.lines().zip(other.lines()).find(|(one, other)| one != other);
            assert!(one == other, "{}: {differing:?}", name.display());
            count += 1;
        }
    }
    assert!(count > 0, "{} has no results", one.display());
}

#[test]
fn a_recording_is_analysed_while_it_is_made_and_processes_die() {
    let mut env = TestEnv::without_store();
    let cluster = SlurmCluster::start(&env.path().join("cluster"), 3, Rate::GIGABIT).expect("a cluster");
    let mut vm = record(&env);
    let sealed = env.path().join("R/store/checkpoints");
    let begun = vm.wait_until(|_| (count(&sealed) >= 3).then_some(()));
    assert!(begun.is_some(), "{}", vm.report());

    // Nodes finish intervals while others are still recorded. The analysis is killed, and its
    // pilots run on.
    let settled = env.path().join("A/queue/settled");
    let mut analysis = Process::start(analyze(&env, &cluster, &["--follow"]));
    let some = analysis.wait_until(|_| (count(&settled) >= 3).then_some(()));
    assert!(some.is_some(), "{}", analysis.report());
    analysis.signal(Signal::KILL);
    analysis.wait();
    assert!(!std::fs::exists(env.path().join("A/queue/closed")).expect("look"), "more may come");
    let enough = vm.wait_until(|_| (count(&sealed) >= 16).then_some(()));
    assert!(enough.is_some(), "{}", vm.report());
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());

    // Then the pilots are cancelled, and a node dies during an interval. The checkpoints now come
    // from a server, over the nodes' links.
    cluster.output_of("scancel", &["--name=keyframe-hot"]).expect("scancel");
    env.set("XDG_STATE_HOME", &env.path().join("state").display().to_string());
    env.set("KEYFRAME_TOKEN", "the token of this test");
    env.set("KEYFRAME_CACHE", &env.path().join("cache").display().to_string());
    let serve = ["serve", "R/store", "--listen", "10.77.0.1:0", "--json"];
    let mut server = Process::start(cluster.on_server(&env.command(&serve)));
    let listening: Value =
        serde_json::from_str(&server.wait_for("\"url\"")).expect("its first line");
    let [url, fingerprint] =
        ["url", "fingerprint"].map(|key| listening[key].as_str().expect("text"));
    env.set("KEYFRAME_SERVE_FINGERPRINT", fingerprint);
    let mut analysis = Process::start(analyze(&env, &cluster, &["--store", url]));
    let more = count(&settled) + 2;
    let some = analysis.wait_until(|_| (count(&settled) >= more).then_some(()));
    assert!(some.is_some(), "{}", analysis.report());
    cluster.kill_node(2);
    let report = analysis.wait_until(|p| serde_json::from_str::<Value>(&p.lines().join("\n")).ok());
    let report = report.unwrap_or_else(|| panic!("{}", analysis.report()));
    assert!(analysis.wait().success(), "{}", analysis.report());
    let all = report["intervals"].as_array().expect("intervals");
    assert!(all.len() >= 12 && all.iter().any(|one| one["is_old"] == true), "{report:#}");
    println!("between two intervals of a pilot: {} ns", report["dispatch_ns"]);
    server.signal(Signal::TERM);
    assert!(server.wait().success(), "{}", server.report());
    let sent: Value = serde_json::from_str(&server.wait_for("bytes_sent")).expect("its report");
    assert!(number(&sent, "bytes_sent") > 1 << 20 && number(&sent, "refused") == 0, "{sent}");
    let logs = std::fs::read_dir(env.path().join("A/slurm")).expect("the pilots' logs").flatten();
    assert!(logs.filter(|log| log.path().extension().is_some_and(|e| e == "log")).count() >= 3);
    let left = cluster.output_of("squeue", &["--noheader", "--states=PENDING,RUNNING"]);
    assert_eq!(left.expect("squeue").trim(), "");

    equals_an_analysis_in_sequence(&env, &report);
}

/// The analysis on the cluster has the results of one on this machine, in parallel and in sequence.
fn equals_an_analysis_in_sequence(env: &TestEnv, report: &Value) {
    let alone =
        env.json(&["analyze", "R", "--tool", "hot", "--out", "B", "--json", "--check-sequential"]);
    assert_eq!(alone["equals_sequential"], true, "{alone:#}");
    assert_eq!(number(&alone, "instructions"), number(report, "instructions"));
    assert_same_files(&env.path().join("B"), &env.path().join("A"));
}
