//! Tests the benchmarks as users run them: the JSON has exactly the documented keys, and each value
//! is a number of that run.

use keyframe_tests::{Boot, Process, TestEnv, hash_lines, needs_firecracker, number};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

/// How long a benchmark may take on a busy machine; on an idle one it takes 20 to 40 s.
const LIMIT: Duration = Duration::from_mins(5);

/// Runs `keyframe-bench ARGS`, which must succeed.
fn report(env: &TestEnv, args: &[&str]) -> (Value, Output) {
    let output = TestEnv::run_within(env.benchmark(&[&["--json"], args].concat()), LIMIT);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    let report: Value =
        serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
    for part in ["figures", "ratios"] {
        // A figure that could not be measured would be null.
        assert!(values(&report, part).values().all(Value::is_f64), "{report}");
    }
    (report, output)
}

/// Runs `keyframe-bench ARGS`, which must fail with `code` and an error that contains each of
/// `words`.
fn refused(env: &TestEnv, args: &[&str], code: i32, words: &[&str]) {
    let output = TestEnv::run_within(env.benchmark(args), LIMIT);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "keyframe-bench {args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "keyframe-bench {args:?}: no {word:?} in: {text}");
    }
}

fn values<'a>(report: &'a Value, part: &str) -> &'a Map<String, Value> {
    report[part].as_object().expect("an object")
}

#[test]
#[ignore = "make soak"]
fn soak_pauses_are_measured_beside_those_of_peers() {
    let env = TestEnv::exclusive();
    let (report, _) =
        report(&env, &["pause", "--only", "20k", "--rounds", "1", "--plot", "pause.svg"]);
    assert_eq!(report["name"], "pause");
    let (figures, ratios) = (values(&report, "figures"), values(&report, "ratios"));
    for key in ["precopy_20k_pause_p50_ns", "precopy_20k_pause_p99_ns", "empty_pause_p50_ns"] {
        assert!(figures[key].as_f64() > Some(0.0), "{key}: {report}");
    }
    let pause = |way: &str| figures[&format!("{way}_20k_pause_p50_ns")].as_f64().unwrap();
    for way in ["stop_copy", "savevm"] {
        let ratio = ratios[&format!("{way}_over_precopy_20k")].as_f64().unwrap();
        assert!((ratio / (pause(way) / pause("precopy")) - 1.0).abs() < 1e-9, "{way}: {report}");
    }
    assert!(ratios.contains_key("precopy_20k_over_empty"));
    let others =
        figures.keys().chain(ratios.keys()).filter(|k| k.contains("60k") || k.contains("gib"));
    assert_eq!(others.count(), 0, "keys of what was not measured: {report}");
    let plot = std::fs::read_to_string(env.path().join("pause.svg")).expect("the plot");
    assert!(plot.contains("savevm"));
}

#[test]
#[ignore = "make soak"]
fn soak_column_encoders_are_measured_beside_the_librarys() {
    let env = TestEnv::new();
    let (report, _) = report(&env, &["memtrace-columns", "--rounds", "1", "--plot", "c.svg"]);
    let (figures, ratios) = (values(&report, "figures"), values(&report, "ratios"));
    for column in ["icount", "pc", "vaddr", "page", "size", "flags", "all"] {
        for unit in ["million_rows_ns", "million_rows_bytes"] {
            for encoder in ["own", "library"] {
                let key = format!("{encoder}_{column}_{unit}");
                assert!(figures[&key].as_f64() > Some(0.0), "{key}: {report}");
            }
        }
        assert!(ratios.contains_key(&format!("{column}_library_over_own_time")), "{report}");
    }
    assert!(figures["rows"].as_f64() > Some(200_000.0), "{report}");
}

