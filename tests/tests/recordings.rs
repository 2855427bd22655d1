//! Long recordings, of each kind of guest on both QEMUs: with dozens of intervals, of minutes, or of
//! a large guest. Each interval is exact in RAM and on disks. Most run in `make soak` and take half
//! an hour together.

use keyframe_tests::recording::recordable_guest;
use keyframe_tests::{
    Boot, NO_QEMU_10, Process, TestEnv, disks, echo, number, qemu_10, qemus, skip,
};
use rustix::process::Signal;
use serde_json::Value;
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
const MINUTES: Length = Length { runs: Duration::from_mins(5), every: "5s", compared_min: 50 };

/// Records `boot` for a `length` after its guest is ready, and verifies the recording.
fn is_exact_at_length(env: &TestEnv, boot: &Boot, length: &Length) {
    let mut command =
        env.command(&["record", "--out", "R", "--checkpoint-every", length.every, "--"]);
    command.args(boot.command());
    let mut vm = Process::start(command);
    vm.wait_for("KF READY");
    std::thread::sleep(length.runs);
    // A slow machine needs longer for its checkpoints. The interval after the last one has none to
    // be compared with.
    let folder = env.path().join("R/store/checkpoints");
    let there = || std::fs::read_dir(&folder).map_or(0, Iterator::count);
    let enough = vm.wait_until(|_| (there() >= length.compared_min + 2).then_some(()));
    assert!(enough.is_some(), "{} checkpoints; {}", there(), vm.report());
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
    // Not `TestEnv::run`, whose limit is too short for this command.
    let output = env.command(&["verify", "R", "--json"]).output().expect("run keyframe");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let all = report["intervals"].as_array().expect("intervals");
    let compared = all.iter().filter(|one| !one["compared_with"].is_null()).count();
    println!("{}: {} intervals, {compared} compared", boot.qemu, all.len());
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

/// Records a guest with virtio-net, on QEMU 10: `record` refuses virtio-net on the distribution's,
/// whose replays of it do not end.
fn with_a_network(length: &Length) {
    let Some(qemu) = qemu_10() else { skip!("{NO_QEMU_10}") };
    let boot = recordable_guest(&qemu.path, &format!("net kf.net=10.0.2.2:{}", echo()));
    let card = ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile="];
    is_exact_at_length(&TestEnv::without_store(), &boot.with(&card), length);
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
