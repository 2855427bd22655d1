//! Recordings: how tests make and verify them. The recording is the directory `R` of the test.

use crate::{Boot, Process, TestEnv, children};
use rustix::process::{Pid, Signal};
use serde_json::Value;

/// Starts `keyframe record` of `boot` into the directory `R`.
pub fn record(env: &TestEnv, options: &[&str], boot: &Boot) -> Process {
    let mut command = env.command(&["record", "--out", "R"]);
    command.args(options).arg("--").args(boot.command());
    Process::start(command)
}

/// A guest that can be recorded: a q35 with the workload `work`.
pub fn recordable_guest(qemu: &str, work: &str) -> Boot {
    Boot { qemu: qemu.into(), machine: "q35".into(), mem_mib: 96, ..Boot::new(work) }
}

/// Waits until the recording has this number of checkpoints, and ends it.
pub fn end_after(env: &TestEnv, vm: &mut Process, checkpoints: usize) {
    let store = env.path().join("R/store");
    let enough = vm.wait_until(|_| {
        let there = std::fs::read_dir(store.join("checkpoints")).map_or(0, Iterator::count);
        (there >= checkpoints).then_some(())
    });
    assert!(enough.is_some(), "{}", vm.report());
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// Waits until the guest has printed `times` reports of its journal, one for each second of its
/// clock.
pub fn wait_for_journal(vm: &mut Process, times: usize) {
    let reported = vm.wait_until(|vm| {
        let reports = vm.lines().iter().filter(|line| line.contains("journal written=")).count();
        (reports >= times).then_some(())
    });
    assert!(reported.is_some(), "the guest does not write; {}", vm.report());
}

/// Runs `keyframe verify` on `R`, which must be exact, and returns its report.
pub fn verified(env: &TestEnv) -> Value {
    let report = env.json(&["verify", "R", "--json"]);
    assert_eq!(report["exact"], true, "{report:#}");
    report
}

/// The intervals of a report.
pub fn intervals(report: &Value) -> &[Value] {
    report["intervals"].as_array().map_or(&[], Vec::as_slice)
}

/// The QEMUs that process `pid` has started.
pub fn qemu_children(pid: u32) -> Vec<Pid> {
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let qemus = children(pid).into_iter().filter(|pid| name(*pid).starts_with("qemu"));
    qemus.filter_map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}
