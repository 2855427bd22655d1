//! Recordings at length: of every kind and both QEMUs, with dozens of intervals, minutes or a large
//! guest, each interval exact in RAM and on disks. All but a short one are for `make soak`:
//! together they take half an hour.

use keyframe_tests::{Bench, Boot, Process, Qemu, disks, echo, number, qemus};
use rustix::process::Signal;
use serde_json::Value;
use std::time::Duration;

/// A recording: how long, with a checkpoint how often, and how many exact ends of intervals it must
/// have at least.
struct Length {
    runs: Duration,
    every: &'static str,
    compared_min: usize,
}

const SHORT: Length = Length { runs: Duration::from_secs(3), every: "500ms", compared_min: 4 };
const INTERVALS: Length =
    Length { runs: Duration::from_secs(16), every: "400ms", compared_min: 30 };
const MINUTES: Length = Length { runs: Duration::from_mins(5), every: "5s", compared_min: 50 };

fn guest(qemu: &Qemu, work: &str) -> Boot {
    Boot { qemu: qemu.path.clone(), machine: "q35".into(), mem_mib: 96, ..Boot::new(work) }
}

/// Records `boot` for so long once its guest is ready, and verifies all of it.
fn exact_at_length(bench: &Bench, boot: &Boot, length: &Length) {
    let mut command =
        bench.command(&["record", "--out", "R", "--checkpoint-every", length.every, "--"]);
    command.args(boot.command());
    let mut vm = Process::start(command);
    vm.wait_for("KF READY");
    std::thread::sleep(length.runs);
    // A machine that is slow needs longer for them; what follows the last one is compared with
    // none.
    let folder = bench.path().join("R/store/checkpoints");
    let there = || std::fs::read_dir(&folder).map_or(0, Iterator::count);
    let enough = vm.wait_until(|_| (there() >= length.compared_min + 2).then_some(()));
    assert!(enough.is_some(), "{} checkpoints; {}", there(), vm.report());
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
    // Not by `Bench::run`, which waits for as long as a command of another test may take.
    let output = bench.command(&["verify", "R", "--json"]).output().expect("run keyframe");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let all = report["intervals"].as_array().expect("intervals");
    let compared = all.iter().filter(|one| !one["compared_with"].is_null()).count();
    println!("{}: {} intervals, {compared} compared", boot.qemu, all.len());
    let wrong: Vec<&Value> = all.iter().filter(|one| one["exact"] != true).collect();
    assert!(wrong.is_empty() && output.status.success(), "{wrong:#?}");
    assert!(compared >= length.compared_min, "{compared} of {}", number(&report, "instructions"));
}

fn with_disk(bench: &Bench, boot: Boot) -> Boot {
    boot.with(&disks::words(&disks::virtio(&disks::image(bench), "raw")))
}

#[test]
#[ignore = "make soak"]
fn soak_without_a_disk() {
    for qemu in qemus() {
        for work in ["compute", "hash+dirty kf.mib=12"] {
            exact_at_length(&Bench::without_store(), &guest(&qemu, work), &INTERVALS);
        }
    }
}

#[test]
#[ignore = "make soak"]
fn soak_with_a_disk() {
    for qemu in qemus() {
        let bench = Bench::without_store();
        exact_at_length(&bench, &with_disk(&bench, guest(&qemu, "journal")), &INTERVALS);
    }
}

/// With virtio-net, whose replays do not end on the distribution's QEMU: `record` refuses it there.
fn with_a_network(length: &Length) {
    let port = echo();
    for qemu in qemus().iter().filter(|qemu| qemu.label != "distribution") {
        let boot = guest(qemu, &format!("net kf.net=10.0.2.2:{port}"));
        let card = ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile="];
        exact_at_length(&Bench::without_store(), &boot.with(&card), length);
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
        let bench = Bench::without_store();
        let boot = with_disk(&bench, guest(&qemu, "journal+hash kf.hash.mib=256"));
        exact_at_length(&bench, &Boot { mem_mib: 1024, ..boot }, &MINUTES);
    }
}
