//! Each tool of [`TOOLS`] gives the results of one replay, whatever the number of jobs, during the recording and
//! after it, on this machine and on the nodes of a cluster.

use keyframe_test_hosts::{Rate, SlurmCluster};
use keyframe_tests::recording::{end_after, record, recordable_guest};
use keyframe_tests::{Process, TestEnv, chosen_qemus, small_guest, variants, wait_until};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Keyframe's tools except `watch` and `wait`, and the guide's third-party tool `lengths`.
const TOOLS: [&str; 8] =
    ["icount", "hot", "memtrace", "coverage", "cache", "working-set", "syscalls", "lengths"];
/// Nodes of the cluster, as many as the most jobs.
const NODES: u32 = 3;

/// A way to analyse a recording.
#[derive(Clone, Copy, Debug)]
struct Way {
    jobs: u64,
    /// Begin while the recording is made.
    live: bool,
    /// By the nodes of a cluster, a pilot for each job.
    on_cluster: bool,
}

/// Returns all ways. Neighbours differ in all respects.
fn ways() -> Vec<Way> {
    let way = |n: u64| Way {
        jobs: n % 3 + 1,
        live: n.is_multiple_of(2),
        on_cluster: (n / 2).is_multiple_of(2),
    };
    (0..12).map(way).collect()
}

/// An analysis of the recording `R`.
struct Analysis {
    tool: &'static str,
    way: Way,
    out: String,
}

impl Analysis {
    fn command(&self, env: &TestEnv, cluster: &SlurmCluster) -> Command {
        let Way { jobs, live, on_cluster } = self.way;
        let (name, jobs) = (tool_name(env, self.tool), jobs.to_string());
        let mut args = vec!["analyze", "R", "--tool", &name, "--out", &self.out, "--json"];
        let symbols = format!("symbols={}", small_guest().join("vmlinux").display());
        if self.tool == "syscalls" {
            args.extend(["--tool-arg", &symbols]);
        }
        if live {
            args.push("--follow");
        }
        if !on_cluster {
            args.extend(["--jobs", &jobs]);
            return env.command(&args);
        }
        args.extend(["--on", "slurm:main", "--nodes", &jobs]);
        cluster.on_server(&env.command(&args))
    }

    /// Compares the results with those of one replay of the whole recording.
    fn equals_one_replay(&self, env: &TestEnv, one_replay: &Path) {
        let own = env.path().join(&self.out);
        let mut compared = 0;
        for entry in fs::read_dir(one_replay).expect("the results of one replay").flatten() {
            let read = |dir: &Path| fs::read(dir.join(entry.file_name())).unwrap_or_default();
            assert!(
                read(one_replay) == read(&own),
                "{} of {} by {:?} is not that of one replay",
                entry.file_name().display(),
                self.tool,
                self.way
            );
            compared += usize::from(entry.path().is_file());
        }
        assert!(compared > 0, "{} has no results", self.tool);
    }
}

#[test]
fn every_tool_is_exact_with_any_jobs_meanwhile_and_afterwards_here_and_on_nodes() {
    for qemu in chosen_qemus(6) {
        let env = TestEnv::without_store();
        let cluster = SlurmCluster::start(&env.path().join("cluster"), NODES, Rate::GIGABIT)
            .expect("a cluster");
        make_third_party_tool(&env);
        let boot = recordable_guest(&qemu.path, "hash+dirty kf.mib=2 kf.pause_ms=10");
        let mut vm = record(&env, &["--checkpoint-every", "400ms"], &boot);
        // Over twelve seeds each tool is analysed in each way.
        let mut all: Vec<Analysis> = Vec::new();
        for (at, tool) in TOOLS.into_iter().enumerate() {
            let mut ways = ways();
            ways.rotate_left(at * 5 % 12);
            for (number, way) in variants(ways, 1).into_iter().enumerate() {
                all.push(Analysis { tool, way, out: format!("{tool}-{number}") });
            }
        }
        let (live, deferred): (Vec<&Analysis>, Vec<&Analysis>) =
            all.iter().partition(|one| one.way.live);
        let sealed = env.path().join("R/store/checkpoints");
        wait_until("checkpoints", || fs::read_dir(&sealed).map_or(0, Iterator::count) >= 2);
        let followers: Vec<Process> =
            live.iter().map(|one| Process::start(one.command(&env, &cluster))).collect();
        end_after(&env, &mut vm, 7);
        for (analysis, mut follower) in live.iter().zip(followers) {
            let what = format!("{} by {:?}", analysis.tool, analysis.way);
            assert!(follower.wait().success(), "{what}: {}", follower.report());
        }
        for analysis in &deferred {
            let output = analysis.command(&env, &cluster).output().expect("run keyframe");
            let what = format!("{} by {:?}", analysis.tool, analysis.way);
            assert!(output.status.success(), "{what}: {output:?}");
        }
        for tool in TOOLS {
            let one_replay = one_replay(&env, &cluster, tool);
            for analysis in all.iter().filter(|one| one.tool == tool) {
                analysis.equals_one_replay(&env, &one_replay);
            }
        }
    }
}

/// Analyses `R` by one replay through all intervals. Returns the directory of the results.
fn one_replay(env: &TestEnv, cluster: &SlurmCluster, tool: &'static str) -> PathBuf {
    let way = Way { jobs: 2, live: false, on_cluster: false };
    let analysis = Analysis { tool, way, out: format!("{tool}-one") };
    let mut command = analysis.command(env, cluster);
    let output = command.arg("--check-sequential").output().expect("run keyframe");
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["equals_sequential"], true, "{tool}: {report:#}");
    let files = report["files"].as_array().expect("files");
    let kept = env.path().join(format!("{tool}-kept"));
    fs::create_dir(&kept).expect("make a directory");
    for file in files {
        let from = Path::new(file.as_str().expect("a path"));
        fs::copy(from, kept.join(from.file_name().expect("a name"))).expect("copy a result");
    }
    kept
}

fn tool_name(env: &TestEnv, tool: &str) -> String {
    match tool {
        "lengths" => env.path().join("lengths.toml").display().to_string(),
        other => other.to_owned(),
    }
}

/// Builds the tool of the guide in the test's directory, as the guide does.
fn make_third_party_tool(env: &TestEnv) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide/src/write-a-tool.md");
    let text = fs::read_to_string(page).expect("the page of the guide");
    let shell = text.split("```sh\n").skip(1).filter_map(|block| block.split("```\n").next());
    let make: String = shell.filter(|block| block.contains("cat > lengths.")).collect();
    let mut bash = Command::new("bash");
    bash.args(["-euc", &make]).current_dir(env.path());
    assert!(bash.status().expect("run bash").success(), "{make}");
}
