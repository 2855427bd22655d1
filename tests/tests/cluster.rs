//! Tests analyses whose intervals run on the nodes of a Slurm cluster.

use keyframe_test_hosts::{Rate, SlurmCluster};
use keyframe_tests::recording::end_after;
use keyframe_tests::{Boot, Choices, Process, TestEnv, number, seed};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Longest time of an analysis whose workers die.
const ANALYSIS_TIMEOUT: Duration = Duration::from_mins(3);

/// Starts the recording `R`, with checkpoints.
fn record(env: &TestEnv) -> Process {
    let boot =
        Boot { machine: "q35".into(), mem_mib: 96, ..Boot::new("hash kf.mib=2 kf.pause_ms=5") };
    let mut command = env.command(&["record", "--out", "R", "--checkpoint-every", "300ms"]);
    command.arg("--").args(boot.command());
    Process::start(command)
}

fn count(path: &Path) -> usize {
    fs::read_dir(path).map_or(0, Iterator::count)
}

/// Runs `keyframe analyze` into `out`, on the cluster's server.
fn analyze(env: &TestEnv, cluster: &SlurmCluster, options: &[&str]) -> Command {
    let mut args = vec!["analyze", "R", "--tool", "hot", "--out", "A", "--json", "--keep-parts"];
    args.extend(["--on", "slurm:main", "--lease", "3s"]);
    args.extend(options);
    cluster.on_server(&env.command(&args))
}

/// The processes of pilots and of their replays on node `n`, which is from 1 on.
fn pilots_on(cluster: &SlurmCluster, n: usize) -> Vec<Pid> {
    let name = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let is_pilot =
        |pid: &u32| ["keyframe", "qemu-system"].iter().any(|p| name(*pid).starts_with(p));
    let all = cluster.node(n).pids().into_iter().filter(is_pilot);
    all.filter_map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}

/// Ranges on real nodes, with takeovers and deaths by a seed: of replays, of pilots, of tasks and of
/// the process that wants the results. Nothing is counted twice, and nothing is missing.
#[test]
#[ignore = "make soak"]
fn soak_schedules_of_takeovers_and_deaths() {
    const SCHEDULES: u64 = 30;
    const NODES: u32 = 3;
    let env = TestEnv::without_store();
    let cluster =
        SlurmCluster::start(&env.path().join("cluster"), NODES, Rate::GIGABIT).expect("a cluster");
    let mut vm = record(&env);
    end_after(&env, &mut vm, 12);
    let one_replay = ["analyze", "R", "--tool", "hot", "--out", "B", "--jobs", "1"];
    env.ok(&[&one_replay[..], &["--check-sequential"]].concat());
    let mut deaths = 0;
    for schedule in seed()..seed() + SCHEDULES {
        let mut random = Choices::new(schedule);
        let out = env.path().join("A");
        let mut analysis = Process::start(analyze(&env, &cluster, &[]));
        for _ in 0..random.below(5) {
            std::thread::sleep(Duration::from_millis(200 + random.below(2500)));
            if !analysis.is_running() {
                break;
            }
            let pilots = pilots_on(&cluster, 1 + random.below(NODES.into()) as usize);
            match random.below(4) {
                0 => {
                    cluster.output_of("scancel", &["--name=keyframe-hot"]).expect("scancel");
                }
                1 => {
                    analysis.signal(Signal::KILL);
                    analysis.wait();
                    analysis = Process::start(analyze(&env, &cluster, &[]));
                }
                _ if pilots.is_empty() => continue,
                _ => {
                    let victim = pilots[random.below(pilots.len() as u64) as usize];
                    let _ = rustix::process::kill_process(victim, Signal::KILL);
                }
            }
            deaths += 1;
        }
        let done = analysis.wait_within(ANALYSIS_TIMEOUT, |p| {
            serde_json::from_str::<Value>(&p.lines().join("\n")).ok()
        });
        let report = done.unwrap_or_else(|| panic!("{schedule}: {}", analysis.report()));
        assert!(analysis.wait().success(), "{schedule}: {}", analysis.report());
        let all = report["intervals"].as_array().expect("intervals");
        assert!(
            all.windows(2).all(|pair| number(&pair[0], "index") + 1 == number(&pair[1], "index"))
        );
        assert_same_files(&env.path().join("B"), &out);
        fs::remove_dir_all(&out).expect("remove the analysis");
    }
    println!("{SCHEDULES} schedules, {deaths} deaths");
    assert!(deaths > SCHEDULES / 2, "{deaths}");
}

fn assert_same_files(one: &Path, other: &Path) {
    let mut count = 0;
    for entry in fs::read_dir(one).expect("read the results").flatten() {
        let name = entry.file_name();
        let is_result = entry.path().is_file()
            && !["analysis.json", "order.json", "intervals.json", "lock"]
                .iter()
                .any(|own| name == *own);
        if is_result {
            let read = |dir: &Path| fs::read_to_string(dir.join(&name)).expect("read a result");
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
    let cluster =
        SlurmCluster::start(&env.path().join("cluster"), 3, Rate::GIGABIT).expect("a cluster");
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
    assert!(!fs::exists(env.path().join("A/queue/closed")).expect("look"), "more may come");
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
    let logs = fs::read_dir(env.path().join("A/slurm")).expect("the pilots' logs").flatten();
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
