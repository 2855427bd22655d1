//! Intervals on the nodes of a Slurm cluster.

use keyframe_tests::slurm::{Cluster, PATIENCE};
use keyframe_tests::{Bench, Boot, Process, number, until};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;

/// A recording `R` of a few seconds, with checkpoints.
fn record(bench: &Bench) {
    let boot = Boot { machine: "q35".into(), mem_mib: 96, ..Boot::new("hash kf.mib=2 kf.pause_ms=5") };
    let mut command = bench.command(&["record", "--out", "R", "--checkpoint-every", "300ms"]);
    command.arg("--").args(boot.command());
    let mut vm = Process::start(command);
    let store = bench.path().join("R/store/checkpoints");
    let there = vm.wait_until(120, |_| (std::fs::read_dir(&store).ok()?.count() >= 16).then_some(()));
    assert!(there.is_some(), "{}", vm.report());
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// `keyframe analyze` into `out`, on the cluster's server.
fn analyze(bench: &Bench, cluster: &Cluster, out: &str, options: &[&str]) -> Value {
    let mut args = vec!["analyze", "R", "--tool", "hot", "--out", out, "--json", "--on", "slurm:main"];
    args.extend(["--lease", "3s"]);
    args.extend(options);
    let output = Bench::run_within(cluster.on_server(&bench.command(&args)), PATIENCE);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {}: {said}", output.status);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {said}"))
}

fn assert_same_files(one: &Path, other: &Path) {
    let mut count = 0;
    for entry in std::fs::read_dir(one).expect("read the results").flatten() {
        let name = entry.file_name();
        let is_result = entry.path().is_file()
            && !["analysis.json", "order.json", "intervals.json", "lock"].iter().any(|own| name == *own);
        if is_result {
            let read = |dir: &Path| std::fs::read(dir.join(&name)).expect("read a result");
            assert!(read(one) == read(other), "{name:?}");
            count += 1;
        }
    }
    assert!(count > 0, "{} has no results", one.display());
}

#[test]
fn a_node_dies_and_the_results_are_those_of_one_replay() {
    let bench = Bench::without_store();
    record(&bench);
    let cluster = Cluster::start(&bench, 3);

    // The one who submits goes away, and then a node.
    let submitted = analyze(&bench, &cluster, "A", &["--detach", "--keep-parts"]);
    assert_eq!(submitted["jobs"].as_array().map(Vec::len), Some(1), "{submitted}");
    let settled = || std::fs::read_dir(bench.path().join("A/queue/settled")).map_or(0, Iterator::count);
    until("some intervals are done", || settled() >= 3);
    let taken: Vec<String> = std::fs::read_dir(bench.path().join("A/queue/taken"))
        .expect("the queue")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    println!("taken: {taken:?}");
    cluster.kill_node(2);
    let report = analyze(&bench, &cluster, "A", &["--keep-parts"]);
    let all = report["intervals"].as_array().expect("intervals");
    assert!(all.len() >= 15 && all.iter().any(|one| one["is_old"] == true), "{report:#}");
    let logs = std::fs::read_dir(bench.path().join("A/slurm")).expect("the pilots' logs").flatten();
    assert!(logs.filter(|log| log.path().extension().is_some_and(|e| e == "log")).count() >= 3);
    assert!(cluster.ask("squeue", &["--noheader", "--states=PENDING,RUNNING"]).trim().is_empty());

    let alone = bench.json(&["analyze", "R", "--tool", "hot", "--out", "B", "--json", "--check-sequential"]);
    assert_eq!(alone["equals_sequential"], true, "{alone:#}");
    assert_eq!(number(&alone, "instructions"), number(&report, "instructions"));
    assert_same_files(&bench.path().join("B"), &bench.path().join("A"));
}
