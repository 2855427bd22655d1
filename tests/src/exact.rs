//! Exactness as the tests prove it: each checkpoint against a full copy of RAM from the same pause,
//! and the live RAM of a restored VM against that copy.

use crate::{Bench, Boot, Process, differing_pages, live_ram, number};

/// Takes `count` audited checkpoints of `boot` under load with `options`, and stops the run, which
/// must end well. Returns the run, and the number of the newest checkpoint but one.
pub fn audited(bench: &Bench, boot: &Boot, options: &[&str], count: usize) -> (Process, String) {
    let mut all = vec!["--name", "guest", "--audit", "audit"];
    all.extend(options);
    let mut run = bench.start(&all, boot);
    run.wait_for("KF READY");
    let mark = bench.list().len();
    let taken = run.wait_until(|_| (bench.list().len() >= mark + count).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    bench.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    // The audit compares every checkpoint with its copy, and fails the run where one differs.
    assert!(exit.success(), "{exit}: {}", run.report());
    assert_no_errors(&run);
    let list = bench.list();
    (run, number(&list[list.len() - 2], "id").to_string())
}

/// Restores checkpoint `id`, paused, and compares its live RAM with the audit's copy.
pub fn assert_restores_exactly(bench: &Bench, id: &str) {
    assert_restores_exactly_with(bench, id, &[]);
}

/// The pid that `keyframe restore` tells.
pub fn restored_pid(restored: &Process) -> u32 {
    let errors = restored.errors();
    let pid =
        errors.rsplit_once("(QEMU ").and_then(|(_, rest)| rest.split(')').next()?.parse().ok());
    pid.expect("the pid of the restored QEMU")
}

/// The same with options of `keyframe restore`.
pub fn assert_restores_exactly_with(bench: &Bench, id: &str, options: &[&str]) {
    let qmp = bench.path().join(format!("restored-{id}.sock"));
    let monitor = format!("unix:{},server=on,wait=off", qmp.display());
    let mut all = options.to_vec();
    all.extend(["--paused", "--", "-qmp", &monitor]);
    let mut restored = bench.restore(id, &all);
    restored.wait_for_error("is paused after");
    let pid = restored_pid(&restored);
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), id]);
    let blocks = shown["ram"].as_array().expect("RAM blocks");
    let names: Vec<String> =
        blocks.iter().filter_map(|b| Some(b["name"].as_str()?.to_owned())).collect();
    let live = live_ram(pid, &qmp, &names);
    let copy = std::fs::read(bench.path().join("audit").join(format!("{id}.ram")))
        .expect("the audit's copy");
    let differing = differing_pages(&live, &copy);
    assert!(
        differing.is_empty(),
        "checkpoint {id}: {} of {} pages differ after the restore, first {:?}",
        differing.len(),
        live.len() / 4096,
        &differing[..differing.len().min(8)]
    );
}

/// The guest, which checks itself, has found nothing wrong.
pub fn assert_no_errors(vm: &Process) {
    let bad: Vec<_> = vm
        .lines()
        .into_iter()
        .filter(|l| l.contains("KF ERROR") || (l.contains("bad=") && !l.ends_with("bad=0")))
        .collect();
    assert!(bad.is_empty(), "the guest found errors: {bad:?}");
}
