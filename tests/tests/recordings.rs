//! Long recordings, of each kind of guest on both QEMUs: with dozens of intervals, of minutes, or of
//! a large guest. Each interval is exact in RAM and on disks. Most run in `make soak` and take half
//! an hour together.

use keyframe_tests::recording::recordable_guest;
use keyframe_tests::{
    Boot, NO_QEMU_10, Process, TestEnv, disks, echo, number, qemu_10, qemu_11, qemus, skip,
};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The length of a recording.
struct Length {
    runs: Duration,
    /// The time between checkpoints.
    every: &'static str,
    /// The least number of intervals whose ends are compared with a checkpoint.
    compared_min: usize,
}

const SHORT: Length = Length { runs: Duration::from_secs(3), every: "500ms", compared_min: 4 };
const INTERVALS: Length =
    Length { runs: Duration::from_secs(16), every: "400ms", compared_min: 30 };
const DATABASES: Length = Length { runs: Duration::from_mins(5), every: "1s", compared_min: 100 };
const MINUTES: Length = Length { runs: Duration::from_mins(5), every: "5s", compared_min: 50 };

/// How long a guest may take until it is ready: databases fill their tables first.
const READY_WITHIN: Duration = Duration::from_mins(10);

/// Records `boot` for a `length` after its guest is ready, and verifies the recording.
fn is_exact_at_length(env: &TestEnv, boot: &Boot, length: &Length) {
    is_line_exact_at_length(env, &boot.command(), length);
}

/// As [`is_exact_at_length`], of a guest with the command line `line`.
fn is_line_exact_at_length(env: &TestEnv, line: &[String], length: &Length) {
    let mut command =
        env.command(&["record", "--out", "R", "--checkpoint-every", length.every, "--"]);
    command.args(line);
    let mut vm = Process::start(command);
    let is_ready = |vm: &Process| vm.lines().iter().any(|line| line.contains("KF READY"));
    let ready = vm.wait_within(READY_WITHIN, |vm| is_ready(vm).then_some(()));
    assert!(ready.is_some(), "{}", vm.report());
    std::thread::sleep(length.runs);
    // A slow machine needs longer for its checkpoints. The interval after the last one has none to
    // be compared with.
    let folder = env.path().join("R/store/checkpoints");
    let there = || std::fs::read_dir(&folder).map_or(0, Iterator::count);
    let enough = vm.wait_until(|_| (there() >= length.compared_min + 2).then_some(()));
    assert!(enough.is_some(), "{} checkpoints; {}", there(), vm.report());
    vm.signal(Signal::INT);
    // On a busy machine a checkpoint may fail. The next one holds its pages.
    assert!(matches!(vm.wait().code(), Some(0 | 3)), "{}", vm.report());
    // Not `TestEnv::run`, whose limit is too short for this command.
    let output = env.command(&["verify", "R", "--json"]).output().expect("run keyframe");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let all = report["intervals"].as_array().expect("intervals");
    let compared = all.iter().filter(|one| !one["compared_with"].is_null()).count();
    println!("{}: {} intervals, {compared} compared", line[0], all.len());
    let wrong: Vec<&Value> = all.iter().filter(|one| one["exact"] != true).collect();
    assert!(wrong.is_empty() && output.status.success(), "{wrong:#?}");
    assert!(compared >= length.compared_min, "{compared} of {}", number(&report, "instructions"));
}

fn with_disk(env: &TestEnv, boot: Boot) -> Boot {
    boot.with(&disks::as_strs(&disks::virtio_disk(&disks::numbered_image(env), "raw")))
}

#[test]
#[ignore = "make soak"]
fn soak_without_a_disk() {
    for qemu in qemus() {
        for work in ["compute", "hash+dirty kf.mib=12"] {
            is_exact_at_length(
                &TestEnv::without_store(),
                &recordable_guest(&qemu.path, work),
                &INTERVALS,
            );
        }
    }
}

#[test]
#[ignore = "make soak"]
fn soak_with_a_disk() {
    for qemu in qemus() {
        let env = TestEnv::without_store();
        is_exact_at_length(
            &env,
            &with_disk(&env, recordable_guest(&qemu.path, "journal")),
            &INTERVALS,
        );
    }
}

/// Records a guest with virtio-net, on QEMU 10 and 11: `record` refuses virtio-net on the
/// distribution's, whose replays of it do not end.
fn with_a_network(length: &Length) {
    let qemus: Vec<_> = qemu_10().into_iter().chain(qemu_11()).collect();
    if qemus.is_empty() {
        skip!("{NO_QEMU_10}");
    }
    for qemu in qemus {
        let boot = recordable_guest(&qemu.path, &format!("net kf.net=10.0.2.2:{}", echo()));
        let card = ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile="];
        is_exact_at_length(&TestEnv::without_store(), &boot.with(&card), length);
    }
}

#[test]
fn a_network_replays_exactly() {
    with_a_network(&SHORT);
}

#[test]
#[ignore = "make soak"]
fn soak_with_a_network() {
    with_a_network(&INTERVALS);
}

#[test]
#[ignore = "make soak"]
fn soak_for_minutes_with_a_large_guest() {
    for qemu in qemus() {
        let env = TestEnv::without_store();
        let boot = with_disk(&env, recordable_guest(&qemu.path, "journal+hash kf.hash.mib=256"));
        is_exact_at_length(&env, &Boot { mem_mib: 1024, ..boot }, &MINUTES);
    }
}

/// PostgreSQL, Redis and SQLite at work in the real guest: their results depend on floating point
/// arithmetic, timers and disks.
#[test]
#[ignore = "make soak"]
fn soak_databases_at_work() {
    let guests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guests");
    for qemu in qemus() {
        let env = TestEnv::without_store();
        let job = env.path().join("databases.sh");
        std::fs::write(&job, include_str!("recordings/databases.sh")).expect("the job");
        let mut print = Command::new(guests.join("real/run.sh"));
        print.args(["--print", "--mem", "1G", "--smp", "1", "--qemu", &qemu.path, "--job"]);
        let output = print.arg(&job).output().expect("run real/run.sh");
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(3) {
            skip!("the real guest cannot be built here: {said}");
        }
        assert!(output.status.success(), "{said}");
        let line = String::from_utf8_lossy(&output.stdout);
        let line: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        is_line_exact_at_length(&env, &line, &DATABASES);
    }
}