#[test]
#[ignore = "make soak"]
fn soak_work_lost_is_measured_and_what_cannot_run_is_left_out_aloud() {
    let env = TestEnv::new();
    let only = "compute_1s,compute_100ms,compile";
    let args = [
        "overhead",
        "--quick",
        "--only",
        only,
        "--rounds",
        "1",
        "--real-guest",
        "/nowhere",
        "--quiet",
    ];
    let (report, output) = report(&env, &args);
    let ratios = values(&report, "ratios");
    for key in ["work_lost_compute_1s", "work_lost_compute_100ms"] {
        assert!(
            ratios.get(key).and_then(Value::as_f64).is_some_and(|lost| lost < 1.0),
            "{key}: {report}"
        );
    }
    assert!(values(&report, "figures")["compute_plain_units_per_s"].as_f64() > Some(0.0));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("compiling is left out") && errors.contains("/nowhere"), "{errors}");
    let all = values(&report, "figures").keys().chain(ratios.keys());
    let others: Vec<_> = all.filter(|k| k.contains("compile") || k.contains("200ms")).collect();
    assert!(others.is_empty(), "figures of what did not run: {others:?}");
}

#[test]
#[ignore = "make soak"]
fn soak_a_peer_that_cannot_run_is_left_out_aloud() {
    let env = TestEnv::new();
    // Without qemu-img there is no image for savevm; the directory has all other programs that the
    // benchmark needs.
    let bin = env.path().join("bin");
    std::fs::create_dir(&bin).expect("make a directory");
    for program in ["qemu-system-x86_64", "cat"] {
        std::os::unix::fs::symlink(keyframe_tests::on_path(program), bin.join(program))
            .expect("link it");
    }
    let mut command = env.benchmark(&["pause", "--json", "--only", "1k", "--rounds", "1"]);
    command.env("PATH", &bin);
    let output = TestEnv::run_within(command, LIMIT);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(
        errors.contains("what QEMU itself offers is left out") && errors.contains("qemu-img"),
        "{errors}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(values(&report, "figures")["precopy_1k_pause_p50_ns"].as_f64() > Some(0.0), "{report}");
    assert!(!report.to_string().contains("savevm"), "{report}");
}

#[test]
fn a_stream_of_pages_is_fed_to_keyframe_and_to_a_flat_file_and_comes_back() {
    let env = TestEnv::without_store();
    let args = ["store", "--quick", "--only", "keyframe,flat_file", "--quiet"];
    let mut command = env.benchmark(&[&["--json"], &args[..]].concat());
    // The temporary directory, where the benchmark would leave files.
    let place = env.path().join("place");
    std::fs::create_dir(&place).expect("make a directory");
    command.env("TMPDIR", &place);
    let output = TestEnv::run_within(command, LIMIT);
    let errors = String::from_utf8_lossy(&output.stderr);
    // The benchmark fails if an image comes back different.
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    assert_eq!(std::fs::read_dir(&place).expect("list it").count(), 0, "files were left behind");
    let report: Value =
        serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
    assert_eq!(report["name"], "store");
    let (figures, ratios) = (values(&report, "figures"), values(&report, "ratios"));
    let positive =
        |value: Option<&Value>| value.and_then(Value::as_f64).filter(|value| *value > 0.0);
    for workload in ["dup", "unique", "steady"] {
        let rate = |store: &str| positive(figures.get(&format!("{store}_{workload}_bytes_per_s")));
        assert!(rate("flat_file").is_some() && rate("ingest").is_some(), "{workload}: {report}");
        assert_eq!(rate("ingest"), rate("keyframe"), "{report}");
    }
    assert!(positive(ratios.get("ingest_over_flat_file")).is_some(), "{report}");
    assert!(positive(ratios.get("memcpy_over_reconstruct")).is_some(), "{report}");
    // The flat file deduplicates and does not compress.
    let bytes =
        |key: &str| positive(figures.get(key)).unwrap_or_else(|| panic!("no {key}: {report}"));
    let distinct_bytes = bytes("keyframe_dedup_only_bytes");
    assert!((1.0..1.1).contains(&(bytes("flat_file_stored_bytes") / distinct_bytes)), "{report}");
    let part = positive(ratios.get("stored_over_dedup_only")).expect("stored_over_dedup_only");
    assert!(part < 1.0, "compression saves nothing: {report}");
    assert!(
        (part / (bytes("keyframe_stored_bytes") / distinct_bytes) - 1.0).abs() < 1e-9,
        "{report}"
    );
    let others = ["rocksdb", "borg", "dedup_zstd", "metadata", "open", "dirtier"];
    let keys = || figures.keys().chain(ratios.keys());
    assert!(
        !keys().any(|key| others.iter().any(|other| key.contains(other))),
        "figures of what did not run: {report}"
    );
}

/// The benchmark reads pages that a VM wrote in place of generated ones.
#[test]
fn the_ram_of_a_recorded_run_is_fed_and_comes_back() {
    let env = TestEnv::new();
    let boot = Boot { mem_mib: 96, ..Boot::new("hash kf.mib=4 kf.pause_ms=5") };
    let mut run = env.start(&["--name", "guest", "--interval", "10m"], &boot);
    run.wait_for("KF READY");
    let store = env.store();
    let feed =
        || env.benchmark(&["store", "--from", &store, "--only", "keyframe,flat_file", "--json"]);
    let take = || drop(env.ok(&["take", "--name", "guest"]));
    take();
    // The store gets more checkpoints than the benchmark reads, which are the last ten.
    for taken in 1..12 {
        run.wait_until(|p| (hash_lines(&p.lines()).len() > taken).then_some(()))
            .expect("it works on");
        take();
    }
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    let mut command = feed();
    command.args(["--quick", "--rounds", "1"]);
    let output = TestEnv::run_within(command, LIMIT);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let note = report["notes"]["stream"].as_str().expect("what was fed");
    let last = env.list().last().map(|entry| number(entry, "id")).expect("a checkpoint");
    assert!(note.contains(&format!("guest at checkpoints {} to {last},", last - 9)), "{note}");
    let figures = values(&report, "figures");
    let bytes = |key: &str| figures[key].as_f64().unwrap_or_else(|| panic!("no {key}: {report}"));
    // Each checkpoint has 4 MiB of noise, the first all of RAM; the flat file has every page of
    // them.
    let (ours, flat) = (bytes("keyframe_stored_bytes"), bytes("flat_file_stored_bytes"));
    assert!((40e6..200e6).contains(&flat) && ours < flat, "{report}");
    assert!(!report.to_string().contains("dirtier"), "{report}");

    let empty = env.path().join("empty").display().to_string();
    env.ok(&["init", &empty]);
    refused(&env, &["store", "--from", &empty], 1, &["no checkpoint"]);
    refused(&env, &["store", "--from", &store, "--only", "dirtier"], 1, &["no part dirtier"]);
    refused(&env, &["pause", "--from", &store], 1, &["pause has no --from"]);
}

#[test]
fn databases_that_are_not_built_are_left_out_aloud() {
    let env = TestEnv::without_store();
    let command = env.benchmark(&["store", "--quick", "--only", "kyoto", "--json"]);
    let output = TestEnv::run_within(command, LIMIT);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(
        errors.contains("kyoto is left out") && errors.contains("make bench-peers"),
        "{errors}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(
        values(&report, "figures").is_empty() && values(&report, "ratios").is_empty(),
        "{report}"
    );
}

#[test]
#[ignore = "make soak"]
fn soak_recording_replaying_and_analysing_are_measured_on_the_same_work() {
    let env = TestEnv::new();
    let only = ["replay", "--quick", "--only", "record,memtrace", "--plot", "replay.svg"];
    let (report, _) = report(&env, &only);
    let (figures, ratios) = (values(&report, "figures"), values(&report, "ratios"));
    let keys = ["record_over_icount", "memtrace_over_callback", "text_over_memtrace"];
    assert!(!ratios.contains_key("machine_gain_2"), "keys of what was not measured: {report}");
    for key in keys {
        let value = ratios.get(key).and_then(Value::as_f64);
        assert!(value.is_some_and(|value| value > 0.0 && value.is_finite()), "{key}: {report}");
    }
    let each = figures["memtrace_bytes_per_access"].as_f64();
    assert!(
        each.is_some_and(|bytes| bytes > 0.0 && bytes < 24.0),
        "no more than a record has: {report}"
    );
    let ns = |way: &str| figures[&format!("processes_{way}_ns")].as_f64().unwrap();
    let ratio = ratios["record_over_icount_processes"].as_f64().unwrap();
    assert!((ratio / (ns("record") / ns("icount")) - 1.0).abs() < 1e-9, "one round: {report}");
    assert!(!report.to_string().contains("redis"), "keys of what was not measured: {report}");
    let plot = std::fs::read_to_string(env.path().join("replay.svg")).expect("the plot");
    assert!(plot.contains("processes"));
}

#[test]
#[ignore = "make soak"]
fn soak_what_a_standby_costs_and_how_soon_it_takes_over_are_measured() {
    let mut env = TestEnv::without_store();
    let place = a_place(&mut env);
    let only = "failover,coordinator,fixed100,adaptive";
    let (report, _) = report(&env, &["replication", "--quick", "--only", only, "--seconds", "4"]);
    nothing_is_left_in(&place);
    let (figures, ratios) = (values(&report, "figures"), values(&report, "ratios"));
    let positive = |of: &Map<String, Value>, key: &str| {
        let value = of.get(key).and_then(Value::as_f64);
        value.filter(|value| *value > 0.0).unwrap_or_else(|| panic!("no {key}: {report}"))
    };
    // The failover takes at least the configured detection time.
    let failover = positive(figures, "failover_p50_ns");
    assert!((3e8..=positive(figures, "failover_max_ns")).contains(&failover), "{report}");
    for policy in ["fixed100", "adaptive"] {
        let protected = positive(figures, &format!("coordinator_per_s_1gbit_{policy}"));
        let slowdown = positive(ratios, &format!("slowdown_coordinator_1gbit_{policy}"));
        let plain = positive(figures, "coordinator_per_s_1gbit_unprotected");
        // The comparison is with the plain runs before and after, of which this is the median.
        assert!((0.5..2.0).contains(&(slowdown / (plain / protected))), "{report}");
        positive(ratios, &format!("coordinator_good_answers_{policy}"));
    }
    assert!(positive(ratios, "wire_over_raw") < 1.0, "{report}");
    let others = ["web", "compile", "10gbit", "paper", "fixed50_"];
    let all = figures.keys().chain(ratios.keys());
    let wrong: Vec<_> = all.filter(|key| others.iter().any(|other| key.contains(other))).collect();
    assert!(wrong.is_empty(), "keys of what was not measured: {wrong:?}");
}

#[test]
#[ignore = "make soak"]
fn soak_a_benchmark_that_is_interrupted_leaves_no_host_behind() {
    let mut env = TestEnv::without_store();
    let place = a_place(&mut env);
    let mut running = Process::start(env.benchmark(&["replication", "--only", "failover"]));
    running.wait_for_error("failover 1");
    // The signal comes while a guest boots or is about to be protected.
    std::thread::sleep(Duration::from_secs(3));
    assert!(!within(&place).is_empty(), "{}", running.report());
    running.signal(rustix::process::Signal::INT);
    assert!(!running.wait().success());
    assert!(running.errors().contains("interrupted"), "{}", running.report());
    nothing_is_left_in(&place);
}

/// The directory for a benchmark's files, which appears in the environment of all that it starts.
fn a_place(env: &mut TestEnv) -> PathBuf {
    let place = env.path().join("place");
    std::fs::create_dir(&place).expect("make a directory");
    env.set("TMPDIR", &place.display().to_string());
    place
}

/// The command lines of the processes whose environment names the directory.
fn within(place: &Path) -> Vec<String> {
    let read = |path: PathBuf| {
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    };
    let told = |dir: &PathBuf| read(dir.join("environ")).contains(&*place.to_string_lossy());
    let all = std::fs::read_dir("/proc").expect("read /proc").flatten().map(|entry| entry.path());
    all.filter(told).map(|dir| read(dir.join("cmdline")).replace('\0', " ")).collect()
}

fn nothing_is_left_in(place: &Path) {
    assert_eq!(within(place), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(place).expect("list it").count(), 0, "files were left behind");
}

#[test]
#[ignore = "make soak"]
fn soak_firecracker_is_measured_beside_its_own_snapshots() {
    let guest = needs_firecracker!();
    let binary = guest.binary();
    let directory = Path::new(&binary).ancestors().nth(2).expect("the guest's directory");
    let directory = directory.display().to_string();
    let env = TestEnv::exclusive();
    let part = ["vmm", "--only", "firecracker_128mib", "--rounds", "1", "--plot", "vmm.svg"];
    let (report, _) = report(&env, &[&part[..], &["--firecracker-guest", &directory]].concat());
    let (figures, ratios) = (values(&report, "figures"), values(&report, "ratios"));
    for key in [
        "firecracker_pause_p50_ns",
        "firecracker_restore_p50_ns",
        "firecracker_lazy_restore_p50_ns",
        "firecracker_branch_20_ns",
        "firecracker_clone_ram_bytes",
        "firecracker_128mib_first_stored_p50_bytes",
    ] {
        assert!(figures[key].as_f64() > Some(0.0), "{key}: {report}");
    }
    for own in ["full", "diff"] {
        let figure = |key: &str| figures[&format!("firecracker_128mib_{key}_p50_ns")].as_f64();
        let expected = figure(own).zip(figure("pause")).map(|(own, pause)| own / pause);
        let ratio = ratios[&format!("firecracker_{own}_over_pause")].as_f64();
        assert_eq!(ratio, expected, "{own}: {report}");
    }
    assert!(figures.keys().all(|key| key.starts_with("firecracker_")), "{report}");
    assert!(env.path().join("vmm.svg").exists());
}

#[test]
fn what_a_benchmark_does_not_have_is_refused() {
    let env = TestEnv::new();
    refused(&env, &["vmm", "--only", "firecracker_2048mib"], 1, &["no part", "kvm_1024mib"]);
    let nowhere = ["vmm", "--only", "firecracker", "--firecracker-guest", "/nowhere"];
    if keyframe_tests::missing_kvm().is_none() {
        refused(&env, &nowhere, 1, &["no /nowhere", "guests/build firecracker"]);
    }
    refused(&env, &["pause", "--only", "20k,7k"], 1, &["no part 7k", "60k", "4gib"]);
    refused(&env, &["overhead", "--only", "1s"], 1, &["no part 1s", "compute_1s"]);
    refused(&env, &["restore", "--only", "lazy"], 1, &["restore has no --only"]);
    refused(&env, &["replay", "--only", "oracle"], 1, &["no part oracle", "memtrace", "redis"]);
    refused(&env, &["restore", "--qemu", "/nowhere"], 1, &["restore has no --qemu"]);
    refused(&env, &["evaluation", "--only", "3s"], 1, &["no part 3s", "bonnie", "500ms"]);
    refused(&env, &["pause", "--stop-after", "1m"], 1, &["pause has no --stop-after"]);
    refused(&env, &["evaluation", "--stop-after", "long"], 2, &["--stop-after"]);
    refused(&env, &["evaluation", "--stop-after", "0s", "--out", "none"], 1, &["0 of 45"]);
    refused(&env, &["replication", "--only", "100mbit"], 1, &["no part 100mbit", "10gbit", "sp"]);
    refused(&env, &["pause", "--seconds", "5"], 1, &["pause has no --seconds"]);
    refused(&env, &["replication", "--seconds", "1"], 2, &["--seconds"]);
    refused(&env, &["restore", "--out", "here"], 1, &["restore has no --out"]);
    refused(&env, &["pause", "--rounds", "0"], 2, &["--rounds"]);
    refused(&env, &["store", "--only", "oracle"], 1, &["no part oracle", "rocksdb", "flat_file"]);
    refused(&env, &["store", "--job", "{}"], 1, &["read the job"]);
    refused(&env, &["store", "--from", "/nowhere"], 10, &["keyframe init /nowhere"]);
    refused(&env, &["pause", "--keyframe", "/nowhere"], 1, &["no /nowhere", "--keyframe PATH"]);
    refused(&env, &["oracle"], 2, &["pause", "evaluation"]);
}

/// A short evaluation: one workload, two intervals; only the end of each recording is analysed.
#[test]
#[ignore = "make soak"]
fn soak_the_papers_figures_and_tables_are_written_and_agree() {
    let env = TestEnv::new();
    let (report, _) = report(
        &env,
        &["evaluation", "--quick", "--only", "500ms", "--out", "evaluation", "--quiet"],
    );
    let (figures, ratios) = (values(&report, "figures"), values(&report, "ratios"));
    let figure = |key: &str| {
        figures.get(key).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {key}: {report}"))
    };
    let run = "small_500ms";
    for key in [
        "dirty_pages",
        "dirty_sectors",
        "interval_instructions",
        "metadata_bytes",
        "total_bytes",
        "pause_ns",
        "encode_ns",
        "processing_ns",
        "immediate_pause_ns",
        "read_warm_ns",
        "read_cold_ns",
        "deferred_1_jobs_s",
    ] {
        assert!(figure(&format!("{run}_{key}")) > 0.0, "{run}_{key}: {report}");
    }
    // A recording with its analysis afterwards takes longer than the recording.
    assert!(
        figure(&format!("{run}_deferred_2_jobs_s")) > figure(&format!("{run}_recorded_s")),
        "{report}"
    );
    let speed_up = |key: &str| ratios[&format!("{run}_speed_up_{key}")].as_f64().unwrap();
    assert!(speed_up("1_nodes_simulated") > 0.0, "{report}");
    assert!(speed_up("16_nodes_simulated") >= speed_up("1_nodes_simulated"), "{report}");
    let missing = ratios[&format!("{run}_missing_over_ram")].as_f64().unwrap();
    assert!(missing > 0.0 && missing < 1.0, "{report}");
    let out = env.path().join("evaluation");
    let measurement = out.join("measurements/small-500ms-1.json");
    let written = std::fs::read(&measurement).expect("the measurement");
    let index = std::fs::read_to_string(out.join("report.md")).expect("the report");
    let links: Vec<&str> =
        index.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(
        links.len() > 40 && index.contains("21,710") && index.contains("*simulated*"),
        "{index}"
    );
    for link in links {
        let bytes = std::fs::read(out.join(link)).unwrap_or_else(|e| panic!("{link}: {e}"));
        if Path::new(link).extension().is_some_and(|end| end == "csv") {
            let text = String::from_utf8(bytes).expect("text");
            let mut lines = text.lines();
            let columns = lines.next().expect("a header").split(',').count();
            assert!(lines.clone().count() > 0, "{link} has no rows");
            for line in lines {
                assert_eq!(line.split(',').count(), columns, "{link}: {line}");
                assert!(!line.contains("NaN") && !line.contains("inf"), "{link}: {line}");
            }
        } else {
            assert!(!bytes.is_empty(), "{link}");
        }
    }
    // The same call again measures nothing, and a report of another program is refused.
    let args = ["evaluation", "--quick", "--only", "500ms", "--out", "evaluation"];
    let again = TestEnv::run_within(env.benchmark(&args), LIMIT);
    let told = String::from_utf8_lossy(&again.stderr);
    assert!(
        again.status.success() && told.contains("1 of 1 measurements are there already"),
        "{told}"
    );
    assert_eq!(std::fs::read(&measurement).expect("the measurement"), written);
    let text = String::from_utf8(written).expect("text");
    let begin = text.find("keyframe_blake3\":\"").expect("the program's hash") + 18;
    let other = format!("{}{}{}", &text[..begin], "0".repeat(64), &text[begin + 64..]);
    std::fs::write(&measurement, other).expect("write it");
    refused(&env, &args, 1, &["small-500ms-1.json", "another build of keyframe", "--out"]);
}
